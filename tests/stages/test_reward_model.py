"""A reward model: the right loss however pairs are packed, runs that resume, and a folder that others can use."""

from __future__ import annotations

import csv
import gzip
import json
import math
import os
import signal
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from scoring import PAIRS, batch_of, by_hand, gradients, journal, made
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import gspo
from gspo import settings
from gspo.batch import answers_batch
from gspo.errors import InputError, OutOfMemoryError, RunError
from gspo.models import tiny
from gspo.place import resumed_run
from gspo.stage_config import RewardRun
from gspo.stages.calibration import reliability
from gspo.stages.reward_build import build
from gspo.stages.reward_model import RewardJob, planted
from gspo.stages.stage import Result, tune

# ------------------------------------------------------------------------------ the loss


@pytest.mark.parametrize(("margin", "centring"), [(None, 0.0), ("gap", 0.03)])
# transformers takes a router's softmax in float32 whatever the model's type.
@pytest.mark.parametrize(("name", "rounding"), [("random-dense", 1e-12), ("random-moe", 1e-7)])
def test_loss_and_gradient_are_those_of_one_sequence_at_a_time(
    name: str, rounding: float, margin: str | None, centring: float, tmp_path: Path
) -> None:
    job = made(tmp_path / "run", model={"name": name}, data={"margin": margin}, centring=centring)
    loss, found = gradients(job, *batch_of(job, 40))
    expected, gradient = by_hand(job, PAIRS, margin)
    assert loss == pytest.approx(expected, rel=1e3 * rounding)
    assert {key for key in found if found[key].any()} == {key for key in gradient if gradient[key].any()}
    for key in found:
        torch.testing.assert_close(found[key], gradient[key], rtol=1e3 * rounding, atol=rounding)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> RewardJob:
    return made(tmp_path_factory.mktemp("job") / "run", data={"margin": "gap"}, centring=0.1)


@hypothesis_settings(deadline=None, max_examples=12)
@given(budget=st.integers(1, 120), order=st.permutations(range(4)))
def test_neither_micro_batches_nor_order_change_the_gradient(job: RewardJob, budget: int, order: list[int]) -> None:
    loss, whole = gradients(job, *batch_of(job, 1000))
    other_loss, other = gradients(job, *batch_of(job, budget, order))
    assert other_loss == pytest.approx(loss, rel=1e-12)
    for key in whole:
        torch.testing.assert_close(other[key], whole[key], rtol=1e-9, atol=1e-12)


def test_what_a_pair_shares_stands_once_and_a_pair_is_never_cut(job: RewardJob) -> None:
    whole, _ = batch_of(job, 1000)
    sequences = [[f"{p['prompt']}\n\n{p[key]}" for key in ("chosen", "rejected")] for p in PAIRS]
    trees = [sequences[0] + sequences[2], sequences[1], sequences[3]]
    shared = [len([0 for column in takewhile(lambda c: len(set(c)) == 1, zip(*each, strict=False))]) for each in trees]
    assert shared[2] == len("x\n\ny"), "the chosen answer is the beginning of the rejected one"
    packed = sum(n + sum(len(text) - n for text in each) for n, each in zip(shared, trees, strict=True))
    assert len(whole.tokens_T) == packed
    small, _ = batch_of(job, 1)
    assert [micro.sequences for micro in small.plan] == [2] * 4


def test_memory_that_ends_is_met_with_smaller_micro_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = made(tmp_path / "run")
    monkeypatch.setattr(job.learner, "update", lambda *_: (_ for _ in ()).throw(OutOfMemoryError("out of memory")))
    with pytest.raises(RunError, match="2 answers at a time"):
        job.update()


def test_a_language_model_starts_with_a_score_of_zero_for_all(tmp_path: Path) -> None:
    job = build(
        settings.check_as(
            RewardRun,
            {"dir": str(tmp_path / "run"), "threads": 1, "model": "random-dense", "data": {"template": "none"}},
            "test",
        ),
        rows=PAIRS,
        eval_rows=PAIRS,
    )
    found = job.evaluate()
    assert found["eval/loss"] == pytest.approx(math.log(2))
    assert (found["eval/accuracy"], found["eval/calibration_error"]) == (0.5, 0.0)


@pytest.mark.parametrize(("margin", "centring"), [(None, 0.0), ("gap", 0.03)])
def test_the_held_out_loss_is_the_one_that_is_trained_on(margin: str | None, centring: float, tmp_path: Path) -> None:
    job = made(tmp_path / "run", eval_rows=PAIRS[::-1], data={"margin": margin}, centring=centring)
    found = job.evaluate()["eval/loss"]
    expected, _ = by_hand(job, PAIRS, margin)
    assert found == pytest.approx(expected, rel=1e-9)


# ------------------------------------------------------------------------------ calibration


def test_reliability_by_hand() -> None:
    chosen, rejected = np.array([2.0, 0.0, 3.0, 0.0, 1.0]), np.array([0.0, 2.0, 1.0, 0.0, 0.0])
    found = reliability(chosen, rejected)
    assert found.accuracy.value == pytest.approx((1 + 0 + 1 + 0.5 + 1) / 5)
    two, one = 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(-1))
    assert [b.pairs for b in found.bins] == [1, 1, 3]
    assert [b.certainty for b in found.bins] == pytest.approx([0.5, one, two])
    assert [b.right for b in found.bins] == pytest.approx([0.5, 1.0, 2 / 3])
    assert found.error == pytest.approx((0.0 + (1 - one) + 3 * (two - 2 / 3)) / 5)
    assert 0.0 <= found.accuracy.low < found.accuracy.value < found.accuracy.high <= 1.0


# ------------------------------------------------------------------------------ pairs


TURNS = "{% for m in messages %}{{ m.role }}:{{ m.content }}<eos>\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"


def with_template(folder: Path, template: str) -> str:
    from gspo.models.tiny import tiny_dense

    model, tokenizer = tiny_dense()
    tokenizer.chat_template = template
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def said(*parts: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, _, text in (part.partition(":") for part in parts)]


COLUMNS: list[dict[str, Any]] = [
    {"prompt": "a", "chosen": "b", "rejected": "c"},
    {"prompt": said("user:a"), "chosen": said("assistant:b"), "rejected": said("assistant:c")},
    {"prompt": "a", "chosen": said("user:a", "assistant:b"), "rejected": said("user:a", "assistant:c")},
    {"chosen": said("user:a", "assistant:b"), "rejected": said("user:a", "assistant:c")},
]


@pytest.mark.parametrize("row", COLUMNS, ids=["text", "messages", "conversations", "implicit"])
def test_the_usual_columns_mean_the_same(row: dict[str, Any], tmp_path: Path) -> None:
    name = with_template(tmp_path / "model", TURNS)
    job = made(tmp_path / "run", [row], model={"name": name}, data={"template": "auto"})
    text = [str(job.policy.tokenizer.decode(ids)) for ids in (job.pairs[0].chosen, job.pairs[0].rejected)]
    assert text == ["user:a<eos>\nassistant:b<eos>\n", "user:a<eos>\nassistant:c<eos>\n"]


BAD: list[tuple[list[dict[str, Any]], dict[str, Any], list[str]]] = [
    ([{"prompt": "a", "chosen": "b"}], {}, ["no column 'rejected'"]),
    ([*PAIRS, {"prompt": "a", "chosen": "b", "rejected": "b"}], {}, ["row 4", "identical"]),
    ([*PAIRS, {"prompt": "a", "chosen": " ", "rejected": "b"}], {}, ["row 4", "the answer is empty"]),
    ([*PAIRS, {"prompt": "a", "chosen": None, "rejected": "b"}], {}, ["row 4", "the answer is null"]),
    ([*PAIRS, {"prompt": None, "chosen": "a", "rejected": "b"}], {}, ["row 4", "the prompt is missing"]),
    ([*PAIRS, {"prompt": "", "chosen": "a", "rejected": "b"}], {}, ["row 4", "the prompt is empty"]),
    ([{"chosen": "a", "rejected": "b"}], {}, ["row 0", "the prompt is missing", "'prompt'"]),
    ([{"chosen": said("user:a", "assistant:b"), "rejected": said("user:c", "assistant:d")}], {}, ["row 0", "missing"]),
    ([{"prompt": "z", "chosen": said("user:a", "assistant:b"), "rejected": said("user:a", "assistant:c")}], {}, ["row 0", "not those of the prompt"]),
    ([{"prompt": "a", "chosen": said("user:a"), "rejected": said("user:b")}], {}, ["row 0", "no assistant's turn"]),
    ([{"prompt": "a", "chosen": "b", "rejected": said("assistant:c")}], {}, ["row 0", "one answer is text"]),
    ([{**PAIRS[0], "gap": -1}], {"margin": "gap"}, ["row 0", "below 0"]),
    ([{**PAIRS[0], "gap": "much"}], {"margin": "gap"}, ["row 0", "a margin is a number"]),
    ([{"prompt": "a", "chosen": "b", "rejected": "B"}], {}, ["row 0", "the same after"]),
    ([{"prompt": "a", "chosen": "b" * 2050, "rejected": "c"}], {}, ["row 0", "exceed the model's 2048 positions"]),
    ([*PAIRS, {"prompt": "a", "chosen": "b", "rejected": "c" * 30}], {"max_answer_tokens": 20}, ["row 4 has 32", "too_long=drop"]),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "data", "parts"), BAD, ids=[f"{i}-{parts[-1]}" for i, (*_, parts) in enumerate(BAD)])
def test_bad_pairs_are_refused_by_row(
    rows: list[dict[str, Any]], data: dict[str, Any], parts: list[str], tmp_path: Path
) -> None:
    with pytest.raises(InputError) as caught:
        made(tmp_path / "run", rows, data=data)
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)
    assert not (tmp_path / "run").exists(), "nothing is written"


def test_a_template_without_an_assistants_turn_is_refused(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% if m.role == 'user' %}u:{{ m.content }}\n{% endif %}{% endfor %}"
    name = with_template(tmp_path / "model", template)
    with pytest.raises(InputError, match=r"row 0, row 1, row 2, row 3.*the template has no turn of the assistant"):
        made(tmp_path / "run", model={"name": name}, data={"template": "auto"})


# ------------------------------------------------------------------------------ runs


LETTERS: dict[str, Any] = dict(
    model={"name": "random-dense", "dtype": "float32"},
    data={"source": "preferences:3", "limit": 64, "template": "none"},
    batch_size=8,
    optimizer={"learning_rate": 3e-3, "schedule": "linear", "warmup_updates": 3},
    checkpoint={"every": 2, "keep": 3},
    eval={"every": 3, "limit": 16},
)


def run(folder: Path, **keys: Any) -> Result:
    return tune(build(settings.check_as(RewardRun, {"dir": str(folder), "threads": 1, **LETTERS, **keys}, "test")))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_is_the_run_that_was_not_interrupted(dtype: str, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    keys = {"steps": 10, "model": {"name": "random-dense", "dtype": dtype}}
    run(whole, **keys)
    run(cut, **keys)
    for path in (cut / "checkpoints" / "00000010").iterdir():
        path.unlink()
    (cut / "checkpoints" / "00000010").rmdir()
    again = tune(build(resumed_run(RewardRun, cut, []), resume=cut))
    assert again.step == 10
    assert journal(cut) == journal(whole)
    for name in ("model.safetensors", "optimizer.safetensors"):
        a, b = (load_file(folder / "checkpoints" / "00000010" / name) for folder in (whole, cut))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a), name
    assert load_file(whole / "checkpoints" / "00000010" / "model.safetensors")["score.weight"].any()


def test_a_signal_ends_the_run_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = build(
        settings.check_as(RewardRun, {"dir": str(tmp_path / "run"), "threads": 1, **LETTERS, "steps": 9}, "test")
    )
    record = job.record

    def interrupted(step: int, done: Any) -> Any:
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return record(step, done)

    monkeypatch.setattr(job, "record", interrupted)
    result = tune(job)
    assert (result.step, result.exit_code) == (5, 143)
    assert (tmp_path / "run" / "checkpoints" / "00000005" / "model.safetensors").is_file()


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learned") / "run"
    data = {"source": "preferences:3", "limit": 512, "template": "none"}
    keys = {
        "optimizer": {"learning_rate": 1e-2},
        "batch_size": 16,
        "eval": {"every": 50, "limit": 128},
        "checkpoint": {"every": 0},
    }
    result = run(folder, steps=50, model={"name": "tiny-dense", "dtype": "float32"}, data=data, centring=0.01, **keys)
    assert result.gains["accuracy"].start == 0.5
    assert result.gains["accuracy"].last is not None
    assert result.gains["accuracy"].last > 0.7
    return folder


def test_the_held_out_pairs_are_told_apart_and_the_calibration_is_written(learned: Path) -> None:
    lines = journal(learned)
    assert lines[0]["eval/start/loss"] == pytest.approx(math.log(2))
    last = lines[-1]
    assert last["eval/accuracy_low"] < last["eval/accuracy"] < last["eval/accuracy_high"]
    table = list(csv.DictReader((learned / "calibration.csv").open()))
    assert sum(int(row["pairs"]) for row in table) == last["eval/pairs"] == 128
    right = sum(int(row["pairs"]) * float(row["right"]) for row in table)
    assert right / 128 == pytest.approx(last["eval/accuracy"])
    assert (learned / "calibration.svg").read_text().startswith('<svg xmlns="http://www.w3.org/2000/svg"')


def test_transformers_loads_it_and_scores_as_it_was_measured(learned: Path) -> None:
    job = build(resumed_run(RewardRun, learned, ["steps=51"]), resume=learned)
    model = AutoModelForSequenceClassification.from_pretrained(learned / "checkpoints" / "00000050").eval()
    tokenizer = AutoTokenizer.from_pretrained(learned / "checkpoints" / "00000050")
    assert model.config.num_labels == 1
    assert tokenizer.chat_template is None, "data.template=none: what is judged is written as what was learned"
    texts = [
        f"{row.prompt.columns['prompt']}\n\n{row.prompt.columns[key]}"
        for row in job.held_out[:16]
        for key in ("chosen", "rejected")
    ]
    with torch.inference_mode():
        found = model(**tokenizer(texts, return_tensors="pt", padding=True)).logits[:, 0]
    batch = answers_batch(planted(list(enumerate(job.held_out[:16]))).groups, 4096, 2)
    ours = job.learner.logprobs(job.learner.model, batch)
    torch.testing.assert_close(found, ours, rtol=1e-4, atol=1e-4)


def test_a_policy_with_another_tokenizer_is_rewarded_by_it(
    learned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best, other = str(learned / "best"), tmp_path / "policy"
    monkeypatch.setattr(tiny, "_CHARACTERS", tiny._CHARACTERS[::-1])
    for part in tiny.tiny_dense():
        part.save_pretrained(other)
    rules = [{"function": f"reward_model:{best}"}, {"function": "matching", "weight": 0}]
    data = {"source": "preferences:3", "template": "none", "limit": 16}
    keys = {"prompts_per_step": 4, "group_size": 4, "threads": 1, "sampling": {"max_new_tokens": 6}}
    result = gspo.train("tiny", dir=str(tmp_path / "run"), steps=1, model=str(other), data=data, reward=rules, **keys)
    model = AutoModelForSequenceClassification.from_pretrained(best).eval()
    reader = AutoTokenizer.from_pretrained(best)
    assert reader("a")["input_ids"] != AutoTokenizer.from_pretrained(other)("a")["input_ids"]
    with gzip.open(result.folder / "rollouts" / "00000001.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    for row in rows[:6]:
        text = f"{row['columns']['prompt']}\n\n{row['text']}"
        with torch.inference_mode():
            expected = float(model(**reader(text, return_tensors="pt")).logits)
        assert row["reward"] == row["reward_parts"]["reward_model"] == pytest.approx(expected, abs=1e-4)
        assert 0 <= row["reward_parts"]["matching"] <= 1
    line = journal(result.folder)[0]
    assert line["reward/mean"] == pytest.approx(line["reward/reward_model/mean"])
    assert line["reward/matching/mean"] is not None, "the true reward is journalled beside the learned one"


# ------------------------------------------------------------------------------ the command


@pytest.mark.parametrize("model", ["random-dense", "random-moe"])
def test_the_command_ends_with_what_was_gained_goes_on_and_is_exported(
    model: str, tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    words = [f"dir={tmp_path / 'run'}", "steps=2", "batch_size=4", "data=preferences:3", "data.limit=16"]
    code, out, err = command("reward", "letters", *words, "eval.limit=8", f"model={model}", "eval.every=2")
    assert code == 0, err
    assert out.splitlines()[-2].startswith("held-out loss: 0.693")
    assert out.splitlines()[-1].startswith("held-out accuracy: 0.500 -> ")
    code, out, err = command("reward", "--resume", str(tmp_path / "run"), "steps=3")
    assert code == 0, err
    assert "step 3/3" in out
    code, out, err = command("export", str(tmp_path / "run"), str(tmp_path / "out"))
    assert code == 0, err
    weights = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").state_dict()
    checkpoint = tmp_path / "run" / "checkpoints" / "00000003"
    trained = AutoModelForSequenceClassification.from_pretrained(checkpoint).state_dict()
    assert trained["score.weight"].any()
    assert all(torch.equal(weights[key], trained[key]) for key in trained)
    code, out, err = command("sft", "--resume", str(tmp_path / "run"), "steps=4")
    assert code == 2
    assert "gspo reward --resume" in err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["steps=3", "epochs=1"], "steps and epochs"),
        (["eval.samples=2"], "eval.samples: no such key"),
        (["data.chosn=a"], "did you mean 'data.chosen'"),
        (["data=preferences:99"], "preferences:N"),
    ],
)
def test_a_bad_word_ends_with_2(
    words: list[str], part: str, tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = command("reward", "letters", f"dir={tmp_path / 'run'}", *words)
    assert code == 2, out + err
    assert part in err

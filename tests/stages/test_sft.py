"""Supervised fine-tuning: the right loss on the right tokens however it is packed, runs that resume, and learning."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import norms
from gspo import config, settings
from gspo.batch import Batch, answers_batch
from gspo.errors import InputError, OutOfMemoryError, RunError
from gspo.place import resumed_run
from gspo.stage_config import Sft
from gspo.stages.sft import SftJob, grouped, likelihood
from gspo.stages.sft_build import build
from gspo.stages.stage import Result, tune

ROWS = [
    {"prompt": "say one", "answer": "one"},
    {"prompt": "say two", "answer": "two, too"},
    {"prompt": "say one", "answer": "a longer one"},
    {"prompt": "x", "answer": "y"},
    {"prompt": "say one", "answer": "1"},
]
"""One prompt stands three times, so that there are trees; lengths differ."""


def made(folder: Path, rows: list[dict[str, Any]] | None = None, **keys: Any) -> SftJob:
    """A job on the two-layer Llama, in float64 without a chat template unless told otherwise."""
    model = {"name": "random-dense", "dtype": "float64"} | keys.pop("model", {})
    data = {"source": "python", "template": "none"} | keys.pop("data", {})
    tree = {"dir": str(folder), "threads": 1, "batch_size": len(ROWS), "steps": 1, "model": model, "data": data, **keys}
    job = build(settings.check_as(Sft, tree, "test"), rows=rows or ROWS)
    if model["dtype"] == "float64":
        norms.in_float64(job.policy.model)
    return job


def batch_of(job: SftJob, budget: int, order: list[int] | None = None) -> Batch:
    answers = [job.answers[i] for i in order or sorted(job.answers)]
    return answers_batch(grouped(list(enumerate(answers))), budget)


def gradients(job: SftJob, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient, before the optimizer: Adam would hide a constant scale."""
    sums = job.learner._accumulate(job.learner.placed(batch), likelihood)
    found = {name: p.grad.clone() for name, p in job.learner.masters.items() if p.grad is not None}
    job.learner.optimizer.zero_grad()
    return sums.loss, found


def by_hand(job: SftJob, rows: list[dict[str, str]]) -> tuple[float, dict[str, Tensor]]:
    """One sequence at a time by the model's own logits: none of our packing, head, loss or rendering."""
    model, tokenizer = job.policy.model, job.policy.tokenizer
    model.set_attn_implementation("sdpa")  # eager makes its softmax in float32
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        prompt = tokenizer(row["prompt"])["input_ids"]
        answer = [*tokenizer(row["answer"])["input_ids"], tokenizer.eos_token_id]
        ids = torch.tensor([*prompt, *answer])
        logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        total = total + torch.nn.functional.cross_entropy(logits, ids[len(prompt) :], reduction="sum")
        count += len(answer)
    model.zero_grad()
    (total / count).backward()
    return float(total.detach()) / count, {name: p.grad for name, p in model.named_parameters()}


# ------------------------------------------------------------------------------ the loss


# transformers takes a router's softmax in float32 whatever the model's type.
@pytest.mark.parametrize(("name", "rounding"), [("random-dense", 1e-12), ("random-moe", 1e-9)])
def test_loss_and_gradient_are_those_of_one_sequence_at_a_time(name: str, rounding: float, tmp_path: Path) -> None:
    job = made(tmp_path / "run", model={"name": name})
    loss, found = gradients(job, batch_of(job, 50))
    expected, gradient = by_hand(job, ROWS)
    assert loss == pytest.approx(expected, rel=1e-10)
    assert found.keys() == gradient.keys()
    for key in found:
        torch.testing.assert_close(found[key], gradient[key], rtol=1e-8, atol=rounding)


def test_only_the_answers_are_trained_on_and_a_repeated_prompt_stands_once(tmp_path: Path) -> None:
    job = made(tmp_path / "run")
    batch, tokenizer = batch_of(job, 1000), job.policy.tokenizer
    order = [0, 2, 4, 1, 3]  # answers to the same prompt together
    expected = [[*tokenizer(ROWS[i]["answer"])["input_ids"], tokenizer.eos_token_id] for i in order]
    assert batch.target_N.tolist() == [i for ids in expected for i in ids]
    assert batch.length_S.tolist() == [len(ids) for ids in expected]
    prompts = len("say one") + len("say two") + len("x")
    assert len(batch.tokens_T) == prompts + sum(len(ids) - 1 for ids in expected), "the last token predicts nothing"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SftJob:
    return made(tmp_path_factory.mktemp("job") / "run")


@hypothesis_settings(deadline=None, max_examples=12)
@given(budget=st.integers(1, 120), order=st.permutations(range(5)))
def test_neither_micro_batches_nor_order_change_the_gradient(job: SftJob, budget: int, order: list[int]) -> None:
    loss, whole = gradients(job, batch_of(job, 1000))
    other_loss, other = gradients(job, batch_of(job, budget, order))
    assert other_loss == pytest.approx(loss, rel=1e-12)
    for key in whole:
        torch.testing.assert_close(other[key], whole[key], rtol=1e-9, atol=1e-12)


def test_memory_that_ends_is_met_with_smaller_micro_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, budgets = made(tmp_path / "run"), []
    real = job.learner.update

    def scarce(batch: Batch, objective: Any) -> Any:
        largest = max(micro.token.stop - micro.token.start for micro in batch.plan)
        budgets.append(largest)
        if largest > 24:
            raise OutOfMemoryError("out of memory")
        return real(batch, objective)

    monkeypatch.setattr(job.learner, "update", scarce)
    job.update()
    assert budgets[0] > 24 >= budgets[-1]
    assert job.progress.max_tokens_per_microbatch is not None
    monkeypatch.setattr(job.learner, "update", lambda *_: (_ for _ in ()).throw(OutOfMemoryError("out of memory")))
    with pytest.raises(RunError, match="one answer at a time"):
        job.update()


# ------------------------------------------------------------------------------ answers as ids


def ids_of(job: SftJob, row: int) -> str:
    return str(job.policy.tokenizer.decode(job.answers[row].answer_ids))


def test_a_chat_template_gives_the_turn_that_it_writes_and_the_end_token_is_added(tmp_path: Path) -> None:
    job = made(tmp_path / "run", data={"template": "chat"})
    assert job.answers[0].prompt.text == "user: say one\nassistant: "
    assert ids_of(job, 0) == "one\n<eos>"


def with_template(folder: Path, template: str) -> str:
    from gspo.models.tiny import tiny_dense

    model, tokenizer = tiny_dense()
    tokenizer.chat_template = template
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


TURNS = "{% for m in messages %}{{ m.role }}:{{ m.content }}<eos>\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"


def test_an_answer_ends_with_the_end_token_that_the_template_wrote(tmp_path: Path) -> None:
    name = with_template(tmp_path / "model", TURNS)
    job = made(tmp_path / "run", model={"name": name}, data={"template": "auto"})
    assert ids_of(job, 1) == "two, too<eos>", "what the template puts after it is not trained"


TALK = [{"role": r, "content": c} for r, c in zip(["user", "assistant"] * 2, ["a", "bb", "c", "d"], strict=True)]


def talking(folder: Path, template: str = TURNS, **data: Any) -> SftJob:
    """Two conversations, of two turns and of one."""
    name = with_template(folder / "model", template)
    rows = [{"messages": TALK}, {"messages": TALK[:2]}]
    keys = {"messages": "messages", "template": "auto", **data}
    return made(folder / "run", rows, model={"name": name}, data=keys, batch_size=2)


def test_every_turn_of_the_assistant_is_learned_and_nothing_else(tmp_path: Path) -> None:
    job = talking(tmp_path)
    assert job.answers[0].prompt.text == "user:a<eos>\nassistant:"
    assert [ids_of(job, i) for i in (0, 1)] == ["bb<eos>d<eos>", "bb<eos>"]
    (whole, single), decode = (job.answers[0], job.answers[1]), job.policy.tokenizer.decode
    assert "".join(decode(turn.ids) for turn in whole.turns) == "bb<eos>\nuser:c<eos>\nassistant:d<eos>"
    assert "".join(decode(turn.ids) for turn in single.turns) == "bb<eos>"
    assert (
        decode(whole.asked.token_ids) == whole.asked.text == "user:a<eos>\nassistant:bb<eos>\nuser:c<eos>\nassistant:"
    )
    assert whole.asked.columns["prompt"] == TALK[:3]
    batch = batch_of(job, 1000)
    assert decode(batch.target_N) == "bb<eos>d<eos>bb<eos>"
    prompt = len(whole.prompt.token_ids)
    assert len(batch.tokens_T) == prompt + sum(len(t.ids) for a in (whole, single) for t in a.turns) - 2, "one prompt"


def conversation_by_hand(job: SftJob, trained: list[tuple[str, str]]) -> tuple[float, dict[str, Tensor]]:
    """(what stands before, what is learned) one after the other, each through the model's own forward."""
    model, tokenizer = job.policy.model, job.policy.tokenizer
    model.set_attn_implementation("sdpa")
    total, count = torch.zeros((), dtype=torch.float64), 0
    for before, learned in trained:
        first, second = (tokenizer(text)["input_ids"] for text in (before, learned))
        ids = torch.tensor([*first, *second])
        logits = model(input_ids=ids[None], use_cache=False).logits[0, len(first) - 1 : -1]
        total = total + torch.nn.functional.cross_entropy(logits, ids[len(first) :], reduction="sum")
        count += len(second)
    model.zero_grad()
    (total / count).backward()
    return float(total.detach()) / count, {name: p.grad for name, p in model.named_parameters()}


NO_END = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
BY_TURN = {
    TURNS: [
        ("user:a<eos>\nassistant:", "bb<eos>"),
        ("user:a<eos>\nassistant:bb<eos>\nuser:c<eos>\nassistant:", "d<eos>"),
        ("user:a<eos>\nassistant:", "bb<eos>"),
    ],
    # the end token is learned and, where the template goes on without it, not seen
    NO_END: [
        ("user:a\nassistant:", "bb\n<eos>"),
        ("user:a\nassistant:bb\nuser:c\nassistant:", "d\n<eos>"),
        ("user:a\nassistant:", "bb\n<eos>"),
    ],
}


@pytest.mark.parametrize("budget", [30, 1000])
@pytest.mark.parametrize("template", [TURNS, NO_END], ids=["end", "no-end"])
def test_loss_and_gradient_of_conversations_are_those_of_each_turn_by_hand(
    template: str, budget: int, tmp_path: Path
) -> None:
    job = talking(tmp_path, template)
    loss, found = gradients(job, batch_of(job, budget))
    expected, gradient = conversation_by_hand(job, BY_TURN[template])
    assert loss == pytest.approx(expected, rel=1e-10)
    for key in found:
        torch.testing.assert_close(found[key], gradient[key], rtol=1e-8, atol=1e-12)


def test_only_the_last_turn_is_learned_when_asked_and_it_is_said(tmp_path: Path, capsys: Any) -> None:
    job = talking(tmp_path, turns="last")
    assert job.answers[0].prompt.text == "user:a<eos>\nassistant:bb<eos>\nuser:c<eos>\nassistant:"
    assert [ids_of(job, i) for i in (0, 1)] == ["d<eos>", "bb<eos>"]
    assert "1 of 2 conversations have earlier turns of the assistant" in capsys.readouterr().out


LAST_ONLY = "{% for m in messages %}{{ m.role }}:{% if loop.last %}!{% endif %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"


def test_a_template_that_rewrites_earlier_turns_is_refused_unless_the_last_is_enough(tmp_path: Path) -> None:
    """NovaSky-AI/SkyRL, Qwen3: a template that keeps a thought in the last turn only."""
    template = LAST_ONLY.replace("{% if loop.last %}", "{% if loop.last and m.role == 'assistant' %}")
    with pytest.raises(InputError, match=r"row 0: the chat template writes a turn.*otherwise.*data\.turns=last"):
        talking(tmp_path / "all", template)
    job = talking(tmp_path / "last", template, turns="last")
    assert [ids_of(job, i) for i in (0, 1)] == ["!d\n<eos>", "!bb\n<eos>"]


BAD_ROWS: list[tuple[list[dict[str, Any]], dict[str, Any], list[str]]] = [
    ([{"prompt": "a"}], {}, ["no column 'answer'", "data.answer"]),
    ([{"prompt": "a", "anser": "b"}], {}, ["did you mean data.answer=anser"]),
    ([{"question": "a", "answer": "b"}], {}, ["no column 'prompt'"]),
    ([*ROWS, {"prompt": "a", "answer": " "}], {}, ["row 5", "the answer is empty"]),
    ([*ROWS, {"prompt": "a", "answer": None}], {}, ["row 5", "the answer is null"]),
    ([*ROWS, {"prompt": "a", "answer": 7}], {}, ["row 5", "an answer is text, not int"]),
    ([*ROWS, {"prompt": "a", "answer": "b" * 9}], {"max_answer_tokens": 8}, ["row 5 has 9", "too_long=drop", "row 2 has 12"]),
    ([{"prompt": "a", "answer": "b<eos>c"}], {}, ["row 0", "end token '<eos>' before its end"]),
    ([{"prompt": "a", "answer": "b" * 2050}], {}, ["row 0", "exceed the model's 2048 positions"]),
    ([{"m": [{"role": "user", "content": "a"}]}], {"messages": "m"}, ["row 0", "at least two messages"]),
    ([{"m": [{"role": "user", "content": "a"}] * 2}], {"messages": "m"}, ["row 0", "no assistant's turn at its end"]),
    ([{"m": [{"role": r, "content": "a"} for r in ("user", "assistant", "assistant")]}], {"messages": "m"}, ["row 0", "follow each other"]),
    ([{"m": [{"role": r, "content": c} for r, c in (("user", "a"), ("assistant", " "), ("user", "b"), ("assistant", "c"))]}], {"messages": "m"}, ["row 0", "a turn of the assistant is empty"]),
    ([{"m": "a"}], {"messages": "n"}, ["no column 'n' (data.messages)"]),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "data", "parts"), BAD_ROWS, ids=[str(parts[0]) for *_, parts in BAD_ROWS])
def test_bad_rows_are_refused_by_name(
    rows: list[dict[str, Any]], data: dict[str, Any], parts: list[str], tmp_path: Path
) -> None:
    with pytest.raises(InputError) as caught:
        made(tmp_path / "run", rows, data=data)
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)
    assert not (tmp_path / "run").exists(), "nothing is written"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if m.role == 'user' %}u:{{ m.content }}\n{% endif %}{% endfor %}",
        "{{ messages | length }}{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}",
    ],
    ids=["none", "rewritten"],
)
def test_a_template_without_an_assistants_turn_is_refused(template: str, tmp_path: Path) -> None:
    name = with_template(tmp_path / "model", template)
    with pytest.raises(InputError, match=r"row 0: the chat template has no turn of the assistant.*data\.template=none"):
        made(tmp_path / "run", model={"name": name}, data={"template": "auto"})


def test_an_answer_that_is_too_long_is_dropped_when_asked_and_said(tmp_path: Path, capsys: Any) -> None:
    job = made(tmp_path / "run", data={"max_answer_tokens": 8, "too_long": "drop"})
    assert sorted(job.answers) == [0, 1, 3, 4]
    assert "1 of 5 answers are longer than data.max_answer_tokens=8: row 2 has 12; dropped" in capsys.readouterr().out


# ------------------------------------------------------------------------------ runs


SORT: dict[str, Any] = dict(
    model={"dtype": "float32"},
    data={"source": "sort:2", "limit": 64, "template": "none"},
    batch_size=8,
    optimizer={"learning_rate": 3e-3, "schedule": "linear", "warmup_updates": 3},
    checkpoint={"every": 2, "keep": 3},
    eval={"every": 3, "limit": 8, "reward": "sorted"},
    sampling={"max_new_tokens": 12},
)


def run(folder: Path, **keys: Any) -> Result:
    tree = {"dir": str(folder), "threads": 1, **SORT, **keys}
    tree["model"] = {"name": "random-dense", **tree["model"]}
    return tune(build(settings.check_as(Sft, tree, "test")))


def journal(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith("time/")} for line in lines]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_is_the_run_that_was_not_interrupted(dtype: str, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(whole, steps=10, model={"dtype": dtype})
    run(cut, steps=10, model={"dtype": dtype})
    for path in (cut / "checkpoints" / "00000010").iterdir():
        path.unlink()
    (cut / "checkpoints" / "00000010").rmdir()
    again = tune(build(resumed_run(Sft, cut, []), resume=cut))
    assert again.step == 10
    assert journal(cut) == journal(whole)
    assert journal(cut)[8]["epoch"] == 9 / 8, "it went over the end of an epoch"
    for name in ("model.safetensors", "optimizer.safetensors"):
        a, b = (load_file(folder / "checkpoints" / "00000010" / name) for folder in (whole, cut))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a), name
    best = min((line for line in journal(cut) if "eval/loss" in line), key=lambda line: line["eval/loss"])
    assert os.readlink(cut / "best") == f"checkpoints/{best['step']:08d}"


def test_a_run_goes_on_only_with_its_data_its_command_and_more_steps(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, steps=2)
    with pytest.raises(InputError, match="nothing is left"):
        resumed_run(Sft, folder, [])
    with pytest.raises(InputError, match="Only steps can be changed"):
        resumed_run(Sft, folder, ["batch_size=4"])
    with pytest.raises(InputError, match="a run of `gspo sft`"):
        resumed_run(config.Run, folder, [])
    longer = resumed_run(Sft, folder, ["steps=3"])
    other = longer.model_copy(update={"data": longer.data.model_copy(update={"source": "sort:3"})})
    with pytest.raises(InputError, match="put the data back"):
        build(other, resume=folder)
    assert tune(build(longer, resume=folder)).step == 3


def test_epochs_say_how_many_steps(tmp_path: Path) -> None:
    result = run(tmp_path / "run", epochs=1.5, eval={"every": 0}, sampling={})
    assert result.step == 12
    assert settings.load_as(Sft, tmp_path / "run" / "run.yaml").steps == 12
    seen = journal(tmp_path / "run")
    assert [line["loss/tokens"] for line in seen] == [8 * 10] * 12


def test_the_loss_falls_and_sampled_answers_get_better(tmp_path: Path) -> None:
    evaluation = {"every": 60, "limit": 32, "reward": "regex:^[a-t]:[a-t];[a-t]:[a-t]{2};$"}
    keys = dict(optimizer={"learning_rate": 1e-2}, batch_size=32, eval=evaluation)
    result = run(tmp_path / "run", steps=60, **keys)
    lines = journal(tmp_path / "run")
    assert lines[0]["eval/start/loss"] == result.gains["loss"].start == pytest.approx(4.1, abs=0.3), "near ln 58"
    assert result.gains["reward"].start == 0.0
    assert result.gains["loss"].last is not None
    assert result.gains["loss"].last < 1.3
    assert lines[-1]["loss"] < 1.0
    assert result.gains["reward"].last is not None
    assert result.gains["reward"].last > 0.5


def test_the_held_out_loss_is_the_mean_over_answer_tokens(tmp_path: Path) -> None:
    job = made(tmp_path / "run", data={"source": "sort:3", "template": "none"}, eval={"source": "sort:3", "limit": 6})
    found = job.measure()
    rows = [{"prompt": each.prompt.text, "answer": each.answer} for each in job.held_out]
    expected, _ = by_hand(job, rows)
    assert found["eval/loss"] == pytest.approx(expected, rel=1e-10)
    assert found["eval/tokens"] == 6 * 16


def test_a_signal_saves_the_step_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"dir": str(tmp_path / "run"), "threads": 1, "steps": 50, **SORT, "checkpoint": {"every": 0}}
    job = build(settings.check_as(Sft, {**tree, "model": {"name": "random-dense", "dtype": "float32"}}, "test"))
    record = job.record

    def interrupted(step: int, stats: Any) -> Any:
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return record(step, stats)

    monkeypatch.setattr(job, "record", interrupted)
    result = tune(job)
    assert (result.step, result.exit_code) == (4, 143)
    assert (tmp_path / "run" / "checkpoints" / "00000004" / "model.safetensors").is_file()


def test_the_processes_of_the_reward_end_with_the_run_and_with_a_refusal(tmp_path: Path) -> None:
    folder, pids, judge = tmp_path / "run", tmp_path / "pids", tmp_path / "judge.py"
    judge.write_text(
        "import os\n\ndef score(completion):\n"
        f"    open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n')\n    return float(len(completion))\n"
    )
    keys = {"eval": {"every": 1, "limit": 4, "reward": [f"{judge}:score", {"function": "sorted", "weight": 0.5}]}}
    tree = {"dir": str(folder), "threads": 1, **SORT, "steps": 2, "judging": {"workers": 2}, **keys}
    job = build(settings.check_as(Sft, {**tree, "model": {"name": "random-dense", "dtype": "float32"}}, "test"))
    assert tune(job).gains["reward"].last is not None
    assert {path.name for path in (job.folder / "rollouts").iterdir()} >= {"eval-00000000.jsonl.gz"}
    assert "held out" in (job.folder / "report.html").read_text()
    assert all_gone(judging_of(pids)), "while the job is still held"
    pids.unlink()
    longer = resumed_run(Sft, folder, ["steps=3"])
    other = longer.model_copy(update={"data": longer.data.model_copy(update={"source": "sort:3"})})
    with pytest.raises(InputError, match="put the data back") as refusal:
        build(other, resume=folder)
    assert all_gone(judging_of(pids)), "while the frames that held the inputs are still there"
    assert refusal.traceback


def judging_of(pids: Path) -> set[Path]:
    """What /proc has of the processes that judged; there was one at least, and this one was not among them."""
    found = set(map(int, pids.read_text().split()))
    assert found
    assert os.getpid() not in found
    return {Path(f"/proc/{pid}") for pid in found}


def all_gone(processes: set[Path], within: float = 3.0) -> bool:
    end = time.monotonic() + within
    while (left := any(process.exists() for process in processes)) and time.monotonic() < end:
        time.sleep(0.02)
    return not left


BAD_KEYS = [
    (["steps=3", "epochs=1"], "steps and epochs"),
    (["eval.reward=null", "eval.samples=4"], "samples has no effect without a reward"),
    (["eval.reward=null", "sampling.temperature=0.5", "sampling.max_rows=64"], "no effect without eval.reward"),
    (
        ["eval.reward=null", "sampling.max_new_tokens=256", "sampling.max_rows=256", "judging.timeout=3"],
        "judging.timeout has no effect without eval.reward",
    ),
    (["algorithm=gspo"], "algorithm: no such key"),
    (["optimizer.learning_rte=1"], "did you mean 'optimizer.learning_rate'"),
    (["data=srot:8"], "did you mean 'sort:8'"),
    (["eval.reward=nonsense", "data.limit=16"], "no such rule"),
]


@pytest.mark.parametrize(("words", "part"), BAD_KEYS)
def test_a_bad_word_ends_with_2_before_a_model_is_loaded(
    words: list[str], part: str, tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = command("sft", "tiny-dense", f"dir={tmp_path / 'run'}", *words)
    assert code == 2, out + err
    assert part in err
    assert "policy" not in out


@pytest.mark.parametrize("model", ["random-dense", "random-moe"])
def test_the_command_ends_with_what_was_gained_goes_on_and_is_exported(
    model: str, tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    words = [f"dir={tmp_path / 'run'}", "steps=2", "batch_size=4", "data=sort:2", "data.limit=16", "eval.limit=4"]
    code, out, err = command("sft", "tiny-dense", *words, "eval.source=sort:2", f"model={model}", "eval.every=2")
    assert code == 0, err
    assert out.splitlines()[-2].startswith("held-out loss: 4.")
    assert out.splitlines()[-1] == "held-out accuracy: 0.000 -> 0.000"
    code, out, err = command("sft", "--resume", str(tmp_path / "run"), "steps=3")
    assert code == 0, err
    assert "step 3/3" in out
    code, out, err = command("export", str(tmp_path / "run"), str(tmp_path / "out"))
    assert code == 0, err
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    checkpoint = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / "00000003").state_dict()
    assert all(torch.equal(weights[key], checkpoint[key]) for key in checkpoint)

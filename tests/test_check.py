"""`gspo check` on real recipes: what it says when all is well, and that each of its checks can fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import gspo
from gspo import preflight, settings
from gspo.check import _memory, _step, check, memory_of_machine
from gspo.inputs import read_inputs
from gspo.models.load import load_policy
from gspo.models.tiny import tiny_tokenizer
from gspo.preflight import Finding
from gspo.trial import Trial
from gspo.types import Prompt

SMALL = ["threads=1", "prompts_per_step=4", "group_size=4", "sampling.max_new_tokens=4"]


def checked(words: list[str], tmp_path: Path, recipe: str = "tiny") -> tuple[int, list[str]]:
    lines: list[str] = []
    taken = [word.partition("=")[0] for word in words]
    given = [*SMALL, f"dir={tmp_path / 'run'}"]
    code = check(recipe, [*(word for word in given if word.partition("=")[0] not in taken), *words], lines.append)
    return code, lines


def test_a_sound_recipe_is_ready_and_leaves_nothing_behind(tmp_path: Path) -> None:
    code, lines = checked(["reward=number", "algorithm=grpo"], tmp_path)
    assert (code, lines[-1]) == (0, "ready")
    assert list(tmp_path.iterdir()) == []
    text = "\n".join(lines)
    for words in (
        "73 prompts of 61 to 61 tokens, columns a, answer, b, prompt; 16 held-out",
        "prompts come back as the same ids",
        "each turn leaves what stands before it as it was",
        "reward number: gold answers: 64 rows tried, an answer formed of column answer earns the reward in each",
        "4 prompts x 4 answers = 16 rollouts a step",
        "temperature=1.0",
        "a checkpoint takes",
        "16 answers of 4 tokens to prompts of 61",
        "an update on 4 of them",
        "GB of memory",
    ):
        assert words in text, words
    assert "MEND" not in text


def judge(folder: Path, body: str) -> str:
    (folder / "judge.py").write_text(body)
    return f"{folder / 'judge.py'}:score"


PICKY = "def score(completion, answer):\n    return float(completion == answer and int(answer) % 2 == 0)\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["learning_rate=1"], "learning_rate"),
        (["data.prompt=question"], "question"),
        (["reward=number:solution"], "'solution'"),
        (["sampling.max_new_tokens=100000"], "2048 positions"),
        (["eval.every=0", "eval.patience=2"], "eval.patience"),
        (["algorithm.load_balance=0.1"], "no experts"),
        (["checkpoint.keep=1", "steps=0"], "steps"),
        (["data=no_such_file.jsonl"], "no_such_file.jsonl"),
        (["model=no_such_model"], "no_such_model"),
        (["reward=nubmer"], "reward=nubmer: no such rule"),
        (["eval.patience=2", "data={rows}"], "there are no held-out prompts"),
        (["trackers=no_such_file.py:Mine"], "no such file: no_such_file.py"),
        (["algorithm=ppo", "critic.model=smollm2-135m"], "another vocabulary"),
        (["algorithm=ppo", "critic.model=no_such_model"], "critic.model: model=no_such_model: "),
        (["dir={rows}/run"], "rows.jsonl is not a folder that can be written to"),
    ],
)
def test_what_has_to_be_mended_is_listed(words: list[str], told: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "one?", "answer": "1"}\n')
    code, lines = checked([word.format(rows=tmp_path / "rows.jsonl") for word in words], tmp_path)
    assert code == 2
    at = lines.index("not ready, 1 to mend:")
    assert told in lines[at + 1]


def test_the_sampling_that_is_in_effect_is_shown(tmp_path: Path) -> None:
    code, lines = checked(["sampling.temperature=0.7", "sampling.top_p=0.9", "engine.weights=int8"], tmp_path)
    assert code == 0
    (shown,) = [line for line in lines if line.startswith("ok   sampling: ")]
    assert all(word in shown for word in ("temperature=0.7", "top_p=0.9", "weights=int8"))
    assert any(line.startswith("note settings: ") and "truncated distribution" in line for line in lines)
    assert not any("note:" in line for line in lines)


def test_the_step_that_is_tried_is_as_long_as_a_whole_conversation(tmp_path: Path) -> None:
    code, lines = checked(["conversation.tools=calculator", "conversation.max_tokens=24", "reward=number"], tmp_path)
    assert code == 0, lines
    assert any("16 answers of 24 tokens" in line for line in lines)


def test_a_guard_that_could_see_little_is_said(tmp_path: Path) -> None:
    keys = {"data.difficulty": "[0.1,0.9]", "eval.every": "0", "guard": "warn"}
    said = "the guard does not compare it"
    for change, expected in (
        ({}, 1),
        ({"eval.every": "5"}, 0),
        ({"guard": "off"}, 0),
        ({"data.difficulty": "null"}, 0),
    ):
        words = [f"{key}={value}" for key, value in {**keys, **change}.items()]
        assert sum(said in line for line in checked(words, tmp_path)[1]) == expected, change


def test_every_fault_is_listed_not_the_first_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "journal.jsonl").write_text("")
    code, lines = checked(["sampling.max_new_tokens=100000", f"reward={judge(tmp_path, PICKY)}"], tmp_path)
    assert code == 2
    assert lines[-4] == "not ready, 3 to mend:"
    assert "gives nothing for the gold answers" in lines[-3]
    assert "not empty, and holds no run" in lines[-2]
    (marked,) = [line for line in lines if line.startswith("MEND folder: ")]
    assert "holds no run" in marked, "the line itself says what is wrong"
    assert "2048 positions" in lines[-1]


# ------------------------------------------------------------------------------ golds


def golds(tmp_path: Path, *words: str) -> list[Finding]:
    inputs = read_inputs(settings.load("tiny", [*SMALL, *words]))
    try:
        return preflight.golds(settings.load("tiny", [*SMALL, *words]), inputs)
    finally:
        inputs.close()


def test_a_function_that_pays_for_some_golds_alone_is_to_be_mended(tmp_path: Path) -> None:
    (found,) = golds(tmp_path, f"reward={judge(tmp_path, PICKY)}")
    assert found.mend is not None
    assert "do not pay for their own gold answer" in found.text
    assert "is worth 0" in found.text


def test_a_function_that_wants_a_form_that_cannot_be_guessed_is_said(tmp_path: Path) -> None:
    body = "def score(completion, answer):\n    return float(completion == f'#### {answer}')\n"
    (found,) = golds(tmp_path, f"reward={judge(tmp_path, body)}")
    assert found.mend is None
    assert found.note
    assert "try it on an answer" in found.text


def test_a_function_that_fails_on_its_gold_shows_the_failure(tmp_path: Path) -> None:
    body = "def score(completion, answer):\n    return float(answer) / len(completion) if completion and int(answer) > 4 else completion and 1 / 0 or 0\n"
    (found,) = golds(tmp_path, f"reward={judge(tmp_path, body)}")
    assert found.mend is not None
    assert "fails: ZeroDivisionError" in found.text


def test_where_no_gold_can_be_formed_it_is_said(tmp_path: Path) -> None:
    (found,) = golds(tmp_path, "reward=regex:^[0-9]")
    assert "none can be formed" in found.text
    assert not found.note


@pytest.mark.parametrize("reward", ["number", "exact", "boxed", "math"])
def test_the_golds_of_ready_rewards_earn_them(reward: str, tmp_path: Path) -> None:
    if reward == "math":
        pytest.importorskip("math_verify")
    (found,) = golds(tmp_path, f"reward={reward}")
    assert found.mend is None
    assert "earns the reward in each" in found.text


def test_a_gold_that_its_own_rule_does_not_pay_for_stops_a_run_before_it_starts(tmp_path: Path) -> None:
    rows = [{"prompt": "half?", "answer": r"\frac{1}{2"}, {"prompt": "one?", "answer": "1"}]
    with pytest.raises(gspo.InputError, match=r"reward boxed gives nothing for the gold answers of 1 of 2 rows"):
        gspo.train("tiny", data=rows, reward="boxed", dir=str(tmp_path / "run"), steps=1, prompts_per_step=4)
    assert not (tmp_path / "run").exists()


def test_of_a_function_of_ones_own_it_is_said_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = judge(tmp_path, PICKY)
    assert gspo.train("tiny", dir=str(tmp_path / "run"), reward=reward, steps=1, threads=1).step == 1
    assert "note: reward score: gold answers: " in capsys.readouterr().out


# ------------------------------------------------------------------------------ templates


def prompt(ids: list[int]) -> Prompt:
    return Prompt(0, "ab", np.array(ids), {})


def test_ids_that_do_not_come_back_from_text_are_said() -> None:
    """verl-project/verl#6719: a tokenizer in which [0, 1] decodes to a text that encodes to [2]."""
    core = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)
    assert not preflight.round_trip([prompt([2])], tokenizer).note
    found = preflight.round_trip([prompt([2]), prompt([0, 1])], tokenizer)
    assert found.note
    assert "1 of 2 prompts come back as other ids" in found.text


DROPS = (
    "{% for m in messages %}{{ m['role'] + ': ' }}"
    "{% if '</think>' in m['content'] and not loop.last %}{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def test_a_template_that_rewrites_earlier_turns_is_said() -> None:
    """NVIDIA-NeMo/RL#2821, OpenPipe/ART#726."""
    tokenizer = tiny_tokenizer()
    assert not preflight.prefix(tokenizer, chat=True).note
    tokenizer.chat_template = DROPS
    found = preflight.prefix(tokenizer, chat=True)
    assert found.note
    assert "rewrites the first answer" in found.text
    tokenizer.chat_template = DROPS.replace("{{ 'assistant: ' }}", "{{ 'assistant (thinking): ' }}")
    assert "does not begin with the prompt" in preflight.prefix(tokenizer, chat=True).text
    assert preflight.prefix(tokenizer, chat=False).text == "no chat template is used"
    tokenizer.chat_template = "{{ messages[0].content if messages | length == 1 else 1/0 }}"
    assert "refuses its messages (user, assistant): ZeroDivisionError" in preflight.prefix(tokenizer, chat=True).text


# ------------------------------------------------------------------------------ the machine

MEASURED = Trial(
    parameters=1000, prompt_tokens=10, answers=16, rollout_seconds=2.0, trained=4, update_seconds=3.0, peak_bytes=10**8,
    budget=1536, on_gpu=False,
)  # fmt: skip


def test_a_disk_that_is_too_small_is_to_be_mended(tmp_path: Path) -> None:
    run = settings.load("tiny", SMALL)
    assert preflight.disk(run, tmp_path / "run", 1000).mend is None
    assert "0.00 GB" in preflight.disk(run, tmp_path / "run", 1000).text
    found = preflight.disk(run, tmp_path / "deep" / "run", 10**15)
    assert found.mend is not None
    assert "24000000.00 GB are needed" in found.mend
    some = preflight.disk(
        run, tmp_path / "run", int(shutil.disk_usage(tmp_path).free / (2.5 * 12))
    )  # room for two and a half
    assert some.mend is None
    assert some.note
    assert "set checkpoint.keep lower" in some.text


def test_no_more_checkpoints_are_counted_than_are_written_and_the_advice_can_be_followed(tmp_path: Path) -> None:
    def said(free: float, *words: str) -> str:
        run = settings.load("tiny", [*SMALL, *words])
        return preflight.disk(run, tmp_path, int(shutil.disk_usage(tmp_path).free / (free * 12))).text

    often = ("steps=20", "checkpoint.every=1", "eval.every=1")
    assert "at most 7 stand at a time" in said(100, *often, "checkpoint.keep=3")
    assert "at most 1 stand at a time" in said(100, "steps=2", "checkpoint.every=0", "eval.every=0")
    assert "at most 3 stand at a time" in said(
        100, "steps=2", "checkpoint.every=1", "eval.every=0", "checkpoint.keep=3"
    )
    assert said(2.5, *often, "checkpoint.keep=3").endswith(
        "set checkpoint.keep lower, or guard=warn (two fewer), or choose another dir"
    )
    assert said(2.5, *often, "checkpoint.keep=1", "guard=warn").endswith(": choose another dir")


def test_a_checkpoint_holds_what_is_trained_and_a_critic_of_its_own() -> None:
    def kept(*words: str) -> int:
        run = settings.load("tiny", ["model=random-dense", *words])
        return preflight.weights_kept(run, load_policy(run.model).model)

    whole, adapter = kept(), kept("model.lora=4")
    assert 0 < adapter < whole / 2
    assert kept("algorithm=ppo") == 2 * whole
    assert kept("algorithm=ppo", "critic=shared") == whole
    own = kept("algorithm=ppo", "model.lora=4") - adapter
    assert own == whole + adapter, "with the weights of the adapter, which it is merged with: near enough"


def test_a_step_that_fits_only_in_smaller_pieces_and_one_that_fills_memory_are_to_be_mended() -> None:
    run = settings.load("tiny", SMALL)
    assert _step(run, MEASURED).mend is None
    assert _step(run, replace(MEASURED, budget=256)).mend == (
        "max_tokens_per_microbatch=1536 does not fit into memory: set it to 256"
    )
    assert _memory(MEASURED).mend is None
    assert "lower max_tokens_per_microbatch" in str(
        _memory(replace(MEASURED, peak_bytes=int(memory_of_machine()))).mend
    )


def test_the_projection_counts_steps_updates_and_evaluations() -> None:
    run = settings.load("tiny", [*SMALL, "steps=20", "eval.every=5", "eval.samples=2", "algorithm.epochs=2"])
    # 16 answers in 2 s; each trained twice, 4 of them in 3 s.
    assert MEASURED.step_seconds(run) == pytest.approx(2 + 2 * 12)
    # 5 evaluations of 8 prompts, 2 answers each.
    assert MEASURED.run_seconds(run, 8) == pytest.approx(20 * 26 + 5 * 2)


def test_what_does_not_fit_into_memory_at_all_is_to_be_mended(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_ROOM, str(tmp_path / "run")],
        capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert "MEND a step at the largest lengths: " in done.stdout
    assert "not ready, 1 to mend:" in done.stdout
    assert "gradient_checkpointing" in done.stdout


NO_ROOM = """
import resource, sys
from gspo.check import check
from gspo.learner import Learner

plain = Learner.update

def tight(*given):
    held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + 2**16, -1))
    try:
        return plain(*given)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))

Learner.update = tight
words = ["threads=1", "prompts_per_step=4", "group_size=4", "sampling.max_new_tokens=200", f"dir={sys.argv[1]}"]
sys.exit(check("tiny", words, print))
"""


def test_optional_parts_are_listed_as_they_are_there_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the metadata of a gspo whose extras are one that is here, one that is not, and one of both."""
    about = tmp_path / "gspo-1.0.dist-info"
    about.mkdir()
    needs = (
        "torch; extra == 'here'",
        "no-such-package>=2; extra == 'gone'",
        "torch; extra == 'both'",
        "nor-this; extra == 'both'",
    )
    about.joinpath("METADATA").write_text(
        "Metadata-Version: 2.1\nName: gspo\nVersion: 1.0\n" + "".join(f"Requires-Dist: {need}\n" for need in needs)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert preflight.parts().text == "both not installed, gone not installed, here installed"

"""Whole runs with environments and tools: what is learned, what is written, what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gspo
from gspo import InputError, cli, record, settings
from gspo.inputs import read_inputs
from gspo.journal import read
from gspo.types import Group, Limit, Prompt, Reward, Rollout, Segment, Stop
from gspo.view.files import groups_in, record_file
from gspo.view.rescore import _group

PRESS = '''
import random


class Press:
    """Begin with a letter, be shown a number, then begin with a digit."""

    def reset(self, seed):
        self.shown = random.Random(seed).randint(10, 99)
        self.turn = 0
        return f"{self.shown}?"

    def step(self, reply):
        self.turn += 1
        if self.turn == 1:
            pressed = reply[:1].isalpha()
            return f"= {self.shown}" if pressed else "no", 0.5 * pressed, False
        return None, 0.5 * reply[:1].isdigit(), True


def noisy(seed):
    reply = yield "say"
    if seed % 4 == 0:
        raise KeyError("broken")
    return float(seed % 2)


def endless(seed):
    while True:
        yield "more"


def length(completion):
    return len(completion)


def whole(completion, conversation, earned):
    assert conversation[0]["role"] == "user" and conversation[-1] == {"role": "assistant", "content": completion}
    return len(conversation) / 10 + earned
'''
TINY: dict[str, Any] = dict(
    model={"name": "random-dense", "dtype": "float32"}, algorithm="gspo", prompts_per_step=8, group_size=8, threads=1, steps=2,
    sampling={"max_new_tokens": 4, "max_rows": 64}, optimizer={"learning_rate": 3e-3}, eval={"every": 0},
    judging={"workers": 1, "max_failed": 1.0},
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "env.py").write_text(PRESS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rollouts(folder: Path, step: int = 1) -> list[dict[str, Any]]:
    with gzip.open(folder / "rollouts" / f"{step:08d}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def endless(**sampling: Any) -> dict[str, Any]:
    """Turns that end by themselves now and then: the model knows nothing, and stops by chance."""
    return {"max_new_tokens": 24, "max_rows": 64, **sampling}


def test_a_policy_learns_both_turns(folder: Path) -> None:
    """It knows nothing at first, not even to end a turn; half of the reward is earned in the first, half in the second."""
    run = gspo.train(
        **{**TINY, "steps": 16},
        data="env.py:Press",
        reward=["environment"],
        conversation={"max_turns": 2, "max_tokens": 128},
        dir="runs/press",
    )
    lines = read(run.folder / "journal.jsonl")
    first, last = (sum(line["reward/mean"] for line in some) / 4 for some in (lines[:4], lines[-4:]))
    print(f"reward {first:.3f} -> {last:.3f}")
    assert last > first + 0.1
    assert lines[-1]["parity/max"] < 1e-4
    written = rollouts(run.folder)
    long = next(r for r in written if len(r["messages"]) == 3)
    assert [m["role"] for m in long["messages"]] == ["assistant", "user", "assistant"]
    assert 0 < sum(long["mask"]) < len(long["mask"])
    assert all(p == 0 for p, m in zip(long["logprobs"], long["mask"], strict=True) if not m)


def test_a_failing_environment_is_counted_and_the_run_goes_on(folder: Path) -> None:
    run = gspo.train(**{**TINY, "sampling": endless()}, data="env.py:noisy", reward=["environment"], dir="runs/noisy")
    lines = read(run.folder / "journal.jsonl")
    assert sum(line["conversation/errors"] for line in lines) > 0
    failed = [r for r in rollouts(run.folder) if r["stop"] == "error"]
    assert all(r["reward"] is None and "KeyError: 'broken'" in r["reward_error"] for r in failed)
    assert lines[0]["rollouts/judged"] == lines[0]["rollouts/total"] - lines[0]["conversation/errors"]


def test_a_reward_reads_the_conversation_and_what_it_earned(folder: Path) -> None:
    run = gspo.train(
        **{**TINY, "sampling": endless(), "steps": 1}, data="env.py:Press", reward="env.py:whole", dir="runs/w"
    )
    for r in rollouts(run.folder):
        assert r["reward_error"] is None
        assert r["reward"] is not None


def test_answers_judged_again_are_judged_as_the_conversations_that_they_were(folder: Path) -> None:
    """`whole` reads every message and what was earned; a conversation that failed has no verdict here either."""
    rules = ["env.py:whole", "environment", "overlong:40"]  # a buffer that is longer than one reply may be
    keys = {**TINY, "sampling": endless(), "steps": 1, "conversation": {"max_tokens": 50}}
    run = gspo.train(**keys, data="env.py:Press", reward=rules, dir="runs/again")
    words = [word for rule in rules for word in ("--reward", rule)]
    out = folder / "again.jsonl"
    assert cli.guarded(lambda: cli.app(["rescore", str(run.folder), *words, "--out", str(out)])) == 0
    again = [json.loads(line)["new"] for line in out.read_text().splitlines()]
    written = rollouts(run.folder)
    parts = [list(r["reward_parts"].values()) for r in written]
    assert again == pytest.approx([sum(each) for each in parts])
    assert any(len(r["messages"]) == 3 and r["earned"] == 0.5 for r in written)
    assert any(each[2] < 0 for each in parts)

    failed = gspo.train(
        **{**TINY, "sampling": endless(), "steps": 1}, data="env.py:noisy", reward=["env.py:whole"], dir="runs/fail"
    )
    answers = [a for group in groups_in(record_file(failed.folder, 1)) for a in group]
    assert cli.guarded(lambda: cli.app(["rescore", str(failed.folder), "--reward", "env.py:whole", "--out", "f"])) == 0
    new = [json.loads(line)["new"] for line in Path("f").read_text().splitlines()]
    assert [value is None for value in new] == [a.stop == "error" for a in answers]
    assert None in new


def test_segments_are_judged_again_as_they_were_cut(tmp_path: Path) -> None:
    """A branch: the second segment goes on from the first, the third from the prompt."""
    mask = [True, False]
    segments = tuple(Segment(np.arange(2), np.array(mask), np.zeros(2, np.float32), p) for p in (None, 0, None))
    said = ({"role": "assistant", "content": "a"}, {"role": "user", "content": "b"})
    asked = ({"role": "user", "content": "why?"},)
    rollout = Rollout(0, segments, "a", Stop.LENGTH, (0, 0), Reward(0.5), messages=said, earned=0.5, limit=Limit.TURNS)
    group = Group(Prompt(3, "why?", np.arange(4), {"answer": "1"}, asked), 7, (rollout,))
    record.write(tmp_path / "00000001.jsonl.gz", 1, [group])
    again = _group(groups_in(tmp_path / "00000001.jsonl.gz")[0])
    (found,) = again.rollouts
    assert [(s.token_ids.tolist(), s.policy_mask.tolist(), s.parent) for s in found.segments] == [
        ([0, 1], mask, None),
        ([0, 1], mask, 0),
        ([0, 1], mask, None),
    ]
    assert (found.messages, found.earned, again.prompt.messages) == (said, 0.5, asked)


@pytest.mark.parametrize(
    ("limits", "key"),
    [
        (
            {"conversation": {"max_turns": 1, "max_tokens": 450}, "sampling": endless(max_new_tokens=400)},
            "conversation.max_turns",
        ),
        ({"conversation": {"max_turns": 9, "max_tokens": 24}}, "conversation.max_tokens"),
        ({"sampling": {"max_new_tokens": 1, "max_rows": 64}}, "sampling.max_new_tokens"),
    ],
)
def test_the_limit_that_cut_most_is_the_one_that_is_named(folder: Path, limits: dict[str, Any], key: str) -> None:
    keys = {**TINY, "steps": 1, "prompts_per_step": 4, "sampling": endless(), **limits}
    run = gspo.train(**keys, data="env.py:endless", reward=["env.py:length"], dir="runs/cut")
    (line,) = read(run.folder / "journal.jsonl")
    assert line["truncated/limit"] == key
    assert line["truncated/share"] > 0.5
    assert (line["verdict/kind"], f"raise {key}" in line["verdict"]) == ("truncated", True), line["verdict"]


def test_a_resumed_run_is_the_run_that_was_not_cut(folder: Path) -> None:
    keys: dict[str, Any] = {**TINY, "sampling": endless(), "data": "env.py:Press", "reward": ["environment"]}
    straight = gspo.train(**{**keys, "steps": 3}, dir="runs/a")
    gspo.train(**{**keys, "steps": 2}, dir="runs/b")
    resumed = gspo.train(resume="runs/b", steps=3)
    assert [r["ids"] for r in rollouts(straight.folder, 3)] == [r["ids"] for r in rollouts(resumed.folder, 3)]
    saved = settings.load(straight.folder / "run.yaml")
    assert saved.talk is not None
    assert saved.talk.environment == "env.py:Press"


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"data": "env.py:Pres"}, "did you mean 'Press'"),
        ({"data": "env.py:Press", "reward": ["number"]}, "needs the column 'answer'"),
        ({"data": "addition", "reward": ["environment"]}, "there is no environment that gives rewards"),
        ({"data": "addition", "conversation": {"tools": "calculater"}}, "Did you mean 'calculator'"),
        ({"data": "addition", "conversation": {"tools": ["env.py:whole"]}}, "cannot be described to a model"),
        ({"data": "addition", "conversation": {"max_turns": 2}}, "name an environment or tools"),
        ({"data": "env.py:Press", "conversation": {"tools": "calculator"}}, "names another"),
        ({"data": "addition", "conversation": {"tools": "calculator", "max_tokens": 2}}, "less than one reply"),
    ],
)
def test_what_cannot_be_used_is_refused_at_the_start(folder: Path, keys: dict[str, Any], part: str) -> None:
    with pytest.raises(InputError, match=part):
        gspo.train(**{**TINY, "reward": ["number"], **keys}, dir="runs/none")
    assert not (folder / "runs").exists()


def test_an_environment_stands_for_its_section_on_the_command_line(folder: Path) -> None:
    run = settings.load(None, ["data=addition:1-9", "conversation=env.py:Press", "conversation.max_turns=2"])
    assert run.talk is not None
    assert (run.talk.environment, run.talk.max_turns, run.longest) == ("env.py:Press", 2, 1024)
    run = settings.load(None, ["conversation.tools=calculator,env.py:f"])
    assert run.conversation is not None
    assert run.conversation.tools == ("calculator", "env.py:f")
    assert settings.check(settings.dump(run), "again") == run
    assert settings.load(None).talk is None
    assert settings.load(None).longest == 256


def noted(*words: str) -> str:
    inputs = read_inputs(settings.load(None, ["model=random-dense", "judging.workers=1", *words]))
    inputs.close()
    return "\n".join(inputs.notes)


def test_openings_that_are_alike_are_no_repeated_prompts(folder: Path) -> None:
    """What differs are the seeds, or the rows that an environment has."""
    own = noted("data=env.py:noisy", "reward=environment", "data.limit=6", "eval.limit=3")
    assert "the first 6 seeds" not in own
    assert not any(words in own for words in ("repeat an earlier one", "also in the training data"))
    (folder / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "a"}\n')
    rows = noted(
        "data=rows.jsonl", "conversation.environment=env.py:noisy", "eval.source=rows.jsonl", "reward=environment"
    )
    assert "1 of 3 prompts repeat an earlier one (row 2 (line 3))" in rows
    assert "3 of 3 evaluation prompts" in rows


def test_a_model_without_a_template_is_not_told_of_tools_and_the_user_is(folder: Path) -> None:
    said = "only a chat template tells a model of its tools"
    tools = ("data=addition:1-9", "conversation.tools=calculator")
    assert said in noted(*tools, "data.template=none")
    assert said not in noted(*tools)

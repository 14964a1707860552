"""The reader of a run's files: groups side by side, answers judged again, and the report."""

from __future__ import annotations

import gzip
import hashlib
import html
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import gspo
from gspo import cli
from gspo.view.files import Answer, groups_in, record_file, shared_beginning, steps_recorded
from gspo.view.report import _group as report_group
from gspo.view.report import _layers, _verdicts, page
from gspo.view.show import _group as show_group

KEYS: dict[str, Any] = dict(
    steps=3,
    prompts_per_step=4,
    group_size=4,
    threads=1,
    reward=["repetition:1", {"function": "overlong:3", "weight": 0.5}],
    eval={"every": 2, "limit": 4, "greedy": True},
    sampling={"max_new_tokens": 6},
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gspo.train("tiny", dir=tmp_path_factory.mktemp("view") / "run", **KEYS).folder


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    capsys.readouterr()
    assert cli.guarded(lambda: cli.app(list(words))) == code
    shown = capsys.readouterr()
    return shown.err if code else shown.out


def digest(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_every_answer_of_training_and_evaluation_is_on_the_disk(run: Path) -> None:
    assert steps_recorded(run) == [1, 2, 3]
    assert steps_recorded(run, evaluation=True) == [0, 2, 3]
    greedy = sorted(path.name for path in (run / "rollouts").glob("eval-greedy-*"))
    assert greedy == [f"eval-greedy-{step:08d}.jsonl.gz" for step in (0, 2, 3)]
    lines = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    for step, key in ((0, "eval/start/reward"), (2, "eval/reward"), (3, "eval/reward")):
        answers = [a for group in groups_in(record_file(run, step, evaluation=True)) for a in group]
        rewards = [a.reward for a in answers if a.reward is not None]
        assert sum(rewards) / len(rewards) == pytest.approx(lines[max(step, 1) - 1][key])
        assert all(a.advantage is None for a in answers)


def test_what_was_clipped_adds_up_to_the_journals_share(run: Path) -> None:
    """GSPO clips whole answers, so that an answer is clipped or not, and the journal counts them."""
    for line in (json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()):
        answers = [a for group in groups_in(record_file(run, line["step"])) for a in group]
        trained = [a for a in answers if a.clipped is not None]
        assert len(trained) == line["clip/rows_counted"] > 0
        assert {a.clipped for a in trained} <= {0.0, 1.0}
        assert sum(a.clipped for a in trained) == pytest.approx(line["clip/rows"] * line["clip/rows_counted"])  # type: ignore[misc]
        assert all(a.advantage for a in trained)


def test_show_prints_a_group_side_by_side(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, "show", str(run), "--step", "2", "--groups", "1")
    assert "step 2" in out
    assert "3 more groups" in out
    assert all(word in out for word in ("reward", "repetition", "overlong", "advantage", "clipped"))
    first = groups_in(record_file(run, 2))[0]
    assert all(f"{a.advantage:+.2f}" in out for a in first)
    assert "evaluation after step 3" in said(capsys, "show", str(run), "--eval")
    assert "there are those of 1, 2, 3" in said(capsys, "show", str(run), "--step", "9", code=2)
    assert "no run here" in said(capsys, "show", str(run.parent), code=2)
    checkpoint = next((run / "checkpoints").iterdir())
    assert f"a checkpoint, not a run: give the run, {run}" in said(capsys, "show", str(checkpoint), code=2)


def test_rescoring_with_the_same_reward_finds_the_same(
    run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = digest(run)
    judge = tmp_path / "judge.py"
    judge.write_text("def longest(completions):\n    return [float(len(c)) for c in completions]\n")
    same = said(capsys, "rescore", str(run), "--reward", "repetition:1", "--reward", "overlong:3")
    out = tmp_path / "scores.jsonl"
    other = said(capsys, "rescore", str(run), "--reward", f"{judge}:longest", "--out", str(out))
    assert digest(run) == before, "nothing is written into the run"
    assert len(same.splitlines()) == 4
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 48
    assert all(row["new"] == len(row["text"]) for row in rows)
    mean = sum(row["new"] for row in rows) / 48
    assert f"-> {mean:.3f}" in other.splitlines()[-1]
    assert "exists" in said(capsys, "rescore", str(run), "--reward", "number", "--out", str(out), code=2)
    assert "no such" in said(capsys, "rescore", str(run), "--reward", "nothing.py:f", code=2)


def test_rescoring_by_the_runs_own_reward_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = gspo.train("tiny", dir=tmp_path / "run", **{**KEYS, "steps": 1, "reward": "repetition:1"}).folder
    total = said(capsys, "rescore", str(folder), "--reward", "repetition:1").splitlines()[-1]
    assert " 0 of 16 answers differ" in total
    assert re.search(r"reward (\S+) -> \1 ", total)
    assert " 0 of 4 answers differ" in said(capsys, "rescore", str(folder), "--reward", "repetition:1", "--eval")


def test_the_report_is_one_offline_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html = (run / "report.html").read_text()
    assert html.startswith("<!doctype html>")
    assert not re.findall(r'(?:src|href)="(?!#)|url\(|@import|<script', html)
    titles = re.findall(r'class="title">([^<]+)<', html)
    assert {"reward", "clip share", "entropy of a token, nats", "tokens of an answer"} <= set(titles)
    assert any("engine against trainer" in title for title in titles)
    assert html.count("<details>") == 6, "three steps of training, three evaluations"
    (run / "report.html").unlink()
    assert "report: " in said(capsys, "show", str(run), "--report")
    assert (run / "report.html").read_text() == html == page(run)


def test_the_report_of_experts_shows_how_many_changed(tmp_path: Path) -> None:
    keys = {
        **KEYS,
        "steps": 1,
        "model": "random-moe",
        "eval": {"every": 0},
        "reward": lambda completion: len(completion),
    }
    for name, hits in (("grpo", True), ("gspo", False)):
        found = (gspo.train("tiny", dir=tmp_path / name, algorithm=name, **keys).folder / "report.html").read_text()
        titles = set(re.findall(r'class="title">([^<]+)<', found))
        assert {
            "experts changed",
            "experts changed, mean of the steps",
            "spread of the log ratio to the old policy",
        } <= titles
        assert ("replayed experts that routers would still choose" in titles) == hits
        assert "engine to trainer" in found
        assert "layer with experts" in found


def test_the_change_of_experts_by_layer_is_the_mean_of_the_steps() -> None:
    """A step without a comparison is none of them, and a dense model has no such chart."""
    rollout_old, old_new = (f"routing/changed_{which}_layers" for which in ("rollout_old", "old_new"))
    few, many = ({rollout_old: None, old_new: [low, 0.0, 0.6]} for low in (0.1, 0.3))
    (drawn,) = _layers([few, many, {rollout_old: None, old_new: None}])
    (same,) = _layers([{old_new: [0.2, 0.0, 0.6]}])
    assert drawn == same
    assert "by the updates" in drawn
    assert "engine to trainer" not in drawn
    assert _layers([{rollout_old: None, old_new: None}, {}]) == []
    assert _layers([{old_new: [0.2]}]) == []


def test_what_a_model_wrote_is_no_markup(run: Path) -> None:
    path = run / "rollouts" / "00000001.jsonl.gz"
    kept = path.read_bytes()
    lines = [json.loads(line) for line in gzip.decompress(kept).splitlines()]
    lines[0]["text"] = "<script>alert(1)</script>" + "x" * 2000
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    try:
        html = page(run)
    finally:
        path.write_bytes(kept)
    assert "&lt;script&gt;alert(1)" in html
    assert "<script" not in html
    assert "825 characters more" in html


def test_an_evaluation_refuses_what_it_would_not_use(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("steps=3", "dir=runs/x", "optimizer.learning_rate=1", "algorithm=grpo", "checkpoint.every=3"):
        assert f"{word!r} has no effect on `gspo eval`" in said(capsys, "eval", "random-dense", "tiny", word, code=2)


def test_a_stretch_of_verdicts_says_which_step_its_words_are_of() -> None:
    lines = [
        {"step": n, "verdict": f"words of {n}", "verdict/kind": "learning", "verdict/warning": False} for n in (1, 2, 3)
    ]
    found = _verdicts([*lines, {**lines[0], "step": 4, "verdict": "cut", "verdict/kind": "truncated"}])
    assert "<td>1 to 3</td><td>at the last of them: words of 3</td>" in found
    assert "<td>4</td><td>cut</td>" in found


def test_the_length_of_a_short_run_is_in_minutes(run: Path) -> None:
    found = page(run)
    assert re.search(r"3 of 3 steps in \d+m\d\ds", found)
    assert "hours" not in found


TOOLS = "You may call:\ncalculator\nwith\nan expression\n\n"


def talked(ordinal: int) -> Answer:
    said = (("assistant", "<tool_call>2*3</tool_call>"), ("tool", "six it is"), ("assistant", "6"))
    return Answer(
        row=ordinal, ordinal=ordinal, index=0, prompt=f"{TOOLS}question {ordinal}", columns={}, text="6", prompt_ids=[1], ids=list(range(43)),
        mask=[1] * 20 + [0] * 17 + [1] * 6, stop="environment", reward=1.0, reward_parts={}, reward_error=None, advantage=0.5,
        messages=[{"role": role, "content": words} for role, words in said],
    )  # fmt: skip


def test_a_conversation_is_shown_with_all_that_was_said_in_it() -> None:
    answers = [talked(0), talked(1)]
    shared = shared_beginning([answer.prompt for answer in answers])
    assert shared == TOOLS
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(show_group(answers[:1], shared))
    printed = console.export_text()
    for shown in (printed, html.unescape(report_group(answers[:1], shared))):
        assert all(words in shown for words in ("<tool_call>2*3</tool_call>", "six it is", "question 0", "26"))
        assert "43" not in shown, "the environment's tokens are not the answer's"
        assert "an expression" not in shown, "what every prompt begins with is shown once"


def test_a_single_answer_has_no_conversation_below_it() -> None:
    alone = replace(talked(0), messages=[{"role": "assistant", "content": "6"}])
    assert alone.turns == []
    assert shared_beginning([alone.prompt, alone.prompt]) == "", "one prompt is shown as it is"
    assert shared_beginning(["a\nb\nc", "a\nb\nd"]) == "", "two lines are no burden"

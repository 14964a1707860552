"""The reader of a run's files: groups side by side, answers judged again, and the report."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

import gspo
from gspo import cli
from gspo.view.files import groups_in, record_file, steps_recorded
from gspo.view.report import page

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

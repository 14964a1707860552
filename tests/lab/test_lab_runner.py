"""The lab on real arms: processes, files, signals. Each arm is two steps of an untrained two-layer model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import small

from gspo.lab import claims, command
from gspo.lab.arms import Place, all_records
from gspo.lab.experiment import Experiment, Trial
from gspo.lab.outcome import Outcome

GRPO = small.arm("GRPO", "algorithm=grpo")


def run(folder: Path, experiment: Experiment) -> tuple[int, list[str]]:
    said: list[str] = []
    table = {experiment.name: experiment}
    code = command.run([experiment], scale="quick", seeds=None, jobs=2, folder=folder, say=said.append, table=table)
    return code, said


def test_arms_are_run_once_reported_and_left_small(tmp_path: Path) -> None:
    bad = small.arm("diverges", "optimizer.learning_rate=1e9")
    experiment = small.experiment(GRPO, GRPO, bad)
    code, said = run(tmp_path, experiment)
    assert code == 1, "an arm failed"
    line = next(text for text in said if text.startswith("small: "))
    assert line.startswith("small: seen (GRPO 0."), line
    assert "1 runs of arms failed" in line

    records = {r.name: r for r in all_records(tmp_path)}
    assert {name: r.status for name, r in records.items()} == {"GRPO": "finished", "diverges": "failed"}
    assert "error:" in str(records["diverges"].error)
    assert records["GRPO"].command.startswith("gspo train tiny threads=1")
    place = Place(tmp_path, Trial(GRPO, 0))
    journal = [json.loads(text) for text in (place.folder / "journal.jsonl").read_text().splitlines()]
    outcome = records["GRPO"].outcome
    assert isinstance(outcome, Outcome)
    assert outcome.final == pytest.approx(sum(text["reward/mean"] for text in journal) / 2)
    assert sorted(p.name for p in place.folder.iterdir()) == ["journal.jsonl", "run.yaml", "wall"]

    page = (tmp_path / "report.html").read_text()
    assert page.count("<code>gspo train tiny") == 2, "every arm stands in the appendix"
    assert "http" not in page.replace("https://arxiv.org", "")
    assert "src=" not in page
    assert "diverges" in (tmp_path / "claims.md").read_text()
    kept = claims.JSON.validate_json((tmp_path / "claims.json").read_bytes())
    assert claims.page(kept) == (tmp_path / "claims.md").read_text()

    # Again: what is finished is not run, what failed is, and a changed protocol makes other arms.
    before = place.file.stat().st_mtime_ns
    longer = small.arm("GSPO", "algorithm=gspo", steps=3)
    code, _ = run(tmp_path, small.experiment(GRPO, longer))
    assert code == 0
    assert place.file.stat().st_mtime_ns == before
    assert len(all_records(tmp_path)) == 3, "the arms of the earlier protocol are kept"
    assert (tmp_path / "report.html").read_text().count("<td>none now") == 1


STEPS = 100
LAB = """
    import sys
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    import small
    from gspo.lab import command
    arm = small.arm("grpo", "algorithm=grpo", "checkpoint.every=25", steps={steps})
    e = small.experiment(arm, arm)
    sys.exit(command.run([e], scale="quick", seeds=None, jobs=1, folder=Path({folder!r}), say=print, table={{e.name: e}}))
"""


def lab(folder: Path) -> subprocess.Popen[str]:
    code = textwrap.dedent(LAB).format(tests=str(Path(__file__).parent), folder=str(folder), steps=STEPS)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def wait_for_step(folder: Path, name: str, step: int) -> Path:
    """The run folder of an arm, when it has done some steps."""
    for _ in range(600):
        found = list(folder.glob(f"arms/{name}-*/journal.jsonl"))
        if found and found[0].read_bytes().count(b"\n") >= step:
            return found[0].parent
        time.sleep(0.1)
    raise AssertionError("the arm did not start")


def test_stopped_by_a_signal_it_goes_on_where_it_was(tmp_path: Path) -> None:
    first = lab(tmp_path)
    arm = wait_for_step(tmp_path, "grpo", 3)
    first.send_signal(signal.SIGINT)
    out, _ = first.communicate(timeout=60)
    assert first.returncode == 130
    assert "goes on from here" in out
    done = (arm / "journal.jsonl").read_bytes().count(b"\n")
    assert 3 <= done < STEPS
    assert not list(tmp_path.glob("arms/*.json")), "an arm that was stopped is no failure"
    before = float((arm / "wall").read_text())

    second = lab(tmp_path)
    out, _ = second.communicate(timeout=120)
    assert second.returncode == 0, out
    assert f"goes on after step {done}" in out
    (record,) = all_records(tmp_path)
    assert record.wall > before > 0, "seconds of both processes"
    steps = [json.loads(text)["step"] for text in (arm / "journal.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))


def test_an_arm_outlives_a_lab_that_is_killed_and_is_not_run_twice(tmp_path: Path) -> None:
    first = lab(tmp_path)
    arm = wait_for_step(tmp_path, "grpo", 3)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    second = lab(tmp_path)
    out, _ = second.communicate(timeout=120)
    assert second.returncode == 0, out
    assert not list(arm.parent.glob("grpo-*/set-aside-*")), "two processes would have written the same journal"
    steps = [json.loads(text)["step"] for text in (arm / "journal.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))

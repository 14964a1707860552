"""The line of `make rlhf`: three stages as processes, a report, and a line an algorithm."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gspo.config import Run
from gspo.lab import line, line_report
from gspo.lab.line_report import Arm

SMALL = (
    *("sft:steps=2", "sft:batch_size=4", "sft:data.limit=8", "sft:eval.limit=4", "sft:eval.every=1"),
    *("reward:steps=2", "reward:batch_size=4", "reward:eval.limit=8", "reward:eval.every=1"),
    *("train:steps=2", "train:prompts_per_step=4", "train:group_size=4", "train:eval.every=1", "train:eval.limit=4"),
)


def test_every_stage_runs_once_and_the_report_sets_them_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "ALGORITHMS", ("grpo",))
    whole = line.Line(tmp_path, (0,), SMALL, few_by=None)
    (last,) = line.run_line(whole)
    journal = [json.loads(row) for row in (tmp_path / "grpo-0" / "journal.jsonl").read_text().splitlines()]
    assert last == f"grpo: true reward {journal[0]['eval/start/reward']:.3f} -> {journal[-1]['eval/reward']:.3f}"
    assert all(row["reward/mean"] == pytest.approx(row["reward/reward_model/mean"]) for row in journal), "weight 0"
    report = (tmp_path / "report.md").read_text()
    pictures = re.findall(r"!\[[\w-]+\]\(([\w.-]+)\)", report)
    assert len(pictures) == 6
    assert all((tmp_path / name).read_text().startswith("<svg ") for name in pictures)
    (row,) = [each.split(" | ") for each in report.splitlines() if each.startswith("| grpo |")]
    assert re.fullmatch(r"[01]\.\d\d -> [01]\.\d\d", row[6]), "both ends of the agreement are of training steps"
    started = (tmp_path / "sft" / "run.yaml").stat().st_mtime_ns
    assert line.run_line(whole) == [last]
    assert (tmp_path / "sft" / "run.yaml").stat().st_mtime_ns == started, "what is finished is not run twice"


def test_an_algorithm_that_is_not_trained_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "ALGORITHMS", ("gspo", "nonsense"))
    known, refused = line.Line(Path("."), (0,)).trained()
    assert known == ("gspo",)
    assert "nonsense" in refused["nonsense"]


def test_a_stage_that_fails_ends_the_line_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["line", "--dir", str(tmp_path), "sft:batch_sise=1"])
    assert line.main() == 1
    assert "did you mean 'batch_size'" in capsys.readouterr().err


def test_words_are_of_a_stage() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gspo.lab.line", "steps=2"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "STAGE:KEY=VALUE" in done.stderr


def test_equal_time_is_the_last_evaluation_within_it() -> None:
    step = {"rollouts/total": 10, "time/eval": 5.0}
    lines = (
        {**step, "eval/start/reward": 0.1, "time/step": 6.0},
        {**step, "time/step": 7.0, "eval/reward": 0.3},
        {**step, "time/step": 8.0, "eval/reward": 0.2},
    )
    arm = Arm("a", 0, lines, line.Cost(9.0, 9.0, 0), (None, None, None))
    assert arm.held_out == [(0, 0.0, 0.1), (20, 3.0, 0.3), (30, 6.0, 0.2)]
    assert [arm.within(seconds) for seconds in (2.9, 3.0, 5.0, 6.0)] == [0.1, 0.3, 0.3, 0.2]
    assert arm.seconds == 6.0


def test_the_true_reward_is_drawn_against_the_learned_one_over_all_seeds() -> None:
    def arm(seed: int, learned: list[float], true: list[float]) -> Arm:
        lines = tuple({line_report.LEARNED: a, line_report.RULE: b} for a, b in zip(learned, true, strict=True))
        return Arm("a", seed, lines, line.Cost(1.0, 1.0, 0), (None, None))

    arms = [arm(0, [0.0, 2.0, 4.0], [0.5, 0.7, 0.2]), arm(1, [2.0, 2.0, 5.0], [0.1, 0.1, 0.4])]
    path = line_report._path("a", arms, window=2)
    assert path.x == [1.5, 4.5]
    assert path.middle == pytest.approx([0.35, 0.3])
    assert (path.low, path.high) == (pytest.approx([0.1, 0.2]), pytest.approx([0.6, 0.4]))


def test_the_report_has_equal_rollouts_equal_time_agreement_and_memory_by_hand() -> None:
    def arm(seed: int, rewards: tuple[float, float, float], seconds: float, peak: int, last: float | None) -> Arm:
        start, middle, end = rewards
        step = {"rollouts/total": 10, "time/step": seconds, line_report.LEARNED: 0.25 + seed}
        lines = ({**step, "step": 1, "eval/start/reward": start, "eval/reward": middle}, {**step, "step": 2, "eval/reward": end})  # fmt: skip
        return Arm("a", seed, lines, line.Cost(9.0, 7.0 + seed, peak), (0.5, last))

    arms = [arm(0, (0.1, 0.5, 0.3), 4.0, 10_000_000, 0.75), arm(1, (0.2, 0.4, 0.6), 2.0, 30_000_000, None)]
    found = line_report._numbers(arms, shortest=4.0)
    assert found == [
        *("0.150 (0.100-0.200)", "0.450 (0.300-0.600)"),
        "0.550 (0.500-0.600)",  # in 4 seconds the first has made one step, the second both
        *("0.550 (0.500-0.600)", "0.75 -> 0.75", "0.50 -> 0.75", "6", "8", "30 MB"),
    ]
    assert line_report._numbers([arm(0, (0.1, 0.5, 0.3), 4.0, 0, None)], 4.0)[5] == "0.50 -> -"


def test_equal_time_is_that_of_the_shortest_run(tmp_path: Path) -> None:
    step = {"rollouts/total": 1, "eval/start/reward": 0.0, "eval/reward": 0.5, line_report.LEARNED: 0.0, "step": 1}
    arms = {
        name: [Arm(name, 0, ({**step, "time/step": seconds},), line.Cost(1.0, 1.0, 0), (None,))]
        for name, seconds in (("a", 30.0), ("b", 20.0))
    }
    judged = {f"eval/{key}": 0.5 for key in ("accuracy", "accuracy_low", "accuracy_high", "calibration_error", "pairs")}
    (tmp_path / "reward").mkdir()
    (tmp_path / "reward" / "journal.jsonl").write_text(json.dumps({"step": 1, **judged}) + "\n")
    report = line_report._report(line.Line(tmp_path, (0,)), arms, [], {})
    assert "at equal time (20 s)" in report
    assert [each.split(" | ")[3] for each in report.splitlines() if each.startswith(("| a |", "| b |"))] == [
        "0.000",
        "0.500",
    ]


def test_agreement_is_over_pairs_that_the_rule_tells_apart(tmp_path: Path) -> None:
    def row(ordinal: int, rule: float | None, learned: float | None) -> str:
        return json.dumps({"ordinal": ordinal, "reward_parts": {line.TRUE: rule, "reward_model": learned}})

    rows = [row(0, 0.2, 1.0), row(0, 0.4, 3.0), row(0, 0.4, 9.0), row(0, 0.6, 2.0), row(1, 0.0, 5.0), row(1, None, 0.0)]
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write("\n".join(rows))
    assert line_report._agreement(tmp_path / "a.jsonl.gz") == pytest.approx(3 / 5)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write("\n".join([row(0, 0.2, 1.0), row(0, 0.2, 3.0)]))
    assert line_report._agreement(tmp_path / "b.jsonl.gz") is None


def test_every_seed_over_optimises_the_reward_of_few_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(line.Line, "run", lambda self, runs: ran.extend(each.name for each in runs))
    monkeypatch.setattr(line_report, "write", lambda *_: [])
    line.run_line(line.Line(tmp_path, (0, 1)))
    assert ran[:3] == ["sft", "reward", "few"]
    assert {name for name in ran if name.startswith("few-")} == {"few-grpo-0", "few-grpo-1"}
    assert len(ran) == len(set(ran)) == 3 + 3 * 2 + 2


def test_the_recipes_of_the_line_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from gspo import settings
    from gspo.stage_config import RewardRun, Sft

    kinds = zip(line.STAGES, (Sft, RewardRun, Run), strict=True)
    assert [type(settings.load_as(kind, line.recipe(stage))) for stage, kind in kinds] == [Sft, RewardRun, Run]

"""A run's files made by hand, and damaged: each reader names what is wrong, and none says that all is well."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import pytest
from rich.console import Console

from gspo.config import Judging, RewardRule
from gspo.errors import InputError
from gspo.view import files
from gspo.view.report import write_report
from gspo.view.rescore import rescore
from gspo.view.show import show

ANSWER = (
    '{"row": 0, "ordinal": 0, "index": 0, "prompt": "p", "columns": {}, "text": "t", "prompt_ids": [1], "ids": [2], '
    '"mask": [1], "stop": "eos", "reward": 1.0, "reward_parts": {}, "reward_error": null}\n'
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "rollouts").mkdir(parents=True)
    (folder / "run.yaml").write_text("model: {name: m}\nseed: 0\nsteps: 2\n")
    (folder / "journal.jsonl").write_text(
        '{"step": 1, "verdict": "v", "verdict/kind": "k", "verdict/warning": false}\n'
    )
    (folder / "rollouts" / "00000001.jsonl.gz").write_bytes(gzip.compress(ANSWER.encode()))
    return folder


def shown(folder: Path) -> None:
    show(folder, 1, evaluation=False, groups=1, out=Console(file=io.StringIO()))


def test_an_emptied_record_is_refused(run: Path) -> None:
    path = run / "rollouts" / "00000001.jsonl.gz"
    assert [answer.text for answer in files.answers_in(path)] == ["t"]
    for nothing in (b"", gzip.compress(b"")):
        path.write_bytes(nothing)
        with pytest.raises(InputError, match="not one answer"):
            list(files.answers_in(path))
        with pytest.raises(InputError, match="not one answer"):
            write_report(run)


@pytest.mark.parametrize("text", ["steps: [", "{}", "model: 3", "steps: 2\nseed: 0\nmodel: {}"])
def test_the_report_of_a_run_with_a_damaged_run_yaml_is_refused(text: str, run: Path) -> None:
    write_report(run)
    (run / "run.yaml").write_text(text)
    with pytest.raises(InputError, match=r"run\.yaml"):
        write_report(run)


@pytest.mark.parametrize("line", ["[1]", "{}", '{"step": "x"}', '{"step": 1, "verdict": 3}'])
def test_a_journal_line_that_is_no_step_is_refused(line: str, run: Path) -> None:
    (run / "journal.jsonl").write_text(line + "\n")
    for reader in (write_report, shown):
        with pytest.raises(InputError, match=r"journal\.jsonl"):
            reader(run)
    (run / "journal.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(InputError, match=r"journal\.jsonl is damaged: .*reward/mean"):
        shown(run)


@pytest.mark.parametrize("out", ["nodir/x.jsonl", "run.txt/x.jsonl", "/proc/x.jsonl"])
def test_an_answer_file_that_cannot_be_written_is_refused_before_judging(out: str, run: Path, tmp_path: Path) -> None:
    (tmp_path / "run.txt").write_text("")
    judged = tmp_path / "judged"
    rule = RewardRule(function=lambda completion: judged.touch() or 1.0)
    with pytest.raises(InputError, match="cannot be written"):
        rescore(run, [rule], Judging(workers=1), evaluation=False, out=tmp_path / out)
    assert not judged.exists()

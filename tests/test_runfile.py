"""run.yaml and journals as people and disks leave them: read, or refused with the file and the line."""

from pathlib import Path

import pytest

from gspo.errors import InputError
from gspo.runfile import read_lines, read_settings


@pytest.mark.parametrize("text", ["steps: [", "", "[1]", "3", "about: 3", "about: [a]", "\x00"])
def test_a_broken_run_yaml_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"run\.yaml: damaged"):
        read_settings(path)


def test_run_yaml_that_is_no_text_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    with pytest.raises(InputError, match="damaged"):
        read_settings(path)
    path.write_bytes(b"seed: \xff")
    with pytest.raises(InputError, match="damaged"):
        read_settings(path)
    path.write_text("seed: 3\nabout: {gspo: x}\n")
    assert read_settings(path) == {"seed": 3, "about": {"gspo": "x"}}


@pytest.mark.parametrize("line", ["[1]", "{}", '{"step": "x"}', '{"step": true}', '{"step": 1', "null", "7", "\udcff"])
def test_a_line_that_tells_of_no_step_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line.encode(errors="surrogateescape") + b'\n{"step": 3}\n')
    with pytest.raises(InputError, match=r"journal\.jsonl: line 2 is damaged"):
        read_lines(path)


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    assert read_lines(path) == []
    path.write_bytes(b'{"step": 1}\n{"st')
    assert read_lines(path) == [{"step": 1}]

"""What the docs say that a test shows is shown by a test that there is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def defined(file: Path) -> set[str]:
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


EVERYWHERE = set().union(*(defined(file) for file in TESTS.rglob("test_*.py")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    for file, name in re.findall(r"([\w/]*test_\w+\.py)::(test_\w+)", text):
        path = TESTS / file.removeprefix("tests/")
        assert path.is_file(), file
        assert name in defined(path), f"{file}::{name}"
    for file in re.findall(r"\((?:\.\./)?tests/([\w/]+\.py)\)", text):
        assert (TESTS / file).is_file(), file
    for name in re.findall(r"`(test_\w+)`", text):
        assert name in EVERYWHERE, name


def test_the_fault_table_names_its_tests() -> None:
    named = re.findall(r"test_\w+\.py::test_\w+", (ROOT / "docs" / "reliability.md").read_text())
    assert len(set(named)) >= 25

"""The order of the house: one-way imports, short functions, light imports, a doc line for every key."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

import gspo
from gspo import settings
from gspo.config import Run
from gspo.stage_config import RewardRun, Sft

PACKAGE = Path(gspo.__file__).parent

# Lowest first: a file may import only from lines above its own, or from its own room.
ORDER = [
    "errors", "types", "warden", "written", "trackers", "presets", "sections", "rates", "critic_config", "config", "stage_config", "settings", "keys", "machine", "hub", "stopping", "guard", "runfile", "algorithms", "models", "tasks", "rewards", "engines", "conversations",
    "rollout", "trees", "batch", "drawing", "ahead", "stats", "credit", "replay", "balance", "objectives", "learner", "evaluate", "record", "metrics", "journal", "lock", "seal", "store", "critic", "rescue", "drift", "heartbeat", "console", "inputs", "place", "advice", "fit",
    "view", "export", "preflight", "updates", "job", "build", "loop", "trial", "check", "stages", "lab", "cli",
]  # fmt: skip
FILES = sorted(path for path in PACKAGE.rglob("*.py"))
HEAVY = ("torch", "transformers", "datasets", "peft")


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[str]:
    """Rooms of gspo that a file imports, at any depth."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"gspo.{a.name}" for a in node.names] if node.module == "gspo" else [node.module]
        yield from (name.split(".")[1] for name in names if name.startswith("gspo."))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    if path.name == "__init__.py":
        return
    above = ORDER[: ORDER.index(room(path)) + 1]
    wrong = [name for name in imports(ast.parse(path.read_text())) if name not in above and name != "__version__"]
    assert not wrong, f"{path.name} imports {wrong}, which stand below it"


def test_the_maths_knows_no_model_engine_or_file() -> None:
    for path in (PACKAGE / "algorithms").glob("*.py"):
        assert set(imports(ast.parse(path.read_text()))) <= {"algorithms", "presets", "errors"}, path.name


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_functions_and_files_are_short(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            assert lines <= 60, f"{path.name}:{node.lineno} {node.name} has {lines} lines"
            assert len(node.args.posonlyargs + node.args.args) <= 6, f"{path.name}:{node.lineno} {node.name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_branches_on_an_algorithm_name(path: Path) -> None:
    names = set(gspo.PRESETS)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare) and "name" in ast.unparse(node.left).split("."):
            compared = {c.value for side in node.comparators for c in ast.walk(side) if isinstance(c, ast.Constant)}
            assert not compared & names, f"{path.name}:{node.lineno} compares a name with {compared & names}"


@pytest.mark.parametrize(
    "words",
    [
        ["-c", "import gspo"],
        *(
            ["-m", "gspo.cli", *command, "--help"]
            for command in ([], ["train"], ["sft"], ["reward"], ["check"], ["show"], ["lab"])
        ),
        ["-m", "gspo.cli", "lab", "--list"],
        ["-m", "gspo.cli", "tasks"],
        ["-m", "gspo.cli", "tasks", "addition:1-9"],
    ],
)
def test_importing_and_asking_for_help_load_nothing_heavy(words: list[str]) -> None:
    """vllm, flash-attn, ray and wandb are not installed here either: huggingface/trl#4617, #3304."""
    probe = f"import sys, atexit; atexit.register(lambda: print('LOADED', [m for m in {HEAVY} if m in sys.modules]))"
    run = "import runpy; sys.argv = ['gspo'] + ARGS; runpy.run_module('gspo.cli', run_name='__main__')"
    code = f"{probe}; {words[1]}" if words[0] == "-c" else f"{probe}; ARGS = {words[2:]!r}; {run}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "LOADED []" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0


def test_a_fake_engine_package_on_the_path_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('version 99 renamed everything')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import gspo, gspo.cli, gspo.build"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _optional_sections(kind: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Sections that are null unless they are asked for: their keys cost a reader nothing before."""
    for name, field in kind.model_fields.items():
        sections = [
            a
            for a in (field.annotation, *get_args(field.annotation))
            if isinstance(a, type) and issubclass(a, BaseModel)
        ]
        if sections and field.default is None:
            yield f"{prefix}{name}."
        elif sections:
            yield from _optional_sections(sections[0], f"{prefix}{name}.")


def test_every_key_has_a_doc_line_and_there_are_few() -> None:
    for kind in (Run, Sft, RewardRun):
        keys = list(settings.fields(kind))
        optional = tuple(_optional_sections(kind))
        assert len([name for name, _ in keys if not name.startswith(optional)]) <= 80
        assert not [name for name, doc in keys if not doc]

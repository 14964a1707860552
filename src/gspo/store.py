"""Checkpoints that are complete or absent, and the resolved configuration of a run.

`job` calls `save` when one is due and `latest` on resume. A checkpoint is written to a temporary folder,
synced and renamed; an old one goes only after the new one is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from gspo import __version__, config, settings
from gspo.errors import InputError, RunError
from gspo.models.load import without_progress_bars

FORMAT = 1
"""Version of the layout of a checkpoint folder."""


@dataclass(frozen=True)
class Progress:
    """What a run has to remember beside weights and moments."""

    step: int
    updates: int
    """Optimizer updates done: the position in the schedule."""
    position: int
    """Ordinal of the next draw of a prompt: the position of the sampler."""
    best_reward: float | None = None
    """Highest evaluation reward so far."""
    start_reward: float | None = None
    """Evaluation reward before the first step."""
    last_reward: float | None = None
    """Latest evaluation reward."""


class Store:
    """The `checkpoints/` folder of a run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._run = folder
        self._folder = folder / "checkpoints"
        self._keep = keep
        self._folder.mkdir(parents=True, exist_ok=True)

    def save(
        self, progress: Progress, *, model: Any, tokenizer: Any, weights: dict[str, Tensor], moments: dict[str, Tensor]
    ) -> Path:
        """Write checkpoints/<step>: weights as transformers loads them, moments, progress.

        Raises RunError if the disk refuses; earlier checkpoints stay.
        """
        final = self._folder / f"{progress.step:08d}"
        draft = self._folder / f".draft-{progress.step:08d}"
        shutil.rmtree(draft, ignore_errors=True)
        try:
            draft.mkdir()
            with without_progress_bars():
                model.save_pretrained(draft, state_dict=dict(weights))  # it empties the dict that it is given
            _declare_dtype(draft / "config.json", weights)
            tokenizer.save_pretrained(draft)
            save_file(moments, draft / "optimizer.safetensors")
            (draft / "state.json").write_text(json.dumps({"format": FORMAT, **asdict(progress)}, indent=1))
            _sync(draft)
            if final.exists():
                shutil.rmtree(final)
            draft.rename(final)
            _sync_folder(self._folder)
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            free = shutil.disk_usage(self._folder).free
            raise RunError(
                f"{final} could not be written ({error}); {free / 1e9:.2f} GB are free. Earlier checkpoints are untouched"
            ) from error
        return final

    def mark_best(self, checkpoint: Path) -> None:
        """Point `best` at a checkpoint; it is never removed while it is the best."""
        link, draft = self._run / "best", self._run / ".best"
        draft.unlink(missing_ok=True)
        draft.symlink_to(checkpoint.relative_to(self._run))
        draft.replace(link)

    def prune(self) -> None:
        """Remove all but the newest `keep` checkpoints and the best."""
        best = (self._run / "best").resolve()
        for old in self.complete()[: -self._keep]:
            if old.resolve() != best:
                shutil.rmtree(old)

    def complete(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(path for path in self._folder.glob("[0-9]" * 8) if (path / "state.json").exists())


def latest(folder: Path) -> Path:
    """The newest complete checkpoint of a run. Raises InputError if there is none."""
    if not (folder / "run.yaml").is_file():
        raise InputError(
            f"{folder}: no run to resume here (there is no run.yaml). Give the folder of a run, as in runs/demo"
        )
    found = sorted(path for path in (folder / "checkpoints").glob("[0-9]" * 8) if (path / "state.json").exists())
    if not found:
        raise InputError(f"{folder}: the run was stopped before its first checkpoint; start it again with another dir")
    return found[-1]


def read_progress(checkpoint: Path) -> Progress:
    """What `save` wrote. Raises InputError for a format that this version does not read."""
    state = json.loads((checkpoint / "state.json").read_text())
    if state.pop("format") != FORMAT:
        raise InputError(
            f"{checkpoint}: written by another version of gspo, in a format that this one ({__version__}) does not read"
        )
    return Progress(**state)


def read_moments(checkpoint: Path) -> dict[str, Tensor]:
    """Moments of the optimizer by name. Raises InputError if the file is missing."""
    path = checkpoint / "optimizer.safetensors"
    if not path.is_file():
        raise InputError(f"{path} is missing: the run cannot be resumed without the state of its optimizer")
    return load_file(path)


def write_run(folder: Path, run: config.Run, about: dict[str, Any]) -> None:
    """run.yaml: every value of the configuration, and under `about` what it was run with."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(
        yaml.safe_dump({**settings.dump(run), "about": about}, sort_keys=False, allow_unicode=True)
    )


def _declare_dtype(path: Path, weights: dict[str, Tensor]) -> None:
    """transformers writes the working copy's dtype, and would then round the masters to it on loading."""
    settings = json.loads(path.read_text())
    settings["dtype"] = str(next(t.dtype for t in weights.values() if t.is_floating_point())).removeprefix("torch.")
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

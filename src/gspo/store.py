"""Checkpoints that are complete or absent, and the resolved configuration of a run.

`job` calls `save` when one is due and `latest` on resume. A checkpoint is written to a temporary folder,
synced and renamed; an old one goes only after the new one is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gspo import __version__, settings, written
from gspo.ahead import write_ahead
from gspo.drawing import Drawn
from gspo.errors import InputError, RunError
from gspo.guard import State, read_state
from gspo.lock import Lock
from gspo.models.load import without_progress_bars
from gspo.models.lora import adapter_of
from gspo.runfile import read_settings
from gspo.seal import as_umask, require_whole, seal
from gspo.stage_config import AnyRun
from gspo.tasks.sampler import Seen

FORMAT = 1
"""Version of the layout of a checkpoint folder."""
CRITIC, CRITIC_MOMENTS = "critic.safetensors", "critic-optimizer.safetensors"
"""A critic's weights, and the state of its optimizer if it has one of its own."""
_SETTINGS = "settings.yaml"
"""In a checkpoint: run.yaml as it was when the checkpoint was written. By that name a folder would be a run's."""
DRAFT = "run.tmp"
"""run.yaml while it is written."""
_MAY_CHANGE = ("steps", "dir", "trackers")


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
    best_step: int | None = None
    """The step that it was measured after: what `best` points to."""
    start_reward: float | None = None
    """Evaluation reward before the first step."""
    last_reward: float | None = None
    """Latest evaluation reward."""
    max_tokens_per_microbatch: int | None = None
    """Token budget that memory has left of the configured one; None: all of it."""
    ahead: int = 0
    """Steps whose answers have been sampled already."""
    kl_coefficient: float | None = None
    """What a KL term that is steered has come to; None: the configured one."""
    seen: tuple[Seen, ...] = ()
    """What the sampler knows of the difficulty of prompts."""
    stale: int = 0
    """Evaluations since the best one."""
    guard: State | None = None
    """What the guard remembers; None with guard=off."""
    emptied: bool = False
    """The guard went back to the start, and no update was made since: the optimizers hold nothing, whatever `updates` is."""
    critic_updates: int | None = None
    """Updates done of a critic of its own, which makes none in a step in which the policy diverges; None: as many as the policy."""


@dataclass(frozen=True)
class CriticState:
    """What a checkpoint keeps of a critic, by name."""

    weights: dict[str, Tensor]
    """float32 or better."""
    moments: dict[str, Tensor]
    """State of an optimizer of its own; empty if it has none."""


class Store:
    """The `checkpoints/` folder of a run, and the right to write in it."""

    def __init__(self, folder: Path, keep: int) -> None:
        """Raises InputError if another process works on this run, or the folder cannot be written to."""
        self._run = folder
        self._folder = folder / "checkpoints"
        self._keep = keep
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{folder}: cannot be written to ({error.strerror}): a run needs its folder") from error
        self._lock = Lock(folder)
        for draft in self._folder.glob(".draft-*"):  # of a run that was killed while it saved
            shutil.rmtree(draft)

    def save(
        self,
        progress: Progress,
        *,
        model: Any,
        tokenizer: Any,
        weights: dict[str, Tensor],
        moments: dict[str, Tensor],
        ahead: Sequence[Drawn] = (),
        critic: CriticState | None = None,
    ) -> Path:
        """Write checkpoints/<step>: weights as transformers loads them (of an adapter, it alone, as peft does), moments,
        progress, critic, and what was drawn ahead.

        Raises RunError if the disk refuses, or has too little room; earlier checkpoints stay.
        """
        need = sum(t.numel() * t.element_size() for t in (*weights.values(), *moments.values()))
        final = self._folder / f"{progress.step:08d}"
        draft = self._folder / f".draft-{progress.step:08d}"
        shutil.rmtree(draft, ignore_errors=True)
        if need > shutil.disk_usage(self._folder).free:  # before an hour's writing, and before it is full
            raise RunError(self._no_room(final, "no room", need))
        try:
            draft.mkdir()
            _write_weights(draft, model, weights)
            tokenizer.save_pretrained(draft)
            save_file(moments, draft / "optimizer.safetensors")
            if critic is not None:
                save_file(critic.weights, draft / CRITIC)
                save_file(critic.moments, draft / CRITIC_MOMENTS)
            if ahead:
                write_ahead(draft, ahead)
            shutil.copyfile(self._run / "run.yaml", draft / _SETTINGS)
            (draft / "state.json").write_text(
                json.dumps({"format": FORMAT, **asdict(progress)}, indent=1, allow_nan=False)
            )
            as_umask(draft)
            seal(draft)
            _sync(draft)
            if final.exists():
                shutil.rmtree(final)
            draft.rename(final)
            _sync_folder(self._folder)
        except (OSError, SafetensorError) as error:  # safetensors has its own for a full disk
            shutil.rmtree(draft, ignore_errors=True)
            raise RunError(self._no_room(final, str(error), need)) from error
        return final

    def _no_room(self, final: Path, why: str, need: int) -> str:
        free = shutil.disk_usage(self._folder).free
        return (
            f"{final} could not be written ({why}): a checkpoint needs {_size(need)}, and {_size(free)} are free. Earlier checkpoints "
            f"are untouched: make room, then go on from the last one with --resume {self._run}"
        )

    def close(self) -> None:
        """Let others work on this run."""
        self._lock.close()

    def settle(self, progress: Progress) -> None:
        """Point `best` at the best checkpoint, then remove all others but the newest `keep` and those that the guard would go back to.

        Both follow from `progress` alone, so that a run killed between a save and this is put right when it resumes.
        """
        best = self._folder / f"{progress.best_step:08d}" if progress.best_step is not None else None
        if best is not None and best.is_dir():
            link, draft = self._run / "best", self._run / ".best"
            draft.unlink(missing_ok=True)
            draft.symlink_to(best.relative_to(self._run))
            draft.replace(link)
        guard = progress.guard
        steps = () if guard is None else (guard.target, guard.waiting)
        back = [self._folder / f"{step:08d}" for step in steps if step is not None]
        for old in self.complete()[: -self._keep]:
            if old != best and old not in back:
                shutil.rmtree(old)

    def complete(self) -> list[Path]:
        """Checkpoints, oldest first: each was complete when it got its name."""
        return sorted(self._folder.glob("[0-9]" * 8))


def require_run(folder: Path) -> None:
    """Raise InputError if there is no run in `folder`."""
    if not (folder / "run.yaml").is_file():
        raise InputError(
            f"{folder}: no run to resume here (there is no run.yaml). Give the folder of a run, as in runs/demo"
        )


def latest(folder: Path) -> Path | None:
    """The newest checkpoint of a run, damaged or not: none is passed over. None if it ended before its first one."""
    found = sorted((folder / "checkpoints").glob("[0-9]" * 8))
    return found[-1] if found else None


@dataclass(frozen=True)
class Saved:
    """Where a run can go on: its newest complete checkpoint, read and found whole before any weight is loaded."""

    checkpoint: Path
    progress: Progress
    moments: dict[str, Tensor]
    """State of the optimizer by name."""
    critic: CriticState | None = None

    @property
    def folder(self) -> Path:
        """The run's."""
        return self.checkpoint.parents[1]

    @property
    def words(self) -> str:
        """What is restored."""
        done = self.progress
        said = [f"weights, optimizer ({done.updates} updates)", f"position {done.position} in the data"]
        said += [f"answers for {done.ahead} steps ahead"] if done.ahead else []
        said += [f"the difficulty of {len(done.seen)} prompts"] if done.seen else []
        said += ["the critic"] if self.critic is not None else []
        said += [f"a KL coefficient of {done.kl_coefficient:.3g}"] if done.kl_coefficient is not None else []
        if done.guard is not None:
            said.append(f"the guard ({done.guard.rollbacks} rollbacks, learning rate times {done.guard.step_size:g})")
        if done.best_reward is not None:
            said.append(f"the best held-out reward so far ({done.best_reward:.3f}, step {done.best_step})")
        return ", ".join(said)

    @property
    def model(self) -> dict[str, Any]:
        """Keys of the model section that name the checkpoint's weights."""
        return {"name": str(self.checkpoint), "lora": None}


def read_saved(folder: Path) -> Saved | None:
    """The run in `folder` as it was last saved; None before its first checkpoint. Raises InputError as `read_checkpoint` does."""
    newest = latest(folder)
    return None if newest is None else read_checkpoint(newest, folder)


def read_checkpoint(checkpoint: Path, folder: Path) -> Saved:
    """One checkpoint of the run in `folder`. Raises InputError for what is missing, damaged or of another format."""
    moments = _moments(checkpoint / "optimizer.safetensors")
    critic = None
    if (checkpoint / CRITIC).is_file():
        critic = CriticState(_moments(checkpoint / CRITIC), _moments(checkpoint / CRITIC_MOMENTS))
    require_whole(checkpoint)
    _require_same_settings(folder, checkpoint)
    return Saved(checkpoint, read_progress(checkpoint), moments, critic)


def _require_same_settings(folder: Path, checkpoint: Path) -> None:
    """Raise InputError for a key of run.yaml that was changed since the checkpoint was written."""
    if not (checkpoint / _SETTINGS).is_file():
        return
    then, now = (_flat(read_settings(path)) for path in (checkpoint / _SETTINGS, folder / "run.yaml"))
    for key in {**then, **now}:
        if key not in _MAY_CHANGE and then.get(key) != now.get(key):
            raise InputError(
                f"{folder / 'run.yaml'}: {key} is {now.get(key)!r}, and was {then.get(key)!r} when {checkpoint} was written: put it back, or start "
                "a new run. Only steps can be changed"
            )


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix.rstrip("."): tree}
    return {key: value for name, below in tree.items() for key, value in _flat(below, f"{prefix}{name}.").items()}


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def read_about(folder: Path) -> dict[str, Any]:
    """What the run's run.yaml says of what it was started with."""
    about: dict[str, Any] = read_settings(folder / "run.yaml").get("about", {})
    return about


def read_progress(checkpoint: Path) -> Progress:
    """What `save` wrote. Raises InputError for a format that this version does not read."""
    try:
        state = json.loads((checkpoint / "state.json").read_text())
        found, progress = state.pop("format"), state
    except (OSError, ValueError, AttributeError, KeyError) as error:
        raise _damaged(checkpoint / "state.json", error) from error
    if found != FORMAT:
        raise InputError(
            f"{checkpoint}: written by another version of gspo, in a format that this one ({__version__}) does not read"
        )
    try:
        seen = tuple(Seen(**each) for each in progress.get("seen", ()))
        return Progress(**{**progress, "seen": seen, "guard": read_state(progress.get("guard"))})
    except TypeError as error:
        raise _damaged(checkpoint / "state.json", error) from error


def _damaged(path: Path, error: Exception) -> InputError:
    return InputError(
        f"{path} is damaged ({error}): move the folder {path.parent} away, and the run resumes from the checkpoint before it"
    )


def _moments(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise InputError(f"{path} is missing: the run cannot be resumed without the state of its optimizer")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise _damaged(path, error) from error


def write_run(folder: Path, run: AnyRun, about: dict[str, Any]) -> None:
    """run.yaml: every value of the configuration, and under `about` what it was run with."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_yaml(folder, {**settings.dump(run), "about": about})


def change_steps(folder: Path, steps: int) -> int:
    """Write the number of steps that a resumed run goes on to into its run.yaml; returns what stood there."""
    found = read_settings(folder / "run.yaml")
    before: int = found["steps"]
    _write_yaml(folder, {**found, "steps": steps})
    return before


def _write_yaml(folder: Path, run: dict[str, Any]) -> None:
    """run.yaml, whole or not at all."""
    draft = folder / DRAFT
    draft.write_text(written.write(run), encoding="utf-8")
    draft.replace(folder / "run.yaml")


def _write_weights(folder: Path, model: Any, weights: dict[str, Tensor]) -> None:
    adapter = adapter_of(model)
    if adapter is not None:
        adapter.save(folder, weights)
        return
    with without_progress_bars():
        model.save_pretrained(folder, state_dict=dict(weights))  # it empties the dict that it is given
    _declare_dtype(folder / "config.json", weights)


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

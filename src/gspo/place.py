"""The folder of a run: a free one for a new run, or that of a run that goes on, with what is known of how it was started.

In: a configuration, or a folder that holds a run. Out: `Place`, or the configuration of the run that is there. `build` and
the stages ask for the place, the command line and the Python API for the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar

from gspo import settings, store
from gspo.config import Run
from gspo.console import Console
from gspo.errors import InputError
from gspo.inputs import FROM_PYTHON
from gspo.lock import require_free
from gspo.runfile import read_settings
from gspo.stage_config import AnyRun, RewardRun, Sft
from gspo.tasks.identity import other_sides

R = TypeVar("R", Run, Sft, RewardRun)

_OF_A_START = ("run.lock", "checkpoints", store.DRAFT)
"""What stands in a folder before run.yaml does: a run that was killed then has left nothing."""


@dataclass(frozen=True)
class Place:
    """Where a run writes, and what it goes on from."""

    folder: Path
    about: Mapping[str, Any] | None = None
    """What run.yaml says that the run was started with; None: it is a new one."""
    saved: store.Saved | None = None
    """Its newest checkpoint; None: it is a new one, or it ended before its first checkpoint and begins anew."""

    @property
    def kept(self) -> int:
        """The last step whose lines and answers stay where they are: those of a run that begins anew are all set aside."""
        return -1 if self.saved is None else self.saved.progress.step

    def require_same_data(self, sha256: Mapping[str, str]) -> None:
        """Raise InputError if the run to go on with was started with other data."""
        if self.about is not None and (other := other_sides(self.about.get("data_sha256"), sha256)):
            raise InputError(
                f"{self.folder}: {' and '.join(other)} are not those that the run was started with (every column counts): "
                "put the data back as it was, or start a new run"
            )

    def say_anew(self, console: Console) -> None:
        """Say so if the run begins anew."""
        if self.about is not None and self.saved is None:
            console.say(f"{self.folder}: no checkpoint had been written when this run ended, so it begins anew")


def place_of(run: AnyRun, resume: Path | None) -> Place:
    """A new folder for `run`, or the run in the folder `resume` as it was last saved.

    Raises InputError for a folder that cannot be used, and for a checkpoint that is damaged or of another format.
    """
    if resume is None:
        return Place(new_folder(run))
    return Place(resume, store.read_about(resume), store.read_saved(resume))


def new_folder(run: AnyRun) -> Path:
    """The folder that the run is to be in. Raises InputError if it cannot be made, or holds something."""
    folder = Path(run.dir or "runs/run")
    above = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        TemporaryFile(dir=above).close()  # what permissions say is not all: /proc takes nothing from anyone
    except OSError as error:
        raise InputError(f"dir={folder}: {above} is not a folder that can be written to ({error.strerror})") from error
    if not folder.exists():
        return folder
    if (folder / "run.yaml").is_file():
        raise InputError(f"dir={folder}: there is a run in this folder. {_continued(folder)}, or choose another dir")
    if {path.name for path in folder.iterdir()} - set(_OF_A_START) or any(folder.glob("checkpoints/*")):
        raise InputError(f"dir={folder}: this folder is not empty, and holds no run: choose another dir")
    return folder


def _continued(folder: Path) -> str:
    """How the run in `folder` is gone on with."""
    run = read_settings(folder / "run.yaml")
    command = run.get("about", {}).get("command", Run.command)
    given = ["data=rows", "eval_data=rows"] if run.get("data", {}).get("source") == FROM_PYTHON else []
    if "python:" in str(run.get("reward")):
        given.append("reward=function")
    if given:
        return f"Continue it with `gspo.{command}(resume={str(folder)!r}, {', '.join(given)})` from Python, where those were given"
    return f"Continue it with `gspo {command} --resume {folder}`"


def resumed_run(kind: type[R], folder: Path, words: Sequence[str]) -> R:
    """The configuration of the run in `folder`; `steps` alone may be changed.

    Raises InputError if there is no such run, if it is still going on, if a word would make it another run, or if nothing
    is left to do.
    """
    store.require_run(folder)
    require_free(folder)
    newest = store.latest(folder)
    done = 0 if newest is None else store.read_progress(newest).step
    command = store.read_about(folder).get("command", Run.command)
    if command != kind.command:
        raise InputError(f"{folder}: a run of `gspo {command}`: continue it with `gspo {command} --resume {folder}`")
    other = [word for word in words if word.partition("=")[0] != "steps"]
    if other:
        raise InputError(
            f"--resume continues the run in {folder} as it was configured; {other[0]!r} would make it another run. "
            "Only steps can be changed"
        )
    run = settings.load_as(kind, folder / "run.yaml", [f"dir={folder}", *words])
    assert run.steps is not None
    if run.steps <= done:
        raise InputError(
            f"{folder}: the run has done {done} of {run.steps} steps, so nothing is left; go on with steps=N, N above {done}"
        )
    return run

"""The trackers themselves, each a few lines around its package.

In: the settings of a run, then the numbers of a step. Out: whatever the tracker makes of them. `feed` calls them, in a process
of their own, so that they may raise, sleep or hang.
"""

from __future__ import annotations

import importlib.util
import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class About:
    """What a tracker is told of a run."""

    name: str
    folder: Path
    """Of the run."""
    settings: Mapping[str, Any]
    """run.yaml."""
    after: int
    """Steps that it was told of before, by a process that ended: 0 at the start of a run."""

    @property
    def store(self) -> Path:
        """`trackers/` in the folder of the run: what a tracker keeps on this machine."""
        return self.folder / "trackers"

    def remembered(self, key: str, new: Callable[[], str]) -> str:
        """A name that stays the same when the run is resumed."""
        path = self.store / f"{key}.id"
        if not path.exists():
            path.write_text(new())
        return path.read_text()


class Tracker(Protocol):
    """What a tracker does. One of your own is a class with these three methods, made with the `About` of the run."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the numbers of a step, under the keys of the journal."""

    def finish(self) -> None:
        """Write or send what is left. It has `grace` seconds (an attribute; 1 if there is none)."""


_PROJECT = "gspo"
_NETWORK = 15.0
"""Seconds that a tracker gets at the end of a run to send what is left."""


class TensorBoard:
    """Event files in trackers/tensorboard: `tensorboard --logdir runs`."""

    grace = 5.0

    def __init__(self, about: About) -> None:
        self._writer = import_module("tensorboard.summary").Writer(str(about.store / "tensorboard"))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


class Trackio:
    """A local trackio project: `trackio show --project gspo`."""

    grace = _NETWORK

    def __init__(self, about: About) -> None:
        name = about.remembered("trackio", lambda: f"{about.name}-{uuid.uuid4().hex[:6]}")
        project = os.environ.get("TRACKIO_PROJECT", _PROJECT)
        self._run = import_module("trackio").init(
            project,
            name=name,
            config=dict(about.settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def finish(self) -> None:
        self._run.finish()


class WandB:
    """Weights & Biases; `wandb sync` sends what was kept offline."""

    grace = _NETWORK
    mode: Any = None
    """None: as WANDB_MODE says, else online."""

    def __init__(self, about: About) -> None:
        self._run = import_module("wandb").init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=about.name,
            id=about.remembered("wandb", lambda: uuid.uuid4().hex[:8]),
            resume="allow",
            dir=str(about.store),
            config=dict(about.settings),
            mode=self.mode,
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def finish(self) -> None:
        self._run.finish()


class WandBOffline(WandB):
    """The same, without a network."""

    mode = "offline"


class MLflow:
    """MLflow: MLFLOW_TRACKING_URI, or files in trackers/mlflow."""

    grace = _NETWORK

    def __init__(self, about: About) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (about.store / "mlflow").resolve().as_uri()
        self._client = import_module("mlflow.tracking").MlflowClient(uri)
        self._id = about.remembered("mlflow", lambda: self._new(about))

    def _new(self, about: About) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        place = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        run = self._client.create_run(place, run_name=about.name)
        for key, value in flat(about.settings).items():
            self._client.log_param(run.info.run_id, key, str(value)[:500])
        return str(run.info.run_id)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        metric = import_module("mlflow.entities").Metric
        now = int(time.time() * 1000)
        # MLflow allows neither @ nor : in a name, and the journal has pass@4.
        metrics = [metric(key.replace("@", "_at_").replace(":", "_"), v, now, step) for key, v in numbers.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self) -> None:
        self._client.set_terminated(self._id)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted keys."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


_ADAPTERS: dict[str, Callable[[About], Tracker]] = {
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": WandB,
    "wandb:offline": WandBOffline,
    "mlflow": MLflow,
}


def start(name: str, about: About) -> Tracker:
    """The tracker of this name, started. Raises whatever it raises."""
    if name in _ADAPTERS:
        return _ADAPTERS[name](about)
    file, _, kind = name.rpartition(":")
    spec = importlib.util.spec_from_file_location("gspo_tracker", file)
    assert spec is not None, file
    assert spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tracker: Tracker = getattr(module, kind)(about)
    return tracker

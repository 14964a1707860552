"""gspo: reinforcement-learning post-training of language models.

    import gspo
    gspo.train(model="smollm2-135m-q4", data="prompts.jsonl", reward=my_function, steps=50)

Importing this module loads no torch; the first call does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo.errors import InputError, RunError

if TYPE_CHECKING:
    from gspo.loop import Result
    from gspo.presets import PRESETS, Algorithm

    __version__: str

__all__ = ["PRESETS", "Algorithm", "InputError", "RunError", "train"]


def __getattr__(name: str) -> Any:
    """What is looked up when it is first asked for: the workers of rewards import this package, and want none of it."""
    if name in ("PRESETS", "Algorithm"):
        from gspo import presets

        return getattr(presets, name)
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("gspo")
        except PackageNotFoundError:  # a source tree that was not installed
            return "0+unknown"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def train(
    recipe: str | Path | None = None,
    *,
    resume: str | Path | None = None,
    data: str | Path | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    eval_data: Sequence[Mapping[str, Any]] | None = None,
    **keys: Any,
) -> Result:
    """Train a policy; the keys are those of the command line.

    Args:
        recipe: file or built-in recipe that the keys are laid over; None: the defaults.
        resume: folder of a run to continue; then only `steps` (and a Python `reward`) may be given.
        data: a file, hub data set, task or section, as on the command line; or the rows themselves.
        eval_data: held-out rows, when `data` are rows.
        keys: any key of the configuration: `model="..."`, `reward=function`, `algorithm=gspo.Algorithm(...)`,
            `sampling={"max_new_tokens": 64}`.

    Raises:
        InputError: something given cannot be used; nothing was written.
        RunError: the run could not go on.
    """
    from gspo import machine

    if recipe is not None and resume is not None:
        raise InputError(
            f"recipe={str(recipe)!r} and resume={str(resume)!r}: a run goes on as it was configured; leave the recipe out"
        )
    machine.prepare()
    keys = {key: str(value) if isinstance(value, Path) else value for key, value in keys.items()}
    data = str(data) if isinstance(data, Path) else data
    rows = None if data is None or isinstance(data, str | Mapping) else list(data)

    from gspo import settings
    from gspo.build import build
    from gspo.config import Run
    from gspo.inputs import FROM_PYTHON
    from gspo.loop import train as loop
    from gspo.place import resumed_run

    if resume is None:
        source = data if rows is None else FROM_PYTHON
        run = settings.load(recipe, keys={**keys, **({} if source is None else {"data": source})})
        return loop(build(run, rows=rows, eval_rows=eval_data))
    folder = Path(resume)
    reward = keys.pop("reward", None)
    if isinstance(data, str | Mapping):
        keys["data"] = data  # which is refused: only rows can be given again
    run = resumed_run(Run, folder, [f"{k}={v}" for k, v in keys.items()])
    if reward is not None:
        run = settings.check({**settings.dump(run), "reward": reward}, where=str(folder))
    return loop(build(run, rows=rows, eval_rows=eval_data, resume=folder))

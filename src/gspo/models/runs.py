"""A path that leads into a run, where a checkpoint was to be named: what to say of it.

In: a path. Out: a sentence, or None if it is a checkpoint or has nothing to do with a run. `load` and the reward models ask.
"""

from __future__ import annotations

from pathlib import Path


def no_checkpoint(path: Path) -> str | None:
    """What is wrong with a path to a run, or into one: it is no checkpoint; and which there are."""
    if (path / "run.yaml").is_file():
        found = sorted(str(folder) for folder in [*path.glob("best"), *path.glob("checkpoints/[0-9]*")])
        return f"the folder of a run; give a checkpoint of it: {', '.join(found) or 'it has none yet'}"
    run = next((above for above in path.parents if (above / "run.yaml").is_file()), None)
    if run is None or path.exists():
        return None
    wrong = f"the run has no {path.name} yet" if path == run / "best" else "no such checkpoint"
    checkpoints = sorted(str(folder) for folder in run.glob("checkpoints/[0-9]*"))
    newest = f"its newest checkpoint is {checkpoints[-1]}" if checkpoints else "it has no checkpoint yet"
    return f"{wrong}; {newest}"

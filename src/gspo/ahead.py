"""Groups that were sampled ahead of the step that trains on them: a file of a checkpoint, so that a run resumes exactly.

In: the groups of the next steps. Out: the same, to the last bit. `store` writes them, `build` reads them back. Prompts
are kept by their row, which stands in the data that the run goes on with.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from gspo.errors import InputError
from gspo.types import Group, Prompt, Reward, Rollout, Segment, Status, Stop

_FILE = "ahead.jsonl.gz"


def write_ahead(checkpoint: Path, ahead: Sequence[Sequence[Group]]) -> None:
    """Write one line a step, the next one first."""
    with (checkpoint / _FILE).open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as file:
        for groups in ahead:
            file.write(json.dumps([_packed_group(group) for group in groups]).encode() + b"\n")


def read_ahead(checkpoint: Path, prompts: Sequence[Prompt], steps: int) -> list[list[Group]]:
    """What `write_ahead` wrote for `steps` steps. Raises InputError if it is missing, damaged or of other prompts."""
    if not steps:
        return []
    path = checkpoint / _FILE
    of_row = {prompt.row: prompt for prompt in prompts}
    try:
        with gzip.open(path, "rt") as file:
            found = [[_group(plain, of_row) for plain in json.loads(line)] for line in file]
        if len(found) != steps:
            raise ValueError(f"it holds the answers of {len(found)} steps, not of {steps}")
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} is missing or damaged ({error!r}), and the run cannot be resumed without the answers that were written "
            f"ahead: move the folder {checkpoint} away, and the run resumes from the checkpoint before it"
        ) from error
    return found


def _packed_group(group: Group) -> dict[str, Any]:
    return {"row": group.prompt.row, "ordinal": group.ordinal, "rollouts": [_packed(r) for r in group.rollouts]}


def _packed(r: Rollout) -> dict[str, Any]:
    segments = [{f.name: _plain(getattr(s, f.name)) for f in fields(s)} for s in r.segments]
    return {
        "index": r.index,
        "segments": segments,
        "text": r.text,
        "stop": r.stop,
        "versions": r.versions,
        "reward": None if r.reward is None else asdict(r.reward),
    }


def _group(plain: dict[str, Any], of_row: dict[int, Prompt]) -> Group:
    return Group(of_row[plain["row"]], plain["ordinal"], tuple(_rollout(r) for r in plain["rollouts"]))


def _rollout(plain: dict[str, Any]) -> Rollout:
    segments = tuple(Segment(**{name: _array(value) for name, value in s.items()}) for s in plain["segments"])
    first, last = plain["versions"]
    reward = plain["reward"] and Reward(
        **{**plain["reward"], "status": {name: Status(word) for name, word in plain["reward"]["status"].items()}}
    )
    return Rollout(plain["index"], segments, plain["text"], Stop(plain["stop"]), (first, last), reward)


def _plain(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    return {"dtype": value.dtype.str, "shape": value.shape, "base64": base64.b64encode(value.tobytes()).decode()}


def _array(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return np.frombuffer(base64.b64decode(value["base64"]), value["dtype"]).reshape(value["shape"]).copy()

"""Groups that were sampled ahead of the step that trains on them: a file of a checkpoint, so that a run resumes exactly.

In: what was drawn for the next steps. Out: the same, to the last bit. `store` writes them, `build` reads them back. Prompts
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

from gspo.drawing import Drawn
from gspo.errors import InputError
from gspo.types import Group, Limit, Prompt, Reward, Rollout, Segment, Status, Stop

_FILE = "ahead.jsonl.gz"


def write_ahead(checkpoint: Path, ahead: Sequence[Drawn]) -> None:
    """Write one line a step, the next one first."""
    with (checkpoint / _FILE).open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as file:
        for drawn in ahead:
            groups, replaced = ([_packed_group(group) for group in some] for some in (drawn.groups, drawn.replaced))
            line = {"groups": groups, "replaced": replaced, "skipped": drawn.skipped}
            file.write(json.dumps(line).encode() + b"\n")


def read_ahead(checkpoint: Path, prompts: Sequence[Prompt], steps: int) -> list[Drawn]:
    """What `write_ahead` wrote for `steps` steps. Raises InputError if it is missing, damaged or of other prompts."""
    if not steps:
        return []
    path = checkpoint / _FILE
    of_row = {prompt.row: prompt for prompt in prompts}
    try:
        with gzip.open(path, "rt") as file:
            found = [_drawn(json.loads(line), of_row) for line in file]
        if len(found) != steps:
            raise ValueError(f"it holds the answers of {len(found)} steps, not of {steps}")
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} is missing or damaged ({error!r}), and the run cannot be resumed without the answers that were written "
            f"ahead: move the folder {checkpoint} away, and the run resumes from the checkpoint before it"
        ) from error
    return found


def _drawn(plain: dict[str, Any], of_row: dict[int, Prompt]) -> Drawn:
    groups, replaced = ([_group(each, of_row) for each in plain[key]] for key in ("groups", "replaced"))
    return Drawn(groups, tuple(replaced), int(plain["skipped"]))


def _packed_group(group: Group) -> dict[str, Any]:
    rollouts = [_packed(r) for r in group.rollouts]
    return {**_fields(group, "prompt", "rollouts"), "row": group.prompt.row, "rollouts": rollouts}


def _packed(r: Rollout) -> dict[str, Any]:
    reward = None if r.reward is None else asdict(r.reward)
    return {**_fields(r, "segments", "reward"), "segments": [_fields(s) for s in r.segments], "reward": reward}


def _fields(noun: Group | Rollout | Segment, *but: str) -> dict[str, Any]:
    """Every other field by its name, so that none is forgotten here when it is new there."""
    return {f.name: _plain(getattr(noun, f.name)) for f in fields(noun) if f.name not in but}


def _group(plain: dict[str, Any], of_row: dict[int, Prompt]) -> Group:
    rollouts = tuple(_rollout(r) for r in plain.pop("rollouts"))
    return Group(prompt=of_row[plain.pop("row")], rollouts=rollouts, **_read(plain))


def _rollout(plain: dict[str, Any]) -> Rollout:
    segments = tuple(Segment(**_read(s)) for s in plain.pop("segments"))
    stop, (first, last), reward = Stop(plain.pop("stop")), plain.pop("versions"), plain.pop("reward")
    if reward is not None:
        reward = Reward(**{**reward, "status": {name: Status(word) for name, word in reward["status"].items()}})
    messages, limit = tuple(plain.pop("messages")), plain.pop("limit", None)
    return Rollout(
        segments=segments,
        stop=stop,
        versions=(first, last),
        reward=reward,
        messages=messages,
        limit=None if limit is None else Limit(limit),
        **_read(plain),
    )


def _read(plain: dict[str, Any]) -> dict[str, Any]:
    return {name: _array(value) for name, value in plain.items()}


def _plain(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    return {"dtype": value.dtype.str, "shape": value.shape, "base64": base64.b64encode(value.tobytes()).decode()}


def _array(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return np.frombuffer(base64.b64decode(value["base64"]), value["dtype"]).reshape(value["shape"]).copy()

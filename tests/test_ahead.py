"""Groups that wait for their step come back from a checkpoint to the last bit, or it is said why not."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gspo import InputError
from gspo.ahead import read_ahead, write_ahead
from gspo.drawing import Drawn
from gspo.models.load import Policy
from gspo.types import Group, Reward, Segment, Status, Stop

Sampled = Callable[..., list[Group]]


def same(a: Any, b: Any) -> bool:
    """Equal in type, bits and, for arrays, in dtype and shape."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@pytest.fixture
def groups(policy: Policy, sampled: Sampled) -> list[Group]:
    """Real answers, one of them with two turns and a tool between, one not judged."""
    first, *others = sampled(policy)
    rollouts = list(first.rollouts)
    tool = Segment(np.array([5, 6, 7]), np.zeros(3, dtype=bool), np.zeros(3, dtype=np.float32), parent=0)
    rollouts[0] = replace(rollouts[0], segments=(*rollouts[0].segments, tool), stop=Stop.ENVIRONMENT, versions=(3, 5))
    crashed = Reward(
        None, {"judge": None, "length": 0.1 + 0.2}, {"judge": Status.CRASHED, "length": Status.OK}, "line\n☂"
    )
    rollouts[1] = replace(rollouts[1], reward=crashed, text='a "quoted"\n☂ 𝄞')
    return [replace(first, rollouts=tuple(rollouts)), *others]


def test_what_waits_comes_back_bit_for_bit(groups: list[Group], tmp_path: Path) -> None:
    ahead = [Drawn(groups[:2], tuple(groups[2:]), skipped=3), Drawn(groups[2:]), Drawn(groups[:1])]
    write_ahead(tmp_path, ahead)
    found = read_ahead(tmp_path, [g.prompt for g in groups], 3)
    assert same(found, ahead)
    assert all(a.prompt is b.prompt for a, b in zip(found[0].groups, groups, strict=False))
    assert found[0].groups[1].rollouts[0].segments[0].logprobs.flags.writeable


def test_nothing_waiting_needs_no_file(tmp_path: Path) -> None:
    assert read_ahead(tmp_path, [], 0) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(path.read_bytes()[:300]),
        lambda path: path.write_bytes(b"no gzip"),
        lambda path: path.write_bytes(gzip.compress(b'[{"row": 0}]\n')),
        lambda path: path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()).splitlines(True)[0])),
    ],
)
def test_damage_is_named(damage: Callable[[Path], object], groups: list[Group], tmp_path: Path) -> None:
    write_ahead(tmp_path, [Drawn(groups), Drawn(groups)])
    damage(tmp_path / "ahead.jsonl.gz")
    with pytest.raises(
        InputError, match=r"ahead\.jsonl\.gz is missing or damaged .* resumes from the checkpoint before"
    ):
        read_ahead(tmp_path, [g.prompt for g in groups], 2)


def test_a_prompt_that_is_not_there_is_refused(groups: list[Group], tmp_path: Path) -> None:
    write_ahead(tmp_path, [Drawn(groups)])
    with pytest.raises(InputError, match="ahead"):
        read_ahead(tmp_path, [g.prompt for g in groups[1:]], 1)

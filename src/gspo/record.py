"""The rollout record: every answer of training and evaluation on the disk, one JSON line each, to be shown and judged again.

In: judged groups, and what training made of each answer. Out: `rollouts/00000042.jsonl.gz` for a step and
`rollouts/eval-00000040.jsonl.gz` for an evaluation. `journal` and the stages call it; `view` reads the files.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.types import Group, Rollout

FORMAT = 1
"""Version of a line."""


@dataclass(frozen=True)
class Fate:
    """What training made of an answer."""

    advantage: float
    clipped: float | None
    """Share of its trained tokens whose gradient the gate took, mean over its updates; None: no update had it, or it
    had no advantage."""


NOT_TRAINED = Fate(0.0, None)
Fates = Mapping[tuple[int, int], Fate]
"""By (ordinal of the draw, index in the group)."""


def evaluation_file(folder: Path, prefix: str, step: int) -> Path:
    """Where the answers of an evaluation stand: `eval/start` is that of step 0, `eval/greedy` is eval-greedy-<step>."""
    name = prefix.replace("eval/start", "eval", 1).replace("/", "-")
    return folder / f"{name}-{0 if prefix.startswith('eval/start') else step:08d}.jsonl.gz"


def step_of(file: Path) -> int:
    """The step that a file of the record belongs to."""
    return int(file.name.removesuffix(".jsonl.gz")[-8:])


def write(
    path: Path, step: int, groups: Sequence[Group], fates: Fates | None = None, replaced: Collection[int] = ()
) -> None:
    """Write the answers of `groups`; `fates` None: they are of an evaluation. The same answers give the same bytes.

    `replaced`: ordinals of the groups that others stand in the place of in the step.
    """
    with path.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as file:
        for group in groups:
            for r in group.rollouts:
                line = _line(step, group, r)
                if fates is not None:
                    fate = fates.get((group.ordinal, r.index), NOT_TRAINED)
                    line |= {"advantage": fate.advantage, "clipped": fate.clipped}
                    line["replaced"] = group.ordinal in replaced
                file.write(json.dumps(line, ensure_ascii=False, allow_nan=False).encode() + b"\n")


def _line(step: int, group: Group, r: Rollout) -> dict[str, Any]:
    reward = r.reward
    return {
        "format": FORMAT,
        "step": step,
        "row": group.prompt.row,
        "ordinal": group.ordinal,
        "index": r.index,
        "prompt": group.prompt.text,
        "columns": {key: value for key, value in group.prompt.columns.items() if _is_plain(value)},
        "text": r.text,
        "prompt_ids": group.prompt.token_ids.tolist(),
        "ids": [i for s in r.segments for i in s.token_ids.tolist()],
        "mask": [int(m) for s in r.segments for m in s.policy_mask],
        # float32 to the shortest decimal that reads back as the same float32
        "logprobs": [float(str(p)) for s in r.segments for p in s.logprobs],
        # [tokens, the segment that it continues; null: the prompt] of each
        "segments": [[len(s.token_ids), s.parent] for s in r.segments],
        "prompt_messages": [dict(message) for message in group.prompt.messages],
        "messages": [dict(message) for message in r.messages],
        "earned": r.earned,
        "stop": r.stop.value,
        "limit": r.limit.value if r.limit is not None else None,
        "versions": list(r.versions),
        "reward": reward.value if reward else None,
        "reward_parts": dict(reward.parts) if reward else {},
        "reward_status": {k: v.value for k, v in reward.status.items()} if reward else {},
        "reward_error": reward.error if reward else None,
    }


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold it: a column of another kind, which only rows from Python have, is not kept."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True

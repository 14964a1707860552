"""The answers that the local engine is writing: their tokens, where each stands, and what is kept of them.

In: answers that start, tokens sampled for them or put between their turns. Out: positions and tokens for the next step,
and the lines of an answer when it is over. `local.py` calls it; it knows no model.

Letters: B rows in flight, M tokens that may come after a prompt, L layers with experts, K experts chosen for a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from gspo.engines.engine import Request
from gspo.engines.lines import Line
from gspo.models.buckets import closed_up, padded
from gspo.models.cache import Extend, TreeCache
from gspo.models.decoder import Decoder
from gspo.models.native import Kernels
from gspo.types import Rollout, Segment

_ROW = np.dtype(
    [
        ("prompt", np.int64),  # tokens of the prompt
        ("count", np.int64),  # tokens after it that were written, or read in
        ("known", np.int64),  # those that are known: beyond the count, they are to be read in
        ("first", np.int64),  # place of the turn's first token
        ("last", np.int64),  # and the one after its last
        ("turns", np.int64),
        ("start", np.int64),  # place of the first token that the line before does not have
        ("held", np.bool_),  # its turn has ended, and is not replied to yet
    ]
)
_CELL = np.dtype([("token", np.int64), ("logprob", np.float32), ("uniform", np.float64), ("policy", np.bool_)])


@dataclass(eq=False)
class Open:
    """A request whose answers are still being written."""

    request: Request
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    prompt_routes: np.ndarray | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt.token_ids)


@dataclass(frozen=True)
class Reading:
    """Tokens that are put behind some rows, to be computed together."""

    rows: np.ndarray
    places: list[np.ndarray]
    """Of each row's tokens, after the prompt."""
    token_T: np.ndarray
    position_T: np.ndarray
    layout: Extend

    @property
    def last(self) -> np.ndarray:
        """Index into T of each row's last token."""
        ends: np.ndarray = np.cumsum([len(place) for place in self.places]) - 1
        return ends


class Flight:
    """Row i of every array, and of the cache, belongs to `answers[i]`."""

    def __init__(self, longest: int, kernels: Kernels | None) -> None:
        self.answers: list[tuple[Open, int]] = []
        self.prompts: dict[Open, None] = {}
        """Those in the cache, in the order of arrival."""
        self.first_logits: dict[Open, Tensor] = {}
        """[V] behind a prompt, of the prompts whose answers have not all started."""
        self.cache = TreeCache(longest, kernels)
        self.decoder: Decoder | None = None
        """Made once for the answers that are written with the same weights."""
        self._longest = longest
        self._row_B = np.zeros(0, dtype=_ROW)
        self._cell_BM = np.zeros((0, longest), dtype=_CELL)
        self._routes: list[np.ndarray | None] = []
        """Of each row: [M, L, K], filled as far as its tokens were computed; memory comes as it is filled."""
        self._left: list[list[Line]] = []
        """Of each row: the lines that it has left."""

    @property
    def reserved(self) -> int:
        """Tokens that the cache may come to hold for what is in flight."""
        prompts = sum(padded(opened.prompt_tokens) for opened in self.prompts)
        return prompts + len(self.answers) * self._longest

    @property
    def idle(self) -> bool:
        """No row has anything to compute."""
        return bool(self._row_B["held"].all())

    def add(self, answers: list[tuple[Open, int]], draws: Sequence[np.ndarray]) -> np.ndarray:
        """The rows of new answers; `draws` are the uniform numbers of their first turns."""
        rows = np.arange(len(self.answers), len(self.answers) + len(answers))
        self.answers += answers
        self.cache.add([opened for opened, _ in answers])
        self._routes += [
            None
            if opened.prompt_routes is None
            else np.empty((self._longest, *opened.prompt_routes.shape[1:]), opened.prompt_routes.dtype)
            for opened, _ in answers
        ]
        self._left += [[] for _ in answers]
        self._row_B = np.concatenate([self._row_B, np.zeros(len(answers), dtype=_ROW)])
        self._cell_BM = np.concatenate([self._cell_BM, np.zeros((len(answers), self._longest), dtype=_CELL)])
        self._row_B["prompt"][rows] = [opened.prompt_tokens for opened, _ in answers]
        for row, uniforms in zip(rows, draws, strict=True):
            self.begin_turn(int(row), uniforms)
        return rows

    def release(self, opened: Open) -> None:
        del self.prompts[opened]
        self.cache.release(opened)

    def drop(self, done: np.ndarray) -> None:
        self.cache.drop(done)
        order = closed_up(len(self.answers), done)
        self.answers = [self.answers[i] for i in order]
        self._routes = [self._routes[i] for i in order]
        self._left = [self._left[i] for i in order]
        self._row_B, self._cell_BM = self._row_B[order], self._cell_BM[order]

    # -------------------------------------------------------------------------- a step

    @property
    def held(self) -> np.ndarray:
        """[B] rows whose turn has ended, and is not replied to yet."""
        held: np.ndarray = self._row_B["held"]
        return held

    def last_tokens(self) -> np.ndarray:
        return self._at("token", np.arange(len(self.answers)), -1)

    def positions(self) -> np.ndarray:
        """Place of the last token in its sequence."""
        places: np.ndarray = self._row_B["prompt"] + self._row_B["count"] - 1
        return places

    def writing(self) -> np.ndarray:
        """The rows whose next token is to be sampled."""
        return np.flatnonzero(~self._row_B["held"])

    def keep_routes(self, routes_BLK: np.ndarray) -> None:
        """The experts of the last token of each row, which has just been computed."""
        for kept, routes, count in zip(self._routes, routes_BLK, self._row_B["count"], strict=True):
            assert kept is not None
            kept[count - 1] = routes

    def reading(self, most: int) -> Reading | None:
        """Rows with tokens to read in, together of `most` tokens if that is more than one row; they are then at their end."""
        waiting = np.flatnonzero(self._row_B["count"] < self._row_B["known"])
        if len(waiting) == 0:
            return None
        # The last token that was there before has not been computed either, but for the prompt's.
        first_R = np.maximum(self._row_B["count"][waiting] - 1, 0)
        count_R = self._row_B["known"][waiting] - first_R
        fit = max(1, int((count_R.cumsum() <= most).sum()))
        rows, first_R, count_R = waiting[:fit], first_R[:fit], count_R[:fit]
        self._row_B["count"][rows] = self._row_B["known"][rows]
        places = [np.arange(first, first + count) for first, count in zip(first_R, count_R, strict=True)]
        tokens = [self._cell_BM["token"][row, place] for row, place in zip(rows, places, strict=True)]
        position = [self._row_B["prompt"][row] + place for row, place in zip(rows, places, strict=True)]
        layout = self.cache.extend(rows.tolist(), first_R.tolist(), count_R.tolist())
        return Reading(rows, places, np.concatenate(tokens), np.concatenate(position), layout)

    def keep_routes_read(self, reading: Reading, routes_TLK: np.ndarray) -> None:
        """The experts of all tokens that were read in."""
        ends = np.cumsum([len(place) for place in reading.places])[:-1]
        for row, place, routes in zip(reading.rows, reading.places, np.split(routes_TLK, ends), strict=True):
            kept = self._routes[row]
            assert kept is not None
            kept[place] = routes

    def next_uniforms(self, rows: np.ndarray) -> np.ndarray:
        """The number that decides the next token of each row."""
        return self._at("uniform", rows, 0)

    def write(self, rows: np.ndarray, token_B: np.ndarray, logprob_B: np.ndarray) -> None:
        place = rows, self._row_B["count"][rows]
        self._cell_BM["token"][place], self._cell_BM["logprob"][place] = token_B, logprob_B
        self._cell_BM["policy"][place] = True
        self._row_B["count"][rows] += 1
        self._row_B["known"][rows] += 1

    def ended(self, rows: np.ndarray, stop_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of `rows` have just written a stop token, and which are at the length limit of a turn."""
        last = self._at("token", rows, -1)
        return np.isin(last, stop_ids), self._row_B["count"][rows] == self._row_B["last"][rows]

    def _at(self, name: str, rows: np.ndarray, offset: int) -> np.ndarray:
        taken: np.ndarray = self._cell_BM[name][rows, self._row_B["count"][rows] + offset]
        return taken

    # -------------------------------------------------------------------------- turns

    def begin_turn(self, row: int, uniforms: np.ndarray) -> None:
        """The row writes its next turn, behind what is known of it; `uniforms` for each token that the turn may have."""
        at = self._row_B[row]
        at["first"] = at["known"]
        at["last"] = min(int(at["known"]) + len(uniforms), self._longest)
        self._cell_BM["uniform"][row, at["first"] : at["last"]] = uniforms[: at["last"] - at["first"]]

    def hold(self, row: int) -> np.ndarray:
        """The turn has ended; its tokens. The row stands still until `insert`."""
        at = self._row_B[row]
        at["held"] = True
        return np.array(self._cell_BM["token"][row, at["first"] : at["count"]])

    def insert(self, row: int, keep: int, token_ids: np.ndarray) -> int:
        """Put tokens behind the first `keep` of the row, to be read in. Returns the number of the turn that follows."""
        at = self._row_B[row]
        if keep < at["count"]:
            self._left[row].append(self._line(row))
            at["count"] = keep
            at["start"] = keep
        at["known"] = keep + len(token_ids)
        self._cell_BM[row, keep:] = np.zeros((), dtype=_CELL)
        self._cell_BM["token"][row, keep : at["known"]] = token_ids
        at["held"] = False
        at["turns"] += 1
        return int(at["turns"])

    def lines(self, row: int) -> list[Line]:
        """All that the row has been through."""
        return [*self._left[row], self._line(row)]

    def _line(self, row: int) -> Line:
        at, routes = self._row_B[row], self._routes[row]
        start, count = int(at["start"]), int(at["count"])
        own = self._cell_BM[row, start:count]
        return Line(
            start,
            Segment(
                own["token"].copy(),
                own["policy"].copy(),
                own["logprob"].copy(),
                routes=None if routes is None else routes[start : max(start, count - 1)].copy(),
            ),
        )

"""The engine inside the trainer's process: it samples from the trainer's own model object, or from a rounded copy of it.

In: `Request`s. Out: `Group`s. Rows are refilled as answers end (continuous batching); a prompt is computed, and its
keys and values are kept, once for all answers of its group.

Letters: B rows in flight, M `max_new_tokens`, T tokens of a packed row, G prompts, V vocabulary, D hidden size, L layers
with experts, K experts chosen for a token.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo.config import Sampling
from gspo.engines.engine import Request
from gspo.engines.rounding import rounded
from gspo.engines.sampler import sample
from gspo.engines.streams import uniforms
from gspo.errors import DivergedError, InputError, RunError
from gspo.models.cache import Prefill, Step, TreeCache, closed_up, padded
from gspo.models.heads import next_logits
from gspo.models.load import Policy
from gspo.models.lora import named_weights, without_adapter
from gspo.models.packing import PackedWeights
from gspo.models.routing import Routed, Routing, routers_of
from gspo.types import Group, Rollout, Segment, Stop

_PREFILL_TOKENS = 8192
"""Prompt tokens computed in one forward; a longer prompt goes alone."""
_CACHE_TOKENS = 131_072
"""Tokens whose keys and values may be kept: the prompts in flight, each once, and `max_new_tokens` for each row. An
answer that needs more goes alone."""


@dataclass(eq=False)
class _Open:
    """A request whose answers are still being written."""

    request: Request
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    prompt_routes: np.ndarray | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt.token_ids)


class LocalEngine:
    """Samples on `policy.model`, so that new weights need no transfer. One thread may use it.

    An adapter's model is sampled from with merged weights, as an exported one would be (`PackedWeights`).
    With `weights` other than `same` (see `rounding.rounded`) it samples on a copy of the model, as large as the original.
    `record_routes`: keep the experts that a mixture-of-experts model used, L K bytes for each token computed. A model
    without experts, or whose routers are not known, has none to keep.
    """

    def __init__(
        self, policy: Policy, sampling: Sampling, seed: int, *, weights: str = "same", record_routes: bool = False
    ) -> None:
        self.version = 0
        self._policy, self._sampling, self._seed, self._weights = policy, sampling, seed, weights
        if weights != "same":
            own = without_adapter(copy.deepcopy(policy.model)).requires_grad_(False)
            self._policy = replace(policy, model=own)
            self._copy(named_weights(policy.model))
        self._routers = routers_of(self._policy.model) if record_routes else None
        self._stop_ids = np.array(policy.stop_ids, dtype=np.int64)
        self._positions = getattr(policy.model.config.get_text_config(), "max_position_embeddings", None)
        self._waiting: deque[tuple[_Open, int]] = deque()
        self._flight = _Flight(sampling.max_new_tokens)

    def describe(self) -> dict[str, Any]:
        return {
            "temperature": self._sampling.temperature,
            "top_p": self._sampling.top_p,
            "top_k": self._sampling.top_k,
            "max_new_tokens": self._sampling.max_new_tokens,
            "max_rows": self._sampling.max_rows,
            "weights": self._weights,
            "stop_ids": list(self._policy.stop_ids),
        }

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take the new version number, and a rounded copy of `weights` if it has a copy of its own.

        Else `weights` is not read: the model samples with what the learner has put into it.
        """
        if self._flight.answers:
            raise RunError(
                f"weights version {version} arrived while {len(self._flight.answers)} answers were being written: collect them first"
            )
        if self._weights != "same":
            self._copy(weights)
        self.version = version
        self._flight = _Flight(self._sampling.max_new_tokens)  # nothing made from the old weights stays

    @torch.no_grad()
    def _copy(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Round `weights` into the model of its own. Raises RunError if one is missing, as it would stay the old one."""
        own = dict(self._policy.model.named_parameters())
        for name, w in weights:
            own.pop(name).copy_(rounded(w, self._weights))
        if own:
            raise RunError(f"new weights for the engine lack {len(own)} tensors, {next(iter(own))} among them")

    @property
    def copied_bytes(self) -> int:
        """Memory of the weights that it holds beside the trainer's."""
        return 0 if self._weights == "same" else sum(p.nbytes for p in self._policy.model.parameters())

    def submit(self, request: Request) -> None:
        length = len(request.prompt.token_ids) + self._sampling.max_new_tokens
        if self._positions is not None and length > self._positions:
            raise InputError(
                f"row {request.prompt.row}: a prompt of {len(request.prompt.token_ids)} tokens and sampling.max_new_tokens={self._sampling.max_new_tokens} "
                f"exceed the model's {self._positions} positions: shorten either"
            )
        opened = _Open(request)
        self._waiting.extend((opened, index) for index in range(request.count))

    def collect(self) -> Iterator[Group]:
        while self._waiting or self._flight.answers:
            yield from self._advance()
        self._flight = _Flight(self._sampling.max_new_tokens)  # its memory is the learner's now

    def abandon(self) -> None:
        """Give up every answer that was asked for and not collected."""
        self._waiting.clear()
        self._flight = _Flight(self._sampling.max_new_tokens)

    @torch.no_grad()
    def _advance(self) -> list[Group]:
        """The first token of answers, if rows are free for them, else the next token of every row."""
        rows = self._start() if self._refill_due() else self._step()
        return self._retire(rows)

    def _refill_due(self) -> bool:
        """A refill is a forward of its own, so it waits until a share of the rows is free."""
        if not self._waiting or not self._flight.answers:
            return bool(self._waiting)
        enough = min(len(self._waiting), max(1, self._sampling.max_rows // 8))
        return len(self._fitting(enough)) == enough

    def _fitting(self, most: int, prefill_tokens: int | None = None) -> list[tuple[_Open, int]]:
        """The waiting answers, up to `most` in the order of submission, that there is room for in flight.

        `prefill_tokens`: and whose prompts, as far as they are new, are together no longer than that.
        """
        flight = self._flight
        fitting: list[tuple[_Open, int]] = []
        known, tokens, new_tokens = set(flight.prompts), flight.reserved, 0
        for opened, index in islice(self._waiting, min(most, self._sampling.max_rows - len(flight.answers))):
            new = opened not in known
            tokens += self._sampling.max_new_tokens + (padded(opened.prompt_tokens) if new else 0)
            new_tokens += opened.prompt_tokens if new else 0
            over_prefill = prefill_tokens is not None and new and new_tokens > max(prefill_tokens, opened.prompt_tokens)
            if (tokens > _CACHE_TOKENS and (flight.answers or fitting)) or over_prefill:
                break
            known.add(opened)
            fitting.append((opened, index))
        return fitting

    def _start(self) -> slice:
        flight = self._flight
        started = self._fitting(self._sampling.max_rows, _PREFILL_TOKENS)
        self._prefill([opened for opened in dict.fromkeys(o for o, _ in started) if opened not in flight.prompts])
        for _ in started:
            self._waiting.popleft()
        rows = flight.add(started, [self._draws(opened, index) for opened, index in started])
        self._sample(rows, torch.stack([flight.first_logits[opened] for opened, _ in started]))
        unfinished = {
            opened for opened, _ in islice(self._waiting, 1)
        }  # answers start in order: at most one such group
        flight.first_logits = {o: logits_V.clone() for o, logits_V in flight.first_logits.items() if o in unfinished}
        return rows

    def _prefill(self, prompts: list[_Open]) -> None:
        if not prompts:
            return
        lengths = [p.prompt_tokens for p in prompts]
        logits_GV, routes_TLK = self._logits(
            np.concatenate([p.request.prompt.token_ids for p in prompts]),
            np.concatenate([np.arange(n) for n in lengths]),
            self._flight.cache.prefill(prompts, lengths, self._policy.device),
            np.cumsum(lengths) - 1,
        )
        if routes_TLK is not None:
            for opened, routes in zip(prompts, np.split(routes_TLK, np.cumsum(lengths)[:-1]), strict=True):
                opened.prompt_routes = routes
        self._flight.prompts.update(dict.fromkeys(prompts))
        self._flight.first_logits.update(zip(prompts, logits_GV, strict=True))

    def _step(self) -> slice:
        flight = self._flight
        rows = slice(0, len(flight.answers))
        layout = flight.cache.step(self._policy.device)
        logits_BV, routes_BLK = self._logits(flight.last_tokens(), flight.positions(), layout, np.arange(rows.stop))
        if routes_BLK is not None:
            flight.keep_routes(routes_BLK)
        self._sample(rows, logits_BV)
        return rows

    def _logits(
        self, tokens_T: np.ndarray, position_T: np.ndarray, layout: Prefill | Step, source_N: np.ndarray
    ) -> tuple[Tensor, np.ndarray | None]:
        """Logits [N, V] and, if they are recorded, the experts of every token, [T, L, K]."""
        tokens, position, source = (
            torch.from_numpy(x.astype(np.int64)).to(self._policy.device) for x in (tokens_T, position_T, source_N)
        )
        model, flight = self._policy.model, self._flight
        if flight.factor_VD is None or flight.packed is None:
            flight.factor_VD, flight.packed = model.get_output_embeddings().factor(), PackedWeights(model)
        routing = None if self._routers is None else Routing(self._routers)
        routed = layout if routing is None else Routed(layout, routing)
        with flight.packed:
            logits_NV = next_logits(
                model, tokens_T=tokens, position_T=position, layout=routed, source_N=source, factor_VD=flight.factor_VD
            )
        return logits_NV, None if routing is None else routing.chosen().cpu().numpy()

    def _draws(self, opened: _Open, index: int) -> np.ndarray:
        r = opened.request
        return uniforms(
            self._seed, stream=r.stream, ordinal=r.ordinal, index=index, turn=0, count=self._sampling.max_new_tokens
        )

    def _sample(self, rows: slice, logits_BV: Tensor) -> None:
        """One token more for the rows in `rows`."""
        # The inverse CDF is summed in float64, which Apple's GPUs do not have.
        device = torch.device("cpu") if logits_BV.device.type == "mps" else logits_BV.device
        logits_BV = logits_BV.to(device)
        uniform_B = torch.from_numpy(self._flight.next_uniforms(rows)).to(device)
        greedy_B = torch.tensor([opened.request.greedy for opened, _ in self._flight.answers[rows]], device=device)
        token_B, logprob_B = sample(logits_BV, uniform_B, greedy_B, self._sampling)
        finite_B = torch.isfinite(logprob_B)
        if not bool(finite_B.all()):
            opened, index = self._flight.answers[rows][int(finite_B.logical_not().nonzero()[0])]
            raise DivergedError(
                f"row {opened.request.prompt.row}, answer {index}: weights version {self.version} give logits that are not finite: "
                "the update before it diverged; lower optimizer.learning_rate, or go on from an earlier checkpoint"
            )
        self._flight.write(rows, token_B.cpu().numpy(), logprob_B.float().cpu().numpy())

    def _retire(self, rows: slice) -> list[Group]:
        """Take the answers among `rows` that have ended out of flight; the groups that are complete by that."""
        ended_B, full_B = self._flight.ended(rows, self._stop_ids)
        done = np.flatnonzero(ended_B | full_B) + rows.start
        groups, complete = [], []
        for row in done:
            opened, index = self._flight.answers[row]
            stop = Stop.EOS if ended_B[row - rows.start] else Stop.LENGTH
            opened.rollouts[index] = self._rollout(index, self._flight.written(row), stop)
            if len(opened.rollouts) == opened.request.count:
                rollouts = tuple(opened.rollouts[i] for i in range(opened.request.count))
                groups.append(Group(opened.request.prompt, opened.request.ordinal, rollouts, opened.prompt_routes))
                complete.append(opened)
        if len(done):
            self._flight.drop(done)
        for opened in complete:
            self._flight.release(opened)
        return groups

    def _rollout(self, index: int, segment: Segment, stop: Stop) -> Rollout:
        text = self._policy.tokenizer.decode(segment.token_ids.tolist(), skip_special_tokens=True)
        return Rollout(index, (segment,), text, stop, (self.version, self.version))


class _Flight:
    """The answers being written: row i of every array, and of the cache, belongs to `answers[i]`."""

    def __init__(self, max_new_tokens: int) -> None:
        self.answers: list[tuple[_Open, int]] = []
        self.prompts: dict[_Open, None] = {}
        """Those in the cache, in the order of arrival."""
        self.first_logits: dict[_Open, Tensor] = {}
        """[V] behind a prompt, of the prompts whose answers have not all started."""
        self.cache = TreeCache(max_new_tokens)
        self.packed: PackedWeights | None = None
        self._routes: list[np.ndarray | None] = []
        """Of each row: [M, L, K], filled as far as its tokens were computed; memory comes as it is filled."""
        self.factor_VD: Tensor | None = None
        """The head's weight in float32, made once for the answers that are written with it."""
        self._token_BM = np.zeros((0, max_new_tokens), dtype=np.int64)
        self._logprob_BM = np.zeros((0, max_new_tokens), dtype=np.float32)
        self._uniform_BM = np.zeros((0, max_new_tokens))
        self._prompt_B = np.zeros(0, dtype=np.int64)
        self._count_B = np.zeros(0, dtype=np.int64)

    @property
    def reserved(self) -> int:
        """Tokens that the cache may come to hold for what is in flight."""
        prompts = sum(padded(opened.prompt_tokens) for opened in self.prompts)
        return prompts + len(self.answers) * self._token_BM.shape[1]

    def add(self, answers: list[tuple[_Open, int]], draws: list[np.ndarray]) -> slice:
        rows = slice(len(self.answers), len(self.answers) + len(answers))
        self.answers += answers
        self.cache.add([opened for opened, _ in answers])
        self._routes += [
            None
            if opened.prompt_routes is None
            else np.empty((self._token_BM.shape[1], *opened.prompt_routes.shape[1:]), opened.prompt_routes.dtype)
            for opened, _ in answers
        ]
        width = self._token_BM.shape[1]
        self._token_BM = np.concatenate([self._token_BM, np.zeros((len(answers), width), dtype=np.int64)])
        self._logprob_BM = np.concatenate([self._logprob_BM, np.zeros((len(answers), width), dtype=np.float32)])
        self._uniform_BM = np.concatenate([self._uniform_BM, np.stack(draws)])
        self._prompt_B = np.concatenate([self._prompt_B, [opened.prompt_tokens for opened, _ in answers]])
        self._count_B = np.concatenate([self._count_B, np.zeros(len(answers), dtype=np.int64)])
        return rows

    def next_uniforms(self, rows: slice) -> np.ndarray:
        """The number that decides the next token of each row."""
        return self._take(self._uniform_BM[rows], self._count_B[rows])

    def last_tokens(self) -> np.ndarray:
        return self._take(self._token_BM, self._count_B - 1)

    def positions(self) -> np.ndarray:
        """Place of the last written token in its sequence."""
        return self._prompt_B + self._count_B - 1

    def write(self, rows: slice, token_B: np.ndarray, logprob_B: np.ndarray) -> None:
        row, column = np.arange(rows.start, rows.stop), self._count_B[rows]
        self._token_BM[row, column], self._logprob_BM[row, column] = token_B, logprob_B
        self._count_B[rows] += 1

    def ended(self, rows: slice, stop_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which rows have just written a stop token, and which are at the length limit."""
        last = self._take(self._token_BM[rows], self._count_B[rows] - 1)
        return np.isin(last, stop_ids), self._count_B[rows] == self._token_BM.shape[1]

    def keep_routes(self, routes_BLK: np.ndarray) -> None:
        """The experts of the last written token of each row, which has just been computed."""
        for kept, routes, count in zip(self._routes, routes_BLK, self._count_B, strict=True):
            assert kept is not None
            kept[count - 1] = routes

    def written(self, row: int) -> Segment:
        count, routes = self._count_B[row], self._routes[row]
        return Segment(
            self._token_BM[row, :count].copy(),
            np.ones(count, dtype=bool),
            self._logprob_BM[row, :count].copy(),
            routes=None if routes is None else routes[: count - 1].copy(),
        )

    def drop(self, done: np.ndarray) -> None:
        self.cache.drop(done)
        order = closed_up(len(self.answers), done)
        self.answers = [self.answers[i] for i in order]
        self._routes = [self._routes[i] for i in order]
        self._token_BM, self._logprob_BM, self._uniform_BM = (
            self._token_BM[order],
            self._logprob_BM[order],
            self._uniform_BM[order],
        )
        self._prompt_B, self._count_B = self._prompt_B[order], self._count_B[order]

    def release(self, opened: _Open) -> None:
        del self.prompts[opened]
        self.cache.release(opened)

    @staticmethod
    def _take(x_BM: np.ndarray, column_B: np.ndarray) -> np.ndarray:
        taken: np.ndarray = x_BM[np.arange(len(x_BM)), column_B]
        return taken

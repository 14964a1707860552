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
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo.config import Sampling
from gspo.engines.engine import Next, Over, Request, Turn
from gspo.engines.flight import Flight, Open, Reading
from gspo.engines.lines import segments
from gspo.engines.rounding import rounded
from gspo.engines.sampler import sample
from gspo.engines.streams import uniforms
from gspo.errors import DivergedError, InputError, RunError
from gspo.models.buckets import padded
from gspo.models.cache import Extend, Prefill, Step
from gspo.models.decoder import Decoder
from gspo.models.load import Policy
from gspo.models.lora import named_weights, without_adapter
from gspo.models.routing import Routed, Routing, routers_of
from gspo.types import Group, Limit, Rollout, Segment, Stop

_PREFILL_TOKENS = 8192
"""Prompt tokens computed in one forward; a longer prompt goes alone."""
_CACHE_TOKENS = 131_072
"""Tokens whose keys and values may be kept: the prompts in flight, each once, and `max_new_tokens` for each row. An
answer that needs more goes alone."""


class LocalEngine:
    """Samples on `policy.model`, so that new weights need no transfer. One thread may use it.

    An adapter's model is sampled from with merged weights, as an exported one would be (`packing.PackedWeights`).
    With `weights` other than `same` (see `rounding.rounded`) it samples on a copy of the model, as large as the original.
    `record_routes`: keep the experts that a mixture-of-experts model used, L K bytes for each token computed. A model
    without experts, or whose routers are not known, has none to keep. `longest`: tokens that may come after a prompt, if
    conversations are longer than one answer.
    """

    def __init__(
        self,
        policy: Policy,
        sampling: Sampling,
        seed: int,
        *,
        weights: str = "same",
        record_routes: bool = False,
        longest: int | None = None,
    ) -> None:
        self.version = 0
        self._longest = max(longest or 0, sampling.max_new_tokens)
        self._policy, self._sampling, self._seed, self._weights = policy, sampling, seed, weights
        if weights != "same":
            own = without_adapter(copy.deepcopy(policy.model)).requires_grad_(False)
            self._policy = replace(policy, model=own)
            self._copy(named_weights(policy.model))
        self._routers = routers_of(self._policy.model) if record_routes else None
        self._stop_ids = np.array(policy.stop_ids, dtype=np.int64)
        self._positions = getattr(policy.model.config.get_text_config(), "max_position_embeddings", None)
        self._waiting: deque[tuple[Open, int]] = deque()
        self._flight = self._new_flight()

    def _new_flight(self) -> Flight:
        return Flight(self._longest, self._policy.kernels)

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
        self._flight = self._new_flight()  # nothing made from the old weights stays

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
        prompt, limit = len(request.prompt.token_ids), self._limit(request)
        if self._positions is not None and prompt + limit > self._positions:
            key = "sampling.max_new_tokens" if request.partner is None else "conversation.max_tokens"
            raise InputError(
                f"row {request.prompt.row}: a prompt of {prompt} tokens and {key}={limit} "
                f"exceed the model's {self._positions} positions: shorten either"
            )
        opened = Open(request)
        self._waiting.extend((opened, index) for index in range(request.count))

    def _limit(self, request: Request) -> int:
        """Tokens that may come after the prompt."""
        return self._sampling.max_new_tokens if request.partner is None else self._longest

    def collect(self) -> Iterator[Group]:
        while self._waiting or self._flight.answers:
            yield from self._advance()
        self._flight = self._new_flight()  # its memory is the learner's now

    def abandon(self) -> None:
        """Give up every answer that was asked for and not collected."""
        self._waiting.clear()
        self._flight = self._new_flight()

    @torch.no_grad()
    def _advance(self) -> list[Group]:
        """The first token of answers, if rows are free for them, or of turns, if they were replied to, else the next token of every row."""
        refill = self._refill_due()
        groups = self._hear(wait=not refill and self._flight.idle)
        if refill:
            return groups + self._retire(self._start())
        if (reading := self._flight.reading(_PREFILL_TOKENS)) is not None:
            return groups + self._retire(self._read(reading))
        return groups if self._flight.idle else groups + self._retire(self._step())

    def _refill_due(self) -> bool:
        """A refill is a forward of its own, so it waits until a share of the rows is free."""
        if not self._waiting or not self._flight.answers:
            return bool(self._waiting)
        enough = min(len(self._waiting), max(1, self._sampling.max_rows // 8))
        return len(self._fitting(enough)) == enough

    def _fitting(self, most: int, prefill_tokens: int | None = None) -> list[tuple[Open, int]]:
        """The waiting answers, up to `most` in the order of submission, that there is room for in flight.

        `prefill_tokens`: and whose prompts, as far as they are new, are together no longer than that.
        """
        flight = self._flight
        fitting: list[tuple[Open, int]] = []
        known, tokens, new_tokens = set(flight.prompts), flight.reserved, 0
        for opened, index in islice(self._waiting, min(most, self._sampling.max_rows - len(flight.answers))):
            new = opened not in known
            tokens += self._longest + (padded(opened.prompt_tokens) if new else 0)
            new_tokens += opened.prompt_tokens if new else 0
            over_prefill = prefill_tokens is not None and new and new_tokens > max(prefill_tokens, opened.prompt_tokens)
            if (tokens > _CACHE_TOKENS and (flight.answers or fitting)) or over_prefill:
                break
            known.add(opened)
            fitting.append((opened, index))
        return fitting

    def _start(self) -> np.ndarray:
        flight = self._flight
        started = self._fitting(self._sampling.max_rows, _PREFILL_TOKENS)
        self._prefill([opened for opened in dict.fromkeys(o for o, _ in started) if opened not in flight.prompts])
        for _ in started:
            self._waiting.popleft()
        rows = flight.add(started, [self._draws(opened, index, turn=0) for opened, index in started])
        self._sample(rows, torch.stack([flight.first_logits[opened] for opened, _ in started]))
        unfinished = {
            opened for opened, _ in islice(self._waiting, 1)
        }  # answers start in order: at most one such group
        flight.first_logits = {o: logits_V.clone() for o, logits_V in flight.first_logits.items() if o in unfinished}
        return rows

    def _prefill(self, prompts: list[Open]) -> None:
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

    def _step(self) -> np.ndarray:
        """Compute the last token of every row; the rows whose next one was then sampled."""
        flight = self._flight
        layout = flight.cache.step(self._policy.device, flight.held)
        rows = flight.writing()
        logits_BV, routes_BLK = self._logits(flight.last_tokens(), flight.positions(), layout, rows)
        if routes_BLK is not None:
            flight.keep_routes(routes_BLK)
        self._sample(rows, logits_BV)
        return rows

    def _read(self, reading: Reading) -> np.ndarray:
        """Compute what was put between turns; the rows whose next turn then begins."""
        logits_RV, routes_TLK = self._logits(reading.token_T, reading.position_T, reading.layout, reading.last)
        if routes_TLK is not None:
            self._flight.keep_routes_read(reading, routes_TLK)
        self._sample(reading.rows, logits_RV)
        return reading.rows

    def _logits(
        self, tokens_T: np.ndarray, position_T: np.ndarray, layout: Prefill | Step | Extend, source_N: np.ndarray
    ) -> tuple[Tensor, np.ndarray | None]:
        """Logits [N, V] and, if they are recorded, the experts of every token, [T, L, K]."""
        tokens, position, source = (
            torch.from_numpy(x.astype(np.int64)).to(self._policy.device) for x in (tokens_T, position_T, source_N)
        )
        flight = self._flight
        flight.decoder = flight.decoder or Decoder(self._policy.model, self._policy.kernels)
        routing = None if self._routers is None else Routing(self._routers)
        routed = layout if routing is None else Routed(layout, routing)
        logits_NV = flight.decoder.logits(tokens, position, routed, source)
        return logits_NV, None if routing is None else routing.chosen().cpu().numpy()

    def _draws(self, opened: Open, index: int, turn: int) -> np.ndarray:
        r, count = opened.request, self._sampling.max_new_tokens
        return uniforms(self._seed, stream=r.stream, ordinal=r.ordinal, index=index, turn=turn, count=count)

    def _sample(self, rows: np.ndarray, logits_BV: Tensor) -> None:
        """One token more for the rows in `rows`."""
        # The inverse CDF is summed in float64, which Apple's GPUs do not have.
        device = torch.device("cpu") if logits_BV.device.type == "mps" else logits_BV.device
        logits_BV = logits_BV.to(device)
        uniform_B = torch.from_numpy(self._flight.next_uniforms(rows)).to(device)
        answers = [self._flight.answers[row] for row in rows]
        greedy_B = torch.tensor([opened.request.greedy for opened, _ in answers], device=device)
        token_B, logprob_B = sample(logits_BV, uniform_B, greedy_B, self._sampling, self._policy.kernels)
        finite_B = torch.isfinite(logprob_B)
        if not bool(finite_B.all()):
            opened, index = answers[int(finite_B.logical_not().nonzero()[0])]
            raise DivergedError(
                f"row {opened.request.prompt.row}, answer {index}: weights version {self.version} give logits that are not finite: "
                "the update before it diverged; lower optimizer.learning_rate, or go on from an earlier checkpoint"
            )
        self._flight.write(rows, token_B.cpu().numpy(), logprob_B.float().cpu().numpy())

    def _retire(self, rows: np.ndarray) -> list[Group]:
        """Deal with the answers among `rows` that have ended: the groups that are complete by that, and turns handed over."""
        ended_B, full_B = self._flight.ended(rows, self._stop_ids)
        over: dict[int, Over | Stop] = {}
        for i in np.flatnonzero(ended_B | full_B):
            row, cut = int(rows[i]), not ended_B[i]
            key = opened, _ = self._flight.answers[row]
            if opened.request.partner is None:
                over[row] = Stop.LENGTH if cut else Stop.EOS
            else:
                opened.request.partner.take(Turn(key, opened.request.prompt, self._flight.hold(row), cut))
        return self._close(over)

    def _hear(self, wait: bool) -> list[Group]:
        """Go on with the conversations that were replied to; the groups that are complete by those that are over."""
        flight = self._flight
        over: dict[int, Over | Stop] = {}
        for partner in {id(o.request.partner): o.request.partner for o, _ in flight.answers}.values():
            for reply in () if partner is None else partner.replies(wait):
                row = flight.answers.index(reply.key)  # type: ignore[arg-type]
                if isinstance(reply, Next):
                    turn = flight.insert(row, reply.keep, reply.token_ids)
                    flight.begin_turn(row, self._draws(*flight.answers[row], turn))
                else:
                    over[row] = reply
        return self._close(over)

    def _close(self, over: dict[int, Over | Stop]) -> list[Group]:
        """Take rows out of flight, by how they ended; the groups that are complete by that."""
        groups, complete = [], []
        for row, end in over.items():
            opened, index = self._flight.answers[row]
            opened.rollouts[index] = self._rollout(index, segments(self._flight.lines(row)), end)
            if len(opened.rollouts) == opened.request.count:
                rollouts = tuple(opened.rollouts[i] for i in range(opened.request.count))
                groups.append(Group(opened.request.prompt, opened.request.ordinal, rollouts, opened.prompt_routes))
                complete.append(opened)
        if over:
            self._flight.drop(np.array(sorted(over)))
        for opened in complete:
            self._flight.release(opened)
        return groups

    def _rollout(self, index: int, written: tuple[Segment, ...], end: Over | Stop) -> Rollout:
        versions = (self.version, self.version)
        if isinstance(end, Over):
            ended = Rollout(index, written, end.text, end.stop, versions, error=end.error, limit=end.limit)
            return replace(ended, messages=end.messages, earned=end.earned)
        text = self._policy.tokenizer.decode(written[0].token_ids.tolist(), skip_special_tokens=True)
        return Rollout(index, written, text, end, versions, limit=Limit.REPLY if end is Stop.LENGTH else None)

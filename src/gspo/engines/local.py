"""The engine inside the trainer's process: it samples from the trainer's own model object.

In: `Request`s. Out: `Group`s. Rows are refilled as answers end (continuous batching); a prompt is computed once for
all answers that start together. Letters: B rows in flight, M `max_new_tokens`, T tokens of a packed row, P prompts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo.config import Sampling
from gspo.engines.engine import Request
from gspo.engines.sampler import sample
from gspo.engines.streams import uniforms
from gspo.errors import InputError, RunError
from gspo.models.cache import KeyValues, Prefill, Step
from gspo.models.heads import next_logits
from gspo.models.load import Policy
from gspo.types import Group, Rollout, Segment, Stop

_PREFILL_TOKENS = 8192
"""Prompt tokens computed in one forward; a longer prompt goes alone."""
_CACHE_TOKENS = 131_072
"""Rows times their longest possible length; a longer row goes alone."""


@dataclass
class _Open:
    """A request whose answers are still being written."""

    request: Request
    rollouts: dict[int, Rollout] = field(default_factory=dict)

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt.token_ids)


class LocalEngine:
    """Samples on `policy.model`, so that new weights need no transfer. One thread may use it."""

    def __init__(self, policy: Policy, sampling: Sampling, seed: int) -> None:
        self.version = 0
        self._policy, self._sampling, self._seed = policy, sampling, seed
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
            "stop_ids": list(self._policy.stop_ids),
        }

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take the new version number; `weights` is not read: the model samples with what the learner has put into it."""
        if self._flight.answers:
            raise RunError(
                f"weights version {version} arrived while {len(self._flight.answers)} answers were being written: collect them first"
            )
        self.version = version
        self._flight = _Flight(self._sampling.max_new_tokens)  # nothing made from the old weights stays

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

    @torch.no_grad()
    def _advance(self) -> list[Group]:
        """One forward: of prompts, if rows are free for them, else of the next token of every row."""
        rows = self._prefill() if self._refill_due() else self._step()
        return self._retire(rows)

    def _refill_due(self) -> bool:
        """A refill is a forward of its own, so it waits until a share of the rows is free."""
        free = self._sampling.max_rows - len(self._flight.answers)
        enough = min(len(self._waiting), max(1, self._sampling.max_rows // 8))
        return bool(self._waiting) and (not self._flight.answers or (free >= enough and self._room() > 0))

    def _room(self) -> int:
        """Rows that may start now, if their prompts are no longer than the next one."""
        longest = max(self._flight.longest_prompt, self._waiting[0][0].prompt_tokens) + self._sampling.max_new_tokens
        return min(self._sampling.max_rows, max(1, _CACHE_TOKENS // longest)) - len(self._flight.answers)

    def _admit(self) -> list[tuple[_Open, int]]:
        """The answers that start now, in the order of submission, within both token budgets."""
        admitted: list[tuple[_Open, int]] = []
        tokens = 0
        longest = self._flight.longest_prompt
        while self._waiting and len(admitted) + len(self._flight.answers) < self._sampling.max_rows:
            opened = self._waiting[0][0]
            new = not admitted or admitted[-1][0] is not opened
            longest = max(longest, opened.prompt_tokens)
            rows = len(admitted) + len(self._flight.answers) + 1
            over_cache = rows * (longest + self._sampling.max_new_tokens) > _CACHE_TOKENS and rows > 1
            if over_cache or (new and admitted and tokens + opened.prompt_tokens > _PREFILL_TOKENS):
                break
            tokens += opened.prompt_tokens if new else 0
            admitted.append(self._waiting.popleft())
        return admitted

    def _prefill(self) -> slice:
        admitted = self._admit()
        prompts: list[_Open] = []
        owner: list[int] = []
        for opened, _ in admitted:
            if not prompts or prompts[-1] is not opened:
                prompts.append(opened)
            owner.append(len(prompts) - 1)
        lengths = [p.prompt_tokens for p in prompts]
        rows = self._flight.add(admitted, [self._draws(opened, index) for opened, index in admitted])
        self._flight.cache.reserve(rows.stop, max(lengths) + self._sampling.max_new_tokens)
        owner_B = torch.tensor(owner)
        logits_PV = self._logits(
            np.concatenate([p.request.prompt.token_ids for p in prompts]),
            np.concatenate([np.arange(n) for n in lengths]),
            Prefill(lengths, self._flight.cache, first=rows.start, owner=owner_B, device=self._policy.device),
            np.cumsum(lengths) - 1,
        )
        self._sample(rows, logits_PV.index_select(0, owner_B.to(logits_PV.device)))
        return rows

    def _step(self) -> slice:
        rows = slice(0, len(self._flight.answers))
        position_B = self._flight.positions()
        layout = Step(self._flight.cache, torch.from_numpy(position_B).to(self._policy.device))
        self._sample(rows, self._logits(self._flight.last_tokens(), position_B, layout, np.arange(rows.stop)))
        return rows

    def _logits(
        self, tokens_T: np.ndarray, position_T: np.ndarray, layout: Prefill | Step, source_N: np.ndarray
    ) -> Tensor:
        tokens, position, source = (
            torch.from_numpy(x.astype(np.int64)).to(self._policy.device) for x in (tokens_T, position_T, source_N)
        )
        model, flight = self._policy.model, self._flight
        if flight.factor_VD is None:
            flight.factor_VD = model.get_output_embeddings().factor()
        return next_logits(
            model, tokens_T=tokens, position_T=position, layout=layout, source_N=source, factor_VD=flight.factor_VD
        )

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
            raise RunError(
                f"row {opened.request.prompt.row}, answer {index}: weights version {self.version} give logits that are not finite: "
                "the update before it diverged; lower optimizer.learning_rate, or go on from an earlier checkpoint"
            )
        self._flight.write(rows, token_B.cpu().numpy(), logprob_B.float().cpu().numpy())

    def _retire(self, rows: slice) -> list[Group]:
        """Take the answers among `rows` that have ended out of flight; the groups that are complete by that."""
        ended_B, full_B = self._flight.ended(rows, self._stop_ids)
        done = np.flatnonzero(ended_B | full_B) + rows.start
        groups = []
        for row in done:
            opened, index = self._flight.answers[row]
            stop = Stop.EOS if ended_B[row - rows.start] else Stop.LENGTH
            opened.rollouts[index] = self._rollout(index, *self._flight.written(row), stop)
            if len(opened.rollouts) == opened.request.count:
                rollouts = tuple(opened.rollouts[i] for i in range(opened.request.count))
                groups.append(Group(opened.request.prompt, opened.request.ordinal, rollouts))
        if len(done):
            self._flight.drop(done)
        return groups

    def _rollout(self, index: int, token_ids: np.ndarray, logprobs: np.ndarray, stop: Stop) -> Rollout:
        segment = Segment(token_ids, np.ones(len(token_ids), dtype=bool), logprobs)
        text = self._policy.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)
        return Rollout(index, (segment,), text, stop, (self.version, self.version))


class _Flight:
    """The answers being written: row i of every array, and of the cache, belongs to `answers[i]`."""

    def __init__(self, max_new_tokens: int) -> None:
        self.answers: list[tuple[_Open, int]] = []
        self.cache = KeyValues()
        self.factor_VD: Tensor | None = None
        """The head's weight in float32, made once for the answers that are written with it."""
        self._token_BM = np.zeros((0, max_new_tokens), dtype=np.int64)
        self._logprob_BM = np.zeros((0, max_new_tokens), dtype=np.float32)
        self._uniform_BM = np.zeros((0, max_new_tokens))
        self._prompt_B = np.zeros(0, dtype=np.int64)
        self._count_B = np.zeros(0, dtype=np.int64)

    @property
    def longest_prompt(self) -> int:
        return int(self._prompt_B.max(initial=0))

    def add(self, answers: list[tuple[_Open, int]], draws: list[np.ndarray]) -> slice:
        rows = slice(len(self.answers), len(self.answers) + len(answers))
        self.answers += answers
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

    def written(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        count = self._count_B[row]
        return self._token_BM[row, :count].copy(), self._logprob_BM[row, :count].copy()

    def drop(self, done: np.ndarray) -> None:
        """Move the last rows into the places of `done`, so that rows in use stay the first ones."""
        count = len(self.answers) - len(done)
        stays = np.setdiff1d(np.arange(len(self.answers)), done)
        source, target = stays[stays >= count], done[done < count]
        if len(source):
            self.cache.move(torch.from_numpy(source), torch.from_numpy(target), int(self.positions()[source].max()) + 1)
        order = np.arange(count)
        order[target] = source
        self.answers = [self.answers[i] for i in order]
        self._token_BM, self._logprob_BM, self._uniform_BM = (
            self._token_BM[order],
            self._logprob_BM[order],
            self._uniform_BM[order],
        )
        self._prompt_B, self._count_B = self._prompt_B[order], self._count_B[order]

    @staticmethod
    def _take(x_BM: np.ndarray, column_B: np.ndarray) -> np.ndarray:
        taken: np.ndarray = x_BM[np.arange(len(x_BM)), column_B]
        return taken

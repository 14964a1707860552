"""Conversations in the engine: sampled ids stand as they were sampled, whatever is put between turns and however it is scheduled."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import numpy as np
import pytest
import torch
from asking import PROMPTS, UNEVEN, named
from chains import ask
from families import make
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo import PRESETS, config
from gspo.batch import make_batches
from gspo.config import Sampling
from gspo.engines.engine import Next, Over, Turn
from gspo.engines.lines import Line, segments
from gspo.engines.local import LocalEngine
from gspo.engines.streams import uniforms
from gspo.learner import Learner
from gspo.models.attention import Packed
from gspo.models.heads import next_logits, trained_logprobs
from gspo.models.load import Policy
from gspo.models.routing import Routed, Routing, routers_of
from gspo.objectives import policy_objective
from gspo.types import Group, Reward, Rollout, Segment, Stop

STOPS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 11)
"""Ten of 58: turns end soon, and not all at the same length."""


class Scripted:
    """Says what follows from the turn alone, late for some; with `forgets`, the second turn goes on from a rewritten first."""

    def __init__(self, turns: int = 3, forgets: bool = False, late: int = 0) -> None:
        self.turns, self.forgets, self.late = turns, forgets, late
        self.lines: dict[Hashable, np.ndarray] = {}
        self.count: dict[Hashable, int] = {}
        self.waiting: list[tuple[int, Next | Over]] = []

    def take(self, turn: Turn) -> None:
        line = np.concatenate([self.lines.pop(turn.key, np.zeros(0, dtype=np.int64)), turn.token_ids])
        number = self.count[turn.key] = self.count.get(turn.key, 0) + 1
        if turn.cut or number == self.turns:
            stop = Stop.LENGTH if turn.cut else Stop.ENVIRONMENT
            self.waiting.append((0, Over(turn.key, stop, "", ({"role": "assistant", "content": ""},), 1.0)))
            return
        said = 12 + (int(line.sum()) + np.arange(1 + int(line.sum()) % 5)) % 40
        keep = number % 3 if self.forgets and len(line) > 3 else len(line)
        self.lines[turn.key] = np.concatenate([line[:keep], said])
        self.waiting.append((int(line.sum()) % (self.late + 1), Next(turn.key, keep, said)))

    def replies(self, wait: bool) -> list[Next | Over]:
        due = [reply for left, reply in self.waiting if left == 0 or wait]
        self.waiting = [] if wait else [(left - 1, reply) for left, reply in self.waiting if left > 0]
        return due


def talked(
    policy: Policy, partner: Scripted, prompts: list[list[int]] = PROMPTS, count: int = 4, **sampling: object
) -> dict[int, Group]:
    policy = replace(policy, stop_ids=STOPS)
    keys = Sampling(**{"max_new_tokens": 9, **sampling})  # type: ignore[arg-type]
    engine = LocalEngine(policy, keys, seed=0, record_routes=True, longest=48)
    for ordinal, ids in enumerate(prompts):
        engine.submit(ask(ids, count, ordinal=ordinal, partner=partner))
    return {group.ordinal: group for group in engine.collect()}


def lines(rollout: Rollout) -> list[tuple[list[int], list[bool]]]:
    return [(s.token_ids.tolist(), s.policy_mask.tolist()) for s in rollout.segments]


def histories(group: Group, rollout: Rollout) -> list[tuple[np.ndarray, Segment]]:
    """What stands before each segment, and it."""
    found: list[tuple[np.ndarray, Segment]] = []
    for segment in rollout.segments:
        above = group.prompt.token_ids
        if segment.parent is not None:
            before, parent = found[segment.parent]
            above = np.concatenate([before, parent.token_ids])
        found.append((above, segment))
    return found


@pytest.mark.parametrize("forgets", [False, True])
def test_turns_do_not_depend_on_scheduling_and_are_masked(forgets: bool) -> None:
    policy = named("random-dense")
    expected = talked(policy, Scripted(forgets=forgets))
    rollouts = [r for group in expected.values() for r in group.rollouts]
    assert len({r.stop for r in rollouts}) == 2
    assert any(len(r.segments) > 1 for r in rollouts) == forgets
    for r in rollouts:
        inserted = np.concatenate([~s.policy_mask for s in r.segments])
        logprobs = np.concatenate([s.logprobs for s in r.segments])
        assert (logprobs[inserted] == 0).all()
        assert (logprobs[~inserted] < 0).all()
    for other in (
        talked(policy, Scripted(forgets=forgets, late=5), max_rows=3),
        talked(policy, Scripted(forgets=forgets, late=2), max_rows=7),
    ):
        for ordinal, group in other.items():
            assert [lines(r) for r in group.rollouts] == [lines(r) for r in expected[ordinal].rollouts]


def test_each_turn_has_random_numbers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def watched(seed: int, **key: int) -> np.ndarray:
        asked.append((key["ordinal"], key["index"], key["turn"]))
        return uniforms(seed, **key)  # type: ignore[arg-type]

    monkeypatch.setattr("gspo.engines.local.uniforms", watched)
    found = talked(named("random-dense"), Scripted(turns=2), count=2)
    assert len(set(asked)) == len(asked)
    assert {turn for *_, turn in asked} == {0, 1}
    monkeypatch.setattr("gspo.engines.local.uniforms", lambda seed, **key: uniforms(seed, **{**key, "turn": 0}))  # type: ignore[arg-type]
    other = talked(named("random-dense"), Scripted(turns=2), count=2)
    assert any(lines(a) != lines(b) for i in found for a, b in zip(found[i].rollouts, other[i].rollouts, strict=True))


def test_a_prompt_is_computed_once_and_so_is_a_turn() -> None:
    """Of a row that waits for its reply the last token is computed again, and nothing else."""
    policy = named("random-dense")
    seen: list[int] = []
    policy.model.get_input_embeddings().register_forward_hook(lambda _, args, __: seen.append(args[0].numel()))
    found = talked(policy, Scripted(), max_rows=1)
    prompts = sum(len(ids) for ids in PROMPTS)
    followed = sum(len(r.segments[0].token_ids) - 1 for g in found.values() for r in g.rollouts)
    assert sum(seen) == prompts + followed


@given(
    family=st.sampled_from(["llama", "gemma3"]),
    turns=st.integers(1, 4),
    forgets=st.booleans(),
    late=st.integers(0, 4),
    rows=st.integers(1, 9),
)
@settings(max_examples=8, deadline=None)
def test_logprobs_are_those_of_the_trainer(family: str, turns: int, forgets: bool, late: int, rows: int) -> None:
    from chains import policy_of

    policy = policy_of(make(family, torch.float32), STOPS)
    found = talked(policy, Scripted(turns, forgets, late), prompts=UNEVEN, count=2, max_rows=rows, temperature=0.7)
    pairs = [pair for g in found.values() for r in g.rollouts for pair in histories(g, r)]
    sequences = [torch.from_numpy(np.concatenate([above, s.token_ids])) for above, s in pairs]
    starts = np.cumsum([0, *(len(x) for x in sequences)])
    places = [starts[i] + len(above) + np.flatnonzero(s.policy_mask) for i, (above, s) in enumerate(pairs)]
    at = torch.from_numpy(np.concatenate(places))
    tokens = torch.cat(sequences)
    logprob_N, _ = trained_logprobs(
        policy.model,
        tokens_T=tokens,
        position_T=torch.cat([torch.arange(len(x)) for x in sequences]),
        layout=Packed([len(x) for x in sequences]),
        source_N=at - 1,
        target_N=tokens[at],
        temperature=0.7,
    )
    sampled_N = np.concatenate([s.logprobs[s.policy_mask] for _, s in pairs])
    assert np.abs(sampled_N - logprob_N.detach().numpy()).max() < 1e-5
    assert sampled_N.min() < -2


class GradientRecorder(Learner):
    """Keeps the gradients that the optimizer would have been given."""

    def _step(self, tally: object) -> float:
        self.gradients = {name: p.grad.clone() for name, p in self.masters.items() if p.grad is not None}
        self.optimizer.zero_grad()
        return 1.0


@pytest.mark.parametrize("forgets", [False, True])
def test_the_gradient_is_that_of_flat_sequences_with_masks(forgets: bool, policy: Policy) -> None:
    """On policy, -1/S sum_i A_i/n_i sum_t grad log pi over the policy's own tokens, each after its own history."""
    row = PRESETS["gspo"].model_copy(update={"updates_per_step": 1})
    found = talked(policy, Scripted(forgets=forgets), prompts=PROMPTS[:2])
    groups = [g.with_rewards([Reward(float((i + o) % 3)) for i in range(4)]) for o, g in found.items()]
    learner = GradientRecorder(
        model=policy.model, row=row, settings=config.Optimizer(), temperature=1.0, max_new_tokens=9,
        total_updates=8, compute_dtype=policy.compute_dtype,
    )  # fmt: skip
    (batch,) = learner.annotate(make_batches(groups, row, 90))
    stats = learner.update(batch, policy_objective(row))
    assert stats.parity.largest < 1e-6
    assert batch.tokens == sum(r.policy_tokens for g in groups for r in g.rollouts)

    model, loss = policy.model, torch.zeros((), dtype=torch.float64)
    model.set_attn_implementation("sdpa")
    for g in groups:
        rewards = torch.tensor([r.reward.value for r in g.rollouts if r.reward], dtype=torch.float64)
        for r, reward in zip(g.rollouts, rewards, strict=True):
            advantage = (reward - rewards.mean()) / rewards.std()
            for above, segment in histories(g, r):
                ids = torch.from_numpy(np.concatenate([above, segment.token_ids]))
                logits = model(input_ids=ids[None], use_cache=False).logits[0]
                at = torch.from_numpy(len(above) + np.flatnonzero(segment.policy_mask))
                nll = torch.nn.functional.cross_entropy(logits[at - 1], ids[at], reduction="sum")
                loss = loss + advantage * nll / r.policy_tokens / 8
    model.zero_grad()
    loss.backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(learner.gradients[key], parameter.grad, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("forgets", [False, True])
def test_recorded_experts_are_those_of_each_history(forgets: bool) -> None:
    policy = named("random-moe")
    routers = routers_of(policy.model)
    assert routers is not None
    for group in talked(policy, Scripted(forgets=forgets, late=2), max_rows=5, count=2).values():
        for rollout in group.rollouts:
            for above, segment in histories(group, rollout):
                assert segment.routes is not None
                ids = torch.from_numpy(np.concatenate([above, segment.token_ids]))
                routing, places = Routing(routers), torch.arange(len(ids))
                layout = Routed(Packed([len(ids)]), routing)
                next_logits(policy.model, tokens_T=ids, position_T=places, layout=layout, source_N=places[-1:])
                own = routing.chosen().sort(-1).values.numpy()[len(above) :][: len(segment.routes)]
                np.testing.assert_array_equal(np.sort(segment.routes, -1), own)
    make_batches([group.with_rewards([Reward(0.0), Reward(1.0)])], PRESETS["grpo"], 100)


# ------------------------------------------------------------------------------ lines


def line(start: int, *ids: int) -> Line:
    return Line(start, Segment(np.array(ids), np.ones(len(ids), dtype=bool), np.zeros(len(ids), np.float32)))


def test_lines_become_a_tree_in_which_every_token_stands_once() -> None:
    found = segments([line(0, 1, 2, 3, 4), line(2, 5, 6, 7), line(4, 8), line(1, 9), line(0, 10, 11)])
    assert [(s.token_ids.tolist(), s.parent) for s in found] == [
        ([1], None),
        ([2], 0),
        ([3, 4], 1),
        ([5, 6], 1),
        ([7], 3),
        ([8], 3),
        ([9], 0),
        ([10, 11], None),
    ]


@given(st.data())
def test_every_line_can_be_read_from_the_tree(data: st.DataObject) -> None:
    whole: list[int] = []
    made, expected = [], []
    token = 0
    for number in range(data.draw(st.integers(1, 5))):
        start = data.draw(st.integers(0, len(whole) - 1)) if number else 0
        count = data.draw(st.integers(1, 4))
        own = list(range(token, token + count))
        token += count
        whole = [*whole[:start], *own]
        made.append(line(start, *own))
        expected.append(tuple(whole))
    found = segments(made)
    paths: list[tuple[int, ...]] = []
    for s in found:
        assert s.parent is None or s.parent < len(paths)
        paths.append((*(() if s.parent is None else paths[s.parent]), *s.token_ids.tolist()))
    assert set(expected) <= set(paths)
    assert sorted(i for s in found for i in s.token_ids.tolist()) == list(range(token))

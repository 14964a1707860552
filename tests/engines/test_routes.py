"""The experts that the engine records are those of a forward over the whole sequence, whatever the rows' course."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from asking import UNEVEN, named
from chains import ask

from gspo.config import Sampling
from gspo.engines.local import LocalEngine
from gspo.engines.rounding import rounded
from gspo.models.attention import Packed
from gspo.models.heads import next_logits
from gspo.models.load import Policy
from gspo.models.routing import Routed, Routing, routers_of
from gspo.types import Group


def recorded(
    policy: Policy, *, record: bool = True, counts: tuple[int, ...] = (3, 2, 4, 1), **sampling: int
) -> list[Group]:
    keys = Sampling(**{"max_new_tokens": 40, **sampling})  # type: ignore[arg-type]
    engine = LocalEngine(policy, keys, seed=0, record_routes=record)
    for i, (ids, count) in enumerate(zip(UNEVEN, counts, strict=True)):
        engine.submit(ask(ids, count, ordinal=i))
    return sorted(engine.collect(), key=lambda group: group.ordinal)


@pytest.mark.parametrize("max_rows", [64, 3])
def test_recorded_experts_are_those_of_the_whole_sequence(max_rows: int) -> None:
    """Rows end at different tokens, move up, and are refilled; prompts of 1 to 165 tokens are computed together."""
    policy = named("random-moe")
    lengths, different = set(), set()
    for group in recorded(policy, max_rows=max_rows):
        assert group.prompt_routes is not None
        assert group.prompt_routes.dtype == np.uint8
        for rollout in group.rollouts:
            (segment,) = rollout.segments
            assert segment.routes is not None
            assert len(segment.routes) == len(segment.token_ids) - 1, "the last token is never computed"
            found = np.concatenate([group.prompt_routes, segment.routes])
            ids = np.concatenate([group.prompt.token_ids, segment.token_ids[:-1]])
            np.testing.assert_array_equal(np.sort(found, -1), own_experts(policy.model, ids))
            lengths.add(len(segment.token_ids))
            different |= {tuple(sorted(k)) for k in found.reshape(-1, 2).tolist()}
    assert len(lengths) > 1, "answers of one length would hide rows that were mixed up"
    assert len(different) > 3, "experts that never differ would hide anything"


def test_an_engine_with_weights_of_its_own_records_what_these_choose() -> None:
    """Coarse ones, so that they choose otherwise than the trainer's; and again after they were replaced."""
    policy, other = named("random-moe"), named("random-moe")
    with torch.no_grad():
        for p in other.model.parameters():
            p.copy_(p.roll(1, 0))
    engine = LocalEngine(policy, Sampling(max_new_tokens=8), seed=0, weights="int6", record_routes=True)
    for version, now in enumerate((policy, other)):
        engine.load(now.model.named_parameters(), version)
        coarse = named("random-moe").model
        with torch.no_grad():
            for p, w in zip(coarse.parameters(), now.model.parameters(), strict=True):
                p.copy_(rounded(w, "int6"))
        engine.submit(ask(UNEVEN[-1], 2))
        (group,) = engine.collect()
        assert group.prompt_routes is not None
        (segment,) = group.rollouts[1].segments
        assert segment.routes is not None
        found = np.concatenate([group.prompt_routes, segment.routes])
        ids = np.concatenate([group.prompt.token_ids, segment.token_ids[:-1]])
        np.testing.assert_array_equal(np.sort(found, -1), own_experts(coarse, ids))
        assert (np.sort(found, -1) != own_experts(now.model, ids)).any(), "nothing was rounded"


def own_experts(model: Any, token_ids: np.ndarray) -> np.ndarray:
    """[T, L, K] sorted: of a forward over the whole sequence."""
    routers, ids = routers_of(model), torch.from_numpy(token_ids)
    assert routers is not None
    routing, places = Routing(routers), torch.arange(len(ids))
    layout = Routed(Packed([len(ids)]), routing)
    next_logits(model, tokens_T=ids, position_T=places, layout=layout, source_N=places[-1:])
    return routing.chosen().sort(-1).values.numpy()


def test_recording_changes_no_token_and_is_asked_for() -> None:
    policy = named("random-moe")
    with_routes, without = recorded(policy), recorded(policy, record=False)
    assert all(g.prompt_routes is None and g.rollouts[0].segments[0].routes is None for g in without)
    for one, other in zip(with_routes, without, strict=True):
        for a, b in zip(one.rollouts, other.rollouts, strict=True):
            np.testing.assert_array_equal(a.segments[0].token_ids, b.segments[0].token_ids)
            np.testing.assert_array_equal(a.segments[0].logprobs, b.segments[0].logprobs)


def test_a_dense_model_has_nothing_to_record() -> None:
    (group, *_) = recorded(named("random-dense"))
    assert group.prompt_routes is None
    assert group.rollouts[0].segments[0].routes is None

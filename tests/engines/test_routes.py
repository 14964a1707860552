"""The experts that the engine records are those of a forward over the whole sequence, whatever the rows' course."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from asking import UNEVEN, named
from chains import ask

from gspo.config import Sampling
from gspo.engines.local import LocalEngine
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
    routers = routers_of(policy.model)
    assert routers is not None
    lengths, different = set(), set()
    for group in recorded(policy, max_rows=max_rows):
        assert group.prompt_routes is not None
        assert group.prompt_routes.dtype == np.uint8
        for rollout in group.rollouts:
            (segment,) = rollout.segments
            assert segment.routes is not None
            assert len(segment.routes) == len(segment.token_ids) - 1, "the last token is never computed"
            found = np.concatenate([group.prompt_routes, segment.routes])
            ids = torch.from_numpy(np.concatenate([group.prompt.token_ids, segment.token_ids[:-1]]))
            routing, places = Routing(routers), torch.arange(len(ids))
            layout = Routed(Packed([len(ids)]), routing)
            next_logits(policy.model, tokens_T=ids, position_T=places, layout=layout, source_N=places[-1:])
            np.testing.assert_array_equal(np.sort(found, -1), routing.chosen().sort(-1).values.numpy())
            lengths.add(len(segment.token_ids))
            different |= {tuple(sorted(k)) for k in found.reshape(-1, 2).tolist()}
    assert len(lengths) > 1, "answers of one length would hide rows that were mixed up"
    assert len(different) > 3, "experts that never differ would hide anything"


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

"""Which experts a pass of the trainer has to use, and how far they are from those of other passes.

In: a micro-batch, its routes, and the row's `routing`. Out: the `Routing` of the forward, and after it a comparison. The
learner calls both; a model without experts has neither.

Letters: T tokens the model sees (packed), L layers with experts, K experts chosen for a token.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gspo.batch import Batch, Microbatch
from gspo.errors import RunError
from gspo.models.routing import Routers, Routing
from gspo.presets import Algorithm
from gspo.stats import Changes, RouteChanges, changes


def routing_of(routers: Routers | None, row: Algorithm, batch: Batch, micro: Microbatch) -> Routing | None:
    """The routing of one forward of the policy; None for a model whose routers are not known, or that has none.

    Raises RunError if the engine's experts are asked for and it recorded none, or those of another model.
    """
    if routers is None:
        return None
    given_TLK = given(row, batch)
    if given_TLK is not None:
        given_TLK = given_TLK[micro.token]
        routers.check(given_TLK)
    return Routing(routers, given_TLK, with_logits=row.load_balance > 0)


def given(row: Algorithm, batch: Batch) -> Tensor | None:
    """[T, L, K] the experts that the passes of an update have to use; None where routers choose for themselves."""
    return _GIVEN[row.routing](batch)


def _rollout(batch: Batch) -> Tensor:
    if batch.rollout_routes_TLK is None:
        raise RunError(
            "algorithm.routing=rollout replays the engine's experts, and the answers of this step have none recorded: "
            "use an engine that records them, or algorithm.routing=old"
        )
    return batch.rollout_routes_TLK


_GIVEN: dict[str, Callable[[Batch], Tensor | None]] = {
    "off": lambda batch: None,
    # None in the old pass itself, and in the first update of a step, which has none: its own forward is the old policy.
    "old": lambda batch: batch.old_routes_TLK,
    "rollout": _rollout,
}


def compared(routing: Routing, batch: Batch, micro: Microbatch, *, at_rollout_weights: bool) -> RouteChanges:
    """What the routers of an update's forward chose, beside the other passes.

    `at_rollout_weights`: this forward has the weights that the answers were sampled with. A prompt that stands in several
    micro-batches counts once.
    """
    own_TLK, weight_T = routing.chosen(), batch.copies()[micro.token].reciprocal()

    def beside(other_TLK: Tensor | None, mine_TLK: Tensor | None) -> Changes:
        if other_TLK is None or mine_TLK is None:
            return Changes()
        return changes(other_TLK, mine_TLK, weight_T)

    sampled_TLK, old_TLK = (
        None if routes is None else routes[micro.token] for routes in (batch.rollout_routes_TLK, batch.old_routes_TLK)
    )
    return RouteChanges(
        rollout_old=beside(sampled_TLK, own_TLK if at_rollout_weights else old_TLK),
        old_new=beside(old_TLK, own_TLK),
        replayed=beside(routing.given_TLK, own_TLK),
    )

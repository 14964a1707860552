"""The critic: what says how much is still to come after each token. A learner of its own, or a head on the policy's layers.

In: the `critic` section, the policy, a checkpoint to go on from. Out: a `Critic`; from it values for `annotate`, an update
for each batch, and what a checkpoint keeps. `build` opens it, `job` calls it.

A separate critic sees the policy's packed batches, with their micro-batch plan and weights, through the same `Learner`:
its objective is the value loss. Nothing of it is the policy's, and nothing of the policy is its: each has its weights,
moments and gradients.

Letters: N trained tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gspo import config, critic_config, rates, store
from gspo.batch import Batch, Microbatch
from gspo.config import Run
from gspo.errors import InputError
from gspo.learner import Learner
from gspo.models import lora
from gspo.models.attention import Packed
from gspo.models.load import Policy, load_policy, load_tokenizer
from gspo.models.routing import Routing
from gspo.models.values import ValueHead, install_value_head, trained_values
from gspo.objectives import Read, value_objective
from gspo.presets import PRESETS
from gspo.stats import UpdateStats


class ValueLearner(Learner):
    """A learner whose model has a value head: what its forward reads at a trained token is a value."""

    noun = "value"
    rate_key = "critic.learning_rate"

    def __post_init__(self) -> None:
        super().__post_init__()
        # No answer was sampled with these weights, and experts are its own: nothing of it is compared with the engine.
        self._fresh, self._routers = False, None

    def _read(self, model: nn.Module, batch: Batch, micro: Microbatch, routing: Routing | None) -> Read:
        value_N = trained_values(
            model,
            tokens_T=batch.tokens_T[micro.token],
            position_T=batch.position_T[micro.token],
            layout=Packed(micro.lengths, batch.tokens_T.device, parents=micro.parents, kernels=self.kernels),
            source_N=batch.source_N[micro.trained] - micro.token.start,
        )
        return Read(value_N, torch.zeros_like(value_N))

    def predict(self, batch: Batch) -> Tensor:
        """Values [N] of a placed batch, without gradients."""
        return self.logprobs(self.model, batch)


@dataclass(frozen=True)
class Critic:
    """Where values come from, and how they are learned."""

    settings: critic_config.Critic
    head: ValueHead
    own: ValueLearner | None
    """None for a critic on the policy's layers, which the policy's learner updates."""
    announcement: str
    """One line for the console."""

    def learn(self, batch: Batch) -> UpdateStats:
        """One update of a critic of its own. Raises as `Learner.update` does."""
        assert self.own is not None
        return self.own.update(batch, value_objective(self.settings.value_clip))

    def put_back(self, then: Critic) -> dict[str, Tensor]:
        """Become the critic of another moment. Returns what the policy's learner trains of it: a shared head, by name."""
        if self.own is None:
            return {f"value_head.{name}": p for name, p in then.head.named_parameters()}
        assert then.own is not None
        self.own.put_back(then.own.masters, then.own.moments())
        return {}

    def state(self) -> store.CriticState:
        """What a checkpoint keeps of it. The moments of a shared head are among the policy's."""
        if self.own is None:
            return store.CriticState({name: p.detach() for name, p in self.head.state_dict().items()}, {})
        return store.CriticState(self.own.master_weights(), self.own.moments())


def require_vocabulary(run: Run) -> None:
    """Raise InputError, before a weight is read, if the critic's model is none or does not read the policy's tokens."""
    critic = run.critic
    if critic is None or critic.model is None:
        return
    try:
        theirs = load_tokenizer(_critic_model(run)).get_vocab()
    except InputError as error:
        raise InputError(f"critic.model: {error}") from error
    if theirs != load_tokenizer(run.model).get_vocab():
        raise InputError(
            f"critic.model={critic.model} has another vocabulary than model={run.model.name}, and a critic reads the policy's tokens: "
            "use a model of the same family, or leave critic.model out"
        )


def _critic_model(run: Run) -> config.Model:
    assert run.critic is not None
    if run.critic.model is None:
        return run.model
    return run.model.model_copy(update={"name": run.critic.model, "lora": None})


def open_critic(run: Run, policy: Policy, saved: store.Saved | None) -> Critic | None:
    """The critic that the run asks for, as its checkpoint left it if there is one; None if it asks for none.

    Raises InputError for a model that cannot be loaded, and for a checkpoint that lacks the critic or has another's.
    """
    if run.critic is None:
        return None
    kept = None if saved is None else saved.critic
    if saved is not None and kept is None:
        raise InputError(f"{saved.checkpoint / store.CRITIC} is missing: the run cannot be resumed without its critic")
    if run.critic.backbone == "shared":
        return _shared(run.critic, policy, kept)
    return _separate(run, policy, saved)


def _shared(settings: critic_config.Critic, policy: Policy, kept: store.CriticState | None) -> Critic:
    weight = policy.model.get_output_embeddings().weight
    head = ValueHead(weight.shape[1], dtype=weight.dtype, device=weight.device)
    if kept is not None:
        _fill(head, kept.weights)
    return Critic(settings, head, None, f"critic: a head of {weight.shape[1] + 1} weights on the policy's layers")


def _separate(run: Run, policy: Policy, saved: store.Saved | None) -> Critic:
    assert run.critic is not None
    loaded = load_policy(_critic_model(run))
    if (
        lora.adapter_of(loaded.model) is not None
    ):  # all weights of a critic are trained: of an adapter it starts from the sum
        lora.merge(loaded.model).requires_grad_(True)
    head = install_value_head(loaded.model)
    kept = None if saved is None else saved.critic
    if kept is not None:
        _fill(loaded.model, kept.weights)
    rate = run.critic.learning_rate or rates.CRITIC * _rate_of_all_weights(run, policy)
    own = ValueLearner(
        model=loaded.model,
        row=PRESETS["gspo"],  # which `annotate` alone reads, and a critic annotates nothing
        settings=run.optimizer.model_copy(update={"learning_rate": rate}),
        temperature=1.0,
        max_new_tokens=1,
        total_updates=run.steps * run.algorithm.updates_per_step * run.algorithm.epochs,
        compute_dtype=loaded.compute_dtype,
        kernels=loaded.kernels,
    )
    if saved is not None and kept is not None:
        done = saved.progress
        updates = done.updates if done.critic_updates is None else done.critic_updates
        own.restore(dict(kept.moments), updates, emptied=done.emptied)
    weights = sum(p.numel() for p in loaded.model.parameters())
    said = f"critic {loaded.source.name}: {weights:,} weights of its own, sha256 {loaded.source.sha256[:12]}; learning rate {rate:g}"
    return Critic(run.critic, head, own, said)


def _rate_of_all_weights(run: Run, policy: Policy) -> float:
    """The policy's step size, or the one that it would have without its adapter."""
    rate = run.optimizer.learning_rate
    if lora.adapter_of(policy.model) is None:
        return rate
    return rates.of_all_weights(rate, policy.model.config.get_text_config().hidden_size)


def _fill(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    try:
        module.load_state_dict(dict(weights))
    except RuntimeError as error:
        raise InputError(f"the checkpoint's critic does not fit the model that it starts from: {error}") from error

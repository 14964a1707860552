"""Batches in, new weights out: the trainer's passes, the optimizer and what they measured.

`train` calls `annotate` once a step, `update` once a batch, `change` and `weights` at the end of the step.
Masters are float32 or better; a working copy in the compute dtype goes forward, backward and into the engine.

Letters: T tokens the model sees (packed), N trained tokens, S sequences packed, R judged rollouts, L layers with
experts, K experts chosen for a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gspo import config
from gspo.algorithms.losses import Tally
from gspo.balance import imbalance, load
from gspo.batch import Batch, Batches, Microbatch
from gspo.credit import weigh
from gspo.critic_config import Critic
from gspo.errors import DivergedError, OutOfMemoryError, RunError
from gspo.machine import within_memory
from gspo.models.attention import Packed
from gspo.models.heads import trained_logprobs
from gspo.models.lora import Reference, named_weights
from gspo.models.masters import Gradients
from gspo.models.native import Kernels
from gspo.models.routing import Routed, Routers, Routing, routers_of
from gspo.models.values import ValueHead
from gspo.objectives import Objective, Read, value_term
from gspo.presets import Algorithm
from gspo.replay import compared, routing_of
from gspo.stats import Parity, RouteChanges, UpdateStats, WeightChange, parity_of

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass
class Learner:
    """The trained weights, their optimizer, and the passes over batches."""

    noun: ClassVar[str] = "log-probability"
    """What `Read.logprob_N` holds, and below which key sets its step size: for messages."""
    rate_key: ClassVar[str] = "optimizer.learning_rate"
    model: nn.Module
    """Causal language model with a policy head; float32 or better on arrival, the working copy afterwards."""
    row: Algorithm
    settings: config.Optimizer
    temperature: float
    max_new_tokens: int
    total_updates: int
    """Updates of the whole run: what `schedule` counts down to."""
    compute_dtype: torch.dtype = torch.float32
    kernels: Kernels | None = None
    """That multiply where the model computes in bfloat16 on a CPU."""
    reference: nn.Module | None = None
    """Frozen starting policy, if the row has a KL term."""
    critic: Critic | None = None
    """What a critic's values are used for, if the row takes its advantages from them: then one of the next two."""
    values: Callable[[Batch], Tensor] | None = None
    """Values [N] of a placed batch, by a critic with a learner of its own."""
    value_head: ValueHead | None = None
    """A critic on this model's layers, trained with it."""
    updates: int = 0
    """Optimizer updates done."""
    step_size: float = 1.0
    """Factor on the learning rate, beside the schedule's."""

    masters: dict[str, nn.Parameter] = field(init=False)
    optimizer: torch.optim.AdamW = field(init=False)
    _fresh: bool = field(init=False, default=True)
    """True until the first update after the engine was given these weights."""
    _gradients: Gradients | None = field(init=False, default=None)
    """None where the masters are the working copy."""
    _sample: list[Tensor] = field(init=False)
    _routers: Routers | None = field(init=False)
    """None for a model without experts: nothing is recorded or replayed then."""

    def __post_init__(self) -> None:
        trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if not trainable:
            raise RunError("no parameter of the model is trainable")
        self.masters = self._make_masters(trainable)
        if self.value_head is not None:  # it is float32 or better, and no part of the model that is saved and sampled
            self.masters |= {f"value_head.{name}": p for name, p in self.value_head.named_parameters()}
        s = self.settings
        # fused: AdamW defaults to a Python loop over tensors on CPU.
        self.optimizer = torch.optim.AdamW(
            list(self.masters.values()),
            lr=s.learning_rate,
            betas=s.betas,
            weight_decay=s.weight_decay,
            fused=True,
        )
        self._sample = self._sampled_masters()
        self._routers = routers_of(self.model)
        self._device = next(iter(trainable.values())).device
        # Losses of N numbers are summed in float64, which Apple's GPUs do not have.
        self._maths = torch.device("cpu") if self._device.type == "mps" else self._device

    def _make_masters(self, trainable: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """The parameters themselves, or copies of them that the working copy's gradients are added to."""
        if all(p.dtype == self.compute_dtype for p in trainable.values()):
            return trainable
        masters = {name: nn.Parameter(p.detach().clone()) for name, p in trainable.items()}
        cast(self.model, self.compute_dtype)
        self._gradients = Gradients(self.model, masters, self.kernels)
        return masters

    # -------------------------------------------------------------------------- before the first update

    def annotate(self, batches: Batches) -> list[Batch]:
        """Old and reference log-probabilities, and the old policy's experts, then advantages and weights.

        The old pass uses the micro-batch plan of the training pass, so that an unchanged policy has a ratio of
        exactly 1 in any precision; the first update needs none if it is made once, being itself a forward of the old policy.
        """
        moved = [self.placed(batch) for batch in batches]
        passed = within_memory(lambda: [self._with_passes(i, batch) for i, batch in enumerate(moved)])
        wide = torch.promote_types(self.compute_dtype, torch.float32)
        return weigh(passed, self.row, self.max_new_tokens, wide, self.critic)

    def placed(self, batch: Batch) -> Batch:
        """The batch on the devices of the model and of the maths."""
        return batch.to(self._device, self._maths)

    def _with_passes(self, update: int, batch: Batch) -> Batch:
        kl_in_reward = self.row.needs_reference and self.row.kl_in == "reward"
        passed = self._with_old(batch) if self._needs_old(update) or kl_in_reward else batch
        if self.values is not None:
            passed = replace(passed, value_N=self.values(batch))
        if self.reference is None:
            return passed
        # With its own experts: it is compared with, not trained.
        return replace(passed, reference_logprob_N=self.logprobs(self.reference, batch))

    @torch.no_grad()
    def _with_old(self, batch: Batch) -> Batch:
        routings = [routing_of(self._routers, self.row, batch, micro) for micro in batch.plan]
        pairs = zip(batch.plan, routings, strict=True)
        reads = [self._forward(self.model, batch, micro, routing) for micro, routing in pairs]
        routes = [routing.chosen() for routing in routings if routing is not None]
        value_N = [read.value_N for read in reads if read.value_N is not None]
        return replace(
            batch,
            old_logprob_N=torch.cat([read.logprob_N for read in reads]),
            old_routes_TLK=torch.cat(routes) if routes else None,
            value_N=torch.cat(value_N) if value_N else None,
        )

    def recut(self, batches: Batches, annotated: list[Batch]) -> list[Batch]:
        """The annotated updates under the micro-batch plan of `batches`, which hold the same rollouts."""
        return [old.with_plan_of(self.placed(new)) for new, old in zip(batches, annotated, strict=True)]

    def _needs_old(self, update: int) -> bool:
        row = self.row
        reads_old = row.anchor == "old" or row.gate == "minirl" or row.needs_reference
        replays_old = row.routing == "old" and self._routers is not None
        again = update > 0 or row.epochs > 1
        # The mismatch that a band is sized from, the loads of the experts, and values are known before the first micro-batch.
        before = row.sizes_band or self.value_head is not None or (row.load_balance > 0 and self._routers is not None)
        return before or (again and (reads_old or replays_old))

    def logprobs(self, model: nn.Module | Reference, batch: Batch) -> Tensor:
        """Log-probabilities [N] of a placed batch under `model`, with its own experts and without gradients."""
        with torch.no_grad():
            return torch.cat([self._forward(model, batch, micro, None)[0] for micro in batch.plan])

    # -------------------------------------------------------------------------- one update

    def update(self, batch: Batch, objective: Objective) -> UpdateStats:
        """Forward, loss and backward of every micro-batch, then one optimizer step.

        Raises RunError if a trained token has a log-probability that is not finite, or if no gradient
        reaches a trainable weight although answers differ; OutOfMemoryError, with nothing changed, if a micro-batch
        does not fit.
        """
        try:
            sums = within_memory(lambda: self._accumulate(batch, objective))
        except OutOfMemoryError:
            self._drop_gradients()
            raise
        parity = sums.parity + self._parity_of_old_pass(batch)
        learning_rate = self._set_learning_rate()
        grad_norm = self._step(sums.tally)
        return UpdateStats(
            loss=sums.loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            entropy=sums.entropy / len(batch.target_N),
            trained_tokens=len(batch.target_N),
            packed_tokens=len(batch.tokens_T),
            micro_batches=len(batch.plan),
            sequences=batch.sequences,
            tokens=batch.tokens,
            tally=sums.tally,
            parity=parity,
            routes=sums.routes,
            imbalance=sums.imbalance,
        )

    def _accumulate(self, batch: Batch, objective: Objective) -> _Sums:
        """Forward and backward of every micro-batch; gradients add up in the masters."""
        sums, load_LE = _Sums(), load(self._routers, self.row, batch)
        if self._gradients is not None:
            self._gradients.make_room()
        for micro in batch.plan:
            routing = routing_of(self._routers, self.row, batch, micro)
            logprob_N, entropy_N, value_N = self._forward(self.model, batch, micro, routing)
            fresh = batch.old_logprob_N is None and self._fresh  # still the weights that the answers were sampled with
            if fresh:
                sums.parity += parity_of(logprob_N.detach(), batch, micro)
            if routing is not None:
                sums.routes += compared(routing, batch, micro, at_rollout_weights=fresh)
            loss, tally = objective(logprob_N, entropy_N, batch, micro)
            if value_N is not None:
                assert self.critic is not None
                value_loss, of_values = value_term(value_N, batch, micro, self.critic.value_clip)
                loss, tally = loss + self.critic.coefficient * value_loss, tally + of_values
            if routing is not None and load_LE is not None:
                uneven = imbalance(routing, load_LE, batch, micro).to(loss)
                loss = loss + self.row.load_balance * uneven
                sums.imbalance += float(uneven.detach())
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
            sums.loss += float(loss.detach())
            sums.entropy += float(entropy_N.detach().sum())
            sums.tally += tally
        if self._gradients is not None:
            self._gradients.leave_room()
        return sums

    def _drop_gradients(self) -> None:
        self.optimizer.zero_grad()
        self.model.zero_grad()
        if self._gradients is not None:
            self._gradients.leave_room()

    def _read(self, model: Any, batch: Batch, micro: Microbatch, routing: Routing | None) -> Read:
        packed = Packed(micro.lengths, batch.tokens_T.device, parents=micro.parents, kernels=self.kernels)
        shared = self.value_head if model is self.model else None
        read_N = trained_logprobs(
            model,
            tokens_T=batch.tokens_T[micro.token],
            position_T=batch.position_T[micro.token],
            layout=packed if routing is None else Routed(packed, routing),
            source_N=batch.source_N[micro.trained] - micro.token.start,
            target_N=batch.target_N[micro.trained],
            temperature=self.temperature,
            values=None if shared is None else shared.of,
            kernels=self.kernels,
        )
        return Read(*read_N)

    def _forward(self, model: nn.Module | Reference, batch: Batch, micro: Microbatch, routing: Routing | None) -> Read:
        read = self._read(model, batch, micro, routing).to(self._maths)
        finite_N = read.logprob_N.isfinite() if read.value_N is None else (read.logprob_N + read.value_N).isfinite()
        if not finite_N.all():
            k = int(batch.sequence_N[micro.trained][~finite_N][0])
            ordinal, index, prompt_row = batch.key_R[int(batch.rollout_S[k])]
            raise DivergedError(
                f"the {self.noun} of a trained token is not finite: prompt row {prompt_row} (draw {ordinal}), answer {index}, "
                f"after {self.updates} updates. The weights have diverged, or the checkpoint holds values that are not finite; "
                f"lower {self.rate_key}, or look at this answer in rollouts/"
            )
        return read

    def _parity_of_old_pass(self, batch: Batch) -> Parity:
        if batch.old_logprob_N is None:
            return Parity()
        return sum((parity_of(batch.old_logprob_N[micro.trained], batch, micro) for micro in batch.plan), Parity())

    def _step(self, tally: Tally) -> float:
        parameters = list(self.masters.values())
        max_norm = self.settings.max_grad_norm
        grad_norm = float(nn.utils.clip_grad_norm_(parameters, max_norm if max_norm is not None else math.inf))
        if not math.isfinite(grad_norm):
            raise DivergedError(f"the gradient is not finite after {self.updates} updates: lower {self.rate_key}")
        if grad_norm == 0.0 and tally.tokens_lost + tally.tokens_dropped < tally.tokens:
            raise (DivergedError if self.updates else RunError)(
                "no trainable weight changed: answers with different rewards gave a gradient of exactly zero. "
                "Either no gradient reaches the trainable parameters (check which of them require one and are used by the model), or the policy "
                f"has saturated after {self.updates} updates and gives its tokens a probability of 1: lower optimizer.learning_rate"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates += 1
        self._fresh = False
        self._publish()
        return grad_norm

    def _set_learning_rate(self) -> float:
        rate = self.step_size * self.settings.learning_rate * schedule(self.settings, self.updates, self.total_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    @torch.no_grad()
    def _publish(self) -> None:
        """Round the masters into the working copy."""
        for name, p in self.model.named_parameters():
            master = self.masters.get(name)
            if master is not None and master is not p:
                p.copy_(master)

    # -------------------------------------------------------------------------- after the last update

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names (of a plain checkpoint) and tensors of the working copy, adapters merged; the next update starts from them."""
        self._fresh = True
        return named_weights(self.model)

    def change(self) -> WeightChange:
        """How far the masters moved since this was last asked."""
        before, self._sample = self._sample, self._sampled_masters()
        moved = sum(int((a != b).sum()) for a, b in zip(before, self._sample, strict=True))
        entries = sum(a.numel() for a in before)
        distance = math.sqrt(
            sum(float((a - b).double().square().sum()) for a, b in zip(before, self._sample, strict=True))
        )
        size = math.sqrt(sum(float(a.double().square().sum()) for a in before))
        return WeightChange(changed=moved / entries, relative=distance / size if size else 0.0)

    def _sampled_masters(self, entries: int = 4096) -> list[Tensor]:
        """Up to `entries` evenly spaced weights of every tensor: a full copy would cost as much as the model."""
        flat = (p.detach().flatten() for p in self.masters.values())
        return [p[:: max(1, p.numel() // entries)].clone() for p in flat]

    # -------------------------------------------------------------------------- saving

    def moments(self) -> dict[str, Tensor]:
        """State of the optimizer as `<slot>.<name of the weight>`, for `store`."""
        names = list(self.masters)
        slots = self.optimizer.state_dict()["state"]
        return {f"{slot}.{names[i]}": tensor for i, slots_of in slots.items() for slot, tensor in slots_of.items()}

    def master_weights(self) -> dict[str, Tensor]:
        """Every tensor of the model's state, masters in the place of their working copies."""
        owner = {id(p): name for name, p in self.model.named_parameters()}
        tied = {name: owner[id(p)] for name, p in self.model.named_parameters(remove_duplicate=False)}
        return {
            name: self.masters[tied[name]].detach() if tied.get(name) in self.masters else tensor
            for name, tensor in self.model.state_dict().items()
        }

    def restore(self, moments: dict[str, Tensor], updates: int, *, emptied: bool) -> None:
        """Optimizer, which may have been `emptied`, and schedule as they were saved; the weights come with the model. Raises RunError if a moment is missing."""
        used = updates > 0 and not emptied
        missing = [name for name in self.masters if any(f"{slot}.{name}" not in moments for slot in _MOMENTS)]
        if missing and used:
            raise RunError(
                f"the checkpoint has no optimizer state for {len(missing)} of {len(self.masters)} weights, {missing[0]} among them"
            )
        self._load_moments(moments if used else {})
        self.updates = updates

    def _load_moments(self, moments: dict[str, Tensor]) -> None:
        slots = {i: {s: moments[f"{s}.{n}"] for s in _MOMENTS} for i, n in enumerate(self.masters) if moments}
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": slots})

    @torch.no_grad()
    def put_back(self, weights: Mapping[str, Tensor], moments: dict[str, Tensor]) -> None:
        """Weights and moments of another moment, none of the start's; updates, and with them the schedule, go on."""
        for name, master in self.masters.items():
            master.copy_(weights[name])
        self._drop_gradients()
        self._publish()
        self._load_moments(moments)
        self._sample = self._sampled_masters()


@dataclass
class _Sums:
    """What the micro-batches of an update add up to."""

    loss: float = 0.0
    entropy: float = 0.0
    imbalance: float = 0.0
    tally: Tally = field(default_factory=Tally)
    parity: Parity = field(default_factory=Parity)
    routes: RouteChanges = field(default_factory=RouteChanges)


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Round the parameters to `dtype` in place. Buffers stay: rotary frequencies lose positions in bfloat16."""
    for p in model.parameters():
        p.data = p.data.to(dtype)


def schedule(settings: config.Optimizer, update: int, total: int) -> float:
    """Factor on the learning rate of update number `update`, 0-based; decaying ones are 0 at `total`."""
    if update < settings.warmup_updates:
        return (update + 1) / settings.warmup_updates
    left = max(0.0, (total - update) / max(1, total - settings.warmup_updates))
    return {"constant": 1.0, "linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * left)}[settings.schedule]

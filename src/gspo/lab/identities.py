"""Gradients of every algorithm on the same real batches, compared before the optimizer.

In: a recipe and words, as of `gspo train`. Out: the folder of a run, with `gaps.json` beside its journal: the largest
relative distance ||g - g'|| / ||g'|| of gradients of all weights, by name. A process of its own: `python -m gspo.lab.identities`.

The run is the product's own: its objective is asked, at each micro-batch, for the loss of every row of the table on the
very forward pass that trains, with the weights and advantages of the run's own row, so that rows differ in ratio and
gate alone. `on-policy NAME`: at a step's first update, where every ratio is 1, against the run's row. `gspo_token`: at
all updates, off policy too, against `gspo`. `control`: `grpo` against `gspo` off policy, where they must differ.

Letters: N trained tokens.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gspo import machine, presets, settings
from gspo.algorithms.losses import Tally
from gspo.batch import Batch, Microbatch
from gspo.build import build
from gspo.lab.arms import GAPS
from gspo.lab.outcome import CONTROL, ON_POLICY, TOKEN
from gspo.loop import train
from gspo.objectives import Objective, policy_objective

_SEQUENCE, _TOKEN_RATIO = "gspo", "grpo"


@dataclass
class Comparison:
    """An objective that also takes the gradient of every row's loss."""

    own: Objective
    """What the run trains with."""
    rows: dict[str, Objective]
    parameters: list[nn.Parameter]
    gaps: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def __call__(self, logprob_N: Tensor, entropy_N: Tensor, batch: Batch, micro: Microbatch) -> tuple[Tensor, Tally]:
        """Loss and tally of the run's own row, once the gradients of this micro-batch have been compared."""
        losses = {name: objective(logprob_N, entropy_N, batch, micro)[0] for name, objective in self.rows.items()}
        gradients = {name: self._gradient(loss) for name, loss in losses.items()}
        base = gradients[_SEQUENCE]
        if batch.old_logprob_N is None:  # the first update of a step: this forward is the old policy
            for name, gradient in gradients.items():
                self._note(ON_POLICY + name, distance(gradient, base))
        else:
            self._note(CONTROL, distance(gradients[_TOKEN_RATIO], base))
        self._note(TOKEN, distance(gradients[TOKEN], base))
        return self.own(logprob_N, entropy_N, batch, micro)

    def _gradient(self, loss: Tensor) -> Tensor:
        parts: Iterable[Tensor | None] = torch.autograd.grad(
            loss, self.parameters, retain_graph=True, allow_unused=True
        )
        pairs = zip(parts, self.parameters, strict=True)
        return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])

    def _note(self, name: str, gap: float) -> None:
        self.gaps[name] = max(self.gaps[name], gap)


def distance(gradient: Tensor, base: Tensor) -> float:
    """||gradient - base|| / ||base||; 0 if both are zero."""
    size = float(base.norm())
    apart = float((gradient - base).norm())
    return apart / size if size else float(apart > 0)


def main(words: Sequence[str]) -> None:
    """Run `recipe key=value ...`, write the gaps. Raises InputError and RunError as `gspo train` does."""
    machine.prepare()
    run = settings.load(words[0], list(words[1:]))
    job = build(run)
    rows = {name: policy_objective(row) for name, row in presets.PRESETS.items()}
    comparison = Comparison(job.updates.objective, rows, list(job.learner.masters.values()))
    job.updates.objective = comparison
    result = train(job)
    (result.folder / GAPS).write_text(json.dumps(dict(comparison.gaps), indent=1))
    if result.signal is not None:
        raise SystemExit(result.exit_code)


if __name__ == "__main__":
    main(sys.argv[1:])

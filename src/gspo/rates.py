"""Learning rates that hold where none is set: by stage, by the width of the model, and beside an adapter.

In: the rate of training all weights, the width. Out: rates. The configuration, `build` and `critic` read them; docs/lora.md
has them in a table. No torch.

Those of all weights are of models of 7 billion parameters and are the same for every size here; smaller models bear more.
"""

from __future__ import annotations

POLICY = 1e-6
"""Of reinforcement: GRPO, arXiv 2402.03300 section 4.2; DAPO, arXiv 2503.14476 section 4.1."""
ANSWERS = 2e-5
"""Of supervised fine-tuning: Llama 2, arXiv 2307.09288 section 3.1."""
PREFERENCES = 1e-5
"""Of a reward model: Llama 2, arXiv 2307.09288 section 3.2.2, for all its sizes but the largest."""
CRITIC = 10
"""Of a critic of its own, in rates of the policy: it starts from knowing nothing, and may be wrong for a while without harm.
1e-5 beside the policy's 1e-6, as verl's examples have it."""


def of_adapter(full: float, width: int) -> float:
    """The rate of an adapter where `full` is that of training all weights: 10 full (2000 / D)^0.5.

    Ten times: "LoRA Without Regret" (Schulman et al., thinkingmachines.ai, 2025), for supervised and reinforcement
    learning. The power of the width: between those that tinker-cookbook (`hyperparam_utils.get_lr`) fitted to Llama (0.78)
    and Qwen (0.08). Rounded to two digits.
    """
    return float(f"{full * _faster(width):.1e}")


def of_all_weights(adapters: float, width: int) -> float:
    """The other way round: the rate of training all weights that belongs to that of an adapter."""
    return float(f"{adapters / _faster(width):.1e}")


def _faster(width: int) -> float:
    return float(10 * (2000 / width) ** 0.5)

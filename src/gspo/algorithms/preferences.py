"""The likelihood of preferences: of two answers to a prompt, the one that was chosen is to have the higher score.

In: scores of both, margins. Out: losses. Pure maths; the stage `reward_model` calls it.

Letters: P pairs.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def preference_loss(chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor, centring: float = 0.0) -> Tensor:
    """[P] -log sigmoid(chosen - rejected - margin), and `centring` times the square of the sum of both scores.

    The first term is the model of Bradley and Terry (Biometrika 39, 1952) with the margin of Llama 2 (arXiv 2307.09288,
    equation 2). A score is known up to a constant by it; the second term takes the one that makes the mean zero
    (Eisenstein et al., arXiv 2312.09244).
    """
    loss_P = -logsigmoid(chosen_P - rejected_P - margin_P)
    return loss_P + centring * (chosen_P + rejected_P).square() if centring else loss_P

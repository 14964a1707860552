"""Random numbers of sampling: each rollout has a stream of its own, whatever is computed beside it.

In: what a rollout is. Out: one uniform number for each token that it may sample. Called by the engines.
"""

from __future__ import annotations

import numpy as np

TRAINING, EVALUATION = 0, 1


def uniforms(seed: int, *, stream: int, ordinal: int, index: int, turn: int, count: int) -> np.ndarray:
    """[count] float64 in [0, 1), a function of the arguments alone; a longer `count` begins with the same numbers.

    `stream`: TRAINING or EVALUATION; `ordinal`: number of the prompt's draw; `index`: place in the group; `turn`:
    place in the conversation. Philox (Salmon et al. 2011) is a function of a key and a counter: these are the key,
    and the lowest word of the counter runs. Raises OverflowError for a number below 0 or above 2**64 - 1.
    """
    key = np.array([seed, stream], dtype=np.uint64)
    counter = np.array([0, index, ordinal, turn], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter)).random(count)

"""Games of TextArena for one player: `data=textarena:Wordle-v0` (`pip install 'gspo[textarena]'`).

In: the name of a game. Out: an `Environment`; the reward is the player's at the end of the game. Games of several players
are refused. Some games of words download a dictionary when they are first made, and need a network for it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

from gspo.tasks.environment import Said, Step


class TextArena:
    """One game."""

    def __init__(self, name: str) -> None:
        import textarena

        raw = f"{name}-raw"  # without wrappers that show all that has been said each time
        self._game = textarena.make(raw if raw in textarena.envs.registration.ENV_REGISTRY else name)
        self._random = random.getstate()

    def reset(self, seed: int) -> Said:
        with self._own_random():
            self._game.reset(num_players=1, seed=seed)
            return self._observed()

    def step(self, reply: str) -> Step:
        with self._own_random():
            done, _ = self._game.step(reply)
            if not done:
                return Step(self._observed())
            rewards, _ = self._game.close()
        return Step(None, float((rewards or {}).get(0, 0.0)), True)

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """Games draw from Python's one generator, and others are played in this process."""
        outside = random.getstate()
        random.setstate(self._random)
        try:
            yield
        finally:
            self._random = random.getstate()
            random.setstate(outside)

    def _observed(self) -> str:
        """What the game says that it has not said yet; not what the player said."""
        _, found = self._game.get_observation()
        if isinstance(found, str):
            return found
        return "\n".join(str(message) for sender, message, *_ in found if sender != 0).strip()

"""Games of TextArena for one player: `data=textarena:Wordle-v0` (`pip install 'gspo[textarena]'`).

In: the name of a game. Out: an `Environment`; the reward is the player's at the end of the game. Games of several players
are refused. Some games of words download a dictionary when they are first made, and need a network for it.
"""

from __future__ import annotations

from typing import Any

from gspo.tasks.environment import Said, Step


class TextArena:
    """One game."""

    def __init__(self, name: str) -> None:
        import textarena

        self._game = textarena.make(name)
        self._seen = ""

    def reset(self, seed: int) -> Said:
        self._game.reset(num_players=1, seed=seed)
        return self._observed()

    def step(self, reply: str) -> Step:
        done, _ = self._game.step(reply)
        if not done:
            return Step(self._observed())
        rewards, _ = self._game.close()
        return Step(None, float((rewards or {}).get(0, 0.0)), True)

    def _observed(self) -> str:
        """What is new: a game shows all that has been said each time."""
        _, text = self._game.get_observation()
        text = _text(text)
        new = text.removeprefix(self._seen)
        self._seen = text
        return new.strip() or text


def _text(observation: Any) -> str:
    if isinstance(observation, str):
        return observation
    return "\n".join(str(part[1] if isinstance(part, tuple) else part) for part in observation)

"""The other side of conversations: turns of the policy in, what follows them out.

In: the turns that an engine hands over. Out: the ids that come before the next turn, or the end of the conversation with
what it earned. Environments run in worker processes that can be killed: whatever one does, its conversation ends as
data, with `Stop.ERROR` and the traceback, and the others go on. `inputs` makes a `Talks`, `job` and `evaluate` pass it
to the engine with their requests.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from itertools import count

from gspo.conversations.play import Move, Scene
from gspo.conversations.transcript import Transcript, UnspeakableError, Voice
from gspo.engines.engine import Next, Over, Turn
from gspo.rewards.runner import Outcome, Pool
from gspo.rewards.score import FAILED
from gspo.sections import Conversation
from gspo.types import Limit, Stop

_SESSIONS = count()
"""Conversations of one process are told apart by number, whichever `Talks` they are of."""


@dataclass
class _Open:
    """A conversation under way."""

    session: int
    scene: Scene
    transcript: Transcript
    replies: tuple[str, ...] = ()
    messages: list[Mapping[str, str]] = field(default_factory=list)
    earned: float | None = None

    def move(self, over: bool = False) -> Move:
        return Move(self.scene, self.session, self.replies, over)

    def ended(self, key: Hashable, stop: Stop, error: str | None, limit: Limit | None) -> Over:
        """A conversation that was cut has earned nothing if it was given nothing; of one that failed nobody can tell."""
        earned = 0.0 if self.earned is None and stop is Stop.LENGTH else self.earned
        earned = None if stop is Stop.ERROR else earned
        return Over(key, stop, self.replies[-1], tuple(self.messages), earned, error, limit)


class Talks:
    """The conversations about some prompts. `scenes`: what each begins from, by the row of its prompt."""

    def __init__(self, pool: Pool, voice: Voice, limits: Conversation, scenes: Mapping[int, Scene]) -> None:
        self._pool, self._voice, self._limits, self._scenes = pool, voice, limits, scenes
        self._open: dict[Hashable, _Open] = {}
        self._asked: dict[int, Hashable] = {}
        """The conversation of each ticket of the pool."""
        self._closing: list[int] = []
        self._ended: list[Over] = []

    def take(self, turn: Turn) -> None:
        """Begin to answer a turn: let its environment make its step."""
        talk = self._open.get(turn.key)
        if talk is None:
            scene, transcript = self._scenes[turn.prompt.row], Transcript(turn.prompt, self._voice)
            talk = self._open[turn.key] = _Open(next(_SESSIONS), scene, transcript)
        reply = str(self._voice.tokenizer.decode(turn.token_ids.tolist(), skip_special_tokens=True))
        talk.replies = (*talk.replies, reply)
        talk.messages.append({"role": "assistant", "content": reply})
        if turn.cut:
            full = len(talk.transcript.line) + len(turn.token_ids) >= self._limits.max_tokens
            self._end(turn.key, Stop.LENGTH, limit=Limit.TOKENS if full else Limit.REPLY)
            return
        talk.transcript.wrote(turn.token_ids)
        (ticket,) = self._pool.submit(0, [talk.move()])
        self._asked[ticket] = turn.key

    def replies(self, wait: bool) -> list[Next | Over]:
        """What has become of the turns taken. Raises RunError if workers cannot be started any more."""
        found = self._pool.done(list(self._asked), wait and not self._ended)
        following = [self._next(self._asked.pop(ticket), outcome) for ticket, outcome in found.items()]
        if self._closing:
            gone = self._pool.done(self._closing, False)
            self._closing = [ticket for ticket in self._closing if ticket not in gone]
        ended, self._ended = self._ended, []
        return [*(each for each in following if each is not None), *ended]

    def _next(self, key: Hashable, outcome: Outcome) -> Next | None:
        talk = self._open[key]
        if outcome.status in FAILED:
            self._end(key, Stop.ERROR, outcome.error, told=True)
            return None
        said, reward, done = outcome.values
        if reward is not None:
            talk.earned = (talk.earned or 0.0) + reward
        if done:
            self._end(key, Stop.ENVIRONMENT, told=True)
            return None
        talk.messages += said
        if len(talk.replies) >= self._limits.max_turns:
            self._end(key, Stop.LENGTH, limit=Limit.TURNS)
            return None
        try:
            keep, ids = talk.transcript.heard(said)
        except UnspeakableError as error:
            self._end(key, Stop.ERROR, str(error))
            return None
        if keep + len(ids) >= self._limits.max_tokens:  # no token is left to answer with
            self._end(key, Stop.LENGTH, limit=Limit.TOKENS)
            return None
        return Next(key, keep, ids)

    def _end(
        self, key: Hashable, stop: Stop, error: str | None = None, *, told: bool = False, limit: Limit | None = None
    ) -> None:
        """`told`: the environment knows that it is over."""
        talk = self._open.pop(key)
        if not told:
            self._closing += self._pool.submit(0, [talk.move(over=True)])
        self._pool.leave(talk.session)
        self._ended.append(talk.ended(key, stop, error, limit))

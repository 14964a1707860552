"""What an environment is: it says something, reads the model's reply, and says the next thing or that it is over.

In: a seed and the columns of a row, then replies. Out: chat messages, rewards, an end. Users and adapters write
environments; `conversations/play.py` runs them in worker processes that can be killed. The standard library alone is
imported here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

Message = Mapping[str, str]
"""`{"role": "user", "content": "..."}`, as chat templates take it."""
Said = str | Message | Sequence[Message] | None
"""What an environment may say at a time: messages, or text, which stands for one message of the user."""


class Step(NamedTuple):
    """What follows a reply. A plain tuple (messages, reward, done) does as well."""

    messages: Said
    """What is said next; not used when `done`."""
    reward: float | None = None
    """Of this reply; None: none is given here. The rewards of a conversation are added up."""
    done: bool = False
    """The conversation is over."""


class Environment(Protocol):
    """One conversation; an object of its own is made for each. Either method may be `async`.

    It must be a function of `seed`, the columns and the replies: an environment whose process had to be killed, because
    another one in it hung, is made anew and given the same replies again.
    A method `close()` is called at the end, if there is one.
    """

    def reset(self, seed: int) -> Said:
        """How the conversation begins: the prompt, up to where the model is to reply. None: with the row's own prompt.

        `seed` is the same for all answers to a prompt. Further parameters are named after the columns that they take;
        `**columns` takes all.
        """
        ...

    def step(self, reply: str) -> Step:
        """What follows the model's reply. What it raises ends the conversation as an error, without a verdict."""
        ...


Factory = Callable[[], Environment]
"""Makes an environment: its class, or a function without parameters."""

Talk = Generator[Said, str, float | None]
"""An environment as one function: what it yields is said, what it is sent is the reply, what it returns the reward."""


class Played:
    """An environment made of a generator function `(seed, **columns)`, which yields what it says and is sent replies."""

    def __init__(self, function: Callable[..., Talk]) -> None:
        self._function = function

    def reset(self, seed: int, **columns: Any) -> Said:
        self._talk = self._function(seed, **columns)
        return next(self._talk)

    def step(self, reply: str) -> Step:
        try:
            return Step(self._talk.send(reply))
        except StopIteration as end:
            return Step(None, end.value, True)

    def close(self) -> None:
        self._talk.close()


def factory(found: Any) -> Factory:
    """What makes environments: `found` itself, or, if it is a generator function, something that plays it."""
    return (lambda: Played(found)) if inspect.isgeneratorfunction(found) else found


def wanted(found: Any, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Of `columns`, those that the beginning of a conversation takes. `found` is `reset`, or a generator function.

    Raises TypeError if it needs one that there is not.
    """
    parameters = list(inspect.signature(found).parameters.values())
    fixed = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    for p in parameters[1:]:  # the first takes the seed
        if p.default is inspect.Parameter.empty and p.kind not in fixed and (p.name == "seed" or p.name not in columns):
            there = ", ".join(name for name in columns if name != "seed") or "none"
            raise TypeError(f"the beginning takes the column {p.name!r}, and there are {there}")
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return {name: value for name, value in columns.items() if name != "seed"}
    return {p.name: columns[p.name] for p in parameters if p.name != "seed" and p.name in columns}


def messages(said: Said) -> list[dict[str, str]]:
    """What was said as messages. Raises TypeError for what is none."""
    if said is None:
        return []
    listed = [{"role": "user", "content": said}] if isinstance(said, str) else said
    listed = [listed] if isinstance(listed, Mapping) else listed
    plain = []
    for message in listed:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise TypeError(
                f'an environment says text, or messages {{"role": text, "content": text}}, and this one said {message!r:.200}'
            )
        plain.append({key: str(value) for key, value in message.items()})
    return plain

"""Environments of Prime Intellect's verifiers: `data=verifiers:TASKSET` (`pip install 'gspo[verifiers]'`).

In: the id of an installed taskset, with settings of its own (`verifiers:NAME,split=train`). Out: an `Environment`: its task,
its environment's `run()`, which plays the other side, and its rewards, added up by their weights. The policy sits in the one
seat of an agent, in the place of the programs ("harnesses") that verifiers starts; so what is built around those is refused
at the start: tool servers, containers, interceptors, a harness of the taskset's own, several agents.

Written for verifiers 0.4 (`verifiers.v1`), through what its authors of environments use.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from itertools import islice
from typing import Any

from gspo import written
from gspo.errors import InputError
from gspo.tasks.environment import Said, Step
from gspo.tasks.task import HELD_OUT, Side

_SEARCHED = 20
"""Tasks looked at for each one wanted: a taskset may have no end."""


class Verifiers:
    """One conversation about one task."""

    def __init__(self, words: str) -> None:
        self._words = words
        self._episode: asyncio.Task[float] | None = None
        self._reply: asyncio.Future[str] | None = None
        self._said: asyncio.Future[Said] | None = None

    @staticmethod
    def prepare() -> None:
        """What takes long, before the first conversation's time counts."""
        import verifiers.v1  # noqa: F401

    @staticmethod
    def seeds(words: str, side: Side, limit: int) -> list[int]:
        """Up to `limit` places of tasks of a side; a hash of the task says which side it is on.

        Raises InputError: no such taskset; settings or parts of it that cannot be used.
        """
        source = _source(words)
        found = (i for i, task in enumerate(islice(source.tasks(), limit * _SEARCHED)) if _side(task) == side)
        places = list(islice(found, limit))
        if not places:
            raise InputError(f"verifiers:{words}: it has no task for the {side.replace('_', '-')} side")
        return places

    async def reset(self, seed: int) -> Said:
        """How the task with the number `seed` begins."""
        source = _source(self._words)
        self._episode = asyncio.create_task(self._play(source, source.task(seed)))
        said = await self._next()
        if said is None:
            raise RuntimeError(f"verifiers:{self._words}: the environment ended before it was answered")
        return said

    async def step(self, reply: str) -> Step:
        assert self._reply is not None
        assert self._episode is not None
        self._reply.set_result(reply)
        said = await self._next()
        return Step(said) if said is not None else Step(None, self._episode.result(), True)

    async def close(self) -> None:
        if self._episode is not None:
            self._episode.cancel()
            await asyncio.gather(self._episode, return_exceptions=True)

    async def _next(self) -> Said:
        """What is said next; None: it is over. Raises what the environment raised."""
        assert self._episode is not None
        self._said = asyncio.get_running_loop().create_future()
        either: set[asyncio.Future[Any]] = {self._said, self._episode}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._said.done():
            return self._said.result()
        self._episode.result()
        return None

    async def _answered(self, said: Sequence[dict[str, str]]) -> str:
        """The policy's reply; the environment waits here for it."""
        assert self._said is not None
        self._reply = asyncio.get_running_loop().create_future()
        self._said.set_result(said)
        return await self._reply

    async def _play(self, source: _Source, task: Any) -> float:
        """The whole of it, as `verifiers.v1.Env.run_episode` does it. Returns the reward."""
        import verifiers.v1 as vf

        seat = _Seat(self._answered, next(iter(source.seats)), source.env.config)
        agents = vf.Agents(source.env.config, lambda name, config: seat)
        await source.env.setup(agents)
        await source.env.run(task, agents)
        if seat.trace is None:
            raise RuntimeError(f"verifiers:{self._words}: its run() played no agent")
        episode = vf.Episode(env=vf.EnvInfo(id=source.env.config.env_id), task=seat.trace.task, traces=[seat.trace])
        await source.env.finalize(task, episode)
        rewards = seat.trace.rewards
        if not rewards or any(reward is None for reward in rewards.values()):
            missing = ", ".join(name for name, reward in rewards.items() if reward is None) or "any"
            raise RuntimeError(f"verifiers:{self._words}: no reward was recorded for {missing}")
        return float(seat.trace.reward)


# ------------------------------------------------------------------------------ the taskset


@dataclass
class _Source:
    """A taskset that was found usable, with its tasks as far as they were read."""

    env: Any
    seats: dict[str, Any]
    _read: list[Any] = field(default_factory=list)
    _more: Iterator[Any] | None = None

    def tasks(self) -> Iterator[Any]:
        place = 0
        while True:
            if place == len(self._read):
                self._more = self._more or iter(self.env.taskset)
                try:
                    self._read.append(next(self._more))
                except StopIteration:
                    return
            yield self._read[place]
            place += 1

    def task(self, place: int) -> Any:
        return next(islice(self.tasks(), place, None))


@cache
def _source(words: str) -> _Source:
    """Raises InputError for what cannot be found or played."""
    where = f"verifiers:{words}"
    name, *settings = words.split(",")
    given = dict(word.partition("=")[::2] for word in settings)
    try:
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        taskset = {key.strip(): written.read(value) for key, value in given.items()}
        env = load_environment(resolve_env_config({"taskset": {"id": name, **taskset}}))
        seats = agent_config_fields(env.config)
    except Exception as error:  # of pydantic, of importing, of the taskset itself
        raise InputError(f"{where}: cannot be loaded: {str(error) or type(error).__name__}") from error
    if unusable := _unusable(env, seats, name):
        raise InputError(f"{where}: {unusable}, which is not played here")
    return _Source(env, seats)


def _unusable(env: Any, seats: dict[str, Any], name: str) -> str:
    """What stands in the way, in words."""
    from verifiers.v1.utils.loaders import default_harness_id

    task = type(env.taskset).task_type()
    reasons = {
        f"it has {len(seats)} agents ({', '.join(seats)})": len(seats) != 1,
        "it has tool servers": env.taskset.toolsets(env.taskset.config) or task.toolsets(env.taskset.config.task),
        "its tasks need a container": task.NEEDS_CONTAINER,
        "it rewrites what is said (@vf.intercept)": any(
            hasattr(each, "intercept") for kind in task.__mro__ for each in vars(kind).values() if callable(each)
        ),
        "it has a harness of its own": default_harness_id(name) == name,
    }
    return next((said for said, true in reasons.items() if true), "")


def _side(task: Any) -> Side:
    """By the task itself: its place and its name, which may hold the place, are left out."""
    text = task.data.model_dump_json(exclude={"idx", "name"})
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, person=b"gspo verifiers").digest()
    return "held_out" if int.from_bytes(digest) < HELD_OUT * 2**64 else "train"


# ------------------------------------------------------------------------------ the seat of the agent


class _Seat:
    """What an environment's `run()` takes for its agent."""

    def __init__(self, answered: Callable[[Sequence[dict[str, str]]], Any], name: str, config: Any) -> None:
        self._answered, self._name, self._config = answered, name, config
        self.trainable = True
        self.trace: Any = None

    async def run(self, task: Any) -> Any:
        async with self.interaction(task) as talk:
            await talk.turn()
        return talk.trace

    @asynccontextmanager
    async def interaction(self, task: Any) -> AsyncIterator[_Talk]:
        from verifiers.v1.runtimes import SubprocessConfig, provision_runtime

        if self.trace is not None:
            raise RuntimeError("the environment plays a second conversation about its task, and one is held here")
        self.trace = _trace(task, self._name, self._config)
        # What hooks and rewards run programs in, if they do: a folder of its own, on this machine.
        async with provision_runtime(SubprocessConfig(), name=self.trace.id, env=task.runtime_env()) as runtime:
            given = {"trace": self.trace, "runtime": runtime}
            await _hook(task.setup, given)
            talk = _Talk(task, self.trace, self._answered)
            yield talk
            self.trace.stop("user_closed")
            await _hook(task.finalize, given)
            await task.score(self.trace, runtime)
            self.trace.ok = True


async def _hook(function: Any, given: dict[str | type, Any] | dict[str, Any]) -> Any:
    from verifiers.v1.utils.decorators import invoke

    found = invoke(function, given)
    return await found if inspect.isawaitable(found) else found


def _trace(task: Any, name: str, config: Any) -> Any:
    import verifiers.v1 as vf
    from verifiers.v1.state import state_cls

    return vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        state=state_cls(type(task))(),
        agent=vf.AgentInfo(config=getattr(config, name), name=name),
    )


class _Talk:
    """A conversation with the policy, turn by turn, as `verifiers.v1.Interaction` is one."""

    def __init__(self, task: Any, trace: Any, answered: Callable[[Sequence[dict[str, str]]], Any]) -> None:
        self._task, self.trace, self._answered = task, trace, answered

    async def turn(self, message: Any = None) -> Any:
        import verifiers.v1 as vf

        first, prompt = not self.trace.nodes, self._task.data.prompt
        if (message is None) != (first and prompt is not None):
            raise ValueError(
                "a task with a prompt opens the conversation; after that, and without one, a turn takes a message"
            )
        if self.trace.stop_condition or (not first and await self._stopped()):
            return vf.Segment(messages=[], terminated=True)
        said = _typed(prompt if message is None else message)
        if first and self._task.data.system_prompt:
            said = [vf.SystemMessage(content=self._task.data.system_prompt), *said]
        reply = vf.AssistantMessage(content=await self._answered([_plain(each) for each in said]))
        for each in (*said, reply):
            parent = len(self.trace.nodes) - 1 if self.trace.nodes else None
            self.trace.nodes.append(vf.MessageNode(parent=parent, message=each, sampled=each is reply))
        return vf.Segment(messages=[reply])

    async def _stopped(self) -> bool:
        """Whether one of the task's @vf.stop says so."""
        import verifiers.v1 as vf

        for stop in self._task.hooks("stop"):
            if await _hook(stop, {vf.Trace: self.trace}):
                self.trace.stop(stop.__name__)
                return True
        return False


def _typed(said: Any) -> list[Any]:
    import verifiers.v1 as vf
    from verifiers.v1.dialects import parse_message

    listed = [vf.UserMessage(content=said)] if isinstance(said, str) else said
    return [parse_message(each) if isinstance(each, dict) else each for each in listed]


def _plain(message: Any) -> dict[str, str]:
    content = message.content or ""
    if not isinstance(content, str):
        if any(part.type != "text" for part in content):
            raise TypeError(f"the environment shows what is no text: {message!r:.200}")
        content = "\n".join(part.text for part in content)
    return {"role": str(message.role), "content": content}

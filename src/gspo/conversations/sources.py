"""Environments found, checked and asked how they begin, before a model exists.

In: the section `conversation`, rows, a tokenizer. Out: a `Stage`, whose worker processes hold the environments; rows
whose prompts are what the environments began with; and the `Talks` of a set of prompts. `inputs` calls it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

from gspo.config import Data, Judging, Run
from gspo.conversations.partner import Talks
from gspo.conversations.play import Move, Play, Scene, ToolsFrom
from gspo.conversations.transcript import Transcript, UnspeakableError, Voice
from gspo.errors import InputError
from gspo.rewards.call import FromFile
from gspo.rewards.load import worker_count
from gspo.rewards.own import from_file
from gspo.rewards.process import Pooled
from gspo.rewards.ready import require_extra
from gspo.rewards.runner import Outcome, Pool
from gspo.rewards.score import FAILED
from gspo.sections import Conversation
from gspo.tasks.calculator import calculator
from gspo.tasks.data import Rows, checked_prompts
from gspo.tasks.openenv import OpenEnv
from gspo.tasks.render import knows_tools
from gspo.tasks.task import Side, limit_key
from gspo.tasks.textarena import TextArena
from gspo.tasks.tools import Tool, schema
from gspo.tasks.verifiers import Verifiers
from gspo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOOLS: Mapping[str, Tool] = {"calculator": calculator}
"""The ready ones."""
ADAPTERS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "openenv": (OpenEnv, "websockets"),
    "textarena": (TextArena, "textarena"),
    "verifiers": (Verifiers, "verifiers"),
}
"""By the word before the colon: what makes environments of what stands behind it, and the package that it needs."""
SEEDS: Mapping[Side, tuple[int, int]] = {"train": (0, 512), "held_out": (1_000_000, 128)}
"""First seed and number of seeds of an environment that makes its own prompts, if `data.limit` or `eval.limit` is not set."""
_SEED = "seed"


@dataclass(frozen=True)
class Found:
    """An environment that is not running yet."""

    name: str
    where: str
    """How the user named it, for messages."""
    function: Callable[..., Any] | FromFile
    """Of a file, workers load it."""
    source: FromFile | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas of what the model may call."""
    prepare: Callable[[], None] | None = None
    """Called once in each worker process."""

    @property
    def rewards(self) -> bool:
        """Tools give no rewards."""
        return not self.tools

    @property
    def files(self) -> tuple[FromFile, ...]:
        """The user's own, of which it is made."""
        parts = self.function.tools.values() if isinstance(self.function, ToolsFrom) else (self.source,)
        return tuple(part for part in parts if isinstance(part, FromFile))


def find(run: Run, tokenizer: PreTrainedTokenizerBase) -> Found | None:
    """The environment of a run, if it has one.

    Raises InputError: no such file or name; not a class or function; a tool that cannot be described to a model.
    """
    talk = run.talk
    if talk is None:
        return None
    if talk.tools:
        return _tools(talk.tools, "tool" if knows_tools(tokenizer) else "user")
    if talk.environment is None:
        raise InputError("conversation: name an environment or tools, as in conversation.tools=calculator")
    key = "conversation.environment" if run.conversation and run.conversation.environment else "data"
    where = f"{key}={talk.environment}"
    kind, _, argument = talk.environment.partition(":") if isinstance(talk.environment, str) else ("", "", "")
    if kind in ADAPTERS:
        adapter, package = ADAPTERS[kind]
        require_extra(package, kind, where)
        return Found(kind, where, partial(adapter, argument), prepare=getattr(adapter, "prepare", None))
    found = talk.environment
    if isinstance(found, str):
        source, seen = from_file(found, [f"{name}:..." for name in ADAPTERS], key)
        if not seen.callable:
            raise InputError(f"{where}: is {seen.kind}, not a class or a function")
        return Found(seen.name, where, source, source)
    if not callable(found):
        raise InputError(f"{where}: is {type(found).__name__}, not a class or a function")
    return Found(str(getattr(found, "__name__", type(found).__name__)), where, found)


def _tools(named: Sequence[str | Tool], role: str) -> Found:
    key, tools, schemas = "conversation.tools", {}, []
    loaded: dict[str, Tool | FromFile] = {}
    for each in named:
        where = f"{key}={each if isinstance(each, str) else getattr(each, '__name__', each)}"
        source = from_file(each, TOOLS, key)[0] if isinstance(each, str) and each not in TOOLS else None
        # A worker has run the file and come to its end; its description needs the function itself.
        tool: Any = (TOOLS[each] if source is None else source.load()) if isinstance(each, str) else each
        if not inspect.isroutine(tool):
            raise InputError(f"{where}: is {type(tool).__name__}, not a function")
        told = schema(tool, where)
        name = told["function"]["name"]
        if name in tools:
            raise InputError(f"{where}: there are two tools named {name}")
        tools[name], loaded[name] = tool, source or tool
        schemas.append(told)
    return Found("tools", f"{key}={','.join(tools)}", ToolsFrom(loaded, role), None, tuple(schemas))


@dataclass(frozen=True)
class Stage:
    """Where the conversations of a run take place."""

    found: Found
    limits: Conversation
    pool: Pool

    def begin(self, rows: Rows, data: Data) -> tuple[Rows, dict[int, Scene]]:
        """The rows with what the environment begins with as their prompts, and the scene of each.

        Where `reset` gives None, the row keeps its own prompt. Raises InputError if `reset` fails, or begins with what
        is no prompt, or for a column `seed` with what is no whole number.
        """
        scenes = [Scene(_seed(rows, i), row) for i, row in enumerate(rows.rows)]
        outcomes = self._begun(scenes[:1])  # alone, so that a server that is down is not waited for a thousand times
        outcomes += [] if outcomes[0].status in FAILED else self._begun(scenes[1:])
        if failed := [i for i, outcome in enumerate(outcomes) if outcome.status in FAILED]:
            end = "\n".join((outcomes[failed[0]].error or "").strip().splitlines()[-6:])
            raise InputError(f"{self.found.where}: the beginning failed for {rows.name}: {rows.places(failed)}:\n{end}")
        said = [outcome.values[0] for outcome in outcomes]
        made = tuple({**row, data.prompt: begun} if begun else row for row, begun in zip(rows.rows, said, strict=True))
        columns = tuple(dict.fromkeys((*rows.columns, *(column for row in made for column in row))))
        found = replace(rows, rows=made, columns=columns)
        opened = {i: replace(scene, opening=tuple(said[i])) for i, scene in enumerate(scenes)}
        return checked_prompts(data)(found), opened

    def _begun(self, scenes: Sequence[Scene]) -> list[Outcome]:
        return self.pool.results(self.pool.submit(0, [Move(scene) for scene in scenes]))

    def talks(self, scenes: Mapping[int, Scene], voice: Voice) -> Talks:
        """The conversations about a set of prompts."""
        return Talks(self.pool, voice, self.limits, scenes)


def _seed(rows: Rows, i: int) -> int:
    """The number of the row, or what its column `seed` says."""
    value = rows.rows[i].get(_SEED, i)
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(
            f"{rows.name}: {rows.place(i)}: the column {_SEED} is {value!r:.80}, and the seed of an environment is a whole number: "
            "mend it, or rename the column, and the seed is the number of the row"
        )
    return int(value)


def open_stage(found: Found, limits: Conversation, judging: Judging) -> Stage:
    """Start the processes. Raises InputError if the environment cannot be sent to them, or loaded there."""
    pooled = Pooled(found.name, Play(found.function, found.prepare), found.source)
    workers = judging.workers or worker_count()
    pool = Pool(
        [pooled], workers=workers, timeout=limits.timeout, memory_gb=judging.memory_gb, limit="conversation.timeout"
    )
    return Stage(found, limits, pool)


def seeds(source: str, side: Side, limit: int | None) -> Rows:
    """The rows of an environment that makes its own prompts: a seed each.

    Raises InputError for an adapter that is not installed, or knows its seeds and cannot give any.
    """
    first, count = SEEDS[side]
    name = source if side == "train" else f"{source}, held out"
    kind, _, argument = source.partition(":")
    numbers: Sequence[int] = range(first, first + (limit or count))
    if kind in ADAPTERS:
        adapter, package = ADAPTERS[kind]
        require_extra(package, kind, f"data={source}")
        if (own := getattr(adapter, "seeds", None)) is not None:
            numbers = own(argument, side, limit or count)
    note = f"{name}: the first {len(numbers)} seeds; {limit_key(side)} sets how many"
    return Rows(name, tuple({_SEED: n} for n in numbers), (_SEED,), notes=() if limit else (note,))


def voice(tokenizer: PreTrainedTokenizerBase, found: Found, limits: Conversation, template: bool) -> Voice:
    tools = found.tools if template and knows_tools(tokenizer) else ()
    return Voice(tokenizer, template, tools, limits.history == "template")


def untold(found: Found, template: bool) -> str | None:
    """A notice if there are tools that the model is not told of."""
    if template or not found.tools:
        return None
    return (
        f"{found.where}: no chat template is used, and only a chat template tells a model of its tools: it calls one only if the prompts say how, "
        "or if it has learned to. Use an instruct model"
    )


def rehearse(voice: Voice, prompt: Prompt) -> str | None:
    """A conversation as thoughtful models have it, before there is a model: a notice if the template rewrites it.

    Raises InputError if it cannot go on with one.
    """
    role = "tool" if voice.tools else "user"
    end = voice.tokenizer.eos_token_id
    transcript = Transcript(prompt, voice)
    rewritten = False
    try:
        for _ in range(2):
            ids = voice.ids("<think>\nfirst\n</think>\n\nthen") if voice.template else voice.ids("then")
            transcript.wrote(np.array([*ids, *([] if end is None else [end])], dtype=np.int64))
            before = len(transcript.line)
            keep, _ = transcript.heard([{"role": role, "content": "go on"}])
            rewritten = rewritten or keep < before
    except UnspeakableError as error:
        raise InputError(f"the conversation cannot be held with this model: {error}") from error
    if not rewritten:
        return None
    return (
        "the chat template rewrites earlier turns (thoughts, say, are left out): where it does, a conversation goes on from a branch, and "
        "what stands before it is read again; every token that the policy wrote is trained once. conversation.history=verbatim keeps turns as they were written"
    )

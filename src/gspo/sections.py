"""What a section of the configuration is, and those that are null unless asked for: frozen pydantic models, each key with its doc line.

`config.py` puts the sections together. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    field_validator,
    model_validator,
)


class Section(BaseModel):
    """A part of the configuration. `model=x` is short for `model.name=x`: a bare value replaces the section."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, arbitrary_types_allowed=True
    )
    shorthand: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        return {cls.shorthand: value} if cls.shorthand and not isinstance(value, dict | BaseModel) else value

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation not in (bool, bool | None):
            raise ValueError(f"expected a value, found {str(value).lower()}")
        return value


def at_home(value: Any) -> Any:
    """`~/x` is below the home folder, also where no shell has said so."""
    return str(Path(value).expanduser()) if isinstance(value, str) and value.startswith("~/") else value


Place = Annotated[str, BeforeValidator(at_home)]
"""A folder, a file, or a name that stands for one."""


def _not_empty(name: str | None) -> str | None:
    if name == "":
        raise ValueError("names no folder")
    return name


Folder = Annotated[str | None, BeforeValidator(at_home), AfterValidator(_not_empty)]
"""Where a run is kept; null: by the recipe's name."""

Named = Annotated[
    str | Callable[..., Any],
    BeforeValidator(at_home),
    PlainSerializer(
        lambda f: f if isinstance(f, str) else f"python:{getattr(f, '__qualname__', repr(f))}", return_type=str
    ),
]
"""`file.py:name`, or from Python the thing itself."""


class Conversation(Section):
    """What an answer is the first turn of."""

    shorthand = "environment"
    environment: Named | None = None
    """`file.py:NAME`, a class with `reset(seed)` and `step(reply)`, what makes one, or a generator function (docs/conversations.md); `openenv:ADDRESS`; `textarena:GAME`; `verifiers:TASKSET`. With rows from a file, `reset` also takes the columns that it names."""
    tools: Annotated[tuple[Named, ...], BeforeValidator(lambda value: _listed(value))] = ()
    """In its place: functions that the model may call, `file.py:name` or the ready `calculator`; rewards judge the last reply."""
    max_turns: int = Field(default=4, gt=0)
    """Replies of the model; then the conversation is cut."""
    max_tokens: int = Field(default=1024, gt=0)
    """Tokens after the prompt, replies and what is said to them; then the conversation is cut."""
    timeout: float = Field(default=10.0, gt=0)
    """Seconds that an environment has for a step; then its process is killed, and the conversation ends as an error."""
    history: Literal["template", "verbatim"] = "template"
    """What the model sees of its earlier turns. template: what the chat template makes of them, by a branch where it rewrites them; verbatim: what it wrote."""

    @model_validator(mode="after")
    def _check(self) -> Conversation:
        if self.environment is not None and self.tools:
            raise ValueError("environment and tools are two environments: an environment can call tools itself")
        return self


def _listed(value: Any) -> tuple[Any, ...]:
    if isinstance(value, str):
        return tuple(word.strip() for word in value.split(","))
    return tuple(value) if isinstance(value, list | tuple) else (value,)


class Lora(Section):
    """A low-rank adapter that is trained in the place of the model's weights; without dropout."""

    shorthand = "rank"
    rank: int | None = Field(default=None, gt=0)
    """Width of the adapter's matrices A and B; null: 16, or that of `start`."""
    alpha: float | None = Field(default=None, gt=0)
    """The adapter adds alpha / rank times B A; null: 32, or that of `start`."""
    targets: Annotated[tuple[str, ...] | None, BeforeValidator(lambda value: _names(value))] = None
    """Ends of the names of the layers, or stacked experts, that it is on, as in q_proj,v_proj; null: all-linear, every linear layer but the output layer, and the experts; or those of `start`."""
    start: Annotated[str | None, BeforeValidator(at_home)] = None
    """Folder of an adapter to go on from; null: a fresh one, which changes nothing before it is trained."""


def _names(value: Any) -> Any:
    """Names with commas between them, as on the command line, or a list."""
    if not isinstance(value, str):
        return value
    return tuple(name.strip() for name in value.strip("[]").split(","))

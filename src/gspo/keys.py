"""The keys of a command as its help shows them, and those that a command does not read.

In: the kind of configuration, or words. Out: markdown, or a refusal. `cli` calls it.
"""

from __future__ import annotations

from gspo import settings
from gspo.config import Run
from gspo.errors import InputError
from gspo.stage_config import AnyRun


def keys_help(kind: type[AnyRun] = Run) -> str:
    """All keys by section, from the doc lines of the configuration."""
    lines, section = [], None
    for name, doc in settings.fields(kind):
        if (head := name.rpartition(".")[0]) != section:
            section = head
            lines.append(f"\n\n**{section or 'run'}**\n")
        names = settings.choices(name, kind)
        choices = f" One of {', '.join(names)}." if names else ""
        lines.append(f"\n- {name} = {settings.default(name, kind)}: {doc}{choices}")
    return "".join(lines).replace("<", "‹").replace(">", "›")  # markdown would take them for tags


_NOT_IN_EVAL = (
    "dir", "steps", "prompts_per_step", "group_size", "max_staleness", "max_tokens_per_microbatch", "algorithm", "optimizer",
    "checkpoint", "trackers", "guard", "critic", "data.difficulty", "eval.every", "eval.patience",
)  # fmt: skip


def require_effect(words: list[str]) -> None:
    """Raise InputError for a setting that only training reads: an evaluation writes no folder and does no step."""
    for word in words:
        key = word.partition("=")[0].strip()
        if key in ("model", "model.name", "model.lora") or key.startswith("model.lora."):
            raise InputError(f"{word!r}: `gspo eval MODEL RECIPE` evaluates MODEL, as it is: leave it out")
        if key.startswith(tuple(f"{name}." for name in _NOT_IN_EVAL)) or key in _NOT_IN_EVAL:
            raise InputError(
                f"{word!r} has no effect on `gspo eval`, which does no step and writes no folder: leave it out"
            )

"""Where a run's settings come from: a recipe in YAML, `key=value` words, Python keys; and what is said when they are wrong.

In: a recipe, overrides, and the kind of run that they describe. Out: it, checked. The command line and the Python API
call `load`. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from gspo import presets, written
from gspo.config import RULES_OF_TASKS, Eval, RewardRule, Run, task_of
from gspo.errors import InputError
from gspo.stage_config import AnyRun, RewardRun, Sft

Tree = dict[str, Any]
R = TypeVar("R", Run, Sft, RewardRun)

KINDS: tuple[type[AnyRun], ...] = (Run, Sft, RewardRun)
_NOT_KEYS = ("function-", "constrained-", "literal[")
"""Beginnings of what pydantic puts among the keys of an error's place: the kinds of value that it tried."""


def recipes(kind: type[AnyRun] = Run) -> list[str]:
    """Names of the built-in recipes."""
    return sorted(Path(entry.name).stem for entry in _folder(kind).iterdir() if entry.name.endswith(".yaml"))


def _folder(kind: type[AnyRun]) -> Traversable:
    return resources.files("gspo.recipes") / kind.recipes


def load(recipe: str | Path | None, words: list[str] | None = None, keys: Mapping[str, Any] | None = None) -> Run:
    """The training run that `recipe` describes, with `key=value` words and then Python `keys` laid over it.

    Raises:
        InputError: no such recipe, unknown or misspelt key, wrong type, a contradiction.
    """
    return load_as(Run, recipe, words, keys)


def load_as(
    kind: type[R], recipe: str | Path | None, words: list[str] | None = None, keys: Mapping[str, Any] | None = None
) -> R:
    """As `load`, for any kind of run."""
    tree = read_recipe(recipe, kind) if recipe is not None else {}
    if recipe is not None:
        _require_kind(recipe, tree, kind)
    for key, value in (*_in_order(_read(words or [], kind), kind), *_in_order(list((keys or {}).items()), kind)):
        lay_over(tree, key, value, kind)
    return check_as(kind, tree, where=str(recipe) if recipe is not None else f"gspo.{kind.command}")


def _read(words: list[str], kind: type[R]) -> list[tuple[str, Any]]:
    """The keys that words set. Raises InputError for a word that is none, and for a key that is set twice, however it is written."""
    read: list[tuple[str, Any]] = []
    by: dict[str, str] = {}
    for word in words:
        key, equals, text = word.partition("=")
        key = key.strip()
        if not equals or not key:
            raise InputError(
                f"{word!r}: settings are written key=value, as in steps=20 or optimizer.learning_rate=1e-5"
            )
        value = _parse(key, text, kind)
        for leaf in _leaves(key, value, kind):
            if leaf in by:
                raise InputError(f"{leaf} is set twice: by {by[leaf]!r} and by {word!r}")
            by[leaf] = word
        read.append((key, value))
    return read


def _leaves(key: str, value: Any, kind: type[AnyRun]) -> Iterator[str]:
    """The keys that setting `key` sets: `model` is short for `model.name`, and a mapping has several."""
    if isinstance(value, Mapping):
        for name, below in value.items():
            yield from _leaves(f"{key}.{name}", below, kind)
    else:
        shorthand = _shorthands(kind).get(key)
        yield f"{key}.{shorthand}" if shorthand else key


def _in_order(pairs: list[tuple[str, Any]], kind: type[R]) -> list[tuple[str, Any]]:
    """Sections first, the outer before the inner: one that is set anew would drop what was said of it before."""
    return sorted(pairs, key=lambda pair: (pair[0] not in _shorthands(kind), pair[0].count(".")))


def read_recipe(recipe: str | Path, kind: type[AnyRun] = Run) -> Tree:
    """The mapping in a YAML file or built-in recipe, or the defaults on a task that is named; `about`, which `run.yaml` adds, is left out."""
    path = Path(recipe)
    if names_a_task(str(recipe), kind):
        return {"dir": f"runs/{re.sub(r'[^A-Za-z0-9_.-]+', '-', str(recipe))}", "data": str(recipe)}
    if str(recipe) in recipes(kind):
        text, name = (_folder(kind) / f"{recipe}.yaml").read_text(), str(recipe)
    elif path.is_file():
        text, name = _text_of(path), path.stem
    else:
        raise InputError(
            f"{recipe}: no such file, and no built-in recipe of that name.{_near_recipe(str(recipe), kind)} "
            f"Built-in: {', '.join(recipes(kind))}."
        )
    try:
        tree = written.read(text)
    except yaml.YAMLError as error:
        raise InputError(f"{recipe}: not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise InputError(f"{recipe}: expected a mapping of settings, found {type(tree).__name__}")
    about = tree.pop("about", None)
    if isinstance(about, dict) and about.get("command", kind.command) != kind.command:
        raise _of_another(recipe, about["command"], kind)
    return {"dir": f"runs/{name}", **tree}


def _require_kind(recipe: str | Path, tree: Tree, kind: type[AnyRun]) -> None:
    """Raise InputError for a recipe with keys that this command does not know and another does."""
    unknown = {each: len(_unknown(tree, each)) for each in KINDS}
    nearest = min(KINDS, key=lambda each: unknown[each])
    if unknown[nearest] < unknown[kind]:
        raise _of_another(recipe, nearest.command, kind)


def _unknown(tree: Tree, kind: type[AnyRun], prefix: str = "") -> list[str]:
    """Keys of a recipe that are none of this kind of run."""
    known = {key for key, _ in _walk(kind, "")}
    found: list[str] = []
    for name, below in tree.items():
        key = f"{prefix}{name}"
        if key not in known:
            found.append(key)
        elif isinstance(below, dict) and any(each.startswith(f"{key}.") for each in known):
            found += _unknown(below, kind, f"{key}.")
    return found


def _of_another(recipe: str | Path, command: str, kind: type[AnyRun]) -> InputError:
    return InputError(
        f"{recipe}: a recipe of `gspo {command}`, and not of `gspo {kind.command}`: start it with `gspo {command} {recipe}`"
    )


def names_a_task(word: str, kind: type[AnyRun]) -> bool:
    """Whether what stands in a recipe's place is a task to be trained on, as in `reasoning-gym:chain_sum`."""
    return kind is Run and task_of(word) is not None and word not in recipes(kind) and not Path(word).is_file()


def _near_recipe(word: str, kind: type[AnyRun]) -> str:
    head, colon, rest = word.partition(":")
    tasks = [
        name + colon + rest
        for name in RULES_OF_TASKS
        if kind is Run and get_close_matches(head, [name], n=1, cutoff=0.75)
    ]
    near = get_close_matches(word, recipes(kind), n=1) or tasks
    others = [other.command for other in KINDS if other is not kind and word in recipes(other)]
    if others:
        return f" `gspo {others[0]}` has one: start it with `gspo {others[0]} {word}`."
    return f" Did you mean {near[0]!r}?" if near else ""


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a text file in UTF-8: {error}") from error


def lay_over(tree: Tree, key: str, value: Any, kind: type[AnyRun] = Run) -> None:
    """Set one dotted key in place. A bare value replaces a whole section: `algorithm=grpo` drops gspo's adjustments.

    A mapping that does not name its section anew is laid over it key by key.
    """
    *parents, leaf = key.split(".")
    shorthands = _shorthands(kind)
    if isinstance(value, Mapping) and shorthands.get(key, "") not in value:
        for name, below in value.items():
            lay_over(tree, f"{key}.{name}", below, kind)
        return
    for depth, name in enumerate(parents):
        below = tree.get(name)
        if isinstance(below, list | tuple):
            raise InputError(f"{key}: there are {len(below)} {name} rules, and the key is of one: give the whole list")
        if not isinstance(below, dict):
            shorthand = shorthands.get(".".join(parents[: depth + 1]))
            below = {shorthand: below} if shorthand and below is not None else {}
        tree[name] = tree = dict(below)
    tree[leaf] = value


def check(tree: Tree, where: str) -> Run:
    """A `Run` from a mapping. Raises InputError that names the key, the value and the nearest name."""
    return check_as(Run, tree, where)


def check_as(kind: type[R], tree: Tree, where: str) -> R:
    """As `check`, for any kind of run."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        # What a key is by default, where that depends on another key that is wrong: no fault of its own.
        errors = [each for each in error.errors(include_url=False) if each["type"] != "default_factory_not_called"]
        raise InputError("\n".join(f"{where}: {_explain(e, kind)}" for e in errors)) from None


def rules(words: list[str]) -> tuple[RewardRule, ...]:
    """Rewards, each word written as `reward` is: a function, a rule, or a list of either. Raises InputError for what is none."""
    given = [_parse("reward", word, Run) for word in words]
    listed = [rule for each in given for rule in (each if isinstance(each, list) else [each])]
    try:
        return Eval.model_validate({"reward": listed}).reward or ()
    except ValidationError as error:
        raise InputError("\n".join(_explain(e, Run) for e in error.errors(include_url=False))) from None


def _parse(key: str, word: str, kind: type[AnyRun]) -> Any:
    """A word of the command line as YAML; for keys that hold text as it stands, so that no `#` or `:` is read into it."""
    section = (key in _shorthands(kind) and word.startswith("{")) or (key in _lists(kind) and word.startswith("["))
    if not section and (key in _shorthands(kind) or key in _text_keys(kind)):
        return None if word == "null" else word
    try:
        return written.read(word) if word else ""
    except yaml.YAMLError:
        return word


def _explain(error: Any, kind: type[AnyRun]) -> str:
    path = [str(part) for part in error["loc"] if not (isinstance(part, int) or str(part).startswith(_NOT_KEYS))]
    key = ".".join(path)
    if error["type"] == "extra_forbidden":
        return f"{key}: no such key{_suggest(path, kind)}"
    if error["type"] == "value_error":
        reason = str(error["ctx"]["error"])
        return f"{key}: {reason}" if key else reason
    return f"{key}: {error['msg'][0].lower()}{error['msg'][1:]} (found {error['input']!r})"


def _suggest(path: list[str], kind: type[AnyRun]) -> str:
    """The nearest known name: among its siblings, then the same name under another section, then any."""
    known = [key for key, _ in _walk(kind, "")]
    *parents, leaf = path
    siblings = {name.split(".")[-1]: name for name in known if name.split(".")[:-1] == parents}
    anywhere = {name.split(".")[-1]: name for name in reversed(known)}
    near = [siblings[n] for n in get_close_matches(leaf, siblings, n=1, cutoff=0.7)]
    near = near or [anywhere[n] for n in get_close_matches(leaf, anywhere, n=1, cutoff=0.7)]
    if near:
        return f"; did you mean {near[0]!r}?"
    if not siblings:
        return ""
    return f" in {'.'.join(parents) or 'the top level'}, which has {', '.join(siblings)}"


def fields(kind: type[AnyRun] = Run) -> Iterator[tuple[str, str]]:
    """Every key with its one-line description."""
    for key, field in _walk(kind, ""):
        if _section(field) is None:
            yield key, " ".join((field.description or "").split())


def default(key: str, kind: type[AnyRun] = Run) -> Any:
    """The value that a key has if nobody sets it; of algorithm keys, that of `gspo`; of a section that is null, its own."""
    value: Any = dump(kind())
    sections = dict(_walk(kind, ""))
    for depth, part in enumerate(parts := key.split("."), start=1):
        value = value[part]
        section = _section(sections[".".join(parts[:depth])]) if value is None and depth < len(parts) else None
        if section is not None:  # a section that is null unless it is asked for: what it then has
            value = section().model_dump(mode="json")
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else value


def choices(key: str, kind: type[AnyRun] = Run) -> list[str]:
    """The values that a key may have, where they are a short list."""
    field = dict(_walk(kind, ""))[key]
    names = list(presets.PRESETS) if key == "algorithm.name" else get_args(field.annotation)
    return [str(name) for name in names] if all(isinstance(name, str | int) for name in names) else []


def _walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    """Every section and every key below it, dotted."""
    for name, field in model.model_fields.items():
        yield prefix + name, field
        if (section := _section(field)) is not None:
            yield from _walk(section, f"{prefix}{name}.")


def _section(field: FieldInfo) -> type[BaseModel] | None:
    kinds = get_args(field.annotation) or (field.annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section that a key is of, or holds several of: `reward` is a rule, or a list of rules."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for kind in get_args(annotation) if (found := _section_in(kind)) is not None), None)


@cache
def _shorthands(kind: type[AnyRun]) -> dict[str, str]:
    """Sections that a bare value stands for, with the key that takes it."""
    sections = {key: found for key, field in _walk(kind, "") if (found := _section_in(field.annotation)) is not None}
    named = {key: getattr(section, "shorthand", "name") for key, section in sections.items()}
    return {key: shorthand for key, shorthand in named.items() if shorthand}


@cache
def _lists(kind: type[AnyRun]) -> frozenset[str]:
    """Keys that hold several sections."""
    return frozenset(key for key, field in _walk(kind, "") if _several(field.annotation))


def _several(annotation: Any) -> bool:
    if get_origin(annotation) is tuple:
        return _section_in(annotation) is not None
    return any(_several(kind) for kind in get_args(annotation))


@cache
def _text_keys(kind: type[AnyRun]) -> frozenset[str]:
    return frozenset(
        key for key, field in _walk(kind, "") if str in (get_args(field.annotation) or (field.annotation,))
    )


def dump(run: AnyRun) -> Tree:
    """Every value of the run as plain YAML types; `check` reads it back."""
    return run.model_dump(mode="json")

"""What a run is asked to do: one tree of pydantic models, read from YAML and `key=value` words.

In: a recipe and overrides. Out: a checked `Run`. The command line and the Python API call `load`;
every stage takes the section it needs. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from gspo import presets
from gspo.errors import InputError
from gspo.presets import Algorithm


class Section(BaseModel):
    """A part of the configuration. `model=x` is short for `model.name=x`: a bare value replaces the section."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, arbitrary_types_allowed=True)
    shorthand: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        return {cls.shorthand: value} if cls.shorthand and not isinstance(value, dict | BaseModel) else value

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError(f"expected a value, found {str(value).lower()}")
        return value


class Model(Section):
    """The policy."""

    shorthand = "name"
    name: str = "smollm2-135m-q4"
    """Folder, GGUF file, hub id, or a built-in name: smollm2-135m-q4, tiny-dense."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Numbers of forward, backward and engine; masters are float32 or better. auto: bfloat16 where the processor multiplies it natively, else float32."""
    device: str = "auto"
    """auto (CUDA, then MPS, then CPU) or a torch device."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    trust_remote_code: bool = False
    """Run Python code that comes with a hub model."""


class Data(Section):
    """Where prompts come from and how they are shown to the model."""

    shorthand = "source"
    source: str = "addition"
    """JSONL or Parquet file, hub data set (owner/name or owner/name:configuration), or a built-in task: addition."""
    split: str = "train"
    """Split of a hub data set."""
    prompt: str = "prompt"
    """Column with the prompt: text, or a list of chat messages."""
    system: str | None = None
    """System message put before each prompt."""
    template: Literal["auto", "chat", "none"] = "auto"
    """chat: the model's chat template; none: the text as it is; auto: chat if the tokenizer has a template."""
    max_prompt_tokens: int = Field(default=1024, gt=0)
    """Longest prompt allowed, after the template."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """What happens to a longer prompt; it is never cut."""
    limit: int | None = Field(default=None, gt=0)
    """Use only the first so many rows."""
    low: int = 1
    """Task addition: smallest operand."""
    high: int = 20
    """Task addition: largest operand."""
    held_out: float = Field(default=0.25, gt=0, lt=1)
    """Task addition: share of the operand pairs that training never sees."""


class RewardRule(Section):
    """How an answer is judged."""

    shorthand = "function"
    function: Annotated[
        str | Callable[..., float | None],
        PlainSerializer(lambda f: f if isinstance(f, str) else f"python:{getattr(f, '__qualname__', repr(f))}", return_type=str),
    ] = "number"
    """exact, number, boxed, regex, format, or `file.py:name`: a function (completion, **columns) -> float | None."""
    answer: str = "answer"
    """Column with the right answer, for the built-in rules."""
    pattern: str | None = None
    """Regular expression of the rules regex and format."""


class Sampling(Section):
    """How the engine samples. Never taken from the checkpoint's generation_config."""

    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits, in the engine and in the trainer."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Smallest set of tokens with this mass; 1 is off."""
    top_k: int = Field(default=0, ge=0)
    """The k likeliest tokens; 0 is off."""
    max_new_tokens: int = Field(default=256, gt=0)
    """Longest answer, the stop token included."""
    max_rows: int = Field(default=64, gt=0)
    """Answers decoded at once; the next waits for a free row."""


class Optimizer(Section):
    """AdamW on float32 masters; its schedule counts updates, not steps."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """Step size after warm-up."""
    warmup_updates: int = Field(default=0, ge=0)
    """Updates of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after warm-up; linear and cosine reach 0 at the last update."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Gradients of larger norm are scaled down to it; null is off."""


class Eval(Section):
    """Sampled evaluation on prompts that training does not see."""

    source: str | None = None
    """File, hub data set or task; null: the task's own held-out rows, or no evaluation if the data has none."""
    split: str = "test"
    """Split of a hub data set."""
    every: int = Field(default=10, ge=0)
    """Steps between evaluations; also before the first step and after the last. 0 is off."""
    limit: int | None = Field(default=None, gt=0)
    """Use only the first so many rows; null: every row once."""
    samples: int = Field(default=1, gt=0)
    """Answers per row: k of avg@k and pass@k."""
    greedy: bool = False
    """Also journal the reward of the likeliest tokens, as eval/greedy."""
    pass_at: float = 1.0
    """Reward from which an answer counts as passed."""
    reward: RewardRule | None = None
    """Its own rule; null: the training reward."""


class Checkpoint(Section):
    """What is saved, and how long."""

    every: int = Field(default=20, ge=0)
    """Steps between checkpoints; one is also written at the end. 0: only at the end."""
    keep: int = Field(default=2, gt=0)
    """Newest checkpoints kept, beside the best."""


class Run(Section):
    """Everything that a training run depends on."""

    dir: str | None = None
    """Folder of the run; null: runs/<recipe name>."""
    steps: int = Field(default=100, gt=0)
    """Steps: rollouts, then `algorithm.updates_per_step` updates."""
    seed: int = Field(default=0, ge=0)
    """Of the order of prompts and of every random number of sampling."""
    threads: int | None = Field(default=None, gt=0)
    """CPU threads; null: one for each core."""
    prompts_per_step: int = Field(default=8, gt=0)
    """Prompts drawn for a step."""
    group_size: int = Field(default=8, gt=0)
    """Answers to each prompt."""
    max_tokens_per_microbatch: int = Field(default=4096, gt=0)
    """Tokens, prompts included, that go through the model at once; sets memory, never the result."""
    model: Model = Model()
    algorithm: Annotated[Algorithm, BeforeValidator(lambda value: _algorithm(value))] = presets.PRESETS["gspo"]
    data: Data = Data()
    reward: RewardRule = RewardRule()
    sampling: Sampling = Sampling()
    optimizer: Optimizer = Optimizer()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()

    @model_validator(mode="after")
    def _check(self) -> Run:
        row = self.algorithm
        if row.advantage == "gae":
            raise ValueError("algorithm=ppo takes its advantages from a critic, which is not trained yet: use grpo, or dapo for a token mean")
        if self.group_size == 1 and not row.advantage.startswith("batch"):
            raise ValueError(
                f"group_size=1: {row.name} compares the answers to one prompt with each other, and one answer has nothing to be compared with. "
                "Use group_size=2 or more"
            )
        if row.updates_per_step > self.prompts_per_step:
            raise ValueError(
                f"algorithm.updates_per_step={row.updates_per_step} updates cannot be cut by whole groups from prompts_per_step={self.prompts_per_step}: "
                f"use prompts_per_step={row.updates_per_step} or more, or algorithm.updates_per_step={self.prompts_per_step} or less"
            )
        return self


def _algorithm(value: Any) -> Any:
    if isinstance(value, str):
        return presets.resolve(value, {})
    if isinstance(value, Mapping):
        return presets.resolve(str(value.get("name", "gspo")), {k: v for k, v in value.items() if k not in ("name", "source")})
    return value


# ------------------------------------------------------------------------------ reading

Tree = dict[str, Any]


def recipes() -> list[str]:
    """Names of the built-in recipes."""
    return sorted(Path(entry.name).stem for entry in resources.files("gspo.recipes").iterdir() if entry.name.endswith(".yaml"))


def load(recipe: str | Path | None, words: list[str] | None = None, keys: Mapping[str, Any] | None = None) -> Run:
    """The run that `recipe` describes, with `key=value` words and then Python `keys` laid over it.

    Raises:
        InputError: no such recipe, unknown or misspelt key, wrong type, a contradiction.
    """
    tree = read_recipe(recipe) if recipe is not None else {}
    for word in words or []:
        key, equals, value = word.partition("=")
        if not equals:
            raise InputError(f"{word!r}: settings are written key=value, as in steps=20 or optimizer.learning_rate=1e-5")
        lay_over(tree, key.strip(), _parse(key.strip(), value))
    for key, value in (keys or {}).items():
        lay_over(tree, key, value)
    return check(tree, where=str(recipe) if recipe is not None else "gspo.train")


def read_recipe(recipe: str | Path) -> Tree:
    """The mapping in a YAML file or built-in recipe; `about`, which `run.yaml` adds, is left out."""
    path = Path(recipe)
    if str(recipe) in recipes():
        text, name = (resources.files("gspo.recipes") / f"{recipe}.yaml").read_text(), str(recipe)
    elif path.is_file():
        text, name = path.read_text(), path.stem
    else:
        near = get_close_matches(str(recipe), recipes(), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise InputError(f"{recipe}: no such file, and no built-in recipe of that name.{hint} Built-in: {', '.join(recipes())}.")
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{recipe}: not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise InputError(f"{recipe}: expected a mapping of settings, found {type(tree).__name__}")
    tree.pop("about", None)
    return {"dir": f"runs/{name}", **tree}


def lay_over(tree: Tree, key: str, value: Any) -> None:
    """Set one dotted key in place. A bare value replaces a whole section: `algorithm=grpo` drops gspo's adjustments."""
    *parents, leaf = key.split(".")
    shorthands = _shorthands()
    for depth, name in enumerate(parents):
        below = tree.get(name)
        if not isinstance(below, dict):
            shorthand = shorthands.get(".".join(parents[: depth + 1]))
            below = {shorthand: below} if shorthand and below is not None else {}
        tree[name] = tree = dict(below)
    tree[leaf] = value


def check(tree: Tree, where: str) -> Run:
    """A `Run` from a mapping. Raises InputError that names the key, the value and the nearest name."""
    try:
        return Run.model_validate(tree)
    except ValidationError as error:
        raise InputError("\n".join(f"{where}: {_explain(e)}" for e in error.errors(include_url=False))) from error


def _parse(key: str, word: str) -> Any:
    """A word of the command line as YAML; for keys that hold text as it stands, so that no `#` or `:` is read into it."""
    if key in _shorthands() or key in _text_keys():
        return None if word == "null" else word
    try:
        return yaml.safe_load(word) if word else ""
    except yaml.YAMLError:
        return word


def _explain(error: Any) -> str:
    path = [str(part) for part in error["loc"] if not str(part).startswith("function-")]
    key = ".".join(path)
    if error["type"] == "extra_forbidden":
        return f"{key}: no such key{_suggest(path)}"
    if error["type"] == "value_error":
        reason = str(error["ctx"]["error"])
        return f"{key}: {reason}" if key else reason
    return f"{key}: {error['msg'][0].lower()}{error['msg'][1:]} (found {error['input']!r})"


def _suggest(path: list[str]) -> str:
    """The nearest known name: among its siblings, then the same name under another section, then any."""
    known = [key for key, _ in _walk(Run, "")]
    *parents, leaf = path
    siblings = {name.split(".")[-1]: name for name in known if name.split(".")[:-1] == parents}
    anywhere = {name.split(".")[-1]: name for name in reversed(known)}
    near = [siblings[n] for n in get_close_matches(leaf, siblings, n=1, cutoff=0.7)]
    near = near or [anywhere[n] for n in get_close_matches(leaf, anywhere, n=1, cutoff=0.7)]
    if near:
        return f"; did you mean {near[0]!r}?"
    return f" in {'.'.join(parents) or 'the top level'}, which has {', '.join(siblings)}"


def fields() -> Iterator[tuple[str, str]]:
    """Every key with its one-line description."""
    for key, field in _walk(Run, ""):
        if _section(field) is None:
            yield key, " ".join((field.description or "").split())


def _walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    """Every section and every key below it, dotted."""
    for name, field in model.model_fields.items():
        yield prefix + name, field
        if (section := _section(field)) is not None:
            yield from _walk(section, f"{prefix}{name}.")


def _section(field: FieldInfo) -> type[BaseModel] | None:
    kinds = get_args(field.annotation) or (field.annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


@cache
def _shorthands() -> dict[str, str]:
    """Sections that a bare value stands for, with the key that takes it."""
    sections = {key: section for key, field in _walk(Run, "") if (section := _section(field)) is not None}
    named = {key: getattr(section, "shorthand", "name") for key, section in sections.items()}
    return {key: shorthand for key, shorthand in named.items() if shorthand}


@cache
def _text_keys() -> frozenset[str]:
    return frozenset(key for key, field in _walk(Run, "") if str in (get_args(field.annotation) or (field.annotation,)))


def dump(run: Run) -> Tree:
    """Every value of the run as plain YAML types; `check` reads it back."""
    return run.model_dump(mode="json")


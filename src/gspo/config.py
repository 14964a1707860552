"""What a run is asked to do: one tree of frozen pydantic models, each key with its doc line.

`settings.py` reads it from YAML and `key=value` words; every stage takes the section that it needs. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    WrapSerializer,
    field_validator,
    model_validator,
)

from gspo import presets, rates
from gspo.critic_config import Critic, check_critic
from gspo.presets import Algorithm
from gspo.sections import Conversation, Folder, Lora, Named, Place, Section, at_home
from gspo.trackers import table


class Model(Section):
    """The policy."""

    shorthand = "name"
    name: Place = "smollm2-135m-q4"
    """Folder (also of an adapter, which is then gone on from), GGUF file, hub id (owner/name or owner/name@revision), or a built-in name: smollm2-135m (its Q4_1 GGUF), also called smollm2-135m-q4; tiny-dense, tiny-moe, fine-moe (know some sorting); random-dense, random-moe (know nothing)."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Numbers of forward, backward and engine; masters are float32 or better. auto: bfloat16 where the processor multiplies it natively, else float32."""
    device: str = "auto"
    """auto (CUDA, then MPS, then CPU) or a torch device."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    compile: bool | None = None
    """Compute norms, gates, positions and log-probabilities in one pass each, by torch.compile; or, in bfloat16 on a CPU with AMX, those, decoding and weight gradients by kernels of C++. Both take seconds to be made, the kernels once for all runs; null: for 50 million parameters and more, where it works."""
    trust_remote_code: bool = False
    """Run Python code that comes with a hub model."""
    lora: Lora | None = None
    """Train an adapter (LoRA) instead of all weights: `model.lora=16` sets its rank."""


class Data(Section):
    """Where prompts come from and how they are shown to the model."""

    shorthand = "source"
    source: Place = "addition"
    """JSONL or Parquet file, hub data set (owner/name or owner/name:configuration), a task of `gspo tasks` (addition:LOW-HIGH, sort:N, calculator:LOW-HIGH, preferences:N, reasoning-gym:NAME), or an environment that makes its own prompts: file.py:NAME, openenv:ADDRESS, textarena:GAME, verifiers:TASKSET."""
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


class Prompts(Data):
    """Where prompts come from, how they are shown to the model, and which are drawn."""

    difficulty: tuple[float, float] | None = None
    """[LOW, HIGH]: a prompt whose share of solved answers (`eval.pass_at`) lay outside is skipped for the next three epochs; null: none is."""

    @model_validator(mode="after")
    def _check(self) -> Prompts:
        if self.difficulty is not None and not 0 <= self.difficulty[0] <= self.difficulty[1] <= 1:
            raise ValueError(
                f"difficulty={list(self.difficulty)}: two shares of solved answers from 0 to 1, the smaller first, as in [0.1, 0.9]"
            )
        return self


RULES_OF_TASKS = {
    "addition": "number",
    "calculator": "number",
    "sort": "sorted",
    "preferences": "matching",
    "reasoning-gym": "reasoning-gym",
}
"""The tasks that come with a name, and how their answers are judged where no reward is named."""


def task_of(source: str) -> str | None:
    """The name of the task that `source` is of, if it is of one."""
    name = source.partition(":")[0]
    return name if name in RULES_OF_TASKS else None


class RewardRule(Section):
    """How an answer is judged."""

    shorthand = "function"
    function: Named = "number"
    """A ready reward, which may take an argument (`number`, `number:COLUMN`, `regex:PATTERN`, see docs/rewards.md), or `file.py:name`: a function (completion, **columns) -> float | None. Several: `reward=[math, overlong]`."""
    weight: float = 1.0
    """What its value counts in the sum of several; 0: it is journalled, and counts nothing."""

    @model_validator(mode="before")
    @classmethod
    def _arguments(cls, value: Any) -> Any:
        for key, shown in (("answer", "number:COLUMN"), ("pattern", "regex:PATTERN")):
            if isinstance(value, Mapping) and key in value:
                raise ValueError(
                    f"no such key as {key}: the argument of a ready reward stands behind its name, as in {shown}"
                )
        return value


Rules = Annotated[
    tuple[RewardRule, ...],
    BeforeValidator(lambda value: _rules(value)),
    WrapSerializer(lambda rules, dump: dumped[0] if len(dumped := dump(rules)) == 1 else dumped),
]
"""One rule, or several whose values are added; one is written without a list around it."""


class Judging(Section):
    """The processes in which reward functions run."""

    timeout: float = Field(default=10.0, gt=0)
    """Seconds for an answer; then the function's process is killed and the answer has no verdict. A function over a group has the time of all its answers."""
    workers: int | None = Field(default=None, gt=0, le=256)
    """Processes; null: one a core, at most 8."""
    memory_gb: float | None = Field(default=4.0, gt=0)
    """Address space of a process, in GiB; null: no limit, which functions that use a GPU need."""
    max_failed: float = Field(default=0.5, ge=0, le=1)
    """Share of a function's judgements in a step that may time out or crash; above it the run stops with the evidence."""
    allow_unsafe: bool = False
    """Run the programs that the reward `code` judges even where this machine has no wall around them."""


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
    max_rows: int = Field(default=256, gt=0)
    """Answers decoded at once; the next waits for a free row."""


class Engine(Section):
    """What answers the prompts: it samples inside the trainer's process."""

    shorthand = "weights"
    weights: Literal["same", "bf16", "fp8", "fp8_cast", "int8", "int6"] = "same"
    """Precision of the weights that answer, in training and evaluation; others than `same` are a rounded copy, and the trained ones stay as they are. fp8: e4m3 with a scale a row; fp8_cast: e4m3 of each entry, no scale; int8, int6: a scale a row."""


Decay = Annotated[float, Field(ge=0, lt=1)]


class Optimizer(Section):
    """AdamW on float32 masters; its schedule counts updates, not steps."""

    learning_rate: float = Field(default=rates.POLICY, gt=0)
    """Step size after warm-up. Of an adapter, unless it is set: ten times as much, and more for a narrow model (docs/lora.md)."""
    warmup_updates: int = Field(default=0, ge=0)
    """Updates of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after warm-up; linear and cosine reach 0 at the last update."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of the first and of the second moment."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Gradients of larger norm are scaled down to it; null is off."""


class HeldOut(Section):
    """Where the rows come from that training does not see, and when they are looked at."""

    source: Annotated[str | None, BeforeValidator(at_home)] = None
    """File, hub data set or task; null: the task's own held-out rows, or no evaluation if the data has none."""
    split: str = "test"
    """Split of a hub data set."""
    every: int = Field(default=10, ge=0)
    """Steps between evaluations; also before the first step and after the last. 0 is off."""
    limit: int | None = Field(default=None, gt=0)
    """Use only the first so many rows; null: every row once."""


class Eval(HeldOut):
    """Sampled evaluation on prompts that training does not see."""

    samples: int = Field(default=1, gt=0)
    """Answers per row: k of avg@k and pass@k."""
    greedy: bool = False
    """Also journal the reward of the likeliest tokens, as eval/greedy."""
    pass_at: float = 1.0
    """Reward from which an answer counts as passed."""
    reward: Rules | None = None
    """Its own rule or rules, written as `reward` is; null: the training reward."""


class PolicyEval(Eval):
    """Sampled evaluation on prompts that training does not see, which may end the run."""

    patience: int | None = Field(default=None, gt=0)
    """End after so many evaluations in a row without a new best, or at one in which every answer passes; null: never before `steps`."""


Trackers = Annotated[
    tuple[Annotated[str, AfterValidator(table.check)], ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else () if value is None else value),
]


class Checkpoint(Section):
    """What is saved, and how long."""

    every: int = Field(default=20, ge=0)
    """Steps between checkpoints; one is also written at the end. 0: only at the end."""
    keep: int = Field(default=2, gt=0)
    """Newest checkpoints kept, beside the best."""


class Run(Section):
    """Everything that a training run depends on."""

    command: ClassVar[str] = "train"
    recipes: ClassVar[str] = "."
    """Folder of the built-in recipes, below gspo/recipes."""

    dir: Folder = None
    """Folder of the run; null: runs/<recipe name>."""
    steps: int = Field(default=100, gt=0)
    """Steps: rollouts, then `algorithm.updates_per_step` updates, `algorithm.epochs` times over."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Of the order of prompts and of every random number of sampling."""
    threads: int | None = Field(default=None, gt=0, le=1024)
    """CPU threads; null: as many as a second of measuring finds worth it. Set it where two runs must be equal bit for bit."""
    prompts_per_step: int = Field(default=8, gt=0)
    """Prompts drawn for a step."""
    group_size: int = Field(default=8, gt=0)
    """Answers to each prompt."""
    max_staleness: int = Field(default=0, ge=0)
    """Steps by which the weights that are trained are ahead of those that wrote the answers: each step trains on answers sampled so many steps before, the first max_staleness + 1 steps on answers of the starting weights."""
    guard: Literal["off", "warn", "rollback"] = "rollback"
    """What happens when the policy collapses (docs/guard.md): rollback: back to the last good checkpoint with half the learning rate, three times at most."""
    max_tokens_per_microbatch: int = Field(default=1536, gt=0)
    """Tokens that go through the model at once, a prompt counted once for all its answers; sets memory, never the result. A CPU gains little from more, unless a prompt with its answers is longer; a GPU does."""
    model: Model = Model()
    algorithm: Annotated[Algorithm, BeforeValidator(lambda value: _algorithm(value))] = presets.PRESETS["gspo"]
    data: Prompts = Prompts()
    reward: Rules = Field(default_factory=lambda so_far: _rule_of(so_far.get("data", Prompts())))
    judging: Judging = Judging()
    sampling: Sampling = Sampling()
    conversation: Conversation | None = None
    engine: Engine = Engine()
    optimizer: Optimizer = Optimizer()
    critic: Annotated[Critic | None, Field(validate_default=True)] = None
    """Null but for an algorithm that takes its advantages from a critic, as ppo does."""
    eval: PolicyEval = PolicyEval()
    checkpoint: Checkpoint = Checkpoint()
    trackers: Trackers = ()
    """Also give the journal's numbers to: tensorboard, trackio, wandb, wandb:offline, mlflow, or a class of yours (`file.py:Name`). Several: `trackers=[tensorboard, wandb]`. None can stop, slow or change a run."""

    @field_validator("critic")
    @classmethod
    def _as_the_algorithm_needs(cls, critic: Critic | None, info: ValidationInfo) -> Critic | None:
        row = info.data.get("algorithm")
        if row is None:  # which is refused with a reason of its own
            return critic
        if critic is not None and not row.needs_critic:
            raise ValueError(
                f"has no effect with algorithm={row.name}, whose advantages (advantage={row.advantage}) are made of rewards alone: leave it out, or use algorithm=ppo"
            )
        return (critic or Critic()) if row.needs_critic else None

    @model_validator(mode="after")
    def _check(self) -> Run:
        row = self.algorithm
        check_critic(self.critic, row)
        if self.group_size == 1 and not (row.needs_critic or row.advantage.startswith("batch")):
            raise ValueError(
                f"group_size=1: {row.name} compares the answers to one prompt with each other, and one answer has nothing to be compared with. "
                "Use group_size=2 or more"
            )
        _require_split(self.data.source, self.data.split, "data", "train")
        _require_split(self.eval.source or self.data.source, self.eval.split, "eval", "test")
        if row.sizes_band and self.max_staleness:
            raise ValueError(
                f"algorithm.clip_low=auto with max_staleness={self.max_staleness}: the distance that it sizes the band from would be that of the stale "
                "policy, and a band as wide as the lag holds nothing (docs/claims.md, bands): give algorithm.clip_low and algorithm.clip_high numbers, as 0.02 and 0.027, or set max_staleness=0"
            )
        if self.eval.patience and not self.eval.every:
            raise ValueError("eval.patience has no effect with eval.every=0, which evaluates nothing")
        if row.updates_per_step > self.prompts_per_step:
            raise ValueError(
                f"algorithm.updates_per_step={row.updates_per_step} updates cannot be cut by whole groups from prompts_per_step={self.prompts_per_step}: "
                f"use prompts_per_step={row.updates_per_step} or more, or algorithm.updates_per_step={self.prompts_per_step} or less"
            )
        talk, source = self.conversation, self.data.source
        if (
            talk is not None
            and _ENVIRONMENT.fullmatch(source)
            and (talk.tools or talk.environment not in (None, source))
        ):
            raise ValueError(
                f"data={source} is an environment, and conversation.{'tools' if talk.tools else 'environment'} names another: leave one out"
            )
        if self.talk is not None and self.talk.max_tokens < self.sampling.max_new_tokens:
            raise ValueError(
                f"conversation.max_tokens={self.talk.max_tokens} is less than one reply may have, sampling.max_new_tokens={self.sampling.max_new_tokens}"
            )
        return self

    @property
    def talk(self) -> Conversation | None:
        """The conversation, if answers are turns of one: `data=file.py:NAME` alone is one too."""
        source = self.data.source
        if not _ENVIRONMENT.fullmatch(source):
            return self.conversation
        return (self.conversation or Conversation()).model_copy(update={"environment": source})

    @property
    def longest(self) -> int:
        """Tokens that may come after a prompt."""
        return self.sampling.max_new_tokens if self.talk is None else self.talk.max_tokens


def _rule_of(data: Data) -> tuple[RewardRule, ...]:
    """The rule of the task that prompts come from; of other data, the number."""
    return (RewardRule(function=RULES_OF_TASKS.get(task_of(data.source) or "", "number")),)


def _rules(value: Any) -> tuple[Any, ...]:
    rules = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not rules:
        raise ValueError("an empty list; name at least one rule")
    return rules


def _require_split(source: str, split: str, section: str, default: str) -> None:
    """Raise ValueError if a split is asked for where there are none."""
    if split != default and (
        task_of(source) or _ENVIRONMENT.fullmatch(source) or source.endswith((".jsonl", ".parquet"))
    ):
        raise ValueError(f"{section}.split={split} has no effect: {source} is no hub data set, and has no splits")


_ENVIRONMENT = re.compile(r".+\.py:\w+|(openenv|textarena|verifiers):.+")
"""What `data.source` says if it is an environment that makes its own prompts."""


def _algorithm(value: Any) -> Any:
    if isinstance(value, str):
        return presets.resolve(value, {})
    if isinstance(value, Mapping):
        name, keys = str(value.get("name", "gspo")), {str(k): v for k, v in value.items() if k != "name"}
        row = presets.resolve(name, {k: v for k, v in keys.items() if k != "source"})
        if keys.get("source", row.source) != row.source:
            raise ValueError(f"source: which paper {name} is from is said, and not set: leave it out")
        return row
    return value

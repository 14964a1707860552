"""What the other stages are asked to do: the configurations of `gspo sft` and `gspo reward`, from the sections of `config`.

`settings.py` reads them; the stages take them. No torch.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from gspo import rates
from gspo.config import Checkpoint, Data, Eval, HeldOut, Judging, Model, Optimizer, Rules, Run, Sampling, Trackers
from gspo.sections import Folder, Section


class StageSettings(Section):
    """What every stage depends on."""

    dir: Folder = None
    """Folder of the run; null: runs/<recipe name>."""
    steps: int | None = Field(default=None, gt=0)
    """Optimizer updates; null: as many as `epochs` needs."""
    epochs: float | None = Field(default=None, gt=0)
    """Times that the data is gone through, in a new order each; null: `steps`, or once."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Of the order of the data, of a fresh adapter, and of whatever is sampled in evaluations."""
    threads: int | None = Field(default=None, gt=0, le=1024)
    """CPU threads; null: as many as a second of measuring finds worth it. Set it where two runs must be equal bit for bit."""
    batch_size: int = Field(default=16, gt=0)
    """Rows of an update: answers, whose loss is the mean over all their tokens, or pairs, whose loss is the mean over them."""
    max_tokens_per_microbatch: int = Field(default=1024, gt=0)
    """Tokens that go through the model at once, what sequences share counted once; sets memory, never the result. A CPU gains nothing from more; a GPU does."""
    model: Model = Model()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    eval: HeldOut = HeldOut()
    checkpoint: Checkpoint = Checkpoint()
    trackers: Trackers = ()
    """As in `gspo train`: tensorboard, trackio, wandb, wandb:offline, mlflow, or a class of yours (`file.py:Name`)."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps and epochs both say how long the run is: leave one of them out")
        return self


class Pairs(Data):
    """Where prompts and their answers come from, and how they are shown to the model."""

    answer: str = "answer"
    """Column with the answer, as text."""
    messages: str | None = None
    """Column with conversations that end with the assistant's answer: in the place of the columns prompt and answer."""
    turns: Literal["all", "last"] = "all"
    """Which of the assistant's turns in a conversation are learned; all: the template has to leave a turn as it is when others follow, and one that does not is refused. Where there is only one turn, that."""
    max_answer_tokens: int = Field(default=4096, gt=0)
    """Longest answer allowed, after the template; what happens to a longer one too_long says."""


class SftOptimizer(Optimizer):
    """AdamW on float32 masters."""

    learning_rate: float = Field(default=rates.ANSWERS, gt=0)
    """Step size after warm-up. Of an adapter, unless it is set: ten times as much, and more for a narrow model (docs/lora.md)."""


class SftEval(Eval):
    """Loss on answers that training does not see; with a reward, sampled answers too."""

    reward: Rules | None = None
    """How sampled answers are judged, written as `reward` is in `gspo train`; null: none are sampled."""

    @model_validator(mode="after")
    def _check(self) -> SftEval:
        idle = [key for key in ("samples", "greedy", "pass_at") if getattr(self, key) != Eval.model_fields[key].default]
        if idle and self.reward is None:
            raise ValueError(f"{idle[0]} has no effect without a reward, for which answers would be sampled")
        return self


class Sft(StageSettings):
    """Everything that supervised fine-tuning depends on."""

    command: ClassVar[str] = "sft"
    recipes: ClassVar[str] = "sft"
    data: Pairs = Pairs()
    optimizer: SftOptimizer = SftOptimizer()
    eval: SftEval = SftEval()
    judging: Judging = Judging()
    sampling: Sampling = Sampling()

    @model_validator(mode="after")
    def _check(self) -> Sft:
        if self.data.turns != "all" and self.data.messages is None:
            raise ValueError(
                f"data.turns={self.data.turns} has no effect without data.messages: an answer in a column is one turn"
            )
        idle = [
            f"{section}.{key}"
            for section, values in (("sampling", self.sampling), ("judging", self.judging))
            for key in values.model_dump(exclude_defaults=True)
        ]
        if idle and self.eval.reward is None:
            raise ValueError(f"{idle[0]} has no effect without eval.reward, for which answers are sampled and judged")
        return self


class Preferences(Data):
    """Where prompts and the two answers to each come from, and how the reward model is shown them."""

    prompt: str = "prompt"
    """Column with the prompt: text, or a list of chat messages. Conversations in `chosen` and `rejected` need none: it is what they share."""
    chosen: str = "chosen"
    """Column with the better answer: text, or messages, with or without those of the prompt before them."""
    rejected: str = "rejected"
    """Column with the worse answer."""
    margin: str | None = None
    """Column with numbers of 0 or more: by how much the better answer's score has to be higher."""
    max_answer_tokens: int = Field(default=4096, gt=0)
    """Longest answer allowed, after the template; what happens to a longer one too_long says."""


class RewardOptimizer(Optimizer):
    """AdamW on float32 masters."""

    learning_rate: float = Field(default=rates.PREFERENCES, gt=0)
    """Step size after warm-up. Of an adapter, unless it is set: ten times as much, and more for a narrow model (docs/lora.md)."""


class RewardRun(StageSettings):
    """Everything that a reward model depends on."""

    command: ClassVar[str] = "reward"
    recipes: ClassVar[str] = "reward"
    data: Preferences = Preferences()
    optimizer: RewardOptimizer = RewardOptimizer()
    centring: float = Field(default=0.0, ge=0)
    """Weight of the square of the sum of a pair's scores, which draws their mean to 0; 0.01 is usual. It changes no order."""


AnyStage = Sft | RewardRun
AnyRun = Run | AnyStage

"""What an experiment is: arms, how long and under how many seeds they run, and findings with their rules.

Values only; `table` holds them all. In: nothing. Out: the nouns of the lab. No torch.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Literal

from gspo import __version__, settings
from gspo.config import Run
from gspo.lab.rules import Key, Results, Verdict

Scale = Literal["quick", "full"]
TRAIN = ("gspo.cli", "train")
"""The module, and its first word, that run an arm: the command line of the product."""


@dataclass(frozen=True)
class Arm:
    """One way to train. `words` are laid over the recipe, as on the command line."""

    setting: str
    """What the arms that are compared have in common: one chart."""
    name: str
    words: tuple[str, ...]
    recipe: str = "sort"
    program: tuple[str, ...] = TRAIN

    @property
    def key(self) -> Key:
        return (self.setting, self.name)

    def run(self, seed: int) -> Run:
        """The resolved settings, but for the folder. Raises InputError for words that no run accepts."""
        return settings.load(self.recipe, [*self.words, f"seed={seed}"])


@cache
def shipped_sha256(model: str) -> str | None:
    """Of the weights of a built-in model that ships with the package; None for other models, whose name says all."""
    file = resources.files("gspo.models") / "weights" / model / "model.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


@dataclass(frozen=True)
class Trial:
    """An arm under a seed: what one process runs."""

    arm: Arm
    seed: int

    @cached_property
    def run(self) -> Run:
        return self.arm.run(self.seed)

    @cached_property
    def id(self) -> str:
        """Name of its files: two arms with the same settings, weights, program and version are the same trial."""
        described = {**settings.dump(self.run), "dir": None}
        text = json.dumps(
            [described, shipped_sha256(self.run.model.name), self.arm.program, __version__], sort_keys=True
        )
        source = self.run.data.source.replace(":", "")
        return f"{self.run.algorithm.name}-{source}-s{self.seed}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"

    def argv(self, folder: Path) -> list[str]:
        """Words of the command that starts it in `folder`."""
        return [*self.arm.program[1:], self.arm.recipe, *self.arm.words, f"seed={self.seed}", f"dir={folder}"]

    @property
    def command(self) -> str:
        """As a user would type it."""
        program = "gspo" if self.arm.program == TRAIN else f"python -m {self.arm.program[0]}"
        return shlex.join([*program.split(), *self.argv(Path("DIR"))])


@dataclass(frozen=True)
class Finding:
    """A claim and the rule that decides it."""

    claim: str
    """A sentence that is true or false."""
    source: str
    """Where it is made: section or figure of the paper, or `lab` for our own."""
    why: str
    """Of the rule's thresholds."""
    rule: Callable[[Results], Verdict]
    full_only: bool = False
    """Its arms are not run at the quick scale."""


@dataclass(frozen=True)
class Protocol:
    """What is run at a scale."""

    arms: tuple[Arm, ...]
    seeds: int
    """How many, for each arm."""
    more_seeds: Mapping[str, int] = field(default_factory=dict)
    """By setting, where it is another number."""
    first: int = 0
    """The first seed; the next ones follow."""


@dataclass(frozen=True)
class Experiment:
    """A named experiment; its first finding gives the word of its line."""

    name: str
    title: str
    about: str
    """What is done, in sentences."""
    findings: tuple[Finding, ...]
    quick: Protocol
    full: Protocol
    contest: tuple[tuple[Key, ...], ...] = ()
    """Algorithms that are shown each at its best variant: the arms of each."""

    def protocol(self, scale: Scale) -> Protocol:
        return {"quick": self.quick, "full": self.full}[scale]

    def findings_at(self, scale: Scale) -> list[Finding]:
        return [finding for finding in self.findings if scale == "full" or not finding.full_only]

    def trials(self, scale: Scale, seeds: int | None = None) -> list[Trial]:
        """Seed by seed, so that a lab that is stopped early has compared all arms under some."""
        protocol = self.protocol(scale)
        counts = [(arm, seeds or protocol.more_seeds.get(arm.setting, protocol.seeds)) for arm in protocol.arms]
        longest = range(max(n for _, n in counts))
        return [Trial(arm, protocol.first + i) for i in longest for arm, n in counts if i < n]

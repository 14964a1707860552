"""The experiments by name.

In: nothing. Out: `EXPERIMENTS`. The commands `lab` and `lab --list` read it. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from gspo.errors import InputError
from gspo.lab.experiment import Experiment
from gspo.lab.experiments.bands import BANDS
from gspo.lab.experiments.control import CLIP_FRACTION, CONTROL
from gspo.lab.experiments.efficiency import EFFICIENCY
from gspo.lab.experiments.identities import IDENTITIES
from gspo.lab.experiments.moe import MOE
from gspo.lab.experiments.moe_regime import MOE_REGIME
from gspo.lab.experiments.precision import PRECISION
from gspo.lab.experiments.reuse import REUSE

EXPERIMENTS: dict[str, Experiment] = {
    e.name: e for e in (IDENTITIES, CLIP_FRACTION, CONTROL, PRECISION, REUSE, MOE, MOE_REGIME, EFFICIENCY, BANDS)
}
"""In the order in which `--all` runs them."""


def asked(words: Sequence[str], *, every: bool = False) -> tuple[Path, list[Experiment]]:
    """The folder and the experiments that the words of a command ask for.

    Raises InputError with the nearest name for an experiment that there is not.
    """
    folders = [word.partition("=")[2] for word in words if word.startswith("dir=")]
    names = [word for word in words if not word.startswith("dir=")]
    if len(folders) > 1 or "" in folders:
        what = "names no folder" if "" in folders else f"is given {len(folders)} times"
        raise InputError(f"gspo lab: dir= {what}; write it once, as in dir=runs/lab")
    if every and names:
        raise InputError(
            f"gspo lab: --all is every experiment, and {names[0]} is named beside it: leave one of them out"
        )
    if not every and not names:
        raise InputError(f"gspo lab: name experiments, or say --all. There are {', '.join(EXPERIMENTS)}")
    for name in names:
        if "=" in name:
            raise InputError(f"gspo lab {name}: an experiment's settings are its own; only dir=FOLDER can be set")
        if name not in EXPERIMENTS:
            near = get_close_matches(name, EXPERIMENTS, n=1, cutoff=0.4)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise InputError(f"gspo lab {name}: no such experiment.{hint} There are {', '.join(EXPERIMENTS)}")
    return Path(folders[0] if folders else "runs/lab"), [EXPERIMENTS[name] for name in names or EXPERIMENTS]


def listing() -> str:
    """What `gspo lab --list` prints."""
    width = max(len(name) for name in EXPERIMENTS)
    lines = []
    for name, e in EXPERIMENTS.items():
        counts = ", ".join(f"{len(e.trials(scale))} arms {scale}" for scale in ("quick", "full"))
        lines.append(f"{name:<{width}}  {e.title} ({counts})")
    return "\n".join(lines)

"""What can be found out of a run before its weights are read: each check is one `Finding` in words.

In: prompts, a tokenizer, rewards, the configuration. Out: `Finding`s. `build` calls the cheap ones by itself before it
trains; `gspo check` shows them all.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gspo.config import Run
from gspo.errors import InputError
from gspo.inputs import Inputs
from gspo.rewards.load import Found
from gspo.rewards.score import AtOnce, Judge, Scorer
from gspo.stage_config import AnyRun
from gspo.tasks.template import by_template
from gspo.types import Group, Prompt, Reward, Rollout, Segment, Stop

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GOLD_ROWS = 64
"""Rows whose gold answers are tried, spread over the data; `build` tries fewer."""
FEW_ROWS = 8
_PLAIN = (str, int, float)


@dataclass(frozen=True)
class Finding:
    """What a check came to."""

    name: str
    text: str
    mend: str | None = None
    """What to do about it; a run should not start before. None: nothing has to be done."""
    note: bool = False
    """Worth knowing, though nothing has to be done."""


# ------------------------------------------------------------------------------ the template


def round_trip(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> Finding:
    """ids -> text -> ids of the prompts: what a server or a log that passes text on would make of them."""
    some = spread(prompts, GOLD_ROWS)
    broken = []
    for prompt in some:
        text = tokenizer.decode(prompt.token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        again = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if list(again) != prompt.token_ids.tolist():
            broken.append(prompt)
    name = "template: ids -> text -> ids"
    if not broken:
        return Finding(name, f"{len(some)} prompts come back as the same ids")
    return Finding(
        name,
        f"{len(broken)} of {len(some)} prompts come back as other ids, row {broken[0].row} first. Nothing here goes through text, "
        "so training is not touched; what passes prompts on as text (a server, a later re-tokenisation) sees others than those trained on",
        note=True,
    )


def prefix(tokenizer: PreTrainedTokenizerBase, *, chat: bool) -> Finding:
    """Whether each further turn leaves what stands before it as it was, in a conversation with a thought in it."""
    name = "template: prefix property"
    if not chat:
        return Finding(name, "no chat template is used")
    turns = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nanswer"},
        {"role": "user", "content": "second"},
    ]
    try:
        asked = by_template(tokenizer, turns[:1], add_generation_prompt=True)
        answered = by_template(tokenizer, turns[:2], add_generation_prompt=False)
        again = by_template(tokenizer, turns, add_generation_prompt=True)
    except InputError as error:
        return Finding(name, f"cannot be looked at: {error}. Prompts of one turn are not touched", note=True)
    broken = []
    if not answered.startswith(asked):
        broken.append(
            "an answered prompt does not begin with the prompt as it is shown for an answer, which `gspo sft` refuses"
        )
    if not again.startswith(answered.rstrip()):
        broken.append(
            "a second question rewrites the first answer (as templates do that drop <think> from earlier turns), so that turns become branches"
        )
    if not broken:
        return Finding(name, "each turn leaves what stands before it as it was")
    return Finding(
        name,
        f"{'; '.join(broken)}. What was sampled is trained as it was sampled all the same",
        note=True,
    )


# ------------------------------------------------------------------------------ the rewards


def require_sound(run: Run, inputs: Inputs) -> list[str]:
    """The cheap checks, before weights are read; what there is to say about them.

    Raises InputError if a ready reward does not pay for its gold answers. What a function of the user's would pay for is
    guessed, so it is said and not refused.
    """
    findings = golds(run, inputs, FEW_ROWS)
    sure = [f.mend for found, f in zip(inputs.found, findings, strict=True) if f.mend and found.ready.gold is not None]
    if sure:
        raise InputError(f"{'; '.join(sure)}. `gspo check` shows it in full")
    return [f"{finding.name}: {finding.text}" for finding in findings if finding.note or finding.mend]


def golds(run: AnyRun, inputs: Inputs, rows: int = GOLD_ROWS) -> list[Finding]:
    """Of each reward: whether the gold answer of a row, formed of the column that the reward reads, earns it."""
    pairs = zip(inputs.found, inputs.reward.judges, strict=True)
    some = spread(inputs.prompts, rows)
    return [_gold(found, judge, some, run.data.prompt, inputs.tokenizer) for found, judge in pairs]


def _gold(
    found: Found, judge: Judge, prompts: Sequence[Prompt], column: str, tokenizer: PreTrainedTokenizerBase
) -> Finding:
    name = f"reward {found.name}: gold answers"
    reads = [] if found.ready.call is None else [c for c in found.ready.call.reads.values() if c != column]
    forms = [_forms(found, reads, prompt.columns) for prompt in prompts]
    if isinstance(judge.place, AtOnce) or not any(forms):
        return Finding(name, "it reads no column with a gold answer, so none can be formed")
    groups = [_answered(p, ["", *said], tokenizer) for p, said in zip(prompts, forms, strict=True)]
    judging = Scorer([judge]).begin()
    for group in groups:
        judging.add(group)
    verdicts = [[r.reward for r in group.rollouts if r.reward is not None] for group in judging.finish()]
    shown = f"of the columns {', '.join(reads)}" if len(reads) > 1 else f"of column {reads[0]}"
    unpaid = [i for i, rewards in enumerate(verdicts) if forms[i] and not _earned(found, rewards, judge.name)]
    tried = sum(map(bool, forms))
    if not unpaid:
        return Finding(name, f"{tried} rows tried, an answer formed {shown} earns the reward in each")
    first = unpaid[0]
    example = f"row {prompts[first].row}: {forms[first][0][:80]!r} {_worth(verdicts[first], judge.name)}"
    if found.ready.gold is None and len(unpaid) == tried:
        return Finding(
            name,
            f"no answer formed {shown} earns more than an empty one ({example}). The function may want a form that cannot be guessed: "
            "try it on an answer that you know to be right",
            note=True,
        )
    return Finding(
        name,
        f"{len(unpaid)} of {tried} rows do not pay for their own gold answer, formed {shown}: {example}",
        mend=f"reward {found.name} gives nothing for the gold answers of {len(unpaid)} of {tried} rows tried (row "
        f"{', '.join(str(prompts[i].row) for i in unpaid[:5])}{', …' if len(unpaid) > 5 else ''}): mend the column or the function",
    )


def _forms(found: Found, reads: Sequence[str], row: Mapping[str, Any]) -> list[str]:
    """Answers that ought to be right."""
    if found.ready.gold is not None:
        return [found.ready.gold(row[reads[0]])]
    plain = [
        str(row[c])
        for c in reads
        if isinstance(row[c], _PLAIN) and not isinstance(row[c], bool) and str(row[c]).strip()
    ]
    return [form for text in plain for form in (text, rf"\boxed{{{text}}}")]


def _answered(prompt: Prompt, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Group:
    rollouts = []
    for i, text in enumerate(texts):
        ids = np.asarray(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int64)
        segment = Segment(ids, np.ones(len(ids), dtype=bool), np.zeros(len(ids), dtype=np.float32))
        rollouts.append(Rollout(i, (segment,), text, Stop.EOS, (0, 0)))
    return Group(prompt, prompt.row, tuple(rollouts))


def _earned(found: Found, rewards: Sequence[Reward], name: str) -> bool:
    empty, *formed = [reward.parts[name] for reward in rewards]
    best = max((value for value in formed if value is not None), default=None)
    if best is None:
        return False
    return best >= 1.0 if found.ready.gold is not None else empty is None or best > empty


def _worth(rewards: Sequence[Reward], name: str) -> str:
    value, error = rewards[1].parts[name], rewards[1].error
    if error:
        return f"fails: {error.strip().splitlines()[-1]}"
    return "has no verdict" if value is None else f"is worth {value:g}"


# ------------------------------------------------------------------------------ the machine


def weights_kept(run: Run, model: Any) -> int:
    """Weights that a checkpoint holds with their moments: those of the policy that are trained, and all of a critic of its own,
    which are about as many as the policy has in all."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    critic = run.critic is not None and run.critic.backbone == "separate"
    return int(trained + critic * model.num_parameters())


def disk(run: Run, folder: Path, parameters: int) -> Finding:
    """Room for the checkpoints: float32 weights and two moments each; the newest ones, best, the guard's two, and one being written."""
    one = parameters * 4 * 3
    kept = run.checkpoint.keep + 1 + (run.eval.every > 0) + 2 * (run.guard == "rollback")
    written = 1 + sum(run.steps // every for every in (run.checkpoint.every, run.eval.every) if every)
    most = min(kept, written)
    above = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(above).free
    text = f"a checkpoint takes {one / 1e9:.2f} GB, at most {most} stand at a time ({most * one / 1e9:.2f} GB), and {free / 1e9:.2f} GB are free in {above}"
    if free >= most * one:
        return Finding("disk", text)
    if free < 2 * one:
        return Finding(
            "disk",
            text,
            mend=f"dir={folder}: {free / 1e9:.2f} GB are free and {2 * one / 1e9:.2f} GB are needed at the least: choose another dir",
        )
    less = ["set checkpoint.keep lower"] * (run.checkpoint.keep > 1) + ["guard=warn (two fewer)"] * (
        run.guard == "rollback"
    )
    return Finding("disk", f"{text}: {', or '.join([*less, 'choose another dir'])}", note=True)


def parts() -> Finding:
    """Which optional parts of gspo are installed."""
    try:
        needs = metadata.requires("gspo") or []
    except metadata.PackageNotFoundError:
        return Finding(
            "optional parts", "gspo runs from a source tree that is not installed, so they are not listed", note=True
        )
    found: dict[str, list[bool]] = {}
    for need in needs:
        extra, package = re.search(r"extra == ['\"]([\w-]+)['\"]", need), re.match(r"[\w.-]+", need)
        if extra and package and package[0].lower() != "gspo":
            found.setdefault(extra[1], []).append(_installed(package[0]))
    said = [f"{extra} {'installed' if all(there) else 'not installed'}" for extra, there in sorted(found.items())]
    return Finding("optional parts", ", ".join(said) or "there are none")


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def spread(prompts: Sequence[Prompt], most: int) -> list[Prompt]:
    """Up to `most` of the prompts, evenly over the data."""
    return [
        prompts[i] for i in sorted({*np.linspace(0, len(prompts) - 1, min(most, len(prompts)), dtype=int).tolist()})
    ]

"""A step of a run on the terminal: its verdict, and its groups side by side.

In: the folder of a run and a step. Out: something that rich prints. The command `show` calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gspo.errors import InputError
from gspo.view.files import Answer, groups_in, journal, record_file, shared_beginning, taken_as_whole


def show(folder: Path, step: int | None, *, evaluation: bool, groups: int, out: Console) -> None:
    """Print the answers of `step`, or of the last one; at most `groups` of its groups.

    Raises:
        InputError: no run, or no answers of this step.
    """
    lines = journal(folder)
    if step is None:
        measured = [line["step"] for line in lines if not evaluation or "eval/reward" in line]
        if not measured:
            raise InputError(f"{folder}: no step is done yet{' that was evaluated' if evaluation else ''}")
        step = measured[-1]
    found = groups_in(record_file(folder, step, evaluation=evaluation))
    line = next((line for line in lines if line["step"] == step), None)
    with taken_as_whole(folder):
        head = _head(folder, step, line, evaluation)
    out.print(head)
    shared = shared_beginning([group[0].prompt for group in found[:groups]])
    if shared:
        out.print(Panel(Text(shared.strip(), style="cyan"), title="every prompt begins with", title_align="left"))
    for group in found[:groups]:
        out.print(_group(group, shared))
    if len(found) > groups:
        out.print(f"{len(found) - groups} more groups: --groups {len(found)}", style="dim")


def _head(folder: Path, step: int, line: dict[str, Any] | None, evaluation: bool) -> RenderableType:
    title = Text(f"{folder}, {'evaluation after ' if evaluation else ''}step {step}", style="bold")
    if line is None or evaluation:
        return title
    reward = line["reward/mean"]
    numbers = (
        f"reward {'-' if reward is None else f'{reward:.3f}'}  signal {line['groups/signal']}/{line['groups/total']}  "
        f"clipped {line['clip/rows']:.0%} of answers, {line['clip/tokens']:.0%} of tokens  cut {line['truncated/share']:.0%}"
    )
    return Group(title, Text(numbers), Text(str(line["verdict"]), style="yellow" if line["verdict/warning"] else ""))


def _group(answers: Sequence[Answer], shared: str) -> RenderableType:
    parts = list(dict.fromkeys(name for answer in answers for name in answer.reward_parts))
    trained = any(answer.advantage is not None for answer in answers)
    table = Table(expand=True, box=None, pad_edge=False, header_style="dim")
    table.add_column("#", justify="right")
    table.add_column("reward", justify="right")
    for name in parts if len(parts) > 1 else []:
        table.add_column(name, justify="right")
    if trained:
        table.add_column("advantage", justify="right")
        table.add_column("clipped", justify="right")
    table.add_column("tokens", justify="right")
    table.add_column("answer", ratio=1, overflow="fold")
    for answer in answers:
        cells = [str(answer.index), _number(answer.reward)]
        cells += [_number(answer.reward_parts.get(name)) for name in parts] if len(parts) > 1 else []
        if trained:
            cells += [f"{answer.advantage or 0.0:+.2f}", clipped_words(answer)]
        end = "" if answer.stop == "eos" else f" [{answer.stop}]"
        table.add_row(*cells, f"{answer.sampled}{end}".replace("[", r"\["), _text(answer))
    first = answers[0]
    prompt = ("… " if shared else "") + first.prompt[len(shared) :].strip()
    return Panel(Group(Text(prompt, style="cyan"), table), title=f"row {first.row}", title_align="left")


def clipped_words(answer: Answer) -> str:
    """`no`, `yes`, or the share of the tokens that were; `-` if the answer was not trained on."""
    if answer.clipped is None:
        return "-"
    return {0.0: "no", 1.0: "yes"}.get(answer.clipped, f"{answer.clipped:.0%}")


def _text(answer: Answer) -> Text:
    words = Text(answer.text.strip() or "(empty)")
    for role, said in answer.turns:
        words.append(f"\n{role}: ", style="dim").append(said, style="dim")
    if answer.reward_error:
        words.append("\n" + answer.reward_error.strip().splitlines()[-1], style="red")
    return words


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"

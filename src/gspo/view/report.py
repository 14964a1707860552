"""`report.html` of a run: its curves, verdicts and sample groups over time, in one file that needs no network.

In: the folder of a run. Out: the file. `job` and the stages call `report_of` at the end of a run, the command `show --report` at any time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from gspo.console import duration
from gspo.errors import InputError
from gspo.view import files
from gspo.view.files import Answer, Metrics
from gspo.view.html import document, table
from gspo.view.show import clipped_words
from gspo.view.svg import Series, chart, legend

_SAMPLED_STEPS, _SAMPLED_GROUPS, _SAMPLED_ANSWERS = 8, 3, 8
"""How many steps, groups of each and answers of each group are shown: the record has them all."""
_POINTS = 600
"""Points of a curve at most: of a longer run, the mean of as many stretches."""
_TEXT = 1200
"""Characters of a prompt or an answer that are shown; what is left out is said."""

_STYLE = """
.warn{color:var(--opp);font-weight:600}pre{font:12.5px ui-monospace,"DejaVu Sans Mono",monospace;white-space:pre-wrap;overflow-wrap:anywhere;margin:0}
.prompt{background:#f2f4f6;padding:6px 8px;border-radius:3px}
"""

_CHARTS: tuple[tuple[str, dict[str, str], bool], ...] = (
    ("reward", {"reward/mean": "training", "eval/reward": "held out"}, False),
    ("loss", {"eval/loss": "held out"}, False),
    ("groups with signal", {"groups/signal": "with signal", "groups/total": "all"}, False),
    ("clip share", {"clip/rows": "answers", "clip/tokens": "tokens"}, False),
    ("entropy of a token, nats", {"entropy": "entropy"}, False),
    ("tokens of an answer", {"length/mean": "mean", "length/max": "longest"}, False),
    ("answers cut at the limit", {"truncated/share": "cut"}, False),
    ("engine against trainer, |log-probability|", {"parity/mean": "mean", "parity/max": "largest"}, True),
    (
        "experts changed",
        {"routing/changed_rollout_old": "engine to trainer", "routing/changed_old_new": "by the updates"},
        False,
    ),
    ("replayed experts that routers would still choose", {"routing/replay_hits": "hits"}, False),
    (
        "spread of the log ratio to the old policy",
        {"ratio/std_tokens": "of tokens", "ratio/std_rows": "of answers"},
        True,
    ),
    ("gradient norm", {"grad_norm": "mean of the updates"}, True),
    ("KL to the start, nats a token", {"kl/mean": "KL term", "eval/kl_start": "at evaluations"}, False),
    ("answers that go round in a loop", {"repetition/share": "in a loop"}, False),
)
"""Title, journal keys with their names, whether upwards is logarithmic. A chart without a number is left out."""
_LAYERS = {
    "routing/changed_rollout_old_layers": "engine to trainer",
    "routing/changed_old_new_layers": "by the updates",
}


def write_report(folder: Path) -> Path:
    """Write `report.html` from what the run has so far; returns it. Raises InputError if there is no run."""
    path = folder / "report.html"
    draft = path.with_suffix(".tmp")
    draft.write_text(page(folder), encoding="utf-8")
    os.replace(draft, path)
    return path


def report_of(folder: Path, say: Callable[[str], None]) -> None:
    """The report at the end of a run, which is worth no less if it cannot be written."""
    try:
        say(f"report: {write_report(folder)}")
    except (OSError, InputError) as error:
        say(f"note: report.html could not be written: {error}")


def page(folder: Path) -> str:
    """The report. Raises InputError if there is no run, or a file of it is damaged."""
    lines = files.journal(folder)
    name = folder.resolve().name
    with files.taken_as_whole(folder):
        body = _body(folder, name, lines)
    return document(f"gspo: {name}", body, _STYLE)


def _body(folder: Path, name: str, lines: Sequence[Metrics]) -> str:
    return (
        f"<h1>{escape(name)}</h1>{_summary(folder, lines)}"
        f'<h2>Curves</h2><div class="charts">{"".join(_charts(lines))}</div>'
        f"<h2>Verdicts</h2>{_verdicts(lines)}{_guarded(lines)}<h2>Answers</h2>{_samples(folder)}"
    )


def _summary(folder: Path, lines: Sequence[Metrics]) -> str:
    run = files.settings_of(folder)
    about = run.get("about", {})
    model, algorithm = run["model"]["name"], (run.get("algorithm") or {}).get("name", about.get("command", ""))
    seconds = sum(line.get("time/step") or 0.0 for line in lines)
    measured = [line["eval/reward"] for line in lines if line.get("eval/reward") is not None]
    start = next((line["eval/start/reward"] for line in lines[:1] if "eval/start/reward" in line), None)
    held_out = f"; held-out reward {_number(start)} → {_number(measured[-1])}" if measured else ""
    return (
        f'<p class="soft">{escape(str(algorithm))} on <code>{escape(str(model))}</code>, seed {run["seed"]}, '
        f"{len(lines)} of {run['steps']} steps in {duration(seconds)}{held_out}. gspo {escape(str(about.get('gspo', '')))}, "
        f"torch {escape(str(about.get('torch', '')))}, {escape(str(about.get('device', '')))}.</p>"
    )


def _charts(lines: Sequence[Metrics]) -> list[str]:
    drawn = []
    for title, keys, log in _CHARTS:
        series = [_series(name, key, lines) for key, name in keys.items()]
        if any(v is not None for s in series for v in s.middle):
            names = legend(list(keys.values())) if len(series) > 1 else ""
            drawn.append(f"<div>{chart(title, 'step', series, log=log)}{names}</div>")
    return [*drawn, *_layers(lines)]


def _layers(lines: Sequence[Metrics]) -> list[str]:
    """The share of changed experts in each layer, the mean of the steps; nothing of a model with fewer than two such layers."""
    series = []
    for key, name in _LAYERS.items():
        if shares := [line[key] for line in lines if line.get(key) is not None]:
            middle = [sum(layer) / len(shares) for layer in zip(*shares, strict=True)]
            series.append(Series(name, range(1, len(middle) + 1), middle, middle, middle))
    if not series or len(series[0].x) < 2:
        return []
    drawn = chart("experts changed, mean of the steps", "layer with experts", series)
    return [f"<div>{drawn}{legend([s.name for s in series])}</div>"]


def _series(name: str, key: str, lines: Sequence[Metrics]) -> Series:
    size = max(1, math.ceil(len(lines) / _POINTS))
    parts = [lines[i : i + size] for i in range(0, len(lines), size)]
    values = [[line[key] for line in part if line.get(key) is not None] for part in parts]
    middle = [sum(v) / len(v) if v else None for v in values]
    x = [part[len(part) // 2]["step"] for part in parts]
    if any(v is not None for v in middle) and key.startswith("eval/"):  # measured now and then: no gaps between
        kept = [(a, b) for a, b in zip(x, middle, strict=True) if b is not None]
        x, middle = [a for a, _ in kept], [b for _, b in kept]
    return Series(name, x or [0], middle or [None], middle or [None], middle or [None])


def _verdicts(lines: Sequence[Metrics]) -> str:
    """Stretches of steps with the same kind of verdict, each with its last words."""
    said = [line for line in lines if "verdict" in line]
    if not said:
        return '<p class="soft">This run has none.</p>'
    rows = []
    for (_, warning), part in groupby(said, key=lambda line: (line["verdict/kind"], line["verdict/warning"])):
        stretch = list(part)
        first, last = stretch[0]["step"], stretch[-1]["step"]
        words = escape(str(stretch[-1]["verdict"]))
        steps = str(first) if first == last else f"{first} to {last}"
        words = words if first == last else f"at the last of them: {words}"
        rows.append((steps, f'<span class="warn">{words}</span>' if warning else words))
    return table(("steps", "verdict"), rows)


def _guarded(lines: Sequence[Metrics]) -> str:
    """What the guard said and did; nothing of a run that it left alone."""
    said = [line for line in lines if line.get("guard/action") not in (None, "none")]
    if not said:
        return ""
    rows = [
        (
            str(line["step"]),
            line["guard/action"],
            "–" if line["guard/target"] is None else str(line["guard/target"] or "the start"),
            f"{line['guard/step_size']:g}",
            escape(f"{line['guard/rule']}: {line['guard/text']}"),
        )
        for line in said
    ]
    return f"<h2>Guard</h2>{table(('step', 'action', 'back to', 'learning rate times', 'why'), rows)}"


def _samples(folder: Path) -> str:
    parts = []
    for evaluation, title in ((False, "training"), (True, "held out")):
        steps = files.steps_recorded(folder, evaluation=evaluation)
        count = min(_SAMPLED_STEPS, len(steps))
        chosen = [steps[round(i * (len(steps) - 1) / max(1, count - 1))] for i in range(count)]
        for step in dict.fromkeys(chosen):
            found = files.groups_in(files.record_file(folder, step, evaluation=evaluation))
            groups = found[:_SAMPLED_GROUPS]
            shared = files.shared_beginning([group[0].prompt for group in groups])
            shown = (
                f'<p class="soft">Every prompt begins with:</p><pre class="prompt">{_cut(shared)}</pre>'
                if shared
                else ""
            )
            shown += "".join(_group(group, shared) for group in groups)
            more = f", {min(_SAMPLED_GROUPS, len(found))} of {len(found)} groups"
            parts.append(f"<details><summary>{title}, step {step}{more}</summary>{shown}</details>")
    return "".join(parts) or '<p class="soft">None are recorded.</p>'


def _group(answers: Sequence[Answer], shared: str) -> str:
    rows = [
        (
            str(a.index),
            _number(a.reward),
            "<br>".join(f"{escape(name)} {_number(value)}" for name, value in a.reward_parts.items()),
            "–" if a.advantage is None else f"{a.advantage:+.2f}",
            "–" if a.advantage is None else clipped_words(a),
            f"{a.sampled}{'' if a.stop == 'eos' else ' ' + escape(a.stop)}",
            f"<pre>{_cut(a.text)}</pre>{_talk(a)}",
        )
        for a in answers[:_SAMPLED_ANSWERS]
    ]
    head = ("", "reward", "parts", "advantage", "clipped", "tokens", "answer")
    left = len(answers) - len(rows)
    more = f'<p class="soft">{left} more answers are in the record.</p>' if left else ""
    prompt = ("… " if shared else "") + answers[0].prompt[len(shared) :]
    return f'<pre class="prompt">{_cut(prompt)}</pre>{table(head, rows)}{more}'


def _talk(answer: Answer) -> str:
    """The conversation that the answer is the end of."""
    said = "".join(f'<p class="soft">{escape(role)}</p><pre>{_cut(words)}</pre>' for role, words in answer.turns)
    return f"<details><summary>{len(answer.turns)} messages</summary>{said}</details>" if said else ""


def _cut(text: str) -> str:
    left = len(text) - _TEXT
    return escape(text[:_TEXT]) + (f" <small>… {left} characters more</small>" if left > 0 else "")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"

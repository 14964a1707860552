"""`report.html`: curves, verdicts and every arm, in one file that needs no network.

In: summaries with their experiments, and the records of all arms. Out: the text of the page. `command` writes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from statistics import median

from gspo.lab.arms import Record
from gspo.lab.experiment import Experiment
from gspo.lab.outcome import MEASURES, Curves, Measure, trailing
from gspo.lab.rules import OPPOSITE, SEEN, Key, Results, UndecidedError, best, spread
from gspo.lab.summary import ArmNumbers, Summary, tally
from gspo.view.html import document, prose, table
from gspo.view.svg import Series, chart, legend

_SMOOTH = 5
"""Steps that a drawn reward is the mean of."""

_STYLE = """
.word{font-weight:600;white-space:nowrap}.seen{color:var(--seen)}.not{color:var(--not)}.opposite,.failed{color:var(--opp)}
.finding{border-left:4px solid var(--line);padding:2px 0 2px 12px;margin:10px 0}.finding.seen{border-color:var(--seen)}.finding.not{border-color:#d9b84a}.finding.opposite{border-color:var(--opp)}
.finding p{margin:2px 0;color:var(--ink)}.finding small{display:block}
"""


def page(chapters: Sequence[tuple[Summary, Experiment]], records: Sequence[Record]) -> str:
    """The whole report: what came out, a chapter an experiment, and an appendix with every arm."""
    summaries = [summary for summary, _ in chapters]
    by_id = {record.id: record for record in records}
    body = "".join(_chapter(summary, experiment, by_id) for summary, experiment in chapters)
    return document(
        "gspo lab",
        f"<h1>gspo lab: the paper's claims, re-run at small scale</h1>"
        f'<p class="soft">The paper is GSPO, arXiv 2507.18071. Claims are judged by rules that stood in the code before the runs. '
        f"Models of a few hundred thousand weights, one task: what is not seen here may be true of large models, and what is seen "
        f"here need not be. {tally(summaries)}.</p>"
        f"{_overview(summaries)}{body}{_appendix(summaries, chapters, records)}",
        _STYLE,
    )


def _kind(word: str) -> str:
    kinds: dict[str, str] = {SEEN: "seen", OPPOSITE: "opposite"}
    return kinds.get(word, "not")


def _word(word: str) -> str:
    return f'<span class="word {_kind(word)}">{escape(word)}</span>'


def _overview(summaries: Sequence[Summary]) -> str:
    rows = []
    for s in summaries:
        for i, d in enumerate(s.findings):
            name = f'<a href="#{s.name}">{s.name}</a>' if i == 0 else ""
            rows.append((name, prose(d.claim), escape(d.source), _word(d.word), escape(f"{d.numbers}; {s.seeds_run}")))
    return table(("experiment", "claim", "made in", "result", "numbers"), rows)


def _chapter(summary: Summary, experiment: Experiment, records: Mapping[str, Record]) -> str:
    trials = experiment.trials(summary.scale, summary.seeds)
    curves: dict[Key, list[Curves]] = {}
    for trial in trials:
        record = records.get(trial.id)
        if record is not None and record.curves is not None and record.status == "finished":
            curves.setdefault(trial.arm.key, []).append(record.curves)
    settings = list(dict.fromkeys(trial.arm.setting for trial in trials))
    failed = "".join(f'<p class="failed">Failed: {escape(text)}</p>' for text in summary.failed)
    return (
        f'<h2 id="{summary.name}">{escape(summary.name)}: {escape(summary.title)}</h2>'
        f"<p>{prose(summary.about)}</p>{_findings(summary)}{failed}"
        f"{_contest(summary, experiment, curves)}"
        f"{''.join(_setting(setting, summary, curves) for setting in settings)}"
        f'<p class="soft">Protocol: <code>{escape(summary.command)}</code>, {len(trials)} runs, ended {summary.ended}, '
        f"{summary.seconds / 60:.1f} minutes of processes with one thread each. The command of every arm stands in the appendix.</p>"
    )


def _findings(summary: Summary) -> str:
    return "".join(
        f'<div class="finding {_kind(d.word)}"><p>{prose(d.claim)} <small>({escape(d.source)})</small></p>'
        f"<p>{_word(d.word)} {escape(d.numbers)}.</p><small>Rule's threshold: {prose(d.why)}.</small></div>"
        for d in summary.findings
    )


def _setting(setting: str, summary: Summary, curves: Mapping[Key, list[Curves]]) -> str:
    """Charts and table of the arms that are compared with each other."""
    arms = [arm for arm in summary.arms if arm.setting == setting]
    mine = {arm.name: found for arm in arms if (found := curves.get((setting, arm.name)))}
    charts = [_chart(measure, mine) for measure in MEASURES] if mine else []
    drawn = [c for c in charts if c]
    gaps = "".join(_gaps(arm) for arm in arms)
    return (
        f"<h3>{escape(setting)}</h3>"
        f"{legend(list(mine)) if len(mine) > 1 else ''}<div class='charts'>{''.join(drawn)}</div>{_arms(arms)}{gaps}"
    )


def _chart(measure: Measure, arms: Mapping[str, list[Curves]]) -> str:
    unit = measure.name == "reward"
    series = [s for name, found in arms.items() if (s := _series(name, measure.name, found)) is not None]
    sizes = [abs(v) for s in series for v in s.middle if v is not None]
    if not sizes or max(sizes) <= measure.noise:
        return ""
    # A name keeps its colour where an arm before it has nothing to draw.
    places = [_series(name, measure.name, found) or _empty(name, found) for name, found in arms.items()]
    title = f"reward, mean of {_SMOOTH} steps" if unit else measure.label
    return chart(title, "step", places, log=measure.log, unit=unit)


def _empty(name: str, found: list[Curves]) -> Series:
    steps = len(found[0].rollouts)
    return Series(name, range(1, steps + 1), *([None] * steps,) * 3)


def _series(name: str, measure: str, found: list[Curves], x: Sequence[float] | None = None) -> Series | None:
    """Median over seeds, with the band from the lowest to the highest."""
    values = [c.values.get(measure, ()) for c in found]
    if not any(v is not None for each in values for v in each):
        return None
    if measure == "reward":
        values = [_smoothed(each) for each in values]
    steps = min(len(each) for each in values)
    columns = [[each[i] for each in values if each[i] is not None] for i in range(steps)]
    middle, low, high = ([f(c) if c else None for c in columns] for f in (median, min, max))  # type: ignore[type-var]
    return Series(name, x or range(1, steps + 1), middle, low, high)


def _smoothed(values: Sequence[float | None]) -> tuple[float | None, ...]:
    judged = iter(trailing([v for v in values if v is not None], _SMOOTH))
    return tuple(None if v is None else next(judged) for v in values)


def _contest(summary: Summary, experiment: Experiment, curves: Mapping[Key, list[Curves]]) -> str:
    """Each algorithm at its best variant, against answers and against seconds."""
    outcomes = {(a.setting, a.name): dict(zip(a.seeds, a.outcomes, strict=True)) for a in summary.arms}
    names: list[str] = []
    against: dict[str, list[Series]] = {"answers sampled": [], "seconds (one thread)": []}
    for variants in experiment.contest:
        try:
            key = best(Results(outcomes), variants, "area")
        except UndecidedError:
            continue
        found = curves[key]
        names.append(f"{key[1]}, {key[0]}")
        steps = min(len(c.rollouts) for c in found)
        axes = ([float(n) for n in found[0].rollouts], [median(c.seconds[i] for c in found) for i in range(steps)])
        for drawn, x in zip(against.values(), axes, strict=True):
            series = _series(key[1], "reward", found, x[:steps])
            drawn += [series] if series else []
    if not names:
        return ""
    charts = "".join(chart(f"reward, mean of {_SMOOTH} steps", label, s, unit=True) for label, s in against.items())
    return f"<h3>each algorithm at its best learning rate</h3>{legend(names)}<div class='charts'>{charts}</div>"


_COLUMNS = {
    "start": ("start", ".3f"),
    "final": ("final", ".3f"),
    "area": ("area", ".3f"),
    "peak": ("peak", ".3f"),
    "clip_tokens": ("tokens clipped", ".2%"),
    "ratio_tokens": ("std log ratio, tokens", ".4f"),
    "ratio_rows": ("std log ratio, answers", ".5f"),
    "parity": ("parity", ".1e"),
    "experts_update": ("experts changed by updates", ".2%"),
    "experts_rollout": ("experts changed from engine", ".2%"),
    "seconds": ("seconds", ".0f"),
}


def _arms(arms: Sequence[ArmNumbers]) -> str:
    present = {measure: of for measure, of in _COLUMNS.items() if any(arm.all(measure) for arm in arms)}
    rows = []
    for arm in arms:
        cells = [spread(values, form) if (values := arm.all(m)) else "–" for m, (_, form) in present.items()]
        collapsed = sum(o.collapsed for o in arm.outcomes)
        rows.append((escape(arm.name), str(len(arm.seeds)), *cells, f"{collapsed} of {len(arm.outcomes)}"))
    return table(("arm", "seeds", *(label for label, _ in present.values()), "collapsed"), rows)


def _gaps(arm: ArmNumbers) -> str:
    names = list(dict.fromkeys(name for o in arm.outcomes for name in o.gaps))
    if not names:
        return ""
    rows = [(escape(name), f"{max(o.gaps[name] for o in arm.outcomes if name in o.gaps):.1e}") for name in names]
    return table(("gradients compared with GSPO's", "largest relative distance"), rows)


def _appendix(
    summaries: Sequence[Summary], chapters: Sequence[tuple[Summary, Experiment]], records: Sequence[Record]
) -> str:
    del summaries
    used = {t.id: s.name for s, e in reversed(chapters) for t in e.trials(s.scale, s.seeds)}
    rows = []
    for r in records:
        ended = escape(r.error) if r.error else "collapsed" if r.outcome and r.outcome.collapsed else "finished"
        numbers = [f"{getattr(r.outcome, m):.3f}" if r.outcome else "–" for m in ("start", "final", "area", "peak")]
        state = f'<span class="failed">{ended}</span>' if r.error else ended
        where = used.get(r.id, "none now")
        what = f"{escape(r.name)}<br><small>{escape(r.setting)}</small>"
        rows.append((where, what, str(r.seed), *numbers, f"{r.wall:.0f}", state, f"<code>{escape(r.command)}</code>"))
    head = ("experiment", "arm", "seed", "start", "final", "area", "peak", "s", "ended", "command")
    return (
        f'<h2 id="appendix">Appendix: every arm that was run</h2><p>In the order in which they ended: {len(records)} in all, '
        f"{sum(r.status == 'failed' for r in records)} failed. An arm that two experiments share stands once. <i>none now</i>: its settings, "
        f"or the model's weights, are no longer those of a protocol.</p>{table(head, rows)}"
    )

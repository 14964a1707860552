"""`claims.md`: claim, protocol, result, command, as Markdown made from results, so that no number is typed by hand.

In: summaries. Out: the text of the page. `command` writes it beside the report; `python -m gspo.lab.claims FILE` prints it
again from a kept `claims.json`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter

from gspo.lab.rules import spread
from gspo.lab.summary import ArmNumbers, Summary, tally

JSON = TypeAdapter(tuple[Summary, ...])
"""Of `claims.json`."""

_HEAD = """# Claims, re-run at small scale

This page is written by `gspo lab` from the results of its runs: `python -m gspo.lab.claims docs/lab/claims.json` prints it again. "The paper" is GSPO, [arXiv 2507.18071](https://arxiv.org/abs/2507.18071). Each claim is judged by a rule that stands in `gspo/lab/experiments/` and was there before the runs: *seen*, *not seen at this scale*, or *the opposite*. The models have tens of thousands to a few hundred thousand weights and one task; what is not seen here may well be true of large models, and what is seen here need not be.

Numbers are medians over seeds, with [lowest, highest]. The reward is the share of right answers; "final" is the mean of the last 10 steps, "area" the mean of all steps. Every arm that was ever run, failed ones among them, is in the appendix of the report.
"""


def page(summaries: Sequence[Summary]) -> str:
    """The whole page. The order is that of the summaries."""
    rows = [
        f"| [{s.name}](#{s.name}) | {d.claim} | {d.source} | **{d.word}** | {d.numbers}; {s.seeds_run} |"
        for s in summaries
        for d in s.findings
    ]
    head = (
        f"{_HEAD}\n{tally(summaries)}.\n\n| experiment | claim | made in | result | numbers |\n|---|---|---|---|---|\n"
    )
    return head + "\n".join(rows) + "\n\n" + "\n".join(_section(s) for s in summaries)


def _section(s: Summary) -> str:
    rules = "\n".join(f"- {d.claim} **{d.word.capitalize()}**: {d.numbers}. Threshold: {d.why}." for d in s.findings)
    failed = "\n\nFailed arms:\n\n" + "\n".join(f"- {text}" for text in s.failed) if s.failed else ""
    head = "| setting | arm | seeds | start | final | area | tokens clipped | collapsed |\n|---|---|---|---|---|---|---|---|"
    rows = "\n".join(_row(arm) for arm in s.arms)
    measured = f"gspo {', '.join(s.versions)}, ended {s.ended}; {s.seconds / 60:.1f} minutes of processes with one thread each."
    commands = "\n".join(arm.command for arm in s.arms)
    return (
        f"## {s.name}\n\n{s.title}. {s.about}\n\n`{s.command}`. {measured}\n\n{rules}\n\n{head}\n{rows}{failed}\n\n"
        f"<details><summary>The command of each arm, first seed</summary>\n\n```sh\n{commands}\n```\n\n</details>\n"
    )


def _row(arm: ArmNumbers) -> str:
    cells = [arm.setting, arm.name, str(len(arm.seeds))]
    forms = {"start": ".3f", "final": ".3f", "area": ".3f", "clip_tokens": ".2%"}
    cells += [spread(values, form) if (values := arm.all(measure)) else "–" for measure, form in forms.items()]
    cells.append(f"{sum(o.collapsed for o in arm.outcomes)} of {len(arm.outcomes)}")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(page(JSON.validate_json(Path(sys.argv[1]).read_bytes())), end="")

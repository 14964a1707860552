"""One row of the benchmark: gspo and what a user would take instead, in turns.

    python benchmarks/race.py step          both sides, ends with the line `ratio: <median>`
    python benchmarks/race.py step --no-peer
    python benchmarks/race.py --list

Writes benchmarks/results/<row>.json; `page.py` makes the page from these files. `make peers` installs the peers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import model
import runner
from rows import ROWS, Peer, Row, verdict
from runner import Machine, WorkerError
from work import Work

RESULTS = runner.HERE / "results"
TINY = dict(prompts=4, group=2, new_tokens=4, pad=0, warmup=0, steps=1, after=0, micro=2)
OURS = Peer("gspo", "ours", "ours.py")
Side = dict[str, Any]


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", nargs="?", choices=list(ROWS), metavar="ROW")
    parser.add_argument("--list", action="store_true", help="the rows, with the bar and the aim of each")
    parser.add_argument("--no-peer", action="store_true", help="our side alone; no ratio")
    parser.add_argument("--peers", help="only these peers, by name or a part of it: eager,static")
    parser.add_argument("--repeats", type=int, help="runs of each side (default: as the row says)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--core", type=int, help="first core to pin to")
    parser.add_argument("--model", default="smollm2-135m-q4", help="a built-in model, or a folder of transformers")
    parser.add_argument("--random-qwen3", choices=list(model.QWEN3), help="random weights of this size instead")
    parser.add_argument("--dtype", help="numbers of both sides (default: as the row says, mostly bfloat16)")
    parser.add_argument("--ours", action="append", default=[], metavar="KEY=VALUE", help="a setting of our side")
    parser.add_argument("--tiny", action="store_true", help="4 prompts x 2 answers x 4 tokens: does it run at all?")
    parser.add_argument("--timeout", type=float, help="seconds that a worker may take")
    parser.add_argument("--no-also", action="store_true", help="leave out the second ratio of the row memory")
    parser.add_argument("--profile", action="store_true", help="trace our side whether the bar is met or not")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON files")
    found = parser.parse_args(words)
    if not found.list and found.row is None:
        parser.error("give a ROW, or --list")
    if found.repeats is not None and found.repeats < 1:
        parser.error("--repeats: at least 1")
    return found


# ------------------------------------------------------------------------------ running


def work_of(row: Row, given: argparse.Namespace) -> Work:
    """What both sides are asked to do."""
    size = {**row.ours, **(TINY if given.tiny else {}), **({"dtype": given.dtype} if given.dtype else {})}
    return Work(model=model.folder_of(given.model, given.random_qwen3), threads=given.threads, **size)


def peers_of(row: Row, given: argparse.Namespace) -> list[Peer]:
    """The peers asked for; exits with 2 if one is not installed."""
    if given.no_peer:
        return []
    wanted = given.peers.split(",") if given.peers else [""]
    named = [peer for peer in row.peers if peer.name in wanted]
    chosen = named or [peer for peer in row.peers if any(part in peer.name for part in wanted)]
    if given.peers and not chosen:
        _stop(2, f"--peers {given.peers}: {row.name} has {', '.join(peer.name for peer in row.peers)}")
    missing = sorted({peer.env for peer in chosen if not runner.interpreter(peer.env).exists()})
    if missing:
        _stop(2, f"no environment .peers/{', .peers/'.join(missing)}: run make peers (or use --no-peer)")
    return chosen


def race(row: Row, given: argparse.Namespace) -> list[Side]:
    """Every side's runs, in turns: ours, peer, peer, ours, ..."""
    peers, work = peers_of(row, given), work_of(row, given)
    alone = {} if given.tiny else row.ours_alone
    machine = machine_of(row, given)
    settings = tuple(given.ours)
    sides = [(OURS, replace(work, settings=settings, **alone), given.repeats or row.repeats)]
    sides += [(peer, replace(work, **_changes(peer, settings)), given.repeats or row.peer_repeats) for peer in peers]
    found: list[Side] = [
        {"name": peer.name, "counts": peer.counts, "work": vars(w), "runs": []} for peer, w, _ in sides
    ]
    for turn in range(max(times for _, _, times in sides)):
        for (peer, asked, times), side in zip(sides, found, strict=True):
            if turn < times and "error" not in side:
                _one(side, peer, asked, machine, row)
    for side in found:
        _summarise(side, row)
    return found


def machine_of(row: Row, given: argparse.Namespace) -> Machine:
    cores = runner.cores_of(given.threads, given.core)
    return Machine(cores, given.threads, given.timeout or row.timeout, row.keep_pages)


def _changes(peer: Peer, settings: tuple[str, ...]) -> dict[str, Any]:
    return {**peer.changes, **({"settings": settings} if peer.env == "ours" else {})}


def _one(side: Side, peer: Peer, asked: Work, machine: Machine, row: Row) -> None:
    """One run of one side. A peer that only stands beside may fail; that is written down."""
    try:
        result = runner.run(peer.env, peer.script, asked, machine)
    except WorkerError as error:
        if peer.counts:
            raise
        side["error"] = str(error)
        print(f"{peer.name}: {error}", flush=True)
        return
    side["runs"].append(result)
    busy = result.get("steal", 0) + result.get("foreign", 0)
    warning = f"  (others took {busy:.0%} of its cores)" if busy > 0.05 else ""
    print(
        f"{peer.name}: {result[row.field]:.4g} {row.unit}, peak {result['rss_gb']:.2f} GB, "
        f"{result['wall_s']:.0f} s in all{warning}",
        flush=True,
    )


def _summarise(side: Side, row: Row) -> None:
    runs = side["runs"]
    if not runs:
        return
    values = [r[row.field] for r in runs]
    side |= {"median": statistics.median(values), "low": min(values), "high": max(values)}
    side["rss_gb"] = statistics.median(r["rss_gb"] for r in runs)
    phases = [r["phases"] for r in runs if r.get("phases")]
    side["phases"] = {key: statistics.median(p[key] for p in phases) for key in phases[0]} if phases else None
    side["versions"] = runs[-1]["versions"]


# ------------------------------------------------------------------------------ the result


def compare(row: Row, sides: list[Side]) -> tuple[str | None, float | None]:
    """The peer that we are compared with, the best of those that count, and the ratio of the medians."""
    ours, *others = sides
    rivals = [side for side in others if side["counts"] and "median" in side]
    pick: Callable[..., Side] = max if row.field == "tokens_per_second" else min
    best = pick(rivals, key=lambda side: side["median"]) if rivals else None
    return (best["name"] if best else None), row.ratio(ours["median"], best["median"] if best else None)


def measure(row: Row, given: argparse.Namespace) -> dict[str, Any]:
    """Race, write the file of the row, return what is in it."""
    about = {
        "row": row.name,
        "title": row.title,
        "against": row.against,
        "measured": row.measured,
        "field": row.field,
        "unit": row.unit,
        "must": row.must,
        "aim": row.aim,
        "better": row.better,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        **runner.commit(),
        "command": "python benchmarks/race.py " + " ".join(sys.argv[1:]),
        "machine": runner.describe_machine(machine_of(row, given)),
        "tiny": given.tiny,
    }
    sides = race(row, given)
    best, ratio = compare(row, sides)
    # Without a peer a share has no verdict either: --no-peer says what our side does, not how it fares.
    ratio = None if given.no_peer else ratio
    also = _also(row, given)
    result = {**about, "sides": sides, "best": best, "ratio": ratio, "also": also, "profile": None}
    missed = "miss" in (verdict(ratio, row.must, row.aim, row.better), *(a["verdict"] for a in also))
    write(result, given.out)  # now, so that a trace that is stopped does not take the figures with it
    if missed or given.profile:
        result["profile"] = _profile(row, given)
        write(result, given.out)
    return result


def write(result: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{result['row']}.json").write_text(json.dumps(result, indent=1) + "\n")


def _also(row: Row, given: argparse.Namespace) -> list[dict[str, Any]]:
    """The second ratio: from the other row's file if it is of this commit, else that row is run now."""
    if row.also is None or given.no_peer or given.no_also:
        return []
    file, now = given.out / f"{row.also.row}.json", runner.commit()
    found = json.loads(file.read_text()) if file.is_file() else {}
    if found.get("best") is None or (found["commit"], found["changed"], found["tiny"]) != (*now.values(), given.tiny):
        print(f"{row.also.row}, whose memory counts here too:", flush=True)
        found = measure(ROWS[row.also.row], given)
    ours = found["sides"][0]["rss_gb"]
    theirs = next(side["rss_gb"] for side in found["sides"] if side["name"] == found["best"])
    bar = verdict(ours / theirs, row.also.must, None, "less")
    return [dict(row=row.also.row, ours=ours, theirs=theirs, ratio=ours / theirs, must=row.also.must, verdict=bar)]


def _profile(row: Row, given: argparse.Namespace) -> str | None:
    """Our side once more, traced; its times are not used."""
    print("tracing our side", flush=True)
    kind = "memory" if row.better == "less" else "time"
    asked = replace(work_of(row, given), settings=tuple(given.ours), profile=kind)
    table: str | None = runner.run(OURS.env, OURS.script, asked, machine_of(row, given)).get("profile")
    return table


def _stop(code: int, message: str) -> None:
    print(message, file=sys.stderr)
    sys.exit(code)


def main() -> None:
    runner.end_on_signals()
    given = arguments()
    if given.list:
        for row in ROWS.values():
            aim = "-" if row.aim is None else f"{row.aim:g}"
            print(f"{row.name:16} must {row.must:g}  aim {aim}  {row.title}, against {row.against}")
        return
    row = ROWS[given.row]
    try:
        result = measure(row, given)
    except WorkerError as error:
        _stop(1, str(error))
    for extra in result["also"]:
        print(f"{extra['row']}: {extra['ratio']:.3f} (must {extra['must']:g}): {extra['verdict']}")
    if result["ratio"] is not None:
        print(f"against {result['best'] or row.against}: {verdict(result['ratio'], row.must, row.aim, row.better)}")
        print(f"ratio: {result['ratio']:.3f}")


if __name__ == "__main__":
    main()

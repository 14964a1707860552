"""The command line: `gspo train`, `sft`, `reward`, `check`, `eval`, `show`, `rescore`, `export`, `tasks`, `lab`. Words in, exit codes out; torch is loaded by them alone.

Exit codes: 0 done, 1 failed, 2 bad input, 130/143 stopped by a signal after saving.
"""

from __future__ import annotations

import importlib
import logging
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import typer

from gspo import __version__, machine, settings
from gspo.config import Judging, Run
from gspo.errors import InputError, RunError
from gspo.keys import keys_help, require_effect
from gspo.stage_config import AnyRun, RewardRun, Sft

S = TypeVar("S", Sft, RewardRun)


_SETTINGS = f"""
Settings are written key=value and laid over the recipe: `steps=20 algorithm=grpo optimizer.learning_rate=1e-5`.
A bare value replaces a section: `algorithm=grpo`, `model=Qwen/Qwen3-0.6B`, `data=my.jsonl`, `reward=my.py:judge`.
Built-in recipes: {", ".join(settings.recipes())}.
"""

app = typer.Typer(
    help="Reinforcement-learning post-training of language models: GSPO, GRPO and relatives.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

Words = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings laid over the recipe.")]


@app.command(
    epilog=keys_help(),
    help=f"""Train a policy with reinforcement learning.

    gspo train demo

    gspo train demo model=./my-model data=prompts.jsonl reward=judge.py:score dir=runs/mine

    gspo train reasoning-gym:chain_sum model=smollm2-135m

    gspo train --resume runs/mine
    {_SETTINGS}""",
)
def train(
    recipe: Annotated[
        str | None, typer.Argument(help="YAML file, built-in recipe, or a task of `gspo tasks`.", show_default=False)
    ] = None,
    words: Words = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the run in this folder.", show_default=False)] = None,
) -> None:
    recipe, words = _checked_words(Run, recipe, words, resume)
    machine.prepare()
    run = None if recipe is None else settings.load(recipe, words)

    from gspo.build import build
    from gspo.loop import train as loop
    from gspo.place import resumed_run

    if run is None:
        assert resume is not None
        run = resumed_run(Run, resume, words)
    result = loop(build(run, resume=resume))
    typer.echo(f"run folder: {result.folder}")
    if result.ended is not None:
        typer.echo(f"ended after step {result.step} of {run.steps}: {result.ended}")
    elif result.step < run.steps:
        typer.echo(f"stopped after step {result.step} of {run.steps}; go on with: gspo train --resume {result.folder}")
    elif result.start_reward is not None and result.last_reward is not None:
        what = "accuracy" if result.binary else "reward"
        typer.echo(f"held-out {what}: {result.start_reward:z.3f} -> {result.last_reward:z.3f}")
    raise typer.Exit(result.exit_code)


def _checked_words(
    kind: type[AnyRun], recipe: str | None, words: list[str] | None, resume: Path | None
) -> tuple[str | None, list[str]]:
    """Recipe and words of a command; with --resume there is no recipe, and what stands in its place is a word."""
    words = list(words or [])
    if resume is not None:
        return None, words if recipe is None else [recipe, *words]
    if recipe is None or ("=" in recipe and not settings.names_a_task(recipe, kind)):
        names = ", ".join(settings.recipes(kind))
        raise InputError(f"gspo {kind.command} RECIPE [key=value ...]: a recipe is missing. Built-in: {names}")
    return recipe, words


@app.command(
    epilog=keys_help(Sft),
    help=f"""Fine-tune a model on given answers, with the loss on the tokens of the answers.

    gspo sft tiny-dense

    gspo sft pairs.yaml model=./my-model data=pairs.jsonl dir=runs/mine

    gspo sft --resume runs/mine

Settings are written key=value and laid over the recipe, as in `gspo train`.
Built-in recipes: {", ".join(settings.recipes(Sft))}.
""",
)
def sft(
    recipe: Annotated[str | None, typer.Argument(help="YAML file or built-in recipe.", show_default=False)] = None,
    words: Words = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the run in this folder.", show_default=False)] = None,
) -> None:
    raise typer.Exit(_stage(Sft, recipe, words, resume))


@app.command(
    epilog=keys_help(RewardRun),
    help=f"""Make a reward model from preferences: of two answers to a prompt, the chosen one gets the higher score.

    gspo reward letters

    gspo reward pairs.yaml model=./my-model data=pairs.jsonl dir=runs/rm

    gspo reward --resume runs/rm

    gspo train demo reward=reward_model:runs/rm/best

Settings are written key=value and laid over the recipe, as in `gspo train`.
Built-in recipes: {", ".join(settings.recipes(RewardRun))}.
""",
)
def reward(
    recipe: Annotated[str | None, typer.Argument(help="YAML file or built-in recipe.", show_default=False)] = None,
    words: Words = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the run in this folder.", show_default=False)] = None,
) -> None:
    raise typer.Exit(_stage(RewardRun, recipe, words, resume))


def _stage(kind: type[S], recipe: str | None, words: list[str] | None, resume: Path | None) -> int:
    """Run a stage to its end; the exit code."""
    recipe, words = _checked_words(kind, recipe, words, resume)
    machine.prepare()
    run = None if recipe is None else settings.load_as(kind, recipe, words)

    from gspo.place import resumed_run
    from gspo.stages.stage import tune

    if run is None:
        assert resume is not None
        run = resumed_run(kind, resume, words)
    job = importlib.import_module(f"gspo.stages.{kind.command}_build").build(run, resume=resume)
    result = tune(job)
    typer.echo(f"run folder: {result.folder}")
    if result.step < job.steps_in_all:
        where = f"step {result.step} of {job.steps_in_all}"
        typer.echo(f"stopped after {where}; go on with: gspo {kind.command} --resume {result.folder}")
    else:
        for gain in result.gains.values():
            if gain.measured:
                typer.echo(str(gain))
    return result.exit_code


@app.command(
    help=f"""Check a recipe before an hour is spent: data, rewards, template, memory and time of one real step. Nothing is written.

    gspo check demo

    gspo check demo data=prompts.jsonl reward=judge.py:score

    The last line is `ready`, or the list of what to mend (exit code 2).
    {_SETTINGS}""",
)
def check(
    recipe: Annotated[str, typer.Argument(help="YAML file or built-in recipe.")],
    words: Words = None,
) -> None:
    machine.prepare()

    from gspo.check import check as checked

    raise typer.Exit(checked(recipe, list(words or []), typer.echo))


@app.command(
    name="eval",
    epilog=keys_help(),
    help=f"""Evaluate a model on the held-out prompts of a recipe, sampled as in training.

    gspo eval runs/demo/best demo

    gspo eval Qwen/Qwen3-0.6B demo eval.samples=8
    {_SETTINGS}""",
)
def evaluate(
    model: Annotated[str, typer.Argument(help="Folder, GGUF file, hub id or built-in name; a checkpoint of a run.")],
    recipe: Annotated[str, typer.Argument(help="YAML file or built-in recipe.")],
    words: Words = None,
) -> None:
    machine.prepare()
    require_effect(words or [])
    run = settings.load(recipe, [*(words or []), f"model.name={model}", "model.lora=null"])

    from gspo.build import evaluate_model

    for line in evaluate_model(run):
        typer.echo(line)


Folder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, as in runs/demo.")]
Evaluated = Annotated[bool, typer.Option("--eval", help="Answers of evaluations, not of training.")]


@app.command(
    help="""Show the answers of a step side by side: reward, its parts, advantage, clipped or not. Or write the report.

    gspo show runs/demo

    gspo show runs/demo --step 8 --eval

    gspo show runs/demo --report""",
)
def show(
    run: Folder,
    step: Annotated[int | None, typer.Option(min=0, help="By default the last one.", show_default=False)] = None,
    evaluated: Evaluated = False,
    groups: Annotated[int, typer.Option(min=1, help="Groups shown at most.")] = 8,
    report: Annotated[bool, typer.Option("--report", help="Write RUN/report.html: curves, verdicts, answers.")] = False,
) -> None:
    if report:
        if step is not None or evaluated:
            raise InputError("--report shows the whole run: leave --step and --eval out, or --report")
        from gspo.view.report import write_report

        typer.echo(f"report: {write_report(run)}")
        return
    from rich.console import Console

    from gspo.view.show import show as printed

    printed(run, step, evaluation=evaluated, groups=groups, out=Console())


@app.command(
    help="""Judge the recorded answers of a run again, by another reward, and compare. Nothing is written into the run.

    gspo rescore runs/demo --reward judge.py:score

    gspo rescore runs/demo --reward number --out scores.jsonl""",
)
def rescore(
    run: Folder,
    reward: Annotated[list[str], typer.Option(help="As `reward` in training; given several times, all are added.")],
    evaluated: Evaluated = False,
    out: Annotated[Path | None, typer.Option(help="Also write old and new rewards there, a line an answer.")] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for an answer, as judging.timeout.")] = 10.0,
) -> None:
    machine.prepare()

    from gspo.view.rescore import rescore as again

    for line in again(run, settings.rules(reward), Judging(timeout=timeout), evaluation=evaluated, out=out):
        typer.echo(line)


@app.command(
    help="""Write a checkpoint as a folder that transformers and vLLM load. Nothing is written over.

    gspo export runs/demo exported

    gspo export runs/demo exported --checkpoint best --dtype bfloat16

    gspo export runs/lora exported --adapter""",
)
def export(
    run: Folder,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to; it must not exist.")],
    checkpoint: Annotated[str, typer.Option(help="best, last, or the number of a step.")] = "last",
    dtype: Annotated[
        Literal["same", "float32", "bfloat16", "float16"],
        typer.Option(help="Of the weights; same: as the checkpoint holds them, float32 as a rule."),
    ] = "same",
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Of a run with model.lora, the adapter alone; else merged into its base.")
    ] = False,
) -> None:
    machine.prepare()

    import torch

    from gspo.export import export as written

    kind = None if dtype == "same" else getattr(torch, dtype)
    source = written(run, folder, checkpoint=checkpoint, dtype=kind, adapter=adapter)
    typer.echo(f"exported {source} to {folder}")


@app.command(
    help="""Re-run the paper's claims at small scale: arms side by side, a verdict by a rule, one offline report.

    gspo lab clip-fraction --quick

    gspo lab --all --quick

    gspo lab precision --full --seeds 5 dir=runs/lab

    Stopped, it goes on when it is called again; what is finished is not run twice. Each experiment ends with one line:
    `NAME: seen|not seen at this scale|the opposite (numbers)`.""",
)
def lab(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]... [dir=DIR]", help="Experiments; the folder.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All experiments.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="Show the experiments and exit.")] = False,
    full: Annotated[
        bool, typer.Option("--full/--quick", help="3 seeds or more and all settings, in hours; or few, in minutes.")
    ] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds an arm, in the place of the protocol's.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Arms run at once; by default one a core.")] = None,
) -> None:
    from gspo.lab import table

    if listed:
        typer.echo(table.listing())
        return
    folder, experiments = table.asked([*(words or [])], every=every)

    from gspo.lab import command

    scale: Literal["quick", "full"] = "full" if full else "quick"
    raise typer.Exit(command.run(experiments, scale=scale, seeds=seeds, jobs=jobs, folder=folder, say=typer.echo))


@app.command(
    help="""List the tasks that come with a name; or show the first rows of one, with their answers.

    gspo tasks

    gspo tasks reasoning-gym:chain_sum

    gspo tasks addition:10-99 --rows 5""",
)
def tasks(
    name: Annotated[str | None, typer.Argument(help="A task, as data= takes it.", show_default=False)] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows to show.")] = 3,
) -> None:
    from gspo.tasks import listing

    for line in listing.tasks() if name is None else listing.shown(name, rows):
        typer.echo(line)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"gspo {__version__}")
        raise typer.Exit


def guarded(command: Callable[[], None]) -> int:
    """Run a command; turn its two foreseen failures into one message and an exit code."""
    try:
        command()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    ours = logging.getLogger("gspo")
    ours.addHandler(logging.StreamHandler())
    ours.setLevel(logging.INFO)
    ours.propagate = False  # the libraries' own handlers would say it again
    sys.exit(guarded(app))


if __name__ == "__main__":
    main()

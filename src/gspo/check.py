"""Is a run worth starting? Everything about it that can be known in a minute, in words; nothing is written.

In: a recipe and words, as `gspo train` takes them. Out: lines, and what there is to mend. The command `gspo check` calls
`check`.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gspo import preflight, settings
from gspo.advice import advice
from gspo.config import Run
from gspo.console import Console, duration, plan
from gspo.critic import require_vocabulary
from gspo.engines.local import LocalEngine
from gspo.errors import InputError, RunError
from gspo.fit import require_fit
from gspo.inputs import Inputs, read_inputs
from gspo.machine import set_threads
from gspo.models.load import Policy, load_policy
from gspo.place import new_folder
from gspo.preflight import Finding
from gspo.trackers import table
from gspo.trial import Trial, trial

FULL = 0.9
"""Share of the machine's memory from which a run is said not to fit."""


@dataclass
class Check:
    """What has been found so far."""

    say: Callable[[str], None]
    mend: list[str] = field(default_factory=list)

    def add(self, finding: Finding) -> None:
        mark = "MEND" if finding.mend else "note" if finding.note else "ok"
        self.say(f"{mark:<5}{finding.name}: {finding.text}")
        if finding.mend:
            self.mend.append(finding.mend)

    @contextmanager
    def trying(self, name: str) -> Iterator[None]:
        """A check whose failure is an exception: it is one thing to mend, and the next check is made all the same."""
        try:
            yield
        except (InputError, RunError) as error:
            self.add(Finding(name, str(error), mend=str(error)))


def check(recipe: str, words: list[str], say: Callable[[str], None]) -> int:
    """Say what was found; 0 if the run is ready, 2 if there is something to mend."""
    found = Check(say)
    run: Run | None = None
    with found.trying("config"):
        run = settings.load(recipe, words)
        found.add(Finding("config", f"{sum(1 for _ in settings.fields())} keys are known and agree"))
    if run is not None:
        with found.trying("data and rewards"):
            inputs = read_inputs(run)
            try:
                _run(found, run, inputs)
            finally:
                inputs.close()
    if found.mend:
        say(f"not ready, {len(found.mend)} to mend:")
        for i, text in enumerate(found.mend, 1):
            say(f"  {i}. {text}")
        return 2
    say("ready")
    return 0


def _run(found: Check, run: Run, inputs: Inputs) -> None:
    tokenizer = inputs.tokenizer
    columns = sorted({column for prompt in inputs.prompts for column in prompt.columns})
    found.add(
        Finding(
            "data",
            f"{len(inputs.prompts)} prompts of {_span(inputs)} tokens, columns {', '.join(columns)}; {len(inputs.held_out)} held-out prompts",
        )
    )
    found.add(preflight.round_trip(inputs.prompts, tokenizer))
    found.add(preflight.prefix(tokenizer, chat=bool(tokenizer.chat_template) and run.data.template != "none"))
    for finding in preflight.golds(run, inputs):
        found.add(finding)
    found.add(Finding("batch", plan(run)))
    with found.trying("settings"):
        for note in advice(run, inputs):
            found.add(Finding("settings", note, note=True))
    for note in inputs.notes:
        found.add(Finding("data", note, note=True))
    with found.trying("folder"):
        found.add(Finding("folder", f"{new_folder(run)} is free"))
    found.add(preflight.parts())
    with found.trying("trackers"):
        table.require(run.trackers)
    with found.trying("model"):
        require_vocabulary(run)
        threads = set_threads(run.threads)
        policy = load_policy(run.model)
        require_fit(policy, inputs, run)
        found.add(Finding("model", f"{policy.announcement}; {threads} threads"))
        _measured(found, run, policy, inputs)


def _span(inputs: Inputs) -> str:
    lengths = [len(prompt.token_ids) for prompt in inputs.prompts]
    return f"{min(lengths)} to {max(lengths)}"


def _measured(found: Check, run: Run, policy: Policy, inputs: Inputs) -> None:
    kept = preflight.weights_kept(run, policy.model)
    found.add(preflight.disk(run, Path(run.dir or "runs/run"), kept))
    sampling = LocalEngine(policy, run.sampling, run.seed).describe() | {"weights": run.engine.weights}
    found.add(Finding("sampling", ", ".join(f"{key}={value}" for key, value in sampling.items())))
    with found.trying("a step at the largest lengths"):
        seen = trial(run, policy, inputs, Console(run.steps, io.StringIO()))
        found.add(_step(run, seen))
        found.add(_memory(seen))
        found.add(_whole(run, seen, len(inputs.held_out)))


def _step(run: Run, seen: Trial) -> Finding:
    text = (
        f"{seen.answers} answers of {run.longest} tokens to prompts of {seen.prompt_tokens} in {seen.rollout_seconds:.1f} s; "
        f"an update on {seen.trained} of them in {seen.update_seconds:.1f} s"
    )
    name = "a step at the largest lengths"
    if seen.budget == run.max_tokens_per_microbatch:
        return Finding(name, text)
    return Finding(
        name,
        f"{text}, in micro-batches of {seen.budget} tokens: {run.max_tokens_per_microbatch} do not fit into memory",
        mend=f"max_tokens_per_microbatch={run.max_tokens_per_microbatch} does not fit into memory: set it to {seen.budget}",
    )


def _memory(seen: Trial) -> Finding:
    if seen.on_gpu:
        return Finding("memory", f"{seen.peak_bytes / 1e9:.2f} GB of the GPU at the most, so far as measured")
    total = memory_of_machine()
    text = f"{seen.peak_bytes / 1e9:.2f} GB at the most, so far as measured, of {total / 1e9:.1f} GB"
    if seen.peak_bytes < FULL * total:
        return Finding("memory", text)
    return Finding(
        "memory",
        text,
        mend=f"the run takes {seen.peak_bytes / 1e9:.2f} GB of the {total / 1e9:.1f} GB of memory here: lower max_tokens_per_microbatch or "
        "sampling.max_rows, or set model.gradient_checkpointing=true",
    )


def _whole(run: Run, seen: Trial, held_out: int) -> Finding:
    step, whole = seen.step_seconds(run), seen.run_seconds(run, held_out)
    return Finding(
        "the whole run",
        f"at most {duration(step)} a step and {duration(whole)} in all, {seen.peak_bytes / 1e9:.2f} GB of memory; less where answers end before the "
        "limit or groups carry no signal",
    )


def memory_of_machine() -> float:
    """Bytes that this process may use: the machine's, or its container's if that has less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    words = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(words) if words.isdigit() else math.inf)

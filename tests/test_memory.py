"""A step that does not fit into memory is done in smaller pieces, said aloud, with the same result."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from gspo.journal import read

# A run of one step whose first pass over each update may take only so much memory beside what the process holds.
SCRIPT = """
import resource, sys
import gspo
from gspo.learner import Learner

folder, headroom = sys.argv[1], int(sys.argv[2])
rows = [{"prompt": f"Say something about the number {i}, please.", "answer": "1"} for i in range(4)]

def held():
    pages = int(open("/proc/self/statm").read().split()[0])
    return pages * resource.getpagesize()

plain = Learner.update

def tight(self, batch, objective):
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held() + headroom, before[1]))
    try:
        return plain(self, batch, objective)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)

if headroom:
    Learner.update = tight
gspo.train("tiny", data=rows, reward=lambda completion: len(completion) % 3, dir=folder, steps=1, group_size=8, threads=1,
           model={"name": "random-dense", "dtype": "float64"}, max_tokens_per_microbatch=20000, prompts_per_step=4,
           sampling={"max_new_tokens": 150}, eval={"every": 0}, algorithm={"name": "gspo", "updates_per_step": 2})
"""


def run(folder: Path, headroom: int) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", SCRIPT, str(folder), str(headroom)]
    # Blocks that are given back when they are freed: else what earlier passes left in the heap would be enough.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    return subprocess.run(words, capture_output=True, text=True, timeout=300, env=env)


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space of a process")
def test_out_of_memory_halves_the_micro_batches_and_changes_nothing_else(tmp_path: Path) -> None:
    assert run(tmp_path / "plain", 0).returncode == 0
    done = run(tmp_path / "tight", 12 * 2**20)
    assert done.returncode == 0, done.stderr[-2000:]
    said = re.findall(r"out of memory .* micro-batches of up to (\d+) tokens: trying again with (\d+)", done.stdout)
    assert said, done.stdout
    assert all(int(after) <= int(before) // 2 for before, after in said)
    (plain,), (tight,) = (read(tmp_path / name / "journal.jsonl") for name in ("plain", "tight"))
    same = ("loss", "grad_norm", "clip/rows", "parity/mean", "entropy")
    assert [tight[key] for key in same] == pytest.approx([plain[key] for key in same], rel=1e-5)
    # Adam's first steps are the signs of the gradients: where one is a rounding error, so is its sign.
    for name, expected in weights(tmp_path / "plain").items():
        assert (weights(tmp_path / "tight")[name] - expected).abs().mean() < 1e-7, name


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "checkpoints" / "00000001" / "model.safetensors")


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space of a process")
def test_an_answer_that_does_not_fit_alone_ends_the_run_with_advice(tmp_path: Path) -> None:
    done = run(tmp_path / "none", 2**16)
    assert done.returncode == 1
    assert "one answer at a time" in done.stderr
    assert "gradient_checkpointing" in done.stderr

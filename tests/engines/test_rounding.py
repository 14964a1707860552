"""Weights at a lower precision: the values are the nearest of that precision, and only the engine has them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from asking import named, requests
from safetensors.torch import load_file, save_file
from torch import Tensor

import gspo
from gspo import RunError, cli
from gspo.config import Sampling
from gspo.engines.local import LocalEngine
from gspo.engines.rounding import rounded
from gspo.models.attention import Packed
from gspo.models.heads import trained_logprobs
from gspo.models.load import Policy

LOWER = ["bf16", "fp8", "fp8_cast", "int8", "int6"]
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
E4M3 = E4M3[E4M3.isfinite()].unique()


def nearest(w: Tensor, grid: Tensor) -> Tensor:
    """The distance of each entry from the nearest value of a grid."""
    return (w.double()[..., None] - grid).abs().amin(-1)


def matrix(scale: float = 0.02) -> Tensor:
    w = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)) * scale
    w[1] = 0
    w[2] *= 1000
    return w


def test_the_format_of_e4m3() -> None:
    assert (float(E4M3.max()), float(E4M3[E4M3 > 0].min())) == (448.0, 2.0**-9)


@pytest.mark.parametrize("scale", [1e-3, 0.02, 1.0])
def test_a_plain_cast_is_the_nearest_of_all_256(scale: float) -> None:
    w = matrix(scale)
    found = rounded(w, "fp8_cast")
    assert nearest(found, E4M3).max() == 0
    inside = w.abs() <= 448
    torch.testing.assert_close((found - w).double().abs()[inside], nearest(w, E4M3)[inside], rtol=0, atol=0)
    assert (found[~inside].abs() == 448).all()
    assert scale < 1.0 or (~inside).any()


def test_a_scaled_row_uses_the_whole_range() -> None:
    w = matrix(1e-3)
    found = rounded(w, "fp8")
    scale = w.double().abs().amax(-1, keepdim=True).clamp_min(1e-38) / 448
    torch.testing.assert_close((found - w).double().abs() / scale, nearest(w / scale, E4M3), rtol=1e-4, atol=1e-4)
    assert (found[1] == 0).all()
    largest = w.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(found.gather(1, largest), w.gather(1, largest), rtol=1e-6, atol=0)
    live = [0, 2, 3, 4, 5]
    assert (found - w)[live].norm() / w[live].norm() < 0.035
    assert (rounded(w, "fp8_cast") - w)[[0, 3, 4, 5]].norm() / w[[0, 3, 4, 5]].norm() > 0.3, (
        "too small for e4m3 as it is"
    )


@pytest.mark.parametrize(("kind", "levels"), [("int8", 127), ("int6", 31)])
def test_whole_numbers_have_one_scale_a_row(kind: str, levels: int) -> None:
    w = matrix()
    found = rounded(w, kind).double()
    step = w.double().abs().amax(-1, keepdim=True) / levels
    for row in (0, 2, 3, 4, 5):
        whole = found[row] / step[row]
        torch.testing.assert_close(whole, whole.round(), rtol=0, atol=1e-4)
        assert whole.abs().max().round() == levels
        assert (found[row] - w[row]).abs().max() <= step[row] * 0.5001
        assert len(whole.round().unique()) > 20
    assert (found[1] == 0).all()


@pytest.mark.parametrize("kind", LOWER)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_shape_and_dtype_stay_and_vectors_are_left_alone(kind: str, dtype: torch.dtype) -> None:
    w = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = w.clone()
    found = rounded(w, kind)
    assert (found.shape, found.dtype) == (w.shape, w.dtype)
    assert torch.equal(w, before)
    assert (kind == "bf16" and dtype == torch.bfloat16) == torch.equal(found, w)
    torch.testing.assert_close(rounded(found, kind), found, rtol=2e-2 if dtype == torch.bfloat16 else 1e-6, atol=0)
    for expert in range(2):  # each of a stack of experts is rounded as if it stood alone
        assert torch.equal(found[expert], rounded(w[expert], kind))
    norm = 1 + torch.arange(5, dtype=dtype) / 500
    assert torch.equal(rounded(norm, kind), norm.bfloat16().to(dtype) if kind == "bf16" else norm)


# ------------------------------------------------------------------------------ in the engine


def logprobs(model: Any, prompt: np.ndarray, answer: np.ndarray) -> Tensor:
    ids = torch.from_numpy(np.concatenate([prompt, answer]))
    source = torch.arange(len(prompt) - 1, len(ids) - 1)
    found, _ = trained_logprobs(
        model,
        tokens_T=ids,
        position_T=torch.arange(len(ids)),
        layout=Packed([len(ids)]),
        source_N=source,
        target_N=ids[source + 1],
        temperature=1.0,
    )
    return found.detach()


def gap(policy: Policy, engine: LocalEngine) -> float:
    """Largest distance between the engine's log-probabilities and those of `policy`."""
    for request in requests(count=2):
        engine.submit(request)
    groups = list(engine.collect())
    return max(
        float((logprobs(policy.model, g.prompt.token_ids, s.token_ids) - torch.from_numpy(s.logprobs)).abs().max())
        for g in groups
        for r in g.rollouts
        for s in r.segments
    )


@pytest.mark.parametrize("model", ["random-dense", "random-moe"])
@pytest.mark.parametrize("kind", LOWER)
def test_the_engine_answers_with_rounded_weights_and_the_trainer_keeps_its_own(model: str, kind: str) -> None:
    policy = named(model)
    before = copy.deepcopy(policy.model.state_dict())
    engine = LocalEngine(policy, Sampling(max_new_tokens=12), seed=0, weights=kind)
    by_hand = named(model)
    with torch.no_grad():
        for p in by_hand.model.parameters():
            p.copy_(rounded(p, kind))
    assert gap(by_hand, engine) < 1e-6
    assert gap(policy, engine) > 1e-4
    assert all(torch.equal(policy.model.state_dict()[key], w) for key, w in before.items())
    assert all(p.requires_grad for p in policy.model.parameters())
    assert engine.copied_bytes == sum(p.nbytes for p in policy.model.parameters())


def test_new_weights_reach_the_copy() -> None:
    policy = named("random-dense")
    engine = LocalEngine(policy, Sampling(max_new_tokens=12), seed=0, weights="int8")
    with torch.no_grad():
        policy.model.model.layers[0].mlp.down_proj.weight.neg_()
        policy.model.model.norm.weight.mul_(1.25)
    stale = gap(policy, engine)
    engine.load(policy.model.named_parameters(), version=1)
    assert gap(policy, engine) < stale / 3
    with pytest.raises(RunError, match=r"lack \d+ tensors, model\.layers\.0"):
        engine.load(list(policy.model.named_parameters())[:1], version=2)


def test_the_engine_of_the_trainers_precision_copies_nothing() -> None:
    assert LocalEngine(named("random-dense"), Sampling(), seed=0).copied_bytes == 0


# ------------------------------------------------------------------------------ in a run


def digits(completion: str) -> float:
    return sum(c.isdigit() for c in completion) / max(1, len(completion))


def run(folder: Path, **keys: Any) -> list[dict[str, Any]]:
    given: dict[str, Any] = dict(steps=2, prompts_per_step=4, group_size=4, threads=1, reward=digits)
    given |= {"eval.every": 0, "model.dtype": "float32"}
    gspo.train("tiny", dir=folder, **{**given, **keys})
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def test_a_run_says_what_the_copy_costs_and_journals_its_distance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same, lower = run(tmp_path / "same"), run(tmp_path / "fp8", engine="fp8")
    assert all(line["parity/max"] < 1e-5 for line in same)
    assert all(1e-4 < line["parity/mean"] < 0.1 for line in lower)
    assert all(line["verdict/kind"] != "mismatch" for line in lower), "the default anchor keeps it out of the ratio"
    assert (
        "engine.weights=fp8: answers and evaluations come from a rounded copy of the weights, 0.3 MB"
        in capsys.readouterr().out
    )
    assert "weights: fp8" in (tmp_path / "fp8" / "run.yaml").read_text()


def test_a_mismatch_that_enters_the_ratio_is_warned_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The engine's own log-probabilities as the old policy: section 5.4 of the paper, with a mismatch above the band."""
    narrow = {"algorithm.anchor": "rollout", "algorithm.clip_low": 1e-6, "algorithm.clip_high": 1e-6}
    lines = run(tmp_path / "run", engine="fp8", **narrow)
    assert lines[0]["verdict/kind"] == "mismatch"
    assert lines[0]["verdict/warning"]
    assert abs(lines[0]["parity/signed"]) > 1e-6 / 3
    assert "Set algorithm.anchor=old, or widen algorithm.clip_low" in capsys.readouterr().out


def test_evaluation_uses_the_engines_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "00000002"
    weights = load_file(checkpoint / "model.safetensors")  # ten times as large, so that what it sees matters
    save_file(
        {key: w * 10 if w.ndim > 1 else w for key, w in weights.items()},
        checkpoint / "model.safetensors",
        {"format": "pt"},
    )
    words = ["eval", str(checkpoint), "tiny", "eval.limit=16", "sampling.max_new_tokens=200", "threads=1"]
    said = []
    for kind in ("same", "int6"):
        capsys.readouterr()
        assert cli.guarded(lambda kind=kind: cli.app([*words, f"engine.weights={kind}"])) == 0
        said.append(capsys.readouterr().out)
    assert said[0].splitlines()[1:] != said[1].splitlines()[1:]

"""The compiled kernels compute what torch computes, and round where it rounds; a machine without them says why."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compiled import needs_kernels
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from gspo import config
from gspo.models import fused, load, native


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


@needs_kernels
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 33, 64, 130])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (48, 64), (96, 576), (576, 1536)])
def test_products_are_exact_sums_rounded_once(tokens: int, outputs: int, inputs: int) -> None:
    kernels = native.kernels()
    x, a, b = drawn(tokens, inputs), drawn(outputs, inputs, seed=1), drawn(32, inputs, seed=2)
    exact = x.double() @ torch.cat([a, b]).double().T
    wide = kernels.product(x, a, b, wide=True)
    assert wide.dtype == torch.float32
    assert float((wide - exact).abs().max()) < 1e-6 * inputs
    assert torch.equal(kernels.product(x, a, b), wide.bfloat16())


@needs_kernels
def test_a_token_does_not_feel_the_batch() -> None:
    kernels = native.kernels()
    x, weight = drawn(70, 96), drawn(48, 96, seed=1)
    together = kernels.product(x, weight)
    assert all(torch.equal(kernels.product(x[i : i + 1], weight)[0], together[i]) for i in range(70))
    wider = drawn(70, 160)
    assert torch.equal(kernels.product(wider[:, 64:], weight), kernels.product(wider[:, 64:].contiguous(), weight))


@needs_kernels
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 1100])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 32), (96, 64), (64, 1536), (576, 576)])
def test_weight_gradients_are_exact_sums(tokens: int, outputs: int, inputs: int) -> None:
    """The first is written, the next is added; rows may lie apart, as those of queries, keys and values do."""
    kernels = native.kernels()
    by_output, more = drawn(tokens, outputs + 64)[:, 32:-32], drawn(tokens, inputs, seed=1)
    total = torch.full((outputs, inputs), torch.nan)
    assert kernels.weighs(by_output, more, total)
    kernels.weigh(by_output, more, total, fresh=True)
    exact = by_output.double().T @ more.double()
    scale = float(exact.abs().max())
    assert float((total - exact).abs().max()) < 1e-6 * scale
    kernels.weigh(by_output[: tokens // 2 + 1], more[: tokens // 2 + 1], total, fresh=False)
    exact += by_output[: tokens // 2 + 1].double().T @ more[: tokens // 2 + 1].double()
    assert float((total - exact).abs().max()) < 2e-6 * scale


@needs_kernels
def test_weight_gradients_are_the_same_with_any_number_of_threads() -> None:
    kernels, before = native.kernels(), torch.get_num_threads()
    by_output, inputs = drawn(70, 160), drawn(70, 96, seed=1)
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(torch.empty(160, 96))
            kernels.weigh(by_output, inputs, found[-1], fresh=True)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@needs_kernels
def test_what_does_not_fit_into_tiles_is_not_taken() -> None:
    weighs = native.Kernels.weighs
    by_output, inputs = drawn(5, 32), drawn(5, 64)
    assert weighs(by_output, inputs, torch.empty(32, 64))
    assert not weighs(drawn(5, 48), inputs, torch.empty(48, 64))
    assert not weighs(by_output.float(), inputs, torch.empty(32, 64))
    assert not weighs(by_output, inputs, torch.empty(32, 64, dtype=torch.float64))
    assert not weighs(by_output, inputs, torch.empty(64, 32).T)
    assert not weighs(by_output, inputs.T.contiguous().T, torch.empty(32, 64))


@needs_kernels
@pytest.mark.parametrize("masks", [1, 3])
def test_scores_are_shared_out_among_the_keys_that_are_seen(masks: int) -> None:
    matrices, repeats, queries, keys = 6, 2, 5, 64
    score = drawn(matrices, repeats, queries, keys, scale=4)
    score[4, 1, 2, 0] = torch.nan
    mask = torch.zeros(masks, queries, keys, dtype=torch.bfloat16)
    mask[drawn(masks, queries, keys, seed=1) > 0.5] = -torch.inf
    mask[:, :, 0] = 0
    mask[0, 3] = -torch.inf
    expected = torch.softmax(score.double() + mask.double().repeat(matrices // masks, 1, 1)[:, None], -1)
    assert native.Kernels.shares(score)
    native.kernels().share(score, mask)
    seen_nothing = torch.arange(0, matrices, masks)
    assert (score[seen_nothing, :, 3] == 0).all()
    expected[seen_nothing, :, 3] = 0
    assert score[4, 1, 2].isnan().any()
    score[4, 1, 2] = expected[4, 1, 2] = 0
    torch.testing.assert_close(score.double(), expected, rtol=2**-8, atol=0)
    assert not native.Kernels.shares(score[..., :40].contiguous())
    assert not native.Kernels.shares(score.float())


@needs_kernels
def test_gated_values_and_their_gradients_are_made_in_one_pass() -> None:
    kernels = native.kernels()
    gate, up, grad = (drawn(300, 48, seed=i, scale=8 if i == 0 else 1) for i in range(3))
    gate[0, :2] = torch.tensor([-200.0, 200.0])
    leaves = [x.double().requires_grad_() for x in (gate, up)]
    expected = torch.nn.functional.silu(leaves[0]) * leaves[1]
    expected.backward(grad.double())
    assert torch.equal(kernels.gated(gate, up), kernels.gate(torch.cat([gate, up], 1)))
    place = grad.data_ptr()
    inner, by_gate, by_up = kernels.regate(grad, gate, up)
    assert inner.data_ptr() == place
    for found, exact in ((inner, expected.detach()), (by_gate, leaves[0].grad), (by_up, leaves[1].grad)):
        torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-6)
    assert not native.Kernels.suits(gate[:, :40].contiguous(), up[:, :40].contiguous())
    assert not native.Kernels.suits(gate.float(), up.float())
    assert not native.Kernels.suits(gate[:, :16], up[:, :16])


@needs_kernels
def test_norms_add_and_scale_in_one_pass() -> None:
    kernels = native.kernels()
    x, more, weight = drawn(9, 96), drawn(9, 96, seed=1), drawn(96, seed=2)
    added = x + more
    wide = added.float()
    expected = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.float()).bfloat16()
    assert differing(kernels.norm(x, weight, 1e-5, more), expected) < 0.01
    assert torch.equal(x, added)
    assert differing(kernels.norm(x, weight, 1e-5), expected) < 0.01
    assert torch.equal(x, added)


def differing(a: Tensor, b: Tensor) -> float:
    """The share of numbers that are not the same; those are neighbours."""
    assert torch.allclose(a.float(), b.float(), rtol=2**-7, atol=0)
    return float((a != b).float().mean())


@needs_kernels
def test_heads_turn_as_transformers_turns_them() -> None:
    rows, heads, keys, size = 5, 3, 2, 64
    x, cos, sin = drawn(rows, (heads + 2 * keys) * size), drawn(rows, size, seed=1), drawn(rows, size, seed=2)
    q, k, v = (
        part.view(1, rows, -1, size).transpose(1, 2) for part in x.split([n * size for n in (heads, keys, keys)], 1)
    )
    expected = torch.cat([*apply_rotary_pos_emb(q, k, cos[None], sin[None]), v], 1)[0].transpose(0, 1)
    native.kernels().rotate(x, heads + keys, cos, sin)
    assert torch.equal(x.view_as(expected), expected)


@needs_kernels
def test_gates_hold_for_all_sizes_of_numbers() -> None:
    gate = torch.cat([drawn(4, 64, scale=3), torch.linspace(-300, 300, 64).bfloat16()[None]])
    up = drawn(5, 64, seed=1)
    expected = fused._gate(gate.float(), up.float()).bfloat16()
    found = native.kernels().gate(torch.cat([gate, up], 1))
    assert torch.allclose(found.float(), expected.float(), rtol=2**-7, atol=1e-30)


@needs_kernels
def test_threads_share_the_work_and_change_nothing() -> None:
    kernels, x, weight = native.kernels(), drawn(40, 576), drawn(208, 576, seed=1)
    z, uniform = torch.randn(9, 300), torch.rand(9, dtype=torch.float64)
    alone = kernels.product(x, weight), kernels.sample(z, uniform), attended(3)
    torch.set_num_threads(3)
    try:
        together = kernels.product(x, weight), kernels.sample(z, uniform), attended(3)
    finally:
        torch.set_num_threads(1)
    torch.testing.assert_close(together, alone, rtol=0, atol=0)


def attended(rows: int, wrong: int | None = None) -> Tensor:
    """Rows of one prompt of 40 tokens, with two tokens of their own before; `wrong`: a row whose query is no number."""
    heads, keys, size = 6, 2, 32
    q, k, v = drawn(rows, heads, size), drawn(rows, keys, size, seed=1), drawn(rows, keys, size, seed=2)
    if wrong is not None:
        q[wrong] = float("nan")
    prompt = drawn(1, keys, 64, size, seed=3), drawn(1, keys, 64, size, seed=4)
    own = drawn(rows, keys, 16, size, seed=5), drawn(rows, keys, 16, size, seed=6)
    numbers = np.arange(rows)
    places = native.Places(np.array([0, rows]), numbers, numbers, np.full(rows, 2), np.array([40]))
    out = torch.empty_like(q)
    native.kernels().attend((q, k, v), prompt, own, places, scaling=0.3, out=out)
    return out


@needs_kernels
def test_what_is_no_number_stays_in_its_row_and_is_seen_there() -> None:
    found, expected = attended(4, wrong=1), attended(4)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2, 3]], expected[[0, 2, 3]])


# ------------------------------------------------------------------------------ where there are none


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Nothing is compiled yet, on a processor that has everything."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True, "avx512_bf16": True})
    native.kernels.cache_clear()
    yield
    native.kernels.cache_clear()


def test_an_older_processor_is_named(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    with pytest.raises(native.UnavailableError, match="no amx_bf16"):
        native.kernels()


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, fresh: None, tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'unknown flag' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(native.UnavailableError, match="c\\+\\+: unknown flag"):
        native.kernels()
    assert not list(tmp_path.rglob("*.so"))


def test_a_machine_without_a_compiler_does_without_them(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda _: None)
    monkeypatch.setattr(fused, "compiled", fused.Kernels)
    policy = load.load_policy(config.Model(name="random-dense", compile=True, dtype="bfloat16", device="cpu"))
    assert policy.kernels is None
    assert "log-probabilities compiled; no kernels of its own: no C++ compiler" in policy.announcement


@needs_kernels
def test_they_are_compiled_once(monkeypatch: pytest.MonkeyPatch, fresh: None, tmp_path: Path) -> None:
    native.kernels()
    (made,) = tmp_path.rglob("*.so")
    native.kernels.cache_clear()
    ran: list[Any] = []
    run = subprocess.run
    monkeypatch.setattr(native.subprocess, "run", lambda command, **keys: ran.append(command) or run(command, **keys))
    native.kernels()
    assert [command[1:] for command in ran] == [["--version"]]
    assert list(tmp_path.rglob("*.so")) == [made]


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_the_kernels_compile_wherever_the_compiler_knows_the_instructions(tmp_path: Path) -> None:
    """Else a mistake in the source would only skip the tests of this file."""
    flags, sources = ["g++", *native._FLAGS], [str(x) for x in native._SOURCES if x.suffix == ".cpp"]
    if subprocess.run([*flags, "-x", "c++", "/dev/null", "-o", str(tmp_path / "empty.so")], check=False).returncode:
        pytest.skip("this g++ knows no AMX")
    made = subprocess.run([*flags, *sources, "-o", str(tmp_path / "kernels.so")], capture_output=True, text=True, check=False)  # fmt: skip
    assert made.returncode == 0, made.stderr

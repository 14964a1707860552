"""How a batch is laid out cannot change its loss or gradient, for any algorithm; and gradients against finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cases import Outcome, Padded, evaluate, random_batch, variant
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gspo.presets import PRESETS, Algorithm, advice

ROWS: dict[str, Algorithm] = {
    **PRESETS,
    "ppo_dual_clip": variant("ppo", weight_cap=1.5),
    "gspo_kl": variant("gspo", kl_coefficient=0.1),
    "grpo_k2": variant("grpo", kl_coefficient=0.1, kl_estimator="k2"),
    "gspo_token_truncate": variant("gspo", correction="token_truncate", correction_band=(1.1,)),
    "gspo_geometric": variant(
        "gspo", correction="sequence_geometric_mask", correction_band=(0.95, 1.1), clip_low=0.1, clip_high=0.1
    ),
    "grpo_product_mask": variant("grpo", correction="sequence_product_mask", correction_band=(0.6, 1.5)),
    "dapo_token_mask": variant("dapo", correction="token_mask", correction_band=(0.9, 1.2)),
    "gspo_rollout": variant("gspo", anchor="rollout", clip_low=0.1, clip_high=0.1),
    "gspo_sapo": Algorithm(
        ratio="sequence", gate="sapo", soft_positive=(1.0,), soft_negative=(2.0,), aggregation="sequence_mean", advantage="group_mean"
    ),
}  # fmt: skip


def same(a: Outcome, b: Outcome) -> None:
    scale = max(1.0, float(b.grad.abs().max()))
    assert a.loss == pytest.approx(b.loss, rel=1e-12, abs=1e-12)
    assert float((a.grad - b.grad).abs().max()) <= 1e-12 * scale
    assert a.tally.clip_rows == pytest.approx(b.tally.clip_rows, abs=1e-15)
    assert a.tally.clip_tokens == pytest.approx(b.tally.clip_tokens, abs=1e-15)
    assert a.tally.std_log_ratio_rows == pytest.approx(b.tally.std_log_ratio_rows, abs=1e-9)
    assert a.tally.kl == pytest.approx(b.tally.kl, abs=1e-12)


LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=5)
BATCHES = st.builds(random_batch, LENGTHS, st.integers(0, 2**20), drift=st.sampled_from([1e-4, 0.05, 0.5]))
EVERY_ROW = st.sampled_from(sorted(ROWS))


@given(BATCHES, EVERY_ROW, st.sampled_from([math.inf, -math.inf, math.nan, -1e4, 700.0]))
@settings(deadline=None, max_examples=60)
def test_what_is_outside_the_mask_does_not_matter(batch: Padded, name: str, garbage: float) -> None:
    outside = ~batch.mask
    dirty = {
        key: getattr(batch, key).masked_fill(outside, garbage)
        for key in ("logprob", "old", "rollout", "reference", "advantage")
    }
    got = evaluate(replace(batch, **dirty), ROWS[name])
    same(got, evaluate(batch, ROWS[name]))
    assert not got.grad[outside].any()


@given(BATCHES, EVERY_ROW, st.integers(0, 99))
@settings(deadline=None, max_examples=60)
def test_order_of_packed_tokens_does_not_matter(batch: Padded, name: str, seed: int) -> None:
    same(evaluate(batch, ROWS[name], shuffle=seed), evaluate(batch, ROWS[name]))


@given(BATCHES, EVERY_ROW, st.data())
@settings(deadline=None, max_examples=60)
def test_order_of_rows_and_split_into_micro_batches_do_not_matter(
    batch: Padded, name: str, data: st.DataObject
) -> None:
    rows = data.draw(st.permutations(range(len(batch.mask))))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(rows) - 1)))))
    parts = [rows[a:b] for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True) if rows[a:b]]
    same(evaluate(batch, ROWS[name], parts=parts), evaluate(batch, ROWS[name]))


@given(BATCHES, EVERY_ROW, st.data())
@settings(deadline=None, max_examples=60)
def test_two_shards_sum_to_the_whole(batch: Padded, name: str, data: st.DataObject) -> None:
    """Each rank runs its own rows in its own micro-batches and the gradients are summed: no rank knows another's rows."""
    first = data.draw(st.sets(st.sampled_from(range(len(batch.mask)))))
    ranks = [sorted(first), [s for s in range(len(batch.mask)) if s not in first]]
    shards = [evaluate(batch, ROWS[name], parts=[[s] for s in rank]) for rank in ranks]
    total = Outcome(
        sum(shard.loss for shard in shards),
        torch.stack([shard.grad for shard in shards]).sum(0),
        shards[0].tally + shards[1].tally,
    )
    same(total, evaluate(batch, ROWS[name]))


@given(LENGTHS, st.integers(0, 2**20), st.sampled_from(["grpo", "gspo_token", "dapo", "sapo", "cispo", "dppo"]))
@settings(deadline=None, max_examples=60)
def test_layout_does_not_matter_to_advantages_per_token(lengths: list[int], seed: int, name: str) -> None:
    batch = random_batch(lengths, seed, per_token=True)
    parts = [[s] for s in reversed(range(len(lengths)))]
    same(evaluate(batch, ROWS[name], parts=parts, shuffle=seed), evaluate(batch, ROWS[name]))


@pytest.mark.parametrize("name", ["gspo_kl", "minirl", "dppo", "gspo_token_truncate"])
def test_only_the_trained_policy_gets_a_gradient(name: str) -> None:
    """Whatever graph the other inputs carry: a critic's advantages, say, are not trained through the policy's loss."""
    batch = random_batch([3, 2], seed=0)
    others = {key: getattr(batch, key).clone().requires_grad_() for key in ("old", "rollout", "reference", "advantage")}
    evaluate(replace(batch, **others), ROWS[name])
    assert all(other.grad is None for other in others.values())


@pytest.mark.parametrize("name", sorted(ROWS))
def test_float32_follows_float64(name: str) -> None:
    batch = random_batch([4, 3, 6, 2], seed=3, drift=0.05)
    single = {key: getattr(batch, key).float() for key in ("logprob", "old", "rollout", "reference", "advantage")}
    exact = evaluate(replace(batch, **{key: x.double() for key, x in single.items()}), ROWS[name])
    got = evaluate(replace(batch, **single), ROWS[name])
    assert got.loss == pytest.approx(exact.loss, abs=2e-6)
    assert float((got.grad - exact.grad).abs().max()) <= 2e-6
    # Advantages and weights may stay in float64 beside float32 log-probabilities.
    mixed = evaluate(replace(batch, **single | {"advantage": batch.advantage}), ROWS[name])
    assert float((mixed.grad - got.grad).abs().max()) <= 2e-6


# ------------------------------------------------------------------------------ GSPO by itself


def rows_of(log_ratio: list[list[float]], advantage: list[float]) -> Padded:
    """Rows of any length from their token log ratios."""
    width = max(map(len, log_ratio))
    mask = torch.tensor([[t < len(row) for t in range(width)] for row in log_ratio])
    log = torch.tensor([row + [0.0] * (width - len(row)) for row in log_ratio], dtype=torch.float64)
    old = torch.full_like(log, -1.0)
    per_token = torch.tensor(advantage, dtype=torch.float64)[:, None].expand(log.shape)
    return Padded(old + log, old, old, None, per_token, mask)


def test_gspo_does_not_weigh_by_length() -> None:
    """huggingface/trl#3823: lengths 2 and 6, ratio 1, advantages +1 and -1; weighed by length the loss is +0.5."""
    batch = rows_of([[0.0] * 2, [0.0] * 6], [1.0, -1.0])
    assert evaluate(batch, PRESETS["gspo"]).loss == pytest.approx(0.0, abs=1e-15)
    by_length = evaluate(batch, PRESETS["gspo"].model_copy(update={"aggregation": "token_mean"}))
    assert by_length.loss == pytest.approx(0.5)


@given(st.lists(st.lists(st.floats(-1e-3, 1e-3), min_size=1, max_size=5), min_size=1, max_size=4), st.integers(2, 4))
@settings(deadline=None, max_examples=60)
def test_gspo_does_not_depend_on_length(rows: list[list[float]], times: int) -> None:
    """Every token repeated: the same loss, and each token's gradient divided by the repetitions."""
    advantage = [(-1.0) ** s * (1 + s / 4) for s in range(len(rows))]
    once = rows_of(rows, advantage)
    repeated = rows_of([row * times for row in rows], advantage)
    a, b = evaluate(once, PRESETS["gspo"]), evaluate(repeated, PRESETS["gspo"])
    if any(abs(a_edge) < 1e-9 for row in rows for a_edge in edges(row)):
        return  # a tie that rounding may decide otherwise
    assert b.loss == pytest.approx(a.loss, abs=1e-12)
    for s, row in enumerate(rows):
        expected = [g / times for g in a.grad[s, : len(row)].tolist()] * times
        assert b.grad[s, : len(expected)].tolist() == pytest.approx(expected, abs=1e-12)


def edges(row: list[float]) -> tuple[float, float]:
    ratio = math.exp(math.fsum(row) / len(row))
    return ratio - (1 + 4e-4), ratio - (1 - 3e-4)


def test_gspo_as_it_comes_clips_at_its_own_band() -> None:
    """huggingface/trl#3834: ten tokens of log ratio +0.01; with PPO's 0.2 the band never binds."""
    up = evaluate(rows_of([[0.01] * 10], [1.0]), PRESETS["gspo"])
    assert up.loss == pytest.approx(-1.0004, abs=1e-15)
    assert not up.grad.any()
    assert (up.tally.clip_rows, up.tally.clip_tokens, up.tally.rows_upper_positive) == (1.0, 1.0, 1)

    down = evaluate(rows_of([[0.01] * 10], [-1.0]), PRESETS["gspo"])
    assert down.loss == pytest.approx(math.exp(0.01), abs=1e-14)
    assert down.grad[0].tolist() == pytest.approx([math.exp(0.01) / 10] * 10, abs=1e-15)
    assert down.tally.clip_rows == 0.0

    loose = variant("gspo", clip_low=0.2, clip_high=0.2)
    assert evaluate(rows_of([[0.01] * 10], [1.0]), loose).tally.clip_rows == 0.0
    assert any("practically never binds" in sentence for sentence in advice(loose))


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "grpo", "sapo", "gmpo"])
def test_on_policy_gradients_coincide(name: str) -> None:
    """Ratio 1 everywhere: the gradient of row s is -A / (S n), whatever stands between."""
    batch = random_batch([3, 5, 2], seed=1, drift=0.0)
    got = evaluate(batch, PRESETS[name])
    expected = torch.where(batch.mask, -batch.advantage / (3 * batch.mask.sum(1, keepdim=True)), 0.0)
    assert float((got.grad - expected).abs().max()) <= 1e-15
    assert got.tally.clip_tokens == 0.0


# ------------------------------------------------------------------------------ gradients

Frozen = Callable[[Tensor, Tensor, Padded, Algorithm], Tensor]
"""(x, x0, batch, row) -> objective per token, where what the paper detaches reads x0 instead of x."""


def _cispo(x: Tensor, x0: Tensor, batch: Padded, row: Algorithm) -> Tensor:
    return (x0 - batch.old).exp().clamp(max=1 + row.clip_high) * x


def _minirl(x: Tensor, x0: Tensor, batch: Padded, row: Algorithm) -> Tensor:
    ratio, weight = (x0 - batch.old).exp(), (x0 - batch.rollout).exp()
    positive = batch.advantage > 0
    inside = torch.where(positive, ratio <= 1 + row.clip_high, ratio >= 1 - row.clip_low)
    return inside * weight.clamp(max=row.weight_cap) * x


def _vespo(x: Tensor, x0: Tensor, batch: Padded, row: Algorithm) -> Tensor:
    w = torch.where(batch.mask, x0 - batch.old, 0.0).sum(1, keepdim=True).exp()
    (k, decay), (k_minus, decay_minus) = row.soft_positive, row.soft_negative
    up = w**k * (decay * (1 - w)).exp()
    down = w**k_minus * (decay_minus * (1 - w)).exp()
    return torch.where(batch.advantage > 0, up, down) * x


def _gspo_token(x: Tensor, x0: Tensor, batch: Padded, row: Algorithm) -> Tensor:
    log = torch.where(batch.mask, x0 - batch.old, 0.0).sum(1, keepdim=True) / batch.mask.sum(1, keepdim=True)
    ratio = log.exp() * (x - x0).exp()
    clipped = ratio.clamp(1 - row.clip_low, 1 + row.clip_high)
    positive = batch.advantage > 0
    return torch.where(positive, torch.minimum(ratio, clipped), torch.maximum(ratio, clipped))


def _dppo(x: Tensor, x0: Tensor, batch: Padded, row: Algorithm) -> Tensor:
    moved, r0 = x0.exp() - batch.rollout.exp(), (x0 - batch.rollout).exp()
    inside = torch.where(batch.advantage > 0, moved <= row.clip_high, moved >= -row.clip_low)
    return inside * (x - batch.rollout).exp() * r0.clamp(max=row.weight_cap) / r0


FROZEN: dict[str, Frozen] = {
    "cispo": _cispo, "minirl": _minirl, "vespo": _vespo, "gspo_token": _gspo_token, "dppo": _dppo,
    "dppo_capped": _dppo, "minirl_capped": _minirl,
}  # fmt: skip
CAPPED = {
    "dppo_capped": variant("dppo", weight_cap=0.9),
    "minirl_capped": variant("minirl", weight_cap=0.9),
    "gspo_wide": variant("gspo", clip_low=0.02, clip_high=0.03),
    "grpo_k3_corrected": variant("grpo", kl_coefficient=0.5),
    "luspo_wide": variant("luspo", clip_low=0.02, clip_high=0.03),
}


def scale(batch: Padded, row: Algorithm) -> Tensor:
    """The aggregation's weights by their definition."""
    n, s, total = batch.mask.sum(1, keepdim=True), len(batch.mask), int(batch.mask.sum())
    per_token = torch.ones_like(batch.old)
    by_name = {"sequence_mean": per_token / (s * n), "token_mean": per_token / total, "sequence_sum": per_token / s}
    return by_name[row.aggregation]


def value(x: Tensor, batch: Padded, name: str, row: Algorithm) -> float:
    if name not in FROZEN:
        return evaluate(replace(batch, logprob=x), row).loss
    term = FROZEN[name](x, batch.logprob, batch, row) * batch.advantage * scale(batch, row)
    return -float(term[batch.mask].sum())


@pytest.mark.parametrize("name", sorted({**ROWS, **CAPPED}))
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gradient_is_that_of_the_paper_by_finite_differences(name: str, seed: int) -> None:
    row = {**ROWS, **CAPPED}[name]
    batch = random_batch([3, 2, 4], seed=seed, drift=0.2)
    got = evaluate(batch, row)
    assert got.loss == pytest.approx(value(batch.logprob, batch, name, row), abs=1e-12)
    h = 1e-6
    for s, t in batch.mask.nonzero().tolist():
        up, down = batch.logprob.clone(), batch.logprob.clone()
        up[s, t] += h
        down[s, t] -= h
        slope = (value(up, batch, name, row) - value(down, batch, name, row)) / (2 * h)
        assert float(got.grad[s, t]) == pytest.approx(slope, rel=2e-6, abs=2e-8), (s, t)

"""Every recorded case against every loss: value, gradient and clip share; then the recorded sections beside them."""

from __future__ import annotations

import pytest
import torch
from cases import LOSSES, Outcome, Padded, case, case_names, evaluate, padded_case, recorded, row_of, variant

from gspo.algorithms.losses import correction_weight, kl_term
from gspo.algorithms.segments import segment_mean, segment_sum


def close(value: object, expected: object, tolerance: float) -> None:
    """Within `tolerance` of the largest number expected, or of 1."""
    a, b = torch.as_tensor(value, dtype=torch.float64), torch.as_tensor(expected, dtype=torch.float64)
    bound = tolerance * max(1.0, float(b.abs().max()) if b.numel() else 1.0)
    assert a.shape == b.shape
    assert torch.isfinite(a).all()
    assert b.numel() == 0 or float((a - b).abs().max()) <= bound, f"{a} is not {b}"


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", case_names())
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_loss_and_gradient_of_every_recorded_case(name: str, loss: str, dtype: torch.dtype, tolerance: float) -> None:
    inputs, expected = case(name)["inputs"], case(name)["results"][loss]
    got = evaluate(padded_case(loss, inputs, dtype), row_of(loss, inputs))
    close(got.loss, expected["loss"], tolerance)
    close(got.grad, expected["grad"], tolerance)


def lost_by_gradient(batch: Padded, expected: dict) -> tuple[float, float]:
    """Shares of tokens and of rows that have a non-zero advantage and, as recorded, no gradient."""
    active = batch.mask & (batch.advantage != 0)
    lost = active & (torch.tensor(expected["grad"]) == 0)
    rows = active.any(1)
    row_lost = rows & (active == lost).all(1)
    return float(lost.sum()) / max(1, int(active.sum())), float(row_lost.sum()) / max(1, int(rows.sum()))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", case_names())
def test_clip_share_is_the_share_that_lost_its_gradient(name: str, loss: str) -> None:
    """Taken from the recorded gradient, not from the recorded clip fraction, which counts some things otherwise: see below."""
    inputs, expected = case(name)["inputs"], case(name)["results"][loss]
    batch = padded_case(loss, inputs)
    tally = evaluate(batch, row_of(loss, inputs)).tally
    tokens, rows = lost_by_gradient(batch, expected)
    assert tally.clip_tokens == pytest.approx(tokens, abs=1e-15)
    assert tally.clip_rows == pytest.approx(rows, abs=1e-15)


# The record counts PPO's clip without its dual clip, CISPO's capped weights although their gradient goes on,
# and rows whose advantage is 0 in the denominator. The share that lost its gradient is:
COUNTED_OTHERWISE = {
    ("V07_outlier_token_neg", "ppo"): 0.25,
    ("V15_huge_ratio_negative_adv", "ppo"): 1.0,
    ("V15_huge_ratio_negative_adv", "cispo"): 0.0,
}


@pytest.mark.parametrize(("name", "loss"), [(n, a) for n in case_names() for a in LOSSES])
def test_clip_share_agrees_with_the_recorded_one_where_both_count_alike(name: str, loss: str) -> None:
    inputs, fraction = case(name)["inputs"], case(name)["results"][loss].get("clip_frac")
    if fraction is None:
        fraction = {"tok": 1.0 if name.startswith("V15") else 0.0}  # soft gates: only V15 is flat to the last bit
    batch = padded_case(loss, inputs)
    tally = evaluate(batch, row_of(loss, inputs)).tally
    if (name, loss) in COUNTED_OTHERWISE:
        assert tally.clip_tokens == COUNTED_OTHERWISE[name, loss] != fraction["tok"]
        return
    with_advantage = int((batch.mask & (batch.advantage != 0)).sum()) / max(1, int(batch.mask.sum()))
    assert tally.clip_tokens * with_advantage == pytest.approx(fraction["tok"], abs=1e-15)


def test_gspo_and_gspo_token_differ_only_by_token_advantages() -> None:
    inputs = case("V14_per_token_advantages")["inputs"]
    token = evaluate(padded_case("gspo_token", inputs), row_of("gspo_token", inputs))
    assert token.grad[0].tolist() == pytest.approx([-0.25, 0.125, -0.0625, 0.0625], abs=1e-4)
    same = padded_case("gspo", inputs)
    plain, other = evaluate(same, row_of("gspo", inputs)), evaluate(same, row_of("gspo_token", inputs))
    close(other.loss, plain.loss, 1e-14)
    close(other.grad, plain.grad, 1e-14)


def test_a_tie_keeps_its_whole_gradient() -> None:
    inputs = case("V05_exact_boundary")["inputs"]
    got = evaluate(padded_case("gspo", inputs), row_of("gspo", inputs))
    assert got.grad.tolist() == [[-0.25, -0.25], [0.25, 0.25]]
    assert got.tally.clip_rows == 0.0


# ------------------------------------------------------------------------------ splits


@pytest.mark.parametrize(("split", "parts"), [("split_1_3", [[0], [1, 2, 3]]), ("split_2_2", [[0, 1], [2, 3]])])
def test_micro_batches_sum_to_the_loss_of_the_whole(split: str, parts: list[list[int]]) -> None:
    section = recorded()["microbatch_and_context_parallel"]
    inputs = case(section["case"])["inputs"]
    sequence = evaluate(padded_case("gspo", inputs), row_of("gspo", inputs), parts=parts)
    token = evaluate(padded_case("dapo", inputs), row_of("dapo", inputs), parts=parts)
    close(sequence.loss, section[split]["correct_seq_sum_of_parts"], 1e-12)
    close(token.loss, section[split]["correct_tok_sum_of_parts"], 1e-12)
    assert abs(sequence.loss - section[split]["LOCAL_seq_mean_summed_no_div"]) > 1e-3
    assert abs(token.loss - section[split]["LOCAL_tok_mean_then_avg"]) > 1e-3


def test_the_ratio_is_of_the_whole_row() -> None:
    section = recorded()["microbatch_and_context_parallel"]["cp2"]
    batch = padded_case("gspo", case("V03_token_clip_mix")["inputs"])
    sequence_N, _ = batch.mask.nonzero(as_tuple=True)
    ratio_S = segment_mean((batch.logprob - batch.old)[batch.mask], sequence_N, 4).exp()
    close(ratio_S, section["full_row_ratio"], 1e-12)
    assert abs(float(ratio_S[0]) - section["WRONG_rank0_ratio"][0]) > 1e-3


# ------------------------------------------------------------------------------ mismatch correction

CORRECTIONS = [
    ("token_truncate", None, 2.0, "tis_token_C2"),
    ("token_mask", 0.5, 2.0, "mis_token_0p5_2"),
    ("sequence_product_truncate", None, 2.0, "tis_seq_product_C2"),
    ("sequence_product_mask", 0.5, 2.0, "mis_seq_product_0p5_2"),
    ("sequence_geometric_mask", 0.99, 1.01, "keep_seq_geometric_0p99_1p01"),
    ("sequence_geometric_mask", 0.999, 1.002, "keep_seq_geometric_0p999_1p002"),
]


@pytest.mark.parametrize(("correction", "low", "high", "key"), CORRECTIONS)
def test_correction_weights(correction: str, low: float | None, high: float, key: str) -> None:
    section = recorded()["rollout_correction"]
    batch = padded_case("gspo", case(section["case"])["inputs"])
    row = variant(
        "grpo",
        correction=correction,
        correction_band=(high,) if low is None else (low, high),
        clip_low=9.0,
        clip_high=9.0,
    )
    sequence_N, _ = batch.mask.nonzero(as_tuple=True)
    weight_N = correction_weight(row, batch.old[batch.mask], batch.rollout[batch.mask], sequence_N, 4)
    expected = torch.tensor(section[key], dtype=torch.float64)
    expected_N = expected[sequence_N] if expected.ndim == 1 else expected[batch.mask]
    close(weight_N, expected_N, 1e-12)

    plain = evaluate(batch, row.model_copy(update={"correction": "none"}))
    corrected = evaluate(batch, row)
    full = torch.zeros_like(batch.old).masked_scatter(batch.mask, expected_N)
    close(corrected.grad, plain.grad * full, 1e-12)
    assert corrected.tally.tokens_dropped == int((expected_N == 0).sum())


def test_correction_carries_no_gradient_and_leaves_the_ratio_alone() -> None:
    """A correction that swapped old for rollout inside GSPO's ratio has been seen (OpenRLHF 0.11.2)."""
    wrong = recorded()["known_wrong"]["openrlhf_gspo_is_correction_swaps_old_for_rollout"]
    batch = padded_case("gspo", case(wrong["case"])["inputs"])
    row = variant("gspo", correction="token_truncate", correction_band=(2.0,))
    log_s = torch.tensor(wrong["right_seq_ratio"], dtype=torch.float64).log()
    swapped = torch.tensor(wrong["wrong_seq_ratio"], dtype=torch.float64).log()
    sequence_N, _ = batch.mask.nonzero(as_tuple=True)
    old_N = batch.old[batch.mask].requires_grad_()
    assert not correction_weight(row, old_N, batch.rollout[batch.mask], sequence_N, 4).requires_grad
    got = evaluate(batch, row).tally.log_ratio_rows_sum
    assert got == pytest.approx(float(log_s.sum()), abs=1e-12)
    assert got != pytest.approx(float(swapped.sum()), abs=1e-3)


# ------------------------------------------------------------------------------ KL


@pytest.mark.parametrize(
    ("estimator", "key"), [("k1", "k1"), ("k2", "k2"), ("k3", "k3"), ("k3_corrected", "k3_is_corrected")]
)
def test_kl_estimators(estimator: str, key: str) -> None:
    section = recorded()["kl"]
    logprob_N, old_N, reference_N = (
        torch.tensor(section[k], dtype=torch.float64) for k in ("logp", "logp_old", "ref_logp")
    )
    logprob_N.requires_grad_()
    term_N = kl_term(estimator, logprob_N, old_N, reference_N)
    (grad_N,) = torch.autograd.grad(term_N.sum(), logprob_N)
    close(term_N.detach(), section[key], 1e-12)
    close(grad_N, section[f"{key}_grad"], 1e-12)
    if estimator == "k3_corrected":
        close(grad_N, section["identity_w_times_d"], 1e-12)


# ------------------------------------------------------------------------------ faults of other tools, as numbers


def wrong(key: str) -> dict:
    return recorded()["known_wrong"][key]


def of_case(name: str, loss: str, **keys: object) -> Outcome:
    inputs = case(name)["inputs"]
    row = row_of(loss, inputs)
    return evaluate(padded_case(loss, inputs), row.model_copy(update=keys))


def small(log_ratio: list[list[float]], advantage: list[float]) -> Padded:
    log = torch.tensor(log_ratio, dtype=torch.float64)
    old = torch.full_like(log, -1.0)
    per_token = torch.tensor(advantage, dtype=torch.float64)[:, None].expand(log.shape)
    return Padded(old + log, old, old, None, per_token, torch.ones_like(log, dtype=torch.bool))


def test_gspo_rows_count_alike_whatever_their_length() -> None:
    known = wrong("gspo_token_mean_aggregation")
    close(of_case(known["case"], "gspo").loss, known["right"], 1e-12)
    close(of_case(known["case"], "gspo", aggregation="token_mean").loss, known["wrong"], 1e-12)


def test_clip_of_ppo_never_binds_on_a_sequence_ratio() -> None:
    known = wrong("gspo_with_ppo_clip_0p2")
    assert of_case(known["case"], "gspo").tally.clip_rows == known["clip_frac_right"]
    loose = of_case(known["case"], "gspo", clip_low=0.2, clip_high=0.2)
    assert loose.tally.clip_rows == known["clip_frac_wrong"]


def test_no_dual_clip_unless_asked_for() -> None:
    known = wrong("roll_dual_clip_1_plus_2eps")
    batch = small([[float(torch.tensor(known["s"], dtype=torch.float64).log())] * 3], [known["A"]])
    got = evaluate(batch, variant("gspo"))
    close(got.loss, known["loss_gspo"], 1e-12)
    close(got.grad.sum(), known["dloss_dlogs_gspo"], 1e-12)
    assert abs(got.loss - known["loss_roll"]) > 1e-4


def test_no_clamp_silences_a_large_log_ratio() -> None:
    known = wrong("log_ratio_clamp_10")
    got = of_case(known["case"], "gspo")
    assert got.loss == pytest.approx(known["right_loss"], rel=1e-12)
    assert got.grad.tolist() == [pytest.approx([known["right_grad_per_token"]] * 2, rel=1e-12)]


def test_mean_of_a_row_does_not_broadcast_over_rows() -> None:
    known = wrong("swift_precedence_bug")
    mask = torch.tensor(known["mask"]) > 0
    sequence_N, _ = mask.nonzero(as_tuple=True)
    mean_S = segment_mean(torch.tensor(known["log_ratio"], dtype=torch.float64)[mask], sequence_N, 2)
    close(mean_S[:, None], known["right"], 1e-12)


def test_engine_log_probabilities_as_old_clip_negative_rows_before_any_update() -> None:
    known = wrong("inference_logps_as_old_with_3e4_band")
    tally = of_case(known["case"], "gspo").tally
    assert (tally.rows, tally.rows_lower_negative, tally.rows_upper_positive) == (4, 2, 0)
    assert known["clip_frac_neg_rows"] == 1.0
    assert known["clip_frac_pos_rows"] == 0.0


def test_cispo_band_is_a_distance_from_one() -> None:
    known = wrong("trl_cispo_eps_high_is_absolute")
    got = evaluate(small([[0.0, 0.0]], [1.0]), variant("cispo"))
    close(-2 * got.grad[0], [known["weight_right_eps4"]] * 2, 1e-15)


def test_token_mean_divides_what_it_sums() -> None:
    known = wrong("roll_token_mean_ignores_mask")
    batch = small([[0.0, 0.0, 0.0]], [-1.0])
    mask = torch.tensor(known["mask"]) > 0
    terms = Padded(batch.logprob, batch.old, batch.rollout, None, -torch.tensor(known["loss_mat"]).double(), mask)
    close(evaluate(terms, variant("dapo")).loss, known["right"], 1e-12)


def test_equal_micro_batches_do_not_multiply_the_gradient() -> None:
    """verl-project/verl#7913: a mean per micro-batch, summed, gives as many times the gradient."""
    known = wrong("verl_geo_mean_micro_batches")
    count = known["sequences"]
    batch = small([[0.01 * s, -0.02 * s] for s in range(count)], [(-1.0) ** s for s in range(count)])
    size = count // known["micro_batches"]
    parts = [list(range(at, at + size)) for at in range(0, count, size)]
    whole, split = evaluate(batch, variant("gmpo")), evaluate(batch, variant("gmpo"), parts=parts)
    close(split.grad, whole.grad, 1e-14)
    assert float(whole.grad.abs().sum()) > 0.5


def test_luspo_weighs_a_row_by_its_length_once() -> None:
    known = wrong("luspo_b_t_broadcast")
    mask = torch.tensor(known["mask"]) > 0
    x = torch.tensor(known["x"], dtype=torch.float64)
    zero = torch.zeros_like(x)
    close(evaluate(Padded(zero, zero, zero, None, -x, mask), variant("luspo")).loss, known["right"], 1e-12)


def test_sum_and_mean_of_the_recorded_mismatch() -> None:
    section = recorded()["rollout_correction"]
    batch = padded_case("gspo", case(section["case"])["inputs"])
    sequence_N, _ = batch.mask.nonzero(as_tuple=True)
    log_N = torch.tensor(section["log_ratio"], dtype=torch.float64)[batch.mask]
    close(segment_sum(log_N, sequence_N, 4).exp(), section["seq_product"], 1e-12)
    close(segment_mean(log_N, sequence_N, 4).exp(), section["seq_geometric"], 1e-12)

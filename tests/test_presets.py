"""The table of algorithms: every row is valid, every contradiction is refused with its reason."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from gspo.errors import InputError
from gspo.presets import PRESETS, Algorithm, advice, resolve

OWN = {
    "ratio": "sequence",
    "gate": "clip",
    "clip_low": 2e-3,
    "clip_high": 2.5e-3,
    "aggregation": "sequence_sum",
    "advantage": "leave_one_out",
}
"""A row of one's own, to be varied."""  # fmt: skip


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_valid_named_and_has_a_source(name: str) -> None:
    row = PRESETS[name]
    assert row.name == name
    assert "arXiv" in row.source
    assert Algorithm(**row.model_dump()) == row
    assert resolve(name, {}) == row
    assert not row.needs_reference


def test_the_papers_numbers() -> None:
    gspo, grpo = PRESETS["gspo"], PRESETS["grpo"]
    assert (gspo.clip_low, gspo.clip_high, gspo.ratio, gspo.aggregation) == (3e-4, 4e-4, "sequence", "sequence_mean")
    assert (gspo.updates_per_step, gspo.kl_coefficient, gspo.advantage) == (4, 0.0, "group_mean_std")
    assert (grpo.clip_low, grpo.clip_high, grpo.ratio, grpo.updates_per_step) == (0.2, 0.27, "token", 4)
    assert all(row.weight_cap is None for row in PRESETS.values() if row.gate == "clip")


def test_a_row_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        PRESETS["gspo"].clip_low = 0.2  # type: ignore[misc]


REFUSED = [
    # a gate without what it reads, or with what it does not read
    ({"clip_low": None}, "gate=clip needs clip_low"),
    ({"clip_high": None}, "gate=clip needs clip_high"),
    ({"weight_cap": 1.0}, "give it more than 1"),
    ({"soft_positive": (1.0,)}, "soft_positive has no effect with gate=clip"),
    ({"gate": "none"}, "clip_low has no effect with gate=none, which reads nothing"),
    ({"gate": "cispo", "weight_cap": 3.0}, "weight_cap has no effect with gate=cispo, which reads clip_low, clip_high"),
    ({"gate": "minirl", "ratio": "token"}, "gate=minirl needs weight_cap"),
    ({"gate": "sapo", "clip_low": None, "clip_high": None}, "gate=sapo needs soft_positive"),
    (
        {"gate": "sapo", "clip_low": None, "clip_high": None, "soft_positive": (1.0, 2.0), "soft_negative": (1.0,)},
        "gate=sapo needs 1 number",
    ),
    (
        {"gate": "vespo", "ratio": "sequence_product", "clip_low": None, "clip_high": None, "soft_positive": (1.0,), "soft_negative": (1.0,)},
        "gate=vespo needs 2 number",
    ),
    # a gate on a ratio that it is not defined on
    ({"gate": "gmpo"}, "gate=gmpo is defined on ratio=token, not on ratio=sequence"),
    ({"gate": "dppo"}, "gate=dppo is defined on ratio=token"),
    ({"gate": "minirl", "weight_cap": 5.0}, "gate=minirl is defined on ratio=token"),
    (
        {"gate": "vespo", "clip_low": None, "clip_high": None, "soft_positive": (1.0, 1.0), "soft_negative": (1.0, 1.0)},
        "gate=vespo is defined on ratio=sequence_product",
    ),
    # the aggregation's constant
    ({"kl_estimator": "k3"}, "kl_estimator and kl_in have no effect with kl_coefficient=0"),
    ({"advantage": "group_mean", "advantage_ddof": 0}, "no effect with advantage=group_mean, which divides by no deviation"),
    ({"length_constant": 10}, "length_constant has no effect with aggregation=sequence_sum"),
    # KL
    ({"kl_coefficient": 0.1, "kl_estimator": "k1"}, "zero expected gradient"),
    ({"kl_coefficient": 0.1, "kl_in": "reward"}, "use kl_estimator=k1 with kl_in=reward"),
    # mismatch correction
    ({"correction_band": (2.0,)}, "correction_band has no effect with correction=none"),
    ({"correction": "token_truncate"}, "correction=token_truncate needs correction_band=[cap]"),
    ({"correction": "token_mask", "correction_band": (2.0,)}, "correction=token_mask needs correction_band=[low, high]"),
    ({"correction": "token_truncate", "correction_band": (0.5, 2.0)}, "correction=token_truncate needs correction_band=[cap]"),
    ({"correction": "token_truncate", "correction_band": (2.0,), "anchor": "rollout"}, "set anchor=old"),
    # numbers and words
    ({"clip_low": -0.1}, "greater than or equal to 0"),
    ({"weight_cap": 0.0}, "greater than 0"),
    ({"updates_per_step": 0}, "greater than or equal to 1"),
    ({"gate": "clipp"}, "Input should be"),
    ({"epsilon": 0.2}, "Extra inputs are not permitted"),
]  # fmt: skip


def test_the_row_that_is_varied_is_valid() -> None:
    assert Algorithm(**OWN).name == "custom"


@pytest.mark.parametrize(("keys", "reason"), REFUSED)
def test_a_row_that_makes_no_sense_is_refused_with_the_reason(keys: dict, reason: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Algorithm(**(OWN | keys))
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("name", "keys", "reasons"),
    [
        ("gspo", {"aggregation": "token_mean"}, ["gspo is defined by aggregation=sequence_mean", "2507.18071", "long answer"]),
        ("gspo", {"ratio": "token"}, ["gspo is defined by ratio=sequence", "algorithm=grpo is exactly that"]),
        ("gspo", {"aggregation": "sequence_sum"}, ["algorithm=luspo is exactly that"]),
        ("grpo", {"advantage": "leave_one_out"}, ["grpo is defined by advantage=group_mean_std", "a name of its own"]),
        ("dapo", {"aggregation": "sequence_mean"}, ["dapo is defined by aggregation=token_mean"]),
        ("rloo", {"gate": "clip", "clip_low": 0.2, "clip_high": 0.2}, ["rloo is defined by gate=none"]),
    ],
)  # fmt: skip
def test_a_presets_name_keeps_its_definition(name: str, keys: dict, reasons: list[str]) -> None:
    with pytest.raises(ValidationError) as refused:
        resolve(name, keys)
    for reason in reasons:
        assert reason in str(refused.value)


def test_resolve_lays_keys_over_a_preset() -> None:
    row = resolve("gspo", {"clip_high": 5e-4, "kl_coefficient": 0.01})
    assert row == PRESETS["gspo"].model_copy(update={"clip_high": 5e-4, "kl_coefficient": 0.01})
    assert row.needs_reference
    assert not row.needs_signal


def test_resolve_takes_a_new_row_whole() -> None:
    assert resolve("gspo-sum", OWN) == Algorithm(name="gspo-sum", **OWN)


def test_resolve_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"algorithm=gsop: no such algorithm; did you mean 'gspo'\?"):
        resolve("gsop", {})
    with pytest.raises(InputError, match="A row of your own needs ratio, gate, aggregation, advantage"):
        resolve("mine", {"ratio": "token", "gate": "none"})


def test_needs_signal() -> None:
    assert PRESETS["gspo"].needs_signal
    assert not Algorithm(**(OWN | {"advantage": "batch_mean_std"})).needs_signal
    assert not resolve("gspo", {"kl_coefficient": 0.1}).needs_signal


# ------------------------------------------------------------------------------ advice


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_as_they_come_need_no_advice(name: str) -> None:
    assert advice(PRESETS[name]) == []


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        ("gspo", {"clip_low": 0.2, "clip_high": 0.2}, "clip 0.2/0.2 on a sequence ratio practically never binds"),
        ("gspo_token", {"clip_high": 0.2}, "practically never binds"),
        ("gspo", {"updates_per_step": 1}, "GSPO equals GRPO"),
        ("grpo", {"updates_per_step": 1}, "clipping is inactive"),
        ("gspo", {"anchor": "rollout"}, "exceeds a third of the clip band"),
        ("grpo", {"kl_coefficient": 0.1, "kl_estimator": "k3"}, "forward KL"),
    ],
)
def test_what_is_legal_but_unwise_is_said(name: str, keys: dict, said: str) -> None:
    (sentence,) = advice(resolve(name, keys))
    assert said in sentence


def test_ppos_clip_is_no_matter_on_a_token_ratio() -> None:
    assert advice(resolve("grpo", {"clip_low": 0.2, "clip_high": 0.2})) == []


def test_the_table_loads_no_torch() -> None:
    code = "import sys, gspo.presets; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""Learning rates that hold where none is set."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo import rates
from gspo.config import Run
from gspo.stage_config import RewardRun, Sft


def test_each_stage_has_its_own() -> None:
    found = [kind().optimizer.learning_rate for kind in (Run, Sft, RewardRun)]
    assert found == [rates.POLICY, rates.ANSWERS, rates.PREFERENCES]
    assert rates.POLICY < rates.PREFERENCES < rates.ANSWERS


def test_that_of_an_adapter_grows_as_the_model_gets_narrower() -> None:
    assert rates.of_adapter(1e-6, 2000) == pytest.approx(1e-5)
    assert rates.of_adapter(2e-5, 500) == pytest.approx(4e-4)


@given(st.integers(16, 20_000), st.sampled_from([rates.POLICY, rates.ANSWERS, rates.PREFERENCES]))
def test_that_of_all_weights_is_found_again(width: int, full: float) -> None:
    assert rates.of_all_weights(rates.of_adapter(full, width), width) == pytest.approx(full, rel=0.06)

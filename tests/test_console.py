"""Lines of the console that are easy to read wrong."""

from __future__ import annotations

import io
from typing import Any

import pytest

from gspo.console import Console, between

STEP: dict[str, Any] = {
    "step": 3, "reward/mean": -0.0001, "time/step": 2.0, "ratio": "token", "clip/tokens": 0.01, "truncated/share": 0.0, "grad_norm": 0.5,
    "weights/relative": 1e-4, "time/tokens_per_second": 900.0, "groups/signal": 2, "groups/total": 4, "groups/drawn": 4, "groups/replaced": 0,
    "prompts/skipped": 0, "rollouts/judged": 16, "rollouts/total": 16, "value/mean": None, "verdict": "", "verdict/kind": "learning",
    "verdict/warning": False,
}  # fmt: skip


def line(**changes: Any) -> str:
    stream = io.StringIO()
    Console(8, stream).step({**STEP, **changes})
    return stream.getvalue()


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [(-0.012, -0.009, "(-0.01 to -0.01)"), (0.1, 0.27, "(0.10 to 0.27)"), (None, 1.0, "(- to 1.00)")],
)
def test_an_interval_can_be_read_whatever_its_signs(low: float | None, high: float, shown: str) -> None:
    assert between(low, high) == shown
    assert f"held-out -0.006 {shown}" in line(
        **{"eval/reward": -0.006, "eval/reward_low": low, "eval/reward_high": high}
    )


def test_the_bars_of_a_run_that_is_gone_on_with_begin_where_it_began() -> None:
    stream = io.StringIO()
    console = Console(8, stream)
    console.go_on_from([{**STEP, "reward/mean": reward, "verdict/kind": "truncated"} for reward in (0.0, None, 0.7)])
    console.step({**STEP, "reward/mean": 0.35, "verdict": "cut", "verdict/kind": "truncated"})
    said = stream.getvalue()
    assert "reward 0.350 ▁█▅" in said
    assert "cut\n" not in said, "it was said when it began"


def test_nothing_has_no_sign() -> None:
    said = line(**{"value/mean": 0.3, "value/explained_variance": -0.001})
    assert "critic explains 0%" in said
    assert "reward 0.000 " in said

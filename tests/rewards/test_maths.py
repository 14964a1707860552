"""math-verify in the pool: what it counts as right, and answers that would make it run for ever."""

from __future__ import annotations

import threading
import time

import judging
import pytest

from gspo.errors import InputError
from gspo.types import Status


@pytest.mark.parametrize("gold", [["0.5", r"\frac{1}{2}"], r"\frac12", "$1/2$", r"so it is \boxed{0.5}"])
def test_equal_is_what_means_the_same(gold: object) -> None:
    row = {"prompt": "?", "answer": gold}
    texts = (r"\boxed{\frac{2}{4}}", "it is 0.5", "$1/2$", r"first \boxed{3}, no, \boxed{0.50}", "0.6", "", "half")
    with judging.scorer(["math"], [row]) as opened:
        found = judging.values(judging.judge(opened, row, *texts))
    assert found == [1, 1, 1, 1, 0, 0, 0]


def test_any_of_several_gold_forms_is_right() -> None:
    row = {"prompt": "?", "answer": ["3", "x + 1"]}
    with judging.scorer(["math"], [row]) as opened:
        assert judging.values(judging.judge(opened, row, r"\boxed{1 + x}", r"\boxed{3}", r"\boxed{4}")) == [1, 1, 0]


def test_p15_pathological_answers_do_not_freeze_the_run() -> None:
    """verl-project/verl#6673: sympy computes a tower of powers in the driver, for ever."""
    row = {"prompt": "?", "answer": "7"}
    texts = (r"\boxed{9^{9^{9^{9}}}}", r"\boxed{2**(2**(2**100))}", "(" * 200_000, r"\boxed{7}", "7")
    with judging.scorer(["math"], [row], timeout=2) as opened:
        start = time.monotonic()
        rollouts = judging.judge(opened, row, *texts).rollouts
        assert time.monotonic() - start < 3 * 2 + 5
        again = judging.judge(opened, row, "8", "7")
    rewards = [r.reward for r in rollouts if r.reward is not None]
    assert rewards[0].status == {"math": Status.TIMEOUT}
    assert rewards[0].value is None
    assert all(r.value in (None, 0.0) for r in rewards[:3])
    assert [r.value for r in rewards[3:]] == [1.0, 1.0]
    assert judging.values(again) == [0.0, 1.0]


def test_p16_eight_threads_and_one_answer_that_hangs(capfd: pytest.CaptureFixture[str]) -> None:
    """huggingface/Math-Verify#50: its time limits are signals, which work in the main thread only."""
    row = {"prompt": "?", "answer": r"\frac{1}{3}"}
    found: list[float | None] = []
    with judging.scorer(["math"], [row], timeout=2, workers=2) as opened:
        texts = [r"\boxed{\frac{1}{3}}"] * 8 + [r"\boxed{9^{9^{9^{9}}}}"]
        threads = [
            threading.Thread(target=lambda text=text: found.extend(judging.values(judging.judge(opened, row, text))))
            for text in texts
        ]
        start = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert time.monotonic() - start < 2 + 5
    assert sorted(found, key=str) == [1.0] * 8 + [None]
    assert capfd.readouterr().err == "", "no flood of warnings"


@pytest.mark.parametrize(
    ("golds", "words"),
    [
        (["7", "??!", "8", "}{"], ["row 1, row 3", "'??!'", "a mathematical expression"]),
        (["7", ["7", "??!"]], ["row 1"]),
        (["7", []], ["row 1"]),
        (["7", r"9^{9^{9^{9}}}"], ["row 1", "judging.timeout"]),
    ],
)
def test_a_gold_answer_that_does_not_parse_is_refused_with_its_row(golds: list[object], words: list[str]) -> None:
    rows = [{"prompt": "?", "answer": gold} for gold in golds]
    with pytest.raises(InputError) as caught, judging.scorer(["math"], rows, timeout=1):
        pass
    assert [word for word in words if word not in str(caught.value)] == []

"""A judge behind an endpoint: a real server in a process of its own, that hangs, drips, refuses and recovers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import judging
import pytest

from gspo.errors import InputError, RunError
from gspo.types import Status

ROW = {"prompt": "What is 3 + 4?", "answer": "7"}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def url(log: Path) -> Iterator[str]:
    script = Path(__file__).with_name("endpoint.py")
    server = subprocess.Popen([sys.executable, str(script), str(log)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    yield f"http://127.0.0.1:{int(server.stdout.readline())}/v1"
    server.kill()
    server.wait()
    server.stdout.close()


def requests(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_verdicts_failures_and_retries_are_told_apart(url: str, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a key")
    expected = {
        "<good>": (0.75, Status.OK),
        "nothing": (0.0, Status.OK),
        "<busy>": (1.0, Status.OK),
        "<word>": (None, Status.NO_VERDICT),
        "<out>": (None, Status.NO_VERDICT),
        "<wrong>": (None, Status.CRASHED),
        "<html>": (None, Status.CRASHED),
        "<hang>": (None, Status.TIMEOUT),
        "<drip>": (None, Status.TIMEOUT),
    }
    with judging.scorer([f"judge:{url}"], [ROW], timeout=1.5) as opened:
        start = time.monotonic()
        rollouts = judging.judge(opened, ROW, *expected).rollouts
        assert time.monotonic() - start < 3.5, "requests are under way side by side"
    rewards = [r.reward for r in rollouts if r.reward is not None]
    assert [(r.value, r.status["judge"]) for r in rewards] == list(expected.values())
    assert "401" in (rewards[5].error or "")
    assert "no such key" in (rewards[5].error or "")
    assert "chat protocol" in (rewards[6].error or "")
    first = requests(log)[0]
    assert (first["model"], first["key"]) == ("small", "Bearer a key")
    assert "What is 3 + 4?" in first["question"]


def test_an_answer_that_was_judged_is_not_paid_for_again(url: str, log: Path) -> None:
    with judging.scorer([f"judge:{url}?model=large"], [ROW]) as opened:
        for _ in range(2):
            assert judging.values(judging.judge(opened, ROW, "<good>", "<good>", "x")) == [0.75, 0.75, 0.0]
    assert [r["model"] for r in requests(log)] == ["large"] * 3, "the trial call, and two answers"


def test_the_budget_stops_the_run_before_it_is_exceeded(url: str, log: Path) -> None:
    with judging.scorer([f"judge:{url}?budget=3"], [ROW]) as opened:
        judging.judge(opened, ROW, "a", "b")
        judging.judge(opened, ROW, "a", "b", "b")
        with pytest.raises(RunError, match=r"3 requests are made, 1 more are needed, and the budget is 3"):
            judging.judge(opened, ROW, "c")
    assert len(requests(log)) == 3


def test_a_question_of_ones_own_reads_the_columns(url: str, log: Path, tmp_path: Path) -> None:
    question = tmp_path / "question.txt"
    question.write_text("Is {completion} what {answer} means? {{braces}}")
    with judging.scorer([f"judge:{url}?question={question}"], [ROW]) as opened:
        judging.judge(opened, ROW, "seven {x}")
    assert requests(log)[-1]["question"] == "Is seven {x} what 7 means? {braces}"


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("judge", ["judge:http://"]),
        ("judge:http://127.0.0.1:9/v1", ["http://127.0.0.1:9/v1", "refused"]),
        ("judge:http://127.0.0.1:9/v1?model=x", ["trial call", "refused"]),
        ("judge:http://127.0.0.1:9?modle=x", ["'modle'", "model, budget, question"]),
        ("judge:http://127.0.0.1:9?model=x&question=no_such_file", ["question cannot be read"]),
        ("judge:http://127.0.0.1:9?model=x&budget=few", ["'few'"]),
    ],
)
def test_an_endpoint_that_is_down_or_misnamed_is_refused(rule: str, words: list[str]) -> None:
    start = time.monotonic()
    with pytest.raises(InputError) as caught, judging.scorer([rule], [ROW], timeout=1):
        pass
    assert [word for word in words if word not in str(caught.value)] == []
    assert time.monotonic() - start < 3


@pytest.mark.parametrize(
    ("text", "words"),
    [("Is it good?", "{completion}"), ("{completion} {gold}", "{gold}"), ("{completion} {", "no template")],
)
def test_a_question_that_asks_nothing_is_refused(text: str, words: str, url: str, tmp_path: Path) -> None:
    (tmp_path / "q.txt").write_text(text)
    with pytest.raises(InputError) as caught, judging.scorer([f"judge:{url}?question={tmp_path / 'q.txt'}"], [ROW]):
        pass
    assert words in str(caught.value)

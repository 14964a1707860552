"""Reward functions from real files and from Python: what they are given, and what is refused before a model exists."""

import functools
import os
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from gspo.config import Data, Judging, RewardRule
from gspo.errors import InputError
from gspo.rewards import own
from gspo.rewards.call import FromFile, Item
from gspo.rewards.load import load as load_rewards
from gspo.rewards.load import open_scorers
from gspo.rewards.ready import Around
from gspo.tasks.data import read_rows

LOCK = threading.Lock()
ROWS = [
    {"prompt": "3 + 4", "answer": "7", "gold": 7, "hint": None},
    {"prompt": "1 + 1", "answer": "2", "gold": 2, "hint": "two"},
]


def rows(*given):
    return read_rows(Data(), rows=given or ROWS)


def load(function, found=None):
    around = Around(found or rows(), "prompt", None, 100, Judging(workers=1))
    return load_rewards([RewardRule(function=function)], around)[0]


def try_out(function, found):
    _, pool = open_scorers([([load(function, found)], found)], Judging(workers=1))
    if pool is not None:
        pool.close()


def refusal(function, found=None):
    with pytest.raises(InputError) as caught:
        try_out(function, found or rows())
    return str(caught.value)


def call(reward, completion, row=0, prompt="", tokens=1):
    found = reward.ready.call
    assert found is not None
    if isinstance(found.function, FromFile):  # which a worker loads
        found = replace(found, function=found.function.load())
    return found(Item((completion,), (tokens,), ROWS[row], prompt))[0]


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Writes a reward file into the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(text, name="judge.py"):
        (tmp_path / name).write_text(text)
        return name

    return write


# ------------------------------------------------------------------------------ built-in rules


def test_built_in_rules_read_their_column():
    assert load("number").name == "number"
    assert [call(load("number"), "it is 7", row) for row in (0, 1)] == [1.0, 0.0]
    assert call(load("number:gold"), "7") == 1.0
    assert call(load("boxed"), r"\boxed{7}") == 1.0
    assert call(load("exact"), "7 ") == 1.0
    assert call(load("regex:^7"), "70") == 1.0
    assert call(load("format"), "x</think>7", prompt="Q<think>\n") == 1.0
    assert call(load("format:."), "77") == 0.0


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        ("numbr", ["did you mean 'number'", "exact, number, boxed, math, reasoning-gym, code", "file.py:name"]),
        ("number:anwser", ["'anwser' (did you mean 'answer'?)", "prompt, answer, gold, hint"]),
        ("exact:hint", ["'hint'", "null in row 0"]),
        ("number:prompt", ["row 0, row 1", "'3 + 4'"]),
        ("regex", ["regex:"]),
        ("regex:(", ["'('"]),
        ("overlong:101", ["101", "sampling.max_new_tokens=100"]),
        ("overlong:many", ["'many'"]),
        ("repetition:0", ["'0'"]),
    ],
)
def test_built_in_rules_are_refused(function, parts):
    message = refusal(function)
    assert [part for part in parts if part.lower() not in message.lower()] == []


def test_the_soft_overlong_penalty_is_dapos():
    reward = load("overlong:20")  # of max_new_tokens 100: free up to 80
    assert [call(reward, "", tokens=n) for n in (1, 80, 85, 90, 100, 101)] == [0, 0, -0.25, -0.5, -1, -1]
    assert call(load("overlong"), "", tokens=90) == -0.5


def test_the_repetition_penalty_counts_what_was_said_before():
    reward = load("repetition:2")
    said = ("one two three", "a a a a a", "a b a b", "", "word")
    assert [call(reward, text) for text in said] == pytest.approx([0, -0.75, -1 / 3, 0, 0])


def test_at_most_ten_rows_are_named():
    many = rows(*({"prompt": "x", "answer": "seven"} for _ in range(14)))
    assert "row 9 and 4 more" in refusal("number", many)


# ------------------------------------------------------------------------------ files


def test_function_from_a_file_with_its_neighbour(source):
    source("SCALE = 2.0\n", "scale_for_tests.py")
    source(
        "from scale_for_tests import SCALE\ndef judge(completion, gold):\n    return SCALE * (completion == str(gold))\n"
    )
    reward = load("judge.py:judge")
    assert (reward.name, call(reward, "7"), call(reward, "8")) == ("judge", 2.0, 0.0)


def test_changed_file_gives_the_changed_function(source, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    results = []
    for value in (1, 2):  # same size, same second: a bytecode cache would give the first again
        os.utime(source(f"def judge(completion):\n    return {value}\n"), (1e9, 1e9))
        results.append(call(load("judge.py:judge"), ""))
    assert results == [1.0, 2.0]


def test_dataclasses_in_the_file_find_their_module(source):
    source(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass Judge:\n    scale: float = 1.0\ndef judge(c):\n    return Judge().scale\n"
    )
    assert call(load("judge.py:judge"), "") == 1.0


@pytest.mark.parametrize(
    ("text", "function", "parts"),
    [
        ("", "jugde.py:f", ["no such file", "did you mean 'judge.py'"]),
        ("def score(c): return 1\n", "judge.py:scroe", ["did you mean 'score'"]),
        ("def score(c): return 1\n", "judge.py:other", ["it has score"]),
        ("def score(c): return 1\n", "judge.py", ["judge.py:NAME", "score"]),
        ("score = 3\n", "judge.py:score", ["int, not a function"]),
        ("import no_such_module\n", "judge.py:f", ["importing", "line 1", "no_such_module"]),
        ("def f(:\n", "judge.py:f", ["importing", "SyntaxError"]),
        ("raise SystemExit(3)\n", "judge.py:f", ["importing", "SystemExit"]),
        ("def f(c):\n    return 1 / len(c)\n", "judge.py:f", ["row 0", "empty completion", "line 2", "ZeroDivisionError"]),
        ("def f(c):\n    exit(1)\n", "judge.py:f", ["SystemExit"]),
    ],
)  # fmt: skip
def test_files_are_refused(source, text, function, parts):
    source(text)
    message = refusal(function)
    assert [part for part in parts if part.lower() not in message.lower()] == []


@pytest.mark.parametrize("body", ["import time\ntime.sleep(1000)", "while True:\n    print('flood' * 100)"])
def test_a_file_that_never_finishes_importing_is_refused_in_bounded_time(source, body, monkeypatch, capfd):
    monkeypatch.setattr(own, "START_SECONDS", 0.5)
    source(f"def f(c):\n    return 1\n{body}\n")
    begun = time.monotonic()
    message = refusal("judge.py:f")
    assert "judge.py has not come to an end within 0.5 s" in message
    assert time.monotonic() - begun < 60
    assert capfd.readouterr() == ("", "")


def test_a_file_that_ends_its_process_or_prints_costs_the_trainer_nothing(source, capfd):
    source("import os\ndef f(c):\n    return 1\nos._exit(3)\n")
    assert "exit code 3" in refusal("judge.py:f")
    source(
        f"import os\nprint('hello')\nos.environ['LEFT'] = '1'\nHERE = os.getpid()\ndef f(c):\n    assert HERE != {os.getpid()}\n    return 1\n"
    )
    try_out("judge.py:f", rows())
    assert "LEFT" not in os.environ
    assert capfd.readouterr() == ("", "")


def test_what_a_file_has_is_known_without_running_it_here(source):
    source(
        "async def waits(completion, gold, *, hint=1): return 1\n"
        "class Judge:\n    async def __call__(self, c): return 1\n"
        "judge = Judge()\n"
        "def group(completions, answer): return [1]\n"
    )
    found = {name: load(f"judge.py:{name}").ready.call for name in ("waits", "judge", "group")}
    assert [each.asynchronous for each in found.values()] == [True, True, False]
    assert [each.group for each in found.values()] == [False, False, True]
    assert [dict(each.reads) for each in found.values()] == [{"gold": "gold", "hint": "hint"}, {}, {"answer": "answer"}]
    assert found["waits"].optional == {"hint"}


# ------------------------------------------------------------------------------ what a function is given


def test_only_named_columns_are_passed_and_kwargs_takes_all():
    seen = []

    def named(completion, answer, *, gold):
        seen.append((completion, answer, gold))
        return 1

    def everything(text, answer, **columns):
        seen.append((text, answer, columns))
        return 1

    call(load(named), "x")
    call(load(everything), "y")
    assert seen[0] == ("x", "7", 7)
    assert seen[1] == ("y", "7", {"prompt": "3 + 4", "gold": 7, "hint": None})


def test_optional_parameters_keep_their_default_where_the_column_is_null_or_lacking():
    def judge(completion, hint="none", unknown=5):
        return {"none": 0, "two": 2}[hint] + unknown

    assert [call(load(judge), "", row) for row in (0, 1)] == [5.0, 7.0]


def test_rendered_prompt():
    assert call(load(lambda completion, rendered_prompt: len(rendered_prompt)), "", prompt="four") == 4.0
    assert "rendered_prompt" in refusal(lambda c, rendered_prompt: 1, rows({"prompt": "x", "rendered_prompt": "y"}))


def test_a_function_over_a_group_is_one_whose_first_parameter_is_completions():
    reward = load(
        lambda completions, gold, completion_tokens: [
            len(c) + gold + n for c, n in zip(completions, completion_tokens, strict=True)
        ]
    )
    assert reward.group
    assert reward.ready.call(Item(("a", "bb"), (10, 20), ROWS[0], "")) == (18.0, 29.0)
    assert not load(lambda completion: 1).group


def test_functions_of_one_name_are_told_apart():
    around = Around(rows(), "prompt", None, 100, Judging())
    rules = [RewardRule(function=f) for f in ("number", "number:gold", lambda c: 1, lambda c: 2)]
    assert [found.name for found in load_rewards(rules, around)] == ["number", "number_2", "<lambda>", "<lambda>_2"]


def test_callable_objects_methods_and_partials():
    class Judge:
        def __call__(self, completion, gold):
            return gold

        def method(self, completion, gold):
            return gold + 1

    def judge(scale, completion, gold):
        return scale * gold

    assert [call(load(f), "") for f in (Judge(), Judge().method, functools.partial(judge, 3))] == [7.0, 8.0, 21.0]
    assert load(Judge()).name == "Judge"


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (lambda: 1, ["first parameter"]),
        (lambda *, completion: 1, ["first parameter"]),
        (lambda c, awnser, nothing: 1, ["'awnser' (did you mean 'answer'?)", "'nothing'", "prompt, answer, gold, hint"]),
        (lambda c, hint: 1, ["null in row 0"]),
        (lambda c, answer, /: 1, ["by name"]),
        (lambda answer, **columns: 1, ["rename"]),
        (lambda c, completion_tokens, rendered_prompt, lock=LOCK: LOCK.acquire(), ["cannot be sent", "lock"]),
        (lambda completions: [1.0], ["1 values for 2 completions"]),
        (lambda completions: 1.0, ["float 1.0", "a list with a number for each"]),
        (lambda completions: "11", ["str '11'", "a list with a number for each"]),
        (lambda c: 10**400, ["1000000", "finite, within 1e+30"]),
        (lambda c: -(10**5000), ["thousands of digits", "finite, within 1e+30"]),
        (lambda c: [1.0], ["list", "judges one completion"]),
        (lambda c: "1", ["str '1'"]),
        (lambda c: float("nan"), ["nan", "finite"]),
        (lambda c: np.float32("inf"), ["inf", "finite"]),
        (lambda c: 1j, ["complex"]),
    ],
)  # fmt: skip
def test_functions_are_refused(function, parts):
    message = refusal(function)
    assert [part for part in parts if part not in message] == []


@pytest.mark.parametrize("value", [True, 1, 0.5, np.float32(0.5), np.int64(2), np.bool_(True), -3])
def test_numbers_of_all_kinds_are_rewards(value):
    found = call(load(lambda c: value), "")
    assert type(found) is float
    assert found == value


def test_none_is_no_verdict_and_not_zero():
    assert call(load(lambda c: None), "") is None

"""The built-in rules: what they count as right, and that no text breaks or slows them."""

from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.rewards.rules import as_number, boxed, exact, format, last_boxed, last_number, number, regex

RULES = {
    "exact": lambda text: exact(text, answer="7"),
    "number": lambda text: number(text, answer="7"),
    "number_gold": lambda text: number("7", answer=text),
    "boxed": lambda text: boxed(text, answer="7"),
    "boxed_gold": lambda text: boxed(r"\boxed{7}", answer=text),
    "regex": lambda text: regex(text, pattern="7$"),
    "format": lambda text: format(text),
    "format_opened": lambda text: format(text, rendered_prompt="<think>\n"),
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("The answer is 7.", "7"),
        ("3 + 4 = 7", "7"),
        ("1,234", "1234"),
        ("about $1,234,567.50 in all.", "1234567.5"),
        ("3.0", "3"),
        (".5", "0.5"),
        ("so it is...5", "5"),
        ("Answer.5", "5"),
        ("1,2,3", "3"),
        ("3, 4, and 5..", "5"),
        ("1,2345", "2345"),
        ("x = -3", "-3"),
        ("(-3)", "-3"),
        ("−4", "-4"),
        ("-$3", "-3"),
        ("+3", "3"),
        ("5-3", "3"),
        ("5 - 3", "3"),
        ("x-3", "3"),
        ("7km", "7"),
        ("the 7th", "7"),
        ("答案是7", "7"),
        ("**7**", "7"),
        (r"$\boxed{7}$", "7"),
        ("1.5e3", "1500"),
        ("2E-1", "0.2"),
        ("1/2", "2"),
        ("7 for x2", "7"),
        ("8 says GPT4", "8"),
        ("9 in v1.5", "9"),
        ("6 in 1.2.3", "6"),
        ("0", "0"),
        ("x2", None),
        ("seven", None),
        ("", None),
        ("...", None),
        ("1e99999999999999999999", None),
    ],
)
def test_last_number(text, value):
    assert last_number(text) == (None if value is None else Decimal(value))


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        (7, "7"),
        (7.5, "7.5"),
        (" -1,234.50 ", "-1234.5"),
        ("$7$", "7"),
        ("7.", "7"),
        ("+7", "7"),
        (0.1, "0.1"),
        (10**4000, 10**4000),
    ]
    + [(bad, None) for bad in (True, None, "", "-", "7 apples", "#### 7", "12,34", "nan", float("inf"), [7])],
)
def test_as_number(answer, value):
    assert as_number(answer) == (None if value is None else Decimal(value))


@given(
    value=st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**9), max_value=10**9, places=3),
    words=st.sampled_from(["", "so 12 is not it: ", "= "]),
)
def test_number_finds_any_number_that_was_written(value, words):
    for written in (f"{value}", f"{value:,}", f"{value}."):
        assert number(words + written, answer=str(value)) == 1.0
        assert number(words + written, answer=str(value + 1)) == 0.0


def test_numbers_are_compared_exactly():
    assert number("123456789012345678901234567890.1", answer="123456789012345678901234567890.1") == 1.0
    assert number("-123456789012345678901234567890.1", answer="-123456789012345678901234567890.2") == 0.0


def test_exact():
    assert exact(" 7\n", answer="7") == exact("7", answer=7) == 1.0
    assert exact("7.0", answer="7") == 0.0


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{5} and so \boxed{7", "5"),
        (r"\boxed{a \boxed{b} c}", "b"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        (r"} \boxed {3}", "3"),
        (r"\boxed{", None),
        (r"\boxed 7", None),
        (r"boxed{7}", None),
    ],
)
def test_last_boxed(text, content):
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        (r"\boxed{7.0}", "7", 1.0),
        (r"\boxed{1,000}", 1000, 1.0),
        (r"\boxed{ $x + 1$ }", "x+1", 1.0),
        (r"\boxed{x}", r"First \boxed{y}, thus $\boxed{x}$.", 1.0),
        (r"\boxed{7}", "8", 0.0),
        ("7", "7", 0.0),
    ],
)
def test_boxed(text, answer, value):
    assert boxed(text, answer=answer) == value


def test_regex():
    assert regex("say #7", pattern=r"#\d") == 1.0
    assert regex("say 7", pattern=r"#\d") == 0.0


@pytest.mark.parametrize(
    ("text", "prompt", "value"),
    [
        ("<think>x</think>4", "Q", 1.0),
        ("\n<think>\nx\n</think>\n\n4\n", "Q", 1.0),
        ("2+2=4</think>4", "Q", 0.0),
        ("4", "Q", 0.0),
        ("<think>x</think>  ", "Q", 0.0),
        ("<think>x", "Q", 0.0),
        ("so <think>x</think>4", "Q", 0.0),
        ("<think>x</think><think>y</think>4", "Q", 0.0),
        # huggingface/trl#6966: the prompt has opened the thought already.
        ("2+2=4</think>4", "Q<think>\n", 1.0),
        ("<think>x</think>4", "Q<think>\n", 1.0),
        ("4", "Q<think>\n", 0.0),
        ("x</think>4", "<think>done</think> Q", 0.0),
    ],
)
def test_format(text, prompt, value):
    assert format(text, rendered_prompt=prompt) == value


def test_format_with_a_pattern_of_ones_own():
    assert format("A: 7", pattern=r"A: \d") == 1.0
    assert format("A: 7!", pattern=r"A: \d") == 0.0
    pattern = r"<think>\s*\w+</think>\d"
    assert [
        format(text, pattern=pattern, rendered_prompt="Q<think>\n") for text in ("x</think>7", "<think>x</think>7", "7")
    ] == [1.0, 1.0, 0.0]
    assert format("x</think>7", pattern=pattern, rendered_prompt="Q") == 0.0


@pytest.mark.parametrize("rule", RULES)
@settings(deadline=None, max_examples=150)
@given(text=st.text() | st.text(alphabet=r"0123456789.,-+$eE\{}boxed <think/>x"))
def test_no_text_breaks_a_rule(rule, text):
    assert RULES[rule](text) in (0.0, 1.0)


@pytest.mark.parametrize(
    "piece",
    [
        "(",
        "9",
        "1,",
        "111,",
        ".",
        ",.",
        "1e",
        "-",
        "{",
        "{}",
        "\\boxed{",
        "\\boxed ",
        "\\",
        "<think>",
        "</think> ",
        "x1 ",
    ],
)
def test_huge_answers_are_judged(piece):
    # A quadratic step would take minutes here.
    text = piece * (200_000 // len(piece))
    assert [rule for rule in RULES if RULES[rule](text) not in (0.0, 1.0)] == []
    assert number(text + " 7", answer=7) == 1.0

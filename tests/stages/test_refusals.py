"""What a stage cannot use ends with 2 and the rows by name, before a weight is read: the weights here could not be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForSequenceClassification

from gspo.models.tiny import tiny_dense

Command = Callable[..., tuple[int, str, str]]
NO_ANSWERS = "{% for m in messages %}{% if m.role == 'user' %}u:{{ m.content }}\n{% endif %}{% endfor %}"
GOOD = [{"prompt": "a", "answer": "b", "chosen": "b", "rejected": "c"}] * 2


def damaged(folder: Path, template: str | None = None) -> str:
    """A language model's folder whose weights cannot be read."""
    model, tokenizer = tiny_dense()
    tokenizer.chat_template = template
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"damaged")
    return str(folder)


def classes(folder: Path, count: int) -> str:
    """A classifier of `count` classes, whose weights cannot be read either."""
    _, tokenizer = tiny_dense()
    keys: dict[str, Any] = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
    settings = LlamaConfig(vocab_size=len(tokenizer), num_labels=count, **keys)
    LlamaForSequenceClassification(settings).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"damaged")
    return str(folder)


def plain(folder: Path) -> str:
    """A recipe that sets next to nothing."""
    (folder / "recipe.yaml").write_text("steps: 1\n")
    return str(folder / "recipe.yaml")


def written(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in (*GOOD, *rows)))
    return str(path)


def refused(found: tuple[int, str, str], folder: Path, *parts: str) -> None:
    code, out, err = found
    assert code == 2, out + err
    assert [part for part in parts if part not in err] == [], err
    assert "could not be loaded" not in err
    assert not folder.exists(), "nothing is written"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are identical"),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, "the answer is empty"),
        ({"prompt": None, "chosen": "a", "rejected": "b"}, "the prompt is missing"),
        ({"prompt": " ", "chosen": "a", "rejected": "b"}, "the prompt is empty"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_pairs(row: dict[str, Any], said: str, tmp_path: Path, command: Command) -> None:
    data, run = written(tmp_path / "pairs.jsonl", row), tmp_path / "run"
    words = [f"model={damaged(tmp_path / 'model')}", f"data={data}", "data.template=none", f"dir={run}"]
    refused(command("reward", "letters", *words), run, "pairs.jsonl", "line 3", said)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "answer": " "}, "the answer is empty"),
        ({"prompt": None, "answer": "b"}, "the prompt is null"),
        ({"prompt": "", "answer": "b"}, "the prompt is empty"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_answers(row: dict[str, Any], said: str, tmp_path: Path, command: Command) -> None:
    data, run = written(tmp_path / "answers.jsonl", row), tmp_path / "run"
    words = [f"model={damaged(tmp_path / 'model')}", f"data={data}", "data.template=none", f"dir={run}"]
    refused(command("sft", plain(tmp_path), *words), run, "answers.jsonl", "line 3", said)


@pytest.mark.parametrize("stage", ["sft", "reward", "train"])
def test_a_template_without_an_assistants_turn(stage: str, tmp_path: Path, command: Command) -> None:
    data, run = written(tmp_path / "rows.jsonl"), tmp_path / "run"
    words = [f"model={damaged(tmp_path / 'model', NO_ANSWERS)}", f"data={data}", f"dir={run}"]
    words += ["reward=regex:b"] if stage == "train" else []
    refused(command(stage, plain(tmp_path), *words), run, "rows.jsonl", "line 1", "no turn of the assistant")


@pytest.mark.parametrize("kind", ["language model", "classes", "nothing"])
def test_a_reward_model_that_is_no_classifier(kind: str, tmp_path: Path, command: Command) -> None:
    folder, run = tmp_path / "rm", tmp_path / "run"
    said = {
        "language model": "not a sequence classifier",
        "classes": "has 3 classes",
        "nothing": "no model that transformers can read",
    }
    if kind != "nothing":
        (damaged if kind == "language model" else lambda place: classes(place, 3))(folder)
    words = [f"model={damaged(tmp_path / 'model')}", f"reward=reward_model:{folder}", f"dir={run}"]
    refused(command("train", "tiny", *words), run, str(folder), said[kind])


def test_a_classifier_of_classes_is_no_reward_model_to_go_on_from(tmp_path: Path, command: Command) -> None:
    run, model = tmp_path / "run", classes(tmp_path / "model", 3)
    words = [f"model={model}", f"data={written(tmp_path / 'pairs.jsonl')}", "data.template=none", f"dir={run}"]
    refused(command("reward", "letters", *words), run, model, "a classifier of 3 classes")


ASSISTANTS = "{% for m in messages %}{% if m.role == 'assistant' %}b: {{ m.content }}{% endif %}{% endfor %}b: "
FIRST = "{% for m in messages %}{{ m.role }}: {{ m.content[:1] }}\n{% endfor %}b: "
ANSWERS_CUT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content if m.role == 'user' else m.content[:2] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
FAILING_ON_ANSWERS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ raise_exception('no assistants') }}{% endif %}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)
LONG = {"prompt": "which one", "answer": "the first", "chosen": "the first", "rejected": "another"}


@pytest.mark.parametrize(
    ("stage", "template", "said"),
    [
        ("train", "hello{% if add_generation_prompt %} a: {% endif %}", "leaves the question out"),
        *((stage, ASSISTANTS, "leaves the question out") for stage in ("train", "check", "sft", "reward")),
        *((stage, FIRST, "leaves the question out") for stage in ("train", "sft", "reward")),
        *((stage, ANSWERS_CUT, "leaves the answer out") for stage in ("sft", "reward")),
        *((stage, "{{ 1/0 }}", "ZeroDivisionError: division by zero") for stage in ("train", "check", "sft", "reward")),
        *((stage, "{{ messages[0].content + 1 }}", "TypeError: can only") for stage in ("train", "sft", "reward")),
        *((stage, FAILING_ON_ANSWERS, "(user, assistant): no assistants") for stage in ("sft", "reward")),
    ],
)
def test_a_template_that_drops_what_is_said_or_fails(
    stage: str, template: str, said: str, tmp_path: Path, command: Command
) -> None:
    data, run = tmp_path / "rows.jsonl", tmp_path / "run"
    data.write_text(f"{json.dumps(LONG)}\n{json.dumps(LONG | {'prompt': 'and what then'})}\n")
    words = [f"model={damaged(tmp_path / 'model', template)}", f"data={data}", f"dir={run}"]
    words += ["reward=regex:b"] if stage in ("train", "check") else []
    code, out, err = found = command(stage, plain(tmp_path), *words)
    if stage == "check":  # it says what there is to mend in its report
        found = (code, err, out)
    remedy = "data.template=none" if "leaves" in said else ""
    refused(found, run, "rows.jsonl", "line 1", said, remedy)

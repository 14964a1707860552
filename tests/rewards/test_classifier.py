"""A reward model: a real two-layer classifier from a folder, with a tokenizer and a template of its own."""

from __future__ import annotations

from pathlib import Path

import judging
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from gspo.config import Model
from gspo.errors import InputError
from gspo.models.load import load_policy
from gspo.types import Status

ROW = {"prompt": "say a digit", "answer": "7"}
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "rm")


def save(folder: Path, labels: int = 1, positions: int = 256) -> Path:
    torch.manual_seed(0)
    tokenizer = load_policy(Model(name="random-dense")).tokenizer
    tokenizer.chat_template = TEMPLATE
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=positions, num_labels=labels, pad_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def alone(folder: Path, answer: str) -> float:
    """What transformers gives for one conversation, without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = f"[user] say a digit\n[assistant] {answer}\n"
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        return float(model(input_ids=ids).logits[0, 0])


def test_batched_scores_are_those_of_each_conversation_alone(folder: Path) -> None:
    texts = ("7", "", "a much longer answer, so that the others are padded", "8", "7")
    with judging.scorer([f"reward_model:{folder}?device=cpu"], [ROW]) as opened:
        found = judging.values(judging.judge(opened, ROW, *texts))
    assert found == pytest.approx([alone(folder, text) for text in texts], abs=1e-5)
    assert found[0] == pytest.approx(found[4], abs=1e-6)
    assert len({round(value or 0, 4) for value in found}) == 4


def test_an_answer_that_is_too_long_has_failed_and_is_not_cut(tmp_path: Path) -> None:
    folder = save(tmp_path / "short", positions=64)
    with judging.scorer([f"reward_model:{folder}"], [ROW]) as opened:
        judged = judging.judge(opened, ROW, "7", "7" * 100).rollouts
    short, long = (r.reward for r in judged)
    assert short is not None
    assert long is not None
    assert (short.value is not None, long.value) == (True, None)
    assert long.status == {"reward_model": Status.CRASHED}
    assert "more than its 64 positions" in (long.error or "")


def test_what_is_no_reward_model_is_refused(tmp_path: Path) -> None:
    policy = load_policy(Model(name="random-dense"))
    policy.model.save_pretrained(tmp_path / "lm")
    policy.tokenizer.save_pretrained(tmp_path / "lm")
    save(tmp_path / "classes", labels=3)
    for rule, word in {
        "reward_model": "reward_model:FOLDER",
        f"reward_model:{tmp_path / 'lm'}": "not a sequence classifier",
        f"reward_model:{tmp_path / 'classes'}": "3 classes",
        f"reward_model:{tmp_path / 'none'}": "no model",
        f"reward_model:{tmp_path / 'classes'}?devise=cpu": "'devise'",
    }.items():
        with pytest.raises(InputError, match=word), judging.scorer([rule], [ROW]):
            pass


def retold(folder: Path, template: str) -> Path:
    """The same reward model with another template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def test_a_template_that_fails_on_every_answer_is_refused_at_the_start(folder: Path) -> None:
    retold(folder, "{% if messages[-1].role == 'assistant' %}{{ 1/0 }}{% endif %}" + TEMPLATE)
    with (
        pytest.raises(InputError, match=r"row 0.*refuses its messages \(user, assistant\): ZeroDivisionError"),
        judging.scorer([f"reward_model:{folder}"], [ROW]),
    ):
        pass


@pytest.mark.parametrize(
    ("template", "what"),
    [
        (
            "{% for m in messages %}{{ m.role }}: {{ m.text }}{% endfor %}",
            "question out, or a part of it: of 'say a digit'",
        ),
        ("{{ messages[-1].content }}", "question"),
        ("{{ messages[0].content }}", "answer"),
    ],
)
def test_a_template_of_its_own_that_leaves_out_what_is_to_be_judged_is_refused(
    template: str, what: str, folder: Path
) -> None:
    retold(folder, template)
    with (
        pytest.raises(InputError, match=rf"row 0.*leaves the {what}"),
        judging.scorer([f"reward_model:{folder}"], [ROW]),
    ):
        pass


def test_an_answer_that_the_template_refuses_has_failed_alone(folder: Path) -> None:
    own = alone(folder, "7")
    retold(folder, "{% if messages[-1].content == 'no' %}{{ raise_exception('not no') }}{% endif %}" + TEMPLATE)
    with judging.scorer([f"reward_model:{folder}"], [ROW]) as opened:
        judged = judging.judge(opened, ROW, "7", "no")
    assert judging.values(judged)[0] == pytest.approx(own, abs=1e-5)
    assert judging.values(judged)[1] is None
    failed = judged.rollouts[1].reward
    assert failed is not None
    assert failed.status == {"reward_model": Status.CRASHED}

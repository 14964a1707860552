"""Rendering with real tokenizers: the template and the special tokens once, nothing ever cut."""

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from gspo.config import Data
from gspo.errors import InputError
from gspo.tasks.data import read_rows
from gspo.tasks.render import render, require_assistant

WORDS = ["<unk>", "<s>", "<user>", "<system>", "<bot>", "a", "b", "c", "be", "terse"]
TEMPLATE = (
    "<s>{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{% if m.name is defined %}{{ raise_exception('named') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


def tokenizer(template=TEMPLATE):
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", unk_token="<unk>", additional_special_tokens=WORDS[2:5]
    )
    made.chat_template = template
    return made


def words(prompt):
    return [WORDS[i] for i in prompt.token_ids]


def rows(*prompts):
    return read_rows(Data(), rows=[{"prompt": prompt, "answer": i} for i, prompt in enumerate(prompts)])


def refusal(found, made, data):
    with pytest.raises(InputError) as caught:
        render(found, made, data)
    return str(caught.value)


def test_text_becomes_one_user_message_with_special_tokens_once():
    (prompt,) = render(rows("a b"), tokenizer(), Data()).prompts
    assert prompt.text == "<s><user>a b<bot>"
    assert words(prompt) == ["<s>", "<user>", "a", "b", "<bot>"]
    assert (prompt.row, prompt.columns) == (0, {"prompt": "a b", "answer": 0})
    assert prompt.token_ids.dtype == "int64"


@pytest.mark.parametrize("made", [tokenizer(None), tokenizer()])
def test_an_empty_system_text_is_nothing_where_no_template_is_used(made):
    data = Data(system="", template="auto" if made.chat_template is None else "none")
    (prompt,) = render(rows("a b"), made, data).prompts
    assert words(prompt) == ["<s>", "a", "b"]
    assert prompt.messages == ({"role": "user", "content": "a b"},)


def test_messages_and_system():
    chat = [
        {"role": "user", "content": "a"},
        {"role": "bot", "content": "b"},
        {"role": "user", "content": "c", "name": None},
    ]
    (prompt,) = render(rows(chat), tokenizer(), Data(system="be terse")).prompts
    assert prompt.text == "<s><system>be terse<user>a<bot>b<user>c<bot>"
    assert words(prompt) == ["<s>", "<system>", "be", "terse", "<user>", "a", "<bot>", "b", "<user>", "c", "<bot>"]


@pytest.mark.parametrize(("made", "data"), [(tokenizer(None), Data()), (tokenizer(), Data(template="none"))])
def test_without_a_template_the_tokenizer_adds_its_special_tokens(made, data):
    (prompt,) = render(rows("a b"), made, data).prompts
    assert prompt.text == "a b"
    assert words(prompt) == ["<s>", "a", "b"]


@pytest.mark.parametrize(
    ("prompt", "made", "data", "part"),
    [
        ("a", tokenizer(None), Data(template="chat"), "no chat template"),
        ("a", tokenizer(None), Data(system="be"), "data.system has no effect"),
        ("a", tokenizer(), Data(system="be", template="none"), "data.system has no effect"),
        ([{"role": "user", "content": "a"}], tokenizer(None), Data(), "row 0: chat messages need a chat template"),
        (
            [{"role": "system", "content": "a"}, {"role": "user", "content": "a"}],
            tokenizer(),
            Data(system="be"),
            "already",
        ),
        ([{"role": "tool", "content": "a"}], tokenizer(), Data(), "no tools here"),
    ],
)
def test_what_cannot_be_rendered_is_refused(prompt, made, data, part):
    assert part in refusal(rows(prompt), made, data)


def test_a_prompt_without_tokens_is_refused():
    made = tokenizer(None)
    made._tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    made._tokenizer.normalizer = normalizers.Replace("b", "")
    assert "row 1: the tokenizer makes no tokens" in refusal(rows("a", "b"), made, Data())


def test_long_prompts_are_refused_with_rows_and_lengths():
    # Small input of huggingface/trl#3569: 10, 16 and 40 tokens under a limit of 16.
    found = rows(*("a " * (n - 3) for n in (10, 16, 40)))
    message = refusal(found, tokenizer(), Data(max_prompt_tokens=16))
    assert "1 of 3" in message
    assert "row 2 has 40" in message
    assert "data.max_prompt_tokens=40" in message


def test_long_prompts_are_dropped_whole_and_said():
    found = rows("a " * 37, "a " * 13, "a")
    rendered = render(found, tokenizer(), Data(max_prompt_tokens=16, too_long="drop"))
    assert [(prompt.row, len(prompt.token_ids), prompt.columns["answer"]) for prompt in rendered.prompts] == [
        (1, 16, 1),
        (2, 4, 2),
    ]
    assert "row 0 has 40; dropped" in rendered.notes[0]
    assert "None is left" in refusal(found, tokenizer(), Data(max_prompt_tokens=3, too_long="drop"))


def test_a_limit_saved_with_the_tokenizer_does_not_cut():
    made = tokenizer()
    made._tokenizer.enable_truncation(4)
    made.model_max_length = 4
    (prompt,) = render(rows("a " * 9), made, Data()).prompts
    assert len(prompt.token_ids) == 12


ASKS = "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}{% endif %}{% endfor %}"
BEGINS = ASKS + "{% if add_generation_prompt %}<bot>{% endif %}"
ONCE = "{% if messages | length > 1 %}{{ raise_exception('one question') }}{% endif %}<user>{{ messages[0].content }}"


def test_a_template_that_writes_nothing_for_the_assistant_is_refused():
    """One that marks where an answer begins, shows it afterwards, or takes a single question only, has what a run needs."""
    with pytest.raises(InputError, match=r"row 0: the chat template has no turn of the assistant.*data\.template=none"):
        require_assistant(rows("a"), tokenizer(ASKS), Data())
    for template in (TEMPLATE, BEGINS, ONCE, ASKS.replace("if m.role == 'user'", "if true")):
        require_assistant(rows("a"), tokenizer(template), Data())
    require_assistant(rows("a"), tokenizer(ASKS), Data(template="none"))
    require_assistant(rows("a"), tokenizer(None), Data())

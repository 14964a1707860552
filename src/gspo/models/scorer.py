"""A name in, a model that gives one number a text: a sequence classifier of transformers with packed attention.

In: the `model` section of the configuration, which names a language model, or a classifier to go on from. Out: a
`Policy` whose model is the classifier. The stage `reward_model` calls `load_scorer`, and its learner `trained_scores`;
who judges with an adapter's folder, or exports it, calls `merged_scorer`.

Letters: T tokens of the packed row, N chosen positions, D hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from gspo import config
from gspo.errors import InputError
from gspo.models import lora
from gspo.models.attention import Layout
from gspo.models.builtin import Checkpoint
from gspo.models.load import Policy, complete, find, load_policy, weights_sha256, without_progress_bars


class ScoreHead(nn.Linear):
    """One number a token, in float32 or better: what stands in the place of a sequence classifier's `score`."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 1, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        return nn.functional.linear(hidden.to(wide), self.weight.to(wide))


def trained_scores(model: Any, *, tokens_T: Tensor, position_T: Tensor, layout: Layout, source_N: Tensor) -> Tensor:
    """Score [N] that a sequence classifier gives at the positions `source_N` of T, float32 or better, with gradients."""
    seen: list[Tensor] = []
    # From inside the model's own forward, which then takes the score of one token alone.
    handle = model.score.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    try:
        model(
            input_ids=tokens_T[None], position_ids=position_T[None], attention_mask=None, use_cache=False, layout=layout
        )
    finally:
        handle.remove()
    return seen[0][0, :, 0].index_select(0, source_N)


def load_scorer(model: config.Model, *, seed: int = 0) -> Policy:
    """The model that `model` names as a classifier with one output, with its adapter if it has one; `seed` is of a fresh one.

    The layers of a language model get a score of zero for every text: its first loss is log 2. A classifier, or the
    adapter of one, keeps its own. Beside an adapter the score is trained whole: what is 0 has no use for a low rank.

    Raises:
        InputError: as `load_policy`; a classifier of several classes; a family without a classifier in transformers.
    """
    asked = lora.asked(model)
    checkpoint = find(asked.base)
    trained = _classifier(checkpoint, asked.base.name)
    if trained is not None:
        checkpoint = replace(checkpoint, model=lambda: _as_language_model(trained))
    # As a language model first: what is checked and put into its layers there holds for the classifier too.
    policy = load_policy(model, checkpoint, seed=seed, scored=True)
    weight = None if trained is None else trained.score.weight.detach()
    if asked.scored and asked.start is not None:
        weight = lora.read(asked.start)[0].get("score.weight")
        if weight is None or len(weight) != 1:
            raise InputError(f"{asked.start}: the adapter of a classifier that does not give one number (num_labels=1)")
    scorer = _with_score(policy.model, weight, model.name)
    adapter = lora.adapter_of(policy.model)
    if adapter is not None:
        lora.keep_head(scorer, adapter, "score")
        words = policy.announcement.removeprefix("policy").replace("; trained: ", "; trained: the score and ")
        return replace(policy, model=scorer, announcement=f"reward model{words}")
    before, sha256 = policy.source.sha256, weights_sha256(scorer)
    words = policy.announcement.removeprefix("policy").replace(before[:12], sha256[:12])
    return replace(
        policy, model=scorer, source=replace(policy.source, sha256=sha256), announcement=f"reward model{words}"
    )


def merged_scorer(model: config.Model) -> Policy:
    """The classifier that an adapter's folder and its base make together, as a plain model of transformers.

    Raises InputError as `load_scorer`, and for the adapter of a language model.
    """
    if not lora.asked(model).scored:
        raise InputError(
            f"{model.name}: the adapter of a language model, not of a sequence classifier: it has no score"
        )
    policy = load_scorer(model)
    lora.merge(policy.model).set_attn_implementation("sdpa")
    # transformers scores the last token that is not padding: it must be one that ends no answer, or none.
    own = policy.tokenizer.pad_token_id
    settings = policy.model.config
    settings.pad_token_id = settings.get_text_config().pad_token_id = None if own in policy.stop_ids else own
    return policy


def _classifier(checkpoint: Checkpoint, name: str) -> Any | None:
    """The model, if it is a classifier already. Raises InputError for one that gives more than one number."""
    read = checkpoint.read_as
    if read is None:
        return None
    try:
        found = read(AutoConfig)
    except (OSError, ValueError):  # `load_policy` says what there is not
        return None
    if not any(kind.endswith("ForSequenceClassification") for kind in found.architectures or []):
        return None
    if found.num_labels != 1:
        raise InputError(
            f"model={name}: a classifier of {found.num_labels} classes; a reward model gives one number (num_labels=1)"
        )
    try:
        with without_progress_bars():
            return complete(partial(_named, read), name, dtype=torch.float32)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InputError(f"model={name}: could not be loaded: {str(error).rstrip('. ')}") from error


def _named(read: Callable[..., Any], name: str, **keys: Any) -> Any:
    del name  # `read` knows it
    return read(AutoModelForSequenceClassification, **keys)


def _as_language_model(classifier: Any) -> Any:
    """A language model around the layers of `classifier`, its output layer being the embeddings."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(classifier.config)  # type: ignore[no-untyped-call]
    setattr(model, model.base_model_prefix, classifier.base_model)
    head = model.get_output_embeddings()
    head.weight = classifier.get_input_embeddings().weight
    if head.bias is not None:
        head.bias = nn.Parameter(torch.zeros(len(head.weight)))
    return model


def _with_score(language: Any, weight: Tensor | None, name: str) -> Any:
    """A classifier around the layers of `language`; `weight` [1, D] of its score, zeros if there is none yet."""
    settings = copy.deepcopy(language.config)
    settings.num_labels = 1
    try:
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(settings)  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise InputError(
            f"model={name}: transformers has no sequence classifier of the family {type(language).__name__}: use another model"
        ) from error
    score = getattr(model, "score", None)
    if (
        type(score) is not nn.Linear
        or score.bias is not None
        or type(model.base_model) is not type(language.base_model)
    ):
        raise InputError(
            f"model={name}: {type(model).__name__} is not the layers of {type(language).__name__} with a linear score on them: use another model"
        )
    setattr(model, model.base_model_prefix, language.base_model)
    head = ScoreHead(score.in_features)
    model.score = head.to(language.device, next(language.base_model.parameters()).dtype)
    with torch.no_grad():
        model.score.weight.zero_() if weight is None else model.score.weight.copy_(weight)
    return model.eval()

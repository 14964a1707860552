"""A reward model: a sequence classifier of transformers with one output, its own tokenizer and its own chat template.

Its folder holds the whole model, or an adapter (LoRA) that names its base; the two are then merged when they are loaded.

In: answers. Out: the classifier's number for each. `ready.py` makes a `RewardModel` of `reward_model:FOLDER`; `score.py`
gives it all answers of a step, which it judges in batches of about equal length.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo.config import Model
from gspo.errors import InputError
from gspo.hub import out_of_reach
from gspo.rewards.call import Item
from gspo.rewards.runner import Outcome
from gspo.tasks.pairs import judged_ids, judged_text
from gspo.tasks.render import as_messages
from gspo.tasks.template import leaves_out
from gspo.types import Status

if TYPE_CHECKING:
    import torch

BATCH_TOKENS = 8192
"""Tokens, with padding, that go through the model at once."""


@dataclass
class RewardModel:
    """A loaded classifier."""

    name: str
    model: Any
    tokenizer: Any
    prompt: str
    """Column of the prompt: text, or chat messages."""
    system: str | None

    def judge(self, items: Sequence[Item]) -> list[Outcome]:
        """An outcome for each item, in order; an answer that is longer than the model's positions has failed, and is not cut,
        and so has one that its chat template refuses."""
        start = time.perf_counter()
        faults: dict[int, str] = {}
        ids = [self._ids(item, i, faults) for i, item in enumerate(items)]
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        for i, each in enumerate(ids):
            if limit is not None and len(each) > limit:
                faults[i] = f"{len(each)} tokens, more than its {limit} positions"
        fitting = [i for i in range(len(ids)) if i not in faults]
        scores: dict[int, float] = {}
        for batch in _batches(sorted(fitting, key=lambda i: len(ids[i])), [len(each) for each in ids]):
            scores |= dict(zip(batch, self._scores([ids[i] for i in batch]), strict=True))
        seconds = (time.perf_counter() - start) / max(1, len(items))
        return [
            Outcome((scores[i],), Status.OK, seconds)
            if i in scores
            else Outcome((None,), Status.CRASHED, seconds, f"{self.name}: {faults[i]}")
            for i in range(len(items))
        ]

    def require_shown(self, prompt: Any) -> None:
        """Raise InputError if the chat template refuses an answer to a prompt, or leaves out what was asked or said."""
        answer = "an answer"
        text = judged_text(self.tokenizer, prompt, answer, self.system)
        for what, content in (("question", as_messages(prompt)[-1]["content"]), ("answer", answer)):
            if leaves_out(content, text):
                raise InputError(
                    f"the chat template of {self.name} leaves the {what} out, or a part of it: of {str(content)[:40]!r} it makes "
                    f"…{text[-80:]!r}. Give its tokenizer the template that it was trained with"
                )

    def _ids(self, item: Item, index: int, faults: dict[int, str]) -> list[int]:
        try:
            return judged_ids(self.tokenizer, item.columns[self.prompt], item.completions[0], self.system)
        except InputError as error:
            faults[index] = str(error)
            return []

    def _scores(self, batch: list[list[int]]) -> list[float]:
        import torch

        length = max(map(len, batch))
        pad = self._pad(batch)
        tokens = torch.full((len(batch), length), pad)
        mask = torch.zeros((len(batch), length), dtype=torch.long)
        for row, ids in enumerate(batch):
            tokens[row, : len(ids)] = torch.tensor(ids)
            mask[row, : len(ids)] = 1
        # Decoders take the output at the last token that is not the padding token: it has to be one that no answer has.
        self.model.config.get_text_config().pad_token_id = self.model.config.pad_token_id = pad
        with torch.inference_mode():
            logits: torch.Tensor = self.model(
                input_ids=tokens.to(self.model.device), attention_mask=mask.to(self.model.device)
            ).logits
        return [float(value) for value in logits[:, 0].float().cpu()]

    def _pad(self, batch: list[list[int]]) -> int:
        used = {token for ids in batch for token in ids}
        own = self.tokenizer.pad_token_id
        if own is not None and own not in used:
            return int(own)
        return next(i for i in range(int(self.model.config.get_text_config().vocab_size)) if i not in used)


def _batches(order: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Cut indices, shortest first, so that each batch times its longest stays within BATCH_TOKENS."""
    found: list[list[int]] = []
    for i in order:
        if found and (len(found[-1]) + 1) * lengths[i] <= BATCH_TOKENS:
            found[-1].append(i)
        else:
            found.append([i])
    return found


def load_classifier(name: str, device: str | None, where: str) -> tuple[Any, Any]:
    """The model and its tokenizer.

    Raises:
        InputError: no such folder; not a classifier, or one of several classes; no such device.
    """
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    from gspo.models.load import without_progress_bars
    from gspo.models.lora import is_adapter
    from gspo.models.runs import no_checkpoint
    from gspo.models.scorer import merged_scorer

    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    folder = Path(name).expanduser()
    if wrong := no_checkpoint(folder):
        raise InputError(f"{where}: {wrong}")
    if is_adapter(folder):
        try:
            policy = merged_scorer(Model(name=str(folder), device=place, dtype="float32"))
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        return policy.model.requires_grad_(False), AutoTokenizer.from_pretrained(folder)
    silent = None if folder.exists() else out_of_reach()
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{where}: {name} is no model that transformers can read: {silent or str(error).splitlines()[0]}"
        ) from error
    kinds = config.architectures or []
    if not any(kind.endswith("ForSequenceClassification") for kind in kinds):
        raise InputError(
            f"{where}: {name} is {', '.join(kinds) or 'a model of no named kind'}, not a sequence classifier: its head would be random. "
            "A reward model is saved by AutoModelForSequenceClassification with num_labels=1"
        )
    if config.num_labels != 1:
        raise InputError(
            f"{where}: {name} has {config.num_labels} classes; a reward model gives one number (num_labels=1)"
        )
    try:
        dtype = torch.float32 if place.startswith("cpu") else "auto"
        with without_progress_bars():
            model = AutoModelForSequenceClassification.from_pretrained(name, dtype=dtype)
        return model.eval().requires_grad_(False).to(place), AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"{where}: {name} cannot be loaded on {place}: {str(error).splitlines()[0]}") from error

"""What config.json tells of a model is held against prompts and keys before its weights are read: here there are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo import settings
from gspo.build import build
from gspo.errors import InputError
from gspo.models.tiny import tiny_tokenizer, untrained_dense, untrained_moe


@pytest.mark.parametrize(
    ("made", "words", "said"),
    [
        (untrained_dense, ["sampling.max_new_tokens=1000000"], "max_new_tokens=1000000 exceed the model's"),
        (untrained_dense, ["algorithm.load_balance=0.1"], "algorithm.load_balance=0.1 has no effect with"),
        (untrained_dense, ["algorithm.routing=old"], "algorithm.routing=old has no effect with"),
        (untrained_dense, [], "could not be loaded"),
        (untrained_moe, ["algorithm.load_balance=0.1"], "could not be loaded"),
    ],
)
def test_what_does_not_fit_is_refused_before_weights_are_read(
    made: object, words: list[str], said: str, tmp_path: Path
) -> None:
    assert callable(made)
    folder = tmp_path / "model"
    made().config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    with pytest.raises(InputError, match=said):
        build(settings.load("tiny", [f"model={folder}", f"dir={tmp_path / 'run'}", "threads=1", *words]))
    assert not (tmp_path / "run").exists()

"""The models that come with this package: whole, as their recipe makes them, and as good as is said of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from gspo import config, settings
from gspo.engines.local import LocalEngine
from gspo.errors import InputError
from gspo.evaluate import evaluate
from gspo.models import builtin
from gspo.models.load import load_policy
from gspo.rewards.load import load, open_scorers
from gspo.rewards.ready import Around
from gspo.stage_config import Sft
from gspo.tasks.data import held_out_rows
from gspo.tasks.render import render
from gspo.tasks.sort import Sort

SHIPPED = sorted(builtin._SHIPPED)

# Share of right answers at temperature 1, on 1024 held-out prompts of each length.
SUCCESS = {
    ("tiny-dense", 5): 0.53,
    ("tiny-dense", 8): 0.32,
    ("tiny-dense", 10): 0.18,
    ("tiny-moe", 5): 0.51,
    ("tiny-moe", 8): 0.32,
    ("tiny-moe", 10): 0.20,
    ("fine-moe", 5): 0.55,
    ("fine-moe", 8): 0.35,
    ("fine-moe", 10): 0.20,
}


@pytest.mark.parametrize(("name", "letters"), SUCCESS)
def test_the_trained_models_know_how_to_sort_as_well_as_is_said(name: str, letters: int) -> None:
    policy = load_policy(config.Model(name=name, dtype="float32"))
    data = config.Data(source=f"sort:{letters}")
    rows = held_out_rows(data, config.Eval(limit=192))
    assert rows is not None
    tokens = len(Sort((letters,)).rows("train", limit=1)[0][0]["answer"]) + 1
    engine = LocalEngine(policy, config.Sampling(max_new_tokens=tokens, max_rows=192), seed=0)
    prompts = render(rows, policy.tokenizer, data).prompts
    judging = config.Judging()
    around = Around(rows, "prompt", None, tokens, judging)
    (scorer,), _ = open_scorers([(load([config.RewardRule(function="sorted")], around), rows)], judging)
    found, _ = evaluate(engine, prompts, scorer)
    expected = SUCCESS[name, letters]
    spread = (expected * (1 - expected) * (1 / 192 + 1 / 1024)) ** 0.5
    assert abs(found.reward.value - expected) < 3.5 * spread


@pytest.mark.parametrize("name", SHIPPED)
def test_the_recipe_starts_from_the_same_model_untrained(name: str) -> None:
    recipe = settings.load_as(Sft, name)
    trained, start = (load_policy(config.Model(name=n, dtype="float32")) for n in (name, recipe.model.name))
    assert start.source.sha256 != trained.source.sha256
    shapes = [{key: p.shape for key, p in policy.model.named_parameters()} for policy in (trained, start)]
    assert shapes[0] == shapes[1]
    assert type(trained.model) is type(start.model)
    ours, theirs = (policy.model.config.to_dict() for policy in (trained, start))
    assert {key for key in ours if ours[key] != theirs.get(key)} <= {"architectures", "dtype", "_name_or_path"}
    shipped = load_file(builtin._WEIGHTS / name / "model.safetensors")
    assert sum(weight.nbytes for weight in shipped.values()) < 1_000_000


@pytest.mark.parametrize("name", SHIPPED)
def test_damaged_or_missing_weights_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(builtin._WEIGHTS / name, tmp_path / name)
    monkeypatch.setattr(builtin, "_WEIGHTS", tmp_path)
    assert load_policy(config.Model(name=name)).source.name == name
    file = tmp_path / name / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(InputError, match=rf"model={name}: .*model\.safetensors has sha256 .* damaged"):
        load_policy(config.Model(name=name))
    file.unlink()
    with pytest.raises(InputError, match="is missing: install gspo again"):
        load_policy(config.Model(name=name))

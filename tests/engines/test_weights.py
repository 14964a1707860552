"""After a sync the engine is one that has never known other weights, and the learner gets its model back as it was."""

from __future__ import annotations

import pytest
import torch
from asking import UNEVEN, answers, named, requests
from chains import ask, chain, policy_of, tokens, written
from families import make

from gspo import RunError
from gspo.config import Sampling
from gspo.engines.local import LocalEngine
from gspo.models.attention import Packed


def test_new_weights_are_used_after_load() -> None:
    """NVIDIA-NeMo/RL#4018, vllm-project/vllm#9744: an engine that goes on with what it remembers of the old ones."""
    policy = chain({5: {6: 0.9, 7: 0.1}, 6: {8: 0.9, 5: 0.1}}, stop_ids=(2,), dtype=torch.bfloat16)
    engine = LocalEngine(policy, Sampling(max_new_tokens=8), seed=0)
    engine.submit(ask([4, 5], 1, greedy=True))
    before = next(engine.collect())
    with torch.no_grad():
        policy.model.lm_head.weight.neg_()
    engine.load(policy.model.named_parameters(), version=1)
    engine.submit(ask([4, 5], 1, greedy=True))
    (after,) = engine.collect()
    (fresh,) = answers(policy, [ask([4, 5], 1, greedy=True)], max_new_tokens=8)
    assert tokens([after]) == tokens([fresh])
    assert written(before.rollouts[0])[:2] == [6, 8]
    assert written(after.rollouts[0])[0] not in (6, 7)
    assert [g.rollouts[0].versions for g in (before, after)] == [(0, 0), (1, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changed", ["head", "layer", "embedding"])
def test_greedy_answers_are_those_of_the_new_weights(dtype: torch.dtype, changed: str) -> None:
    """NVIDIA-NeMo/RL#4018: after a sync the engine is one that has never known other weights."""
    model = make("qwen3", dtype)
    policy = policy_of(model, (2,))
    asked = [ask(ids, 2, ordinal=i, greedy=True) for i, ids in enumerate(UNEVEN)]
    engine = LocalEngine(policy, Sampling(max_new_tokens=12), seed=0)
    found = []
    for version in range(2):
        for request in asked:
            engine.submit(request)
        found.append(tokens(list(engine.collect())))
        part = {
            "head": model.lm_head,
            "layer": model.model.layers[-1].mlp.down_proj,
            "embedding": model.get_input_embeddings(),
        }[changed]
        with torch.no_grad():
            part.weight.neg_() if version == 0 else None
        engine.load(model.named_parameters(), version=version + 1)
    assert found[1] == tokens(answers(policy, asked))
    assert all(found[0][key] != found[1][key] for key in found[0])


def test_a_prompt_kept_for_later_answers_is_forgotten_with_its_weights() -> None:
    """One row: the group's second answer starts after the weights have changed."""
    policy = policy_of(make("llama"), (2,))
    engine = LocalEngine(policy, Sampling(max_new_tokens=6, max_rows=1), seed=0)
    engine.submit(ask([5, 6, 7], 2, greedy=True))
    while not engine._flight.prompts or engine._flight.answers:
        assert engine._advance() == []
    with torch.no_grad():
        policy.model.model.layers[-1].mlp.down_proj.weight.neg_()
    engine.load([], version=1)
    (group,) = engine.collect()
    (fresh,) = answers(policy, [ask([5, 6, 7], 1, greedy=True)], max_new_tokens=6)
    assert written(group.rollouts[1]) == written(fresh.rollouts[0]) != written(group.rollouts[0])
    assert [r.versions for r in group.rollouts] == [(0, 0), (1, 1)]


def test_packed_weights_end_with_the_collection() -> None:
    policy = policy_of(make("llama", torch.bfloat16), (2,))
    engine = LocalEngine(policy, Sampling(max_new_tokens=6), seed=0)
    for i, ids in enumerate(UNEVEN):
        engine.submit(ask(ids, 2, ordinal=i))
    for _ in engine.collect():  # also between two answers
        assert all("forward" not in vars(m) for m in policy.model.modules() if type(m) is torch.nn.Linear)
    assert engine._flight.decoder is None


def test_weights_cannot_change_under_answers_being_written() -> None:
    engine = LocalEngine(named("random-dense"), Sampling(max_new_tokens=8, max_rows=1), seed=0)
    for request in requests(count=1)[:2]:
        engine.submit(request)
    groups = engine.collect()
    next(groups)
    engine.load([], version=1)  # between two answers, with one row, nothing is being written
    assert next(groups).rollouts[0].versions == (1, 1)
    engine = LocalEngine(chain({5: {5: 1.0}, 6: {2: 1.0}}, stop_ids=(2,)), Sampling(max_new_tokens=8), seed=0)
    engine.submit(ask([5], 1))
    engine.submit(ask([6], 1, ordinal=1))
    next(engine.collect())
    with pytest.raises(RunError, match="while 1 answers were being written"):
        engine.load([], version=1)


def test_sampling_leaves_the_model_trainable() -> None:
    policy = named("random-dense")
    answers(policy, requests(count=1))
    ids = torch.tensor([[5, 6, 7]])
    policy.model(input_ids=ids, layout=Packed([3]), use_cache=False).logits.sum().backward()
    assert all(p.grad is not None for p in policy.model.parameters())

"""The engine's answers depend on what was asked, never on how it was scheduled, and carry the true probabilities."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from asking import PROMPTS, UNEVEN, answers, named, requests
from chains import ask, chain, policy_of, prompt, tokens, written
from compiled import needs_kernels
from families import CONFIGS, VOCABULARY, make, packed
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, MistralConfig

from gspo import InputError, RunError
from gspo.config import Model, Sampling
from gspo.engines import local
from gspo.engines.engine import Request
from gspo.engines.local import LocalEngine
from gspo.models import native
from gspo.models.attention import Packed
from gspo.models.heads import trained_logprobs
from gspo.models.load import Policy, load_policy
from gspo.types import Segment, Stop


def mistral() -> Policy:
    """Every layer sees 4 tokens."""
    shape = dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    config = MistralConfig(vocab_size=58, sliding_window=4, initializer_range=0.3, max_position_embeddings=512, **shape)
    torch.manual_seed(0)
    return policy_of(AutoModelForCausalLM.from_config(config, dtype=torch.float64), (2,))


POLICIES = {"llama": lambda: named("random-dense"), "qwen3_moe": lambda: named("random-moe"), "mistral": mistral}


# ------------------------------------------------------------------------------ scheduling


@pytest.mark.parametrize("kind", POLICIES)
def test_tokens_do_not_depend_on_scheduling(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = POLICIES[kind]()
    expected = tokens(answers(policy, requests()))
    assert len(expected) == 25
    assert len({tuple(ids) for ids in expected.values()}) > 20
    assert any(len(ids) < 12 for ids in expected.values())
    for rows in (1, 7):
        assert tokens(answers(policy, requests(), max_rows=rows)) == expected, rows
    assert tokens(answers(policy, requests()[::-1], max_rows=6)) == expected
    alone = [group for request in requests() for group in answers(policy, [request])]
    assert tokens(alone) == expected
    monkeypatch.setattr(local, "_PREFILL_TOKENS", 8)
    for budget in (60, 170):  # one answer alone, and prompts side by side
        monkeypatch.setattr(local, "_CACHE_TOKENS", budget)
        assert tokens(answers(policy, requests(), max_rows=16)) == expected, budget


@pytest.mark.parametrize("kind", POLICIES)
def test_greedy_is_the_argmax_of_the_stock_model(kind: str) -> None:
    policy = POLICIES[kind]()
    found = tokens(answers(policy, requests(count=2, greedy=True), max_rows=4))
    policy.model.set_attn_implementation("sdpa")
    for (ordinal, _), ids in found.items():
        seen = torch.tensor(PROMPTS[ordinal])
        for token in ids:
            logits = policy.model(input_ids=seen[None], use_cache=False).logits[0, -1]
            assert token == int(logits.argmax())
            seen = torch.cat([seen, torch.tensor([token])])


def test_a_rollout_depends_on_its_key_alone() -> None:
    policy = named("random-dense")
    first = tokens(answers(policy, [ask([5, 6], 8, ordinal=3)]))
    assert tokens(answers(policy, [ask([5, 6], 3, ordinal=3)])) == {key: first[key] for key in list(first)[:3]}
    others = [
        tokens(answers(policy, [ask([5, 6], 8, ordinal=4)])),
        tokens(answers(policy, [ask([5, 6], 8, ordinal=3, stream=1)])),
        tokens(answers(policy, [ask([5, 6], 8, ordinal=3)], seed=1)),
    ]
    for other in others:
        assert all(a != b for a, b in zip(first.values(), other.values(), strict=True))


def test_groups_come_as_they_finish_and_whole() -> None:
    """Ordinal 0 writes to the limit, ordinal 1 stops at once; both keep the order of their answers."""
    policy = chain({5: {5: 1.0}, 6: {2: 1.0}}, stop_ids=(2,))
    groups = answers(policy, [ask([5], 3, ordinal=0), ask([6], 3, ordinal=1)], max_rows=4)
    assert [g.ordinal for g in groups] == [1, 0]
    assert [[r.index for r in g.rollouts] for g in groups] == [[0, 1, 2]] * 2


@given(
    family=st.sampled_from(["llama", "gemma3"]),
    groups=st.lists(st.tuples(st.integers(1, 150), st.integers(1, 4)), min_size=1, max_size=4),
    rows=st.integers(2, 10),
    budget=st.sampled_from([1, 200, 500, 10_000]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=12, deadline=None)
def test_any_batch_is_one_answer_at_a_time(
    family: str, groups: list[tuple[int, int]], rows: int, budget: int, seed: int
) -> None:
    policy = policy_of(make(family), (2, 3, 4, 5))
    numbers = np.random.default_rng(seed)
    asked = [
        ask(numbers.integers(3, VOCABULARY, length).tolist(), count, ordinal=i)
        for i, (length, count) in enumerate(groups)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "_CACHE_TOKENS", budget)
        patch.setattr(local, "_PREFILL_TOKENS", budget)
        found = answers(policy, asked, max_rows=rows, max_new_tokens=8)
    alone = answers(policy, asked, max_rows=1, max_new_tokens=8)
    assert tokens(found) == tokens(alone)
    logprobs = [
        np.concatenate([r.segments[0].logprobs for g in sorted(x, key=lambda g: g.ordinal) for r in g.rollouts])
        for x in (found, alone)
    ]
    assert np.allclose(*logprobs, atol=1e-6)


@needs_kernels
def test_the_kernels_answers_do_not_depend_on_the_batch() -> None:
    """In bfloat16, to the last bit: no row's sums feel another row."""
    shape = dict(hidden_size=96, intermediate_size=64, num_hidden_layers=2, num_attention_heads=3, head_dim=32)
    config = LlamaConfig(vocab_size=64, num_key_value_heads=1, initializer_range=0.2, **shape)
    torch.manual_seed(0)
    policy = policy_of(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), (2,))
    policy = replace(policy, kernels=native.kernels())
    asked = [ask(list(range(3, 40)), 12)]
    expected, *others = (answers(policy, asked, max_rows=rows, max_new_tokens=40) for rows in (1, 5, 12))
    lengths = [len(ids) for ids in tokens(expected).values()]
    assert len(set(lengths)) > 2  # rows leave, and others come
    for found in others:
        assert tokens(found) == tokens(expected)
        for a, b in zip(found[0].rollouts, expected[0].rollouts, strict=True):
            assert np.array_equal(a.segments[0].logprobs, b.segments[0].logprobs)
    rows = [(expected[0].prompt.token_ids, r.segments[0]) for r in expected[0].rollouts]
    gap_N = np.concatenate([s.logprobs for _, s in rows]) - trainers(policy, rows, temperature=1.0)
    assert float(np.abs(gap_N).mean()) < 0.02


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_a_prompt_goes_through_the_model_once(rows: int) -> None:
    """However few of its group's answers start together."""
    policy = named("random-dense")
    seen: list[int] = []
    policy.model.get_input_embeddings().register_forward_hook(lambda _, args, __: seen.append(args[0].numel()))
    groups = answers(policy, requests(), max_rows=rows)
    fed_back = sum(r.policy_tokens - 1 for g in groups for r in g.rollouts)  # all but an answer's last token
    assert sum(seen) == sum(len(ids) for ids in PROMPTS) + fed_back


@pytest.mark.parametrize("budget", [300, 600, 2000])
def test_memory_follows_the_token_budget(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 answers to prompts of 1 to 165 tokens; as rows padded to the longest they would take 5664 tokens."""
    policy = named("random-dense")
    monkeypatch.setattr(local, "_CACHE_TOKENS", budget)
    engine = LocalEngine(policy, Sampling(max_new_tokens=12), seed=0)
    for i, ids in enumerate(UNEVEN):
        engine.submit(ask(ids, 8, ordinal=i))
    held, rows = [], []

    def watch(_: Any, args: Any, __: Any) -> None:
        held.append(engine._flight.cache.tokens)
        rows.append(len(engine._flight.answers))

    policy.model.get_input_embeddings().register_forward_hook(watch)
    assert len(list(engine.collect())) == 4
    assert budget / 3 < max(held) <= budget
    assert max(rows) == {300: 9, 600: 23, 2000: 32}[budget]
    assert engine._flight.cache.tokens == 0


# ------------------------------------------------------------------------------ probabilities


@pytest.mark.parametrize("family", CONFIGS)
def test_logprobs_are_the_trainers(family: str) -> None:
    """Unchanged weights, temperature 0.6: the two sides differ by rounding only (huggingface/trl#4159)."""
    policy = policy_of(make(family, torch.float32), (2,))
    asked = [ask(ids, count, ordinal=i) for i, (ids, count) in enumerate(zip(UNEVEN, (1, 6, 3, 2), strict=True))]
    groups = answers(policy, asked, temperature=0.6, max_rows=7)
    rows = [(g.prompt.token_ids, r.segments[0]) for g in groups for r in g.rollouts]
    expected_N = trainers(policy, rows, temperature=0.6)
    found_N = np.concatenate([s.logprobs for _, s in rows])
    assert found_N.dtype == np.float32
    assert float(np.abs(found_N - expected_N).max()) < 1e-5
    assert found_N.min() < -2
    assert len(rows) == 12


def trainers(policy: Policy, rows: list[tuple[np.ndarray, Segment]], temperature: float) -> np.ndarray:
    """Log-probabilities of the sampled tokens, as the learner computes them."""
    sequences = [torch.from_numpy(np.concatenate([ids, s.token_ids])) for ids, s in rows]
    inputs = packed(sequences, [len(s.token_ids) for _, s in rows])
    logprob_N, _ = trained_logprobs(
        policy.model, layout=Packed([len(x) for x in sequences]), temperature=temperature, **inputs
    )
    return logprob_N.detach().numpy()


def test_sampling_follows_the_distribution() -> None:
    p = {4: 0.5, 5: 0.3, 6: 0.15, 7: 0.05}
    groups = answers(
        chain({3: p}, stop_ids=(2,)), [ask([3], 2000, ordinal=i) for i in range(2)], max_new_tokens=1, max_rows=512
    )
    drawn = [(written(r)[0], float(r.segments[0].logprobs[0])) for g in groups for r in g.rollouts]
    counts = Counter(token for token, _ in drawn)
    assert set(counts) == set(p)
    for token, probability in p.items():
        assert abs(counts[token] - 4000 * probability) < 4 * (4000 * probability * (1 - probability)) ** 0.5
    for token, logprob in drawn:
        assert logprob == pytest.approx(np.log(p[token]), abs=1e-6)


@pytest.mark.parametrize(
    ("keys", "support"), [({"top_k": 2}, {4: 0.625, 5: 0.375}), ({"top_p": 0.81}, {4: 10 / 19, 5: 6 / 19, 6: 3 / 19})]
)
def test_truncation_renormalises(keys: dict[str, Any], support: dict[int, float]) -> None:
    policy = chain({3: {4: 0.5, 5: 0.3, 6: 0.15, 7: 0.05}}, stop_ids=(2,))
    (group,) = answers(policy, [ask([3], 200)], max_new_tokens=1, **keys)
    seen = {written(r)[0]: float(r.segments[0].logprobs[0]) for r in group.rollouts}
    assert seen == pytest.approx({token: np.log(p) for token, p in support.items()}, abs=1e-6)


def test_a_checkpoints_sampling_values_change_nothing(tmp_path: Path) -> None:
    policy = load_policy(Model(name="random-dense", dtype="float64"))
    policy.model.generation_config = GenerationConfig(
        do_sample=True, top_k=1, temperature=0.1, top_p=0.5, repetition_penalty=1.3, eos_token_id=2
    )
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    again = load_policy(Model(name=str(tmp_path), dtype="float64"))
    assert again.model.generation_config.top_k == 1
    assert tokens(answers(again, requests())) == tokens(answers(policy, requests()))
    described = LocalEngine(again, Sampling(), seed=0).describe()
    assert (described["temperature"], described["top_k"], described["top_p"], described["stop_ids"]) == (
        1.0,
        0,
        1.0,
        [2],
    )


# ------------------------------------------------------------------------------ ends


def test_masks_and_ends_come_from_what_was_sampled() -> None:
    """verl-project/verl#212, huggingface/trl#4970: pad = eos = 2, stop ids {2, 9}, at most 4 tokens."""
    table = {3: {7: 0.7, 2: 0.3}, 7: {8: 0.6, 9: 0.4}, 8: {2: 0.5, 6: 0.5}, 6: {5: 1.0}}
    (group,) = answers(chain(table, stop_ids=(2, 9)), [ask([3], 64)], max_new_tokens=4)
    ends = {(7, 8, 2): Stop.EOS, (7, 9): Stop.EOS, (7, 8, 6, 5): Stop.LENGTH, (2,): Stop.EOS}
    assert {tuple(written(r)): r.stop for r in group.rollouts} == ends
    for r in group.rollouts:
        assert r.segments[0].policy_mask.tolist() == [True] * len(written(r))
        assert r.policy_tokens == len(written(r))


def test_the_pad_token_may_stand_in_an_answer() -> None:
    (group,) = answers(chain({3: {7: 1.0}, 7: {2: 1.0}, 2: {8: 1.0}, 8: {9: 1.0}}, stop_ids=(9,)), [ask([3], 1)])
    (rollout,) = group.rollouts
    assert (written(rollout), rollout.stop) == ([7, 2, 8, 9], Stop.EOS)


def test_text_leaves_special_tokens_out() -> None:
    policy = chain({3: {40: 1.0}, 40: {41: 1.0}, 41: {2: 1.0}}, stop_ids=(2,), vocabulary=58)
    (group,) = answers(policy, [ask([3], 1)])
    assert group.rollouts[0].text == policy.tokenizer.decode([40, 41])
    assert written(group.rollouts[0]) == [40, 41, 2]


# ------------------------------------------------------------------------------ refusals


def test_weights_that_are_not_finite_stop_the_run_by_name() -> None:
    policy = named("random-dense")
    with torch.no_grad():
        policy.model.model.norm.weight[3] = float("nan")
    engine = LocalEngine(policy, Sampling(), seed=0)
    engine.load([], version=4)
    engine.submit(Request(prompt(17, 5, 6), ordinal=0, count=2))
    with pytest.raises(RunError, match=r"row 17, answer 0: weights version 4"):
        list(engine.collect())


def test_a_prompt_beyond_the_models_positions_is_refused() -> None:
    engine = LocalEngine(chain({}, stop_ids=(2,)), Sampling(max_new_tokens=500), seed=0)
    engine.submit(ask([3] * 12, 1))
    with pytest.raises(InputError, match="row 0: a prompt of 13 tokens"):
        engine.submit(ask([3] * 13, 1))


def test_a_request_for_no_answers_is_refused() -> None:
    with pytest.raises(ValueError, match="0 answers"):
        ask([3], 0)

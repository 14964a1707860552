"""The rows of the benchmark as data: what is done, against whom, and the bars.

`race.py`, `page.py` and `scaling.py` read `ROWS`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Peer:
    """Another way to do the same work."""

    name: str
    env: Literal["trl", "vllm", "llama", "ours"]
    """Folder under .peers; ours: the interpreter that runs the race."""
    script: str
    """File under benchmarks/."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Fields of `Work` that differ from the row's."""
    counts: bool = True
    """The fastest (smallest) of the peers that count is the one we are compared with; the others stand beside."""


@dataclass(frozen=True)
class Also:
    """A second ratio of a row, from the sides of another one."""

    row: str
    must: float


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    title: str
    """The work, for the page."""
    against: str
    measured: str
    """What the clock or the meter covers, on both sides."""
    field: Literal["seconds", "tokens_per_second", "rss_gb", "share"]
    """What of a worker's answer is compared."""
    unit: str
    must: float
    aim: float | None
    ours: dict[str, Any]
    """Fields of `Work`, for both sides."""
    peers: tuple[Peer, ...] = ()
    ours_alone: dict[str, Any] = field(default_factory=dict)
    """Fields of `Work` for our side only."""
    repeats: int = 3
    peer_repeats: int = 2
    keep_pages: bool = True
    """Give both sides a malloc that keeps its pages, through the environment; else each runs as it comes."""
    timeout: float = 900
    """Seconds after which a worker is stopped."""
    better: Literal["more", "less"] = "more"
    """Whether the ratio should be large or small."""
    also: Also | None = None

    def ratio(self, ours: float, theirs: float | None) -> float | None:
        """How many times as fast we are; of memory, our share of theirs; of a share, itself."""
        if self.field == "share":
            return ours
        if theirs is None:
            return None
        return theirs / ours if self.field == "seconds" else ours / theirs


def verdict(ratio: float | None, must: float, aim: float | None, better: str) -> str:
    """aim, met or miss; "not raced" without a ratio."""
    if ratio is None:
        return "not raced"
    sign = 1 if better == "more" else -1
    if aim is not None and sign * ratio >= sign * aim:
        return "aim"
    return "met" if sign * ratio >= sign * must else "miss"


_STEP = "sampling, reward, old log-probabilities, update with optimizer, new weights to the engine, metrics"
_TRL = Peer("TRL", "trl", "peers/trl_step.py")
_TRL_EAGER = Peer("TRL, eager attention", "trl", "peers/trl_step.py", {"variant": "eager"})
_ONE_STEP = {"warmup": 0, "after": 0}
_LLAMA = "peers/llama_rollout.py"
_GENERATE = Peer("transformers generate", "trl", "peers/generate.py")
_ROLLOUT = "from new weights to the last sampled token, log-probabilities of the sampled tokens included"
_VLLM = {
    name: Peer(f"vLLM, {name}", "vllm", "peers/vllm_rollout.py", {"variant": variant})
    for name, variant in (
        ("eager", "eager"),
        ("eager, logprobs=0", "eager-logprobs0"),
        ("compiled", "compiled"),
    )
}
_LONG = {"pad": 470, "group": 16, "forced": False}

ROWS: dict[str, Row] = {
    row.name: row
    for row in (
        Row(
            "step",
            "GSPO step: 8 prompts of about 46 tokens x 8 answers of exactly 64, one update, no group skipped",
            "TRL 1.16 GRPOTrainer",
            f"the second step of a run: {_STEP}",
            "seconds",
            "s a step",
            3,
            6,
            {"kind": "step"},
            (_TRL, _TRL_EAGER),
        ),
        Row(
            "step-natural",
            "the same with answers that end where the model ends them",
            "TRL 1.16 GRPOTrainer",
            f"the second step of a run: {_STEP}",
            "seconds",
            "s a step",
            4,
            8,
            {"kind": "step", "forced": False},
            (
                _TRL,
                _TRL_EAGER,
                Peer("gspo, real reward, groups that agree skipped", "ours", "ours.py", {"real_reward": True}, False),
            ),
        ),
        Row(
            "step-4-updates",
            "the first row with four updates of two groups each",
            "TRL 1.16 GRPOTrainer",
            f"the second step of a run: {_STEP}",
            "seconds",
            "s a step",
            3,
            6,
            {"kind": "step", "updates": 4},
            (_TRL, _TRL_EAGER),
        ),
        Row(
            "step-long",
            "8 prompts of about 512 tokens x 16 answers of up to 64 that end where the model ends them, one update",
            "TRL 1.16 GRPOTrainer",
            f"the first step of a run: {_STEP}",
            "seconds",
            "s a step",
            10,
            25,
            {"kind": "step", **_LONG, **_ONE_STEP},
            (_TRL,),
            ours_alone={"after": 1},
            repeats=1,
            peer_repeats=1,
            timeout=2400,
        ),
        Row(
            "rollout-hf",
            "64 answers (8 prompts of about 46 tokens x 8) of exactly 64 tokens with their log-probabilities",
            "transformers generate with output_scores",
            _ROLLOUT,
            "tokens_per_second",
            "tokens/s",
            2.5,
            5,
            {"kind": "rollout"},
            (
                _GENERATE,
                Peer("transformers generate, static cache", "trl", "peers/generate.py", {"variant": "static"}),
                Peer("transformers generate_batch", "trl", "peers/generate.py", {"variant": "batch"}, False),
                Peer("llama.cpp, 4-bit weights not repacked, 8 answers at a time", "llama", _LLAMA, {}, False),
                Peer("llama.cpp, 4-bit weights not repacked, 64 at a time", "llama", _LLAMA, {"variant": "all"}, False),
            ),
        ),
        Row(
            "rollout-vllm",
            "the same",
            "vLLM 0.32 for CPUs with logprobs",
            _ROLLOUT,
            "tokens_per_second",
            "tokens/s",
            1.2,
            2,
            {"kind": "rollout"},
            tuple(_VLLM.values()),
            timeout=1800,
        ),
        Row(
            "rollout-long",
            "128 answers (8 prompts of about 512 tokens x 16) of exactly 64 tokens with their log-probabilities",
            "vLLM 0.32 for CPUs with logprobs and prefix caching",
            _ROLLOUT,
            "tokens_per_second",
            "tokens/s",
            1.5,
            4,
            {"kind": "rollout", **_LONG, "forced": True},
            (_VLLM["eager"], _VLLM["compiled"]),
            timeout=1800,
        ),
        Row(
            "update-ceiling",
            "update of the first row: 6 x parameters x tree tokens / seconds, as a share of the bf16 matrix product's rate",
            "largest of torch.mm (4096,576)x(576,1536) and 2048^3 in bf16, measured before and after each update",
            "forward, loss, backward and optimizer; tree tokens: each prompt once a group, and the answers",
            "share",
            "of the ceiling",
            0.30,
            0.45,
            {"kind": "ceiling", "steps": 3},
            (Peer("plain transformers step", "ours", "ours.py", {"kind": "plain"}, False),),
            repeats=2,
        ),
        Row(
            "memory",
            "peak memory of the first row's process, float32 masters and Adam included, as a share",
            "TRL 1.16 GRPOTrainer (bf16 weights and Adam)",
            "peak resident memory of the process over two steps, each side with the malloc it comes with",
            "rss_gb",
            "GB",
            0.65,
            None,
            {"kind": "step"},
            (_TRL, _TRL_EAGER),
            repeats=1,
            peer_repeats=1,
            keep_pages=False,
            better="less",
            also=Also("step-long", 0.30),
        ),
        Row(
            "logprob-memory",
            "log-probabilities of 8 x 64 tokens in 8 x 512, forward and backward, vocabulary 50 000, hidden size 16",
            "one float32 tensor of logits [4096, 50000]: 819 MB",
            "growth of the peak over the memory before the pass, optimizer step included",
            "share",
            "of the tensor",
            0.20,
            0.10,
            {"kind": "logprob_memory", "prompts": 8, "dtype": "float32"},
            better="less",
        ),
    )
}

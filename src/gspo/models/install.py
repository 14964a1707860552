"""A model of transformers made ours: packed attention, policy head, shorter layers, held against its own computation.

In: a loaded model. Out: the same, changed in place, or refused. `load` calls it.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from gspo.errors import InputError
from gspo.models import formulas, fused, heads, layers, linear, native
from gspo.models.attention import ATTENTION, Packed
from gspo.models.heads import install_head, trained_logprobs
from gspo.models.native import Kernels
from gspo.models.routing import install_routing

log = logging.getLogger("gspo")


def prepare(model: Any, name: str) -> None:
    """Packed attention and policy head, held against the model's own computation on a few tokens."""
    family = type(model).__name__
    known = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    foreign = known - {"full_attention", "sliding_attention"}
    if foreign or not model._supports_attention_backend:
        kinds = f" ({', '.join(sorted(foreign))})" if foreign else ""
        raise InputError(
            f"model={name}: {family} has layers{kinds} that do not go through the attention interface of transformers, so they cannot be packed: use another model"
        )
    tokens_L = torch.randint(
        0, model.config.get_text_config().vocab_size, (2, 12), generator=torch.Generator().manual_seed(0)
    )
    tokens_L = tokens_L.to(model.device)
    own, head_output = _own_logits(model, tokens_L)
    if not own.isfinite().all():
        raise InputError(
            f"model={name}: its logits are not finite, so its weights hold values that are not: use another checkpoint"
        )
    if not torch.equal(own, head_output):
        raise InputError(
            f"model={name}: {family} changes its logits after the output layer (soft-capping or a scale), which the policy head does not do: use another model"
        )
    model.set_attn_implementation(ATTENTION)
    install_head(model)
    install_routing(model)
    fused.install(model, fused.Kernels())
    layers.install(model, layers.Kernels())
    linear.install(model)
    sources = torch.arange(11, device=model.device)
    found, _ = trained_logprobs(
        model,
        tokens_T=tokens_L.flatten(),
        position_T=torch.arange(12, device=model.device).repeat(2),
        layout=Packed([12, 12], model.device),
        source_N=torch.cat([sources, sources + 12]),
        target_N=tokens_L[:, 1:].flatten(),
        temperature=1.0,
    )
    expected = torch.log_softmax(own[:, :-1], -1).gather(-1, tokens_L[:, 1:, None]).flatten()
    gap = float((found.detach() - expected).abs().max())
    if not gap < 1e-3:
        raise InputError(
            f"model={name}: {family} gives log-probabilities {gap:.2g} away from its own ones when sequences are packed: use another model"
        )


@torch.no_grad()
def _own_logits(model: Any, tokens_L: Tensor) -> tuple[Tensor, Tensor]:
    """The logits that the model returns, and those that its output layer made."""
    seen: list[Tensor] = []
    handle = model.get_output_embeddings().register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    try:
        logits = model(input_ids=tokens_L, use_cache=False).logits
    finally:
        handle.remove()
    return logits, seen[0].to(logits.dtype)


def make_savable(model: Any, name: str) -> None:
    """transformers refuses to save contradictory generation settings; better to know now than after training."""
    try:
        model.generation_config.validate(strict=True)
    except ValueError as error:
        log.warning(
            "model=%s: its generation_config could not be saved (%s); only its token ids are kept",
            name,
            str(error).splitlines()[0],
        )
        old = model.generation_config
        model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
            bos_token_id=old.bos_token_id, eos_token_id=old.eos_token_id, pad_token_id=old.pad_token_id
        )


def checkpoint_activations(model: Any, name: str) -> None:
    """Recompute each layer in the backward pass, with everything else as in eval mode.

    transformers does it for layers in training mode, so the layer modules alone are put there: dropout, which
    sits in modules of its own, stays off.
    """
    if not model.supports_gradient_checkpointing:
        raise InputError(f"model.gradient_checkpointing: {type(model).__name__} ({name}) does not support it")
    new = getattr(model, "activation_checkpointing_enable", None)  # the name since transformers 5.24
    (new or model.gradient_checkpointing_enable)({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


_WORTH_COMPILING = 50_000_000
"""Parameters from which on compiling pays within a few updates: its seconds do not depend on the size."""


def fuse(model: Any, wanted: bool | None, parameters: int, compute: torch.dtype) -> tuple[str, Kernels | None]:
    """Compile the elementwise formulas, or take the kernels, if that is wanted, or, left open, worth it and possible; words
    that say so, and the kernels."""
    if wanted is False or (wanted is None and parameters < _WORTH_COMPILING):
        return "", None
    refused = ""
    if compute == torch.bfloat16 and model.device.type == "cpu":
        try:
            kernels = native.kernels()
        except native.UnavailableError as error:
            refused = f"; no kernels of its own: {error}"
        else:
            _compute_by(model, formulas.of_layers(kernels), formulas.of_head(kernels))
            return " (decoding, norms, gates, positions and log-probabilities by kernels of its own)", kernels
    made = fused.compiled()
    try:
        made.gate(torch.ones(2, 8, device=model.device), torch.ones(2, 8, device=model.device))
    except Exception as error:  # whatever the compiler of this machine says
        words = str(error).strip().splitlines()[0]
        if wanted is None:
            return f" (not compiled: {words})", None
        raise InputError(
            f"model.compile=true: torch.compile does not work here ({words}). It needs a C++ compiler on a CPU "
            "and Triton on a GPU; install one, or leave model.compile=false"
        ) from error
    _compute_by(model, layers.compiled(made), heads.compiled())
    return f" (norms, gates, positions and log-probabilities compiled{refused})", None


def _compute_by(model: Any, kernels: layers.Kernels, of_head: heads.Formulas) -> None:
    fused.install(model, kernels.fused)
    layers.install(model, kernels)
    model.get_output_embeddings().formulas = of_head

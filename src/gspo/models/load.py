"""A name in, a policy out: a causal language model with packed attention and policy head, and its tokenizer.

In: the `model` section of the configuration. Out: `Policy`. The job, the evaluation and the checkpoint reader
call `load_policy`. What the packed path cannot compute exactly is refused here, before anything is sampled.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

from gspo import config
from gspo.errors import InputError
from gspo.hub import out_of_reach
from gspo.models import install, lora
from gspo.models.builtin import BUILTIN, Checkpoint, gguf
from gspo.models.native import Kernels
from gspo.models.runs import no_checkpoint

log = logging.getLogger("gspo")


@dataclass(frozen=True)
class Source:
    """Where the weights came from."""

    name: str
    """As the configuration says it."""
    origin: str
    """Folder, GGUF file, hub id@revision, or what the built-in name stands for."""
    sha256: str
    """Of every weight's name and its float32 bytes, in the order of the names; the same for any file format."""


@dataclass(frozen=True)
class Policy:
    """What is trained, and what it needs to be spoken to."""

    model: Any
    """Causal language model in float32 (float64 if that was asked for), in eval mode, on `device`."""
    tokenizer: Any
    stop_ids: tuple[int, ...]
    """Every end token that the tokenizer or the checkpoint names, ascending."""
    source: Source
    compute_dtype: torch.dtype
    """Numbers of forward, backward and engine."""
    device: torch.device
    announcement: str
    """One line for the console."""
    kernels: Kernels | None = None
    """With which the engine decodes, if this machine has them."""


def load_policy(
    model: config.Model, checkpoint: Checkpoint | None = None, *, seed: int = 0, scored: bool = False
) -> Policy:
    """Load, check and prepare the model that `model` names, with its adapter if it has one; `seed` is of a fresh one.

    Tried in this order: built-in name, folder, GGUF file, hub id. Sampling values of the checkpoint's
    generation_config are not used; its end tokens are. `checkpoint`: read from there, whatever the name. `scored`: the
    adapter may be that of a classifier, whose output layer is then left to the caller.

    Raises:
        InputError: nothing under that name, no such device or precision, no end token, or a model that the
            packed attention or the policy head cannot compute exactly.
    """
    device = _device(model.device)
    compute = _compute_dtype(model.dtype, device)
    asked = lora.asked(model)
    if asked.scored and not scored:
        raise InputError(
            f"model={model.name}: {asked.start} is the adapter of a reward model, which writes no text: it is used as reward=reward_model:{asked.start}"
        )
    checkpoint = checkpoint or find(asked.base)
    hf, tokenizer = _checked(model, checkpoint.model), _tokenizer(model, asked, checkpoint)
    commit = getattr(hf.config, "_commit_hash", None)  # of a hub id
    source = Source(model.name, f"{checkpoint.origin}@{commit}" if commit else checkpoint.origin, weights_sha256(hf))
    hf = hf.to(device=device).eval()
    if compute == torch.float64:
        hf = hf.to(torch.float64)
        if getattr(hf.config, "_experts_implementation", None) is not None:
            hf.set_experts_implementation("eager")  # the grouped product has no float64
    stop_ids = _stop_ids(hf, tokenizer, model.name)
    rows = hf.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise InputError(
            f"model={model.name}: the tokenizer has {len(tokenizer)} tokens and the model {rows}: they do not belong together"
        )
    parameters = sum(p.numel() for p in hf.parameters())
    adapter = ""
    if asked.adapted:
        put = lora.adapt(hf, asked, base=_reloadable(asked.base, hf), sha256=source.sha256, seed=seed)
        adapter = f"; trained: {_count(sum(p.numel() for p in hf.parameters() if p.requires_grad))}, {put.words}"
    install.prepare(hf, model.name)
    install.make_savable(hf, model.name)
    if model.gradient_checkpointing:
        install.checkpoint_activations(hf, model.name)
    fusing, kernels = install.fuse(hf, model.compile, parameters, compute)
    stored = str(torch.promote_types(compute, torch.float32)).removeprefix("torch.")
    announcement = (
        f"policy {model.name}: {_count(parameters)} parameters, sha256 {source.sha256[:12]} ({source.origin}){adapter}; "
        f"stored {stored}, computed {str(compute).removeprefix('torch.')}{fusing}, optimizer {stored}; on {device}"
    )
    return Policy(hf, tokenizer, stop_ids, source, compute, device, announcement, kernels)


def load_tokenizer(model: config.Model) -> Any:
    """The tokenizer of the model that `model` names, without its weights. Raises InputError as `load_policy` does."""
    asked = lora.asked(model)
    return _tokenizer(model, asked, find(asked.base))


def _tokenizer(model: config.Model, asked: lora.Asked, checkpoint: Checkpoint) -> Any:
    """That of the checkpoint; of an adapter's folder that is named as the model, the one that was saved with it."""
    keys: dict[str, Any] = dict(trust_remote_code=model.trust_remote_code)
    own = asked.tokenizer
    return _checked(model, checkpoint.tokenizer if own is None else lambda: AutoTokenizer.from_pretrained(own, **keys))


def load_config(model: config.Model) -> Any | None:
    """The config.json of the model that `model` names, without its weights; None where none can be read alone.

    Raises InputError as `load_policy` does.
    """
    read = find(lora.asked(model).base).read_as
    return None if read is None else _checked(model, lambda: read(AutoConfig))


def _reloadable(model: config.Model, hf: Any) -> str:
    """The name by which an adapter's folder calls its base: a path or hub id where there is one, which peft can follow."""
    path = Path(model.name).expanduser()
    if model.name not in BUILTIN:
        return str(path.resolve()) if path.exists() else model.name
    return hf.name_or_path if hf.name_or_path and Path(hf.name_or_path).is_dir() else model.name


# ------------------------------------------------------------------------------ finding it


def find(model: config.Model) -> Checkpoint:
    """Where the model that `model` names is read from. Raises InputError for what is no model."""
    path = Path(model.name).expanduser()
    if model.name in BUILTIN:
        return BUILTIN[model.name]
    if wrong := no_checkpoint(path):
        raise InputError(f"model={model.name}: {wrong}")
    if path.is_dir():
        return _pretrained(model, str(path), origin=str(path.resolve()))
    if path.is_file() and path.suffix == ".gguf":
        return gguf(path)
    if path.exists():
        raise InputError(f"model={model.name}: a file that is not a .gguf; give the folder that it is in")
    hub = re.fullmatch(r"([\w-][\w.-]*(?:/[\w-][\w.-]*)?)(?:@([\w./-]+))?", model.name)
    if hub is None or path.suffix == ".gguf":
        raise InputError(f"model={model.name}: no such folder or file{_nearest(model.name)}")
    out_of_reach()  # asked before transformers asks
    return _pretrained(model, hub[1], origin=model.name, revision=hub[2] or "main")


def _pretrained(model: config.Model, name: str, origin: str, revision: str = "main") -> Checkpoint:
    keys: dict[str, Any] = dict(revision=revision, trust_remote_code=model.trust_remote_code)
    return Checkpoint(
        model=lambda: complete(AutoModelForCausalLM.from_pretrained, name, dtype=torch.float32, **keys),
        tokenizer=lambda: AutoTokenizer.from_pretrained(name, **keys),
        origin=origin,
        read_as=lambda kind, **more: kind.from_pretrained(name, **keys, **more),
    )


def complete(read: Callable[..., Any], name: str, **keys: Any) -> Any:
    """The model, if the checkpoint has every tensor of it: transformers would make up the others at random."""
    hf, info = read(name, output_loading_info=True, **keys)
    lacking = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if lacking:
        raise ValueError(
            f"its weights lack {len(lacking)} tensors that its config.json asks for, {lacking[0]} among them"
        )
    if info["unexpected_keys"]:
        log.warning(
            "model=%s: %d tensors of its weights belong to no part of the model", name, len(info["unexpected_keys"])
        )
    return hf


def _checked(model: config.Model, read: Callable[[], Any]) -> Any:
    """transformers says in one of these errors what it could not find, read or be allowed to run."""
    try:
        with without_progress_bars():
            return read()
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError) as error:
        known = model.name in BUILTIN or Path(model.name).expanduser().exists()
        if not known and isinstance(error, OSError) and (why := out_of_reach()):  # it is nowhere
            raise InputError(
                f"model={model.name}: no built-in name, no folder here, and {why}{_nearest(model.name)}"
            ) from error
        where = "" if known else f" Tried as a built-in name, a folder here and a hub id{_nearest(model.name)}"
        raise InputError(f"model={model.name}: could not be loaded: {str(error).rstrip('. ')}.{where}") from error


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Without those of transformers, which would come in the midst of our own lines."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _nearest(name: str) -> str:
    near = get_close_matches(name, BUILTIN, n=1)
    return (
        f"; did you mean {near[0]!r}? Built-in: {', '.join(BUILTIN)}" if near else f". Built-in: {', '.join(BUILTIN)}"
    )


def weights_sha256(model: Any) -> str:
    """As `Source.sha256`."""
    digest = hashlib.sha256()
    for name, p in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(p.shape)}\n".encode())
        digest.update(p.detach().float().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _stop_ids(model: Any, tokenizer: Any, name: str) -> tuple[int, ...]:
    text_config = model.config.get_text_config()
    places = (tokenizer, model.config, text_config, model.generation_config)
    found: set[int] = set()
    for place in places:
        ids = getattr(place, "eos_token_id", None)
        found.update(ids if isinstance(ids, Iterable) else () if ids is None else (ids,))
    if not found:
        raise InputError(
            f"model={name}: neither tokenizer, config.json nor generation_config.json names an end token (eos_token_id), so no answer could end"
        )
    return tuple(sorted(int(i) for i in found))


# ------------------------------------------------------------------------------ numbers


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"model.device={name}: {str(error).splitlines()[0]}. Use auto, cpu, or a device that this torch ({torch.__version__}) has"
        ) from error
    return device


def _compute_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "float64" and device.type == "mps":
        raise InputError("model.dtype=float64: this device has none; use model.device=cpu")
    if name == "auto":
        native = _NATIVE_BFLOAT16.get(device.type)
        name = "bfloat16" if native is not None and native(device) else "float32"
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _cpu_multiplies_bfloat16(_: torch.device) -> bool:
    has = torch.cpu.get_capabilities()
    return bool(has.get("amx_bf16") or has.get("avx512_bf16"))


_NATIVE_BFLOAT16: dict[str, Callable[[torch.device], bool]] = {
    "cuda": lambda device: torch.cuda.get_device_capability(device) >= (8, 0),
    "cpu": _cpu_multiplies_bfloat16,
}


def _count(parameters: int) -> str:
    return f"{parameters / 1e6:.1f} M" if parameters >= 1e6 else f"{parameters:,}"

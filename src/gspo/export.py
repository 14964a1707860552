"""A checkpoint of a run as a folder for others: transformers, vLLM, a hub.

In: the folder of a run, which checkpoint, the precision. Out: weights under their checkpoint names, config, tokenizer with its
chat template, and a generation config that passes strict checks; no optimizer, no state. The command `export` calls it.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from torch import Tensor
from transformers import GenerationConfig

from gspo import __version__
from gspo.config import Model
from gspo.errors import InputError, RunError
from gspo.models import lora
from gspo.models.load import load_policy
from gspo.seal import as_umask, require_whole

_OURS = ("state.json", "checksums.json", "settings.yaml", "ahead.jsonl.gz")
"""Files of a checkpoint that only a run that goes on needs."""
_WEIGHTS = ("*.safetensors", "model.safetensors.index.json")
"""The model's are written anew; those of the optimizer and a critic are ours, and an engine would take them for the model's."""
_MERGED = ".merged"


def export(run: Path, folder: Path, *, checkpoint: str = "last", dtype: torch.dtype | None = None) -> Path:
    """Write the weights of a checkpoint of `run` to `folder`, an adapter merged into its base; returns the checkpoint.

    Args:
        checkpoint: `best`, `last`, or the number of a step.
        dtype: of the floating-point weights; None: as the masters are, float32 or float64.

    Raises:
        InputError: no such run or checkpoint, a damaged one, or a `folder` that exists.
        RunError: the disk refuses; nothing is left behind.
    """
    source = find(run, checkpoint)
    if folder.exists():
        raise InputError(f"{folder}: exists already, and nothing is written over: choose another folder")
    require_whole(source)
    adapted = (source / "adapter_config.json").is_file()
    if not adapted and not list(source.glob("model*.safetensors")):
        raise InputError(f"{source}: no whole model is in it")
    draft = folder.parent / f".{folder.name}.draft-{os.getpid()}"
    try:
        draft.mkdir(parents=True)
        if adapted:
            _merge(source, draft / _MERGED)
            _write(draft / _MERGED, draft, dtype)
            shutil.rmtree(draft / _MERGED)
        else:
            _write(source, draft, dtype)
        _say_what(source, draft)
        as_umask(draft)
        draft.rename(folder)
    except OSError as error:
        need = sum(
            path.stat().st_size for path in [*source.glob("*model*.safetensors"), *draft.rglob("model*.safetensors")]
        )
        free = shutil.disk_usage(next(p for p in draft.absolute().parents if p.exists())).free
        raise RunError(
            f"{folder} could not be written ({error}): it needs up to {need / 1e6:.1f} MB, and {free / 1e6:.1f} MB are free"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return source


def find(run: Path, checkpoint: str) -> Path:
    """The folder of a checkpoint of `run`: `best`, `last` or a step. Raises InputError with those that there are."""
    if not (run / "run.yaml").is_file():
        raise InputError(f"{run}: no run here (there is no run.yaml). Give the folder of a run, as in runs/demo")
    there = sorted(path for path in (run / "checkpoints").glob("[0-9]" * 8) if (path / "state.json").is_file())
    named = {str(int(path.name)): path for path in there}
    if there:
        named["last"] = there[-1]
    if (run / "best").is_dir():
        named["best"] = (run / "best").resolve()
    if checkpoint not in named:
        hint = "; it has evaluated none, so none is the best" if checkpoint == "best" else ""
        raise InputError(f"{run}: no checkpoint {checkpoint!r}{hint}. There are: {', '.join(named) or 'none yet'}")
    return named[checkpoint]


def _merge(source: Path, folder: Path) -> None:
    """The base of an adapter with the adapter merged into it, in float32, as a checkpoint of the whole model."""
    policy = load_policy(Model(name=str(source), dtype="float32", device="cpu"))
    lora.merge(policy.model).save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)


def _say_what(source: Path, draft: Path) -> None:
    """`gspo.json`: where the weights come from."""
    dtype = json.loads((draft / "config.json").read_text())["dtype"]
    said = {"gspo": __version__, "checkpoint": source.name, "dtype": dtype}
    (draft / "gspo.json").write_text(json.dumps(said) + "\n")


def _write(source: Path, draft: Path, dtype: torch.dtype | None) -> None:
    tensors: dict[str, Tensor] = {}
    for part in sorted(source.glob("model*.safetensors")):
        tensors |= load_file(part)
    if dtype is not None:
        tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    save_torch_state_dict(tensors, draft, metadata={"format": "pt"})
    skipped = {*_OURS, *(path.name for pattern in _WEIGHTS for path in source.glob(pattern))}
    for path in source.iterdir():
        if path.is_file() and path.name not in skipped:
            shutil.copyfile(path, draft / path.name)
    stored = str(next(t.dtype for t in tensors.values() if t.is_floating_point())).removeprefix("torch.")
    config = json.loads((source / "config.json").read_text())
    _declare(config, stored)
    (draft / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    _generation_config(source, config).save_pretrained(draft)  # it refuses what is not strictly valid


def _declare(config: dict[str, Any], dtype: str) -> None:
    """The dtype of the weights, in every part of a config that names one."""
    for key in ("dtype", "torch_dtype"):
        if key in config or key == "dtype":
            config[key] = dtype
    for below in config.values():
        if isinstance(below, dict) and ("dtype" in below or "torch_dtype" in below):
            _declare(below, dtype)


def _generation_config(source: Path, config: dict[str, Any]) -> Any:
    """What the checkpoint has, if it passes strict checks, else its token ids; with every end token of the model."""
    kind: Any = GenerationConfig  # which has no types
    found = kind.from_pretrained(source) if (source / "generation_config.json").is_file() else kind()
    try:
        found.validate(strict=True)
    except ValueError:
        ids = {key: getattr(found, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        found = kind(**ids)
    ends: list[int] = []
    for value in (found.eos_token_id, config.get("eos_token_id")):
        ends += value if isinstance(value, list) else [] if value is None else [value]
    if ends:
        unique = sorted(set(ends))
        found.eos_token_id = unique[0] if len(unique) == 1 else unique
    return found

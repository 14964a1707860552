"""A checkpoint of a run as a folder for others: transformers, vLLM, peft, a hub.

In: the folder of a run, which checkpoint, the precision. Out: weights under their checkpoint names, config, tokenizer with its
chat template, and a generation config that passes strict checks; no optimizer, no critic, no state. An adapter (LoRA) is
written merged into its base, or alone, as peft reads it. The command `export` calls it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig

from gspo import __version__, config, store
from gspo.errors import InputError, RunError
from gspo.models import lora
from gspo.models.load import load_policy, without_progress_bars
from gspo.models.scorer import merged_scorer
from gspo.seal import as_umask, require_whole

_OURS = (
    *("optimizer.safetensors", "state.json", "checksums.json", "settings.yaml", "ahead.jsonl.gz"),
    *(store.CRITIC, store.CRITIC_MOMENTS),
)
"""Files of a checkpoint that only a run that goes on needs."""
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")
_ADAPTER = "adapter_model.safetensors"


def export(
    run: Path, folder: Path, *, checkpoint: str = "last", dtype: torch.dtype | None = None, adapter: bool = False
) -> Path:
    """Write the weights of a checkpoint of `run` to `folder`; returns the checkpoint.

    Args:
        checkpoint: `best`, `last`, or the number of a step.
        dtype: of the floating-point weights; None: as the masters are, float32 or float64.
        adapter: the adapter alone, and not the whole model that it makes with its base.

    Raises:
        InputError: no such run or checkpoint, a damaged one, one without an adapter or whose base is not there, or a
            `folder` that exists.
        RunError: the disk refuses; nothing is left behind.
    """
    source = find(run, checkpoint)
    if folder.exists():
        raise InputError(f"{folder}: exists already, and nothing is written over: choose another folder")
    require_whole(source)
    adapted = lora.is_adapter(source)
    if not adapted and not list(source.glob("model*.safetensors")):
        raise InputError(f"{source}: no whole model is in it")
    if adapter and not adapted:
        raise InputError(f"{source}: there is no adapter in it, since the run trains all weights: leave --adapter out")
    draft = folder.parent / f".{folder.name}.draft-{os.getpid()}"
    try:
        draft.mkdir(parents=True)
        if adapter:
            stored = _write_adapter(source, draft, dtype)
        elif adapted:
            stored = _write(_merged(source, draft / "merged"), draft, dtype)
            shutil.rmtree(draft / "merged")
        else:
            stored = _write(source, draft, dtype)
        said = {"gspo": __version__, "checkpoint": source.name, "dtype": str(stored).removeprefix("torch.")}
        (draft / "gspo.json").write_text(json.dumps(said) + "\n")
        as_umask(draft)
        draft.rename(folder)
    except OSError as error:
        need = sum(path.stat().st_size for path in source.glob("*model*.safetensors"))
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
        above = run.resolve().parent.parent
        if run.resolve().name.isdigit() and (above / "run.yaml").is_file():
            raise InputError(
                f"{run}: a checkpoint, not a run: give the run {above} and --checkpoint {int(run.resolve().name)}"
            )
        raise InputError(f"{run}: no run here (there is no run.yaml). Give the folder of a run, as in runs/demo")
    there = sorted((run / "checkpoints").glob("[0-9]" * 8))
    named = {str(int(path.name)): path for path in there}
    if there:
        named["last"] = there[-1]
    if (run / "best").is_dir():
        named["best"] = (run / "best").resolve()
    if checkpoint not in named:
        hint = "; it has evaluated none, so none is the best" if checkpoint == "best" else ""
        raise InputError(f"{run}: no checkpoint {checkpoint!r}{hint}. There are: {', '.join(named) or 'none yet'}")
    return named[checkpoint]


def _write(source: Path, draft: Path, dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype of what is written."""
    tensors: dict[str, Tensor] = {}
    for part in sorted(source.glob("model*.safetensors")):
        tensors |= load_file(part)
    if dtype is not None:
        tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    save_torch_state_dict(tensors, draft, metadata={"format": "pt"})
    _copy_others(source, draft, {path.name for pattern in _WEIGHTS for path in source.glob(pattern)})
    stored = next(t.dtype for t in tensors.values() if t.is_floating_point())
    settings = json.loads((source / "config.json").read_text())
    _declare(settings, str(stored).removeprefix("torch."))
    (draft / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    _generation_config(source, settings).save_pretrained(draft)  # it refuses what is not strictly valid
    return stored


def _merged(source: Path, whole: Path) -> Path:
    """The model that the adapter in `source` makes with its base, with the other files of `source`, in a folder `whole`."""
    asked = config.Model(name=str(source), dtype="float32", device="cpu")
    policy = merged_scorer(asked) if lora.asked(asked).scored else load_policy(asked)
    with without_progress_bars():
        lora.merge(policy.model).save_pretrained(whole)
    _copy_others(source, whole, skipped={_ADAPTER, "adapter_config.json"})
    return whole


def _write_adapter(source: Path, draft: Path, dtype: torch.dtype | None) -> torch.dtype:
    tensors = {name: t if dtype is None else t.to(dtype) for name, t in load_file(source / _ADAPTER).items()}
    with safe_open(source / _ADAPTER, framework="pt") as file:
        save_file(tensors, draft / _ADAPTER, metadata=file.metadata())
    _copy_others(source, draft, skipped={_ADAPTER})
    return next(iter(tensors.values())).dtype


def _copy_others(source: Path, folder: Path, skipped: Collection[str]) -> None:
    for path in source.iterdir():
        if path.is_file() and path.name not in skipped and path.name not in _OURS:
            shutil.copyfile(path, folder / path.name)


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

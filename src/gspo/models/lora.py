"""Low-rank adapters (LoRA, arXiv 2106.09685) by peft: put on a loaded model, trained in its place, read as merged weights.

In: the `model` section and a loaded model. Out: the same model with an `Adapter`, all but whose weights are frozen; its
weights under the names of a plain checkpoint, merged; adapter folders that peft loads. `load` puts adapters on; the
learner, the engine and the store ask `adapter_of`. peft is imported when an adapter is asked for, and not before.

An adapted matrix is W + scale B A, scale = alpha / rank. B is zero at first, so a fresh adapter changes nothing, and the
first update moves B alone: the gradient of A is zero by construction. Letters: R rank, D width of the model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from gspo import config, sections
from gspo.errors import InputError

RANK, ALPHA, EVERYWHERE = 16, 32.0, "all-linear"
"""What a fresh adapter has unless it is said. alpha 32 whatever the rank, so that the learning rate need not follow the rank,
and every linear layer: Schulman et al., "LoRA Without Regret", thinkingmachines.ai, 2025."""

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
"""Before every name in an adapter's file: the place of the model inside peft's own."""
_PLAIN = ("use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "layer_replication", "megatron_config")
"""Keys of an adapter's configuration that make it more than W + scale B A."""
_WRITES, _SCORED = "CAUSAL_LM", "SEQ_CLS"
"""peft's words for the adapter of a language model and of a classifier."""
_HEADS = {"score", "classifier"}
"""Modules that peft trains and saves whole with an adapter of a classifier."""


@dataclass(frozen=True)
class Asked:
    """What a `model` section asks for: a base, and an adapter on it or none."""

    base: config.Model
    """The model without its adapter."""
    start: Path | None
    """Folder of the adapter to go on from."""
    settings: sections.Lora | None
    """None if no key of it is set, as where a folder was named as the model."""
    scored: bool = False
    """Whether `start` is the adapter of a classifier, with the classifier's output layer in it."""
    tokenizer: Path | None = None
    """The folder of the adapter, if it was named as the model and has a tokenizer in it: its base may have none."""

    @property
    def adapted(self) -> bool:
        return self.start is not None or self.settings is not None


def is_adapter(folder: Path) -> bool:
    """Whether peft would read an adapter from it."""
    return (folder / _CONFIG).is_file()


def asked(model: config.Model) -> Asked:
    """Tell the base from the adapter. `model.name` may be an adapter's folder, which names its base.

    Raises InputError for a `start` that is no adapter, and for two adapters.
    """
    named = Path(model.name).expanduser()
    settings = model.lora
    if not is_adapter(named):
        start = None if settings is None or settings.start is None else Path(settings.start).expanduser()
        if start is not None and not is_adapter(start):
            raise InputError(f"model.lora.start={start}: no adapter here (there is no {_CONFIG}); give its folder")
        return Asked(model, start, settings, start is not None and _read_config(start).task_type == _SCORED)
    if settings is not None and settings.start is not None:
        raise InputError(f"model={model.name} and model.lora.start={settings.start} are both adapters: leave one out")
    found = _read_config(named)
    if not found.base_model_name_or_path:
        raise InputError(
            f"model={model.name}: an adapter whose {_CONFIG} names no base model: give model=BASE model.lora.start={model.name}"
        )
    name = found.base_model_name_or_path
    name = f"{name}@{found.revision}" if found.revision and not Path(name).exists() else name
    base = model.model_copy(update={"name": name, "lora": None})
    tokenizer = named if (named / "tokenizer_config.json").is_file() else None
    return Asked(base, named, settings, found.task_type == _SCORED, tokenizer)


@dataclass(frozen=True)
class Adapter:
    """What has been put on a model."""

    config: Any
    """peft's LoraConfig, whose base model is the name that the base can be loaded by."""
    base_sha256: str
    start: str | None
    head: str | None = None
    """A module that is trained whole beside it, and saved with it."""

    @property
    def words(self) -> str:
        """For the console."""
        targets = sorted({*(self.config.target_modules or ()), *(self.config.target_parameters or ())})
        came = f", going on from {self.start}" if self.start else ""
        return f"LoRA of rank {self.config.r}, alpha {self.config.lora_alpha:g} on {', '.join(targets)}{came}"

    def save(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write the adapter alone, as peft reads it. `weights`: by name in the model; those of the base are left out."""
        kept = {
            _PREFIX + name.replace(".default.", "."): w.detach().contiguous()
            for name, w in weights.items()
            if _is_adapters(name) or (self.head is not None and name.startswith(f"{self.head}."))
        }
        save_file(kept, folder / _WEIGHTS, metadata={"format": "pt", "gspo_base_sha256": self.base_sha256})
        written = copy.copy(self.config)
        written.inference_mode = True  # as peft writes it
        written.save_pretrained(str(folder))


def adapter_of(model: Any) -> Adapter | None:
    """What `adapt` put on `model`; None for a plain one."""
    found: Adapter | None = getattr(model, "gspo_adapter", None)
    return found


def keep_head(model: Any, adapter: Adapter, head: str) -> None:
    """Let `model`, a classifier around layers with `adapter`, be saved with its output layer `head`, as peft does."""
    written = copy.copy(adapter.config)
    written.task_type, written.modules_to_save = _SCORED, [head]
    model.gspo_adapter = replace(adapter, config=written, head=head)


def _is_adapters(name: str) -> bool:
    return ".lora_A.default." in name or ".lora_B.default." in name


# ------------------------------------------------------------------------------ putting it on


def adapt(model: Any, wanted: Asked, *, base: str, sha256: str, seed: int) -> Adapter:
    """Put the adapter of `wanted` on `model` in place and freeze everything else.

    `base`: the name to load the base by; `sha256`: of its weights; `seed`: of a fresh adapter's A.

    Raises:
        InputError: a target that matches no layer, a folder that is damaged, of another kind of adapter, or of another base.
    """
    from peft import inject_adapter_in_model

    start = wanted.start
    made = _fresh(model, wanted.settings or sections.Lora()) if start is None else _read_config(start)
    if start is not None:
        _require_same(start, made, wanted.settings)
    name, _, revision = (base, "", "") if Path(base).exists() else base.partition("@")
    made.base_model_name_or_path, made.revision, made.inference_mode = name, revision or None, False
    made.task_type, made.modules_to_save = (
        _WRITES,
        None,
    )  # an output layer of its own has a classifier alone: `keep_head`
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(made, model)
        except ValueError as error:
            raise InputError(f"model.lora: {error}") from error
    if start is not None:
        _fill(model, start, sha256)
    adapter = Adapter(made, sha256, None if start is None else str(start))
    model.gspo_adapter = adapter
    return adapter


def _fresh(model: Any, settings: sections.Lora) -> Any:
    from peft import LoraConfig

    layers, experts = _targets(model, settings.targets or (EVERYWHERE,))
    return LoraConfig(
        r=settings.rank or RANK,
        lora_alpha=settings.alpha or ALPHA,  # type: ignore[arg-type]  # peft divides it, whole or not
        lora_dropout=0.0,  # the ratio of a policy to itself has to be 1
        target_modules=layers,
        target_parameters=experts or None,
    )


def _targets(model: Any, names: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Names of linear layers, and of stacked experts ([E, rows, columns] in one parameter), that `names` stand for."""
    head = model.get_output_embeddings()
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head]
    stacked = [name for name, p in model.named_parameters() if p.ndim == 3]
    if names == (EVERYWHERE,):
        return sorted({n.rpartition(".")[2] for n in linear}), sorted({_last_two(n) for n in stacked})
    layers, experts = [], []
    for name in names:
        in_layers, in_experts = (any(_ends(n, name) for n in known) for known in (linear, stacked))
        if not in_layers and not in_experts:
            raise InputError(f"model.lora.targets: {_unmatched(model, name, [*linear, *stacked])}")
        layers += [name] if in_layers else []
        experts += [name] if in_experts else []
    return layers, experts


def _last_two(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _unmatched(model: Any, name: str, known: list[str]) -> str:
    short = sorted({ending for n in known for ending in (n.rpartition(".")[2], _last_two(n))})
    near = get_close_matches(name, [*short, *known], n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(repr(n) for n in near)}? " if near else ""
    there = any(_ends(n, name) for n, _ in [*model.named_modules(), *model.named_parameters()])
    whose = type(model).__name__
    what = f"of {whose} is no linear layer below the output layer" if there else f"matches no layer of {whose}"
    last = sorted({n.rpartition(".")[2] for n in known})
    return f"{name!r} {what}: {hint}It has {', '.join(last)}; {EVERYWHERE} stands for all of them"


def _read_config(folder: Path) -> Any:
    from peft import LoraConfig, PeftConfig

    try:
        found = PeftConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise InputError(f"{folder / _CONFIG}: not an adapter's configuration: {error}") from error
    headed = found.task_type == _SCORED and set(getattr(found, "modules_to_save", None) or ()) <= _HEADS
    more = [key for key in _PLAIN if getattr(found, key, None) and not (headed and key == "modules_to_save")]
    more += ["bias"] if getattr(found, "bias", "none") != "none" else []
    if not isinstance(found, LoraConfig) or more:
        kind = f"{found.peft_type} " + "".join(f"with {key}" for key in more[:1])
        raise InputError(f"{folder}: an adapter of the kind {kind.strip()}; only plain LoRA can be gone on from")
    found.lora_dropout = 0.0  # dropout would make the policy another one in each forward
    return found


def _require_same(folder: Path, found: Any, settings: sections.Lora | None) -> None:
    """Raise InputError for settings that the adapter in `folder` contradicts."""
    if settings is None:
        return
    for key, wanted, has in (("rank", settings.rank, found.r), ("alpha", settings.alpha, found.lora_alpha)):
        if wanted is not None and wanted != has:
            raise InputError(
                f"model.lora.{key}={wanted:g}: the adapter in {folder} has {has:g}, which it keeps: leave it out"
            )
    has_targets = {*(found.target_modules or ()), *(found.target_parameters or ())}
    if settings.targets is not None and settings.targets != (EVERYWHERE,) and set(settings.targets) != has_targets:
        raise InputError(
            f"model.lora.targets: the adapter in {folder} is on {', '.join(sorted(has_targets))}, where it stays: leave them out"
        )


def _fill(model: Any, folder: Path, sha256: str) -> None:
    from peft import set_peft_model_state_dict

    tensors, about = read(folder)
    if about.get("gspo_base_sha256", sha256) != sha256:
        raise InputError(
            f"{folder}: this adapter was trained on other weights (sha256 {about['gspo_base_sha256'][:12]}) than those of its base model "
            f"now ({sha256[:12]}): give back the base that it was trained on"
        )
    try:
        # The output layer of a classifier is no part of `model`, whose layers these are.
        result: Any = set_peft_model_state_dict(
            model, {n: w for n, w in tensors.items() if n.partition(".")[0] not in _HEADS}
        )
    except RuntimeError as error:
        raise InputError(f"{folder / _WEIGHTS}: it does not fit the base model: {error}") from error
    lacking = [name for name in result.missing_keys if _is_adapters(name)]
    if lacking or result.unexpected_keys:
        first = (lacking or result.unexpected_keys)[0]
        raise InputError(
            f"{folder / _WEIGHTS}: {len(lacking)} tensors are missing and {len(result.unexpected_keys)} belong nowhere, {first} among them: "
            "it is the adapter of another model, or damaged"
        )


def read(folder: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors of an adapter's folder by name, and what its file says of itself. Raises InputError if it is damaged."""
    try:
        with safe_open(folder / _WEIGHTS, framework="pt") as file:
            return {n.removeprefix(_PREFIX): file.get_tensor(n) for n in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InputError(f"{folder / _WEIGHTS}: could not be read: {error}") from error


# ------------------------------------------------------------------------------ reading it merged


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every layer with an adapter, with its name: peft's Linear or, for one of several stacked parameters, ParamWrapper."""
    if adapter_of(model) is None:
        return
    from peft.tuners.lora import LoraLayer

    yield from ((name, m) for name, m in model.named_modules() if isinstance(m, LoraLayer))


@torch.no_grad()
def merged_weight(layer: Any) -> Tensor:
    """W + scale B A of an adapted layer, added up in float32 or better and rounded once to the dtype of W."""
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    stacked = parameter_of(layer) != "weight"
    weight: Tensor = getattr(layer.get_base_layer(), parameter_of(layer))
    left, right = layer.get_delta_factors("default")[:2] if stacked else (b, a)
    wide = torch.promote_types(weight.dtype, torch.float32)
    product = left.to(wide) @ right.to(wide)
    merged: Tensor = product.mul_(layer.scaling["default"]).add_(weight).to(weight.dtype)
    return merged


def parameter_of(layer: Any) -> str:
    """The name, in the layer under the adapter, of the weight that it is on."""
    return getattr(layer, "parameter_name", "weight")


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights under the names of a plain checkpoint, adapters merged into theirs, one at a time."""
    adapted = {f"{plain_name(name)}.{parameter_of(layer)}": layer for name, layer in adapted_layers(model)}
    for name, p in model.named_parameters():
        if adapted and _is_adapters(name):
            continue
        place = plain_name(name)
        yield place, merged_weight(adapted[place]) if place in adapted else p.detach()


def plain_name(name: str) -> str:
    """The name that a module or weight has in the model without adapters."""
    return name.replace(".base_layer", "")


def without_adapter(model: Any) -> Any:
    """`model` without its adapter, in place. The weights are those of the base."""
    for name, layer in list(adapted_layers(model)):
        parent, _, child = name.rpartition(".")
        if child == "base_layer":  # of two stacked parameters of one module, which goes with the first
            continue
        setattr(model.get_submodule(parent), child, layer.get_base_layer())
    model.gspo_adapter = None
    return model


@torch.no_grad()
def merge(model: Any) -> Any:
    """`model` as a plain one, in place, its adapter merged into its weights: what `save_pretrained` writes as such.

    Exact to a rounding in the model's dtype: call it on a model in float32.
    """
    for _, layer in adapted_layers(model):
        getattr(layer.get_base_layer(), parameter_of(layer)).copy_(merged_weight(layer))
    return without_adapter(model)


# ------------------------------------------------------------------------------ the policy that it started from


class Reference:
    """The policy as it was before training, without a second model: the same one with the starting adapter's weights.

    It is called as the model is, without gradients. Costs the memory of an adapter, or of its B for a fresh one.
    """

    def __init__(self, model: Any, start: Path | None) -> None:
        """`start`: the folder that the adapter came from; None for a fresh one, whose B was zero."""
        own = {name: p for name, p in model.named_parameters() if _is_adapters(name)}
        if start is None:
            self._weights = {p: torch.zeros_like(p.data) for name, p in own.items() if ".lora_B." in name}
        else:
            tensors = {name.replace(".weight", ".default.weight"): w for name, w in read(start)[0].items()}
            self._weights = {p: tensors[name].to(p.data) for name, p in own.items()}
        self._model = model

    def get_output_embeddings(self) -> Any:
        return self._model.get_output_embeddings()

    @torch.no_grad()
    def __call__(self, **inputs: Any) -> Any:
        now = {p: p.data for p in self._weights}
        try:
            for p, w in self._weights.items():
                p.data = w.to(p.dtype)
            return self._model(**inputs)
        finally:
            for p, w in now.items():
                p.data = w

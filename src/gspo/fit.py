"""Whether prompts, answers and keys suit a model: its positions, its experts.

In: checked inputs, a configuration; the model, or as far as it tells, its config.json alone. Out: an InputError, or nothing.
`build` and `check` call it.
"""

from __future__ import annotations

from typing import Any

from gspo import presets
from gspo.config import Run
from gspo.errors import InputError
from gspo.inputs import Inputs
from gspo.models.load import Policy, load_config
from gspo.models.routing import routers_of, unknown_router


def require_fit(policy: Policy, inputs: Inputs, run: Run) -> None:
    """Raise InputError for prompts or keys that the model has no room or no experts for."""
    require_room(policy.model.config, "model", inputs, run)
    _require_routers(policy, run)


def require_fit_of_config(inputs: Inputs, run: Run) -> None:
    """The same as far as config.json tells, before weights are read; nothing where it does not stand alone."""
    config = load_config(run.model)
    if config is None:
        return
    require_room(config, "model", inputs, run)
    described = config.get_text_config().to_dict()
    if not any("expert" in key and type(value) is int and value > 1 for key, value in described.items()):
        _require_experts(run)


def require_room(config: Any, noun: str, inputs: Inputs, run: Run) -> None:
    """Raise InputError for a prompt that leaves no room for an answer among the model's positions."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    prompt, answer = len(inputs.longest.token_ids), run.longest
    key = "sampling.max_new_tokens" if run.talk is None else "conversation.max_tokens"
    if positions is not None and prompt + answer > positions:
        raise InputError(
            f"row {inputs.longest.row}: a prompt of {prompt} tokens and {key}={answer} exceed the {noun}'s {positions} positions: "
            "shorten either, or set data.max_prompt_tokens and data.too_long=drop"
        )


def _replay_of(run: Run) -> str:
    """What a row replays by default."""
    row = run.algorithm
    return presets.PRESETS[row.name].routing if row.name in presets.PRESETS else "off"


def _asked(run: Run, idle: dict[str, Any]) -> dict[str, Any]:
    """Of the keys about experts, those that were set to something, with it."""
    row = run.algorithm
    found = {key: getattr(row, key) for key in idle}
    return {k: v for k, v in found.items() if v not in (idle[k], type(row).model_fields[k].default)}


def _require_experts(run: Run) -> None:
    for key, value in _asked(run, {"load_balance": 0.0, "routing": _replay_of(run)}).items():
        raise InputError(
            f"algorithm.{key}={value} has no effect with model={run.model.name}, which has no experts: leave it out"
        )


def _require_routers(policy: Policy, run: Run) -> None:
    """Raise InputError if experts are to be replayed or balanced that cannot be, or where there are none.

    A row that replays by default says nothing of a dense model; one that was set to replay does.
    """
    if routers_of(policy.model) is not None:
        return
    unknown = unknown_router(policy.model)
    if unknown is None:
        _require_experts(run)
        return
    idle = {"load_balance": 0.0, "routing": "off"}
    for key, value in _asked(run, idle).items():
        raise InputError(
            f"algorithm.{key}={value}: the experts of {type(policy.model).__name__} ({run.model.name}) are chosen in {unknown}, "
            f"by no top-k router that is known here: set algorithm.{key}={idle[key]}"
        )

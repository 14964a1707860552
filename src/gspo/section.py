"""What every part of the configuration is: frozen, without unknown keys, each key with its doc line.

In: a mapping, or a bare value. Out: a section. `config.py` and the files of single sections derive from it. No torch.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator


class Section(BaseModel):
    """A part of the configuration. `model=x` is short for `model.name=x`: a bare value replaces the section."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, arbitrary_types_allowed=True
    )
    shorthand: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        return {cls.shorthand: value} if cls.shorthand and not isinstance(value, dict | BaseModel) else value

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation not in (bool, bool | None):
            raise ValueError(f"expected a value, found {str(value).lower()}")
        return value

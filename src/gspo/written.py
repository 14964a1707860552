"""YAML as people mean it: the scalars of YAML 1.2, and a key that stands once.

In: text. Out: plain values; and back. Whatever reads settings, of a recipe, a word or a run.yaml, reads them by it.
"""

from __future__ import annotations

import re
from typing import Any

import yaml


class _Plain(yaml.SafeLoader):
    """YAML 1.1, which PyYAML reads, has more scalars than people know: there `010` is 8, `1:30` is 90, `on` and `off` are
    switches, and `1e-6` is a text. Of two equal keys it drops the first without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((key for i, key in enumerate(keys) if key in keys[:i]), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


_DROPPED = {f"tag:yaml.org,2002:{kind}" for kind in ("bool", "int", "float", "timestamp")}
_Plain.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _DROPPED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind, _pattern, _firsts in (
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", "[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
):
    _Plain.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"(?:{_pattern})$"), list(_firsts))
_Plain.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))


class _Dumper(yaml.SafeDumper):
    """Quotes what either version would take for something else than text."""


_Dumper.yaml_implicit_resolvers = {
    first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, []), *_Plain.yaml_implicit_resolvers.get(first, [])]
    for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *_Plain.yaml_implicit_resolvers}
}


def read(text: str) -> Any:
    """The value that `text` describes. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=_Plain)


def write(value: Any) -> str:
    """A text that `read`, and a reader of YAML 1.1, take for `value`."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)

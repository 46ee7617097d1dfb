"""YAML documents for people to read: scripts as literal blocks, keys in their order.

>>> print(yaml_documents([{"run": "a\\nb\\n", "n": 2}]), end="")
run: |
  a
  b
n: 2
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        """Repeat a value that occurs twice, instead of naming it."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def yaml_documents(documents: Sequence[dict[str, Any]]) -> str:
    """Return one or more documents as YAML."""
    texts = [
        yaml.dump(each, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000, default_flow_style=False)
        for each in documents
    ]
    return "---\n".join(texts)

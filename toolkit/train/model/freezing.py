"""Freeze parameters by patterns on their names.

    freeze(model, frozen=["model.embed_tokens.*"], trained=None)

Patterns are shell patterns: `*` matches anything, `model.layers.[01].*` matches two layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.job.model_arguments import check_patterns


def freeze(model: Any, *, frozen: Sequence[str] | None, trained: Sequence[str] | None) -> list[str]:
    """Set `requires_grad` by the patterns, and return a line for each tied weight of which one name matched.

    Raises ToolkitError for a pattern that matches nothing, and if nothing is left to train.
    """
    patterns = list(frozen or trained or ())
    if not patterns:
        return []
    names: dict[Any, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    every = [name for tied in names.values() for name in tied]
    check_patterns(patterns, every, "freeze" if frozen else "train_only")
    for parameter, tied in names.items():
        matches = any(fnmatchcase(name, pattern) for name in tied for pattern in patterns)
        parameter.requires_grad_(matches if trained else not matches)
    if not any(parameter.requires_grad for parameter in names):
        raise ToolkitError("--freeze leaves nothing to train", hint="freeze fewer parameters")
    return _tied_lines(names, patterns)


def _tied_lines(names: dict[Any, list[str]], patterns: list[str]) -> list[str]:
    lines = []
    for tied in names.values():
        matched = [name for name in tied if any(fnmatchcase(name, pattern) for pattern in patterns)]
        if matched and len(matched) < len(tied):
            others = ", ".join(name for name in tied if name not in matched)
            lines.append(f"{matched[0]} is tied to {others}: the pattern applies to all of them")
    return lines

"""Which parameters are trained, by patterns on their names.

    freeze(model, frozen=["model.embed_tokens.*"], trained=None)

A pattern is a shell's: `*` stands for anything, `model.layers.[01].*` for two layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from toolkit.errors import ToolkitError, nearest


def freeze(model: Any, *, frozen: Sequence[str] | None, trained: Sequence[str] | None) -> list[str]:
    """Switch `requires_grad` off where the patterns say; gives lines about weights that are tied to such.

    Raises ToolkitError for a pattern that matches nothing, or that leaves nothing to train.
    """
    patterns = list(frozen or trained or ())
    if not patterns:
        return []
    names: dict[Any, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    _check_patterns(patterns, [name for tied in names.values() for name in tied], "freeze" if frozen else "train_only")
    for parameter, tied in names.items():
        hit = any(fnmatchcase(name, pattern) for name in tied for pattern in patterns)
        parameter.requires_grad_(hit if trained else not hit)
    if not any(parameter.requires_grad for parameter in names):
        raise ToolkitError("--freeze leaves nothing to train", hint="name fewer parameters")
    return _tied_lines(names, patterns)


def _check_patterns(patterns: list[str], names: list[str], argument: str) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            close = nearest(pattern, names, cutoff=0.3) or names[0]
            raise ToolkitError(f"--{argument} {pattern!r} matches no parameter", hint=f"there is `{close}`")


def _tied_lines(names: dict[Any, list[str]], patterns: list[str]) -> list[str]:
    """One tensor under several names goes one way: say so where only one of them was meant."""
    lines = []
    for tied in names.values():
        meant = [name for name in tied if any(fnmatchcase(name, pattern) for pattern in patterns)]
        if meant and len(meant) < len(tied):
            others = ", ".join(name for name in tied if name not in meant)
            lines.append(f"{meant[0]} and {others} are one tensor, tied: both are meant")
    return lines

"""Reading values as the libraries do: a boolean may be a word, a number may be text.

>>> truth("True"), integer("8"), integer("auto")
(True, 8, None)
"""

from __future__ import annotations

from typing import Any

from toolkit.lint.document import Document

TRUE_WORDS = {"true", "yes", "y", "t", "on", "1"}
FALSE_WORDS = {"false", "no", "n", "f", "off", "0"}


def truth(value: Any) -> bool | None:
    """True or False, or None for what is neither."""
    if isinstance(value, bool):
        return value
    word = str(value).lower() if isinstance(value, (str, int)) else ""
    return True if word in TRUE_WORDS else False if word in FALSE_WORDS else None


def integer(value: Any) -> int | None:
    """A whole number, or None for what is none (`auto`, a boolean, nothing)."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return int(number) if number.is_integer() else None


def word(value: Any) -> str:
    """A value in capitals, as enums are compared; empty for a block or nothing."""
    return str(value).upper() if isinstance(value, (str, int, bool)) else ""


def shown(value: Any) -> str:
    """A value in a sentence, never longer than one."""
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def fsdp(doc: Document, name: str, default: Any = None) -> Any:
    """A key of accelerate's `fsdp_config`, with its prefix or without, which accelerate takes both."""
    block = doc.block("fsdp_config")
    return block.get(f"fsdp_{name}", block.get(name, default))


def fsdp_key(doc: Document, name: str) -> str:
    """The dotted key under which `name` stands there."""
    prefix = "" if name in doc.block("fsdp_config") else "fsdp_"
    return f"fsdp_config.{prefix}{name}"


def is_fsdp(doc: Document) -> bool:
    return word(doc.get("distributed_type")) == "FSDP"


def fsdp_version(doc: Document) -> int:
    """Accelerate's default is 1."""
    return integer(fsdp(doc, "version", 1)) or 1


def is_deepspeed(doc: Document) -> bool:
    return word(doc.get("distributed_type")) == "DEEPSPEED"


def degree(doc: Document, name: str) -> int:
    """One of accelerate's parallel sizes; 1 where it is absent."""
    return integer(doc.get(f"parallelism_config.parallelism_config_{name}_size", 1)) or 1

"""Secrets: recognized by name or by shape, and replaced by `***` in whatever is recorded or printed.

>>> hide_words(["--hub_token", "a-token", "--learning_rate", "1e-5"])
['--hub_token', '***', '--learning_rate', '1e-5']
>>> hide_secrets({"message": "401 for Bearer abcdef0123456789"})
{'message': '401 for Bearer ***'}

A run's processes get their secrets in an environment variable, which only their user can read; command lines, which
every user can, have `***`: `separate_secrets` and `restore_secrets`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from toolkit.errors import ToolkitError

HIDDEN = "***"
MIN_SECRET_CHARACTERS = 8  # a shorter value may be an ordinary word, and would hide unrelated text
# Values by position of the training arguments that are `***` on the command line, as JSON.
SECRETS_VARIABLE = "TOOLKIT_SECRET_ARGUMENTS"

_SECRET_NAME = re.compile(
    r"(?:.*_)?(?:(?:token|secrets?|apikey|credentials?|authorization|passphrase)|"
    r"(?:api|access|secret|private|auth|ssh|signing|hf|hub|wandb|openai|anthropic|comet|azure|aws)_key)(?:_\d+)?"
    r"|.*(?:password|passwd)|.+_pwd|key"
)
# Of a tokenizer. A variable's name is in capitals: `KEY` in it is no sort key.
_ORDINARY_NAME = re.compile(r"(?:.*_)?(?:pad|eos|bos|unk|sep|cls|mask|start|end|image|video|audio|special|per)_token")
_KEY_VARIABLE = re.compile(r"[A-Z0-9_]+_KEYS?")
# Of the hub, OpenAI and others, GitHub, GitLab, Slack, AWS and Google; a user and password in a URL; a header.
_SHAPES = re.compile(
    r"(?<!\w)(?:hf_(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{10,}|(?<!\w-)sk-(?=[a-z_-]*[A-Z0-9])[A-Za-z0-9_-]{16,}"
    r"|gh[opusr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[A-Za-z0-9_-]{16,}|xox[abeoprs]-[A-Za-z0-9-]{10,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[A-Za-z0-9_-]{30,})"
    r"|(?<=://)[^/@\s'\"]+(?=@)|(?<=\bBearer )[A-Za-z0-9._~+/=-]{8,}"
)
_remembered: set[str] = set()


@functools.lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Return True if an argument, variable or key of this name holds a secret.

    >>> [name for name in ("hub_token", "HF_TOKEN", "apiKey", "pad_token", "max_tokens") if is_secret_name(name)]
    ['hub_token', 'HF_TOKEN', 'apiKey']
    """
    words = re.sub(r"[^a-z0-9]+", "_", re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower()).strip("_")
    is_secret = _SECRET_NAME.fullmatch(words) and not _ORDINARY_NAME.fullmatch(words)
    return bool(is_secret or _KEY_VARIABLE.fullmatch(name))


def _changed(content: Any, change: Callable[[str, Any], Any], name: str = "") -> Any:
    """Return a value with `change(KEY, leaf)` for each leaf in it; a key, which is a leaf too, has the KEY ""."""
    if isinstance(content, Mapping):
        return {change("", key): _changed(value, change, str(key)) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_changed(each, change, name) for each in content]
    return change(name, content)


def _json_mapping(text: str) -> Any:
    """The object in a text that is JSON; None in any other."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text) if text.lstrip().startswith("{") else None


def _named_secrets(content: Any) -> set[str]:
    """The texts with secret names, at any depth, also in JSON."""
    secrets: set[str] = set()

    def collect(name: str, value: Any) -> Any:
        if isinstance(value, str) and is_secret_name(name):
            secrets.add(value)
        elif isinstance(value, str) and (settings := _json_mapping(value)) is not None:
            secrets.update(_named_secrets(settings))
        return value

    _changed(content, collect)
    return secrets


@functools.lru_cache(maxsize=1)
def _environment_secrets(environment: tuple[tuple[str, str], ...]) -> set[str]:
    return _named_secrets(dict(environment))


def remember_secrets(arguments: Mapping[str, Any]) -> None:
    """Let `hide_secrets` replace the secrets among these arguments from now on, wherever they occur."""
    _remembered.update(_named_secrets(arguments))


def hide_secrets(value: Any, *, known: Iterable[str] = ()) -> Any:
    """Return a value with each secret in its texts replaced, also inside lists and mappings.

    Those are values of the environment and of this process's arguments, whatever looks like a secret, and `known`.
    """
    pattern = _pattern(frozenset({*known, *_remembered, *_environment_secrets(tuple(os.environ.items()))}))

    def hidden(_: str, item: Any) -> Any:
        return _SHAPES.sub(HIDDEN, pattern.sub(HIDDEN, item)) if isinstance(item, str) else item

    return _changed(value, hidden)


@functools.lru_cache(maxsize=8)
def _pattern(secrets: frozenset[str]) -> re.Pattern[str]:
    """A pattern of values that are long enough; a key of several lines is hidden line by line."""
    lines = {line.strip() for secret in secrets for line in secret.splitlines()}
    known = {line for line in lines if len(line) >= MIN_SECRET_CHARACTERS and not line.startswith("-----")}
    return re.compile("|".join(map(re.escape, sorted(known, key=len, reverse=True))) or r"(?!)")


def hide_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys and values with the secrets among them replaced, by their keys and shapes, and remember them."""
    remember_secrets(settings)

    def named(name: str, value: Any) -> Any:
        return HIDDEN if value and type(value) in (str, int) and is_secret_name(name) else value

    return dict(hide_secrets(_changed(settings, named)))


def hide_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with each secret replaced, and remember those that an argument names."""
    shown: list[str] = []
    is_value = False
    for word in words:
        name, equals, value = word.partition("=")
        if is_value and not word.startswith("--"):
            remember_secrets({"secret": word})
            shown.append(HIDDEN)
            continue
        is_value = word.startswith("--") and not equals and is_secret_name(word)
        if value and " " not in name and is_secret_name(name):
            remember_secrets({"secret": value})
            shown.append(f"{name}={HIDDEN}")
        elif " --" in word:  # a command within an argument
            shown.append(" ".join(hide_words(word.split(" "))))
        else:
            content = _json_mapping(word)
            named = None if content is None else hide_settings(content)
            shown.append(hide_secrets(word) if named == content else json.dumps(named))
    return shown


class UnwrittenText(str):
    """A secret that is used like any text, and pickled and represented as `***`: `training_args.bin` is published."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(HIDDEN)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (HIDDEN,)

    def __deepcopy__(self, _memo: object) -> UnwrittenText:
        return self


def separate_secrets(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return words as everybody may see them, and the environment variable from which `restore_secrets` completes them.

    The variable is left out where no word is a secret.
    """
    shown = hide_words(words)
    secrets = {position: word for position, (word, other) in enumerate(zip(words, shown, strict=True)) if word != other}
    return shown, {SECRETS_VARIABLE: json.dumps(secrets)} if secrets else {}


def restore_secrets(words: Sequence[str]) -> list[str]:
    """Return a process's arguments with the values that `separate_secrets` put into its environment.

    The variable is removed, so that no process that this one starts inherits it.
    """
    restored = list(words)
    for position, word in json.loads(os.environ.pop(SECRETS_VARIABLE, "{}")).items():
        restored[int(position)] = word
    return restored


def refuse_hidden(arguments: Mapping[str, Any]) -> None:
    """Raise ToolkitError for a secret that was copied as `***` from a recorded or printed command."""
    for name, given in arguments.items():
        value = given if isinstance(given, str) else json.dumps(given, default=str)
        if value == HIDDEN or f'"{HIDDEN}"' in value or f"://{HIDDEN}@" in value:
            what = f"--{name} is {value[:80]!r}: {HIDDEN} stands for a secret, which is never recorded"
            raise ToolkitError(what, hint=f"type its value in place of {HIDDEN}, or leave --{name} out")

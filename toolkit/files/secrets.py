"""Secrets: recognized by name or by shape, and replaced by `***` in whatever is recorded or printed.

>>> hide_words(["--hub_token", "a-token", "--learning_rate", "1e-5"])
['--hub_token', '***', '--learning_rate', '1e-5']
>>> hide_secrets({"message": "401 for Bearer abcdef0123456789"})
{'message': '401 for Bearer ***'}

A run's processes get their secrets in an environment variable, which only their user can read; command lines, which
every user can, have `***`: `separate_secrets` and `restore_secrets`.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.files.json_files import parse_json
from toolkit.files.value_limits import CONFIGURATION

HIDDEN = "***"
# A shorter value may be an ordinary word, and would hide unrelated text.
MIN_SECRET_CHARACTERS = 8
# Values by position of the training arguments that are `***` on the command line, as JSON.
SECRETS_VARIABLE = "TOOLKIT_SECRET_ARGUMENTS"

_SECRET_WORDS = {"auth", "oauth", "authorization", "bearer", "passphrase", "pwd"}
_SECRET_ENDINGS = ("token", "secret", "secrets", "password", "passwd", "apikey", "credential", "credentials")
# `api_key`, and not `template_thinking_key`; in the name of a variable, which is in capitals, any `KEY`.
_KEY_WORDS = {"key", "keys"}
_WITH_KEY = {
    *("api", "access", "secret", "private", "ssh", "signing", "encryption", "account", "storage", "service", "license"),
    *("hf", "hub", "wandb", "openai", "anthropic", "comet", "neptune", "mlflow", "azure", "aws", "gcp", "google"),
}
# `pad_token` and `token_type_ids` are of a tokenizer; `HF_TOKEN_PATH` and `SSH_AUTH_SOCK` are places.
_ORDINARY_WORDS = {
    *("pad", "eos", "bos", "unk", "sep", "cls", "mask", "start", "end", "image", "video", "audio", "special"),
    *("type", "types", "ids", "num", "max", "min", "per", "across", "average"),
    *("path", "file", "dir", "folder", "sock", "socket"),
}
# Of the hub, OpenAI and others, GitHub, GitLab, Slack, AWS and Google; a user and password in a URL; a header.
_SHAPES = re.compile(
    r"(?<!\w)(?:hf_(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{10,}|(?<!\w-)sk-(?=[a-z_-]*[A-Z0-9])[A-Za-z0-9_-]{16,}"
    r"|gh[opusr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[A-Za-z0-9_-]{16,}|xox[abeoprs]-[A-Za-z0-9-]{10,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[A-Za-z0-9_-]{30,})"
    r"|(?<=://)[^/@\s'\"]+(?=@)"
    r"|(?<=\bBearer )[A-Za-z0-9._~+/=-]{8,}|(?<=\bBasic )[A-Za-z0-9+/=]{12,}"
)
# `--hub_token VALUE`, also between quotation marks and commas; `HF_TOKEN=VALUE`.
_FLAG = re.compile(r"(?P<flag>--(?P<name>[A-Za-z][\w-]*)(?:['\"]?[=, ]+['\"]?))(?P<value>[^\s'\",`]+)")
_ASSIGNMENT = re.compile(r"\b(?P<flag>(?P<name>[A-Z][A-Z0-9_]+)=['\"]?)(?P<value>[^\s'\",`]+)")
# `--hub_token HUB_TOKEN` is a help text, and `--hub_token is missing` a sentence.
_NO_VALUE = re.compile(r"[A-Z_]+[\])]*|[a-z]+|--.*")

_remembered: set[str] = set()


@functools.lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Return True if an argument, variable or key of this name holds a secret.

    >>> [name for name in ("hub_token", "HF_TOKEN", "apiKey", "pad_token", "max_tokens") if is_secret_name(name)]
    ['hub_token', 'HF_TOKEN', 'apiKey']
    """
    words = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower()
    parts = {part for part in re.split(r"[^a-z]+", words) if part}
    if parts & _ORDINARY_WORDS or parts == {"pwd"}:  # the working directory
        return False
    if parts & _KEY_WORDS and (name.isupper() or parts <= _KEY_WORDS or parts & _WITH_KEY):
        return True
    return bool(parts & _SECRET_WORDS) or any(part.endswith(_SECRET_ENDINGS) for part in parts)


def hide_secrets(value: Any, *, known: Iterable[str] = (), environment: Mapping[str, str] | None = None) -> Any:
    """Return a value with each secret in its texts replaced, also inside lists and mappings.

    Those are values of the environment and of this process's arguments, whatever looks like a secret, and `known`.
    """
    pattern = _pattern({*known, *_remembered, *_values_of(os.environ if environment is None else environment)})

    def hidden(item: Any) -> Any:
        if isinstance(item, str):
            return _hide_text(item, pattern)
        if isinstance(item, Mapping):
            return {hidden(name): hidden(each) for name, each in item.items()}
        return [hidden(each) for each in item] if isinstance(item, list | tuple) else item

    return hidden(value)


def _hide_text(text: str, known: re.Pattern[str] | None) -> str:
    text = text if known is None else known.sub(HIDDEN, text)
    text = _SHAPES.sub(HIDDEN, text)
    if "--" in text:
        text = _FLAG.sub(_hide_value, text)
    return _ASSIGNMENT.sub(_hide_value, text) if "=" in text else text


def _hide_value(found: re.Match[str]) -> str:
    shown = not is_secret_name(found["name"]) or _NO_VALUE.fullmatch(found["value"])
    return found[0] if shown else f"{found['flag']}{HIDDEN}"


@functools.lru_cache(maxsize=8)
def _compiled(secrets: tuple[str, ...]) -> re.Pattern[str] | None:
    return re.compile("|".join(map(re.escape, secrets))) if secrets else None


def _pattern(secrets: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern of values that are long enough; a key of several lines is hidden line by line."""
    lines = {line.strip() for secret in secrets for line in secret.splitlines()}
    known = {line for line in lines if len(line) >= MIN_SECRET_CHARACTERS and not line.startswith("-----")}
    return _compiled(tuple(sorted(known, key=lambda line: (-len(line), line))))


def _values_of(values: Mapping[str, Any]) -> list[str]:
    """The secrets among values by name, and those in mappings in JSON among them."""
    found = []
    for name, value in values.items():
        content = _json_mapping(value) if isinstance(value, str) else value
        if isinstance(content, Mapping):
            found += _values_of(content)
        elif is_secret_name(str(name)) and name != SECRETS_VARIABLE:
            found += [each for each in (value if isinstance(value, list | tuple) else [value]) if isinstance(each, str)]
    return found


def remember_secrets(arguments: Mapping[str, Any]) -> None:
    """Let `hide_secrets` replace the secrets among these arguments from now on, wherever they occur."""
    _remembered.update(_values_of(arguments))


# -- words of a command line


def hide_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with each secret replaced, and remember those that an argument names."""
    shown: list[str] = []
    is_value = False
    for word in words:
        if word.startswith("--") or not is_value:
            shown.append(_hide_word(word))
            is_value = word.startswith("--") and "=" not in word and is_secret_name(word)
        else:
            remember_secrets({"secret": word})
            shown.append(HIDDEN)
    return shown


def _hide_word(word: str) -> str:
    """`--name=value` and `name=value` by the name; a mapping in JSON by its keys."""
    name, equals, value = word.partition("=")
    if equals and value and " " not in name and is_secret_name(name):
        remember_secrets({"secret": value})
        return f"{name}={HIDDEN}"
    content = _json_mapping(word)
    if content is not None and (hidden := _hide_named(content)) != content:
        remember_secrets(content)
        return json.dumps(hidden)
    return str(hide_secrets(word))


def _json_mapping(text: str) -> dict[str, Any] | None:
    if not text.lstrip().startswith("{"):
        return None
    try:
        content = parse_json(text, "an argument", limits=CONFIGURATION, allow_nan=True)
    except ToolkitError:
        return None
    return content if isinstance(content, dict) else None


def hide_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys and values with the secrets among them replaced, by their keys and by their shape, and remember them.

    >>> hide_settings({"hub_token": "a-token", "logging": {"api_key": "a-key"}, "use_auth_token": True})
    {'hub_token': '***', 'logging': {'api_key': '***'}, 'use_auth_token': True}
    """
    remember_secrets(settings)
    hidden: dict[str, Any] = hide_secrets(_hide_named(settings))
    return hidden


def _hide_named(content: Any) -> Any:
    if isinstance(content, list):
        return [_hide_named(each) for each in content]
    if not isinstance(content, Mapping):
        return content
    return {
        name: HIDDEN if is_secret_name(str(name)) and _may_be_secret(each) else _hide_named(each)
        for name, each in content.items()
    }


def _may_be_secret(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool) and bool(value)


class UnwrittenText(str):
    """A secret that is used like any text, and pickled and represented as `***`: `training_args.bin` is published."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(HIDDEN)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (HIDDEN,)

    def __copy__(self) -> UnwrittenText:
        return self

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


def hidden_names(arguments: Mapping[str, Any]) -> list[str]:
    """Return the names of arguments whose value, or a part of it, is `***`, as a record has them."""
    return [name for name, value in arguments.items() if HIDDEN in str(value)]


def refuse_hidden(arguments: Mapping[str, Any]) -> None:
    """Raise ToolkitError for a secret that was copied as `***` from a recorded or printed command."""
    for name in hidden_names(arguments):
        value = arguments[name] if isinstance(arguments[name], str) else json.dumps(arguments[name], default=str)
        if value == HIDDEN or f'"{HIDDEN}"' in value or f"://{HIDDEN}@" in value:
            raise ToolkitError(
                f"--{name} is {value[:80]!r}: {HIDDEN} stands for a secret, which is never recorded",
                hint=f"type its value in place of {HIDDEN}, or leave --{name} out",
            )

"""A command's options as one dataclass, whose fields are annotated as Typer parameters.

A new flag is one field: the command line, its help, and the work that receives the dataclass all read it there.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from toolkit.errors import ToolkitError
from toolkit.files.paths import expand_home


def expand_words(words: Sequence[str]) -> list[str]:
    """Return a command line with `~` expanded in every word before `--`, which a shell leaves alone if it is quoted.

    The words after `--` are training arguments, which launcher and ranks read themselves.

    >>> expand_words(["train", "--preset", "zero2", "--", "--output_dir", "~/out"])
    ['train', '--preset', 'zero2', '--', '--output_dir', '~/out']
    """

    def expanded(word: str) -> str:
        name, equals, value = word.partition("=")
        return f"{name}={expand_home(value)}" if equals and name.startswith("--") else expand_home(word)

    end = words.index("--") if "--" in words else len(words)
    return [*map(expanded, words[:end]), *words[end:]]


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of `command` that is a dataclass by its annotated fields, for Typer to read.

    Typer has no variable-length tuples, so `tuple[X, ...]` is parsed as a list and handed over as a tuple.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    options: dict[str, type] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        hint = hints[name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            parameters += _field_parameters(hint)
            options[name] = hint
        else:
            parameters.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, options_type in options.items():
            values = {each.name: given.pop(each.name) for each in _field_parameters(options_type)}
            known = {field: value for field, value in values.items() if value is not None}  # None: not given
            given[name] = options_type(
                **{field: tuple(value) if isinstance(value, list) else value for field, value in known.items()}
            )
        command(**given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del run.__wrapped__  # inspect would read the command's own signature through it
    return run


@functools.cache
def _field_parameters(options_type: type) -> list[inspect.Parameter]:
    hints = get_type_hints(options_type, include_extras=True)
    found = []
    inherited = set(hints) - set(options_type.__annotations__)  # listed last
    for field in sorted(dataclasses.fields(options_type), key=lambda field: field.name in inherited):
        if get_origin(hints[field.name]) is not Annotated:
            continue
        value_type, *metadata = get_args(hints[field.name])
        default: Any = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        if get_origin(value_type) is tuple:
            value_type = list[get_args(value_type)[0]]  # type: ignore[misc]
            default = None if default == () else default
            value_type = value_type | None if default is None else value_type
        kind, annotation = inspect.Parameter.KEYWORD_ONLY, Annotated[value_type, *metadata]
        found.append(inspect.Parameter(field.name, kind, default=default, annotation=annotation))
    return found


@contextlib.contextmanager
def recognising(*files: str) -> Iterator[None]:
    """Where one of the files is refused and reads like another tool's, say what reads it."""
    try:
        yield
    except ToolkitError as error:
        from toolkit.convert.conversion import add_reader

        add_reader(error, files)
        raise

"""A conversion, the table of a tool (tables/*.yaml), and the draft in which every setting ends in exactly one place.

>>> settings = {"base_model": "Qwen/Qwen3-8B", "strict": False, "loss_watchdog_patience": 3}
>>> draft = Draft(load_dialect("axolotl"), settings)
>>> draft.translate()
>>> done = draft.finish(preset="ddp")
>>> done.arguments, done.redundant, [each.key for each in done.not_converted]
({'model_name_or_path': 'Qwen/Qwen3-8B'}, ['strict'], ['loss_watchdog_patience'])
"""

import contextlib
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError, shown
from toolkit.files.documents import parse_yaml, read_configuration, unexpected
from toolkit.files.secrets import hide_settings
from toolkit.job.argument_aliases import HINTS, canonical_values
from toolkit.job.argument_reading import argument_types, argument_words
from toolkit.job.argument_values import check_type, is_true
from toolkit.job.job import Job
from toolkit.job.trainer_schema import trainer_argument_names
from toolkit.presets.preset import load_preset
from toolkit.presets.support import check_supported, reasons

PRESET = "--preset"
NUM_PROCESSES = "--num-processes"
TABLES = Path(__file__).parent / "tables"
LISTS_OF_NAMES = ("modules_to_save", "target_parameters")  # of peft's LoraConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class NotConverted:
    """A setting without a counterpart."""

    key: str
    value: Any
    reason: str
    has_effect: bool = True
    """False for a setting that the other tool does not use either: of adapters, where none are trained."""


@dataclass(kw_only=True)
class Conversion:
    """A configuration of another tool as a preset and training arguments."""

    tool: str
    preset: str = "ddp"
    num_processes: int | None = None  # None where the configuration does not say
    arguments: dict[str, Any] = field(default_factory=dict)
    defaults: list[str] = field(default_factory=list)
    """Arguments that the configuration does not set: they are the other tool's defaults, which differ from ours."""
    notes: dict[str, str] = field(default_factory=dict)  # argument, or `--preset`, to what is different in meaning
    converted: dict[str, str] = field(default_factory=dict)
    """Key of the configuration to the argument, or to `--preset` or `--num-processes`."""
    redundant: list[str] = field(default_factory=list)  # keys that are empty, off, or say what happens here anyway
    not_converted: list[NotConverted] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """The table of one tool; tables/common.yaml says what each section is."""

    tool: str
    refused: Mapping[str, str] = field(default_factory=dict)
    blocks: Sequence[str]
    lists: Sequence[str] = ()
    known: Collection[str]
    moved: Mapping[str, str]
    notes: Mapping[str, str] = field(default_factory=dict)
    assigned: Mapping[str, Mapping[str, Any]]
    redundant: Mapping[str, Any]
    on_by_default: Collection[str]
    defaults: Mapping[str, Any]
    default_notes: Mapping[str, str] = field(default_factory=dict)
    defaults_with: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    lora_config: Mapping[str, str] = field(default_factory=dict)
    liger: Mapping[str, Sequence[str]] = field(default_factory=dict)
    trackers: Mapping[str, str] = field(default_factory=dict)
    accelerate_configs: Mapping[str, str] = field(default_factory=dict)
    reasons: Mapping[str, str]
    fsdp_redundant: Mapping[str, Any]
    fsdp_reasons: Mapping[str, str]

    def check_training(self, values: Mapping[str, Any], file: Path) -> None:
        """Raise ToolkitError for a file that trains something else than text with supervision."""
        for what in (what for key, what in self.refused.items() if values.get(key)):
            hint = "a preset works with any trainer that accelerate launches: `toolkit preset export DIR`"
            raise ToolkitError(f"{file} trains {what}", hint=HINTS["stage"] if "fine-tuning" in what else hint)

    def reason(self, key: str) -> str:
        """Return why a setting has no counterpart."""
        last = key.rpartition(".")[2]
        family = (why for name, why in self.reasons.items() if name[-1] == "*" and key.startswith(name[:-1]))
        exact = self.reasons.get(key) or self.reasons.get(last)
        return exact or next(family, None) or HINTS.get(key) or "no counterpart"


@functools.cache
def load_dialect(name: str) -> Dialect:
    """Return the table of a tool, with what all tools share."""
    table, common = (read_configuration(TABLES / f"{each}.yaml") for each in (name, "common"))
    if table.pop("has_training_arguments", False):
        table["known"] += trainer_argument_names() - set(common["other_meaning"])
    fsdp, shared, own = (
        {key: reason for reason, keys in by_reason.items() for key in keys}
        for by_reason in (common["fsdp_reasons"], common["reasons"], table.pop("reasons"))
    )
    hints = {key: HINTS[hint] for key, hint in table.pop("hints", {}).items()}
    table |= {"reasons": fsdp | shared | own | hints, "fsdp_reasons": fsdp, "fsdp_redundant": common["fsdp_redundant"]}
    return Dialect(**table)


@functools.cache
def plan_table() -> dict[str, Any]:
    """Return what `toolkit plan` does with settings that it does not use itself, as tables/plan.yaml says it."""
    return read_configuration(TABLES / "plan.yaml")


class Draft(Conversion):
    """A conversion with the settings that are still to be converted (`fsdp_config.offload_params`).

    What changes a setting does nothing if that setting is not left.
    """

    def __init__(self, dialect: Dialect, values: Mapping[str, Any]) -> None:
        super().__init__(tool=dialect.tool)
        self.dialect = dialect
        flat = flattened(values, blocks=dialect.blocks, lists=dialect.lists)
        # A converted file is shared: a secret in it is `***`, which a run refuses by name.
        self.left = {key: value for key, value in hide_settings(flat).items() if value is not None}
        self.redundant += [key for key, value in flat.items() if value is None]

    # -- what is left

    def get(self, key: str, default: Any = None) -> Any:
        """Return a setting that is left, without using it."""
        return self.left.get(key, default)

    def is_on(self, key: str) -> bool:
        """Return True if a switch is left and on."""
        return is_true(self.left.get(key, False))

    def number(self, key: str, default: float) -> float:
        """Return a setting that is left as a number. Raises ToolkitError if it is something else."""
        value = self.left.get(key, default)
        check_type(key, value, "float")
        return float(value)

    def nested(self, prefix: str) -> dict[str, Any]:
        """Return the settings below a prefix that are left, by their names there."""
        return {key.removeprefix(prefix): value for key, value in self.left.items() if key.startswith(prefix)}

    def among(self, *keys: str) -> list[str]:
        """Return those of the settings that are left."""
        return [key for key in dict.fromkeys(keys) if key in self.left]

    def entries(self, name: str) -> list[str]:
        """Return the prefixes of the entries of a list that are left: `datasets[0].`."""
        return list(dict.fromkeys(f"{key.partition('.')[0]}." for key in self.left if key.startswith(f"{name}[")))

    # -- what becomes of a setting

    def use(self, *keys: str, by: str) -> None:
        """Record that settings decided `by`: an argument, `--preset` or `--num-processes`."""
        for key in self.among(*keys):
            del self.left[key]
            self.converted[key] = by

    def drop(self, *keys: str) -> None:
        """Record settings as redundant."""
        for key in self.among(*keys):
            del self.left[key]
            self.redundant.append(key)

    def leave_out(self, *keys: str, reason: str, has_effect: bool = True) -> None:
        """List settings as not converted."""
        for key in self.among(*keys):
            self.report(key, self.left.pop(key), reason, has_effect=has_effect)

    def report(self, key: str, value: Any, reason: str, *, has_effect: bool = True) -> None:
        """List a value as not converted."""
        self.not_converted.append(NotConverted(key=key, value=value, reason=reason, has_effect=has_effect))

    def assign(self, argument: str, value: Any, *keys: str, note: str | None = None) -> None:
        """Set an argument from the settings `keys`; they are listed if the argument has a value already."""
        if argument in self.arguments:
            self.leave_out(*keys, reason=f"{argument} is set already", has_effect=False)
            return
        self.arguments[argument] = typed(argument, value)
        self.use(*keys, by=argument)
        if note is not None:
            self.notes.setdefault(argument, note)

    def move(self, key: str, argument: str | None = None, *, note: str | None = None) -> None:
        """Set an argument, by default the one of the same name, to the value of a setting."""
        if key in self.left:
            self.assign(argument or key, self.left[key], key, note=note)

    def move_known(self, names: Collection[str]) -> None:
        """Move every setting that is among `names`, to the argument of the same name or to what it is an alias of."""
        for key in [key for key in self.left if key in names]:
            try:
                ((argument, value),) = canonical_values({key: self.left[key]}).items()
            except ToolkitError as error:
                self.leave_out(key, reason=error.message)
                continue
            if argument in ("optim", "lr_scheduler_type") and str(value) not in argument_words()[argument]:
                reason = f"transformers has no {argument} {str(value)!r}: the default is used instead"
                self.leave_out(key, reason=reason)
            else:
                self.assign(argument, value, key)

    def default(self, argument: str, value: Any, *, note: str | None = None) -> None:
        """Set an argument to the other tool's default, unless the configuration sets it."""
        if argument not in self.arguments:
            self.arguments[argument] = value
            self.defaults.append(argument)
            if note is not None:
                self.notes[argument] = note

    def take_back(self, argument: str, reason: str) -> None:
        """Remove an argument, if it is set, and list the settings that it came from as not converted."""
        value = self.arguments.pop(argument, None)
        for key in [key for key, by in self.converted.items() if by == argument]:
            del self.converted[key]
            self.report(key, value, reason)
        self.defaults = [name for name in self.defaults if name != argument]

    # -- rules that tools share

    def translate(self) -> None:
        """Use every setting that the dialect's table decides alone, and those that transformers reads together."""
        table, options = self.dialect, self.get("gradient_checkpointing_kwargs")
        if self.get("warmup_steps") and self.get("warmup_ratio"):
            self.leave_out("warmup_ratio", reason="warmup_steps is set")
        else:
            self.drop("warmup_steps" if self.get("warmup_ratio") else "warmup_ratio")
        if options == {"use_reentrant": False}:
            self.drop("gradient_checkpointing_kwargs")
        elif isinstance(options, dict) and not options.get("use_reentrant"):  # reentrant ones are listed
            self.move("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs")
        for key, value in list(self.left.items()):
            values = table.redundant.get(key, table.redundant.get(key.rpartition(".")[2], ()))
            if values == "any" or value in values:
                self.drop(key)
        for key, assignment in table.assigned.items():
            ((argument, value),) = assignment.items()
            value = value.get(str(self.get(key))) if isinstance(value, dict) else value if self.is_on(key) else None
            if value is not None:
                self.assign(argument, value, key)
        for key, argument in table.moved.items():
            self.move(key, argument, note=table.notes.get(key))
        self.move_known(table.known)

    def set_defaults(self) -> None:
        """Set what the tool does when a setting is absent, where that differs from ours."""
        table = self.dialect
        tables = [defaults for argument, defaults in table.defaults_with.items() if argument in self.arguments]
        for defaults in (*tables, table.defaults):
            for argument, value in defaults.items():
                self.default(argument, value, note=table.default_notes.get(argument))

    def take_lora_config(self) -> None:
        """Set `lora_config` from the settings that are fields of peft's LoraConfig, unless they are off."""
        config: dict[str, Any] = {}
        for key, name in self.dialect.lora_config.items():
            value = self.get(key)
            if value not in (None, False, [], "false"):
                named = names_in(value) if name in LISTS_OF_NAMES else value
                config[name] = True if is_true(value) else named
                self.use(key, by="lora_config")
        if config:
            self.assign("lora_config", config)

    def finish(self, *, preset: str) -> Conversion:
        """Account for the settings that are left, and for arguments that the preset does not support."""
        for key, value in list(self.left.items()):
            is_one = value == 1 and key.endswith(("_parallel_size", "dp_replicate_size"))
            is_off = value in (False, 0, "", [], {}, "false", "none", "no")
            if is_one or (is_off and key not in self.dialect.on_by_default):
                self.drop(key)
            else:
                self.leave_out(key, reason=self.dialect.reason(key))
        spec = load_preset(preset)
        # A switch that the preset does not support is listed; the method itself is not among them, and is refused.
        for reason in list(reasons(spec, Job.from_values(self.arguments))):
            self.take_back(reason.rule.replace("-", "_"), f"does not work under preset {preset!r}: {reason.why}")
        if spec.traits.gathers_layers:
            self.take_back("activation_checkpointing_kwargs", "FSDP2 checkpoints each layer itself")
        check_supported(spec, Job.from_values(self.arguments))
        self.preset = preset
        self.arguments = {name: self.arguments[name] for name in argument_types() if name in self.arguments}
        self.notes = {name: note for name, note in self.notes.items() if name in (*self.arguments, PRESET)}
        return self


def flattened(values: Mapping[str, Any], *, blocks: Collection[str], lists: Collection[str]) -> dict[str, Any]:
    """Give the settings inside blocks, and inside the entries of lists, names of their own.

    >>> flattened({"fsdp": {"x": 1}, "datasets": [{"path": "a"}, "b"]}, blocks=["fsdp"], lists=["datasets"])
    {'fsdp.x': 1, 'datasets[0].path': 'a', 'datasets[1]': 'b'}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        is_list = key in lists and isinstance(value, list)
        entries = {f"{key}[{number}]": entry for number, entry in enumerate(value)} if is_list else {key: value}
        for name, entry in entries.items():
            is_block = isinstance(entry, dict) and (key in blocks or name != key)
            flat |= {f"{name}.{inner}": each for inner, each in entry.items()} if is_block else {name: entry}
    return flat


def names_in(value: Any) -> list[str]:
    """Return the names in a list, or in text with commas between them."""
    parts = value if isinstance(value, list) else str(value).split(",")
    return [str(part).strip() for part in parts if str(part).strip()]


def block_of(values: Mapping[str, Any], key: str, source: object) -> dict[str, Any]:
    """Return a nested mapping, empty where it is missing. Raises ToolkitError for any other type."""
    value = values.get(key) or {}
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise unexpected(source, key, value, "keys and values")
    return value


def typed(argument: str, value: Any) -> Any:
    """Return a value in the type of the argument: PyYAML reads `2e-5` as a string, and so is every flag's value.

    >>> typed("learning_rate", "2e-5"), typed("max_steps", "8"), typed("tf32", "True")
    (2e-05, 8, True)

    Raises ToolkitError for a value of the wrong type.
    """
    annotation = argument_types().get(argument, "str")
    kinds = set(annotation.split(" | ")) - {"None"}
    if kinds == {"list[str]"}:
        value = [value] if isinstance(value, str) and argument != "dataset" else value
    elif isinstance(value, str) and "str" not in kinds:
        with contextlib.suppress(ValueError, ToolkitError):
            parsed = parse_yaml(value, "the value")
            value = float(value) if parsed is None or isinstance(parsed, str) else parsed
    elif value is False and argument.endswith("_strategy"):
        value = "no"  # as YAML reads an unquoted `no`
    elif type(value) in (int, float) and annotation.startswith("str"):
        value = str(value)
    if kinds == {"int"} and isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, dict) and "dict" not in annotation and argument != "lora_config":
        raise ToolkitError(f"{argument} is {shown(value)}, expected a value without keys")
    check_type(argument, value, annotation)
    return value

"""Read settings as the libraries do: a boolean may be a word, a number may be text, a prefix may be missing.

>>> as_bool("True"), as_int("8"), as_int("auto")
(True, 8, None)
"""

import contextlib
import re
from pathlib import Path
from typing import Any

from toolkit.convert.job_script import PYTHON
from toolkit.convert.programs import FOREIGN
from toolkit.errors import ToolkitError
from toolkit.files.documents import read_configuration
from toolkit.files.paths import is_file
from toolkit.lint import named_files
from toolkit.lint.document import ACCELERATE, AXOLOTL, DEEPSPEED, OUR_PROGRAMS, Document
from toolkit.lint.findings import NOTE
from toolkit.lint.named_files import LINT_TABLES, find_named, has_own_loop, imported_source, occurs, parses_own
from toolkit.presets.preset import presets_root

TRUE_WORDS = {"true", "yes", "y", "t", "on", "1"}
# Words that stand for a value: `YOUR_PORT`, `xxx`.
STAND_IN = re.compile(r"dummy|\?{3}|\.{3}|your[_-].*|x{3,}|todo|fixme|change_?me|placeholder", re.IGNORECASE)
PLAIN = {"num-processes", "mixed-precision", "main-process-port", "m", "module"}  # options that choose no engine
FALSE_WORDS = {"false", "no", "n", "f", "off", "0"}


def as_bool(value: Any) -> bool | None:
    """Return True or False, or None for a value that is neither."""
    if isinstance(value, bool):
        return value
    word = str(value).lower() if isinstance(value, (str, int)) else ""
    return True if word in TRUE_WORDS else False if word in FALSE_WORDS else None


def as_int(value: Any) -> int | None:
    """Return a whole number, or None for anything else: `auto`, a boolean, nothing."""
    number = as_float(value)
    return int(number) if number is not None and number.is_integer() else None


def as_float(value: Any) -> float | None:
    """Return a number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def as_enum(value: Any) -> str:
    """Return a value in capitals, as the libraries compare enums; empty for a block or nothing."""
    return str(value).upper() if isinstance(value, (str, int, bool)) else ""


def is_template(value: Any) -> bool:
    """Return True for text that another program completes: `${BATCH}`, `{{ batch }}`, `<batch>`, `__BATCH__`, or a word
    that stands for it."""
    if not isinstance(value, str):
        return False
    return "$" in value or "{{" in value or value.startswith(("<", "__")) or bool(STAND_IN.fullmatch(value))


def shorten(value: Any) -> str:
    """Return a value as text of at most 60 characters, to put in a message.

    >>> len(shorten("x" * 1000))
    60
    """
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# -- accelerate's configuration


def engine_of(doc: Document) -> str:
    """Return the `distributed_type` in capitals; YAML reads an unquoted `no` as false, and an empty one is none."""
    kind = doc.get("distributed_type", "")
    return "NO" if kind in (False, None) else as_enum(kind)


def is_deepspeed(doc: Document) -> bool:
    """Return True for an accelerate configuration that runs DeepSpeed."""
    return engine_of(doc) == "DEEPSPEED"


def names_json(doc: Document) -> bool:
    """Return True for an accelerate configuration with a DeepSpeed JSON; accelerate takes `none` for no file."""
    return doc.get("deepspeed_config.deepspeed_config_file", "none") not in (None, "none")


def fsdp_setting(doc: Document, name: str, default: Any = None) -> Any:
    """Return a setting of `fsdp_config`; accelerate accepts its key with the prefix `fsdp_` and without."""
    block = doc.block("fsdp_config")
    return block.get(f"fsdp_{name}", block.get(name, default))


def fsdp_key(doc: Document, name: str) -> str:
    """Return the dotted key under which a setting of `fsdp_config` is written."""
    prefix = "" if name in doc.block("fsdp_config") else "fsdp_"
    return f"fsdp_config.{prefix}{name}"


def fsdp_version(doc: Document) -> int:
    """Return 1 or 2 for an accelerate configuration that runs FSDP, otherwise 0; accelerate's default is 1."""
    return (as_int(fsdp_setting(doc, "version", 1)) or 1) if as_enum(doc.get("distributed_type")) == "FSDP" else 0


def is_preset(doc: Document) -> bool:
    """Return True for a preset of ours, or what `toolkit preset export` has made of one: its first line says so."""
    preset = presets_root() / "accelerate_configs" / Path(doc.path).name
    return preset.is_file() and doc.text.startswith(preset.read_text(encoding="utf-8").partition("\n")[0])


def parallel_size_key(name: str) -> str:
    """Return the dotted key of one of accelerate's parallel sizes (`dp_shard`, `cp`, ...)."""
    return f"parallelism_config.parallelism_config_{name}_size"


def parallel_degree(doc: Document, name: str) -> int:
    """Return one of accelerate's parallel sizes; 1 where it is absent."""
    return as_int(doc.get(parallel_size_key(name), 1)) or 1


# -- Trainer arguments

# A trainer's own saving: `save_model` calls `_save` without weights where stage 3 gathers none.
OWN_SAVE = re.compile(
    r"def save(?:_model)?\(self|def _save\(self(?:(?!\n[ \t]*def ).)*?(?:zero_?3|[Gg]ather)", re.DOTALL
)
SWITCH = re.compile(r"^[ \t]*if [\w.]*?(\w*(?:lora|peft)\w*):$", re.MULTILINE)
# Code that makes a number of each value that is text, or of how PyYAML reads one.
CONVERTS_TEXT = r"isinstance\(\s*(\w+)\s*,\s*str\s*\)[^#]{0,300}?float\(\s*\1\s*\)|add_implicit_resolver\("


def keeps_text(doc: Document) -> bool:
    """Return True where the code that reads a file is not here, or is known to leave its values as they are."""
    kind = "json" if doc.is_json else "yaml"
    keeps = rf"^$|parse_{kind}_file|H4ArgumentParser|parse_dict|{kind}\.\w*load"  # OmegaConf reads a number
    return occurs(re.compile(keeps), doc.reader_source)


OMEGACONF = re.compile(r"\b(?:omegaconf|hydra)\b")  # which read `1e-4` as a number
# Code that makes words of a command of a file's settings, for argparse, which converts them.
MAKES_WORDS = re.compile(
    r"(?:[\"']--[\"'][ ]*\+|f[\"']--\{)(?s:.){0,1500}?"
    r"(?:sys\.argv(?:\.extend\(|[ ]*\+?=(?!=))|\bparse_args\w*\((?:args=)?\w)"
)


def converts_text(doc: Document, name: str) -> bool:
    """Return True where the code that reads a file makes a number or a switch of a setting's text."""
    is_kept = any(name in doc.reader_source for name in ("parse_yaml_file(", "parse_dict("))
    own = rf"(?:int|float|bool)\(.*(?:[\"']{name}[\"']|\.{name}\b)|{CONVERTS_TEXT}"
    is_own = occurs(re.compile(own), doc.reader_source) or occurs(OMEGACONF, doc.reader_source)
    return is_own or (not is_kept and occurs(MAKES_WORDS, doc.reader_source))


def uses_fsdp(doc: Document) -> bool:
    """Return True for Trainer arguments that turn FSDP on."""
    return bool(doc.get("fsdp")) and as_bool(doc.get("fsdp")) is not False


def is_run_by_fsdp(doc: Document) -> bool:
    """Return True where the arguments, the launcher's options, or the YAML that they name, say FSDP."""
    options = doc.start.options if doc.start else {}
    named = doc.launch_config.get("distributed_type") if doc.launch_config else None
    guessed = "FSDP" if named is None and "fsdp" in (options.get("config-file") or "").lower() else named
    return uses_fsdp(doc) or "use-fsdp" in options or guessed == "FSDP"


def is_trl(doc: Document) -> bool:
    """Return True for arguments that TRL may read: LLaMA-Factory and ms-swift have some of the same names."""
    return doc.has("model_name_or_path") and doc.program in ("trl", "transformers", None)


def is_grpo(doc: Document) -> bool:
    """Return True for arguments of TRL's GRPOTrainer."""
    is_its = doc.program in ("trl", None) and (doc.call is None or doc.has("model_name_or_path"))
    keys = doc.data.keys() & {"num_generations", "max_completion_length"}
    keys -= {"max_completion_length"} if doc.get("loss_type") in LINT_TABLES["losses_of_dpo"] else set()
    has_key = not all(parses_own(doc.reader_source, each) for each in keys)  # nor is one of them a script's own
    has_key &= "GRPO" in doc.reader_source or not doc.has_code  # trl.experimental's trainers have such settings too
    is_its_command = doc.start is not None and doc.start.script == "trl grpo"
    return is_its_command or (has_key and is_its and "rloo" not in (doc.call.script or "" if doc.call else ""))


def is_ranked(doc: Document) -> bool | None:
    """Return whether LLaMA-Factory's list of datasets says `ranking` for those of a file; None without the list."""
    names, listed = _datasets(doc)
    entries = [(listed or {}).get(name) for name in names]
    found = {bool(entry.get("ranking")) for entry in entries if isinstance(entry, dict)}
    return found.pop() if len(found) == 1 else None


def undefined_dataset(doc: Document) -> str | None:
    """Return a name that LLaMA-Factory's list of datasets does not have, or that is a file's path, which none has."""
    names, listed = _datasets(doc)
    names = [] if str(doc.get("dataset_dir")).startswith(("ONLINE", "REMOTE:", "{")) else names
    unknown = (each for each in names if not is_template(each) and each not in (listed or {}))
    return next((each for each in unknown if listed or re.search(r"/.*\.(?:jsonl?|csv|parquet|txt)$", each)), None)


def _datasets(doc: Document) -> tuple[list[str], dict[str, Any] | None]:
    """Return the names of a LLaMA-Factory file's datasets, and the list that has them; None where it is not here."""
    folder = str(doc.get("dataset_dir", "data"))
    info = Path(folder, "dataset_info.json")
    nearest = next((each / info for each in (doc.folder, *doc.folder.parents[:5]) if is_file(each / info)), None)
    file = (nearest or find_named(str(info), doc.path)) if doc.program == "llama-factory" else None
    names = doc.get("dataset") if isinstance(doc.get("dataset"), list) else str(doc.get("dataset") or "").split(",")
    listed = None
    with contextlib.suppress(ToolkitError):  # another folder's list is another program's
        listed = read_configuration(file) if file and file.parent.name == Path(folder).name else None
    return [str(name).strip() for name in names if name], listed


def has_sharegpt(doc: Document) -> bool:
    """Return True for a file of axolotl with rows of the type `sharegpt`."""
    rows = doc.get("datasets") if isinstance(doc.get("datasets"), list) else []
    return any(isinstance(each, dict) and str(each.get("type")).startswith("sharegpt") for each in rows)


def is_alone(doc: Document) -> bool:
    """Return True for a command that sees one GPU, and that nothing asks to start torchrun for it."""
    before, text = doc.start.before if doc.start else "", doc.command.text if doc.command else doc.text
    is_started = re.search("FORCE_TORCHRUN|USE_RAY", text)
    return bool(re.search(r"\bCUDA_VISIBLE_DEVICES=[\"']?\d+[\"']?\s", before)) and not is_started


def is_without_rank(doc: Document) -> bool:
    """Return True for a process that nothing tells its rank: of `python`, or of an accelerate that starts one."""
    call, text = doc.start, doc.command.text if doc.command else doc.text
    is_told = re.search(r"\bRANK=", text) or re.search(r"environ\b.*[\"']RANK\b|mp\.spawn\(", doc.source)
    if call is None or is_told or re.search(r"\b(?:srun|mpirun|mpiexec)\b", call.before):
        return False
    is_one = call.tool == "accelerate" and call.options.keys() <= PLAIN and call.options.get("num-processes") == "1"
    return call.tool == PYTHON or is_one


# -- DeepSpeed's configuration


def level_for_trainer(doc: Document) -> str | None:
    """Return the level of what concerns the Trainer alone: a JSON without `auto`, or of a YAML, may be for a loop."""
    is_accelerates = doc.named_by is not None and doc.named_by.kind == ACCELERATE
    is_trainers = doc.named_by is not None and doc.named_by.program in (*OUR_PROGRAMS, *FOREIGN)
    is_trainers |= doc.named_by is not None and doc.named_by.kind == AXOLOTL
    has_no_auto = doc.kind == DEEPSPEED and not is_trainers and not re.search(r"[\"']auto[\"']|: auto\b", doc.text)
    return NOTE if is_accelerates or has_no_auto or is_without_trainer(doc) else None


def is_without_trainer(doc: Document) -> bool:
    """Return True for a JSON or a YAML of a project with a loop of its own, which no Trainer is known to use."""
    return trainer_of(doc) is None and has_own_loop(doc.folder)


def names_word(doc: Document, word: str) -> bool:
    """Return True where a string of the project's own code is that word: it may write such a key itself."""
    source = named_files.project_source(doc.folder)
    return f'"{word}"' in source or f"'{word}'" in source


def saves(doc: Document) -> bool:
    """Return False for a file of a command that turns saving off, and whose script does not save either, and where a
    trainer of the project saves in a way of its own."""
    reader = doc.named_by or doc
    is_off = str(reader.get("save_strategy")) in ("no", "False")
    is_own = occurs(OWN_SAVE, reader.reader_source)
    return not (is_own or (is_off and not re.search(r"save_(?:model|pretrained)", reader.source)))


def trains_adapters(doc: Document) -> bool:
    """Return True where code trains adapters, which the Trainer gathers in any case (`_is_peft_model`, trainer.py); not
    for a command without the switch that the code asks for."""
    reader, source = doc.named_by or doc, (doc.named_by or doc).reader_source
    for switch in set(SWITCH.findall(source)) if reader.call and reader.call.is_complete else ():
        is_off = re.search(rf"\b{switch}: bool = (?:False|field\(default=False)", source)
        if is_off and as_bool(reader.get(switch, False)) is False:
            source = re.sub(rf"(?m)^([ \t]*)if [\w.]*\b{switch}:\n(?:\1[ \t]+.*\n|[ \t]*\n)*", "", source)
    return occurs(re.compile(r"\bpeft_config[ ]*=|get_peft_model\("), source)


def passes(doc: Document, name: str) -> bool:
    """Return True where the code that reads a file has a value of its own for a training argument, and passes it."""
    quoted = rf"[\"']{name}[\"'](?:[ ]*:|\][ ]*=(?!=))"
    return occurs(re.compile(rf"{quoted}|(?<![\w.]){name}[ ]*=(?!=)"), doc.reader_source)


def changes_to_full(doc: Document) -> bool | None:
    """Return whether a script changes to a full state dict before it saves; None where the script is not known."""
    reader = doc.named_by or doc
    source = reader.reader_source + imported_source(reader.source, reader.folder)
    is_changed = re.search(r"\.get_state_dict\(|state_dict_type(?:\(|[ ]*=(?!=))[^)]{0,120}\bFULL_STATE_DICT", source)
    is_known = reader.source and (reader is doc or trainer_of(doc))
    return True if is_changed else False if is_known else None


def trainer_of(doc: Document) -> Document | None:
    """Return the Trainer arguments that a JSON or an accelerate YAML is used with, where these are known to be all."""
    reader = doc.named_by
    is_known = reader is not None and reader.is_complete and reader.program in (*OUR_PROGRAMS, *FOREIGN[:2])
    return reader if is_known else None


def stage_of(doc: Document) -> int:
    """Return the ZeRO stage of a DeepSpeed JSON, or of the accelerate YAML that names one or has a stage itself."""
    json = doc if doc.kind == DEEPSPEED else doc.deepspeed_json
    if json is None and doc.launch_config is not None and is_deepspeed(doc.launch_config):
        return stage_of(doc.launch_config)
    return zero_stage(json) if json else as_int(doc.get("deepspeed_config.zero_stage")) or 0


def nvme_path(doc: Document, part: str) -> str:
    """Return the NVMe path of an accelerate YAML for `optimizer` or `param`."""
    return str(doc.get(f"deepspeed_config.offload_{part}_nvme_path", "none"))


def zero_stage(doc: Document) -> int:
    """Return the ZeRO stage of a DeepSpeed JSON; DeepSpeed's default is 0."""
    return as_int(doc.get("zero_optimization.stage", 0)) or 0


def offload_device(doc: Document, part: str) -> str:
    """Return where a DeepSpeed JSON offloads `optimizer` or `param` to: `none`, `cpu` or `nvme`."""
    return str(doc.get(f"zero_optimization.offload_{part}.device", "none"))


def stage3_key(doc: Document, name: str) -> str:
    """Return the dotted key under which `stage3_NAME` is written; DeepSpeed accepts it without the prefix too."""
    bare = f"zero_optimization.{name}"
    return bare if doc.has(bare) else f"zero_optimization.stage3_{name}"

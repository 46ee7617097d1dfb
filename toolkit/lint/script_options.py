"""The options that a script's own parser has, where its source says them all.

>>> text = "parser = ArgumentParser()\\nparser.add_argument('--lr')\\nargs = parser.parse_args()"
>>> is_refused("--rate", text), is_refused("--lr=1", text), is_refused("--rate", text + "\\nmore_arguments(parser)")
(True, False, False)
"""

import ast
import functools
import re
from collections.abc import Collection, Mapping, Sequence

from toolkit.convert.programs import program_schema
from toolkit.job.trainer_schema import trainer_argument_names
from toolkit.presets.removed_keys import TRAINING_ARGUMENTS_REMOVED

OF_DEEPSPEED = {"deepspeed", "deepspeed_config", "deepscale", "deepscale_config"}  # of its `add_config_arguments`
OF_SEQ2SEQ = ("sortish_sampler", "predict_with_generate", "generation_max_length", "generation_num_beams")
GROUPS = ("add_argument_group", "add_mutually_exclusive_group")
OF_PARSER = ("add_argument", "parse_args", "set_defaults", "print_help", "print_usage", "format_help", "error", *GROUPS)
PARSES = ("parse_args", "parse_args_into_dataclasses", "parse_args_and_config")
OF_TRL = "(?:SFT|DPO|KTO|GRPO|RLOO|Reward|Model)Config|ScriptArguments"  # whose fields of any version count
KEYWORDS = {"description", "formatter_class", "prog", "usage", "epilog", "add_help", "allow_abbrev"}
# What takes other words too, or words from another place.
OPEN = re.compile("parse_known_args|REMAINDER|return_remaining|BooleanOptionalAction|argv|hydra|OmegaConf|aliases")
# How Hugging Face's examples look for a file in place of options.
FOR_A_FILE = re.compile(r"len\(sys\.argv\)|sys\.argv\[(?:1|-1)\]")


def is_refused(option: str, source: str, modules: str = "") -> bool:
    """Return True for an option, as it is written, that the one parser of a script does not have; False where other
    code may add to it. `modules` are the project's modules that it imports, which may have its dataclasses."""
    found = options_of(source, modules)
    name = option.lstrip("-").partition("=")[0]
    if "" in found:  # which marks dataclasses: transformers' parser has dashes too, and `--no_NAME`
        name = name.replace("-", "_").removeprefix("no_")
    return bool(found) and not any(each.startswith(name) or each == f"no_{name}" for each in found)


@functools.lru_cache(maxsize=64)
def options_of(source: str, modules: str) -> frozenset[str]:
    """Return the names of all options, without dashes in front; none where these are not known."""
    try:
        nodes = [] if OPEN.search(FOR_A_FILE.sub("", source + modules)) else list(ast.walk(ast.parse(source)))
        others = list(ast.walk(ast.parse(modules))) if nodes else []
    except (SyntaxError, ValueError, RecursionError):
        return frozenset()
    calls = [(each, _name(each.func)) for each in nodes if isinstance(each, ast.Call)]
    made = [(call, name) for call, name in calls if name.endswith("ArgumentParser") or name == "TrlParser"]
    adds = [call for call, name in calls if name == "add_argument"]
    parsed = [call for call, name in calls if name in PARSES]
    if len(made) != 1 or not parsed or any(call.args for call in parsed):
        return frozenset()
    [(parser, kind)] = made
    if kind in ("HfArgumentParser", "TrlParser") and parser.args and not adds:
        asked = parser.args[0].elts if isinstance(parser.args[0], ast.Tuple) else parser.args[:1]
        classes: dict[str, list[ast.ClassDef]] = {}
        for each in nodes + others:
            if isinstance(each, ast.ClassDef):
                classes.setdefault(each.name, []).append(each)
        taken = [each for each in nodes + others if isinstance(each, ast.ImportFrom | ast.Import)]
        names = {each.name for node in taken for each in node.names if str(getattr(node, "module", "trl"))[:3] == "trl"}
        fields = [_fields(_name(each), classes, names) for each in asked]
        return frozenset({"", "config" * (kind == "TrlParser")}.union(*fields)) if all(fields) else frozenset()
    is_plain = kind == "ArgumentParser" and {each.arg for each in parser.keywords} <= KEYWORDS
    return frozenset(_of_argparse(parser, adds, nodes) if is_plain else ())


def _of_argparse(made: ast.Call, adds: Sequence[ast.Call], nodes: Sequence[ast.AST]) -> set[str]:
    around = {child: each for each in nodes for child in ast.iter_child_nodes(each)}
    returns = [each for each in nodes if isinstance(each, ast.Return)]
    parsers: set[str] = set()
    for _ in range(3):  # a parser that a function returns, and a group of it, have names of their own
        functions = {_around(each, around) for each in returns if _name(each.value) in parsers}
        for each in nodes:
            if isinstance(each, ast.Assign) and isinstance(value := each.value, ast.Call):
                of = _name(value.func.value) if isinstance(value.func, ast.Attribute) else ""
                is_group = _name(value.func) in GROUPS and of in parsers
                if value is made or is_group or _name(value.func) in functions:
                    parsers |= {_name(target) for target in each.targets}
    names = {"help", "h"}
    for each in nodes:
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load) and each.id in parsers:
            user = around[each]
            if isinstance(user, ast.Call) and _name(user.func) == "add_config_arguments":
                names |= OF_DEEPSPEED
            elif not (isinstance(user, ast.Return) or (isinstance(user, ast.Attribute) and user.attr in OF_PARSER)):
                return set()
    for call in adds:
        words = [each.value if isinstance(each, ast.Constant) else None for each in call.args]
        own = isinstance(call.func, ast.Attribute) and _name(call.func.value) in parsers
        if not own or not all(isinstance(each, str) for each in words):
            return set()
        names |= {str(each).lstrip("-") for each in words if str(each).startswith("-")}
    return names


def _fields(name: str, classes: Mapping[str, Sequence[ast.ClassDef]], imported: Collection[str]) -> set[str]:
    """Return the fields of a dataclass and of those that it is made from; none where one of these is not known."""
    if name not in classes:
        is_trls = re.fullmatch(OF_TRL, name) and ({name, "trl"} & {*imported})
        is_known = is_trls or name in ("TrainingArguments", "Seq2SeqTrainingArguments")
        of_trl = {*program_schema("trl").fields, *program_schema("trl").former} if is_trls else OF_SEQ2SEQ
        return {*trainer_argument_names(), *TRAINING_ARGUMENTS_REMOVED, *of_trl} if is_known else set()
    others = {key: value for key, value in classes.items() if key != name}
    made_of = [base for each in classes[name] for base in each.bases if _name(base) != "object"]
    bases = [_fields(_name(base), others, imported) for base in made_of]
    lines = [line for each in classes[name] for line in each.body if isinstance(line, ast.AnnAssign)]
    return {_name(line.target) for line in lines}.union(*bases) if all(bases) else set()


def _around(node: ast.AST, around: Mapping[ast.AST, ast.AST]) -> str:
    """Return the name of the function that a node is in."""
    while not isinstance(node, ast.FunctionDef | ast.Module):
        node = around[node]
    return node.name if isinstance(node, ast.FunctionDef) else ""


def _name(node: ast.AST | None) -> str:
    """Return a name without what is in front of its last dot; empty for anything else."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""

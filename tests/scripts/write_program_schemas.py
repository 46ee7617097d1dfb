"""Write toolkit/convert/program_schemas.json: the settings that each program reads, from its wheels and their source.

    python -m pip download --no-deps trl==1.16.0 axolotl==0.19.0 ...        # the versions below, into FOLDER
    python tests/scripts/write_program_schemas.py FOLDER

A version without a wheel comes from its tag, `git archive --format zip v0.12.2 src -o FOLDER/axolotl-0.12.2.zip`, or
from its sdist, packed the same way.

Nothing is imported or executed: the fields are the annotated names of the classes that each program's parser gets.
"""

import ast
import itertools
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from zipfile import ZipFile

OUTPUT = Path(__file__).parents[2] / "toolkit" / "convert" / "program_schemas.json"
# transformers as the programs pin it, the oldest and the newest: a setting of either is none that is refused.
TRANSFORMERS = {"trl": ["5.23.0"], "llama-factory": ["4.55.0", "5.6.0"], "ms-swift": ["4.55.0", "5.19.0"]}
VERSIONS = {"trl": "1.16.0", "axolotl": "0.19.0", "llama-factory": "0.9.5", "ms-swift": "4.6.0"}
# Versions whose settings people's files still have, the oldest first.
FORMER = {
    "trl": (
        *("0.9.6", "0.10.1", "0.11.4", "0.12.2", "0.13.0", "0.14.0", "0.15.0", "0.16.0", "0.17.0", "0.18.0", "0.19.1"),
        *("0.20.0", "0.21.0", "0.22.0", "0.23.1", "0.24.0", "0.25.0", "0.26.0", "0.27.0", "0.28.0", "0.29.0"),
        *("1.0.0", "1.2.0", "1.4.0", "1.5.0", "1.6.0", "1.7.0", "1.8.0", "1.9.0", "1.10.0", "1.11.0", "1.12.0"),
    ),
    "axolotl": ("0.8.1", "0.10.0", "0.12.2", "0.13.1", "0.15.0", "0.16.1", "0.17.0", "0.18.0"),
    "llama-factory": ("0.8.3", "0.9.0", "0.9.1", "0.9.2", "0.9.3", "0.9.4"),
    "ms-swift": (
        *("3.0.3", "3.1.0", "3.2.0", "3.3.1", "3.4.0", "3.5.0", "3.5.3", "3.6.0", "3.6.4", "3.7.0", "3.8.0", "3.9.0"),
        *("3.9.3", "3.10.0", "3.11.0", "3.12.0", "3.12.6", "4.0.0", "4.0.4", "4.1.0", "4.2.3", "4.3.0", "4.4.0"),
        "4.5.0",
    ),
}
TRL_COMMANDS = {
    **{"sft": "SFTConfig", "dpo": "DPOConfig", "kto": "KTOConfig", "reward": "RewardConfig", "grpo": "GRPOConfig"},
    **{"rloo": "RLOOConfig", "distillation": "DistillationConfig", "orpo": "ORPOConfig", "cpo": "CPOConfig"},
    **{"gkd": "GKDConfig", "online_dpo": "OnlineDPOConfig", "gold": "GOLDConfig"},
}
DISTRIBUTIONS = {"llama-factory": "llamafactory", "ms-swift": "ms_swift"}
PLAIN_TYPES = {"int", "float", "bool", "str", "list", "dict"}
AXOLOTL_BLOCKS = {"fsdp_config": "FSDPConfig", "trl": "TRLConfig", "vllm": "VllmConfig"}


class Source:
    """The classes of one or more wheels, all those of a name together."""

    def __init__(self, *wheels: Path, only: str) -> None:
        self.classes: dict[str, list[ast.ClassDef]] = {}
        for wheel in wheels:
            with ZipFile(wheel) as archive:
                for name in filter(re.compile(only).search, archive.namelist()):
                    for node in ast.walk(ast.parse(archive.read(name))):
                        if isinstance(node, ast.ClassDef):
                            self.classes.setdefault(node.name, []).append(node)

    def words(self, *names: str) -> dict[str, set[str]]:
        """Return the words of each field that takes no other text: `Literal`, an enumeration, a beginning."""
        found: dict[str, set[str] | None] = {}
        for node in self._with_bases(*names):
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    name, words = statement.target.id, self._closed(statement.annotation)
                    before = found.setdefault(name, words)  # a class that inherits decides
                    found[name] = before and before | (words or set())
        return {name: words for name, words in found.items() if words}

    def numbers(self, *names: str) -> dict[str, str]:
        """Return `int` or `float` for each field that takes nothing else, or nothing."""
        found: dict[str, str] = {}
        for node in self._with_bases(*names):
            for each in node.body:
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    parts = set(re.findall(r"[^\s|\[\],'\"]+", ast.unparse(each.annotation)))
                    parts -= {"Optional", "Union", "None"}
                    is_number = bool(parts) and parts <= {"int", "float"}
                    found.setdefault(each.target.id, ("float" if "float" in parts else "int") if is_number else "")
        return {name: kind for name, kind in sorted(found.items()) if kind}

    def _closed(self, annotation: ast.expr) -> set[str] | None:
        """Return the words that an annotation allows, none for numbers and blocks, and None where it takes any text."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if isinstance(annotation, ast.BinOp):
            parts = [self._closed(annotation.left), self._closed(annotation.right)]
        elif isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) in (
            "Optional",
            "Union",
            "Literal",
        ):
            inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
            if ast.unparse(annotation.value) == "Literal":
                return {str(each.value) for each in inner if isinstance(each, ast.Constant) and each.value is not None}
            parts = [self._closed(each) for each in inner]
        elif pattern := re.match(r"Annotated\[str, StringConstraints\(pattern='\^(\w+)'\)\]$", ast.unparse(annotation)):
            return {f"{pattern[1]}*"}
        else:
            name = ast.unparse(annotation)
            is_no_text = re.match(r"(?:None|bool|int|float|dict|list)\b", name)
            enums = [
                each for each in self.classes.get(name, ()) if any("Enum" in ast.unparse(base) for base in each.bases)
            ]
            members = [each.value for each in enums[0].body if isinstance(each, ast.Assign)] if enums else []
            return set(_texts(members)) if enums else set() if is_no_text else None
        return None if None in parts else set().union(*(each or () for each in parts))

    def types(self, *names: str) -> dict[str, str]:
        """Return the plain types of each field that takes nothing else, as `float | int`; a validator that comes before
        takes more for axolotl's switches of attention."""
        found: dict[str, set[str]] = {}
        for node in self._with_bases(*names):
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    found.setdefault(statement.target.id, {*_kinds(statement.annotation)} - {"None"})
        plain = {name: kinds for name, kinds in found.items() if kinds and kinds <= PLAIN_TYPES}
        return {name: " | ".join(sorted(kinds)) for name, kinds in plain.items() if not name.endswith("_attention")}

    def fields(self, *names: str) -> set[str]:
        """Return the names that the classes, and those they inherit from, annotate or read from the file's mapping."""
        fields = set[str]()
        for node in self._with_bases(*names):
            fields |= set(_annotated(node)) | set(_read_before(node))
        return fields

    def _with_bases(self, *names: str) -> Iterable[ast.ClassDef]:
        seen = set[str]()
        for start in names:
            waiting = [start]
            while waiting:
                name = waiting.pop(0)
                for node in self.classes.get(name, ()) if name not in seen else ():
                    waiting += [base.id.removeprefix("Hf") for base in node.bases if isinstance(base, ast.Name)]
                    yield node
                seen.add(name)


def _kinds(annotation: ast.expr) -> Iterable[str]:
    if isinstance(annotation, ast.BinOp):
        return itertools.chain(_kinds(annotation.left), _kinds(annotation.right))
    return [ast.unparse(annotation.value if isinstance(annotation, ast.Subscript) else annotation)]


def _annotated(node: ast.ClassDef) -> Iterable[str]:
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = ast.unparse(statement)
            if "ClassVar" not in text and "init=False" not in text and not statement.target.id.startswith("_"):
                yield statement.target.id
                for call in ast.walk(statement):  # pydantic's aliases
                    if isinstance(call, ast.keyword) and call.arg in ("alias", "validation_alias"):
                        yield from _texts(ast.walk(call))


def _read_before(node: ast.ClassDef) -> Iterable[str]:
    """The settings that a validator of pydantic reads from the file itself: `data.get("fsdp")`, `data["rl"]`."""
    for each in ast.walk(node):
        value: ast.AST | None = None
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.args:
            is_read = each.func.attr in ("get", "pop") and ast.unparse(each.func.value) == "data"
            value = each.args[0] if is_read else None
        elif isinstance(each, ast.Subscript) and ast.unparse(each.value) == "data":
            value = each.slice
        yield from _texts([value])


def _texts(nodes: Iterable[ast.AST | None]) -> Iterable[str]:
    return (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def _wheel(folder: Path, name: str) -> Path:
    return next(each for suffix in ("-*.whl", ".zip") for each in folder.rglob(name + suffix))


def _transformers(folder: Path, program: str) -> list[Path]:
    return [_wheel(folder, f"transformers-{version}") for version in TRANSFORMERS[program]]


def _trl(folder: Path, version: str) -> Source:
    only = r"_config\.py$|trl/scripts/(utils|grpo|rloo)\.py$|training_args\.py$|trl/.*/utils\.py$"
    return Source(_wheel(folder, f"trl-{version}"), *_transformers(folder, "trl"), only=only)


def trl_fields(folder: Path, version: str) -> dict[str, set[str]]:
    """Return the settings of each command of a version of TRL."""
    source = _trl(folder, version)
    shared = source.fields("ScriptArguments", "ModelConfig", "DatasetMixtureConfig")
    return {
        command: source.fields(config, f"{command.upper()}ScriptArguments") | shared
        for command, config in TRL_COMMANDS.items()
        if config in source.classes
    }


def all_trl_fields(folder: Path, version: str) -> set[str]:
    """Return the settings of all commands of a version of TRL."""
    return set.union(*trl_fields(folder, version).values())


def _axolotl(folder: Path, version: str) -> Source:
    wheels = _wheel(folder, f"axolotl-{version}"), _wheel(folder, f"transformers-{TRANSFORMERS['trl'][0]}")
    return Source(*wheels, only=r"/schemas/.*\.py$|/args\.py$|transformers/(training_args|trainer_utils)\.py$")


def _axolotl_parts(source: Source) -> tuple[str, ...]:
    plugins = ["SwanLabConfig", *(name for name in source.classes if name.endswith("Args"))]
    return ("AxolotlConfigWCapabilities", *plugins)


def _factory(folder: Path, version: str) -> Source:
    wheels = (_wheel(folder, f"llamafactory-{version}"), *_transformers(folder, "llama-factory"))
    return Source(*wheels, only=r"/hparams/.*\.py$|/extras/constants\.py$|training_args\w*\.py$")


def _factory_parts(_: Source) -> tuple[str, ...]:
    parts = ("ModelArguments", "DataArguments", "TrainingArguments", "FinetuningArguments", "EvaluationArguments")
    return (*parts, "RayArguments", "GeneratingArguments", "Seq2SeqTrainingArguments")


def _swift(folder: Path, version: str) -> Source:
    files = r"^swift/(arguments|trainers|rlhf_trainers|ray|ray_utils|dataset|llm/argument|llm/ray)/.*\.py$"
    wheels = (_wheel(folder, f"ms_swift-{version}"), *_transformers(folder, "ms-swift"))
    return Source(*wheels, only=rf"{files}|training_args\w*\.py$")


# The classes of each program's parser: of axolotl's schema and its plugins, and of the dataclasses of the others.
SOURCES = {
    "axolotl": (_axolotl, _axolotl_parts),
    "llama-factory": (_factory, _factory_parts),
    "ms-swift": (_swift, lambda _: ("RLHFArguments",)),
}
# Settings whose words the program registers: the file, and how it writes each.
REGISTERED = {
    ("llama-factory", "template"): (r"/data/template\.py$", r'register_template\(\s*name="([^"]+)"'),
    ("ms-swift", "template"): (r"^swift/(llm/)?template/constant\.py$", r"(?m)^    \w+ = '([^']+)'"),
    ("ms-swift", "model_type"): (r"^swift/(llm/)?model/constant\.py$", r"(?m)^    \w+ = '([^']+)'"),
}
# ms-swift's other commands, whose words are no misspellings of a training's.
OTHER_COMMANDS = ("ExportArguments", "InferArguments", "DeployArguments", "SamplingArguments", "EvalArguments")


def fields_of(folder: Path, program: str, version: str) -> set[str]:
    """Return the settings of a version of a program, and those that ms-swift's command takes: a file's variables, and
    once the file."""
    if program == "trl":
        return all_trl_fields(folder, version)
    read, parts = SOURCES[program]
    source = read(folder, version)
    taken = {"config", "ENV"} if version in ("3.12.0", "3.12.6", "4.0.0", "4.0.4") else {"ENV"}
    return source.fields(*parts(source)) | (taken if program == "ms-swift" else set())


def closed_words(folder: Path, program: str) -> dict[str, list[str]]:
    """Return the settings that take no other text in the newest version, with the words of all versions."""
    if program == "trl":  # whose fields are text, and whose trainers raise
        return {}
    read, parts = SOURCES[program]
    found: dict[str, set[str]] = {}
    for version in (VERSIONS[program], *FORMER[program]):
        source = read(folder, version)
        blocks = AXOLOTL_BLOCKS if program == "axolotl" else {}
        words = source.words(*parts(source), *(OTHER_COMMANDS if program == "ms-swift" else ()))
        for block, name in blocks.items():
            words |= {f"{block}.{key}": each for key, each in source.words(name).items()}
        if version == VERSIONS[program]:
            found = words
        for key in found.keys() & words.keys():
            found[key] |= words[key]
        for (owner, key), (place, written) in REGISTERED.items():
            if owner == program:
                with ZipFile(_wheel(folder, f"{DISTRIBUTIONS[program]}-{version}")) as archive:
                    texts = [archive.read(name).decode() for name in archive.namelist() if re.search(place, name)]
                found.setdefault(key, set()).update(*(re.findall(written, text) for text in texts))
    return {key: sorted(words) for key, words in sorted(found.items())}


def numbers(folder: Path, program: str) -> dict[str, str]:
    """Return the settings of the newest version that are numbers alone."""
    if program in ("trl", "axolotl"):  # of which the rules about the Trainer's arguments and `types` speak
        return {}
    read, parts = SOURCES[program]
    source = read(folder, VERSIONS[program])
    return source.numbers(*parts(source))


def former_fields(folder: Path, program: str) -> dict[str, str]:
    """Return the settings that a program no longer has, and the first version of those read that is without each.

    Of TRL, where classes without a command had one longer (PPO's), and no longer have it, the first without it there.
    """
    versions = (*FORMER[program], VERSIONS[program])
    gone = _gone(versions, [fields_of(folder, program, version) for version in versions])
    if program != "trl":
        return gone
    sources = [_trl(folder, version) for version in versions]
    anywhere = [source.fields(*(each for each in source.classes if each.endswith("Config"))) for source in sources]
    return gone | {name: version for name, version in _gone(versions, anywhere).items() if name in gone}


def _gone(versions: Sequence[str], fields: Sequence[set[str]]) -> dict[str, str]:
    lost = zip(versions[1:], itertools.pairwise(fields), strict=True)
    return {name: version for version, (old, new) in lost for name in old - new if name not in fields[-1]}


def lost_by_command(folder: Path, former: dict[str, str]) -> dict[str, dict[str, str]]:
    """Return when each command's class lost a former setting of TRL, where they did so in several versions."""
    versions = (*FORMER["trl"], VERSIONS["trl"])
    fields = [trl_fields(folder, version) for version in versions]
    lost: dict[str, dict[str, str]] = {}
    for version, (old, new) in zip(versions[1:], itertools.pairwise(fields), strict=True):
        for command in old.keys() & new.keys():
            gone = (old[command] - new[command]) & former.keys()
            lost.setdefault(command, {}).update(dict.fromkeys(gone, version))
    several = {name for names in lost.values() for name, version in names.items() if version != former[name]}
    by_command = {command: {name: names[name] for name in names.keys() & several} for command, names in lost.items()}
    return {command: names for command, names in by_command.items() if names}


def main(folder: Path) -> None:
    """Read the wheels of a folder, and write the schemas."""
    by_command = trl_fields(folder, VERSIONS["trl"])
    shared = set.intersection(*by_command.values())
    blocks = _axolotl(folder, VERSIONS["axolotl"])
    schemas: dict[str, dict[str, Any]] = {
        program: {
            "fields": sorted(fields_of(folder, program, VERSIONS[program])),
            "former": former_fields(folder, program),
            "words": closed_words(folder, program),
            "numbers": numbers(folder, program),
            "version": VERSIONS[program],
            "transformers": TRANSFORMERS.get(program, []),
        }
        for program in VERSIONS
    }
    schemas["trl"] |= {
        "fields": sorted(shared),
        "lost": lost_by_command(folder, schemas["trl"]["former"]),
        "commands": {command: sorted(names - shared) for command, names in by_command.items()},
    }
    schemas["axolotl"]["types"] = blocks.types(_axolotl_parts(blocks)[0])
    schemas["axolotl"]["blocks"] = {block: sorted(blocks.fields(name)) for block, name in AXOLOTL_BLOCKS.items()}
    OUTPUT.write_text(json.dumps(schemas, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Write toolkit/convert/program_schemas.json: the settings that each program reads, from its wheels and their source.

    python -m pip download --no-deps trl==1.16.0 axolotl==0.19.0 ...        # the versions below, into FOLDER
    python tests/scripts/write_program_schemas.py FOLDER

A version without a wheel comes from its tag: `git archive --format zip v0.12.2 src -o FOLDER/axolotl-0.12.2.zip`.

Nothing is imported or executed: the fields are the annotated names of the classes that each program's parser gets.
"""

import ast
import itertools
import json
import re
import sys
from collections.abc import Iterable
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
    "axolotl": ("0.8.1", "0.10.1", "0.12.2", "0.13.0", "0.15.0", "0.16.1", "0.17.0", "0.18.0"),
    "llama-factory": ("0.8.3", "0.9.0", "0.9.1", "0.9.2", "0.9.3", "0.9.4"),
    "ms-swift": ("3.0.3", "3.3.1", "3.6.4", "3.9.3", "3.12.6", "4.0.4", "4.1.0", "4.2.3", "4.4.3"),
}
TRL_COMMANDS = {
    **{"sft": "SFTConfig", "dpo": "DPOConfig", "kto": "KTOConfig", "reward": "RewardConfig", "grpo": "GRPOConfig"},
    **{"rloo": "RLOOConfig", "distillation": "DistillationConfig", "orpo": "ORPOConfig", "cpo": "CPOConfig"},
    **{"gkd": "GKDConfig", "online_dpo": "OnlineDPOConfig", "gold": "GOLDConfig"},
}
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

    def fields(self, *names: str) -> set[str]:
        """Return the names that the classes, and those they inherit from, annotate or read from the file's mapping."""
        waiting, seen, fields = list(names), set[str](), set[str]()
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                for node in self.classes.get(name, ()):
                    waiting += [base.id.removeprefix("Hf") for base in node.bases if isinstance(base, ast.Name)]
                    fields |= set(_annotated(node)) | set(_read_before(node))
        return fields


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


def trl_fields(folder: Path, version: str) -> dict[str, set[str]]:
    """Return the settings of each command of a version of TRL."""
    source = Source(
        _wheel(folder, f"trl-{version}"),
        *_transformers(folder, "trl"),
        only=r"_config\.py$|trl/scripts/(utils|grpo|rloo)\.py$|training_args\.py$|trl/.*/utils\.py$",
    )
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
    return Source(_wheel(folder, f"axolotl-{version}"), only=r"/schemas/.*\.py$|/args\.py$")


def axolotl_fields(folder: Path, version: str) -> set[str]:
    """Return the settings of axolotl and of its own plugins."""
    source = _axolotl(folder, version)
    plugins = ["SwanLabConfig", *(name for name in source.classes if name.endswith("Args"))]
    return source.fields("AxolotlConfigWCapabilities", *plugins)


def factory_fields(folder: Path, version: str) -> set[str]:
    """Return the settings of LLaMA-Factory's dataclasses."""
    wheels = (_wheel(folder, f"llamafactory-{version}"), *_transformers(folder, "llama-factory"))
    parts = ("ModelArguments", "DataArguments", "TrainingArguments", "FinetuningArguments", "EvaluationArguments")
    source = Source(*wheels, only=r"/hparams/.*\.py$|training_args\w*\.py$")
    return source.fields(*parts, "RayArguments", "GeneratingArguments", "Seq2SeqTrainingArguments")


def swift_fields(folder: Path, version: str) -> set[str]:
    """Return the settings of ms-swift, and those that its command takes: a file's variables, and once the file."""
    taken = {"ENV", "config"} if version in ("3.12.6", "4.0.4") else {"ENV"}
    files = r"^swift/(arguments|trainers|rlhf_trainers|ray|ray_utils|dataset|llm/argument|llm/ray)/.*\.py$"
    wheels = (_wheel(folder, f"ms_swift-{version}"), *_transformers(folder, "ms-swift"))
    return Source(*wheels, only=rf"{files}|training_args\w*\.py$").fields("RLHFArguments") | taken


READERS = {
    **{"trl": all_trl_fields, "axolotl": axolotl_fields},
    **{"llama-factory": factory_fields, "ms-swift": swift_fields},
}


def former_fields(folder: Path, program: str) -> dict[str, str]:
    """Return the settings that a program no longer has, and the first version of those read that is without each."""
    versions = (*FORMER[program], VERSIONS[program])
    fields = [READERS[program](folder, version) for version in versions]
    gone = zip(versions[1:], itertools.pairwise(fields), strict=True)
    return {name: version for version, (old, new) in gone for name in old - new if name not in fields[-1]}


def main(folder: Path) -> None:
    """Read the wheels of a folder, and write the schemas."""
    by_command = trl_fields(folder, VERSIONS["trl"])
    shared = set.intersection(*by_command.values())
    blocks = _axolotl(folder, VERSIONS["axolotl"])
    schemas: dict[str, dict[str, Any]] = {
        program: {
            "fields": sorted(READERS[program](folder, VERSIONS[program])),
            "former": former_fields(folder, program),
            "version": VERSIONS[program],
            "transformers": TRANSFORMERS.get(program, []),
        }
        for program in VERSIONS
    }
    schemas["trl"] |= {
        "fields": sorted(shared),
        "commands": {command: sorted(names - shared) for command, names in by_command.items()},
    }
    schemas["axolotl"]["blocks"] = {block: sorted(blocks.fields(name)) for block, name in AXOLOTL_BLOCKS.items()}
    OUTPUT.write_text(json.dumps(schemas, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

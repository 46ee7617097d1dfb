"""Write toolkit/convert/program_schemas.json: the settings that each program reads, from its wheels and their source.

    python -m pip download --no-deps trl==1.16.0 axolotl==0.19.0 ...        # the versions below, into FOLDER
    python tests/scripts/write_program_schemas.py FOLDER

Nothing is imported or executed: the fields are the annotated names of the classes that each program's parser gets.
"""

from __future__ import annotations

import ast
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
# Versions of TRL whose settings people's files still have.
FORMER_TRL = (
    *("0.9.6", "0.11.4", "0.13.0", "0.15.2", "0.17.0", "0.19.1", "0.21.0", "0.23.1", "0.25.1", "0.27.1", "0.29.0"),
    *("1.2.0", "1.6.0", "1.10.0"),
)
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
    return next(folder.rglob(f"{name}-*.whl"))


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


def main(folder: Path) -> None:
    """Read the wheels of a folder, and write the schemas."""
    by_command = trl_fields(folder, VERSIONS["trl"])
    shared, present = set.intersection(*by_command.values()), set.union(*by_command.values())
    former = {name for version in FORMER_TRL for names in trl_fields(folder, version).values() for name in names}
    axolotl = Source(_wheel(folder, "axolotl"), only=r"/schemas/|/args\.py$")
    plugins = ["SwanLabConfig", *(name for name in axolotl.classes if name.endswith("Args"))]
    factory = Source(
        _wheel(folder, "llamafactory"), *_transformers(folder, "llama-factory"), only=r"/hparams/|training_args\w*\.py$"
    )
    factory_parts = (
        "ModelArguments",
        "DataArguments",
        "TrainingArguments",
        "FinetuningArguments",
        "EvaluationArguments",
    )
    swift_files = r"^swift/(arguments|trainers|rlhf_trainers|ray|ray_utils|dataset)/|training_args\w*\.py$"
    swift = Source(_wheel(folder, "ms_swift"), *_transformers(folder, "ms-swift"), only=swift_files)
    schemas: dict[str, dict[str, Any]] = {
        "trl": {
            "fields": sorted(shared),
            "commands": {command: sorted(names - shared) for command, names in by_command.items()},
            "former": sorted(former - present),
        },
        "axolotl": {
            "fields": sorted(axolotl.fields("AxolotlConfigWCapabilities", *plugins)),
            "blocks": {block: sorted(axolotl.fields(name)) for block, name in AXOLOTL_BLOCKS.items()},
        },
        "llama-factory": {
            "fields": sorted(factory.fields(*factory_parts, "GeneratingArguments", "Seq2SeqTrainingArguments"))
        },
        "ms-swift": {"fields": sorted(swift.fields("RLHFArguments"))},
    }
    for program, schema in schemas.items():
        schema |= {"version": VERSIONS[program], "transformers": TRANSFORMERS.get(program, [])}
    OUTPUT.write_text(json.dumps(schemas, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Which program a file is for, and the settings that each program reads."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conversions import convert_text
from program_files import AXOLOTL, FACTORY, SWIFT, TRL_SFT

from toolkit.convert.conversion import convert_file
from toolkit.convert.programs import program_of, program_schema, program_schemas
from toolkit.errors import ToolkitError
from toolkit.files.documents import parse_yaml
from toolkit.versions import installed_version

# The fields of what each of TRL's commands parses, in a process of its own.
ASK_TRL = """
import dataclasses, json, trl
from trl.scripts import grpo, rloo
parts = {"sft": trl.SFTConfig, "dpo": trl.DPOConfig, "kto": trl.KTOConfig, "reward": trl.RewardConfig,
         "grpo": trl.GRPOConfig, "rloo": trl.RLOOConfig}
shared = (trl.ScriptArguments, trl.ModelConfig, trl.DatasetMixtureConfig)
names = lambda *kinds: sorted({f.name for kind in kinds for f in dataclasses.fields(kind) if f.init})
print(json.dumps({command: names(kind, *shared) for command, kind in parts.items()}))
"""


@pytest.mark.parametrize(
    ("text", "program"),
    [(TRL_SFT, "trl"), (AXOLOTL, "axolotl"), (FACTORY, "llama-factory"), (SWIFT, "ms-swift"), ("output_dir: x\n", None),
     ("model: {_component_: torchtune.models.qwen2}\nbatch_size: 2\n", "torchtune"),
     # ms-swift's GRPO has settings of TRL's
     (f"{SWIFT}rlhf_type: grpo\nnum_generations: 8\nmax_completion_length: 64\n", "ms-swift")],
)  # fmt: skip
def test_a_file_is_of_the_program_that_has_its_settings(text: str, program: str | None) -> None:
    values: dict[str, Any] = parse_yaml(text, "theirs.yaml")
    assert program_of(values) == program


def test_the_tables_name_what_a_program_has_for_what_it_has_not() -> None:
    for schema in program_schemas().values():
        assert [key for key in schema.renamed if key in schema.fields] == []
        names = [name for name in schema.renamed.values() if name is not None and name.isidentifier()]
        assert [name for name in names if name not in schema.fields] == []


def test_the_length_of_an_older_trl_is_converted_and_not_left_out(tmp_path: Path) -> None:
    conversion = convert_text(tmp_path, f"{TRL_SFT}max_seq_length: 8192\n")
    assert conversion.arguments["max_seq_length"] == 8192
    assert conversion.not_converted == []


@pytest.mark.parametrize(
    ("text", "tool", "words"),
    [(SWIFT, "ms-swift", "--config "), ("model: {_component_: x}\n", "torchtune", "MODEL")],
)
def test_a_file_that_has_no_converter_is_named_with_the_next_command(
    text: str, tool: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "theirs.yaml").write_text(text)
    with pytest.raises(ToolkitError, match=f"is a file of {tool}, which is not read") as refused:
        convert_file(tmp_path / "theirs.yaml")
    assert f"`toolkit plan {words}" in str(refused.value.hint)


@pytest.mark.nightly
def test_the_installed_trl_has_the_settings_that_are_shipped() -> None:
    schema = program_schema("trl")
    assert installed_version("trl") == schema.version, "run tests/scripts/write_program_schemas.py"
    asked = subprocess.run([sys.executable, "-c", ASK_TRL], capture_output=True, text=True, check=True).stdout
    for command, names in parse_yaml(asked, "TRL").items():
        assert [name for name in names if name not in schema.fields] == [], command

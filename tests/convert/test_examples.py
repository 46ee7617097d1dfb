"""The example configurations of axolotl, LLaMA-Factory and TRL, and every setting that their schemas declare.

Their source distributions are downloaded by pip, checked by their hash, and cached; nothing of them is copied into this
repository.
"""

import ast
import fcntl
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from conversions import outcome, refused_by_our_checks, unaccounted

from toolkit.convert.conversion import TOOLS, convert_file
from toolkit.convert.draft import Conversion, load_dialect
from toolkit.errors import ToolkitError
from toolkit.files.paths import cache_folder

pytestmark = pytest.mark.nightly  # three downloads, and hundreds of files

SHA256 = {
    "axolotl==0.19.0": "136d623f04c909c5149d7f5dbd4a0e215014ab4c3617cce9d64010b5b8ca609d",
    "llamafactory==0.9.5": "1702c0bfb864e80577a59521d2edcacd2aab05ec6aee06188fcba335a589681f",
    "trl==1.16.0": "999bd4a85b08870b7bfa387e1efa5177d2a4b88fe82b2526a057ac5d3cc600cd",
}


def source_of(requirement: str) -> Path:
    folder = cache_folder() / "sdists" / requirement.replace("==", "-")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock, tempfile.TemporaryDirectory() as temporary:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder
        requirements = Path(temporary) / "requirements.txt"
        requirements.write_text(f"{requirement} --hash=sha256:{SHA256[requirement]}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps", "--no-binary=:all:"]
        command += ["--no-build-isolation", "--dest", temporary, "--requirement", str(requirements)]
        pip = subprocess.run(command, capture_output=True, text=True, check=False)
        archives = list(Path(temporary).glob("*.tar.gz"))
        if not archives:
            assert "DO NOT MATCH THE HASHES" not in pip.stderr, pip.stderr
            pytest.skip(f"pip cannot download {requirement}: {pip.stderr.strip().rpartition(chr(10))[2]}")
        with tarfile.open(archives[0]) as archive:
            archive.extractall(f"{temporary}/unpacked", filter="data")
        (unpacked,) = Path(temporary, "unpacked").iterdir()
        shutil.move(unpacked, folder)
    return folder


AXOLOTL, LLAMA_FACTORY, TRL = "axolotl==0.19.0", "llamafactory==0.9.5", "trl==1.16.0"
# What is refused, by a part of the message.
REFUSALS = ("not supervised fine-tuning", "and the toolkit on text", "names no dataset to train on")
REFUSALS += ("has no counterpart", "counts layers from the end", "is not recognised")


@pytest.mark.parametrize(("requirement", "files", "converts"), [(AXOLOTL, 269, 206), (LLAMA_FACTORY, 82, 45)])
def test_every_example_is_converted_completely_or_refused_by_name(
    requirement: str, files: int, converts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source_of(requirement))
    examples = sorted(path for path in Path("examples").rglob("*") if path.suffix in (".yaml", ".yml"))
    assert len(examples) == files
    outcomes: Counter[str] = Counter()
    for path in examples:
        conversion = outcome(partial(convert_file, path))
        if isinstance(conversion, ToolkitError):
            outcomes["refused"] += 1
            assert any(words in conversion.message for words in REFUSALS), conversion
            assert conversion.hint
            continue
        outcomes["converted"] += 1
        assert unaccounted(yaml.safe_load(path.read_text()), conversion) == [], path
        assert refused_by_our_checks(conversion, tmp_path) is None, path
        assert not conversion.arguments.get("trust_remote_code")
    assert outcomes == {"converted": converts, "refused": files - converts}


# -- TRL's own commands


def trl_commands(source: Path) -> Iterator[str]:
    for path in (source / "README.md", source / "trl" / "scripts" / "sft.py"):
        for block in re.findall(r"```bash\n(.*?)```", path.read_text(), re.DOTALL):
            yield from re.findall(r"^(?:trl|python|accelerate) (?:[^\n]|(?<=\\)\n)*", block, re.MULTILINE)


def test_the_commands_in_trls_readme_and_script_are_converted(tmp_path: Path) -> None:
    source, converted = source_of(TRL), []
    for command in trl_commands(source):
        (tmp_path / "command.sh").write_text(command)
        if "sft" in command:
            converted.append(convert_file(tmp_path / "command.sh"))
            assert refused_by_our_checks(converted[-1], tmp_path) is None
        elif command.startswith("trl dpo"):
            with pytest.raises(ToolkitError, match="`trl dpo`, not supervised fine-tuning"):
                convert_file(tmp_path / "command.sh")
    full, lora = converted[-2:]
    assert len(converted) == 3
    assert (full.arguments["learning_rate"], full.arguments["packing"]) == (2e-5, True)
    assert (lora.arguments["lora_r"], lora.arguments["lora_alpha"], lora.arguments["lora_dropout"]) == (32, 16, 0.05)


def test_trls_accelerate_configurations_are_presets(tmp_path: Path) -> None:
    found = {}
    for file in (source_of(TRL) / "trl" / "accelerate_configs").glob("*.yaml"):
        command = f"trl sft --model_name_or_path a/b --dataset_name c/d --accelerate_config {file}"
        (tmp_path / "command.sh").write_text(command)
        found[file.stem] = convert_file(tmp_path / "command.sh").preset
    assert found == load_dialect("trl").accelerate_configs


# -- every setting of the schemas

MINIMAL = {
    "axolotl": {"base_model": "a/b", "learning_rate": 1e-4, "datasets": [{"path": "c/d", "type": "alpaca"}]},
    "llama-factory": {"model_name_or_path": "a/b", "dataset": "rows", "stage": "sft"},
    "trl": {"model_name_or_path": "a/b", "dataset_name": "c/d"},
}
# Tool -> its source distribution, the files of its classes, and fewer settings than they declare.
SCHEMAS = {
    "axolotl": (AXOLOTL, "src/axolotl/utils/schemas/*.py", 250),
    "llama-factory": (LLAMA_FACTORY, "src/llamafactory/hparams/*.py", 150),
    "trl": (TRL, "trl/t*/*_config.py", 35),
}
# What is refused as a whole, so that there is nothing to account for.
REFUSED_SETTINGS = {
    "axolotl": {  # "x" is neither a DeepSpeed file nor a learning rate
        *("adapter", "rl", "reward_model", "process_reward_model", "processor_type", "deepspeed", "learning_rate")
    },
    "llama-factory": {
        *("finetuning_type", "stage", "image_max_pixels", "video_max_pixels", "freeze_vision_tower", "crop_to_patches"),
        "media_dir",
    },
    "trl": {"lr_scheduler_kwargs"},  # "x" is no JSON
}


def declared(tool: str) -> dict[str, str]:
    requirement, pattern, _ = SCHEMAS[tool]
    trees = [ast.parse(path.read_text()) for path in sorted(source_of(requirement).glob(pattern))]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    fields = [each for node in classes for each in node.body if isinstance(each, ast.AnnAssign)]
    found = {ast.unparse(each.target): ast.unparse(each.annotation) for each in fields}
    return {name: kind for name, kind in found.items() if not name.startswith("_")}


def plausible(kind: str) -> Any:
    """Return a value of an annotation; `bool | None` gives True."""
    values = {"bool": True, "int": 2, "float": 0.5, "list[str]": ["x"], "dict[": {"x": 1}, "list[int]": [1], "str": "x"}
    if literal := re.match(r"\(?Literal\[('[^']*'|\d+)", kind):
        return ast.literal_eval(literal[1])
    return next((value for start, value in values.items() if kind.lstrip("(").startswith(start)), "x")


@pytest.mark.parametrize("tool", TOOLS)
def test_every_setting_that_a_tool_declares_is_accounted_for(tool: str) -> None:
    settings = declared(tool)
    assert len(settings) > SCHEMAS[tool][2]
    refused = set()
    for name, kind in settings.items():
        values = MINIMAL[tool] | {name: plausible(kind)}
        conversion = outcome(partial(TOOLS[tool], values, Path("theirs.yaml")))
        if isinstance(conversion, ToolkitError):
            refused.add(name)
        else:
            assert unaccounted(values, conversion) == [], name
    assert refused - REFUSED_SETTINGS[tool] == set()


@pytest.mark.parametrize("tool", TOOLS)
def test_a_value_of_the_wrong_type_is_never_a_traceback(tool: str) -> None:
    for name in declared(tool):
        for value in ([1], [["x"]], "abc", {"a": 1}, -1, True, float("nan")):
            values = MINIMAL[tool] | {name: value}
            found = outcome(partial(TOOLS[tool], values, Path("theirs.yaml")))
            assert isinstance(found, Conversion) or "\n" not in found.message

"""A preset's file works alone: from any directory, with a script of somebody who has never heard of the toolkit."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.utils import DeepSpeedPlugin
from launching import CPU_PRESETS, ROOT, SCRIPTS, accelerate_launch, nightly_launch, read, succeeded, torchrun
from scripts.write_presets import SHARED, expected_text

from toolkit.engines.compiled_ops import path_with_ninja, torch_extensions_folder
from toolkit.presets import list_presets

YAMLS, JSONS = ROOT / "accelerate_configs", ROOT / "ds_configs"
DEEPSPEED = [preset.name for preset in list_presets() if preset.engine == "deepspeed"]


def text_of(name: str) -> str:
    return str(yaml.safe_load((YAMLS / f"{name}.yaml").read_text())["deepspeed_config"]["deepspeed_config_file"])


def in_accelerate(source: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What accelerate makes of the variable that its launcher sets, before it knows a model."""
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", source)
    plugin = DeepSpeedPlugin()
    plugin.set_mixed_precision(precision)
    return dict(plugin.deepspeed_config)


@pytest.mark.parametrize("path", sorted(YAMLS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_yaml_has_the_settings_of_its_json(path: Path) -> None:
    assert path.read_text() == expected_text(path), "ds_configs has changed: run `make presets`"


@pytest.mark.parametrize("name", DEEPSPEED)
def test_accelerate_makes_the_same_of_a_yaml_and_of_its_json(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = str(JSONS / f"{SHARED.get(name, name)}.json")
    ours, theirs = (in_accelerate(each, "bf16", monkeypatch) for each in (text_of(name), beside))
    assert ours == theirs
    assert ours["zero_optimization"]["stage"] == {"zero1": 1, "zero2": 2}.get(name.split("_")[0], 3)
    silent = in_accelerate(text_of(name), "no", monkeypatch)  # as the file's comment says
    assert (ours.pop("bf16"), silent.pop("bf16")) == ({"enabled": True}, {"enabled": False})
    assert ours == silent


ZERO: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1, "offload": [None, None], "bucket": 50_000_000},
    "zero2": {"stage": 2, "offload": [None, None], "bucket": 50_000_000},
    "zero2_cpu_offload": {"stage": 2, "offload": ["cpu", None], "bucket": 50_000_000},
    "zero3": {"stage": 3, "offload": [None, None], "bucket": 32 * 32},
    "zero3_cpu_offload": {"stage": 3, "offload": ["cpu", "cpu"], "bucket": 32 * 32},
}
FSDP2: dict[str, dict[str, Any]] = {
    "fsdp2": {"reshard": True, "mesh": 1, "offload": "OffloadPolicy"},
    "fsdp2_grad_op": {"reshard": False, "mesh": 1, "offload": "OffloadPolicy"},
    "fsdp2_cpu_offload": {"reshard": True, "mesh": 1, "offload": "CPUOffloadPolicy"},
    "fsdp2_hybrid": {"reshard": True, "mesh": 2, "offload": "OffloadPolicy"},
}
EXPECTED: dict[str, dict[str, Any]] = {
    "single": {"engine": "NO", "wrapper": "LlamaForCausalLM"},
    "ddp": {"engine": "MULTI_CPU", "wrapper": "DistributedDataParallel"},
    **{name: {"engine": "DEEPSPEED", "wrapper": "DeepSpeedEngine", "bf16": True} | live for name, live in ZERO.items()},
    **{
        name: {"engine": "FSDP", "wrapper": "FSDPLlamaForCausalLM", "compute": "torch.bfloat16"} | live
        for name, live in FSDP2.items()
    },
}
# Under DeepSpeed the script asks for bf16.
BF16_OF_A_LOOP = ("--mixed_precision", "bf16")
TRAINER = ("--max_steps", "2", "--use_cpu", "true", "--bf16", "true", "--max_grad_norm", "0.5", "--report_to", "none")
TRAINER = (*TRAINER, "--save_strategy", "no")
# Every day, TRL's scripts train under a preset's file with a Trainer (tests/observe/test_foreign_script.py).
DAILY = [("zero2", "loop")]
OTHERS = [(name, how) for name in EXPECTED for how in ("loop", "trainer") if (name, how) not in DAILY]
NIGHTLY = [pytest.param(*each, marks=pytest.mark.nightly) for each in OTHERS]
VARIABLES = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def compiled_ops() -> dict[str, str]:
    return {"TORCH_EXTENSIONS_DIR": str(torch_extensions_folder()), "PATH": path_with_ninja()}


def launched(config: Path, how: str, folder: Path, *words: str, options: tuple[str, ...] = (), ranks: int = 2) -> str:
    """Launch the script from a directory of its own, and return what it prints where it fails."""
    script = (str(SCRIPTS / "anybodys.py"), how, str(folder), *words)
    ended = accelerate_launch(
        config, *script, script="run_on_cpu_ranks.py", options=options, cwd=folder, num_processes=ranks,
        variables=VARIABLES | compiled_ops(),
    )  # fmt: skip
    return "" if ended.returncode == 0 else ended.stderr


@pytest.mark.launch
@pytest.mark.parametrize(("preset", "how"), [*DAILY, *NIGHTLY])
def test_a_script_that_is_not_ours_trains_as_the_preset_says(preset: str, how: str, tmp_path: Path) -> None:
    config, ranks = YAMLS / f"{preset}.yaml", CPU_PRESETS[preset]
    words = ("--output_dir", str(tmp_path / "out"), *TRAINER) if how == "trainer" else ()
    options = BF16_OF_A_LOOP if preset in ZERO and how == "loop" else ()
    assert launched(config, how, tmp_path, *words, options=options, ranks=ranks) == ""
    clipped = {"clipping": 1.0 if how == "loop" else 0.5} if preset in ZERO else {}
    expected = {"ranks": ranks, "precision": "bf16", **EXPECTED[preset], **clipped}
    assert [read(tmp_path / f"rank{rank}.json") for rank in range(ranks)] == [expected] * ranks


@nightly_launch
@pytest.mark.parametrize("how", ["loop", "trainer"])
def test_a_script_that_does_not_ask_for_bf16_trains_in_fp32_as_the_file_says(how: str, tmp_path: Path) -> None:
    words = ("--output_dir", str(tmp_path / "out"), *TRAINER, "--bf16", "false") if how == "trainer" else ()
    assert launched(YAMLS / "zero2.yaml", how, tmp_path, *words) == ""
    assert [read(tmp_path / f"rank{rank}.json")["bf16"] for rank in (0, 1)] == [False, False]
    assert "It\n  # trains in fp32 otherwise" in (YAMLS / "zero2.yaml").read_text()


@nightly_launch
@pytest.mark.parametrize("name", ["zero2", "zero3_cpu_offload"])
def test_a_trainer_takes_the_json_by_itself_under_torchrun(name: str, tmp_path: Path) -> None:
    words = ("--output_dir", str(tmp_path / "out"), *TRAINER, "--deepspeed", str(JSONS / f"{name}.json"))
    succeeded(torchrun("anybodys.py", "trainer", str(tmp_path), *words, num_processes=2))
    live = {"ranks": 2, "precision": "bf16", **EXPECTED[name], "clipping": 0.5}
    assert [read(tmp_path / f"rank{rank}.json") for rank in (0, 1)] == [live, live]

"""Libraries out of the range that the toolkit declares are named before a run, with the line that brings them."""

import re
import tomllib

import pytest
from launching import ROOT

from toolkit import installation
from toolkit.errors import ToolkitError
from toolkit.job.job import Job
from toolkit.job.job_checks import missing_packages
from toolkit.launch import preflight
from toolkit.presets import load_preset


def test_the_ranges_are_those_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for line in (*extras["train"], *extras["deepspeed"], *extras["gpu"], *extras["dev"]):
        name, least, below = re.match(r"([\w-]+)(?:>=([\d.]+))?(?:,<([\d.]+))?", line).groups()  # type: ignore[union-attr]
        assert installation.RANGES.get(name, (least, below)) == (least, below), name
    assert {*installation.TRAIN, "deepspeed", "bitsandbytes"} == installation.RANGES.keys()


@pytest.mark.parametrize(("version", "is_refused"), [("5.17.0", True), ("5.23.0", False), ("6.0.0", True)])
def test_a_version_out_of_range_is_refused_with_the_line_to_type(
    version: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "installed_version", {"transformers": version}.get)
    if not is_refused:
        installation.require_versions("transformers")
        return
    with pytest.raises(ToolkitError, match=f"transformers {version} is installed, expected at least 5.23") as refused:
        installation.require_versions("transformers")
    assert str(refused.value.hint).endswith("'transformers>=5.23,<6'")


@pytest.mark.parametrize(("version", "is_refused"), [("0.49.2", True), ("0.50.0", False)])
def test_bitsandbytes_whose_4_bit_layers_no_check_knows_is_refused(
    version: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "installed_version", {"bitsandbytes": version}.get)
    job = Job.from_values({"model_name_or_path": "m", "dataset": "d", "load_in_4bit": True, "lora_r": 8})
    errors = [error.message for error in missing_packages(job, on_cpu=True)]
    assert any(f"bitsandbytes {version} is installed" in message for message in errors) is is_refused


@pytest.mark.parametrize(("preset", "gpus", "is_refused"), [("zero2_cpu_offload", 1, True), ("zero2", 1, False)])
def test_letters_in_an_architecture_list_are_refused_where_deepspeed_compiles_for_it(
    preset: str, gpus: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0a+PTX")
    monkeypatch.setattr(preflight, "count_gpus", lambda: gpus)
    if not is_refused:
        preflight.check_libraries(load_preset(preset), runs_script=False)
        return
    with pytest.raises(ToolkitError, match=r"TORCH_CUDA_ARCH_LIST is '8\.0;9\.0a") as refused:
        preflight.check_libraries(load_preset(preset), runs_script=False)
    assert refused.value.hint == "export TORCH_CUDA_ARCH_LIST='8.0;9.0+PTX'"

"""The wheel carries the presets and every file that is not Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from preset_files import listed_presets

ROOT = Path(__file__).parents[2]


YAMLS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))


JSONS = sorted((ROOT / "ds_configs").glob("*.json"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "--no-index", "-w"]
    subprocess.run([*build, str(folder)], check=True, capture_output=True, timeout=300)
    (built,) = folder.glob("finetune_toolkit-*.whl")
    return built


def test_the_wheel_carries_the_presets_byte_for_byte(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name: archive.read(name) for name in archive.namelist() if name.startswith("toolkit/_presets/")}
    files = {f"toolkit/_presets/{path.parent.name}/{path.name}": path.read_bytes() for path in [*YAMLS, *JSONS]}
    assert len(files) == 28
    assert packed == files


def test_the_wheel_carries_what_is_not_python(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    templates = {str(path.relative_to(ROOT)) for path in (ROOT / "toolkit/report/templates").iterdir()}
    assert {Path(name).suffix for name in templates} == {".j2", ".css", ".js"}
    assert templates | {"toolkit/py.typed"} <= names
    on_disk = {str(path.relative_to(ROOT)) for path in (ROOT / "toolkit").rglob("*.py")}
    assert on_disk <= names
    assert not {name for name in names if name.startswith(("tests/", "benchmarks/")) or "__pycache__" in name}


def test_the_installed_wheel_lists_the_same_presets_from_another_directory(wheel: Path, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=300)
    listed = subprocess.run(
        [sys.executable, "-m", "toolkit", "presets", "--json"],
        cwd=elsewhere, env=os.environ | {"PYTHONPATH": str(site)}, capture_output=True, text=True, check=True,
        timeout=60,
    )  # fmt: skip
    installed = json.loads(listed.stdout)
    assert all(Path(row["accelerate_config"]).is_relative_to(site) for row in installed)
    assert all(Path(row["deepspeed_config"]).is_relative_to(site) for row in installed if row["deepspeed_config"])
    paths = ("accelerate_config", "deepspeed_config")
    from_source, from_wheel = (
        [{key: value for key, value in row.items() if key not in paths} for row in rows]
        for rows in (listed_presets().values(), installed)
    )
    assert from_wheel == from_source

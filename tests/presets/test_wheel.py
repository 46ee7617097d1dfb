"""The wheel carries the presets and every file that is not Python."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from launching import ROOT
from preset_files import listed_presets


def test_the_wheel_carries_the_presets_byte_for_byte_and_what_is_not_python(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        packed = {name: archive.read(name) for name in names if name.startswith("toolkit/_presets/")}
    paths = [*(ROOT / "accelerate_configs").glob("*.yaml"), *(ROOT / "ds_configs").glob("*.json")]
    assert len(paths) == 28
    paths += (ROOT / "examples").glob("*.*")
    assert packed == {f"toolkit/_presets/{path.parent.name}/{path.name}": path.read_bytes() for path in paths}
    templates = {str(path.relative_to(ROOT)) for path in (ROOT / "toolkit/report/templates").iterdir()}
    assert {Path(name).suffix for name in templates} == {".j2", ".css", ".js"}
    tables = {str(path.relative_to(ROOT)) for path in (ROOT / "toolkit/convert/tables").iterdir()}
    on_disk = {str(path.relative_to(ROOT)) for path in (ROOT / "toolkit").rglob("*.py")}
    assert templates | tables | on_disk | {"toolkit/py.typed"} <= names
    assert not {name for name in names if name.startswith(("tests/", "benchmarks/")) or "__pycache__" in name}


def test_the_installed_wheel_lists_the_same_presets_from_another_directory(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)  # as pip does; `test_install.py` installs it with pip
    command = [sys.executable, "-m", "toolkit", "presets", "--json"]
    environment = os.environ | {"PYTHONPATH": str(site)}
    listed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True, timeout=300)
    installed = {row["name"]: row for row in json.loads(listed.stdout)}
    for row in installed.values():
        assert Path(row["accelerate_config"]).is_relative_to(site)
        assert row["deepspeed_config"] is None or Path(row["deepspeed_config"]).is_relative_to(site)
    paths = {"accelerate_config": "", "deepspeed_config": ""}
    ours = {name: row | paths for name, row in listed_presets().items()}
    assert {name: row | paths for name, row in installed.items()} == ours

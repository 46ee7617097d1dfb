"""`make release`: the same bytes from the same commit, and nothing in them that must not be published."""

import importlib.util
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from launching import ROOT

if not (ROOT / ".git").exists():
    pytest.skip("a release is built from a git checkout", allow_module_level=True)


def load_release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci/release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["release"] = module
    spec.loader.exec_module(module)
    return module


release = load_release()


@pytest.mark.nightly
def test_two_builds_of_a_commit_are_the_same_bytes_and_fit_to_publish(tmp_path: Path) -> None:
    first, second = (release.build(tmp_path / name / "tree", tmp_path / name / "dist") for name in "ab")
    assert [package.suffix for package in first] == [".whl", ".gz"]
    assert [package.read_bytes() for package in first] == [package.read_bytes() for package in second]
    version = release.version_of(tmp_path / "a/tree")
    assert [release.problems(package, version) for package in first] == [[], []]


def test_a_wheel_with_test_data_or_a_path_of_this_machine_is_refused(tmp_path: Path) -> None:
    package = tmp_path / "finetune_toolkit-1.0-py3-none-any.whl"
    with zipfile.ZipFile(package, "w") as archive:
        archive.writestr("tests/fixtures/rows.jsonl", "{}")
        archive.writestr("toolkit/paths.py", f"ROOT = '{ROOT}/toolkit'")
    assert release.problems(package, "1.0") == [
        "finetune_toolkit-1.0.dist-info/licenses/LICENSE is missing or another",
        "the version is not 1.0",
        "tests/fixtures/rows.jsonl does not belong in a wheel",
        "toolkit/paths.py names a path of this machine",
    ]


def test_unreleased_lines_get_the_version_and_the_date_once() -> None:
    text = "# Changelog\n\n## Unreleased\n\n### Added\n\n- A line.\n\n## 0.1.0 - 2026-01-01\n"
    dated = release.dated_changelog(text, "0.2.0", "2026-12-01")
    assert "## Unreleased\n\n## 0.2.0 - 2026-12-01\n\n### Added\n\n- A line.\n" in dated
    assert release.dated_changelog(dated, "0.2.0", "2026-12-02") == dated

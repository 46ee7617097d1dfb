"""Build a release from the checked-out commit, and check it: `make release`. Publishing it is left to a person.

The first call gives the changelog's unreleased lines the version and a date, to be committed; the next one builds.
"""

from __future__ import annotations

import datetime
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UNRELEASED = "## Unreleased\n"


def version_of(tree: Path) -> str:
    """Return the version in a source tree."""
    found = re.search(r'__version__ = "(.+)"', (tree / "toolkit/_version.py").read_text())
    assert found is not None
    return found[1]


def dated_changelog(text: str, version: str, date: str) -> str:
    """Return a changelog whose unreleased lines are those of a version; unchanged where the version has a section."""
    if f"\n## {version} " in text:
        return text
    return text.replace(UNRELEASED, f"{UNRELEASED}\n## {version} - {date}\n", 1)


def git(*words: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True).stdout


def build(tree: Path, folder: Path) -> list[Path]:
    """Build wheel and sdist of the commit's files, unpacked into `tree`, with the time of the commit."""
    with tarfile.open(fileobj=io.BytesIO(git("archive", "HEAD"))) as archive:
        archive.extractall(tree, filter="data")
    environment = os.environ | {"SOURCE_DATE_EPOCH": git("log", "-1", "--format=%ct").decode().strip()}
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(tree)]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return sorted(folder.iterdir())


def contents(package: Path) -> dict[str, bytes]:
    """Return the files in a wheel or an sdist by name."""
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as archive:
            return {name: archive.read(name) for name in archive.namelist()}
    with tarfile.open(package) as archive:
        files = [(member.name, archive.extractfile(member)) for member in archive.getmembers()]
        return {name.partition("/")[2]: file.read() for name, file in files if file is not None}


def problems(package: Path, version: str) -> list[str]:
    """Return what must not be published: other files than the package's, no licence, paths of this machine."""
    files, wheel = contents(package), package.suffix == ".whl"
    info = f"finetune_toolkit-{version}.dist-info/"
    licence = info + "licenses/LICENSE" if wheel else "LICENSE"
    found = [] if files.get(licence) == (ROOT / "LICENSE").read_bytes() else [f"{licence} is missing or another"]
    if f"Version: {version}\n".encode() not in files.get(info + "METADATA" if wheel else "PKG-INFO", b""):
        found.append(f"the version is not {version}")
    outside = [name for name in files if wheel and not name.startswith(("toolkit/", info))]
    found += [f"{name} does not belong in a wheel" for name in outside]
    found += [f"{name} is compiled" for name in files if name.endswith((".pyc", ".so"))]
    here = [str(path).encode() + b"/" for path in (ROOT, Path.home())]
    return found + [
        f"{name} names a path of this machine" for name, text in files.items() if any(map(text.count, here))
    ]


def main() -> int:
    """Write the changelog's section, or build twice, compare and check; return the exit code."""
    version, changelog = version_of(ROOT), ROOT / "CHANGELOG.md"
    dated = dated_changelog(text := changelog.read_text(), version, datetime.date.today().isoformat())
    if dated != text:
        changelog.write_text(dated)
        print(f"CHANGELOG.md has a section {version} now: commit it, and run `make release` again", file=sys.stderr)
        return 2
    if changed := git("status", "--porcelain", "--untracked-files=no").decode():
        print(f"error: the tree differs from the commit\n{changed}  hint: commit it", file=sys.stderr)
        return 2
    (target := ROOT / "dist").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        first, second = (build(Path(temporary, name, "tree"), Path(temporary, name, "dist")) for name in "ab")
        failed = [f"{one.name}: two builds differ" for one, two in zip(first, second, strict=True)
                  if one.read_bytes() != two.read_bytes()]  # fmt: skip
        failed += [f"{package.name}: {problem}" for package in first for problem in problems(package, version)]
        twine = subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *map(str, first)], check=False)
        if failed or twine.returncode:
            print("\n".join(failed), file=sys.stderr)
            return 1
        for package in first:
            (target / package.name).write_bytes(package.read_bytes())
            print(target / package.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())

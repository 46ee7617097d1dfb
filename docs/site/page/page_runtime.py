"""What the planner page runs: Pyodide's core, and the Python files of the toolkit and of what it imports, compiled.

Pyodide comes from npm, in one version with one checksum; typer and PyYAML are those that are installed here; the
toolkit's own wheel is built from the checkout. All is compiled by the page's own Python, because compiling takes a
browser longer than everything else, and compressed here, so that any server will do.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.metadata
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.files.paths import cache_folder
from toolkit.models.decoders import types_with_formulas
from toolkit.models.read_model import bundled_models
from toolkit.versions import attention_names, model_class_flags, model_plans, model_types

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).parent
PYODIDE = "314.0.7"
PYODIDE_SHA512 = "0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
LIBRARIES = ("typer", "annotated-doc", "shellingham", "PyYAML")
# Of the standard library, what neither a plan nor Pyodide needs; of the toolkit, what starts or reads runs.
UNUSED_LIBRARY = (
    *(
        "_pyio",
        "_pyrepl",
        "bdb",
        "cProfile",
        "cmd",
        "compileall",
        "configparser",
        "curses",
        "dbm",
        "doctest",
        "ensurepip",
    ),
    *("fileinput", "ftplib", "idlelib", "imaplib", "lib2to3", "mailbox", "mimetypes", "modulefinder", "netrc"),
    *("nntplib", "optparse", "pdb", "pickletools", "plistlib", "poplib", "profile", "profiling", "pstats", "pyclbr"),
    *("pydoc", "pydoc_data", "shelve", "smtplib", "socketserver", "sqlite3", "statistics", "symtable", "tabnanny"),
    *("telnetlib", "timeit", "tkinter", "tomllib", "trace", "turtle", "turtledemo", "unittest", "venv", "wave"),
    *("webbrowser", "wsgiref", "xml", "xmlrpc", "zipapp", "multiprocessing", "html", "_strptime", "_pydatetime"),
)
UNUSED_PACKAGES = (
    *("train", "observe", "checkpoint", "rehearse", "compare", "doctor", "lint", "cluster", "report", "demo"),
    *("convert", "record", "page"),
)


def write_runtime(folder: Path) -> None:
    """Write all that the page's worker loads. Raises ToolkitError without npm, node or a network."""
    pyodide = pyodide_folder()
    shutil.copyfile(pyodide / "pyodide.mjs", folder / "pyodide.mjs")
    write_compressed(folder / "pyodide.asm.mjs.gz", (pyodide / "pyodide.asm.mjs").read_bytes())
    write_compressed(folder / "pyodide.asm.wasm.gz", (pyodide / "pyodide.asm.wasm").read_bytes())
    lock = json.loads((pyodide / "pyodide-lock.json").read_text())
    (folder / "pyodide-lock.json").write_text(json.dumps({"info": lock["info"], "packages": {}}) + "\n")
    write_compressed(folder / "library.zip.gz", library(pyodide))
    write_compressed(folder / "packages.gz", packages(pyodide))


def write_compressed(path: Path, content: bytes) -> None:
    """Write bytes with gzip, the same for the same bytes."""
    path.write_bytes(gzip.compress(content, 9, mtime=0))


def run(*command: str | Path, cwd: Path | None = None) -> None:
    """Run a tool; raise ToolkitError with its last line if it is missing or fails."""
    try:
        ended = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ToolkitError(
            f"{command[0]} is not installed", hint="the page needs node 20 and npm to be built"
        ) from None
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        raise ToolkitError(f"`{' '.join(map(str, command[:3]))}` failed: {last[:300]}")


def pyodide_folder() -> Path:
    """Return the folder of Pyodide's npm package; it is fetched once. Raises ToolkitError for another checksum."""
    folder = cache_folder() / "pyodide" / PYODIDE / "package"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory() as made:
            run("npm", "pack", "--silent", f"pyodide@{PYODIDE}", cwd=Path(made))
            (archive,) = Path(made).glob("*.tgz")
            found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
            if found != PYODIDE_SHA512:
                raise ToolkitError(f"pyodide {PYODIDE} has another checksum: sha512-{found}")
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tarfile.open(archive) as packed:
                packed.extractall(folder.parent, filter="data")
    return folder


def compiled(pyodide: Path, files: dict[str, bytes]) -> dict[str, bytes]:
    """Return files with their Python compiled by the page's own; the same files are compiled once."""
    digest = hashlib.sha256((HERE / "compile.mjs").read_bytes() + PYODIDE.encode())
    for name, content in sorted(files.items()):
        digest.update(f"{name} {len(content)} ".encode() + content)
    cached = cache_folder() / "planner-page" / f"{digest.hexdigest()[:32]}.zip"
    if not cached.exists():
        with tempfile.TemporaryDirectory() as made:
            for name, content in files.items():
                path = Path(made) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            run("node", HERE / "compile.mjs", pyodide, made)
            cached.parent.mkdir(parents=True, exist_ok=True)
            done = {path.relative_to(made).as_posix(): path for path in Path(made).rglob("*") if path.is_file()}
            cached.write_bytes(zipped({name: path.read_bytes() for name, path in done.items()}))
    with zipfile.ZipFile(cached) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(files: dict[str, bytes]) -> bytes:
    """Return files as an uncompressed zip, which Python imports from faster; the same for the same files."""
    with tempfile.TemporaryFile() as written:
        with zipfile.ZipFile(written, "w") as archive:
            for name, content in sorted(files.items()):
                archive.writestr(zipfile.ZipInfo(name), content)
        written.seek(0)
        return written.read()


def library(pyodide: Path) -> bytes:
    """Return Python's standard library as a zip of bytecode."""
    with zipfile.ZipFile(pyodide / "python_stdlib.zip") as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        used = [name for name in names if name.split("/")[0].removesuffix(".py") not in UNUSED_LIBRARY]
        return zipped(compiled(pyodide, {name: archive.read(name) for name in used}))


def transformers_facts() -> dict[str, object]:
    """Return what the planner reads in the source of the installed transformers, of all architectures that it plans."""
    configs = [json.loads(path.read_text()) for path in bundled_models().values()]
    parts = [part for each in configs for part in (each, each.get("text_config", each))]
    types = {*types_with_formulas(), *(part.get("model_type", "") for part in parts)}
    return {
        "attention_names": attention_names(),
        "model_types": model_types(),
        "model_plans": {model_type: model_plans(model_type) for model_type in types},
        "model_class_flags": {model_type: model_class_flags(model_type) for model_type in types},
    }


def packages(pyodide: Path) -> bytes:
    """Return the toolkit, the libraries it imports and the page's own module: a line of JSON with sizes, then bytes."""
    files = {"answer.py": (HERE / "answer.py").read_bytes()}
    files["transformers_facts.json"] = json.dumps(transformers_facts()).encode()
    for name in LIBRARIES:
        installed = importlib.metadata.files(name) or []
        sources = [path for path in installed if path.suffix == ".py" and not path.parts[0].startswith("..")]
        files |= {str(path): path.locate().read_bytes() for path in sources}
    with tempfile.TemporaryDirectory() as made:
        run(
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"), *("-w", made, ROOT)
        )
        (wheel,) = Path(made).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                parts = name.split("/")
                if parts[0] == "toolkit" and parts[1] not in UNUSED_PACKAGES:
                    files[name] = archive.read(name)
    done = sorted(compiled(pyodide, files).items())
    sizes = json.dumps([[name, len(content)] for name, content in done])
    return sizes.encode() + b"\n" + b"".join(content for _, content in done)

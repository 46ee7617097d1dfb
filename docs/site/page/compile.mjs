// Compiles Python files to bytecode with the Python that the page runs: node compile.mjs PYODIDE FOLDER
// Each .py below FOLDER is replaced by a .pyc beside it, which Python imports without a source.
import { pathToFileURL } from "node:url"

const [pyodide, folder] = process.argv.slice(2)
const { loadPyodide } = await import(pathToFileURL(`${pyodide}/pyodide.mjs`).href)
const python = await loadPyodide({ indexURL: pyodide })
python.FS.mkdir("/host")
python.FS.mount(python.FS.filesystems.NODEFS, { root: folder }, "/host")
python.runPython(`
import importlib._bootstrap_external as loader
from pathlib import Path

for path in Path("/host").rglob("*.py"):
    code = compile(path.read_bytes(), path.relative_to("/host"), "exec", dont_inherit=True)
    path.with_suffix(".pyc").write_bytes(loader._code_to_hash_pyc(code, bytes(8), False))
    path.unlink()
`)

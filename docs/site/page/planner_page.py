"""Build the planner page into a folder: `python docs/site/page/planner_page.py build/page`; `make page` does.

It is the page of `toolkit page` as static files; what computes in the browser is in page_runtime.py.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT), str(HERE)]

from page_runtime import write_runtime  # noqa: E402

from toolkit.entry_point import exit_code_of  # noqa: E402
from toolkit.errors import ToolkitError  # noqa: E402
from toolkit.page.server import ASSETS, page_html  # noqa: E402

STATIC = (ASSETS / "page.css", ASSETS / "page.js", HERE / "worker.js")


def commit() -> str:
    """Return the commit that the page is built from; empty outside of a repository."""
    done = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def build(folder: Path, *, docs: str = "") -> None:
    """Write the page; `docs` is the address of the documentation from there, for links to its pages."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in STATIC:
        (folder / path.name).write_bytes(path.read_bytes())
    write_runtime(folder)
    sizes = {path.name: path.stat().st_size for path in sorted(folder.glob("*.gz"))}
    (folder / "index.html").write_text(page_html(sizes=sizes, commit=commit(), docs=docs))


def main() -> int:
    """Build the page where the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--docs", default="", help="address of the documentation, for links to the evidence")
    arguments = parser.parse_args()

    def work() -> None:
        try:
            build(arguments.folder, docs=arguments.docs)
        except ModuleNotFoundError as error:
            raise ToolkitError(f"{error.name} is not installed", hint="`make setup`") from None

    return exit_code_of(work)


if __name__ == "__main__":
    sys.exit(main())

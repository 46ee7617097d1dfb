"""Pages of the docs site that are generated when it is built, run by MkDocs (plugin gen-files).

README.md becomes the start page. Text between `<!-- build: NAME -->` and `<!-- /build -->` is replaced by a block of
reference_blocks.py. Links to files of the repository become links to copies of them. The navigation lists every page.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path, PurePosixPath

import mkdocs_gen_files

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from reference_blocks import BUILT  # noqa: E402

# Pages of the site that are files of the repository's top level.
PAGE_OF = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
}
# Sections of the navigation, each with the pages that come first; the others follow in alphabetical order.
SECTIONS = {
    "tutorials": [
        "first-fine-tune-1-gpu",
        "first-fine-tune-8-gpus",
        "compare-three-presets",
        "your-dpo-script",
        "from-other-tools",
    ],
    "how-to": [
        *("choose-a-preset", "your-own-script", "training", "training-methods", "data", "optimizers", "checkpoints"),
        *("faults", "multi-node", "doctor", "simulate", "simulate-stragglers", "rehearsal", "report"),
        *("offline-clusters", "report-a-problem"),
    ],
    "concepts": [
        *("ddp-zero-fsdp2", "parallelism", "numerics", "batch-size-and-learning-rate", "plan", "communication"),
        *("pipeline-schedules", "compare", "security"),
    ],
    "reference": ["cli", "arguments", "presets", "results", "run-folder", "lint", "python"],
    "evidence": ["index", "trust", "plan-accuracy", "simulations", "speed-and-memory", "checkpoints", "peers"],
    "project": ["contributing", "changelog"],
}
TITLES = {"how-to": "How-to"}
COMMENT = re.compile(r"^<!-- .*? -->\n", re.MULTILINE)
BUILT_BLOCK = re.compile(r"^<!-- build: (\w+) -->\n.*?^<!-- /build -->$", re.MULTILINE | re.DOTALL)
NESTED_ITEM = re.compile(r"^  - ", re.MULTILINE)
LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")


def sources() -> dict[str, str]:
    """Return page of the site -> its file in the repository."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    return {path.relative_to(ROOT / "docs").as_posix(): path.relative_to(ROOT).as_posix() for path in pages} | {
        page: file for file, page in PAGE_OF.items()
    }


def site_path(file: str) -> str | None:
    """Return the path on the site of a file of the repository; None for a folder and for what does not exist."""
    if file in PAGE_OF:
        return PAGE_OF[file]
    if file.startswith("docs/"):
        return file.removeprefix("docs/")
    if not (ROOT / file).is_file():
        return None
    copy = f"files/{file}.txt" if file.endswith(".md") or "." not in PurePosixPath(file).name else f"files/{file}"
    with mkdocs_gen_files.open(copy, "wb") as written:
        written.write((ROOT / file).read_bytes())
    return copy


def link_on_site(target: str, file: str, page: str) -> str:
    """Return a link of a repository's file as it reads on its page of the site."""
    path, hash_sign, section = target.partition("#")
    if not path or ":" in path:
        return target
    found = site_path(os.path.normpath(PurePosixPath(file).parent / path))
    return target if found is None else os.path.relpath(found, PurePosixPath(page).parent) + hash_sign + section


def page_text(file: str, page: str) -> str:
    """Return the text of a page: blocks filled in, comments left out, links as the site needs them."""
    text = BUILT_BLOCK.sub(lambda found: BUILT[found[1]](), (ROOT / file).read_text())
    text = NESTED_ITEM.sub("    - ", COMMENT.sub("", text))  # MkDocs needs four spaces, where GitHub needs two
    return LINK.sub(lambda found: link_on_site(found[0], file, page), text)


def title(text: str) -> str:
    """Return the first heading of a page."""
    return next(line.removeprefix("# ").replace("`", "") for line in text.splitlines() if line.startswith("# "))


def navigation(texts: dict[str, str]) -> list[dict[str, object]]:
    """Return MkDocs' nav: the start page, then each section that has pages."""
    nav: list[dict[str, object]] = [{"Start": "index.md"}]
    for section, first in SECTIONS.items():
        order = [f"{section}/{stem}.md" for stem in first]
        pages = sorted((page for page in texts if section_of(page) == section), key=lambda page: rank(page, order))
        listed: list[object] = [page if page.endswith("/index.md") else {title(texts[page]): page} for page in pages]
        if listed:
            nav.append({TITLES.get(section, section.capitalize()): listed})
    return nav


def section_of(page: str) -> str | None:
    """Return a page's section: its folder, or tutorials for a page without one; None for the start page."""
    if page == "index.md":
        return None
    return page.partition("/")[0] if "/" in page else "tutorials"


def rank(page: str, order: list[str]) -> tuple[int, str]:
    return (order.index(page) if page in order else len(order), page)


texts = {page: page_text(file, page) for page, file in sources().items()}
for page, text in texts.items():
    with mkdocs_gen_files.open(page, "w") as written:
        written.write(text)
mkdocs_gen_files.config.nav = navigation(texts)

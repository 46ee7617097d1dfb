"""Pages of the docs site that are generated when it is built, run by its plugin gen-files.

docs/index.md is the home page, to which links to README.md lead. A table of benchmarks/results is shown, folded, at its
`<!-- table: NAME -->`, and a block of README.md at `<!-- as in README: NAME -->`. Links to files of the repository
become links to copies of them; the navigation has every page.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path, PurePosixPath

import mkdocs_gen_files

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from reference_blocks import BLOCK, ON_SITE, folded, with_blocks  # noqa: E402

# Files of the repository's top level -> pages of the site; the home page is docs/index.md.
PAGE_OF = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
}
# Sections of the navigation, each with the pages that come first; the others follow in alphabetical order.
SECTIONS: dict[str, list[str]] = {
    "tutorials": [
        "first-fine-tune",
        "compare-three-presets",
        "your-dpo-script",
        "from-other-tools",
    ],
    "how-to": [],  # in HOW_TO_GROUPS
    "concepts": [
        *("plan", "ddp-zero-fsdp2", "parallelism", "numerics", "compare", "security"),
    ],
    "reference": ["glossary", "cli", "arguments", "presets", "results", "run-folder", "lint", "python"],
    "evidence": ["index", "trust", "plan-accuracy", "simulations", "speed-and-memory", "checkpoints", "peers", "gpu"],
    "agents": ["SKILL"],
    "project": ["contributing", "changelog"],
}
# The how-tos, by what the reader is about to do.
HOW_TO_GROUPS = {
    "Before a run": ["choose-a-preset", "training-methods", "rehearsal", "ci", "simulate"],
    "Train": ["your-own-script", "data", "training", "optimizers", "checkpoints"],
    "Compare": ["tune"],
    "Several nodes": ["multi-node"],
    "When something is wrong": ["my-run-failed", "faults", "doctor"],
}
# Parts of the theme that a page does without: the table of contents, where a table needs its width.
HIDDEN = {
    "index.md": "navigation, toc",
    "planner/index.md": "navigation, toc",
    "reference/presets.md": "toc",
    "reference/results.md": "toc",
}
# What the search thinks of a section's pages: a reference has every word, and explains few. Changes explain nothing.
WEIGHT = {"reference": "boost: 0.3", "project": "boost: 0.3"}
NOT_SEARCHED = {"project/changelog.md": "exclude: true"}
COMMENT = re.compile(r"^<!-- .*? -->\n", re.MULTILINE)
OF_README = re.compile(r"^<!-- as in README: (\w+) -->$", re.MULTILINE)
TABLE = re.compile(r"^<!-- table: (\w+) -->\n\[.*\n", re.MULTILINE)
NESTED_ITEM = re.compile(r"^  - ", re.MULTILINE)
LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")


def sources() -> dict[str, str]:
    """Return page of the site -> its file in the repository."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    return {page: file for file, page in PAGE_OF.items()} | {
        path.relative_to(ROOT / "docs").as_posix(): path.relative_to(ROOT).as_posix() for path in pages
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
    text = TABLE.sub(lambda found: folded(recorded_text(found[1])) + "\n", (ROOT / file).read_text())
    text = OF_README.sub(lambda found: readme_block(found[1]), with_blocks(text, ON_SITE))
    text = NESTED_ITEM.sub("    - ", COMMENT.sub("", text))  # MkDocs needs four spaces, where GitHub needs two
    hidden = HIDDEN.get(page)
    weight = NOT_SEARCHED.get(page, WEIGHT.get(page.split("/")[0]))
    front = [f"hide: [{hidden}]"] if hidden else []
    front += [f"search: {{ {weight} }}"] if weight else []
    text = "\n".join(["---", *front, "---", "", text]) if front else text
    return LINK.sub(lambda found: link_on_site(found[0], file, page), text)


def readme_block(name: str) -> str:
    return next(found[0] for found in BLOCK.finditer((ROOT / "README.md").read_text()) if found[2] == name)


def recorded_text(name: str) -> str:
    return COMMENT.sub("", (ROOT / "benchmarks" / "results" / f"{name}.md").read_text())


def title(text: str) -> str:
    """Return the first heading of a page."""
    return next(line.removeprefix("# ").replace("`", "") for line in text.splitlines() if line.startswith("# "))


def navigation(texts: dict[str, str]) -> list[dict[str, object]]:
    """Return MkDocs' nav: the home page, then each section that has pages; the how-tos in their groups."""
    nav: list[dict[str, object]] = [{"Home": "index.md"}, {"Planner": "planner/index.md"}]
    for section, first in SECTIONS.items():
        order = [f"{section}/{stem}.md" for stem in first]
        pages = sorted((page for page in texts if page.startswith(f"{section}/")), key=lambda page: rank(page, order))
        entries = {page: page if page.endswith("/index.md") else {title(texts[page]): page} for page in pages}
        listed: list[object] = list(entries.values())
        if section == "how-to":
            groups = {name: [f"how-to/{stem}.md" for stem in stems] for name, stems in HOW_TO_GROUPS.items()}
            listed = [{name: [entries.pop(page) for page in grouped]} for name, grouped in groups.items()]
            listed += entries.values()
        if listed:
            nav.append({section.capitalize(): listed})
    return nav


def rank(page: str, order: list[str]) -> tuple[int, str]:
    return (order.index(page) if page in order else len(order), page)


texts = {page: page_text(file, page) for page, file in sources().items()}
for page, text in texts.items():
    with mkdocs_gen_files.open(page, "w") as written:
        written.write(text)
mkdocs_gen_files.config.nav = navigation(texts)

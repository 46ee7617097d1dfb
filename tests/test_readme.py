"""README.md and docs/ agree with the program: commands run, tables are generated, links resolve.

A comment before a ```bash block says how it is tested, with its substitutions. To write the generated blocks again:

    PYTHONPATH=docs/site python tests/test_readme.py

It writes those of the docs too: `build` (docs/site/reference_blocks.py) and `planned` (docs/test_planned_figures.py).
"""

import dataclasses
import doctest
import functools
import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).with_name(name)) for name in ("support", "warm_starts")]  # run as a program
from command_line import parsed, run_command
from launching import ROOT, cpu_environment, nightly, run_bash
from reference_blocks import BLOCK, BUILT, measured_table, with_blocks
from simulated_throughput import throughput_table
from test_examples import examples_table
from test_fits_table import fits_table

from toolkit.job.argument_reading import read_arguments, read_config_file
from toolkit.presets import preset_names
from toolkit.record.folder import read_json

README = ROOT / "README.md"
README_BYTES = 10_000  # everything else is in docs/
RUN_FOLDER = ROOT / "docs" / "reference" / "run-folder.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
UPDATE = "run: PYTHONPATH=docs/site python tests/test_readme.py"
EXAMPLE = "examples/lora_8b.yaml"
OURS = ("accelerate_configs", "ds_configs", "examples")


@dataclasses.dataclass(frozen=True)
class Block:
    """A ```bash block and the comment before it, for example `launch; "20" becomes "2"; a remark`."""

    comment: str
    text: str

    @property
    def kind(self) -> str:
        return self.comment.split(";")[0].strip()

    def substituted(self) -> str:
        text = self.text
        for old, new in re.findall(r'"([^"]+)" becomes "([^"]+)"', self.comment):
            assert old in text, f"nothing to substitute for {old!r} in:\n{text}"
            text = text.replace(old, new)
        return text


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def bash_blocks(page: Path, kind: str | None = None) -> list[Block]:
    """Return a page's blocks, or those of a kind, as `launch`."""
    found = re.findall(r"(?:<!-- test: ([^\n]*) -->\n)?```(?:bash|console|sh)\n(.*?)```", page.read_text(), re.DOTALL)
    return [block for block in (Block(*each) for each in found) if kind in (None, block.kind)]


FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`(toolkit (?:train|compare|rehearse) [^`\n]* -- [^`\n]+)`")


def toolkit_commands() -> list[tuple[str, list[str]]]:
    """Return page and words of each command: those in blocks, and those in a sentence that are complete."""
    found = []
    for page in PAGES:
        text = page.read_text()
        blocks = [block.replace("\\\n", " ") for language, block in FENCE.findall(text) if language != "text"]
        lines = [line for block in blocks for line in block.splitlines() if line.startswith("toolkit ")]
        prose = [line for line in INLINE.findall(FENCE.sub("", text)) if not re.search(r"\.\.\.|…", line)]
        commands = [shlex.split(line, comments=True) for line in lines + prose if "[OPTIONS]" not in line]
        found += [(page_name(page), words) for words in commands]
    return found


# Programs of a script that are forked from the session's server, so that they do not import torch again. The command
# line of accelerate is then not an ancestor's, so the environment names the preset, as under `toolkit train`.
FORKED = """
forked() { python tests/scripts/fork_program.py "$@"; }
toolkit() { forked -m toolkit "$@"; }
accelerate() {
    [ "$1 $2 $4" = "launch --config_file --num_processes" ]
    TOOLKIT_PRESET="$PWD/$3" TOOLKIT_WORLD_SIZE="$5" forked -m accelerate.commands.launch "${@:2}"
}
"""


def run_launching_bash(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script that launches runs, from the fork server.

    `variables` are not exported: libraries may read any variable when they are imported, so the server refuses a run
    that has one which it was started without.
    """
    given = "".join(f"{name}={shlex.quote(value)}\n" for name, value in variables.items())
    ended = run_bash(FORKED + given + script, cpu_environment())
    assert "cold start:" not in ended.stdout + ended.stderr
    return ended


# -- generated blocks


GENERATED = {
    "fits": (README, fits_table),
    "examples": (ROOT / "examples" / "README.md", examples_table),
    "simulated throughput": (ROOT / "benchmarks" / "results" / "simulated_throughput.md", throughput_table),
}


def with_generated(name: str) -> str:
    page, render = GENERATED[name]
    block = re.compile(rf"(<!-- generated: {name} -->\n).*?(\n?<!-- /generated -->)", re.DOTALL)
    text, number = block.subn(lambda found: found[1] + render() + found[2], page.read_text())
    assert number == 1, f"{page.name} has {number} blocks `generated: {name}`"
    return text


@pytest.mark.parametrize("name", [nightly(name)[0] if name == "fits" else name for name in GENERATED])  # 7 s
def test_generated_blocks_are_up_to_date(name: str) -> None:
    assert with_generated(name) == GENERATED[name][0].read_text(), UPDATE


def built_blocks(page: Path) -> list[str]:
    return [name for _, name, _ in BLOCK.findall(page.read_text())]


@pytest.mark.parametrize("page", [page for page in PAGES if built_blocks(page)], ids=page_name)
def test_a_pages_built_blocks_are_up_to_date(page: Path) -> None:
    assert with_blocks(page.read_text(), BUILT) == page.read_text(), UPDATE


def test_every_built_block_is_on_one_page() -> None:
    assert sorted(name for page in PAGES for name in built_blocks(page)) == sorted(BUILT)


def test_the_readme_is_short_and_names_every_preset() -> None:
    text = README.read_text()
    assert len(text.encode()) <= README_BYTES
    assert [name for name in preset_names() if f"`{name}`" not in text] == []


# -- commands


def test_the_variables_of_a_tutorial_are_the_demos_model_and_data(real_model: Path, faq_alpaca: Path) -> None:
    block = bash_blocks(ROOT / "docs" / "tutorials" / "compare-three-presets.md")[0]
    shown = run_bash(block.text + 'echo "$model"; echo "$data"', cpu_environment())
    assert (shown.returncode, shown.stdout.split()) == (0, [str(real_model), str(faq_alpaca)])


def test_our_own_configuration_files_have_no_findings(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, _ = run_command(["lint", *(str(ROOT / each) for each in OURS)], capsys)
    assert (code, shown) == (0, "")


def test_every_toolkit_command_of_a_page_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # the example's path is relative to it
    commands = toolkit_commands()
    assert {words[1] for _, words in commands} >= {"train", "compare", "rehearse", "report"}
    for page, (_, name, *words) in commands:
        options, _, training = f" {shlex.join(words)}".partition(" -- ")
        context = parsed([name, *shlex.split(options)])
        presets = context.params.get("preset") or []
        named = {name for name in ([presets] if isinstance(presets, str) else presets) if not name.endswith(".yaml")}
        assert named - {"auto"} <= set(preset_names())
        file, _, flags = training.partition(" ")
        if context.params.get("script") or context.params.get("module"):
            continue  # what follows is another program's
        if file.endswith(".yaml") and not Path(file).exists():  # an earlier command of the page writes it
            read_arguments(shlex.split(flags))
        elif training:
            is_named = name == "tune" and context.params["training_arguments"]  # a model before `--`
            assert is_named or "model_name_or_path" in read_arguments(shlex.split(training)), (page, training)


@pytest.mark.parametrize("page", [page for page in PAGES if ">>> " in page.read_text()], ids=page_name)
def test_every_python_example_of_a_page_runs(page: Path) -> None:
    lines = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    examples = doctest.DocTestParser().get_doctest(lines, {}, page.name, str(page), 0)
    assert len(examples.examples) == page.read_text().count(">>> ")
    assert doctest.DocTestRunner().run(examples).failed == 0


@pytest.mark.launch
@pytest.mark.parametrize("block", bash_blocks(README, "launch"), ids=lambda block: block.text.split()[0])
def test_a_launched_command_writes_the_run_folder_that_the_page_describes(
    block: Block, tiny_model: Path, faq_alpaca: Path, tmp_path: Path
) -> None:
    ended = run_launching_bash(block.substituted(), model=str(tiny_model), data=str(faq_alpaca), FOLDER=str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    (folder,) = tmp_path.iterdir()
    run = read_json(folder / "run.json") or {}
    assert (run["status"], run["measured"]["steps"]) == ("completed", 2)
    assert files_of_every_run() <= {path.name for path in folder.iterdir()}
    page = RUN_FOLDER.read_text() + measured_table()
    missing = sorted(key for key in keys_of(folder) if f"`{key}`" not in page)
    assert not missing, f"docs/reference/run-folder.md does not name {missing}"


def files_of_every_run() -> set[str]:
    rows = re.findall(r"^\| `([\w.]+)` \| (.*) \|$", RUN_FOLDER.read_text().split("## run.json")[0], re.MULTILINE)
    return {name for name, text in rows if not text.startswith("Only if")}


def keys_of(folder: Path) -> Iterator[str]:
    run, attested = read_json(folder / "run.json") or {}, read_json(folder / "attestation.json") or {}
    row = json.loads((folder / "ranks" / "rank0.jsonl").read_text().splitlines()[0])
    for mapping in (run, run["data"], run["measured"], run["spec"], attested, attested["ranks"][0], row):
        yield from mapping


# -- links, example


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_relative_link_resolves(page: Path) -> None:
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", page.read_text()) if "://" not in target]
    for target in targets:
        path, _, section = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not section or linked.suffix != ".md" or section in anchors(linked), f"{page.name} links to {target}"


@functools.cache
def anchors(page: Path) -> set[str]:
    """Return the ids of a page's headings and of its HTML."""
    text = page.read_text()
    headings = [heading_id(line) for line in FENCE.sub("", text).splitlines() if line.startswith("#")]
    again = {f"{each}_{headings.count(each) - 1}" for each in headings if headings.count(each) > 1}
    return {*headings, *again, *re.findall(r'id="([^"]+)"', text)}


def heading_id(line: str) -> str:
    return re.sub(r"[^\w -]", "", line.lstrip("#").strip().lower()).replace(" ", "-")


def test_the_readme_has_the_attribution_of_the_data_and_uses_the_example_configuration() -> None:
    from toolkit.demo.assets import DATA_ATTRIBUTION

    assert DATA_ATTRIBUTION in README.read_text()
    assert "lora_r" in read_config_file(ROOT / EXAMPLE)
    assert any(EXAMPLE in words for page, words in toolkit_commands() if page == "README.md")


if __name__ == "__main__":
    for generated, (path, _) in GENERATED.items():
        path.write_text(with_generated(generated))
    for path in PAGES:
        path.write_text(with_blocks(path.read_text(), BUILT))
    runpy.run_path(str(ROOT / "tests" / "docs" / "test_planned_figures.py"), run_name="__main__")

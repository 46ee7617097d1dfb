"""Files that a configuration or a command names, and the Python files that may read its settings.

>>> declares("class Mine:\\n    warmup_ratio: float = 0.1\\n", "warmup_ratio"), declares("", "warmup_ratio")
(True, False)
"""

import codecs
import contextlib
import fnmatch
import functools
import itertools
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.convert.job_script import DEFAULT, SCRIPT_SUFFIXES
from toolkit.convert.programs import A_SCRIPT
from toolkit.files.documents import read_table
from toolkit.files.paths import is_file
from toolkit.presets.removed_keys import IMPORTS_REMOVED
from toolkit.versions import version_numbers

MAX_PATH_LENGTH = 1024
MAX_LEVELS = 12
MAX_SOURCES, MAX_SOURCE_BYTES, MAX_REQUIREMENTS_BYTES = 1000, 200_000, 2_000_000
_PARSER = re.compile(r"\b(?:HfArgument|H4Argument|Argument|Trl)Parser[\[()]|\bty(?:per|ro)\.|\bfire\.Fire\(|@click\.")
_TRAINER = re.compile(
    r"\bTrainingArguments\b|\b(?:transformers|trl)\.\w*Trainer\b"
    r"|\bfrom (?:transformers|trl)[\w.]* import (?:\([^)]*|[^\n]*)Trainer\b"
)


LINT_TABLES: Mapping[str, Any] = read_table(__file__, "tables")  # names and versions that the rules know
_REQUIREMENTS, _INSTRUCTIONS = LINT_TABLES["requirements"], LINT_TABLES["instructions"]
_NEEDS, _OWN_COPIES = LINT_TABLES["needs"], LINT_TABLES["own_copies"]
# A script that serves a model, and trains none, installs what the server needs.
_SERVES = re.compile(
    r"^(?!\s*#).*\b(?:vllm serve|vllm\.entrypoints|sglang\.launch_server|lmdeploy serve)\b", re.MULTILINE
)
_TRAINS = re.compile(r"\b(?:torchrun|(?:accelerate|deepspeed|trl|swift|axolotl|llamafactory-cli) [\w-])|\.py\b")
REQUIREMENT_LEVELS = 3  # of folders below a project's root: `azure/environments/`, `docker/gpu/`
# Names of files that decide what a finding is.
JUDGED_BY = (*_REQUIREMENTS, *_INSTRUCTIONS, "*.py", "*.md")
_LOOKED_FOR = re.compile("|".join(map(fnmatch.translate, JUDGED_BY)))
_BOUND = re.compile(r"(==|~=|<=|<|\^|(?<![<>=!~^\w.])=?)v?(\d+(?:\.\d+)*)")
_FROM = re.compile(r"(==|~=|>=|>|\^|(?<![<>=!~^\w.])=?)v?(\d+(?:\.\d+)*)")
_SPECIFIER = r"(?![\w-])(?:\[[\w, -]*\])?[ ]*"
_SPECIFIER += r"(?:=[ ]*(?:\{[ ]*version[ ]*=[ ]*)?[\"']|\([ ]*(?=[<>=~!])|@[ ]*git\+\S*@|\"\nversion = \")?"
_SPECIFIER += r"([0-9a-f]{7,40}\b|[ <>=~!^,.*\dv]*+)(?!\+(?!\w))"
OF_OTHERS = re.compile("^.*[({].*$", re.MULTILINE)  # what other packages ask for, in a file of locked versions
_MARKS = (".git", "setup.py", "pyproject.toml", "requirements.txt")
_COPIED = (".gitignore", "LICENSE")  # of a project without its history
# A folder by a variable, or a command, that is not one of a run's own files.
_FOLDER = re.compile(
    r"^(?:\$\{?(?!HOME\b|\w*(?i:out|save|ckpt|checkpoint|model|data|run|exp|tmp))\w+\}?|\$\([^()]*\))/"
)
_TYPES = "Optional|Union|Literal|Annotated|Any|str|int|float|bool|[Ll]ist|[Dd]ict"


def plain_path(named: str) -> str:
    """Return a path without the variable, or the command, that gives its folder, and of a variable its default.

    >>> plain_path("${ROOT}/ds.json"), plain_path("$(dirname $0)/ds.json"), plain_path("${1:-ds.json}")
    ('ds.json', 'ds.json', 'ds.json')
    """
    default = DEFAULT.fullmatch(named)
    return _FOLDER.sub("", default[1] if default else named)


def find_named(named: str, path: str) -> Path | None:
    """Return the file that a configuration names: from the working directory, as the libraries resolve it, or else from
    the configuration's folder or one around it, where its author may start the program."""
    named = plain_path(named[: MAX_PATH_LENGTH + 1])
    if not named or len(named) > MAX_PATH_LENGTH or "\0" in named or "$" in named:
        return None
    folder = Path(path).parent
    around = [Path(os.path.normpath(folder / ("../" * levels))) for levels in range(_depth(path))]
    changed = (each / named for each in changed_folders(path))
    candidates = [*changed, Path(named), *(each / named for each in around), folder / Path(named).name]
    file = next(filter(is_file, candidates), None)
    return None if file is None else Path(os.path.normpath(file))  # one name for a file that several name


def _depth(path: str) -> int:
    """Return how many folders around a file may be its project's."""
    return len([*_project(Path(path).absolute().parent)])


@functools.lru_cache(maxsize=64)
def changed_folders(path: str) -> list[Path]:
    """Return where a script is behind the one relative `cd` that it has: for each folder in which it may start."""
    text = texts_of([Path(path)]) if path.endswith(SCRIPT_SUFFIXES) else ""
    named = {*re.findall(r"^[ \t]*(?:cd|pushd)[ \t]+[\"']?([^\s\"';&|]+)", text, re.MULTILINE)}
    is_one = len(named) == 1 and re.fullmatch(r"\w[\w./-]*|\./[\w./-]+", *named)
    starts = (Path(), *(Path(path).parent / ("../" * levels) for levels in range(_depth(path)))) if is_one else ()
    places = (Path(os.path.normpath(start / name)) for start in starts for name in named)
    return [each for each in dict.fromkeys(places) if each.is_dir()]


# -- Python files


def source_of(script: str, path: str) -> tuple[str, str]:
    """Return the text of a script, and that of the Python files beside it; empty where it is not here."""
    name = plain_path(script)
    name = name if name.endswith(".py") else f"{name.replace('.', '/')}.py"
    parts, files = Path(name).parts, project_files(Path(path).absolute().parent)
    tails = ["/".join(parts[start:]) for start in range(max(1, len(parts) - 1))]  # the path may be another machine's
    in_project = (each for tail in tails for each in files if str(each).endswith(f"/{tail}"))
    file = find_named(name, path) or next(in_project, None) if script else None
    beside = sorted(file.parent.glob("*.py")) if file else []
    return texts_of([file] if file else []), texts_of([each for each in beside if each != file])


@functools.lru_cache(maxsize=64)
def scripts_named(script: str, path: str) -> list[tuple[str, str]]:
    """Return the text of each script of a name that a project has, and that of the modules that it imports."""
    name, folder = plain_path(script), Path(path).absolute().parent
    named = find_named(name, path) if name.endswith(".py") else None
    files = [*filter(None, [named]), *(each for each in project_files(folder) if each.name == Path(name).name)]
    found = []
    for file in dict.fromkeys(each.resolve() for each in files):
        text = texts_of([file])
        stems = re.findall(r"^\s*(?:from|import)\s+[\w.]*?(\w+)\b(?![.\w])", text, re.MULTILINE)
        beside = [each for each in sorted(file.parent.glob("*.py")) if each.stem in stems]
        found.append((text, f"{imported_source(text, folder)}\n{texts_of(beside)}"))
    return found


@functools.lru_cache(maxsize=16)
def scripts_with(word: str, folder: Path) -> list[tuple[str, str]]:
    """Return the same of each script of a project whose text has a word."""
    files = (str(each) for each in project_files(folder) if word in texts_of([each]))
    return [each for file in files for each in scripts_named(file, file) if word in each[0]]


def project_files(folder: Path) -> tuple[Path, ...]:
    """Return the Python files of the project that a folder is in: the nearest folder with the marks of one."""
    root = project_root(folder)
    return () if root is None else _python_files(root)


@functools.lru_cache(maxsize=64)
def project_root(folder: Path) -> Path | None:
    """Return the nearest folder with the marks of a project, or without one what may be a copy of it; None for a file
    that stands alone. No file of a user is read by this toolkit's own modules."""
    places = ((each, marks) for marks in (_MARKS, _COPIED) for each in _around(folder))
    root = next((each for each, marks in places if _has_one(each, marks)), None)
    return None if root == Path(__file__).parents[2] else root


def _has_one(folder: Path, marks: Sequence[str]) -> bool:
    return any((folder / mark).exists() for mark in marks)


@functools.lru_cache(maxsize=16)
def _python_files(root: Path) -> tuple[Path, ...]:
    files: list[Path] = []
    for place, folders, names in itertools.islice(os.walk(root), MAX_SOURCES):
        folders[:] = [name for name in sorted(folders) if not name.startswith(".") and name != "site-packages"]
        files += [Path(place, name) for name in names if name.endswith(".py")]
    return tuple(files)


def _around(folder: Path) -> list[Path]:
    of_nobody = (Path(folder.anchor), Path.home(), Path(tempfile.gettempdir()))
    return [each for each in (folder, *folder.parents)[:MAX_LEVELS] if each not in of_nobody]


@functools.lru_cache(maxsize=256)
def _requirements(folder: Path) -> tuple[str, str, str]:
    """Return what a folder's requirements.txt asks for, what its other files do, and what those of its parts do."""
    files, first = _project_files(folder, _REQUIREMENTS, levels=REQUIREMENT_LEVELS), folder / "requirements.txt"
    told = _project_files(folder, _INSTRUCTIONS)
    written = {each: texts_of([each], max_bytes=MAX_REQUIREMENTS_BYTES) for each in told}
    told = [each for each, text in written.items() if not _SERVES.search(text) or _TRAINS.search(text)]
    near = {folder, folder / "requirements"}

    def text_of(which: Callable[[Path], bool]) -> str:
        texts = ((each, texts_of([each], max_bytes=MAX_REQUIREMENTS_BYTES)) for each in filter(which, files))
        text = "\n".join(OF_OTHERS.sub("", text) if file.suffix == ".lock" else text for file, text in texts)
        instructions = texts_of([*filter(which, told)], max_bytes=MAX_REQUIREMENTS_BYTES)
        return re.sub(r"^[ \t]*#.*$", "", text, flags=re.MULTILINE) + "\n" + installing(instructions)

    others = text_of(lambda file: file != first and file.parent in near)
    return text_of(lambda file: file == first), others, text_of(lambda file: file.parent not in near)


def installing(text: str) -> str:
    """Return the lines of a text that install something."""
    return "\n".join(re.findall(r"^.*(?:\binstall|==|\bclone\b).*$", text, re.MULTILINE))


def _project_files(folder: Path, patterns: Sequence[str], *, levels: int = 1) -> list[Path]:
    """Return the files of a folder by pattern, and those of a project's parts, which may have their own."""
    places = _folders_below(folder, levels if _has_one(folder, _MARKS) else 0)
    return [
        place / name
        for pattern in patterns
        for place in places
        for name in _names(place)
        if fnmatch.fnmatch(name, pattern)
        or (place.name == "requirements" and fnmatch.fnmatch(f"requirements/{name}", pattern))
    ]


@functools.lru_cache(maxsize=256)
def _folders_below(folder: Path, levels: int) -> list[Path]:
    """Return a folder and those in it down to a depth, the upper ones first."""
    found, last = [folder], [folder]
    for _ in range(levels):
        # `os.walk` passes over a folder that may not be read.
        inner = (place / name for place in last for name in sorted(next(os.walk(place), ("", [], []))[1]))
        visible = (each for each in inner if each.name[:1] != ".")
        last = list(itertools.islice(visible, MAX_SOURCES))
        found += last
    return found


@functools.lru_cache(maxsize=4096)
def _names(folder: Path) -> list[str]:
    """Return the names in a folder that a pattern may fit: pathlib would read all names again for each pattern."""
    try:
        names = os.listdir(folder)  # noqa: PTH208  (names alone, not paths)
        within = "requirements/" if folder.name == "requirements" else ""
        return sorted(each for each in names if _LOOKED_FOR.match(each) or _LOOKED_FOR.match(within + each))
    except OSError:
        return []


@functools.lru_cache(maxsize=256)
def pinned_below(folder: Path, library: str, version: str, script: str = "") -> str | None:
    """Return what the nearest requirements of a project say of a library, where they exclude a version and later ones:
    those that a script installs itself, or those in the folders around it, of which an exact version ends the search.

    A range of versions that begins below it excludes nothing; a commit, of some version, counts as an older one. What
    excludes a library that it needs excludes it too, and so does code that imports what the version has no longer.
    """
    needs = {"(?:py)?torch" if library == "torch" else library: version}
    for first, others in _NEEDS.get(library, {}).items():
        needs |= others if version_numbers(version) >= version_numbers(first) else {}
    for name, least in needs.items():
        limit = _three(least)
        for found in (_asked(script, name), *_asked_by_files(folder, name)):
            is_exact = False
            for named, asked in found:
                is_commit = re.fullmatch("[0-9a-f]{7,40}", asked)
                for sign, number in [("==", "0")] if is_commit else _BOUND.findall(asked.replace(" ", "")):
                    if _three(number) < limit or (sign == "<" and _three(number) == limit):
                        told = asked.strip(" ,.")
                        is_condas = re.fullmatch(r"=\d[\d.]*=?", told)  # `=4.50.3=py_0`
                        return f"{named} {'=' + told.rstrip('=') if is_condas else told}"
                    is_exact |= sign == "=="
            if is_exact:
                break
    for name, least in needs.items():
        for dropped_in, names in IMPORTS_REMOVED.get(name, {}).items():
            if version_numbers(dropped_in) <= version_numbers(least) and (lost := _imported(folder, name, names)):
                return f"{name} below {dropped_in}, by its import of {lost}"
    return None


@functools.lru_cache(maxsize=256)
def asks_from(folder: Path, library: str, version: str) -> bool:
    """Return True where the requirements of a project ask for a version of a library, or a later one."""
    asked = _asked_around(folder, library)
    found = (number for each in asked for _, number in _FROM.findall(each.replace(" ", "")))
    return any(_three(number) >= _three(version) for number in found)


@functools.lru_cache(maxsize=256)
def installs(folder: Path, library: str) -> bool:
    """Return True where the requirements of a project name a library: without a version they install the newest."""
    return any(True for _ in _asked_around(folder, library))


def _asked_around(folder: Path, library: str) -> Iterator[str]:
    """Yield what the requirements of a project say of a library."""
    return (asked for place in _project(folder) for _, asked in _asked("\n".join(_requirements(place)), library))


def _asked_by_files(folder: Path, library: str) -> Iterator[list[tuple[str, str]]]:
    """Yield what each folder's requirements.txt says of a library, and its other files: a part of a project, with
    requirements of its own, speaks for the rest where nothing around it names the library."""
    for place in _project(folder):
        first, others, parts = (_asked(text, library) for text in _requirements(place))
        yield first
        yield others if first + others else parts


@functools.lru_cache(maxsize=512)
def _asked(requirements: str, library: str) -> list[tuple[str, str]]:
    """Return what requirements say of a library: its name there, and the versions or the commit."""
    spelt = re.sub(r"-(?!\w*])", "[-_.]", library).replace("llamaf", "llama-?f")
    found = re.findall(rf"(?<![\w./-])({spelt}){_SPECIFIER}", requirements, re.IGNORECASE)
    from_tag = rf"github\.com/[\w-]+/({spelt})(?:\.git)?@(?:v(?=\d))?([\d.]+\b|[0-9a-f]{{7,40}}\b)"
    found += re.findall(from_tag, requirements, re.IGNORECASE)
    cloned = rf"clone[^\n]* (?:-b|--branch)[ =]v?(\d[\d.]*)[^\n]*/({spelt})(?:\.git)?(?![\w-])"
    return found + [(name, number) for number, name in re.findall(cloned, requirements, re.IGNORECASE)]


def _three(version: str) -> tuple[int, ...]:
    return (*version_numbers(version), 0, 0)[:3]


def _project(folder: Path) -> Iterator[Path]:
    """Yield a folder and those around it, up to the project's root."""
    for place in _around(folder):
        yield place
        if (place / ".git").exists():
            return


def _imported(folder: Path, library: str, names: Sequence[str]) -> str | None:
    """Return the first of some names of a library that a project's modules import, outside of `try` and functions."""
    source = project_source(folder)
    for name in names:
        begin = re.escape(name) if "." in name else rf"{library}(?:\.[\w.]+)?[ ]+import[ ]+(?:\([^)]*|[^\n]*)\b{name}"
        if name in source and occurs(re.compile(rf"^(?:from|import)[ ]+{begin}\b", re.MULTILINE), source):
            return name
    return None


@functools.lru_cache(maxsize=8)
def files_by_name(root: Path) -> dict[str, list[Path]]:
    """Return the files of a project by their names."""
    found: dict[str, list[Path]] = {}
    for place, folders, names in os.walk(root):
        folders[:] = [each for each in folders if each[:1] != "." and each != "node_modules"]
        for name in (each for each in names if each.endswith((".py", ".json", ".yaml", ".yml"))):
            found.setdefault(name, []).append(Path(place, name))
    return found


def forget_projects() -> None:
    """Drop what is known of projects' files, which may have changed since in a process that lives long."""
    for each in [*globals().values()]:
        if getattr(each, "__module__", None) == __name__ and hasattr(each, "cache_clear"):
            each.cache_clear()


@functools.lru_cache(maxsize=64)
def project_source(folder: Path, *parts: str) -> str:
    """Return the text of the Python files of a project, or of those with one of some parts in their path."""
    files = project_files(folder)
    return _source_of(tuple(each for each in files if not parts or any(part in str(each) for part in parts)))


@functools.lru_cache(maxsize=32)
def _source_of(files: tuple[Path, ...]) -> str:
    """The text of files: one object for all folders of a project, whose searches `occurs` remembers."""
    return texts_of(files)


@functools.lru_cache(maxsize=4096)
def occurs(pattern: re.Pattern[str], text: str) -> bool:
    """Return True where a pattern is found in a text; in the sources of a project a search takes long."""
    return pattern.search(text) is not None


@functools.lru_cache(maxsize=256)
def has_own_loop(folder: Path) -> bool:
    """Return True where the Python files nearest to a folder train with accelerate or DeepSpeed, without a Trainer."""
    files = project_files(folder)
    for place in (folder, *folder.parents)[:MAX_LEVELS] if files else ():
        found = {_trains_with(each) for each in files if str(each).startswith(f"{place}/")}
        if found & {True, False}:
            return True not in found
    return False


@functools.lru_cache(maxsize=4096)
def _trains_with(file: Path) -> bool | None:
    """Return True for a file that trains with a Trainer, False for one with a loop of its own, None for another."""
    source = texts_of([file])
    if "TrainingArguments" in source or ("Trainer" in source and _TRAINER.search(source)):
        return True
    return False if "Accelerator(" in source or "deepspeed.initialize(" in source else None


@functools.lru_cache(maxsize=256)
def has_own_copy(folder: Path, library: str) -> bool:
    """Return True where a project has a library's own modules, of whatever version."""
    mark = re.compile(f"/{_OWN_COPIES.get(library, library)}")
    top = next((each for each in _project(folder) if (each / ".git").exists()), None)  # of the projects around it
    files = _python_files(top) if top else project_files(folder)
    return library in _OWN_COPIES and any(mark.search(str(each)) for each in files)


@functools.lru_cache(maxsize=256)
def names_program(folder: Path, *names: str) -> bool:
    """Return True where a file of a project, or one in the folders around it, has one of a program's names."""
    for place in _project(folder):
        files = list(dict.fromkeys(_project_files(place, JUDGED_BY)))  # a README fits two of the patterns
        if any(name in text for name in names for text in (place.name, texts_of(files))):
            return True
    return any(name in project_source(folder) for name in names)


@functools.lru_cache(maxsize=128)
def imported_source(source: str, folder: Path) -> str:
    """Return the text of the modules of a project that a script imports, and that may have its dataclasses."""
    modules = re.findall(r"^\s*(?:from|import)\s+\.*([\w.]+)", source, re.MULTILINE)
    names = tuple(f"/{module.replace('.', '/')}.py" for module in set(modules))
    return texts_of([each for each in project_files(folder) if str(each).endswith(names)])


def texts_of(files: Sequence[Path], *, max_bytes: int = MAX_SOURCE_BYTES) -> str:
    """Return the text of files, each up to a size; of one that cannot be read, nothing."""
    texts = []
    for file in files[:MAX_SOURCES]:
        with contextlib.suppress(OSError):
            data = file.read_bytes()[:max_bytes]
            is_wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # as PowerShell writes files
            texts.append(data.decode("utf-16" if is_wide else "utf-8", errors="replace"))
    return "\n".join(texts)


def reader_in(own: str, imported: str, beside: str, *, is_trainer: bool) -> str | None:
    """Return who reads a script's arguments, as its source, its modules', or those beside it say; None for nothing."""
    source = next((each for each in (own, imported, beside) if _PARSER.search(each)), "")
    if source != own and not imported and _TRAINER.search(own):
        return A_SCRIPT  # which trains, and reads none of the words
    if "H4ArgumentParser" in source:  # which drops words behind a file that its dataclasses do not have
        return A_SCRIPT
    if re.search(r"\b(?:HfArgument|Trl)Parser(?=[\[()])", source):  # imported alone, it reads nothing
        takes_others = re.search(r"return_remaining_strings|parse_known_args", source)
        of_trl = re.search(r"Parser\([^)]*\b(?:SFT|DPO|KTO|GRPO|RLOO)Config\b", source)
        is_plain = is_trainer and (of_trl or "TrainingArguments" in source)
        return None if takes_others or not is_plain else "trl" if of_trl else "transformers"
    return A_SCRIPT if source else None


def declares(source: str, name: str) -> bool:
    """Return True where a source has a field of a dataclass, or an option of a parser, of that name, or pops it."""
    field, option = re.escape(name), re.escape(name).replace("_", "[-_]")
    pattern = rf"[\"']--{option}[\"']|\.pop\([\"']{field}[\"']|^[ \t]+{field}[ \t]*:[ \t]*(?:\w+\.)?(?:{_TYPES})\b"
    is_there = name in source or name.replace("_", "-") in source
    return is_there and occurs(re.compile(pattern, re.MULTILINE), source)


def parses_own(source: str, name: str) -> bool:
    """Return True where a parser gets a class of the source that has a field of that name.

    >>> own = "class Mine:\\n    seed: int = 1\\n    warmup_ratio: float = 0.1\\nTrlParser([Mine])\\n"
    >>> parses_own(own, "warmup_ratio"), parses_own(own, "epochs")
    (True, False)
    """
    return name in _parsed_fields(source)


@functools.lru_cache(maxsize=64)
def _parsed_fields(source: str) -> frozenset[str]:
    """Return the fields of the classes of a source that a parser gets."""
    parsed = set(re.findall(r"\w+", " ".join(re.findall(r"Parser\(([^)]*)", source))))
    bodies = re.findall(r"^class (\w+)\b[^\n]*:\n((?:(?:[ \t][^\n]*)?\n)*)", source, re.MULTILINE)
    field = re.compile(rf"^[ \t]+(\w+)[ \t]*:[ \t]*(?:\w+\.)?(?:{_TYPES})\b", re.MULTILINE)
    return frozenset(each for name, body in bodies if name in parsed for each in field.findall(body))

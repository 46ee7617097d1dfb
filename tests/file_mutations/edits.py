"""Edits of a parsed document (JSON or YAML), of raw bytes, and of a pickle's opcodes, as Hypothesis strategies.

`edited({"stage": 2})` makes documents with one to three edits; `json_text` and `yaml_text` write them, with texts in
some places that no dumper would write: 100,000 brackets, an integer of 5,000 digits, an alias bomb.
"""

import copy
import io
import itertools
import json
import pickletools
import struct
import zipfile
from collections import deque
from functools import lru_cache
from typing import Any

import yaml
from hypothesis import strategies as st

_BOMB = ", ".join(f"&{new} [{f'*{old},' * 9}]" for old, new in zip("abcdefg", "bcdefgh", strict=True))
_RAW_TEXTS = (
    *("[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000, "[" * 45 + "]" * 45, "[" * 500),
    *("9" * 5_000, "1e999", "-1E+400"),
)
_RAW_YAML = (
    *(f"[&a [{'x,' * 9}], {_BOMB}]", "&r [*r, 1]", "&m {a: *m}", "*nothing", "{<<: [1, 2]}", "0o17", "\tx"),
    *("!!python/object/apply:os.mkdir [executed]", "!!python/name:os.system", "!!binary R0lGODlh", "!!set {a, b}"),
    *("!!pairs [a: 1, a: 2]", "!!int ''", "2026-02-30", "2001-12-14t21:59:43.10-05:00", "190:20:30"),
    "{? [a] : 1, ? {c: d} : 2}",
)
# Stand-in in a document -> the text that replaces it where the document is written.
_TEXT_OF = {f"RAW_{number}_": text for number, text in enumerate((*_RAW_TEXTS, *_RAW_YAML))}
_OF_JSON = list(_TEXT_OF)[: len(_RAW_TEXTS)]
NUMBERS = (0, -1, 1, 3, 2**31, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"))
TEXTS = (
    *("", " ", "0", "-1", "nan", "1e999", "true", "auto", "none", "nvme", "bfloat16", "ddp", "\0", "\x1b[31m", "\n"),
    *("a\nb: c", "\t", "é", "日本語", "\u202e", "\ufeff", "\ud800", "\x85", "x" * 300, "x" * 5_000, "é" * 200),
    *("<script>alert(1)</script>", "{{ 7 * 7 }}", "%s%n", "$(id)", "[bold]", ".", "..", "/", "-h", "../escaped"),
    *("/dev/zero", "/dev/full", "/proc/self/mem", "~/escaped", "~nobody-here/x"),
)
SHAPES: tuple[Any, ...] = (
    *([], {}, [[]], [None], {"": None}, {"a": {"b": []}}, ["a", "b"], [1, "a", None], [1.5, True]),
    *(list(range(2_000)), {str(number): number for number in range(2_000)}, ["x" * 1_000] * 50),
)
VALUES = st.one_of(
    *map(st.sampled_from, ([None, True, False], NUMBERS, TEXTS, SHAPES, _OF_JSON)),
    *(st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=20)),
)
YAML_VALUES = st.one_of(VALUES, st.sampled_from(list(_TEXT_OF)))
KEYS = st.one_of(st.sampled_from((*TEXTS, "__proto__", "<<", "__class__", "=", "?")), st.text(max_size=8))


def json_text(document: Any, *, indent: int | None = 1) -> str:
    return _with_raw_texts(json.dumps(document, default=str, indent=indent))


def yaml_text(document: Any) -> str:
    return _with_raw_texts(yaml.safe_dump(json.loads(json.dumps(document, default=str)), sort_keys=False))


def _with_raw_texts(text: str) -> str:
    for name, raw in _TEXT_OF.items():
        text = text.replace(f'"{name}"', raw).replace(name, raw)
    return text


@st.composite
def edited(draw: st.DrawFn, document: Any, *, values: st.SearchStrategy[Any] = VALUES) -> Any:
    document = [copy.deepcopy(document)]
    for _ in range(draw(st.integers(1, 3))):
        if not (places := _places(document)):
            return None
        around, key = draw(st.sampled_from(places))
        match draw(st.sampled_from(["change", "copy", "duplicate", "remove", "rename", "replace"])):
            case "change":
                around[key] = draw(st.sampled_from(_near(around[key])))
            case "copy":
                other, place = draw(st.sampled_from(places))
                around[key] = copy.deepcopy(other[place])
            case "duplicate" if isinstance(around, list):
                around.insert(key, copy.deepcopy(around[key]))
            case "remove":
                del around[key]
            case "rename" if isinstance(around, dict):
                around[draw(st.one_of(KEYS, st.just(str(key)[:-1])))] = around.pop(key)
            case _:
                around[key] = copy.deepcopy(draw(values))
    return document[0] if document else None


def _near(value: Any) -> list[Any]:
    """Values near a present one: another number, the same as text, a longer or shorter text, a list of it."""
    near: list[Any] = [[value], [value, value], {"a": value}, {str(value)[:40]: value}, str(value)[:200]]
    match value:
        case bool():
            near += [not value, int(value)]
        case int() | float():
            near += [-value, value + 1, value - 1, value * 2, float(value), value * 2**40]
        case str():
            near += [value.upper(), f"{value}x", value[:-1], value * 2, f"{value}\n", f" {value}"]
        case list():
            near += [value[:1], value * 2, value[::-1], dict(enumerate(map(str, value[:50])))]
        case dict():
            near += [list(value), list(value.values()), dict(list(value.items())[:1])]
    return near


def _places(document: Any) -> list[tuple[Any, Any]]:
    """Return collection and key of every value below the document, the first 3,000 of them level by level."""
    places: list[tuple[Any, Any]] = []
    pending = deque([document])
    while pending and len(places) < 3_000:
        around = pending.popleft()
        for key, value in around.items() if isinstance(around, dict) else enumerate(around):
            places.append((around, key))
            if isinstance(value, dict | list):
                pending.append(value)
    return places


# -- Bytes

SNIPPETS = (
    *(b"\0", b"\0" * 600, b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\r\n", b"\n\n", b"\t", b"{", b"}", b"[", b"]"),
    *(b",", b":", b'"', b"'", b"\\u", b"#", b"- ", b"&a ", b"*a ", b"!!", b"{{", b"{%", b"---\n", b"NaN", b"1e999"),
    *(b"9" * 5_000, b"x" * 70_000, b"[" * 100_000, b"- " * 3_000, b"PK\x03\x04", b"\x80\x02", b"cos\nsystem\n"),
)
WHOLE_FILES = (
    *(b"", b"\0" * 4_096, b" " * 10_000, b"null", b"[]", b"{}", b'""', b"0", b"---\n---\n"),
    *(b"PK\x05\x06" + b"\0" * 18, b"\x80\x04N."),
)


@st.composite
def edited_bytes(draw: st.DrawFn, content: bytes, *, others: tuple[bytes, ...] = ()) -> bytes:
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(content)))
        end = min(len(content), at + draw(st.sampled_from([1, 2, 8, 64, 1_000])))
        kinds = ["cut", "flip", "insert", "delete", "repeat", "whole", "encode", "splice", "random"]
        match draw(st.sampled_from(kinds)):
            case "cut":
                middle, end = b"", len(content)
            case "flip":
                end, mask = min(len(content), at + 1), draw(st.sampled_from([1, 0x20, 0x80, 0xFF]))
                middle = bytes(byte ^ mask for byte in content[at:end])
            case "insert":
                middle, end = draw(st.sampled_from(SNIPPETS)), at
            case "delete":
                middle = b""
            case "repeat":
                middle = content[at:end] * draw(st.sampled_from([2, 50]))
            case "splice":
                other = draw(st.sampled_from([*others, content]))
                middle, end = other[draw(st.integers(0, len(other))) :], len(content)
            case "random":
                middle = draw(st.binary(max_size=16))
            case "encode":
                text = content.decode("utf-8", "replace") if len(content) < 2**20 else ""
                encoded = [text.encode("utf-16"), text.encode("cp500", "replace"), b"\xef\xbb\xbf" + content]
                encoded += [content.replace(b"\n", b"\r\n"), content[::-1], content * 2]
                at, middle, end = 0, draw(st.sampled_from(encoded)), len(content)
            case _:
                at, middle, end = 0, draw(st.sampled_from(WHOLE_FILES)), len(content)
        content = content[:at] + middle + content[end:]
    return content


# -- Pickles, also inside the zip file that `torch.save` writes

# What a forged pickle would run; each would leave a folder that the attempt's listing shows.
_CALLS = (
    *(b"cposix\nmkdir\n(Vexecuted\ntR", b"cos\nmkdir\n(Vexecuted\ntR", b"(Vexecuted\niposix\nmkdir\n"),
    *(b"cbuiltins\neval\n(V__import__('os').mkdir('executed')\ntR", b"cbuiltins\ngetattr\n", b"cshutil\nrmtree\n"),
    *(b"\x8c\x05posix\x8c\x05mkdir\x93\x8c\x08executed\x85R", b"\x84\xff\xff\xff\x7f"),
    b"ctorch\nload\n(V/dev/zero\ntR",
)
_NAMES = (
    *(b"ctorch\nSize\n", b"ctorch\nTensor\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ccollections\nOrderedDict\n"),
    *(b"cargparse\nNamespace\n", b"ctorch\nFloatStorage\n", b"c_codecs\nencode\n", b"cnumpy\nndarray\n"),
)
_TEXTS = (b"", b"step", b"../escaped", b"/dev/zero", b"\xed\xa0\x80", b"x" * 5_000, b"cuda:0", b"meta")
_CODES = (
    *(*_CALLS, *_NAMES, b"\x8a\x09" + b"\xff" * 8 + b"\x00"),
    *(bytes([code]) for code in b"(.012NR}]()abdeloqstu\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94"),
    *(b"J" + struct.pack("<i", number) for number in (0, 1, -1, 2, 255, 2**31 - 1, -(2**31))),
    *(b"G" + struct.pack(">d", number) for number in (0.5, -1.0, float("nan"), 1e308)),
    *(b"X" + struct.pack("<I", len(text)) + text for text in _TEXTS),
)


@st.composite
def edited_pickle(draw: st.DrawFn, content: bytes) -> bytes:
    opcodes = list(_opcodes(content))
    for _ in range(draw(st.integers(1, 3))):
        at, other = (draw(st.integers(0, max(0, len(opcodes) - 1))) for _ in range(2))
        match draw(st.sampled_from(["argument", "cut off", "delete", "duplicate", "insert", "replace", "swap"])):
            case "cut off":
                del opcodes[at:]
            case "delete":
                del opcodes[at : at + draw(st.sampled_from([1, 1, 2, 10]))]
            case "duplicate":
                times = draw(st.sampled_from([1, 2, 100]))
                opcodes[at:at] = opcodes[at : at + draw(st.sampled_from([1, 3, 20]))] * times
            case "swap":
                opcodes[at : at + 1], opcodes[other : other + 1] = opcodes[other : other + 1], opcodes[at : at + 1]
            case kind:
                if kind == "argument":  # of a number, a text or a name
                    at = draw(st.sampled_from([n for n, code in enumerate(opcodes) if len(code) > 1] or [0]))
                opcodes[at : at + (kind != "insert")] = [draw(st.sampled_from(_CODES))]
    return b"".join(opcodes)


@st.composite
def edited_torch_file(draw: st.DrawFn, content: bytes) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(written, "w") as changed:
        for name in archive.namelist():
            inside = archive.read(name)
            changed.writestr(name, draw(edited_pickle(inside)) if name.endswith("data.pkl") else inside)
    return written.getvalue()


@lru_cache(maxsize=64)
def _opcodes(content: bytes) -> list[bytes]:
    starts = [position or 0 for _, _, position in pickletools.genops(content)]
    starts.append(starts[-1] + 1)
    return [content[start:end] for start, end in itertools.pairwise([*starts, len(content)])]

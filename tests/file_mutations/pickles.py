"""Edits of a pickle's opcodes, also inside the zip file that `torch.save` writes."""

from __future__ import annotations

import io
import pickletools
import struct
import zipfile
from functools import lru_cache

from hypothesis import strategies as st

Opcode = tuple[str, bytes]
"""Name, and its bytes with the argument."""

# What a forged pickle would run; each would leave a folder that the attempt's listing shows.
_CALLS = (
    *(b"cposix\nmkdir\n(Vexecuted\ntR", b"cos\nmkdir\n(Vexecuted\ntR", b"(Vexecuted\niposix\nmkdir\n"),
    *(b"cbuiltins\neval\n(V__import__('os').mkdir('executed')\ntR", b"cbuiltins\ngetattr\n", b"cshutil\nrmtree\n"),
    *(
        b"\x8c\x05posix\x8c\x05mkdir\x93\x8c\x08executed\x85R",
        b"ctorch\nload\n(V/dev/zero\ntR",
        b"\x82\x01",
        b"\x84\xff\xff\xff\x7f",
    ),
)
_NAMES = (
    *(b"ctorch\nSize\n", b"ctorch\nTensor\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ccollections\nOrderedDict\n"),
    *(
        b"cargparse\nNamespace\n",
        b"ctorch\nFloatStorage\n",
        b"c_codecs\nencode\n",
        b"cnumpy\nndarray\n",
        b"cpathlib\nPosixPath\n",
    ),
)
_SINGLE = tuple(
    bytes([code]) for code in b"(.012NR}]()abdeloqstu\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94\x97\x98Q"
)
_INTEGERS = (0, 1, -1, 2, 7, 255, 2**31 - 1, -(2**31))
_TEXTS = (
    b"",
    b"step",
    b"state",
    b"../escaped",
    b"/dev/zero",
    b"\xed\xa0\x80",
    b"x" * 5_000,
    b"cpu",
    b"cuda:0",
    b"meta",
)


@st.composite
def edited_pickle(draw: st.DrawFn, content: bytes, *, most: int = 3) -> bytes:
    """Return a pickle, or the bytes before and after one, with one to three edits of its opcodes."""
    opcodes, rest = _opcodes(content)
    opcodes = list(opcodes)
    for _ in range(draw(st.integers(1, most))):
        _edit(draw, opcodes)
    return b"".join(code for _, code in opcodes) + rest


@st.composite
def edited_torch_file(draw: st.DrawFn, content: bytes) -> bytes:
    """Return a file of `torch.save` with edits of its `data.pkl`."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        name = next(entry for entry in archive.namelist() if entry.endswith("data.pkl"))
        changed = draw(edited_pickle(archive.read(name)))
        return _with_entry(archive, name, changed)


def _with_entry(archive: zipfile.ZipFile, name: str, changed: bytes) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_STORED) as copy:
        for entry in archive.infolist():
            copy.writestr(entry.filename, changed if entry.filename == name else archive.read(entry))
    return written.getvalue()


@lru_cache(maxsize=64)
def _opcodes(content: bytes) -> tuple[tuple[Opcode, ...], bytes]:
    """Return the opcodes of the first pickle, and the bytes behind it."""
    found: list[Opcode] = []
    names, starts = [], []
    for opcode, _, position in pickletools.genops(content):
        names.append(opcode.name)
        starts.append(position or 0)
    ends = [*starts[1:], starts[-1] + 1]
    found = [(name, content[start:end]) for name, start, end in zip(names, starts, ends, strict=True)]
    return tuple(found), content[ends[-1] :]


def _edit(draw: st.DrawFn, opcodes: list[Opcode]) -> None:
    if not opcodes:
        return
    at = draw(st.integers(0, len(opcodes) - 1))
    match draw(st.sampled_from(["argument", "call", "cut off", "delete", "duplicate", "name", "single", "swap"])):
        case "argument":
            near = [n for n in range(at, min(at + 400, len(opcodes))) if opcodes[n][0] in _ARGUMENTS] or [at]
            at = draw(st.sampled_from(near))
            opcodes[at] = _other_argument(draw, opcodes[at])
        case "call":
            opcodes.insert(at, ("CALL", draw(st.sampled_from(_CALLS))))
        case "cut off":
            del opcodes[at:]
        case "delete":
            del opcodes[at : at + draw(st.sampled_from([1, 1, 2, 10]))]
        case "duplicate":
            opcodes[at:at] = opcodes[at : at + draw(st.sampled_from([1, 3, 20]))] * draw(st.sampled_from([1, 2, 100]))
        case "name":
            globals_ = [n for n, (name, _) in enumerate(opcodes) if name == "GLOBAL"] or [at]
            opcodes[draw(st.sampled_from(globals_))] = ("GLOBAL", draw(st.sampled_from([*_NAMES, *_CALLS])))
        case "single":
            opcodes[at] = ("SINGLE", draw(st.sampled_from(_SINGLE)))
        case "swap":
            other = draw(st.integers(0, len(opcodes) - 1))
            opcodes[at], opcodes[other] = opcodes[other], opcodes[at]


_ARGUMENTS = (
    *("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "BINFLOAT"),
    *("NEWTRUE", "NEWFALSE", "NONE"),
)


def _other_argument(draw: st.DrawFn, opcode: Opcode) -> Opcode:
    name, _ = opcode
    if name in ("BININT", "BININT1", "BININT2", "LONG1"):
        kind = draw(st.sampled_from(["integer", "float", "long", "text", "none"]))
        return {
            "integer": ("BININT", b"J" + struct.pack("<i", draw(st.sampled_from(_INTEGERS)))),
            "float": ("BINFLOAT", b"G" + struct.pack(">d", draw(st.sampled_from([0.5, -1.0, float("nan"), 1e308])))),
            "long": ("LONG1", b"\x8a\x09" + b"\xff" * 8 + b"\x00"),
            "text": ("BINUNICODE", b"X\x01\x00\x00\x00a"),
            "none": ("NONE", b"N"),
        }[kind]
    if name in ("BINUNICODE", "SHORT_BINUNICODE"):
        text = draw(st.sampled_from(_TEXTS))
        return ("BINUNICODE", b"X" + struct.pack("<I", len(text)) + text)
    return ("SINGLE", draw(st.sampled_from([b"\x88", b"\x89", b"N", b"]", b"}", b")", b"K\x05"])))

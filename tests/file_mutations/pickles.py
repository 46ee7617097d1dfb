"""Edits of a pickle's opcodes, also inside the zip file that `torch.save` writes."""

from __future__ import annotations

import io
import pickletools
import struct
import zipfile
from functools import lru_cache

from hypothesis import strategies as st

# What a forged pickle would run; each would leave a folder that the attempt's listing shows.
_CALLS = (
    *(b"cposix\nmkdir\n(Vexecuted\ntR", b"cos\nmkdir\n(Vexecuted\ntR", b"(Vexecuted\niposix\nmkdir\n"),
    *(b"cbuiltins\neval\n(V__import__('os').mkdir('executed')\ntR", b"cbuiltins\ngetattr\n", b"cshutil\nrmtree\n"),
    *(
        b"\x8c\x05posix\x8c\x05mkdir\x93\x8c\x08executed\x85R",
        b"ctorch\nload\n(V/dev/zero\ntR",
        b"\x84\xff\xff\xff\x7f",
    ),
)
_NAMES = (
    *(b"ctorch\nSize\n", b"ctorch\nTensor\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ccollections\nOrderedDict\n"),
    *(b"cargparse\nNamespace\n", b"ctorch\nFloatStorage\n", b"c_codecs\nencode\n", b"cnumpy\nndarray\n"),
)
_SINGLE = tuple(bytes([code]) for code in b"(.012NR}]()abdeloqstu\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94")
_TEXTS = (b"", b"step", b"../escaped", b"/dev/zero", b"\xed\xa0\x80", b"x" * 5_000, b"cuda:0", b"meta")
# Arguments of other types and sizes.
_VALUES = (
    *(b"J" + struct.pack("<i", number) for number in (0, 1, -1, 2, 255, 2**31 - 1, -(2**31))),
    *(b"G" + struct.pack(">d", number) for number in (0.5, -1.0, float("nan"), 1e308)),
    *(b"X" + struct.pack("<I", len(text)) + text for text in _TEXTS),
    *(b"\x8a\x09" + b"\xff" * 8 + b"\x00", b"N", b"\x88", b"]", b"}", b")"),
)
_WITH_ARGUMENT = ("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "BINFLOAT", "NEWTRUE")


@st.composite
def edited_pickle(draw: st.DrawFn, content: bytes, *, most: int = 3) -> bytes:
    """Return a pickle, and the bytes after it, with one to three edits of its opcodes."""
    known, rest = _opcodes(content)
    opcodes = list(known)
    for _ in range(draw(st.integers(1, most))):
        _edit(draw, opcodes)
    return b"".join(code for _, code in opcodes) + rest


@st.composite
def edited_torch_file(draw: st.DrawFn, content: bytes) -> bytes:
    """Return a file of `torch.save` with edits of its `data.pkl`."""
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(written, "w") as copy:
        for entry in archive.infolist():
            inside = archive.read(entry)
            is_pickle = entry.filename.endswith("data.pkl")
            copy.writestr(entry.filename, draw(edited_pickle(inside)) if is_pickle else inside)
    return written.getvalue()


@lru_cache(maxsize=64)
def _opcodes(content: bytes) -> tuple[tuple[tuple[str, bytes], ...], bytes]:
    """Return name and bytes of each opcode of the first pickle, and the bytes behind it."""
    found = [(opcode.name, position or 0) for opcode, _, position in pickletools.genops(content)]
    ends = [*(start for _, start in found[1:]), found[-1][1] + 1]
    return tuple((name, content[start:end]) for (name, start), end in zip(found, ends, strict=True)), content[
        ends[-1] :
    ]


def _edit(draw: st.DrawFn, opcodes: list[tuple[str, bytes]]) -> None:
    if not opcodes:
        return
    at = draw(st.integers(0, len(opcodes) - 1))
    match draw(st.sampled_from(["argument", "call", "cut off", "delete", "duplicate", "name", "single", "swap"])):
        case "argument":
            near = [n for n in range(at, min(at + 400, len(opcodes))) if opcodes[n][0] in _WITH_ARGUMENT] or [at]
            opcodes[draw(st.sampled_from(near))] = ("VALUE", draw(st.sampled_from(_VALUES)))
        case "call":
            opcodes.insert(at, ("CALL", draw(st.sampled_from(_CALLS))))
        case "cut off":
            del opcodes[at:]
        case "delete":
            del opcodes[at : at + draw(st.sampled_from([1, 1, 2, 10]))]
        case "duplicate":
            opcodes[at:at] = opcodes[at : at + draw(st.sampled_from([1, 3, 20]))] * draw(st.sampled_from([1, 2, 100]))
        case "name":
            names = [n for n, (name, _) in enumerate(opcodes) if name == "GLOBAL"] or [at]
            opcodes[draw(st.sampled_from(names))] = ("GLOBAL", draw(st.sampled_from([*_NAMES, *_CALLS])))
        case "single":
            opcodes[at] = ("SINGLE", draw(st.sampled_from(_SINGLE)))
        case "swap":
            other = draw(st.integers(0, len(opcodes) - 1))
            opcodes[at], opcodes[other] = opcodes[other], opcodes[at]

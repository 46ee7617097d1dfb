"""Edits of a file's bytes: cut off, flipped, inserted, deleted, repeated, spliced with another file, re-encoded."""

from __future__ import annotations

from hypothesis import strategies as st

SNIPPETS = (
    *(b"\0", b"\0" * 600, b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\r\n", b"\n\n", b"\t", b"{", b"}", b"[", b"]"),
    *(b",", b":", b'"', b"'", b"\\u", b"#", b"- ", b"&a ", b"*a ", b"!!", b"{{", b"{%", b"---\n", b"NaN", b"1e999"),
    *(b"9" * 5_000, b"x" * 70_000, b"[" * 100_000, b"- " * 3_000, b"PK\x03\x04", b"\x80\x02", b"cos\nsystem\n"),
)


@st.composite
def edited_bytes(draw: st.DrawFn, content: bytes, *, others: tuple[bytes, ...] = (), most: int = 3) -> bytes:
    """Return the content with one to three edits of its bytes."""
    for _ in range(draw(st.integers(1, most))):
        content = _edited_once(draw, content, others)
    return content


def _edited_once(draw: st.DrawFn, content: bytes, others: tuple[bytes, ...]) -> bytes:
    at = draw(st.integers(0, len(content)))
    end = min(len(content), at + draw(st.sampled_from([1, 2, 8, 64, 1_000])))
    match draw(st.sampled_from(["cut off", "flip", "insert", "delete", "repeat", "whole", "splice", "random"])):
        case "cut off":
            return content[:at]
        case "flip":
            mask = draw(st.sampled_from([1, 0x20, 0x80, 0xFF]))
            return content[:at] + bytes(byte ^ mask for byte in content[at : at + 1]) + content[at + 1 :]
        case "insert":
            return content[:at] + draw(st.sampled_from(SNIPPETS)) + content[at:]
        case "delete":
            return content[:at] + content[end:]
        case "repeat":
            return content[:at] + content[at:end] * draw(st.sampled_from([2, 50])) + content[end:]
        case "splice":
            other = draw(st.sampled_from([*others, content]))
            return content[:at] + other[draw(st.integers(0, len(other))) :]
        case "random":
            return content[:at] + draw(st.binary(max_size=16)) + content[end:]
    text = content.decode("utf-8", "replace") if len(content) < 2**20 else ""
    return draw(
        st.sampled_from(
            [
                *(b"", b"\0" * 4_096, b"\xef\xbb\xbf" + content, content.replace(b"\n", b"\r\n"), content[::-1]),
                *(text.encode("utf-16"), text.encode("cp500", "replace"), content * 2, b" " * 10_000, b"null", b"[]"),
                *(b"{}", b'""', b"0", b"---\n---\n", b"PK\x05\x06" + b"\0" * 18, b"\x80\x04N."),
            ]
        )
    )

"""The zip files of `torch.save`, read only in the one form that torch writes.

torch's zip reader and Python's could find different contents in a file that was made for it: two directories, names
that differ in case only, a comment that looks like a directory. Whatever torch does not write is refused, so that what
is checked is what is loaded.
"""

from __future__ import annotations

import struct
import zipfile
from typing import IO, Any

ZIP_START = b"PK\x03\x04"
# Signature, disks, entries here and in total, size and offset of the directory, length of the comment.
_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_END_SIGNATURE, _LOCATOR_SIGNATURE, _END_64_SIGNATURE = b"PK\x05\x06", b"PK\x06\x07", b"PK\x06\x06"
_SATURATED = (0xFFFF, 0xFFFFFFFF)
_ENCRYPTED = 0x1
# torch reads `constants.pkl` as a program in TorchScript.
_TORCHSCRIPT = "constants.pkl"


class NotTorchs(ValueError):
    """The file is no zip file as `torch.save` writes them; the message is the reason."""


def read_pickle(file: IO[bytes], *, max_bytes: int) -> bytes:
    """Return the pickle in a file of `torch.save`. Raises NotTorchs, and OSError."""
    if file.read(len(ZIP_START)) != ZIP_START:
        raise NotTorchs("it is no zip file, as torch has written them since 2020")
    _check_directory(file)
    try:
        with zipfile.ZipFile(file) as archive:
            entry = _pickle_entry(archive.infolist())
            if entry.file_size > max_bytes:
                raise NotTorchs(f"its pickle has {entry.file_size:,} bytes, expected at most {max_bytes:,}")
            return archive.read(entry)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, UnicodeDecodeError, struct.error) as error:
        raise NotTorchs(f"it is a damaged zip file: {error}") from None


def _pickle_entry(entries: list[zipfile.ZipInfo]) -> zipfile.ZipInfo:
    names = [entry.filename for entry in entries]
    if len({name.lower() for name in names}) != len(names):  # torch's reader ignores case
        raise NotTorchs("two of its entries have the same name")
    if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & _ENCRYPTED for entry in entries):
        raise NotTorchs("it has a compressed or encrypted entry")
    folders = {name.partition("/")[0] for name in names}
    pickles = [entry for entry in entries if entry.filename.partition("/")[2] == "data.pkl"]
    if len(folders) != 1 or len(pickles) != 1 or not all(name.isascii() and "\0" not in name for name in names):
        raise NotTorchs("it has no single `data.pkl` in a single folder")
    if any(name.partition("/")[2].lower() == _TORCHSCRIPT for name in names):
        raise NotTorchs("it is a program in TorchScript")
    return pickles[0]


def _check_directory(file: IO[bytes]) -> None:
    """The directory is at the end of the file, and both kinds of end record say so."""
    size = file.seek(0, 2)
    at = size - _END.size
    signature, disk, first_disk, here, entries, length, offset, comment = _unpack(file, _END, at)
    if signature != _END_SIGNATURE or disk or first_disk or comment or here != entries:
        raise NotTorchs("it does not end as a zip file: it is cut off, or something follows it")
    if at >= _LOCATOR.size:
        locator_at = at - _LOCATOR.size
        locator, _, end_64_at, _ = _unpack(file, _LOCATOR, locator_at)
        if locator == _LOCATOR_SIGNATURE:
            at = locator_at - _END_64.size
            end_64 = _unpack(file, _END_64, at)
            ours = (entries, entries, length, offset)
            if (end_64[0], end_64_at) != (_END_64_SIGNATURE, at) or not all(map(_agree, ours, end_64[6:])):
                raise NotTorchs("its two directories contradict each other")
            length, offset = end_64[8:]
    if offset + length != at:
        raise NotTorchs("its directory is not where it says")


def _agree(short: int, long: int) -> bool:
    return short == long or (short in _SATURATED and long >= short)


def _unpack(file: IO[bytes], fields: struct.Struct, at: int) -> tuple[Any, ...]:
    file.seek(max(at, 0))
    content = file.read(fields.size)
    if at < 0 or len(content) != fields.size:
        raise NotTorchs("it is cut off")
    return fields.unpack(content)

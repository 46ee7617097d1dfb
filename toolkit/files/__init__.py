"""Files: each kind that others may have written has one reader, with limits; and a file is written completely or not.

- `read_text`, `open_file` of `toolkit.files.documents`: regular files up to a size
- `read_json`, `read_json_lines`, `read_configuration` beside them: values, bounded in number and depth
- `read_header` of `toolkit.files.model_weights`: names, dtypes and shapes
- `torch_load` of `toolkit.engines.safe_loading`: tensors
"""

import os
import shutil
import uuid
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write text as `write_bytes` does, in UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write under a temporary name, then rename: a reader sees the old file or the new one.

    Creates the folder if it is missing, keeps the mode of an existing file, and follows a link to one. A device or a
    pipe, such as /dev/stdout, is written to and not replaced. Raises OSError, and leaves no temporary file.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # an error if nobody reads a pipe
        os.set_blocking(descriptor, True)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:200]}.{uuid.uuid4().hex[:8]}")
    try:
        temporary.write_bytes(content)
        if path.exists():
            shutil.copymode(path, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)

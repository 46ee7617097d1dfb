"""A C++ compiler that takes less time for DeepSpeed's ops; `toolkit.doctor.ops` puts it on PATH as `c++`.

    python precompiled.py FOLDER COMPILER WORD ...

Of the 80 CPU-seconds of one of async_io's twelve files, GCC 12 spends 46 on `torch/extension.h`, which is precompiled
once here, and 24 on debug information, which is left out. ninja sees the command that DeepSpeed runs, so that ranks
find the op up to date. Where GCC does not take a precompiled header, it reads the header itself.
"""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

HEADER = "#include <torch/extension.h>\n"
# The other ops have two files each: compiled at the same time, they wait less without it.
PRECOMPILED_FOR = "-DTORCH_EXTENSION_NAME=async_io"


def main(folder: Path, compiler: str, words: list[str]) -> int:
    """Compile as asked, with torch's header precompiled; return the compiler's exit code."""
    if "-c" not in words:
        os.execv(compiler, [compiler, *words])
    if PRECOMPILED_FOR not in words:
        os.execv(compiler, [compiler, *words, "-g0"])
    flags = words.copy()
    for option in ("-c", "-o", "-MF"):
        position = flags.index(option)
        del flags[position : position + 2]
    flags = [flag for flag in flags if flag != "-MMD"] + ["-g0"]
    header, compiled = folder / "torch.h", folder / "torch.h.gch"  # all files of an op have the same flags
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not compiled.exists():
            header.write_text(HEADER)
            subprocess.run([compiler, *flags, "-x", "c++-header", str(header), "-o", str(compiled)], check=False)
    code = subprocess.run([compiler, *words, "-g0", "-include", str(header)], check=False).returncode
    depends_on = Path(words[words.index("-MF") + 1])
    if code == 0:  # what is removed afterwards is no reason to compile again
        depends_on.write_text(depends_on.read_text().replace(str(compiled), "").replace(str(header), ""))
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))

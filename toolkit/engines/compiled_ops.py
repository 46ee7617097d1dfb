"""DeepSpeed's compiled ops in the cache folder: one copy for each environment and CPU."""

import contextlib
import functools
import hashlib
import os
import re
import shlex
import stat
import sys
from collections.abc import Collection
from importlib.metadata import distribution
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.files.paths import cache_folder
from toolkit.versions import installed_version

LIBRARIES = ("torch", "deepspeed")
# Library of an op (also the name of its folder) and the class in deepspeed.ops.op_builder.cpu that builds it:
# collectives between the ranks of one node, and the optimizer of every CPU-offload preset.
SHARED_MEMORY_OP = "deepspeed_shm_comm"
CPU_OPS = {SHARED_MEMORY_OP: "ShareMemCommBuilder", "cpu_adam": "CPUAdamBuilder"}
ASYNC_IO_OPS = ("pin_memory", "async_io")  # DeepSpeed's ops for NVMe offload; each name is also the name of its folder
# Instruction sets that a compiler uses with `-march=native`, by the beginning of their names on x86 and Arm.
COMPILED_FOR = ("avx", "amx", "fma", "sse", "f16c", "bmi", "asimd", "sve", "bf16")
ASYNC_IO_MISSING = "DeepSpeed's async_io is not compiled"
INSTALL_LIBAIO = "apt-get install libaio-dev"
COMPILE_ASYNC_IO = "python -m toolkit.doctor.ops --async-io"


def torch_extensions_folder() -> Path:
    """Return the folder of compiled ops for this environment and CPU.

    Environments that share a folder rebuild each other's ops. DeepSpeed compiles for the CPU at hand
    (`-march=native`): on a node with an older CPU that shares the home folder, its ops would end in SIGILL.
    """
    libraries = " ".join(f"{library} {installed_version(library)}" for library in LIBRARIES)
    environment = f"{sys.prefix} {sys.version_info[:2]} {libraries} {' '.join(instruction_sets())}"
    return cache_folder() / "torch_extensions" / hashlib.sha256(environment.encode()).hexdigest()[:12]


@functools.cache
def instruction_sets(cpu_info: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Return the vector and matrix instruction sets of this CPU, sorted; empty where Linux does not list them."""
    try:
        lines = cpu_info.read_text().splitlines()
    except OSError:
        return ()
    listed = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return tuple(sorted(name for name in set(listed.split()) if name.startswith(COMPILED_FOR)))


def use_cached_extensions() -> None:
    """Set TORCH_EXTENSIONS_DIR to the cache, unless the user has set it."""
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(torch_extensions_folder()))


def cache_cpu_info() -> None:
    """Let py-cpuinfo run once per process: it takes a second, and DeepSpeed calls it three times to load one op."""
    with contextlib.suppress(ImportError):
        import cpuinfo

        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)


def extensions_folder() -> Path:
    """Return the folder of compiled ops: the user's TORCH_EXTENSIONS_DIR, otherwise the cache's."""
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(named) if named else torch_extensions_folder()


def check_extensions_folder() -> None:
    """Raise ToolkitError where another user may write the compiled ops: a library runs in each process that loads it.

    Root's folders are trusted, and those that only a group may write.
    """
    folder, is_named = extensions_folder(), bool(os.environ.get("TORCH_EXTENSIONS_DIR"))
    own = [] if is_named else [cache_folder(), folder.parent]
    for path in (*own, folder, *sorted(folder.glob("*/")), *sorted(folder.glob("*/*.so"))):
        if not path.exists():
            continue
        facts = path.stat()
        is_foreign = facts.st_uid not in (os.geteuid(), 0)
        if is_foreign or facts.st_mode & stat.S_IWOTH:
            problem = f"belongs to another user (uid {facts.st_uid})" if is_foreign else "may be written by every user"
            raise ToolkitError(
                f"{path} {problem}, and the compiled ops in it would run as you",
                hint=f"`chmod -R o-w {path}` if it is yours, or another folder:"
                f" `export {'TORCH_EXTENSIONS_DIR' if is_named else 'TOOLKIT_CACHE'}=DIR`",
            )


def check_architectures() -> None:
    """Raise ToolkitError where the user names GPUs to compile for by numbers with letters, as in `9.0a`."""
    named = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    if re.search(r"\d[a-z]", named):
        hint = f"export TORCH_CUDA_ARCH_LIST={shlex.quote(re.sub(r'(?<=[0-9])[a-z]', '', named))}"
        expected = "expected numbers: DeepSpeed 0.19 reads no letters"
        raise ToolkitError(f"TORCH_CUDA_ARCH_LIST is {named[:40]!r}, {expected}", hint=hint)


def are_compiled(ops: Collection[str]) -> bool:
    """Return True if each of these DeepSpeed ops is compiled; only files are inspected. False without DeepSpeed."""
    if None in map(installed_version, LIBRARIES):
        return False
    folder = extensions_folder()
    sources = [Path(str(distribution(name).locate_file(f"{name}/__init__.py"))) for name in LIBRARIES]
    newest = max(source.stat().st_mtime for source in sources)  # newer than its op: ninja would compile it again
    libraries = [op_library(folder, op) for op in ops if not (folder / op / "lock").exists()]  # while torch compiles it
    return len(libraries) == len(ops) and all(each.is_file() and each.stat().st_mtime >= newest for each in libraries)


def which_are_compiled() -> dict[str, bool]:
    """Return whether each op for the CPU is compiled; empty without torch or DeepSpeed."""
    return (
        {}
        if None in map(installed_version, LIBRARIES)
        else {op: are_compiled([op]) for op in (*CPU_OPS, *ASYNC_IO_OPS)}
    )


def op_library(folder: Path, op: str) -> Path:
    """Return the path of an op's compiled library."""
    return folder / op / f"{op}.so"


def path_with_ninja() -> str:
    """Return PATH with this environment's programs first, where torch finds ninja even if it is not activated."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])

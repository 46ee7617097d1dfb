"""What this installation holds: packages of the extras, with the line that adds one, and where its documentation is.

>>> missing_package("toolkit") is None
True
"""

import functools
import importlib.metadata
import sys
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.versions import installed_version, is_importable, version_numbers

PACKAGE = "finetune-toolkit"
# Module -> the extra of pyproject.toml that installs it.
EXTRAS = {
    **dict.fromkeys(("torch", "transformers", "accelerate", "peft", "datasets"), "train"),
    **dict.fromkeys(("huggingface_hub", "pyarrow", "safetensors"), "train"),  # those install it
    **dict.fromkeys(("deepspeed", "ninja", "cpuinfo"), "deepspeed"),
    **dict.fromkeys(("bitsandbytes", "liger_kernel", "pynvml"), "gpu"),
    **dict.fromkeys(("gguf", "zaragoza_construction_faq"), "demo"),
    "numpy": "simulate",
    "mcp": "mcp",
}
# They decide what a run computes.
LIBRARIES = ("torch", "accelerate", "transformers", "deepspeed", "peft")
TRAIN = ("torch", "transformers", "accelerate", "peft", "datasets")
# The least and the first too new version of each, as in pyproject.toml.
RANGES = {
    **{"torch": ("2.11", "3"), "transformers": ("5.23", "6"), "accelerate": ("1.15", "2"), "peft": ("0.21", "1")},
    **{"datasets": ("5.2", "6"), "deepspeed": ("0.19.8", "0.20"), "bitsandbytes": ("0.50", "1")},
}


def missing_package(*modules: str) -> ToolkitError | None:
    """Return the error, with the line to type, for modules that are not installed; None where no extra is missing."""
    missing = [module for module in modules if module in EXTRAS and not is_importable(module)]
    if not missing:
        return None
    verb = "is" if len(missing) == 1 else "are"
    return ToolkitError(f"{', '.join(missing)} {verb} not installed", hint=install_line(*missing))


def require(*modules: str) -> None:
    """Raise ToolkitError, with the line to type, for modules that are not installed; nothing is imported."""
    if error := missing_package(*modules):
        raise error


def require_versions(*modules: str) -> None:
    """Raise ToolkitError, with the line to type, for modules that are not installed, or in a version out of range."""
    require(*modules)
    for error in filter(None, map(wrong_version, modules)):
        raise error


def wrong_version(module: str) -> ToolkitError | None:
    """Return the error, with the line to type, for a library that is installed in a version out of range."""
    version, (least, below) = installed_version(module), RANGES.get(module, ("0", ""))
    if version is None or not below or version_numbers(least) <= version_numbers(version) < version_numbers(below):
        return None
    hint = f"{installer()} '{module}>={least},<{below}'"
    return ToolkitError(f"{module} {version} is installed, expected at least {least}, and less than {below}", hint=hint)


def install_line(*modules: str) -> str:
    """Return the line that installs the extras of these modules into this environment.

    >>> install_line("bitsandbytes", "peft").partition("'")[2]
    "finetune-toolkit[gpu,train]'"
    """
    extras = dict.fromkeys(EXTRAS[module] for module in modules)
    return f"{installer()} '{PACKAGE}[{','.join(extras)}]'"


def installer() -> str:
    """Return the command that installs packages into this environment, which may have no pip of its own."""
    if (Path(sys.prefix) / "pipx_metadata.json").is_file():
        return f"pipx inject {PACKAGE}"
    return "pip install" if is_importable("pip") else f"uv pip install --python {sys.prefix}"


@functools.cache
def documentation_address(page: str, anchor: str = "") -> str:
    """Return where a page of `docs/` can be read, as messages name it: `how-to/data.md`, at an anchor.

    The address is the metadata's `Project-URL: Documentation`, which a publisher sets in pyproject.toml. Without one it
    is the file: in the clone, or in the wheel, which carries the text.
    """
    fragment = f"#{anchor}" if anchor else ""
    try:
        addresses = importlib.metadata.metadata(PACKAGE).get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:
        addresses = []
    for label, _, address in (text.partition(", ") for text in addresses):
        if label.lower() == "documentation":
            return f"{address.rstrip('/')}/{page.removesuffix('.md')}.html{fragment}"
    packed = Path(__file__).parent / "_docs"
    return f"{packed if packed.is_dir() else Path(__file__).parents[1] / 'docs'}/{page}{fragment}"

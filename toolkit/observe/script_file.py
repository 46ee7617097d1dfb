"""Somebody's own script, or the module that is one: found, checked without running it, and named. No torch."""

import ast
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from toolkit.errors import ToolkitError, nearest
from toolkit.presets.spec import PresetSpec

USAGE = "python -m toolkit.observe [options] script.py [its arguments], or -m module [its arguments]"


def script_name(script: str | None, module: str | None) -> str:
    """Return the name of a run folder below `runs/` for a script or a module.

    >>> script_name("examples/dpo.py", None), script_name(None, "trl.scripts.sft")
    ('dpo', 'sft')
    """
    return Path(script).stem if script is not None else str(module).rpartition(".")[2]


def check_script(script: str | None, module: str | None) -> Path | None:
    """Return the file that is run, None for a module without one.

    Raises ToolkitError unless the script is a file of Python, or the module can be found.
    """
    if script is None:
        return _module_file(str(module))
    path = Path(script)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        close = nearest(path.name, [file.name for file in path.parent.glob("*.py")])
        hint = f"did you mean `{path.with_name(close)}`?" if close else f"a Python file, by its path from {Path.cwd()}"
        raise ToolkitError(f"script {path} {what}", hint=hint)
    try:
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError, UnicodeDecodeError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise ToolkitError(f"script {path} is not Python{line}: {error}", hint=f"`{USAGE}`") from None
    return path


def check_script_preset(preset: PresetSpec) -> None:
    """Raise ToolkitError for a preset that another script than ours cannot run."""
    divides = preset.degrees or preset.engine == "pipeline"
    if divides or preset.uses_nvme:
        raise ToolkitError(
            f"preset {preset.name!r} {'divides the model' if divides else 'prepares its disk'} inside our training"
            " script, which --script does not run",
            hint="`--preset zero3` or `--preset fsdp2`" if divides else "`--preset zero3_cpu_offload`",
        )


def check_trl_on_cpu(module: str, arguments: Sequence[str]) -> None:
    """Raise ToolkitError for a script of TRL's in bf16, its default, which `TrainingArguments` refuses on a CPU."""
    chosen = ("--bf16", "--no_bf16", "--fp16", "--use_cpu", "--config")
    if module.startswith("trl.") and not any(word.startswith(chosen) for word in arguments):
        raise ToolkitError(
            f"{module} trains in bf16 unless it is told otherwise, which transformers refuses without a GPU",
            hint="add `--bf16 false` after `--`, which trains in fp32",
        )


def bf16_switched_off(arguments: Sequence[str]) -> str | None:
    """Return the words of a script that switch bf16 off; transformers follows a preset that switches it on instead.

    Under DeepSpeed the script decides.
    """
    return next(iter(re.findall(r"--(?:bf16[ =](?:false|no|0)|no[_-]bf16)\b", " ".join(arguments).lower())), None)


def cannot_resume(file: Path, arguments: Sequence[str]) -> str | None:
    """Return why a restart of a script begins at step 0; None where it resumes, or its text and words do not say.

    Its text need not name `resume_from_checkpoint`: the observer gives the checkpoint to its first `train()`.
    """
    nodes = list(ast.walk(ast.parse(file.read_bytes())))
    words = dict(re.findall(r"--(save_\w+)[ =]([\w.]+)", " ".join(arguments)))
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    assigned = {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
    for name, value, reason in (
        ("save_strategy", "no", "nothing is saved (`save_strategy`)"),
        ("save_only_model", "true", "no optimizer states are (`save_only_model`)"),
    ):
        passed = [node.value for node in nodes if isinstance(node, ast.keyword) and node.arg == name]
        values = {ast.unparse(each).strip("'").lower() for each in passed} or {words.get(name, "").lower()}
        if values == {value} and name not in assigned:
            return reason
    imported = [each.name for node in nodes if isinstance(node, ast.Import) for each in node.names]
    imported += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    if {name.partition(".")[0] for name in imported} & {"", *(path.stem for path in file.parent.iterdir())}:
        return None  # its Trainer or its checkpoints may be there
    names = {node.id for node in nodes if isinstance(node, ast.Name)} | {node.attr for node in attributes}
    saves = any(name.endswith("Trainer") or name.startswith(("load_state", "resume")) for name in names)
    if "backward" in names and not saves:
        return "its loop loads no state (`accelerator.load_state`)"
    return None


def _module_file(name: str) -> Path | None:
    try:
        sys.path.insert(0, "")
        found = importlib.util.find_spec(name)
        if found is not None and found.submodule_search_locations is not None:  # a package
            found = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError, AttributeError):
        found = None
    finally:
        sys.path.pop(0)
    if found is None:
        hint = "install its package in this environment; a script is named by its path, without `-m`"
        raise ToolkitError(f"there is no module {name[:80]!r}", hint=hint)
    return Path(found.origin) if found.has_location and found.origin is not None else None

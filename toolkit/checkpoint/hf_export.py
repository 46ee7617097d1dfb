"""Export any engine's checkpoint as one Hugging Face folder, with one tensor in memory at a time; and verify either.

`export(Path("out/checkpoint-8"), Path("model"))` writes the folder `model`, or nothing at all.

A checkpoint, an exported folder or a trained model is verified by loading it again. Structure is checked first
(missing, unexpected, empty, NaN and infinite tensors, by name), then the logits of fixed tokens against the fingerprint
that the live model recorded.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.hf_checkpoint import (
    DEFAULT_SHARD_BYTES,
    CheckpointReader,
    PlainReader,
    WeightFiles,
    listed,
    live_weights,
    stored_tensors,
    write_model,
)
from toolkit.checkpoint.inspect import check_readable, detect, is_checkpoint, newest_of_script
from toolkit.checkpoint.model_definition import (
    ADAPTER_NAME,
    HEAD,
    MetaModel,
    ModelFiles,
    UnknownModel,
    built_by_a_library,
    no_adapter_config,
)
from toolkit.checkpoint.sharded_checkpoints import AtLoadReader, DcpReader, ZeroReader
from toolkit.engines.fsdp2 import Fsdp2
from toolkit.engines.safe_loading import check_checkpoint
from toolkit.engines.zero import Zero
from toolkit.errors import ToolkitError
from toolkit.files.documents import TOKENIZER, open_file, read_json
from toolkit.files.model_weights import SavedTensor
from toolkit.hardware.disks import check_free_space, existing_folder
from toolkit.models.nf4 import PACKED_BF16, as_in_training, quantization_config
from toolkit.record.checkpoints import FINGERPRINT, INCOMPLETE_MARK, MANIFEST, Fingerprint, read_checkpoint
from toolkit.record.folder import write_json
from toolkit.record.status import is_disk_full
from toolkit.units import MIB

SIDE_FILE_BYTES = 64 * MIB  # a generous estimate of the tokenizer and configuration files beside the weights
MAX_TOKENIZER_BYTES = 512 * MIB
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OTHER_CONFIG = "if its config.json is another model's: `--base-model FOLDER` with that of the trained one"
_READERS: dict[str, Callable[..., Any]] = {
    **{Zero.name: ZeroReader, Fsdp2.name: DcpReader, "at_load": AtLoadReader},
    **{"plain": PlainReader, "pipeline": PlainReader},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportResult:
    """The folder that was written."""

    folder: Path
    num_tensors: int
    bytes: int
    adapter: bool


def export(
    path: Path,
    out: Path,
    *,
    merge_lora: bool = False,
    dtype: str = "float32",
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    base_model: str | None = None,
    trust_pickle: bool = False,
    weights_only: bool = False,
) -> ExportResult:
    """Write a checkpoint's model or adapter into `out`, or raise ToolkitError; `weights_only` needs no class."""
    path = newest_of_script(path)
    if dtype not in DTYPES:
        raise ToolkitError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    check_output(out, source=path)
    check_complete(path)
    detect(path)  # refuses a folder that is not a checkpoint before anything is loaded
    files = ModelFiles(path, base_model)
    if merge_lora and not files.adapter:
        raise ToolkitError(f"{path} holds a full model: there is no adapter to merge")
    if merge_lora and files.base_folder is None:
        raise ToolkitError(f"{path} does not record its base model", hint="`--base-model FOLDER`")
    model = UnknownModel(files) if weights_only else MetaModel(files)
    with contextlib.closing(open_checkpoint(path, model, trust_pickle=trust_pickle)) as reader:
        if merge_lora:
            tensors = _merged_tensors(reader, model, files, DTYPES[dtype])
        else:
            tensors = stored_tensors(model, DTYPES[dtype], reader.weight)
        size = sum(tensor.bytes for tensor in tensors)
        check_free_space(out, size + SIDE_FILE_BYTES, user=str(out))
        adapter = files.adapter and not merge_lora
        with temporary_beside(out) as temporary:
            write_model(temporary, tensors, adapter=adapter, max_shard_bytes=max_shard_bytes)
            _write_side_files(files, model, temporary, adapter=adapter, dtype=dtype)
            if out.exists():
                out.rmdir()  # it is empty
            temporary.rename(out)
    return ExportResult(folder=out, num_tensors=len(tensors), bytes=size, adapter=adapter)


def open_checkpoint(path: Path, model: MetaModel, *, trust_pickle: bool = False) -> CheckpointReader:
    """Return the reader of a checkpoint of any engine. `model` names the states that DDP numbers.

    Raises ToolkitError for a pickle that would run something (unless it is trusted), for a converted DeepSpeed
    checkpoint, for numbered states that cannot be named, and for a weight that is missing, misshapen or unknown.
    """
    check_readable(path)
    if not trust_pickle:
        check_checkpoint(path)
    layout = detect(path)
    reader = CheckpointReader(layout, lambda: _READERS[layout.engine](layout, model, trust_pickle=trust_pickle))
    saved = reader.shapes()
    model.take_shapes(saved)
    missing = [name for name in model.shapes if name not in saved]
    if missing and not model.adapter and any(".lora_" in name for name in saved):
        raise no_adapter_config(path)
    if missing:
        raise ToolkitError(f"{path} lacks {listed(missing)}", hint=OTHER_CONFIG)
    for name, shape in model.shapes.items():
        if saved[name] != shape:
            raise ToolkitError(f"{name} in {path} has shape {saved[name]}, the model's is {shape}")
    known = model.known_names
    if unknown := [] if model.adapter else [name for name in saved if name not in known]:
        raise ToolkitError(
            f"{path} has {listed(unknown)}, which a {type(model.base_model).__name__} does not", hint=OTHER_CONFIG
        )
    return reader


def check_complete(path: Path) -> None:
    """Raise ToolkitError if a file differs from the manifest; a checkpoint without one cannot be checked."""
    if os.path.lexists(path / MANIFEST) or os.path.lexists(path / INCOMPLETE_MARK):
        problem = read_checkpoint(path).problem(deep=True)
        if problem is not None:
            raise ToolkitError(f"{path} is damaged: {problem}", hint=f"`toolkit checkpoint inspect {path.parent}`")


def _write_side_files(files: ModelFiles, model: MetaModel, folder: Path, *, adapter: bool, dtype: str) -> None:
    for path in files.tokenizer_files():
        copy_file(path, folder / path.name)
    recorded = files.fingerprint(dtype=dtype)
    if recorded is not None:
        write_json(folder / FINGERPRINT, recorded.model_dump(exclude_unset=True))
    if model.model_class is None:
        if (own := files.find("config.json", base=False)) is not None:
            copy_file(own, folder / own.name)
        return
    if adapter:
        config = files.peft_config()
        config.inference_mode = True
    else:
        config = model.base_model.config
        config.dtype, config.use_cache, config.architectures = dtype, True, [type(model.base_model).__name__]
    config.save_pretrained(folder)


def check_output(out: Path, *, source: Path) -> None:
    """Raise ToolkitError for an output folder that is used already, that cannot be written, or inside of `source`."""
    try:
        if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
            raise ToolkitError(f"{out} already exists and is not empty", hint="name a new folder")
        if out.resolve().is_relative_to(source.resolve()):
            raise ToolkitError(f"{out} is inside of {source}, which it is made from", hint="name a folder beside it")
        with tempfile.TemporaryDirectory(dir=existing_folder(out), prefix=".write-probe-"):
            pass
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        why = getattr(error, "strerror", None) or str(error)
        raise ToolkitError(f"{out} cannot be written: {why}", hint="name a folder that you can write to") from None


def copy_file(source: Path, target: Path) -> None:
    """Copy a regular file; one in JSON must be valid. Raises ToolkitError."""
    with open_file(source) as file, target.open("wb") as copy:
        shutil.copyfileobj(file, copy)
    if target.suffix == ".json":
        read_json(source, limits=TOKENIZER, max_bytes=MAX_TOKENIZER_BYTES, allow_nan=True)


@contextlib.contextmanager
def temporary_beside(out: Path) -> Iterator[Path]:
    """Yield an empty folder on the disk of `out`, removed afterwards. Raises ToolkitError for a full disk."""
    temporary = out.absolute().with_name(f".exporting-{out.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
    except BaseException as error:  # torch's zip writer and its distributed checkpoint raise no OSError
        if not isinstance(error, OSError) and not is_disk_full(error):
            raise
        why = error.strerror if isinstance(error, OSError) and error.strerror else "No space left on device"
        raise ToolkitError(
            f"{out} cannot be written: {why}; everything written so far was removed",
            hint="free disk space, or name a folder on another disk",
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _merged_tensors(
    reader: CheckpointReader, model: MetaModel, files: ModelFiles, dtype: torch.dtype
) -> list[SavedTensor]:
    """The base model's weights with the adapter merged into them, layer by layer with peft's own arithmetic."""
    assert files.base_folder is not None
    base = WeightFiles(files.base_folder)
    layers = {name: module for name, module in model.base_model.named_modules() if hasattr(module, "lora_A")}
    prefix, trained, shapes = "base_model.model.", set(model.trainable), base.shapes()
    frozen = [name for name, _ in model.training_model.named_parameters() if name not in trained]
    in_training = {name.removeprefix(prefix).replace(".base_layer.", "."): name.removeprefix(prefix) for name in frozen}
    in_training = {name: live for name, live in in_training.items() if ".original_module." not in name}
    heads = {name.removeprefix(prefix).replace(HEAD, "."): name for name in trained if HEAD in name}
    if missing := [name for name in in_training if name not in shapes]:
        raise ToolkitError(f"the base model {files.base} lacks {listed(missing)}")

    def read(name: str) -> torch.Tensor:
        """Return a weight of the base model; of an adapted layer, loaded from the meta device, merged and sent back."""
        module, _, parameter = in_training[name].rpartition(".base_layer.")
        layer = layers.get(module)
        if layer is None or parameter != "weight":
            return base.read(name)
        layer.to_empty(device="cpu")
        names, saved = {key: f"{prefix}{module}.{key}" for key in layer.state_dict()}, reader.shapes()
        state = {key: reader.weight(own) for key, own in names.items() if own in saved}
        layer.load_state_dict({"base_layer.weight": base.read(name).float(), **state}, strict=False)
        layer.merge(adapter_names=[ADAPTER_NAME])
        merged: torch.Tensor = layer.base_layer.weight.data.clone()
        layer.merged_adapters.clear()
        layer.to("meta")
        return merged

    merged = [SavedTensor(name=name, shape=shapes[name], dtype=dtype, read=partial(read, name)) for name in in_training]
    return merged + [
        SavedTensor(name=name, shape=model.shapes[live], dtype=dtype, read=partial(reader.weight, live))
        for name, live in heads.items()
    ]


# Relative to the largest logit, by the live model's compute dtype; the reloaded model computes in fp32, unless its base
# is in 4 bits.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyResult:
    """The problems of a checkpoint or model; fields are the keys of `verify --json`."""

    path: str
    kind: str  # `checkpoint` or `model`
    num_tensors: int = 0
    max_difference: float | None = None
    """Largest difference of a logit, relative to the largest logit; None without a fingerprint."""
    tolerance: float | None = None
    four_bit_matmul: str | None = None
    """How 4-bit layers computed, here as in the live model: `dequantized` or `packed_bf16`; None without them."""
    problems: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return not self.problems


def verify(
    path: Path, *, base_model: str | None = None, trust_pickle: bool = False, weights_only: bool = False
) -> VerifyResult:
    """Reload and compare. Raises ToolkitError for no checkpoint or model, and for one that only DeepSpeed reads."""
    path = newest_of_script(path)
    if not path.is_dir():
        raise ToolkitError(f"no such folder: {path}", hint="name a checkpoint, an exported folder or a run folder")
    if not is_checkpoint(path):
        if not any(path.glob("*model*.safetensors")):
            raise ToolkitError(f"{path} holds neither a model nor a checkpoint", hint="name a folder `checkpoint-STEP`")
        return _verify_model(path, path, "model", base_model, weights_only)
    problem = read_checkpoint(path).problem(deep=True) if os.path.lexists(path / MANIFEST) else None
    if problem is not None:
        return VerifyResult(path=str(path), kind="checkpoint", problems=[problem])
    check_readable(path)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".verifying-") as folder:
        exported = Path(folder) / "model"
        try:
            export(path, exported, base_model=base_model, trust_pickle=trust_pickle, weights_only=weights_only)
        except ToolkitError as error:
            return VerifyResult(path=str(path), kind="checkpoint", problems=[error.message])
        return _verify_model(path, exported, "checkpoint", base_model, weights_only)


def _verify_model(path: Path, model: Path, kind: str, base_model: str | None, weights_only: bool) -> VerifyResult:
    files = ModelFiles(path, base_model)
    definition = UnknownModel(files) if weights_only else MetaModel(files)
    recorded, weights = None if weights_only else files.fingerprint(), live_weights(model, definition)
    live_names = {saved: name for name, saved in definition.saved_names.items()}
    definition.take_shapes({live_names.get(saved, saved): shape for saved, shape in weights.shapes().items()})
    problems, difference, tolerance = _structure_problems(weights, definition), None, None
    if recorded is not None and not problems:
        dtype = "bfloat16" if recorded.four_bit_matmul == PACKED_BF16 else str(recorded.compute_dtype)
        tolerance = TOLERANCE.get(dtype, TOLERANCE["bfloat16"])
        vocabulary = definition.base_model.config.get_text_config().vocab_size
        if max(recorded.input_ids) >= vocabulary or len(recorded.logits) > vocabulary:
            raise ToolkitError(f"{path}: the fingerprint is of another model than that of {vocabulary} tokens")
        with built_by_a_library(model):
            reloaded = _reloaded_logits(model, files, definition.model_class, recorded)
        live = torch.tensor(recorded.logits)
        difference = float((reloaded[: len(live)] - live).abs().max() / live.abs().max().clamp_min(1e-12))
        if not difference <= tolerance:
            far = f"by {difference:.3g} of the largest, more than {tolerance:g}"
            problems = [f"logits differ from the live model's {far}"]
    return VerifyResult(
        path=str(path),
        kind=kind,
        num_tensors=len(weights.tensors),
        max_difference=difference,
        tolerance=tolerance,
        four_bit_matmul=None if recorded is None else recorded.four_bit_matmul,
        problems=problems,
    )


def _structure_problems(weights: WeightFiles, model: MetaModel) -> list[str]:
    expected = {model.saved_names.get(name, name): shape for name, shape in model.shapes.items()}
    allowed = set(expected) | model.known_names
    found = weights.shapes()
    problems = [f"{name} is missing" for name in expected if name not in found]
    for name, shape in found.items():
        if name not in allowed:
            problems.append(f"{name} is unexpected")
        elif 0 in shape:
            problems.append(f"{name} is empty")
        elif name in expected and shape != expected[name]:
            problems.append(f"{name} has shape {list(shape)}, expected {list(expected[name])}")
        else:
            tensor = weights.read(name)
            counts = {"NaN": int(tensor.isnan().sum()), "infinite": int(tensor.isinf().sum())}
            if bad := [f"{count} {kind}" for kind, count in counts.items() if count]:
                problems.append(f"{name} has {' and '.join(bad)} of {tensor.numel()} values")
    return problems


def _reloaded_logits(model: Path, files: ModelFiles, model_class: Any, recorded: Fingerprint) -> torch.Tensor:
    from transformers.utils import logging

    logging.disable_progress_bar()
    if files.adapter:
        from peft import PeftModel

        load = partial(model_class.from_pretrained, files.base_folder)
        if recorded.load_in_4bit:  # quantized as it was: from weights in the compute dtype
            from toolkit.models.nf4_experts import decode_experts_when_used, load_with_experts_in_4_bits

            dtype = getattr(torch, str(recorded.compute_dtype))
            packed = partial(load, dtype=dtype, quantization_config=quantization_config(dtype))
            base = load_with_experts_in_4_bits(packed)
        else:
            base = load(dtype=torch.float32)
        loaded = PeftModel.from_pretrained(base, model, adapter_name=ADAPTER_NAME)
        if recorded.load_in_4bit:
            decode_experts_when_used(loaded)
    else:
        loaded = model_class.from_pretrained(model, dtype=torch.float32)
    loaded.eval()
    same_path = as_in_training(loaded) if recorded.four_bit_matmul != PACKED_BF16 else contextlib.nullcontext()
    with torch.no_grad(), same_path:
        outputs = loaded(input_ids=torch.tensor([recorded.input_ids]), use_cache=False)
    logits: torch.Tensor = outputs.logits[0, -1].float()
    return logits

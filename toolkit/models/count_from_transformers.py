"""Count a model's tensors and activations as transformers builds it, without weights or memory.

    $ python -m toolkit.models.count_from_transformers config.json

Prints one line of JSON for `toolkit.models.read_model`, which imports no torch.

What a forward pass saves for the backward pass is counted on fake tensors. Each storage that autograd saves counts
once, for the layer that saves it first. Forward passes over rows of two lengths separate what is constant, what each
token adds, and what each position of its row adds to each token: a storage stays the same, doubles, or quadruples in
rows twice as long. A third length is run for a model with a storage that does none of these. Layers of one kind save
the same, except the first layer, so only as many layers are run as it takes to meet each kind.
"""

import contextlib
import copy
import functools
import inspect
import io
import json
import re
import signal
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
from peft.utils import transformers_weight_conversion as conversion
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.initialization import no_init_weights
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from toolkit.models.fake_tensors import LiveMemory, as_on_gpu, with_kernels
from toolkit.models.lora import share_inputs
from toolkit.models.read_model import COUNTING_CPU_SECONDS, REFUSED, SAME_TENSORS
from toolkit.models.shape import COUNTED_PARTS, TOWER
from toolkit.versions import model_class_flags

LINEAR = (torch.nn.Linear, Conv1D)  # what peft means by `all-linear`, and what bitsandbytes quantizes
ROUTER = re.compile("router$", re.IGNORECASE)
ROWS = 2
# Lengths that people train with: in short rows another allocation would be the highest.
LENGTHS = (1024, 2048, 3072)
WINDOW = 32  # shorter than each of them
NO_WINDOW = 1 << 20
RANKS = (8, 16)  # LoRA ranks: what adapters save is linear in the rank
OUTSIDE, LOGITS, PEAK = "outside", "logits", "peak"
Row = dict[str, Any]
Coefficients = list[Any]  # constant bytes, bytes per token, bytes per token and position: the fields of `SavedBytes`
Storages = dict[int, int]  # bytes of each storage by its number in the order of a pass


def main(argv: list[str]) -> None:
    """Print the shape of the model that the configuration describes, or one line that says why it cannot be built."""
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")  # they address people who train
    path = Path(argv[0])
    with limited_seconds(), contextlib.redirect_stderr(io.StringIO()):
        try:
            config = read_configuration(path)
            with torch.device("meta"):
                model = model_class(config).from_config(config, trust_remote_code=False)
            check_layers(model)
            progress("tensors")
            described, kinds = describe_tensors(model), _kind_of_each_layer(model)
            fewer = _with_fewer_layers(model.config, kinds)
            progress("adapters")
            adapters = _adapters_of_kinds(model, kinds)
        except Exception as error:  # whatever transformers raises for an arbitrary configuration
            print(f"{REFUSED}{_first_line(error)}")
            sys.exit(1)
        print(json.dumps(described | describe_activations(fewer, kinds) | adapters))


def read_configuration(path: Path) -> Any:
    """Return transformers' configuration; no code of the hub is run for it."""
    values = json.loads(path.read_text())
    if same := SAME_TENSORS.get(values.get("model_type")):
        return AutoConfig.for_model(same, **{name: value for name, value in values.items() if name != "model_type"})
    return AutoConfig.from_pretrained(str(path.parent), _configuration_file=path.name, trust_remote_code=False)


@contextlib.contextmanager
def limited_seconds() -> Iterator[None]:
    """Raise TimeoutError inside once this process has used `COUNTING_CPU_SECONDS` of a processor since it started."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"its count takes more than {COUNTING_CPU_SECONDS} s of a processor")

    signal.signal(signal.SIGPROF, stop)
    # and each second from then on: Python ignores what is raised while it frees a tensor
    signal.setitimer(signal.ITIMER_PROF, max(0.1, COUNTING_CPU_SECONDS - time.process_time()), 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def progress(what: str) -> None:
    """Say on the terminal what is counted now."""
    print(f"counting: {what}", file=sys.__stderr__, flush=True)


def describe_activations(config: Any, kinds: list[str]) -> dict[str, Any]:
    """Return what forward passes on fake tensors save; no rows, and the reason, for a model that cannot run so."""
    rows, reason = [], None
    try:
        rows = [row for autocast in (False, True) for row in _rows(config, kinds, autocast=autocast)]
    except Exception as error:  # whatever an arbitrary architecture does with values that are not there
        signal.setitimer(signal.ITIMER_PROF, 0)
        reason = _first_line(error)
    return {"activations": rows, "counted_rank": RANKS[0], "why_not_counted": reason}


def _adapters_of_kinds(model: Any, kinds: list[str]) -> dict[str, Any]:
    """Adapters of all layers, from a model that has one of each kind: peft takes 11 s for DeepSeek-V3's 61."""
    with torch.device("meta"):
        smaller = model_class(model.config).from_config(_with_fewer_layers(model.config, kinds, tower=True))
    smaller = _without_repeated_layers(smaller, kinds)
    kinds_of_smaller = _kind_of_each_layer(smaller)  # before peft changes the model
    adapters = describe_adapters(smaller)
    of_kind = dict(zip(kinds_of_smaller, adapters["adapters_of_layer"], strict=True))
    return adapters | {"adapters_of_layer": [of_kind[kind] for kind in kinds]}


def describe_adapters(model: Any) -> dict[str, Any]:
    """Return the adapters that peft makes with `all-linear`, by the field names of `ModelShape`; replaces the modules.

    `adapters_of_layer` has one list per layer. Without adapters, and with the reason, if peft refuses the model.
    """
    names = list(decoder_layers(model))
    renamed = _renamed_targets(model.config.model_type)
    warnings.simplefilter("ignore")
    refused = refused_modules(model)
    fails = "fails in the forward pass of" if any(ROUTER.search(name) for name in refused) else "refuses"
    why = {"why_no_adapters": f"it {fails} {' and '.join(refused)}"} if refused else {}
    try:
        adapted = get_peft_model(model, _lora(1, refused))
    except ValueError as error:
        none = {"adapters_of_layer": [[]] * len(names), "outer_adapters": [], "renamed_targets": renamed}
        return none | {"why_no_adapters": _first_line(error)}
    of_layer: dict[str, list[Any]] = {name: [] for name in names}
    outer: list[Any] = []
    for name, module in adapted.base_model.model.named_modules():
        if not isinstance(module, LoraLayer) or not module.lora_A:
            continue
        a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
        target = name.replace(".base_layer", "")
        if isinstance(module, ParamWrapper):  # parameters of one module have wrappers inside each other
            target += f".{module.parameter_name}"
        layer = next((name for name in names if target.startswith(f"{name}.")), None)
        if layer is not None:
            target = target.removeprefix(f"{layer}.")
        adapters = outer if layer is None else of_layer[layer]
        adapters.append([target, b.shape[0], a.shape[1], a.shape[0]])
    return {"adapters_of_layer": list(of_layer.values()), "outer_adapters": outer, "renamed_targets": renamed} | why


def refused_modules(model: Any) -> list[str]:
    """Return the names among the model's linear layers that peft refuses to adapt (`_check_lora_target_modules_mamba`).

    With `all-linear` it refuses the model then; with other names it adapts those. A router of Llama 4 is a linear layer
    that answers with a pair: peft adapts it, and the forward pass fails.
    """
    linear = {name.rpartition(".")[2]: module for name, module in model.named_modules() if isinstance(module, LINEAR)}
    refused = [name for name, module in linear.items() if ROUTER.search(type(module).__name__)]
    for name in sorted(linear):
        try:
            _check_lora_target_modules_mamba(LoraConfig(), model, name)
        except ValueError:
            refused.append(name)
    return refused


def _lora(rank: int, refused: list[str]) -> LoraConfig:
    return LoraConfig(r=rank, target_modules="all-linear", exclude_modules=refused or None, task_type="CAUSAL_LM")


def _renamed_targets(model_type: str) -> dict[str, str]:
    """What peft renames for a mixture whose experts transformers 5 fuses; nothing for any other model."""
    family = conversion._MODEL_TO_CONVERSION_PATTERN.get(model_type)
    if get_checkpoint_conversion_mapping(model_type) is None:
        return {}
    return dict(conversion._MOE_TARGET_MODULE_MAPPING.get(family, {}))


def model_class(config: Any) -> Any:
    """Return the automatic class that builds a language model, with its encoder of images if it has one."""
    has_tower = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and config.get_text_config() is not config
    return AutoModelForImageTextToText if has_tower else AutoModelForCausalLM


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def describe_tensors(model: Any) -> dict[str, Any]:
    """Return dimensions from the configuration and tensors from the modules, by the field names of `ModelShape`.

    Layers are stored once per kind: `kind_of_layer` has the index into `layers_of_kind` for each layer. A
    dimension that the architecture does not have is 0.
    """
    config = model.config.get_text_config()
    config.allow_global_per_layer_attribute_access = True  # Gemma 4's heads differ between layers
    layers = decoder_layers(model)
    linear = {id(module.weight) for module in model.modules() if isinstance(module, LINEAR)}
    tensors = [
        [[name, list(p.shape), id(p) in linear] for name, p in layer.named_parameters()] for layer in layers.values()
    ]
    kinds = [kind for index, kind in enumerate(tensors) if kind not in tensors[:index]]
    inside = {id(p) for layer in layers.values() for p in layer.parameters()}
    outer = [[name, list(p.shape), id(p) in linear] for name, p in model.named_parameters() if id(p) not in inside]
    names = {name for layer in tensors for name, _, _ in layer}
    hidden = _first_integer(config, "hidden_size", "n_embd", "d_model") or 0
    heads = _first_integer(config, "num_attention_heads", "n_head") or 0
    mlp = _first_integer(config, "moe_intermediate_size", "intermediate_size", "ffn_dim", "n_inner")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return {
        "model_type": model.config.model_type,
        "num_layers": len(layers),
        "hidden_size": hidden,
        "intermediate_size": mlp or 4 * hidden,
        "num_attention_heads": heads,
        "num_kv_heads": _first_integer(config, "num_key_value_heads") or heads,
        "head_dim": _first_integer(config, "head_dim") or (hidden // heads if heads else 0),
        "vocab_size": _first_integer(config, "vocab_size") or 0,
        "gated_mlp": any("gate_proj" in name or "gate_up" in name for name in names),
        "tied_embeddings": head is not None and embedding is not None and embedding.weight is head.weight,
        "num_experts": _first_integer(config, "num_experts", "num_local_experts", "n_routed_experts"),
        "experts_per_token": _first_integer(config, "num_experts_per_tok", "experts_per_token"),
        "attention": model.config._attn_implementation,
        "activation": str(getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None) or "silu"),
        "sliding_window": getattr(config, "sliding_window", None) or None,
        "layers_of_kind": kinds,
        "kind_of_layer": [kinds.index(layer) for layer in tensors],
        "outer": outer,
    }


def _first_integer(config: Any, *names: str) -> int | None:
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), None)


def decoder_layers(model: Any) -> dict[str, Any]:
    """Return the modules that are never split, by name: FSDP2 wraps them, activation checkpointing recomputes them."""
    classes = set(model._no_split_modules or ())
    modules = [(name, module) for name, module in model.named_modules() if type(module).__name__ in classes]
    inside = tuple(f"{name}." for name, _ in modules)  # a Mamba names its mixers beside the blocks around them
    return {name: module for name, module in modules if not (TOWER.search(name) or name.startswith(inside))}


def check_layers(model: Any) -> None:
    """Raise ValueError for a model without layers, and for one whose layers share tensors: neither is planned."""
    of_layers = [id(parameter) for layer in decoder_layers(model).values() for parameter in layer.parameters()]
    if not of_layers:
        raise ValueError("it names no layers that are never split (`_no_split_modules`)")
    if len(of_layers) > len(set(of_layers)):
        raise ValueError("its layers share tensors")


def _kind_of_each_layer(model: Any) -> list[str]:
    layers = list(decoder_layers(model).values())
    types = getattr(model.config.get_text_config(), "layer_types", None) or [""] * len(layers)
    tensors = (str([(name, tuple(p.shape)) for name, p in layer.named_parameters()]) for layer in layers)
    return [f"{layer_type} {own}" for layer_type, own in zip(types, tensors, strict=False)]


def _numbers_to_run(config: Any, kinds: list[str]) -> list[int]:
    """The first layers that contain each kind after the first; with shared keys, the last of each: it stores them."""
    if getattr(config.get_text_config(), "num_kv_shared_layers", None):
        return [0, *sorted({kind: number for number, kind in enumerate(kinds) if number}.values())]
    return list(range(max((kinds.index(kind, 1) for kind in set(kinds[1:])), default=0) + 1))


def _without_repeated_layers(model: Any, kinds: list[str]) -> Any:
    """Remove from a model with shared keys the layers that are not run; their number sizes its outer tensors."""
    text = model.config.get_text_config()
    if getattr(text, "num_kv_shared_layers", None):
        numbers = _numbers_to_run(model.config, kinds)
        parent, _, name = next(iter(decoder_layers(model))).rpartition(".")[0].rpartition(".")
        layers = model.get_submodule(f"{parent}.{name}")
        setattr(model.get_submodule(parent), name, torch.nn.ModuleList(layers[number] for number in numbers))
        text.layer_types = [text.layer_types[number] for number in numbers]
    return model


def _with_fewer_layers(config: Any, kinds: list[str], *, tower: bool = False) -> Any:
    """The configuration cut to the first layers, as many as contain each kind after the first; a tower to one layer.

    That of a model with shared keys keeps its layers: `_without_repeated_layers` removes them from the model.
    """
    needed = _numbers_to_run(config, kinds)[-1] + 1
    config = copy.deepcopy(config)
    text = config.get_text_config()
    if getattr(text, "num_hidden_layers", None) == len(kinds) and not getattr(text, "num_kv_shared_layers", None):
        for name, value in list(vars(text).items()):
            if isinstance(value, list) and len(value) == len(kinds):  # one entry per layer
                setattr(text, name, value[:needed])
        text.num_hidden_layers = needed
    for part in () if tower else ("vision_config", "audio_config"):  # a tower is built, and not run
        for name in ("depth", "num_hidden_layers"):
            if getattr(encoder := getattr(config, part, None), name, None):
                setattr(encoder, name, 1)
    return config


def _rows(config: Any, kinds: list[str], *, autocast: bool) -> Iterator[Row]:
    key = {"autocast": autocast, "per_rank": False}
    with as_on_gpu(), with_kernels(), FakeTensorMode(allow_non_fake_inputs=True):
        # Trained weights are fp32 under autocast; DeepSpeed and FSDP2 compute with bf16 weights.
        model = _build(config, kinds, torch.float32 if autocast else torch.bfloat16)
        yield from (key | {"lora": False} | row for row in _rows_by_mask(model, kinds, autocast=autocast))
        try:  # peft's refusal is no reason to leave out a full fine-tune
            smaller, larger = (_with_adapters(config, kinds, rank, autocast=autocast) for rank in RANKS)
        except ValueError:
            return
        rows = list(_rows_by_mask(smaller, kinds, autocast=autocast))
        yield from (key | {"lora": True} | row for row in rows)
        row, ranks = _count(larger, kinds, "none", autocast=autocast), RANKS[1] - RANKS[0]
        slope = {
            part: [round((more - less) / ranks) for less, more in zip(rows[0][part], row[part], strict=True)]
            for part in COUNTED_PARTS
        }
        yield {"autocast": autocast, "per_rank": True, "lora": True, "mask": "none"} | slope | {"logit_bytes": 0}


def _flash(_module: Any, query: Any, key: Any, value: Any, _mask: Any, scaling: Any = None, **_: Any) -> Any:
    """Attention that saves no scores, in the place of a kernel; its window and sinks save nothing either."""
    how = {"is_causal": True, "scale": scaling, "enable_gqa": query.shape[1] > key.shape[1]}
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, **how).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register("flash", _flash)
ALL_MASK_ATTENTION_FUNCTIONS.register("flash", lambda *_, **__: None)


def _rows_by_mask(model: Any, kinds: list[str], *, autocast: bool) -> Iterator[Row]:
    """The backward peak is counted without a mask only: a mask does not change it."""
    unmasked = _count(model, kinds, "none", autocast=autocast)
    yield {"mask": "none"} | unmasked
    has_window = getattr(model.config.get_text_config(), "sliding_window", None)
    for mask in ("padding", "window") if has_window else ("padding",):
        row = _count(model, kinds, mask, autocast=autocast, peaks=False)
        yield {"mask": mask} | row | {"backward": unmasked["backward"]}
    flags = model_class_flags(model.config.model_type) or {}
    by_name = flags.get("_supports_attention_backend") and flags.get("_supports_flash_attn")
    if model.config._attn_implementation == "eager" and by_name:
        model.config._attn_implementation = "flash"
        yield {"mask": "flash"} | _count(model, kinds, "none", autocast=autocast)


def _build(config: Any, kinds: list[str], dtype: torch.dtype) -> Any:
    config = copy.deepcopy(config)
    with no_init_weights():
        model = _without_repeated_layers(model_class(config).from_config(config, dtype=dtype), kinds)
    model.config.use_cache = False
    return model.train()


def _with_adapters(config: Any, kinds: list[str], rank: int, *, autocast: bool) -> Any:
    """A frozen model in bf16; its adapters are in fp32 under autocast."""
    base = _build(config, kinds, torch.bfloat16)
    model = get_peft_model(base, _lora(rank, refused_modules(base)), autocast_adapter_dtype=autocast)
    share_inputs(model)
    return model.train()


def _count(model: Any, kinds: list[str], mask: str, *, autocast: bool, peaks: bool = True) -> Row:
    """Coefficients of each of `COUNTED_PARTS`; without `peaks`, `backward` is zero."""
    progress(f"activations, {'bf16 copies of fp32 weights' if autocast else 'bf16 weights'}, mask: {mask}")
    names = list(decoder_layers(model))
    run = (kinds[number] for number in _numbers_to_run(model.config, kinds))
    name_of_kind = dict(zip(run, names, strict=False))  # the last layer of each kind
    measure_peaks = set(name_of_kind.values()) if peaks else set()
    forward = functools.partial(_forward, model, mask=mask, peaks_of=measure_peaks, autocast=autocast)
    forwards = [forward(length=length) for length in LENGTHS[:2]]
    if any(_fit_two(*(sizes[part] for sizes in forwards)) is None for part in set().union(*forwards)):
        forwards.append(forward(length=LENGTHS[2]))
    saved = {kind: _fit([sizes[name] for sizes in forwards]) for kind, name in name_of_kind.items()}
    highest = saved
    if peaks:
        highest = {kind: _fit([sizes[name, PEAK] for sizes in forwards]) for kind, name in name_of_kind.items()}
    # The first layer saves what is computed once for all layers; with adapters, only layers after it receive an input
    # that needs a gradient.
    all_layers = [_fit([sizes[names[0]] for sizes in forwards]), *(saved[kind] for kind in kinds[1:])]
    largest = max(dict.fromkeys(kinds[1:] or kinds), key=lambda kind: highest[kind][1] + highest[kind][2] * LENGTHS[-1])
    return {
        "layers": [sum(parts) for parts in zip(*all_layers, strict=True)],
        "largest_layer": saved[largest],
        "backward": [peak - own for peak, own in zip(highest[largest], saved[largest], strict=True)],
        "outer": _fit([sizes[OUTSIDE] for sizes in forwards]),
        "logit_bytes": sum(forwards[0][LOGITS].values())
        // (ROWS * LENGTHS[0] * model.config.get_text_config().vocab_size),
    }


def _fit(passes: list[Storages]) -> Coefficients:
    """The coefficients from two passes, or the parabola through the sums of three."""
    if len(passes) == 2 and (coefficients := _fit_two(*passes)) is not None:
        return coefficients
    sizes = [sum(storages.values()) for storages in passes]
    square = (sizes[2] - 2 * sizes[1] + sizes[0]) / 2
    line = sizes[1] - sizes[0] - 3 * square
    return _coefficients(sizes[0] - line - square, line, square)


def _fit_two(short: Storages, long: Storages) -> Coefficients | None:
    """The coefficients from the growth of each storage in rows twice as long; None where one grows in another way."""
    if short.keys() != long.keys():
        return None
    by_growth: dict[float, int] = {1: 0, 2: 0, 4: 0}
    for number, size in short.items():
        growth = long[number] / size if size else 1
        if growth not in by_growth:
            return None
        by_growth[growth] += size
    return _coefficients(*by_growth.values())


def _coefficients(constant: float, line: float, square: float) -> Coefficients:
    first, tokens = LENGTHS[0], ROWS * LENGTHS[0]
    return [round(constant), round(line / tokens), square / (tokens * first)]


def _forward(model: Any, length: int, mask: str, *, peaks_of: set[str], autocast: bool) -> dict[Any, Storages]:
    """What one forward saves, by the layer that is running, and what is alive at the backward peaks of some layers."""
    inputs: dict[str, tuple[Any, Any]] = {}
    running, alive = [OUTSIDE], []
    sizes: dict[Any, Storages] = defaultdict(dict)
    seen = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    # tensors whose last dimension this is hold logits
    vocab_size, layers = model.config.get_text_config().vocab_size, decoder_layers(model)

    def enter(name: str, args: Any, kwargs: Any) -> None:
        inputs[name] = (args, kwargs)
        running.append(name)

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            alive.append(tensor)  # a freed storage's address would be used again
            is_logits = tensor.dim() == 3 and tensor.shape[-1] == vocab_size
            sizes[LOGITS if is_logits else running[-1]][len(alive)] = storage.nbytes()
        return tensor

    hooks = []
    for name, layer in layers.items():
        entering = functools.partial(lambda name, _, args, kwargs: enter(name, args, kwargs), name)
        hooks += [layer.register_forward_pre_hook(entering, with_kwargs=True)]
        hooks += [layer.register_forward_hook(lambda *_: running.pop() and None)]
    compute = torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), compute:
        model(**_batch(model, length, mask))
    for hook in hooks:
        hook.remove()
    for name in peaks_of & inputs.keys():  # without images, Mllama skips its layers of cross-attention
        sizes[name, PEAK] = _layer_peak(layers[name], *inputs[name], autocast=autocast)
    return sizes


def _layer_peak(layer: Any, args: Any, kwargs: Any, *, autocast: bool) -> Storages:
    """Storages, without its inputs, at the peak of one layer's forward and backward, as with checkpointing."""
    args, kwargs = tree_map(_as_input, (args, kwargs))
    memory = LiveMemory(vocab_size=0)
    with memory:
        memory.exclude(t for t in (*layer.parameters(), *tree_leaves((args, kwargs))) if isinstance(t, torch.Tensor))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            output = next(t for t in tree_leaves(layer(*args, **kwargs)) if isinstance(t, torch.Tensor))
        with memory.phase(PEAK):
            output.backward(torch.empty_like(output))
    layer.zero_grad()
    return {number: size for number, (_, size) in memory.peaks[PEAK].storages.items()}


def _as_input(value: Any) -> Any:
    """A leaf that needs a gradient where the value did, as the residual stream does."""
    if isinstance(value, Mapping):  # `tree_map` does not know its class: keys and values that Gemma 4's layers share
        return {key: tree_map(_as_input, each) for key, each in value.items()}
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _batch(model: Any, length: int, mask: str) -> dict[str, Any]:
    """Inputs with explicit positions: without them, a model would read the values of the mask."""
    config = model.config.get_text_config()
    if getattr(config, "sliding_window", None):
        config.sliding_window = WINDOW if mask == "window" else NO_WINDOW
    tokens = torch.zeros(ROWS, length, dtype=torch.int64)
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens) if mask == "padding" else None,
        "position_ids": torch.arange(length).expand(ROWS, length),
        "use_cache": False,
    } | ({"token_type_ids": tokens} if "token_type_ids" in inspect.signature(model.forward).parameters else {})


if __name__ == "__main__":
    main(sys.argv[1:])

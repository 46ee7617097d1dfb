"""What a model's forward keeps for its backward, counted on fake tensors: any architecture, no weights, no memory.

    >>> count_kept(model_on_the_meta_device)[0]["layers"]
    [0, 1739136, 0.0]

Each storage that autograd saves counts once, for the layer that saves it first. Rows of three lengths tell what is
there whatever the batch, what each token adds, and what each position of its row adds to each token. Layers of one
kind keep the same, but for the first, so only as many are run as it takes to meet each kind.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from toolkit.train.rehearsal.live_memory import LiveMemory
from toolkit.train.rehearsal.patches import as_a_gpu_keeps
from toolkit.train.shapes import decoder_layers

ROWS = 2
LENGTHS = (1024, 2048, 3072)  # a job's own, since another moment is the highest where rows are short
WINDOW = 32  # every length is past it
RANKS = (8, 16)
OUTSIDE, LOGITS, PEAK = "outside", "logits", "peak"
PARTS = ("layers", "largest", "working", "outer")
Sizes = Counter[Any]
Fit = dict[str, Any]


def count_kept(whole: Any) -> list[dict[str, Any]]:
    """One row a kind of compute, of training and of mask, as `toolkit.models.kept` reads them."""
    kinds = layer_kinds(whole)
    config = shortened(whole.config, kinds)
    return [row for autocast in (False, True) for row in _of_compute(config, kinds, autocast=autocast)]


def layer_kinds(model: Any) -> list[str]:
    """Of each layer, its tensors and what its configuration calls it."""
    layers = list(decoder_layers(model).values())
    types = getattr(model.config.get_text_config(), "layer_types", None) or [""] * len(layers)
    tensors = (str([(name, tuple(p.shape)) for name, p in layer.named_parameters()]) for layer in layers)
    return [f"{kind} {own}" for kind, own in zip(types, tensors, strict=False)]


def shortened(config: Any, kinds: list[str]) -> Any:
    """The same with as few layers as hold each kind after the first layer."""
    needed = max((kinds.index(kind, 1) + 1 for kind in set(kinds[1:])), default=1)
    config = copy.deepcopy(config)
    text = config.get_text_config()
    if getattr(text, "num_hidden_layers", None) == len(kinds):
        for name, value in list(vars(text).items()):
            if isinstance(value, list) and len(value) == len(kinds):  # what each layer is
                setattr(text, name, value[:needed])
        text.num_hidden_layers = needed
    return config


def _of_compute(config: Any, kinds: list[str], *, autocast: bool) -> Iterator[dict[str, Any]]:
    named = {"autocast": autocast, "per_rank": False}
    with as_a_gpu_keeps(), FakeTensorMode(allow_non_fake_inputs=True):
        model = _model(config, autocast=autocast)
        yield from (named | {"lora": False} | row for row in _by_mask(model, kinds, autocast=autocast))
        fewer, more = (_with_adapters(_model(config, autocast=autocast), rank) for rank in RANKS)
        rows = list(_by_mask(fewer, kinds, autocast=autocast))
        yield from (named | {"lora": True} | row for row in rows)
        slope = _slope(rows[0], _fitted(more, kinds, "none", autocast=autocast))
        yield named | {"lora": True, "mask": "none", "per_rank": True} | slope


def _by_mask(model: Any, kinds: list[str], *, autocast: bool) -> Iterator[dict[str, Any]]:
    """Without a mask first; what a layer needs beside while it goes backward is the same with one."""
    first = _fitted(model, kinds, "none", autocast=autocast)
    yield {"mask": "none"} | first
    for mask in _masks(model)[1:]:
        row = _fitted(model, kinds, mask, autocast=autocast, peaks=False)
        yield {"mask": mask} | row | {"working": first["working"]}


def _slope(fewer: Fit, more: Fit) -> Fit:
    """What one more rank adds."""
    apart = RANKS[1] - RANKS[0]
    return {part: [round((b - a) / apart) for a, b in zip(fewer[part], more[part], strict=True)] for part in PARTS}


def _model(config: Any, *, autocast: bool) -> Any:
    """fp32 under autocast; bf16 as DeepSpeed and FSDP2 compute with."""
    config = copy.deepcopy(config)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if autocast else torch.bfloat16)
    model.config.use_cache = False
    return model.train()


def _with_adapters(model: Any, rank: int) -> Any:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(
        model, LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM"), autocast_adapter_dtype=False
    )
    return adapted.train()


def _masks(model: Any) -> list[str]:
    """A window is one if the configuration has it in use."""
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    return ["none", "padding", *(["window"] if window else [])]


def _fitted(model: Any, kinds: list[str], mask: str, *, autocast: bool, peaks: bool = True) -> Fit:
    """Each part as bytes whatever the batch, a token, and a token and position.

    `layers` and the `largest` of them, `outer`, and `working`: what the largest needs beside while it goes backward.
    """
    layers = list(decoder_layers(model))
    named = dict(zip(kinds, layers, strict=False))  # the last of each kind
    peaks_of = named.values() if peaks else ()
    forwards = [_forward(model, length, mask, peaks_of=peaks_of, autocast=autocast) for length in LENGTHS]
    kept = {kind: _fit([sizes[name] for sizes in forwards]) for kind, name in named.items()}
    highest = {kind: _fit([sizes[name, PEAK] for sizes in forwards]) for kind, name in named.items()} if peaks else kept
    # What is computed once for all layers counts for the first, and above it gradients flow to frozen layers' inputs.
    all_layers = [_fit([sizes[layers[0]] for sizes in forwards]), *(kept[kind] for kind in kinds[1:])]
    largest = max(set(kinds[1:] or kinds), key=lambda kind: _of_length(highest[kind]))
    return {
        "layers": [sum(parts) for parts in zip(*all_layers, strict=True)],
        "largest": kept[largest],
        "working": [peak - own for peak, own in zip(highest[largest], kept[largest], strict=True)],
        "outer": _fit([sizes[OUTSIDE] for sizes in forwards]),
        "logit_bytes": forwards[0][LOGITS] // (ROWS * LENGTHS[0] * vocabulary_of(model)),
    }


def _of_length(parts: list[Any]) -> float:
    return float(parts[1] + parts[2] * LENGTHS[-1])


def vocabulary_of(model: Any) -> int:
    """Its size: what is as wide holds logits."""
    return int(model.config.get_text_config().vocab_size)


def _fit(sizes: list[int]) -> list[Any]:
    """The parabola through three lengths, of which each is a multiple of the first."""
    step, tokens = LENGTHS[0], ROWS * LENGTHS[0]
    square = (sizes[2] - 2 * sizes[1] + sizes[0]) / 2
    line = sizes[1] - sizes[0] - 3 * square
    return [round(sizes[0] - line - square), round(line / tokens), square / (tokens * step)]


def _forward(model: Any, length: int, mask: str, *, peaks_of: Iterable[str], autocast: bool) -> Sizes:
    """Bytes that one forward saves, by the layer that is under way, and some layers' peaks; there is no loss yet."""
    calls: dict[str, tuple[Any, Any]] = {}
    place, sizes, kept = [OUTSIDE], Counter[Any](), []
    seen = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    vocabulary, layers = vocabulary_of(model), decoder_layers(model)

    def enter(name: str, args: Any, kwargs: Any) -> None:
        calls[name] = (args, kwargs)
        place.append(name)

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            kept.append(tensor)
            wide = tensor.dim() == 3 and tensor.shape[-1] == vocabulary
            sizes[LOGITS if wide else place[-1]] += storage.nbytes()
        return tensor

    hooks = []
    for name, layer in layers.items():
        entering = functools.partial(lambda name, _, args, kwargs: enter(name, args, kwargs), name)
        hooks += [layer.register_forward_pre_hook(entering, with_kwargs=True)]
        hooks += [layer.register_forward_hook(lambda *_: place.pop() and None)]
    compute = torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), compute:
        model(**_batch(model, length, mask))
    for hook in hooks:
        hook.remove()
    for name in peaks_of:
        sizes[name, PEAK] = _layer_peak(layers[name], *calls[name], autocast=autocast)
    return sizes


def _layer_peak(layer: Any, args: Any, kwargs: Any, *, autocast: bool) -> int:
    """Highest bytes beside its inputs while a layer goes forward and backward, as one that is recomputed does."""
    args, kwargs = tree_map(_as_input, (args, kwargs))
    memory = LiveMemory(wide=0)
    with memory:
        memory.known(t for t in (*layer.parameters(), *tree_leaves((args, kwargs))) if isinstance(t, torch.Tensor))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            output = next(t for t in tree_leaves(layer(*args, **kwargs)) if isinstance(t, torch.Tensor))
        with memory.phase(PEAK):
            output.backward(torch.empty_like(output))
    layer.zero_grad()
    return memory.peaks[PEAK].total_bytes


def _as_input(value: Any) -> Any:
    """A leaf that wants a gradient, as the residual stream is one."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _batch(model: Any, length: int, mask: str) -> dict[str, Any]:
    """Positions are given: without them a model looks into the mask's values."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if window:
        config.sliding_window = WINDOW if mask == "window" else 1 << 20
    tokens = torch.zeros(ROWS, length, dtype=torch.int64)
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens) if mask == "padding" else None,
        "position_ids": torch.arange(length).expand(ROWS, length),
        "use_cache": False,
    }

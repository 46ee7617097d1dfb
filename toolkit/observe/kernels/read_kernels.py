"""Read which kernels ran: from the autograd graph of the first loss, live layers, and the first backward.

What a forward dispatched has a node of its own in its loss's graph: nothing is patched, and nothing is computed again.
Compiled layers and reentrant checkpoints hide theirs.
"""

import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import ModuleList
from transformers.modeling_layers import GradientCheckpointingLayer

from toolkit.engines import tensors
from toolkit.engines.live_engine import live_engine
from toolkit.models.attention import missing_attention_package
from toolkit.observe.verify.read_rank import ForwardDetector
from toolkit.record.kernel_table import KernelRow, row
from toolkit.record.reading import RankReading
from toolkit.units import gib

# Node -> what computed the attention. SDPA without a kernel has a safe softmax, eager attention a softmax of 4 sizes.
ATTENTION = {
    **{"ScaledDotProductFlash": "flash", "ScaledDotProductEfficient": "efficient", "ScaledDotProductCudnn": "cudnn"},
    **{"FlashAttn": "flash", "VarlenAttn": "flash", "FlexAttention": "flex", "SafeSoftmax": "math", "Softmax": "eager"},
}
LOSSES = {"LigerFusedLinear": "fused", "_ChunkedCrossEntropy": "chunked", "ChunkedLogProb": "chunked"}
LARGEST_GRAPH = 300_000  # nodes; a loop over tokens has many
PACKAGES = ("liger_kernel", "fla", "mamba_ssm", "causal_conv1d", "flash_attn", "xformers", "unsloth", "apex")
HUB_FOLDERS = ("kernels-community", "kernels--")  # where `kernels` keeps what it has fetched
# The plan's terms (a test compares them): bytes saved per head and pair of positions in eager attention, per full
# logit, per token and hidden size of a layer; seconds to launch an operation; the share of traffic that Liger leaves.
EAGER_BYTES_PER_PAIR, LOGIT_BYTES, LAYER_BYTES, HOST_SECONDS, LIGER_SHARE = 6, 12, 34, 15e-6, 0.45
PASSES, RECOMPUTED_PASSES = 3, 4
UPDATE_OPERATIONS = 12  # of AdamW per tensor (torch, `optim/adamw.py`, `_single_tensor_adamw`)
DISTRIBUTIONS = {"fla": "flash-linear-attention", "mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d"}
MIXER_COSTS = "2.5 times the step in transformers#48718"  # 1.22 s for 0.49 s
FLASH_TAKES = "flash takes heads and values of one size up to 256, half precision, no mask, and on a CPU no dropout"


class LossGraph:
    """Nodes of a loss's graph by name; of attention and the loss shapes and dtypes too.

    What a node has saved is read only where no checkpoint would compute it again.
    """

    def __init__(self, loss: Any, *, reads_saved: bool = True) -> None:
        self.nodes, self.attention, self.losses = Counter[str](), Counter[str](), Counter[Any]()
        self.shape, self.dtype, self.mask = (0, 0, 0, 0), "", ""
        """Rows, heads, tokens, and head size (or tokens again) of the last attention."""
        loss = loss[0] if isinstance(loss, tuple) else loss
        left = [loss.grad_fn] if isinstance(loss, torch.Tensor) and loss.grad_fn is not None else []
        seen = set(left)
        while left and len(seen) < LARGEST_GRAPH:
            self._add(node := left.pop(), reads_saved=reads_saved)
            more = {each for each, _ in node.next_functions if each is not None} - seen
            seen |= more
            left += more

    def _add(self, node: Any, *, reads_saved: bool) -> None:
        name = node.name()
        self.nodes[name] += 1
        backend = next((ran for start, ran in ATTENTION.items() if name.startswith(start)), None)
        if backend is None and not name.startswith("LogSoftmax"):
            return
        made = node._input_metadata[0]
        shape, dtype = tuple(map(int, made.shape)), tensors.dtype_name(made.dtype)
        if backend is None:
            self.losses[shape, dtype] += 1
        elif len(shape) == 4 or backend == "flash":  # a router has a softmax too; packed rows may have three dimensions
            self.attention[backend] += 1
            self.shape, self.dtype = shape if len(shape) == 4 else self.shape, dtype
            for saved in {"_saved_attn_mask", "_saved_attn_bias"} & {*dir(node)} if reads_saved else ():
                self.mask = self.mask or ("no mask" if getattr(node, saved) is None else "with a mask")

    def has(self, part: str) -> bool:
        """Return True if the name of a node has this part."""
        return any(part in name for name in self.nodes)


def kernel_rows(
    graph: LossGraph, trainer: Any, plain: Any, reading: RankReading, forwards: ForwardDetector, *, own_optimizer: bool
) -> Iterator[KernelRow]:
    """Yield the rows of one rank after its first step; `own_optimizer` is true where the script makes it."""
    model, args = tensors.without_adapters(plain), trainer.args
    config = getattr(model, "config", None)
    width = int(getattr(config, "hidden_size", None) or 1)
    yield from _attention(graph, model, getattr(config, "_attn_implementation", None))
    yield from _experts(graph, model, getattr(config, "_experts_implementation", None))
    yield from _mixers(model)
    yield from _replaced_layers(graph, plain, args)
    if path := next((path for part, path in LOSSES.items() if graph.has(part)), None):
        yield row("loss_path", None, path)
    elif graph.losses:
        (*rows, classes), dtype = max(graph.losses, key=lambda each: each[0][-1])
        tokens = torch.Size(rows).numel()
        costs = f"{gib(LOGIT_BYTES * tokens * classes)} per micro-batch"
        yield row("loss_path", None, "full", "", f"{tokens} x {classes} {dtype}", costs)
    yield from _blocks(graph, plain, forwards, width, args)
    asked = "torch_compile" if getattr(args, "torch_compile", False) else None
    if asked or reading.torch_compile:
        breaks, ran = reading.graph_breaks, f"{reading.compiled_modules} modules" if reading.torch_compile else ""
        repair = f"{breaks} graph breaks: `TORCH_LOGS=graph_breaks` names each line" if breaks else ""
        yield row("compiled", asked, ran, repair=repair)
    yield from _optimizer(trainer, own=own_optimizer)


def _attention(graph: LossGraph, model: Any, asked: str | None) -> Iterator[KernelRow]:
    named, slow = asked or "", graph.attention["eager"] + graph.attention["math"]
    wanted = "flex" if "flex" in named else "flash" if "flash" in named or "/" in named else ""
    differs = wanted if wanted not in graph.attention else ""  # SDPA is what nobody names
    repair = FLASH_TAKES if slow or (graph.attention["efficient"] and graph.dtype == "float32") else ""
    if graph.attention["eager"]:
        flash = ["flash_attention_2"] if getattr(model, "_supports_flash_attn", False) else []
        flash = [*(getattr(model, "_compatible_flash_implementations", None) or flash)]
        names = ["sdpa"] if getattr(model, "_supports_sdpa", False) else flash
        repair = f"attn_implementation={names[0]!r}" if names else ""
    if package := missing_attention_package(asked) if differs else None:
        repair = f"pip install {package}"
    rows, heads, tokens, size = graph.shape
    costs = f"{gib(EAGER_BYTES_PER_PAIR * rows * heads * tokens**2 * slow)} of scores per micro-batch" if slow else ""
    detail = ", ".join(filter(None, (graph.dtype, f"heads of {size}" if size and not slow else "", graph.mask)))
    if graph.attention:
        yield row("attention", asked, "+".join(sorted(graph.attention)), differs, detail, costs, repair)


def _experts(graph: LossGraph, model: Any, asked: str | None) -> Iterator[KernelRow]:
    layers = [each for name, each in model.named_modules() if name.endswith(".experts")]
    lists, fallback = [each for each in layers if isinstance(each, ModuleList)], graph.has("grouped_mm_fallback")
    loop = "loop in torch" if fallback else "loop" if lists or asked == "eager" else ""
    number = max([len(each) if each in lists else getattr(each, "num_experts", 1) for each in layers], default=1)
    costs = f"{3 * int(number) * len(layers) * PASSES * HOST_SECONDS:.1g} s of launches" if loop else ""
    repair = "experts in one tensor, as transformers 5 has them" if lists else "experts_implementation='grouped_mm'"
    repair = "torch 2.9, and a GPU of compute capability 8.0" if fallback else repair
    if layers and (ran := loop or ("grouped_mm" if graph.has("GroupedMm") else asked)):
        yield row("experts", asked, ran, costs=costs, repair=repair if loop else "")


def _namespaces(model: Any) -> Iterator[dict[str, Any]]:
    """Yield the names in the modules of transformers that a model's classes are from."""
    homes = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    yield from (vars(sys.modules[home]) for home in sorted(homes) if home.startswith("transformers.models."))


def _mixers(model: Any) -> Iterator[KernelRow]:
    """Yield linear attention, state spaces and convolutions: transformers takes a package's function, or its own."""
    every = [(name, value) for names in _namespaces(model) for name, value in names.items()]
    kept = {n: inspect.getclosurevars(f).nonlocals for n, f in every if inspect.isfunction(f) and f.__closure__}
    packages = {n: (v["package"], v["is_new_implementation"]) for n, v in kept.items() if "is_new_implementation" in v}
    packages |= {name: ("mamba_ssm", value) for name, value in every if name == "is_fast_path_available"}
    slow = {name: package for name, (package, is_kernel) in packages.items() if not is_kernel}
    install = " ".join(sorted({DISTRIBUTIONS.get(package, package) for package in slow.values()}))
    if packages:
        costs = MIXER_COSTS if {*slow.values()} - {"causal_conv1d"} else ""
        repair = f"pip install {install} (on a GPU)" if slow else ""
        yield row("mixers", None, "torch loop" if slow else "kernel", "", ", ".join(sorted(slow)), costs, repair)


def _home(module: Any) -> str | None:
    """Return the package of kernels, or `hub`, whose `forward` a module runs; None for its own."""
    forward = inspect.unwrap(getattr(module.forward, "__func__", module.forward))
    if any(folder in getattr(getattr(forward, "__code__", None), "co_filename", "") for folder in HUB_FOLDERS):
        return "hub"
    modules = (getattr(forward, "__module__", None) or "", *(kind.__module__ for kind in type(module).__mro__))
    return next((home for each in modules if (home := each.partition(".")[0]) in PACKAGES), None)


def _replaced_layers(graph: LossGraph, model: Any, args: Any) -> Iterator[KernelRow]:
    """Yield Liger's row and that of the hub's kernels: whose `forward` the layers run."""
    layers = Counter((_home(module), type(module).__name__) for module in model.modules())
    # `apply_liger_kernel_to_llama()` replaces classes in the module of the model, which one made before does not have
    classes = [value for names in _namespaces(model) for value in names.values() if isinstance(value, type)]
    patched = "patched classes" if any(each.__module__.startswith("liger_kernel") for each in classes) else None
    liger = "use_liger_kernel" if getattr(args, "use_liger_kernel", False) else patched
    hub = "use_kernels" if any(getattr(each, "_use_kernels", False) is True for each in model.modules()) else None
    costs = f"{1 / LIGER_SHARE:.1f} times the traffic of norms and MLPs, and full logits"
    for name, home, asked, words in (
        ("liger", "liger_kernel", liger, (costs, "patch before the model is made, a model that Liger knows")),
        ("hub_kernels", "hub", hub, ("", "a device and layers that the hub has kernels for, or no use_kernels")),
    ):
        whose = {kind: count for (each, kind), count in sorted(layers.items(), key=str) if each == home}
        ran = f"{sum(whose.values())} layers" if whose else "functions" * (name == "liger" and graph.has("Liger"))
        if asked or ran:
            detail = ", ".join(f"{count} {kind}" for kind, count in whose.items())
            yield row(name, asked, ran, "", detail, *(() if ran else words))


def _blocks(graph: LossGraph, model: Any, forwards: ForwardDetector, width: int, args: Any) -> Iterator[KernelRow]:
    """Yield the share of blocks that were recomputed, of those whose output had a gradient."""
    asked = any(getattr(args, f"{kind}_checkpointing", None) for kind in ("activation", "gradient"))
    blocks = [(n, m) for n, m in model.named_modules() if isinstance(m, GradientCheckpointingLayer)]
    reached, left = [(n, m) for n, m in blocks if id(m) in forwards.reached], forwards.reached - forwards.recomputed
    wanted = [(n, m) for n, m in reached if asked or m.gradient_checkpointing]
    missing = ", ".join([tensors.clean_name(name) for name, module in wanted if id(module) in left][:3])
    if forwards.recomputes is None or not reached or (not wanted and len(left) == len(reached)):
        return
    kept = gib(LAYER_BYTES * len(left) * graph.shape[0] * graph.shape[2] * width)
    costs = f"{kept} of activations" if missing else f"{RECOMPUTED_PASSES / PASSES - 1:.0%} more compute"
    repair = f"enable checkpointing after all changes to the layers: not {missing}" if missing else ""
    words = "all" if asked else f"{len(wanted)} flagged" if wanted else None
    ran = f"{len(reached) - len(left)} of {len(reached)}" if left else "all"
    yield row("recomputed_blocks", words, ran, missing, "", costs, repair)


def _optimizer(trainer: Any, *, own: bool) -> Iterator[KernelRow]:
    """Yield the path of torch's optimizer by its flags, by which it chooses in each step."""
    live = live_engine(trainer.model_wrapped)
    inner = tensors.innermost_optimizer(live.optimizer(trainer))
    groups, ran = getattr(inner, "param_groups", None) or [{}], type(inner).__module__.partition(".")[0]
    off_cpu, launches = trainer.args.device.type != "cpu", UPDATE_OPERATIONS * sum(len(g["params"]) for g in groups)
    named = str(getattr(getattr(trainer.args, "optim", ""), "value", ""))
    asked = "fused" if named.endswith("torch_fused") and not own and not live.reduces_itself else None
    if ran == "torch":  # `foreach` is None by default, which means a GPU's path
        foreach = all(g.get("foreach") or (off_cpu and g.get("foreach", False) is None) for g in groups)
        ran = "fused" if all(g.get("fused") for g in groups) else "foreach" if foreach else "one by one"
    differs = "not fused" if asked and ran in ("foreach", "one by one") else ""
    costs = f"{launches * HOST_SECONDS:.1g} s of launches per step"
    words = (costs, "optim='adamw_torch_fused', or fused=True") if differs or (ran == "one by one" and off_cpu) else ()
    yield row("optimizer_path", asked, ran, differs, type(inner).__name__, *words)

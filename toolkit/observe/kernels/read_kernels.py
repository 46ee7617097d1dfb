"""Read which kernels ran from the autograd graph of the first loss, from live layers, and from the first backward.

What a forward dispatched has a node of its own in its loss's graph: nothing is patched, and nothing is computed again.
Compiled layers and reentrant checkpoints hide theirs.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import ModuleList
from transformers.modeling_layers import GradientCheckpointingLayer

from toolkit.models.attention import missing_attention_package
from toolkit.observe.attest import tensors
from toolkit.observe.attest.differences import Values
from toolkit.observe.attest.read_rank import ForwardDetector
from toolkit.plan.logits import logits_bytes
from toolkit.plan.step_parts import CALIBRATION, PASSES, RECOMPUTED_PASSES, SPLIT_BYTES, WHOLE_BYTES
from toolkit.record.kernel_table import KernelRow, row
from toolkit.units import gib

# Node -> what computed the attention. SDPA without a kernel has a safe softmax, eager attention another of four
# dimensions.
ATTENTION = {
    **{"ScaledDotProductFlash": "flash", "ScaledDotProductEfficient": "efficient", "ScaledDotProductCudnn": "cudnn"},
    **{"FlashAttn": "flash", "VarlenAttn": "flash", "FlexAttention": "flex", "SafeSoftmax": "math", "Softmax": "eager"},
}
LOSSES = {"LigerFusedLinear": "fused", "_ChunkedCrossEntropy": "chunked", "_ChunkedLogProb": "chunked"}
LARGEST_GRAPH = 300_000  # nodes; a loop over tokens has many
PACKAGES = ("liger_kernel", "fla", "mamba_ssm", "causal_conv1d", "flash_attn", "xformers", "unsloth", "apex")
HUB_FOLDERS = ("kernels-community", "kernels--")  # where `kernels` keeps what it has fetched
EAGER_BYTES_PER_PAIR = 6  # saved per head and pair of positions (`toolkit.models.activations`)
UPDATE_OPERATIONS = 12  # of AdamW per tensor (torch, `optim/adamw.py`, `_single_tensor_adamw`)
DISTRIBUTIONS = {"fla": "flash-linear-attention", "mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d"}
MIXER_COSTS = "2.5 times the step in transformers#48718"  # 1.22 s for 0.49 s
FLASH_TAKES = "flash takes heads and values of one size up to 256, half precision, no mask, and on a CPU no dropout"


class LossGraph:
    """Nodes of the first loss's graph, by name; of attention and the loss their shape and dtype too.

    What a node has saved is read only where no checkpoint would compute it again.
    """

    def __init__(self, loss: Any, *, reads_saved: bool) -> None:
        self.reads_saved, self.mask = reads_saved, ""
        self.nodes, self.attention, self.losses = Counter[str](), Counter[str](), Counter[Any]()
        self.shape: tuple[int, ...] = ()  # of the last attention: rows, heads, tokens, and size or tokens again
        self.dtype = ""
        loss = loss[0] if isinstance(loss, tuple) else loss
        left = [loss.grad_fn] if isinstance(loss, torch.Tensor) and loss.grad_fn is not None else []
        seen = set(left)
        while left and len(seen) < LARGEST_GRAPH:
            self._add(node := left.pop())
            more = {each for each, _ in node.next_functions if each is not None} - seen
            seen |= more
            left += more

    def _add(self, node: Any) -> None:
        name = node.name()
        self.nodes[name] += 1
        backend = next((ran for start, ran in ATTENTION.items() if name.startswith(start)), None)
        if backend is None and not name.startswith("LogSoftmax"):
            return
        made = node._input_metadata[0]
        shape, dtype = tuple(map(int, made.shape)), tensors.dtype_name(made.dtype)
        if backend is None:
            self.losses[shape, dtype] += 1
        elif backend != "eager" or len(shape) == 4:
            self.attention[backend] += 1
            self.shape, self.dtype = shape, dtype
            for name in ("_saved_attn_mask", "_saved_attn_bias") if self.reads_saved and not self.mask else ():
                if name in dir(node):
                    self.mask = "no mask" if getattr(node, name) is None else "with a mask"

    def has(self, part: str) -> bool:
        """Return True if the name of a node has this part."""
        return any(part in name for name in self.nodes)


def kernel_rows(
    graph: LossGraph, trainer: Any, plain: Any, reading: Values, *, forwards: ForwardDetector, own_optimizer: bool
) -> Iterator[KernelRow]:
    """Yield the rows of one rank after its first step; `own_optimizer` is true where the script makes it."""
    model, args = tensors.without_adapters(plain), trainer.args
    config = getattr(model, "config", None)
    width = int(getattr(config, "hidden_size", None) or 1)
    yield from _attention(graph, model, getattr(config, "_attn_implementation", None))
    yield from _experts(graph, model, getattr(config, "_experts_implementation", None))
    yield from _mixers(graph, model)
    yield from _replaced_layers(graph, plain, args)
    if path := next((path for start, path in LOSSES.items() if graph.has(start)), None):
        yield row("loss_path", None, path)
    elif graph.losses:
        (*rows, classes), dtype = max(graph.losses, key=lambda each: each[0][-1])
        tokens = int(torch.Size(rows).numel())
        size = max(logits_bytes(loss="full", tokens=tokens, vocab_size=classes, hidden_size=width))
        detail = f"{tokens} x {classes} {dtype}"
        yield row("loss_path", None, "full", "", detail, f"{gib(size)} per micro-batch" if classes > width else "")
    yield from _blocks(graph, plain, forwards, width, args)
    asked = "torch_compile" if getattr(args, "torch_compile", False) else None
    if asked or reading["torch_compile"]:
        ran = f"{reading['compiled_modules']} modules, {reading['graph_breaks']} breaks"
        repair = "`TORCH_LOGS=graph_breaks` names each line" if reading["graph_breaks"] else ""
        yield row("compiled", asked, ran if reading["torch_compile"] else "", "", "", "", repair)
    yield from _optimizer(trainer, own=own_optimizer)


def _attention(graph: LossGraph, model: Any, asked: str | None) -> Iterator[KernelRow]:
    named, slow = asked or "", graph.attention["eager"] + graph.attention["math"]
    wanted = "flex" if "flex" in named else "flash" if "flash" in named or "/" in named else None
    differs = wanted if wanted and wanted not in graph.attention else ""  # SDPA is what nobody names
    repair = FLASH_TAKES if slow or (graph.attention["efficient"] and graph.dtype == "float32") else ""
    if graph.attention["eager"]:
        flash = ["flash_attention_2"] if getattr(model, "_supports_flash_attn", False) else []
        flash = [*(getattr(model, "_compatible_flash_implementations", None) or flash)]
        names = ["sdpa"] if getattr(model, "_supports_sdpa", False) else flash
        repair = f"attn_implementation={names[0]!r}" if names else ""
    if package := missing_attention_package(asked) if differs else None:
        repair = f"pip install {package}"
    rows, heads, tokens, size = graph.shape if len(graph.shape) == 4 else (0, 0, 0, 0)
    scores = gib(EAGER_BYTES_PER_PAIR * rows * heads * tokens**2 * slow)
    detail = ", ".join(filter(None, [graph.dtype, f"heads of {size}" if size and not slow else "", graph.mask]))
    if graph.attention:
        ran, costs = "+".join(sorted(graph.attention)), f"{scores} of scores per micro-batch" if slow else ""
        yield row("attention", asked, ran, differs, detail, costs, repair)


def _experts(graph: LossGraph, model: Any, asked: str | None) -> Iterator[KernelRow]:
    layers = [each for name, each in model.named_modules() if name.endswith(".experts")]
    lists = [each for each in layers if isinstance(each, ModuleList)]
    fallback, is_grouped = graph.has("grouped_mm_fallback"), graph.has("GroupedMm")
    loop = "loop in torch" if fallback else "loop" if lists or asked == "eager" else ""
    number = max([len(each) if each in lists else getattr(each, "num_experts", 1) for each in layers], default=1)
    launches = 3 * int(number) * len(layers) * PASSES * CALIBRATION.host_seconds
    repair = "" if lists or not loop else "experts_implementation='grouped_mm'"
    repair = "torch 2.9, and a GPU of compute capability 8.0" if fallback else repair
    if layers and (ran := loop or ("grouped_mm" if is_grouped else asked)):
        yield row("experts", asked, ran, "", "", f"{launches:.1g} s of launches" if loop else "", repair)


def _namespaces(model: Any) -> Iterator[dict[str, Any]]:
    """Yield the names in the modules of transformers that a model's classes are from."""
    homes = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    yield from (vars(sys.modules[home]) for home in sorted(homes) if home.startswith("transformers.models."))


def _mixers(graph: LossGraph, model: Any) -> Iterator[KernelRow]:
    """Yield linear attention, state spaces and convolutions: transformers takes a package's function, or its own."""
    functions: dict[str, Any] = {}
    for names in _namespaces(model):
        for name, function in names.items():
            if "is_new_implementation" in getattr(getattr(function, "__code__", None), "co_freevars", ()):
                functions[name] = inspect.getclosurevars(function).nonlocals
    slow = [name for name, kept in functions.items() if not kept["is_new_implementation"]]
    slow += ["slow_forward" for names in _namespaces(model) if names.get("is_fast_path_available") is False]
    packages = {str(functions[name]["package"] if name in functions else "mamba_ssm") for name in slow}
    install = " ".join(sorted(DISTRIBUTIONS.get(package, package) for package in packages))
    if (functions or slow) and graph.nodes:
        costs = MIXER_COSTS if packages - {"causal_conv1d"} else ""
        repair = f"pip install {install} (on a GPU)" if slow else ""
        yield row("mixers", None, "torch loop" if slow else "kernel", "", ", ".join(slow[:3]), costs, repair)


def _home(module: Any) -> str | None:
    """Return the package of kernels, or `hub`, whose `forward` a module runs; None for its own."""
    forward = inspect.unwrap(getattr(module.forward, "__func__", module.forward))
    if any(folder in getattr(getattr(forward, "__code__", None), "co_filename", "") for folder in HUB_FOLDERS):
        return "hub"
    modules = (getattr(forward, "__module__", None) or "", *(kind.__module__ for kind in type(module).__mro__))
    return next((home for each in modules if (home := each.partition(".")[0]) in PACKAGES), None)


def _replaced_layers(graph: LossGraph, model: Any, args: Any) -> Iterator[KernelRow]:
    """Yield Liger's row and that of the hub's kernels: whose `forward` the layers run."""
    layers = [(home, type(module).__name__) for module in model.modules() if (home := _home(module))]
    # `apply_liger_kernel_to_llama()` replaces classes in the module of the model, which one made before does not have
    classes = [value for names in _namespaces(model) for value in names.values() if isinstance(value, type)]
    patched = any(value.__module__.startswith("liger_kernel") for value in classes)
    liger = "use_liger_kernel" if getattr(args, "use_liger_kernel", False) else "patched classes" if patched else None
    hub = "use_kernels" if any(getattr(each, "_use_kernels", False) is True for each in model.modules()) else None
    more = f"{1 / CALIBRATION.liger_share:.1f} times the traffic of norms and MLPs, and full logits"
    for name, home, asked, costs, repair in (
        ("liger", "liger_kernel", liger, more, "patch before the model is made, a model that Liger knows"),
        ("hub_kernels", "hub", hub, "", "a device and layers that the hub has kernels for, or no use_kernels"),
    ):
        whose = Counter(kind for each, kind in layers if each == home)
        detail = ", ".join(f"{count} {kind}" for kind, count in sorted(whose.items()))
        ran = f"{whose.total()} layers" if whose else "functions" if name == "liger" and graph.has("Liger") else ""
        if asked or ran:
            yield row(name, asked, ran, "", detail, *(("", "") if ran else (costs, repair)))


def _blocks(graph: LossGraph, model: Any, forwards: ForwardDetector, width: int, args: Any) -> Iterator[KernelRow]:
    """Yield the share of blocks that were recomputed, of those whose output had a gradient."""
    names = ("activation_checkpointing", "gradient_checkpointing")
    asked = any(getattr(args, name, None) for name in names)
    blocks = [(n, m) for n, m in model.named_modules() if isinstance(m, GradientCheckpointingLayer)]
    reached, left = [(n, m) for n, m in blocks if id(m) in forwards.reached], forwards.reached - forwards.recomputed
    wanted = reached if asked else [(n, m) for n, m in reached if m.gradient_checkpointing]
    missing = ", ".join([tensors.clean_name(name) for name, module in wanted if id(module) in left][:3])
    if forwards.recomputes is None or not reached or (not wanted and len(left) == len(reached)):
        return
    rows, _, tokens, *_ = graph.shape if len(graph.shape) == 4 else (0, 0, 0)
    kept = gib((WHOLE_BYTES + SPLIT_BYTES) * len(left) * rows * tokens * width)
    costs = f"{kept} of activations" if missing else f"{RECOMPUTED_PASSES / PASSES - 1:.0%} more compute"
    repair = f"enable checkpointing after all changes to the layers: not {missing}" if missing else ""
    words = "all" if asked else f"{len(wanted)} flagged" if wanted else None
    ran = f"{len(reached) - len(left)} of {len(reached)}" if left else "all"
    yield row("recomputed_blocks", words, ran, missing, "", costs, repair)


def _optimizer(trainer: Any, *, own: bool) -> Iterator[KernelRow]:
    """Yield the path of torch's optimizer by its flags, by which it chooses in each step."""
    wrapped = tensors.uncompiled(trainer.model_wrapped)
    by_deepspeed = hasattr(wrapped, "zero_optimization_stage")
    inner = tensors.innermost_optimizer(wrapped.optimizer if by_deepspeed else trainer.optimizer)
    groups, package = getattr(inner, "param_groups", None) or [{}], type(inner).__module__.partition(".")[0]
    on_gpu, number = trainer.args.device.type != "cpu", sum(len(group.get("params", ())) for group in groups)
    named = str(getattr(getattr(trainer.args, "optim", ""), "value", ""))
    asked = "fused" if named.endswith("_fused") and not own and not by_deepspeed else None
    ran = package
    if package == "torch":  # `foreach` is None by default, and then a GPU's path
        fused, foreach = (all(group.get(name) for group in groups) for name in ("fused", "foreach"))
        default = on_gpu and all(group.get("foreach", False) is None for group in groups)
        ran = "fused" if fused else "foreach" if foreach or default else "one by one"
    differs = "differs" if package == "torch" and asked not in (None, ran) else ""
    slow = differs or (ran == "one by one" and on_gpu)
    launches = f"{number * UPDATE_OPERATIONS * CALIBRATION.host_seconds:.1g} s of launches per step" if slow else ""
    repair = "optim='adamw_torch_fused', or fused=True" if slow else ""
    yield row("optimizer_path", asked, ran, differs, type(inner).__name__, launches, repair)

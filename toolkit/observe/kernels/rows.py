"""Rows of the table of fast paths: what the trace has seen, against what configuration and arguments ask for."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch.nn import ModuleList
from transformers.modeling_layers import GradientCheckpointingLayer

from toolkit.models.attention import missing_attention_package
from toolkit.observe.attest import tensors
from toolkit.observe.attest.differences import Values
from toolkit.observe.attest.read_rank import ForwardDetector
from toolkit.observe.kernels.trace import HUB_FOLDERS, PACKAGES, KernelTrace
from toolkit.plan.logits import logits_bytes
from toolkit.plan.step_parts import CALIBRATION, PASSES, RECOMPUTED_PASSES, SPLIT_BYTES, WHOLE_BYTES
from toolkit.record.kernel_table import KernelRow, row
from toolkit.units import gib

# Backward nodes in the autograd graph. Only SDPA without a kernel has a safe softmax.
NODES = {
    **{"ScaledDotProductFlash": "flash", "ScaledDotProductEfficient": "efficient", "ScaledDotProductCudnn": "cudnn"},
    **{"FlashAttn": "flash", "VarlenAttn": "flash", "FlexAttention": "flex", "SafeSoftmax": "math"},
}
EAGER_BYTES_PER_PAIR = 6  # saved per head and pair of positions (`toolkit.models.activations`)
LARGEST_FLASH_HEAD = 256
UPDATE_OPERATIONS = 12  # of AdamW per tensor (torch, `optim/adamw.py`, `_single_tensor_adamw`)
DISTRIBUTIONS = {"fla": "flash-linear-attention", "mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d"}
MIXER_COSTS = "2.5 times the step in transformers#48718"  # 1.22 s for 0.49 s


def kernel_rows(
    trace: KernelTrace, trainer: Any, plain: Any, reading: Values, *, forwards: ForwardDetector, own_optimizer: bool
) -> Iterator[KernelRow]:
    """Yield the rows of one rank after its first step; `own_optimizer` is true where the script makes it."""
    model, args = tensors.without_adapters(plain), trainer.args
    config = getattr(model, "config", None)
    yield from _attention(trace, model, getattr(config, "_attn_implementation", None))
    yield from _experts(trace, model, getattr(config, "_experts_implementation", None))
    loops, kernels = trace.paths("loops"), trace.paths("packages") & Counter(dict.fromkeys(DISTRIBUTIONS, sys.maxsize))
    if loops or kernels:
        costs, packages = (
            MIXER_COSTS if set(loops) - {"causal_conv1d"} else "",
            sorted(DISTRIBUTIONS[each] for each in loops),
        )
        repair = f"pip install {' '.join(packages)} (they need a GPU)" if loops else ""
        yield row("mixers", None, "torch loop" if loops else "+".join(kernels), "", "", costs, repair)
    yield from _replaced_layers(trace, plain, args)
    losses, path = trace.paths("losses"), "+".join(trace.paths("loss"))
    if losses or path:
        tokens, classes, dtype = max(losses, default=(0, 0, ""))
        width = int(getattr(config, "hidden_size", None) or 1)
        size = max(logits_bytes(loss="full", tokens=tokens, vocab_size=classes, hidden_size=width))
        detail, costs = (f"{tokens} x {classes} {dtype}", f"{gib(size)} per micro-batch") if not path else ("", "")
        yield row("loss_path", None, path or "full", "", detail, costs)
    yield from _blocks(trace, plain, forwards, int(getattr(config, "hidden_size", None) or 0), args)
    asked = "torch_compile" if getattr(args, "torch_compile", False) else None
    if asked or reading["torch_compile"]:
        ran = f"{reading['compiled_modules']} modules, {reading['graph_breaks']} breaks"
        repair = "`TORCH_LOGS=graph_breaks` names each line" if reading["graph_breaks"] else ""
        yield row("compiled", asked, ran if reading["torch_compile"] else "", "", "", "", repair)
    yield from _optimizer(trace, trainer, own=own_optimizer)


def _attention(trace: KernelTrace, model: Any, asked: str | None) -> Iterator[KernelRow]:
    paths, query = trace.paths("attention"), trace.query
    if (by_torch := paths.pop("sdpa", 0) + paths.pop("sdpa call", 0)) or not trace.traced:
        ran = Counter[str]()
        for node, count in trace.nodes.items():
            ran[next((name for start, name in NODES.items() if node.startswith(start)), "")] += count
        ran -= Counter({name: sys.maxsize for name in ("", *paths)})
        paths += ran or Counter({"sdpa": by_torch})  # frozen layers have no graph, nor reentrant checkpoints
    elif not paths and asked == "eager":
        paths["eager"] = trace.nodes["SoftmaxBackward0"]
    slow, faster = paths["eager"] + paths["math"], _faster_attention(model, paths, query)
    named = sorted(name for name, path in trace.paths("named") if _is_another(name, path))
    detail = costs = ""
    if query:
        detail = f"{query['dtype']}, heads of {query['size']}, {'with a' if query['mask'] else 'no'} mask"
        saved = EAGER_BYTES_PER_PAIR * query["rows"] * query["heads"] * query["tokens"] ** 2 * slow
        costs = f"{gib(saved)} of scores per micro-batch" if slow else ""
    if +paths:
        package = missing_attention_package(named[0]) if named else None
        repair = f"pip install {package}" if package else faster
        differs = named[0] if named else ""
        yield row("attention", differs or asked, "+".join(sorted(+paths)), differs, detail, costs, repair)


def _is_another(named: str, ran: str) -> bool:
    """Return True where flash, flex or a kernel of the hub is named, and another ran; SDPA is what nobody names."""
    return ran != ("flex" if "flex" in named else "flash" if "flash" in named or "/" in named else ran)


def _faster_attention(model: Any, paths: Counter[str], query: Values) -> str:
    """Return what to change for a faster kernel, by why none took these inputs; nothing where there is none."""
    if paths["eager"]:
        flash = ["flash_attention_2"] if getattr(model, "_supports_flash_attn", False) else []
        flash = [*(getattr(model, "_compatible_flash_implementations", None) or flash)]
        names = ["sdpa"] if getattr(model, "_supports_sdpa", False) else flash
        return f"attn_implementation={names[0]!r}" if names else ""
    if not query or not (paths["math"] or (paths["efficient"] and query["device"] != "cpu")):
        return ""
    if query["size"] > LARGEST_FLASH_HEAD or query["value"] != query["size"]:
        return f"none: no flash kernel has heads of {query['size']} and values of {query['value']}"
    if query["dropout"] and query["device"] == "cpu":
        return "attention_dropout=0: no kernel for CPUs drops scores"
    if query["dtype"] == "float32":
        return "bf16=True: no flash kernel takes float32"
    return "attn_implementation='flash_attention_2', which needs no mask" if query["mask"] else ""


def _experts(trace: KernelTrace, model: Any, asked: str | None) -> Iterator[KernelRow]:
    layers = [each for name, each in model.named_modules() if name.endswith(".experts")]
    lists, paths = [each for each in layers if isinstance(each, ModuleList)], set(trace.paths("experts"))
    loops = paths & {"loop", "loop in torch"} | ({"loop"} if lists else set())
    number = max([len(each) if each in lists else getattr(each, "num_experts", 1) for each in layers], default=1)
    launches = 3 * int(number) * len(layers) * PASSES * CALIBRATION.host_seconds
    costs = f"{launches:.1g} s of launches per micro-batch" if loops else ""
    repair = "" if lists or not loops else "experts_implementation='grouped_mm'"
    repair = "torch 2.9, and a GPU of compute capability 8.0" if "loop in torch" in loops else repair
    if paths or loops:
        yield row("experts", asked, "+".join(sorted(loops or paths)), "", "", costs, repair)


def _home(module: Any) -> str | None:
    """Return the package of kernels, or `hub`, whose `forward` a module runs; None for its own."""
    forward = inspect.unwrap(getattr(module.forward, "__func__", module.forward))
    if any(folder in getattr(getattr(forward, "__code__", None), "co_filename", "") for folder in HUB_FOLDERS):
        return "hub"
    modules = (getattr(forward, "__module__", None) or "", *(kind.__module__ for kind in type(module).__mro__))
    return next((home for each in modules if (home := each.partition(".")[0]) in PACKAGES), None)


def _replaced_layers(trace: KernelTrace, model: Any, args: Any) -> Iterator[KernelRow]:
    """Yield Liger's row and that of the hub's kernels: whose `forward` the layers run."""
    layers = [(home, type(module).__name__) for module in model.modules() if (home := _home(module))]
    # `apply_liger_kernel_to_llama()` replaces classes in the module of the model, which one made before does not have
    homes = {type(module).__module__ for module in model.modules()}
    values = [v for h in homes if h.startswith("transformers.") for v in vars(sys.modules[h]).values()]
    patched = any(isinstance(value, type) and value.__module__.startswith("liger_kernel") for value in values)
    liger = "use_liger_kernel" if getattr(args, "use_liger_kernel", False) else "patched classes" if patched else None
    hub = "use_kernels" if any(getattr(each, "_use_kernels", False) is True for each in model.modules()) else None
    more = f"{1 / CALIBRATION.liger_share:.1f} times the traffic of norms and MLPs, and full logits"
    for name, home, asked, costs, repair in (
        ("liger", "liger_kernel", liger, more, "patch before the model is made, a model that Liger knows"),
        ("hub_kernels", "hub", hub, "", "a device and layers that the hub has kernels for, or no use_kernels"),
    ):
        whose, called = Counter(kind for each, kind in layers if each == home), trace.ran["packages", home]
        detail = ", ".join(f"{count} {kind}" for kind, count in sorted(whose.items()))
        if whose or called:
            yield row(name, asked, f"{whose.total()} layers" if whose else "functions", "", detail)
        elif asked:
            yield row(name, asked, "", "", "", costs, repair)


def _blocks(trace: KernelTrace, model: Any, forwards: ForwardDetector, width: int, args: Any) -> Iterator[KernelRow]:
    """Yield the share of blocks that were recomputed, of those whose output had a gradient."""
    names = ("activation_checkpointing", "gradient_checkpointing")
    asked, query = any(getattr(args, name, None) for name in names), trace.query
    blocks = [(n, m) for n, m in model.named_modules() if isinstance(m, GradientCheckpointingLayer)]
    reached, left = [(n, m) for n, m in blocks if id(m) in forwards.reached], forwards.reached - forwards.recomputed
    wanted = reached if asked else [(n, m) for n, m in reached if m.gradient_checkpointing]
    missing = ", ".join([tensors.clean_name(name) for name, module in wanted if id(module) in left][:3])
    if forwards.recomputes is None or not reached or (not wanted and len(left) == len(reached)):
        return
    kept = (WHOLE_BYTES + SPLIT_BYTES) * len(left) * query.get("rows", 0) * query.get("tokens", 0) * width
    costs = f"{gib(kept)} of activations" if missing else f"{RECOMPUTED_PASSES / PASSES - 1:.0%} more compute"
    ran = f"{len(reached) - len(left)} of {len(reached)}" if left else "all"
    repair = f"enable checkpointing after all changes to the layers: not {missing}" if missing else ""
    words = "all" if asked else f"{len(wanted)} flagged" if wanted else None
    yield row("recomputed_blocks", words, ran, missing, "", costs, repair)


def _optimizer(trace: KernelTrace, trainer: Any, *, own: bool) -> Iterator[KernelRow]:
    wrapped = tensors.uncompiled(trainer.model_wrapped)
    by_deepspeed = hasattr(wrapped, "zero_optimization_stage")
    inner = tensors.innermost_optimizer(wrapped.optimizer if by_deepspeed else trainer.optimizer)
    groups, package = getattr(inner, "param_groups", None) or [{}], type(inner).__module__.partition(".")[0]
    flag = next((name for name in ("fused", "foreach") if all(group.get(name) for group in groups)), None)
    named = str(getattr(getattr(trainer.args, "optim", ""), "value", ""))
    asked = "fused" if named.endswith("_fused") and not own and not by_deepspeed else flag
    paths, number = trace.paths("optimizer"), sum(len(group.get("params", ())) for group in groups)
    differs = "differs" if package == "torch" and asked is not None and asked not in paths else ""
    slow = differs or (set(paths) == {"one by one"} and trainer.args.device.type != "cpu")
    launches = f"{number * UPDATE_OPERATIONS * CALIBRATION.host_seconds:.1g} s of launches per step" if slow else ""
    repair = "optim='adamw_torch_fused', or fused=True" if slow else ""
    if paths or package != "torch":
        detail = type(inner).__name__
        yield row("optimizer_path", asked, "+".join(sorted(paths)) or package, differs, detail, launches, repair)

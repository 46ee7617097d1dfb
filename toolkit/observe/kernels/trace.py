"""Trace which functions run in the first forward and optimizer step, and which operations its loss has a graph of.

Python reports each call to a profile function (`sys.setprofile`): nothing is patched, and torch runs what it would run
without it. The trace ends by itself where torch begins to compile, and there is none while the script profiles itself.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch

from toolkit.observe.attest.tensors import compiled_modules, dtype_name

PACKAGES = ("liger_kernel", "fla", "mamba_ssm", "causal_conv1d", "flash_attn", "xformers", "unsloth", "apex")
HUB_FOLDERS = ("kernels-community", "kernels--")  # where `kernels` keeps what it has fetched
# Function -> the part of a step, and how it is computed.
FUNCTIONS = {
    **{"eager_attention_forward": ("attention", "eager"), "flex_attention_forward": ("attention", "flex")},
    **{"flash_attention_forward": ("attention", "flash"), "sdpa_attention_forward": ("attention", "sdpa")},
    **{"varlen_attention": ("attention", "sdpa"), "grouped_mm_experts_forward": ("experts", "grouped_mm")},
    **{"batched_mm_experts_forward": ("experts", "batched_mm"), "_grouped_mm_fallback": ("experts", "loop in torch")},
    **{"sonicmoe_experts_forward": ("experts", "sonicmoe"), "deepgemm_bf16_experts_forward": ("experts", "deepgemm")},
    **{"slow_forward": ("loops", "mamba_ssm"), "torch_chunk_gated_delta_rule": ("loops", "fla")},
    **{"_fused_adam": ("optimizer", "fused"), "_multi_tensor_adam": ("optimizer", "foreach")},
    "_single_tensor_adam": ("optimizer", "one by one"),
}
CHUNKED_LOSSES = ("toolkit.train.model.chunked_loss", "trl.kernels.chunked")
LARGEST_GRAPH = 300_000  # nodes; a loop over tokens has many


class KernelTrace:
    """What ran of the trained model, as counts by part and path."""

    def __init__(self) -> None:
        self.ran, self.nodes = Counter[tuple[str, Any]](), Counter[str]()
        self.modules, self.query = set[int](), dict[str, Any]()
        self.traced = self.finished = False
        self.handlers: dict[CodeType, Callable[[FrameType], None] | None] = {}

    def begin(self, model: Any) -> None:
        """Trace the calls of this thread until `pause`."""
        self.modules = {id(module) for module in model.modules()}
        self.traced = not compiled_modules(model)
        self.resume()

    def resume(self) -> None:
        """Trace again, unless something compiles."""
        if self.traced and sys.getprofile() is None:
            sys.setprofile(self._profile)

    def pause(self, *, for_good: bool = False) -> None:
        """Take the trace away, if it is this one."""
        self.traced = self.traced and not for_good
        if sys.getprofile() == self._profile:
            sys.setprofile(None)

    def end(self, loss: Any) -> None:
        """Stop, and read the graph of the loss that the forward returned."""
        self.pause()
        self.finished, loss = True, loss[0] if isinstance(loss, tuple) else loss
        left = [loss.grad_fn] if isinstance(loss, torch.Tensor) and loss.grad_fn is not None else []
        seen = set(left)
        while left and len(seen) < LARGEST_GRAPH:
            node = left.pop()
            self.nodes[node.name()] += 1
            more = {each for each, _ in node.next_functions if each is not None} - seen
            seen, left = seen | more, [*left, *more]

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        try:
            if event == "call":
                if (code := frame.f_code) not in self.handlers:
                    self.handlers[code] = self._handler(code, str(frame.f_globals.get("__name__")))
                if (handler := self.handlers[code]) is not None:
                    handler(frame)
            elif event == "c_call" and getattr(argument, "__name__", "") == "scaled_dot_product_attention":
                self._on_attention(frame, "sdpa call")
        except Exception:  # the script's own call must not end with it
            self.pause(for_good=True)

    def _handler(self, code: CodeType, module: str) -> Callable[[FrameType], None] | None:
        name, package = code.co_name, module.partition(".")[0]
        part, path = FUNCTIONS.get(name, (None, ""))
        is_hub = any(folder in code.co_filename for folder in HUB_FOLDERS)
        if package in PACKAGES or is_hub:
            part, path = "packages", "hub" if is_hub else package
            self.ran["loss", "fused"] += "fused_linear" in code.co_filename
        elif module.startswith(CHUNKED_LOSSES):
            part, path = "loss", "chunked"
        elif part == "attention":
            return lambda frame: self._on_attention(frame, path)
        elif name == "cross_entropy" and module == "torch.nn.functional":
            return self._on_cross_entropy
        elif module == "torch._dynamo.convert_frame":
            return lambda _: self.pause(for_good=True)
        elif "is_new_implementation" in code.co_freevars:  # transformers: a package's function, or torch's in its place
            return self._on_function_with_fallback
        elif name == "forward" and "Experts" in code.co_qualname:
            return self._on_experts
        return None if part is None else lambda _: self.ran.update([(part, path)])

    def _on_attention(self, frame: FrameType, path: str) -> None:
        given = frame.f_locals
        module, query, value = (given.get(a, given.get(b)) for a, b in (("module", "self"), "qq", "vv"))
        query, value = given.get("query", query), given.get("value", value)
        if id(module) not in self.modules:
            return
        self.ran["attention", path] += 1
        self.ran["named", (str(getattr(getattr(module, "config", None), "_attn_implementation", None)), path)] += 1
        if isinstance(query, torch.Tensor) and query.dim() == 4:
            device, sizes = query.device.type, ("rows", "heads", "tokens", "size")
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
            self.query = {**dict(zip(sizes, query.shape, strict=True)), "dtype": dtype_name(dtype), "device": device}
            self.query |= {
                "value": value.shape[-1] if isinstance(value, torch.Tensor) else None,
                "dropout": given.get("dropout") or given.get("dropout_p"),
            }
            self.query["mask"] = given.get("attention_mask", given.get("attn_mask")) is not None

    def _on_experts(self, frame: FrameType) -> None:
        module = frame.f_locals["self"]
        if id(module) in self.modules and hasattr(module, "_is_expert_parallel"):  # it has other paths
            self.ran["experts", "loop"] += 1

    def _on_function_with_fallback(self, frame: FrameType) -> None:
        is_kernel = frame.f_locals["is_new_implementation"]
        self.ran["packages" if is_kernel else "loops", frame.f_locals["package"]] += 1

    def _on_cross_entropy(self, frame: FrameType) -> None:
        scores = frame.f_locals["input"]
        classes = scores.shape[1 if scores.dim() > 1 else 0]
        self.ran["losses", (scores.numel() // max(1, classes), classes, dtype_name(scores.dtype))] += 1

    def paths(self, part: str) -> Counter[Any]:
        """Return the counts of one part by path."""
        return Counter({path: count for (each, path), count in self.ran.items() if each == part and count})

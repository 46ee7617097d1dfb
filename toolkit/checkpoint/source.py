"""One view of any engine's checkpoint: each parameter's fp32 weight and Adam moments, one at a time.

>>> with open_source(Path("out/checkpoint-8")) as source:
...     source.weight("model.norm.weight").dtype
torch.float32

Names are those of the parameters in the training model; adapters keep peft's `.default.`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from toolkit.checkpoint.layout import Layout, detect
from toolkit.errors import ToolkitError

MOMENTS = ("exp_avg", "exp_avg_sq")


class Source(Protocol):
    """What every reader offers; nothing is read before it is asked for, and nothing is kept."""

    layout: Layout
    hyperparameters: list[dict[str, Any]]
    """Of each parameter group, without its parameters; empty without optimizer states."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight that was saved."""

    def optimized(self) -> list[str] | None:
        """Names that have optimizer states; None where only their order is known."""

    def weight(self, name: str) -> Any:
        """The weight that the optimizer updates (fp32 under every preset)."""

    def moment(self, name: str, state: str) -> Any:
        """`exp_avg` or `exp_avg_sq`, in the weight's shape."""

    def optimizer_step(self) -> float:
        """Adam's own count of steps."""

    def close(self) -> None:
        """Let go of files."""


def open_source(path: Path) -> Source:
    """The reader for a checkpoint's engine."""
    layout = detect(path)
    if layout.engine == "universal":
        raise ToolkitError(
            f"{path} was converted for a DeepSpeed preset, and is no source of its own",
            hint="use the checkpoint that it was converted from (`converted_from` in its manifest.json)",
        )
    return _readers()[layout.engine](layout)


def _readers() -> dict[str, Callable[[Layout], Source]]:
    from toolkit.checkpoint.dcp_source import DcpSource
    from toolkit.checkpoint.deepspeed_source import DeepSpeedSource
    from toolkit.checkpoint.plain_source import PlainSource

    return {"deepspeed": DeepSpeedSource, "fsdp2": DcpSource, "plain": PlainSource}

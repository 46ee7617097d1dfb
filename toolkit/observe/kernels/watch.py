"""Watch the first forward and the first optimizer step of a run for the rows of the table of fast paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from toolkit.observe.attest.differences import Values
from toolkit.observe.attest.read_rank import ForwardDetector
from toolkit.observe.kernels.documents import document_rows
from toolkit.observe.kernels.rows import kernel_rows
from toolkit.observe.kernels.trace import KernelTrace
from toolkit.observe.parts import ExpectedRun
from toolkit.record.kernel_table import REQUIRABLE_ROWS, KernelRow


class KernelWatch:
    """Watches one rank's first step, unless it is timed, or rehearsed."""

    def __init__(self, trainer: Any, expected: ExpectedRun, *, untimed_steps: int) -> None:
        rehearsed = dist.is_initialized() and dist.get_backend() == "fake"
        self.trainer, self.expected, self.trace = trainer, expected, KernelTrace()
        self.waits, self.documents = untimed_steps > 0 and not rehearsed, list[KernelRow]()

    def forward(self, call: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what `call(model, inputs, ...)` does, which computes the loss of one micro-batch."""
        self.begin(args[0] if args else kwargs.get("inputs"))
        try:
            loss = call(model, *args, **kwargs)
        finally:
            self.trace.pause()
        self.end(loss)
        return loss

    def begin(self, inputs: Any) -> None:
        """Begin with the inputs of the first forward. Collective."""
        if self.waits:
            self.waits = False
            plain = self.trainer.accelerator.unwrap_model(self.trainer.model_wrapped, keep_torch_compile=False)
            if self.expected.layout is None and self.expected.layout_at_load is None:
                self.documents = document_rows(self.trainer, plain, inputs)
            self.trace.begin(plain)

    def end(self, loss: Any) -> None:
        """End with the loss of the first forward."""
        if self.trace.modules and not self.trace.finished:
            self.trace.end(loss)

    def read(self, reading: Values, forwards: ForwardDetector, plain: Any) -> Values:
        """Return `kernels`, the rows of this rank after its first step, and what ran by the rows' names."""
        own = self.expected.own_optimizer
        rows = [*kernel_rows(self.trace, self.trainer, plain, reading, forwards=forwards, own_optimizer=own)]
        rows += self.documents
        ran = {each.name: each.ran for each in rows if each.name in REQUIRABLE_ROWS}
        return {"kernels": [each._asdict() for each in rows], **ran} if self.trace.finished else {}

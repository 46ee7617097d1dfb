"""Evaluation loss over every supervised token of all ranks, independent of batches and number of ranks.

loss = sum of the losses of all supervised tokens / number of supervised tokens;    perplexity = exp(loss)
"""

from __future__ import annotations

import math
import random
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from toolkit.job.dataset_checks import held_out_rows
from toolkit.observe.batches import IGNORED
from toolkit.record.folder import RunFolder


class EvaluatedTokens:
    """The evaluation batches of this rank so far: their mean losses and supervised tokens."""

    def __init__(self) -> None:
        self.losses: list[tuple[torch.Tensor, int]] = []

    def add(self, mean_loss: torch.Tensor, supervised_tokens: int) -> None:
        """Add a batch. A batch of fill rows only has no supervised token, and a mean loss of NaN."""
        if supervised_tokens:
            self.losses.append((mean_loss, supervised_tokens))

    def over_all_ranks(self, device: Any) -> dict[str, float | int]:
        """Return `loss`, `perplexity` and `supervised_tokens` of the complete evaluation data. Collective."""
        total = math.fsum(float(loss) * tokens for loss, tokens in self.losses)
        sums = torch.tensor([total, float(sum(tokens for _, tokens in self.losses))], dtype=torch.float64).to(device)
        if dist.is_initialized():
            dist.all_reduce(sums)
        loss, tokens = float(sums[0] / sums[1]), int(sums[1])
        perplexity = math.exp(loss) if loss < 700 else math.inf  # beyond that a float overflows
        return {"loss": loss, "perplexity": perplexity, "supervised_tokens": tokens}


class Evaluations(TrainerCallback):  # type: ignore[misc]
    """Evaluates after the last step, and writes each evaluation to run.json and the log."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args
        if state.global_step >= state.max_steps:
            control.should_evaluate = True

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, Any], **_: Any) -> None:
        del args, control
        if not state.is_world_process_zero:
            return
        loss, perplexity, tokens = (metrics[f"eval_{name}"] for name in ("loss", "perplexity", "supervised_tokens"))
        recorded = (self.folder.read_run() or {}).get("evaluations", [])
        earlier = [row for row in recorded if row["step"] < state.global_step]
        row = {"step": state.global_step, "eval_loss": loss, "perplexity": perplexity, "supervised_tokens": tokens}
        self.folder.update_run(evaluations=[*earlier, row])
        line = f"evaluation at step {state.global_step}: loss {loss:.6f}, perplexity {perplexity:.4f}"
        print(f"{line} over {tokens:,} supervised tokens", flush=True)


def held_out(rows: int, val_size: float, *, seed: int) -> set[int]:
    """Return the numbers of the rows held out for evaluation, a fraction of them or so many; the same in every run."""
    return set(random.Random(seed).sample(range(rows), held_out_rows(rows, val_size)))


class EvaluationRows(torch.utils.data.Dataset[dict[str, Any]]):  # type: ignore[misc]
    """Rows (or packs), filled up with unsupervised copies until every rank has the same number of full batches.

    `multiple` is the sequences of one batch over all ranks. accelerate would fill up with rows that count twice.
    """

    def __init__(self, rows: Any, *, multiple: int) -> None:
        self.rows = rows
        self.length = -(-len(rows) // multiple) * multiple

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index < len(self.rows):
            return dict(self.rows[index])
        row = dict(self.rows[0])
        return row | {"labels": [IGNORED] * len(row["labels"])}

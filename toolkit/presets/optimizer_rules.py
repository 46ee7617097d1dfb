"""Compatibility rules of optimizers: which runs under which engine, with offload, on a CPU, and in a plan."""

from __future__ import annotations

from toolkit.errors import did_you_mean
from toolkit.models.optimizers import OPTIMIZERS
from toolkit.presets.compatibility import Answer, Case


def planned_optimizer(case: Case) -> Answer:
    if case.purpose not in ("plan", "recommend") or case.job.optim in OPTIMIZERS:
        return None
    why = f"--optim {case.job.optim} is not planned"
    return why, why, did_you_mean(case.job.optim, OPTIMIZERS, otherwise=f"planned: {', '.join(OPTIMIZERS)}")


def survives_offload(optim: str) -> bool:
    """Return True if DeepSpeed's offload keeps the optimizer: torch's AdamW, as its own CPU kernel."""
    return optim in ("adamw_torch_fused", "adamw_torch")


def optimizer_runs(case: Case) -> Answer:
    preset, optim = case.preset, case.job.optim
    if preset is None or survives_offload(optim):  # which works under every preset
        return None
    if preset.engine == "deepspeed" and preset.offload_optimizer:
        # accelerate 1.15, `map_pytorch_optim_to_deepspeed`: all others but Adagrad and Lion become a CPU Adam with L2
        # regularisation in place of decoupled weight decay; 8-bit and paged states become plain fp32 ones.
        why = "accelerate replaces an offloaded optimizer by DeepSpeed's CPU Adam"
        hint = f"`--optim adamw_torch`, or {preset_that_runs(optim)}"
    else:
        found = _no_optimizer(preset.engine, optim)
        if found is None:
            return None
        why, hint = found
    return why, f"--optim {optim} does not work under preset {preset.name!r}: {why}", hint


def _no_optimizer(engine: str, optim: str) -> tuple[str, str] | None:
    answers = _NO_OPTIMIZER.get(engine, {})
    return answers.get(optim) or answers.get(optimizer_library(optim))


def preset_that_runs(optim: str) -> str:
    """Name a preset that can run an optimizer."""
    running = [name for name, engine in _WITHOUT_OFFLOAD.items() if _no_optimizer(engine, optim) is None]
    return f"`--preset {running[0]}`"


def optimizer_library(optim: str) -> str:
    """Return the package that an optimizer is from; empty for one that the table does not have."""
    spec = OPTIMIZERS.get(optim)
    return "" if spec is None else spec.class_name.partition(".")[0]


# Presets to name where a preset that offloads, or splits layers, cannot run an optimizer, and their engines.
_WITHOUT_OFFLOAD = {"zero3": "deepspeed", "fsdp2": "fsdp2", "ddp": "ddp"}


_USE_BNB = "`--optim adamw_bnb_8bit`"


# engine -> name or library of an optimizer -> why it does not work there, and what does.
# benchmarks/optimizers.py reproduces those of FSDP2.
_NO_OPTIMIZER = {
    "deepspeed": {
        "adafactor": (
            "DeepSpeed flattens parameters, and only matrices have rows and columns to factor",
            f"`--preset ddp`, or {_USE_BNB}",
        ),
        "adagrad": ("DeepSpeed 0.19.8 cannot make its states in advance", "`--optim rmsprop`, or `--preset ddp`"),
        "muon": (
            "DeepSpeed flattens parameters, and Muon orthogonalises matrices",
            "`--preset ddp` or `fsdp2`",
        ),
        "torchao": (
            "torchao quantizes whole blocks of 256, and DeepSpeed's flat partitions seldom are",
            _USE_BNB,
        ),
    },
    "fsdp2": {
        "bitsandbytes": (
            "bitsandbytes' kernels take no DTensors",
            "`--optim adamw_torch_8bit`, or `--preset zero2` or `zero3`",
        ),
        "adafactor": (
            "transformers' Adafactor makes plain tensors beside DTensors",
            "`--optim adamw_torch_8bit`, or `--preset ddp`",
        ),
        "adagrad": (
            "torch makes its sums before FSDP2 shards the parameters, so every rank keeps them whole",
            "`--optim rmsprop`, or `--preset ddp`",
        ),
        "adamw_torch_4bit": ("torchao's flat 4-bit states are no shards of a matrix", "`--optim adamw_torch_8bit`"),
    },
}

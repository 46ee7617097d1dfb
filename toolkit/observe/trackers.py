"""What a run's trackers show beside the Trainer's own values: preset, plan and verification.

W&B, TensorBoard, MLflow and Trackio, where `report_to` names them, the trackers of an `Accelerator`, and the status of
a TrainJob, which transformers reports to where Kubeflow Trainer asks for it. The values go into their configuration and
summary, with names that begin with `toolkit/`. Nothing is imported or started here.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from toolkit.files.secrets import hide_secrets
from toolkit.observe.timer import StepTimer
from toolkit.record.folder import RunFolder, read_json
from toolkit.record.kernel_table import AS_ASKED

PLANNED = ("verdict", "allocated_peak_bytes", "planned_peak_bytes")  # keys of a plan in `run.json`
KUBEFLOW_CHARACTERS = 64
"""The longest name and value of a metric in a TrainJob's status; a longer one has the whole update refused.
kubeflow/trainer, `trainjob_types.go`, `Metric`."""
PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_host_bytes")


def tell_verdict(trainer: Any, folder: RunFolder, attestation: Mapping[str, Any]) -> None:
    """Tell the trackers what `attestation.json` says, and what was planned. Called by the rank that writes."""
    plan = (read_json(folder.run_json) or {}).get("plan") or {}
    kernels = [f"{row['name']}: {row['detail']}" for row in attestation["kernels"] if row["verdict"] != AS_ASKED]
    differences = [f"{row['fact']}: {row['found']}, expected {row['expected']}" for row in attestation["differences"]]
    values = {
        "preset": attestation["preset"] or "none",
        "verification": attestation["verdict"],
        "verification_differences": "; ".join(differences) or "none",
        "verification_sha256": attestation["sha256"],
        "kernels_not_as_asked": "; ".join(kernels) or "none",
        "world_size": attestation["ranks"][0]["world_size"],
        **{f"planned_{key.removeprefix('planned_')}": plan[key] for key in PLANNED if plan.get(key) is not None},
    }
    tell(trainer, values)


def tell_peaks(trainer: Any, timer: StepTimer) -> None:
    """Tell the trackers the peaks of this rank, in bytes; the Trainer closes them after its training."""
    memory = timer.read_memory()
    tell(trainer, {f"{name}_of_rank_0": memory[name] for name in PEAKS if memory[name] is not None})


def tell(trainer: Any, values: dict[str, Any]) -> None:
    """Give values to each tracker of a Trainer or an observed loop. One that fails is named, and the run goes on."""
    if not trainer.accelerator.is_main_process:  # which alone has runs of trackers
        return
    named = {f"toolkit/{name}": hide_secrets(value) for name, value in values.items()}
    callbacks = getattr(getattr(trainer, "callback_handler", None), "callbacks", ())
    senders: list[tuple[str, Callable[[], object]]] = []
    for callback in callbacks:
        for each in type(callback).__mro__:
            if each.__name__ in SENDERS:
                senders.append((each.__name__, functools.partial(SENDERS[each.__name__], callback, named)))
    for tracker in getattr(trainer.accelerator, "trackers", ()):
        senders.append((tracker.name, functools.partial(tracker.store_init_configuration, named)))
    for name, send_to in senders:
        try:
            send_to()
        except Exception as error:  # of a program that is not ours: training does not depend on it
            print(f"warning: {name} was not told what was verified: {type(error).__name__}: {error}", flush=True)


def _to_wandb(_: Any, values: dict[str, Any]) -> None:
    if (run := sys.modules["wandb"].run) is not None:
        run.config.update(values, allow_val_change=True)
        run.summary.update(values)


def _to_tensorboard(callback: Any, values: dict[str, Any]) -> None:
    if callback.tb_writer is not None:
        lines = ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in values.items())]
        callback.tb_writer.add_text("toolkit", "\n".join(lines))


def _to_mlflow(_: Any, values: dict[str, Any]) -> None:
    if sys.modules["mlflow"].active_run() is not None:
        sys.modules["mlflow"].set_tags(values)  # a parameter could not change in a resumed run


def _to_kubeflow(callback: Any, values: dict[str, Any]) -> None:
    short = {name: str(value) for name, value in values.items() if 0 < len(str(value)) <= KUBEFLOW_CHARACTERS}
    callback._metrics.update(short)  # sent with the next step's progress


SENDERS: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "WandbCallback": _to_wandb,
    "TensorBoardCallback": _to_tensorboard,
    "MLflowCallback": _to_mlflow,
    "TrackioCallback": lambda _, values: sys.modules["trackio"].config.update(values, allow_val_change=True),
    "KubeflowCallback": _to_kubeflow,
}
"""By the name of transformers' callback, whose class may be a script's own."""

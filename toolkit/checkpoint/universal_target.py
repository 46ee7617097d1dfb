"""Write DeepSpeed's universal checkpoint: one folder a parameter, which every ZeRO stage and world size loads.

`ds_to_universal` makes it from DeepSpeed's own checkpoints only; the layout is written here from any source.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.description import Skeleton
from toolkit.checkpoint.plain_target import hyperparameters
from toolkit.checkpoint.source import MOMENTS, Source

TAG = "global_step{step}_universal"


def write_universal(folder: Path, source: Source, skeleton: Skeleton, groups: list[list[str]]) -> None:
    """`latest_universal`, `global_stepN_universal/zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt`, and global state."""
    del skeleton
    from deepspeed import __version__

    step = source.optimizer_step()
    tag = TAG.format(step=int(step))
    states = folder / tag / "zero"
    for name in [name for names in groups for name in names]:
        (states / name).mkdir(parents=True)
        torch.save({"param": source.weight(name).float()}, states / name / "fp32.pt")
        for moment in MOMENTS:
            torch.save({"param": source.moment(name, moment)}, states / name / f"{moment}.pt")
        torch.save(torch.tensor(step), states / name / "step.pt")
    known = [hyperparameters(source, position, groups) for position, names in enumerate(groups) if names]
    torch.save(_global_state(known, step, __version__), states / "optimizer_state.pt")
    # Stages 1 and 2 read the first name, stage 3 the second; of the module only what is not in `zero/` would count.
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        torch.save(_model_state(step, __version__), folder / tag / name)
    (folder / "latest_universal").write_text(tag)


def _global_state(groups: list[dict[str, Any]], step: float, version: str) -> dict[str, Any]:
    """What is one for all parameters. Stage 3 gives the first group's values to all groups: those that differ
    (weight decay) are left out there, so that each group keeps what the run's own arguments say."""
    shared = {key: value for key, value in groups[0].items() if all(group.get(key) == value for group in groups)}
    return {
        "ds_version": version,
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {"step": torch.tensor(step)}}, "param_groups": [shared]},
    }


def _model_state(step: float, version: str) -> dict[str, Any]:
    return {
        "module": {},
        "lr_scheduler": None,
        "global_steps": int(step),
        "skipped_steps": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": version,
    }

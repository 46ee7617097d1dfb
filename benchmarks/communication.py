"""Communication volume counted in CPU runs, against the plan, for every preset.

    python benchmarks/communication.py                                  # two and four real ranks; minutes
    python benchmarks/communication.py --alone                          # rank 0 of 8 and 64, in one process
    python benchmarks/communication.py --only zero3 --only fsdp2        # only these presets; other rows are kept
    python benchmarks/communication.py --missing                        # only those without a row, or with an error

With `--alone`, torch's fake process group takes the collectives: the engine makes its calls, and no data is sent. DDP
cannot train that way. The payload is the full tensor of each collective, in the last optimizer step of rank 0
(tests/scripts/count_collectives.py). A row that failed keeps its error. The model is a random Llama, in fp32 as on
every CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from record import ROOT, print_table, read_result, write_result
from small_job import JobSetting, accelerate_command, cpu_environment, small_model, words

from toolkit.models.read_model import read_model
from toolkit.models.shape import ModelShape
from toolkit.plan.communication import communication_bytes, step_collectives
from toolkit.plan.planned_job import PlannedJob, TrainingSetup
from toolkit.presets import load_preset

COUNT = ROOT / "tests" / "scripts" / "count_collectives.py"
STEPS = 2  # ZeRO-3's first step records the order of modules and sends more
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False}
NOISE_BYTES = 20_000  # losses, norms, flags, and that recording


@dataclass(frozen=True, kw_only=True)
class Setting(JobSetting):
    """Settings of one run."""

    ranks: int
    accumulate: str | None = None  # `whole`, where FSDP2 reduces in the last accumulation step only
    alone: bool = False  # rank 0 in one process, instead of all ranks

    @property
    def name(self) -> str:
        """Name of the setting, for example `zero3 n4 a2 lora`."""
        extras = {"whole": self.accumulate, "lora": self.lora_r, "ckpt": self.checkpointing, "alone": self.alone}
        return self.named(f"n{self.ranks}", f"a{self.accumulation}", **extras)

    def setup(self, shape: ModelShape) -> TrainingSetup:
        """The setup as the planner takes it."""
        job, preset = PlannedJob(accumulate=self.accumulate, **self.planned), load_preset(self.preset)
        return TrainingSetup(preset=preset, shape=shape, world_size=self.ranks, job=job, mixed_precision="no")


def lone_settings() -> list[Setting]:
    names = ("zero1", "zero2", "zero2_cpu_offload", "zero3", "fsdp2", "fsdp2_grad_op", "fsdp2_hybrid")
    found = [Setting(preset=name, ranks=8, accumulation=2, alone=True) for name in names]
    found += [replace(setting, accumulate="whole") for setting in found if setting.preset.startswith("fsdp2")]
    found += [Setting(preset=name, ranks=64, alone=True) for name in ("zero1", "zero3", "fsdp2", "fsdp2_hybrid")]
    return found + [Setting(preset=name, ranks=64, lora_r=8, alone=True) for name in ("zero3", "fsdp2")]


def settings() -> list[Setting]:
    """Return the settings that run on real ranks."""
    sharded = ("zero1", "zero2", "zero3", "zero2_cpu_offload", "zero3_cpu_offload")
    torch = ("fsdp2", "fsdp2_grad_op", "fsdp2_cpu_offload")
    main = ("ddp", "zero2", "zero3", "fsdp2")
    found = [Setting(preset=name, ranks=2, accumulation=2) for name in ("ddp", *sharded, *torch)]
    found += [Setting(preset=name, ranks=4) for name in (*main, "fsdp2_hybrid")]
    found += [Setting(preset="fsdp2_hybrid", ranks=4, accumulation=2)]
    # Sharded gradients over several accumulation steps are counted by `--alone`, and by a test on two real ranks.
    split = [one.preset.startswith("fsdp2") and one.accumulation > 1 for one in found]
    found = [replace(one, accumulate="whole") if whole else one for one, whole in zip(found, split, strict=True)]
    found += [Setting(preset=name, ranks=2, lora_r=8) for name in main]
    return found + [Setting(preset=name, ranks=2, checkpointing=True) for name in ("zero3", "fsdp2")]


def count(setting: Setting, model: Path, output: Path) -> dict[str, int]:
    """Return the payload of each collective in the last step; raise with the run's last lines if it failed."""
    job = setting.words | {"model_name_or_path": model, "output_dir": output, "max_steps": STEPS}
    job |= {"per_device_train_batch_size": 1, "save_strategy": "no", "save_model": "false"}
    job |= {} if setting.accumulate is None else {"accumulate": setting.accumulate}
    if setting.alone:
        config = str(ROOT / "accelerate_configs" / f"{setting.preset}.yaml")
        launcher = [sys.executable, str(COUNT), "--alone", config, str(setting.ranks)]
    else:
        mesh = ["--parallelism_config_dp_shard_size", str(setting.ranks // 2)] if "hybrid" in setting.preset else []
        launcher = accelerate_command(setting.preset, setting.ranks, str(COUNT), options=mesh)
    argv = [*launcher, *words(**job)]
    done = subprocess.run(argv, cwd=ROOT, env=cpu_environment(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError("\n".join(done.stderr.strip().splitlines()[-3:]))
    last = json.loads((output / "collectives" / "rank0.jsonl").read_text().splitlines()[-1])
    return {name: one["bytes"] for name, one in last.items() if name != "step" and one["bytes"] > NOISE_BYTES}


def row(setting: Setting, shape: ModelShape, model: Path, output: Path) -> dict[str, Any]:
    """Return the counted payload of each collective, and its largest difference from the plan; or the error."""
    facts = {"setting": setting.name, "sent_bytes": communication_bytes(step_collectives(setting.setup(shape)))}
    try:
        counted = count(setting, model, output)
    except RuntimeError as error:
        return facts | {"error": str(error)}
    return facts | {"counted": counted, "largest_difference": largest_difference(setting, shape, counted)}


def largest_difference(setting: Setting, shape: ModelShape, counted: dict[str, int]) -> float:
    """Return the largest difference of any collective's plan, as a fraction of its counted payload."""
    plan: Counter[str] = Counter()
    for collective in step_collectives(setting.setup(shape)):
        among = "" if collective.group_size == setting.ranks else f" of {collective.group_size}"
        plan[collective.name + among] += collective.payload_bytes
    names = plan.keys() | counted.keys()
    return max(abs(plan[name] - counted.get(name, 0)) / max(counted.get(name, 0), 1) for name in names)


def cells(one: dict[str, Any]) -> list[str]:
    """Return a row's counted bytes by collective and the largest difference from the plan, or why there are none."""
    if "error" in one:
        return [one["setting"], one["error"], "n/a"]
    counted = " ".join(f"{name} {size:,}" for name, size in one["counted"].items())
    return [one["setting"], counted, f"{one['largest_difference']:.1e}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="a preset to run; repeatable; rows of other presets are kept")
    parser.add_argument("--alone", action="store_true", help="rank 0 of 8 and of 64 in one process, not real ranks")
    parser.add_argument("--missing", action="store_true", help="skip what has been counted")
    given = parser.parse_args()
    rows = {one["setting"]: one for one in read_result("communication")[1]}
    skipped = {name for name, one in rows.items() if "counted" in one and given.missing}
    wanted = [setting for setting in (lone_settings() if given.alone else settings()) if setting.name not in skipped]
    with tempfile.TemporaryDirectory() as scratch:
        # A Llama of 28.7 million parameters, six layers, untied embeddings.
        model = small_model(Path(scratch) / "model", SIZES)
        shape = read_model(str(model))
        for setting in (one for one in wanted if not given.only or one.preset in given.only):
            rows[setting.name] = row(setting, shape, model, Path(scratch) / setting.name.replace(" ", "-"))
            print(*cells(rows[setting.name]), file=sys.stderr, flush=True)
            write_result("communication", {"num_params": shape.num_params}, rows.values())
    print_table(["setting", "counted payload", "largest difference"], [cells(one) for one in rows.values()])
    return 0 if all(one.get("largest_difference", 1) <= 0.01 for one in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

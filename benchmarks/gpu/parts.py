"""What the parts of `check.py` run: commands that a user types, and the benchmarks; and the rows that each leaves."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from grid import CALIBRATION
from peer_jobs.commands import words
from plan_errors import STATES, peak_pairs, reserved_bytes
from record import ROOT, read_lines

from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import Gpu, known_gpu
from toolkit.hardware.gpus import count_gpus, gpu_names
from toolkit.job.job import Job
from toolkit.models.read_model import read_model
from toolkit.plan.methods import Method
from toolkit.plan.planned_job import PlannedJob
from toolkit.plan.planner import PlanRequest, make_plans
from toolkit.presets import list_presets, load_preset
from toolkit.presets.compatibility import Device
from toolkit.presets.support import unsupported
from toolkit.record.folder import RunFolder, read_json

Row = dict[str, Any]
TINY_GPU = "h100"  # whose plan stands beside what --tiny runs
LONGEST_TRIAL_MINUTES = 3
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 1000}
# Models of the runs, the largest first: the first whose full fine-tune fits on one GPU is taken, with its micro-batch.
MODELS = [("llama-1b", 8), ("llama-1b", 2), ("qwen2-0.5b", 2), ("qwen2-0.5b", 1)]
EXPERTS = "mixtral-1b"
GOAL_MFU = 0.55
BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One row of a comparison: the training arguments that it alone has, and what they are to the planner."""

    preset: str = "single"
    arguments: str = ""
    planned: Row = field(default_factory=dict)


LIGER = {"use_liger_kernel": True, "loss": "fused"}
SPEED = {
    "eager": Variant(),
    "liger": Variant(arguments="--use_liger_kernel true", planned=LIGER),
    "compiled": Variant(arguments="--torch_compile true"),
    "compiled_liger": Variant(arguments="--torch_compile true --use_liger_kernel true", planned=LIGER),
}
ADAPTERS = {
    "lora": Variant(arguments="--lora_r 16", planned={"lora_r": 16}),
    "qlora": Variant(arguments="--lora_r 16 --load_in_4bit true", planned={"lora_r": 16, "load_in_4bit": True}),
}
GENERATIONS = 2


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check: where it writes, and on what it runs."""

    output: Path
    tiny: bool = False

    @cached_property
    def gpus(self) -> int:
        return 0 if self.tiny else count_gpus()

    @property
    def ranks(self) -> int:
        """Processes of the parts with several: one per GPU, two on a single GPU or a CPU."""
        return max(2, self.gpus)

    @cached_property
    def gpu(self) -> Gpu:
        """The planner's GPU. Raises ToolkitError for one that is not in its table."""
        name = TINY_GPU if self.tiny else gpu_names()[0]
        known = known_gpu(name)
        if known is None:
            raise ToolkitError(
                f"{name!r} is not in the planner's table", hint="add it to toolkit/hardware/gpu_table.csv"
            )
        return known

    @property
    def length(self) -> int:
        return 64 if self.tiny else 2048

    @property
    def completion(self) -> int:
        """Tokens that GRPO generates for each row: transformers' generation takes 70 ms for each on an H200."""
        return 32 if self.tiny else 64

    @property
    def steps(self) -> int:
        return 5 if self.tiny else 16

    @property
    def untimed_steps(self) -> int:
        return 2 if self.tiny else 6

    @cached_property
    def model(self) -> tuple[Path, int]:
        """Folder and micro-batch of the model that the runs train; written on first use."""
        if self.tiny:
            return self.written("tiny", CALIBRATION["llama-1b"] | SMALL), 2
        for name, rows in MODELS:
            folder = self.output / "models" / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.json").write_text(json.dumps(CALIBRATION[name]))
            plan = self.plan(folder, "single", 1, per_device_train_batch_size=rows)
            if plan["verdict"] == "fits":
                break
        return self.written(name, CALIBRATION[name]), rows

    @cached_property
    def experts(self) -> Path:
        """Folder of a mixture of experts, which expert parallelism needs."""
        config = CALIBRATION[EXPERTS]
        return self.written("tiny-experts", config | SMALL) if self.tiny else self.written(EXPERTS, config)

    def written(self, name: str, config: Row) -> Path:
        return write_model(self.output / "models" / name, config)

    def rows(self, kind: str) -> Path:
        """Return the folder of a data set of full rows, `text`, `dpo` or `grpo`; written on first use."""
        folder = self.output / "rows" / kind
        if not (folder / "train.jsonl").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            chance, half = random.Random(0), self.length // 2

            def text(number: int) -> str:
                return " ".join(f"w{chance.randrange(900)}" for _ in range(number))

            made: dict[str, Callable[[], Row]] = {
                "text": lambda: {"text": text(self.length)},
                "dpo": lambda: {"prompt": text(half), "chosen": text(half), "rejected": text(half)},
                "grpo": lambda: {"prompt": [{"role": "user", "content": text(self.length - self.completion)}]},
            }
            lines = [json.dumps(made[kind]()) + "\n" for _ in range(max(512, 8 * self.steps * self.ranks))]
            (folder / "train.jsonl").write_text("".join(lines))
        return folder

    def plan(self, model: Path, preset: str, world_size: int, *, method: str = "sft", **job: Any) -> Row:
        """Return a plan of full rows as `toolkit plan --json` prints it. Raises ToolkitError where there is none."""
        given = {"max_seq_length": self.length, "lengths_differ": False, **job}
        lengths = {"num_generations": GENERATIONS, "max_completion_length": self.completion}
        planned = PlannedJob(**given, method=Method(method=method, **(lengths if method == "grpo" else {})))
        request = {"shape": read_model(str(model)), "presets": [load_preset(preset)], "world_sizes": [world_size]}
        return dict(make_plans(PlanRequest(**request, job=planned, gpu=self.gpu))[0].as_row())


def write_model(folder: Path, config: Row) -> Path:
    """Write a model with random bf16 weights and a tokenizer of made-up words, unless it is there."""
    if (folder / "tokenizer.json").is_file():
        return folder
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    # On the CPU: this process would hold a part of the GPU until its end.
    built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    built.save_pretrained(folder)
    word_tokenizer(config["vocab_size"]).save_pretrained(folder)
    return folder


def word_tokenizer(vocab_size: int) -> Any:
    """Return a tokenizer with one token per word `w0`, `w1`, ..., and a template that joins messages."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<unk>", "<eos>", "<pad>", *(f"w{index}" for index in range(vocab_size - 3))]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "<unk>", "bos_token": "<eos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return fast


# -- a part's commands, and the rows that it leaves


Step = tuple[str, list[str], Callable[[], list[Row]]]
"""A folder's name, the command that fills it, and what reads its rows, whether or not the command ended."""


def row_of(case: str, quantity: str, planned: float | None, measured: float | None, **more: Any) -> Row:
    """Return a row; its error is planned over measured, minus one."""
    error = planned / measured - 1 if planned and measured else None
    return {"case": case, "quantity": quantity, "planned": planned, "measured": measured, "error": error, **more}


def unmeasured(case: str, why: str) -> list[Row]:
    """Return the row of what left no figure."""
    return [row_of(case, "", None, None, note=why)]


def validation(check: Check, folder: str, *options: str, minutes: float) -> Step:
    """Return rehearsals by `validate.py`; each case has a row for each quantity that is planned and measured."""
    output = check.output / folder
    command = ["benchmarks/gpu/validate.py", "--output", str(output), "--gpu", check.gpu.name, *options]
    command += ["--minutes", str(minutes), *(["--tiny"] if check.tiny else [])]

    def read() -> list[Row]:
        return [row for case in read_lines(output / "cases.jsonl") for row in rows_of_case(case)]

    return folder, [sys.executable, *command], read


def rows_of_case(case: Row) -> list[Row]:
    """Return the rows of a rehearsal: allocated, reserved or traced peak, or the model states of one on a CPU."""
    plan, found = case.get("planned"), case["measured"]
    job = case["id"] if case["split"] == "fits" else f"{case['id']} {case['architecture']} {case['method']}"
    more = {"preset": case["preset"], "world_size": case["world_size"]}
    if found["status"] != "completed" or not plan:
        why = found["status"] if found["status"] != "completed" else "no plan"
        return [row_of(job, "", None, None, note=f"{why}: {found.get('message', '')}"[:200], **more)]
    measured: dict[str, tuple[float, float | None]] = dict(peak_pairs(case))
    if case["world_size"] == 1 and plan["step_seconds"]:
        measured["step"] = (plan["step_seconds_estimate"], found["compute_step_seconds"])
    rows = [row_of(job, name, *pair, **more) for name, pair in measured.items() if pair[1]]
    states = (sum(plan[name] for name in STATES), sum(found[name] for name in STATES))
    return rows or [row_of(job, "states", *states, **more, note="of a CPU, in fp32; the plan is in bf16")]


def comparison(
    check: Check,
    name: str,
    variants: dict[str, Variant],
    *,
    world_size: int = 1,
    method: str = "sft",
    model: Path | None = None,
    options: Sequence[str] = (),
    **training: Any,
) -> Step:
    """Return one trial of each variant by `toolkit compare`, verified as in any comparison; `sft` trains our script."""
    folder, own = check.output / name, model or check.model[0]
    rows = 2 * GENERATIONS if method == "grpo" else min(2, check.model[1]) if name != "speed" else check.model[1]
    rows = training.get("per_device_train_batch_size", rows)
    argv = [sys.executable, "-m", "toolkit", "compare", "--num-processes", str(world_size), "--repeats", "1"]
    argv += [
        "--output-dir",
        str(folder),
        "--untimed-steps",
        str(check.untimed_steps),
        "--target-interval",
        "0",
        *options,
    ]
    argv += ["--trial-timeout-minutes", str(LONGEST_TRIAL_MINUTES), *(["--cpu"] if check.tiny else [])]
    argv += [word for key, each in variants.items() for word in ("--variant", f"{key}={each.preset} {each.arguments}")]
    argv += ["--resume"] if folder.exists() else []
    if check.gpus and world_size > check.gpus:
        argv += ["--ranks-per-gpu", str(-(-world_size // check.gpus))]
    job = {"model_name_or_path": own, "per_device_train_batch_size": rows, "bf16": "true", "learning_rate": 1e-5}
    job |= {"max_steps": check.steps}
    if method == "sft":
        job |= {"dataset": check.rows("text") / "train.jsonl", "max_seq_length": check.length}
    else:
        argv += ["--module", f"trl.scripts.{method}", "--stop-after-steps", str(check.steps)]
        job |= {"dataset_name": check.rows(method), "report_to": "none", "save_strategy": "no"}
        job |= {"output_dir": folder / "out", **({"use_cpu": "true"} if check.tiny else {})}
    command = [*argv, "--", *words(job | training)]

    def read() -> list[Row]:
        known = {"method": method, "per_device_train_batch_size": rows}
        known |= {key: training[key] for key in ("max_seq_length",) if key in training}
        return [
            row
            for key, each in variants.items()
            for row in rows_of_trial(check, folder / "trials" / f"{key}-n{world_size}-r0", key, own, each, **known)
        ]

    return name, command, read


def rows_of_trial(check: Check, folder: Path, case: str, model: Path, variant: Variant, **job: Any) -> list[Row]:
    """Return the rows of a trial beside its plan: states, peaks, step and MFU; or why it has none."""
    run, failure = read_json(folder / "run.json") or {}, read_json(folder / "failure.json") or {}
    world_size, status = run.get("world_size") or 1, run.get("status", "not reached")
    if status != "completed":
        return unmeasured(case, f"{status}: {failure['message']}" if failure.get("message") else status)
    found, note = run["measured"], ""
    # Ranks that share their rows get more of them from `toolkit compare`.
    spec = run.get("spec") or {}
    batch = {name: spec[name] for name in BATCH if spec.get(name)}
    try:
        plan = check.plan(model, variant.preset, world_size, **{**job, **variant.planned, **batch})
    except ToolkitError as error:
        plan, note = None, f"no plan: {error.message}"
    ranks = (read_json(RunFolder(folder).attestation_json) or {}).get("ranks") or [{}]
    states = max(sum(rank.get(name) or 0 for name in STATES) for rank in ranks)
    step, timed = found.get("step_seconds_median"), plan and plan["step_seconds"] and not plan["without_generation"]
    pairs = {"states": (plan and sum(plan[name] for name in STATES), states)}
    pairs["allocated"] = (plan and plan["allocated_peak_bytes"], found.get("peak_allocated_bytes"))
    if plan:
        reserved = reserved_bytes({"preset": variant.preset, "world_size": world_size}, plan)
        pairs["reserved"] = (reserved, found.get("peak_reserved_bytes"))
    pairs["driver"] = (plan and plan["planned_peak_bytes"], found.get("peak_driver_bytes"))
    timed = timed and not check.tiny  # no plan is of a CPU's speed
    pairs["step"] = (plan["step_seconds_estimate"] if plan and timed else None, step)
    if plan and timed and step:
        flops = plan["mfu"][0] * plan["step_seconds"][1]  # of the GPU's peak, in seconds
        pairs["mfu"] = (flops / plan["step_seconds_estimate"], flops / step)
    more = {"preset": variant.preset, "world_size": world_size, "note": note}
    return [row_of(case, name, *pair, **more) for name, pair in pairs.items() if pair[1]]


def gpu_tests(check: Check) -> Step:
    """Return the tests marked `gpu`; the doctor's, which examines disks too, are the last."""
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()]
    files.sort(key=lambda path: (path.parent.name == "doctor", path))
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "--no-header", "-p", "no:cacheprovider"]

    def read() -> list[Row]:
        ended = re.findall(r"^\S+::(\S+) ([A-Z]+)", (check.output / "tests.log").read_text(), re.MULTILINE)
        return [{**row_of(name, "test", None, None), "note": outcome.lower()} for name, outcome in ended]

    return "tests", [*command, *map(str, files)], read


Groups = dict[str, dict[str, Variant]]


def supported(ranks: int, device: Device) -> tuple[Groups, list[Row]]:
    """Return every preset that so many ranks run, by what it needs: nothing, experts or a disk; and why others do not.

    Each preset's degrees of parallelism are 2. On a CPU, where only the check itself is tried, one preset of each kind.
    """
    groups: Groups = {"presets": {}, "experts": {}, "nvme": {}}
    left_out, kinds = list[Row](), set[object]()
    for preset in list_presets():
        degrees = {name: 2 for name in preset.degrees}
        kind = (preset.engine, preset.sharding, tuple(degrees), preset.uses_nvme)
        degrees |= {"gradient_accumulation_steps": 2} if "pp" in degrees else {}  # as many micro-batches as stages
        reason = unsupported(preset, Job().with_values(**degrees), world_size=ranks, device=device)
        if reason is not None:
            left_out += unmeasured(preset.name, f"left out: {reason.message}")
            continue
        if device.type == "cpu" and kind in kinds:
            left_out += unmeasured(preset.name, "left out on a CPU: another preset of its kind ran")
            continue
        kinds.add(kind)
        group = "experts" if "ep" in degrees else "nvme" if preset.uses_nvme else "presets"
        groups[group][preset.name] = Variant(preset=preset.name, arguments=" ".join(words(degrees)), planned=degrees)
    return groups, left_out


def presets(check: Check) -> Iterator[Step]:
    """Yield every preset that these GPUs can run, on all of them: with a dense model, with experts, and with a disk."""
    device = Device(type="cpu") if check.tiny else Device(ranks_per_gpu=check.ranks // check.gpus)
    groups, left_out = supported(check.ranks, device)
    if check.tiny:  # the part `ranks` has run the others
        groups = {"presets": {name: groups["presets"][name] for name in ("ddp", "zero2")}}
    (check.output / "nvme-disk").mkdir(exist_ok=True)
    others = {
        "experts": {"model": check.experts},
        "nvme": {"options": ["--nvme-path", str(check.output / "nvme-disk")]},
    }
    for name, variants in groups.items():
        if variants:
            label, command, read = comparison(check, name, variants, world_size=check.ranks, **others.get(name, {}))
            yield label, command, (lambda read=read: read() + left_out) if name == "presets" else read


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the check."""

    minutes: float
    teaches: str
    steps: Callable[[Check, float], Iterable[Step | list[Step]]]
    """Of a check and the minutes that are left of the part; those of a list run at a time."""


def methods(check: Check, _: float) -> list[Step]:
    kept = {"gradient_checkpointing": "false"}  # TRL recomputes activations by default
    dpo = comparison(check, "dpo", {"dpo": Variant()}, method="dpo", max_length=check.length, **kept)
    return [*(comparison(check, name, {name: each}) for name, each in ADAPTERS.items()), dpo]


# Rehearsals take up to 150 s: the last one starts earlier.
LATER_PARTS = {
    "peaks": Part(
        minutes=7,
        teaches="peaks and compute seconds of the registered grid against its plans",
        steps=lambda check, left: [validation(check, "peaks", minutes=left - 0.5)],
    ),
    "speed": Part(
        minutes=4,
        teaches=f"step time and MFU (goal {GOAL_MFU}): eager, Liger, compiled",
        steps=lambda check, _: [comparison(check, "speed", SPEED)],
    ),
    "methods": Part(minutes=4, teaches="LoRA, QLoRA and DPO against their plans", steps=methods),
    "presets": Part(
        minutes=5, teaches="every preset on all GPUs, or as two ranks on one", steps=lambda check, _: presets(check)
    ),
    "tests": Part(minutes=3, teaches="the tests marked gpu", steps=lambda check, _: [gpu_tests(check)]),
}

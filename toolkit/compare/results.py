"""`results.json` as a type: one job, the machine, rows and trials. Reports are made from it alone.

The columns of rows and trials are declared in `rows.py`. `python -m toolkit.compare.results_reference` generates
docs/reference/results.md and results.schema.json from both.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Literal

from annotated_types import MaxLen
from pydantic import AfterValidator, ConfigDict, Field

from toolkit.compare.columns import Column
from toolkit.compare.result_values import Bytes, Count, Integer, Model, Name, NonNegativeReal, PositiveCount, Share
from toolkit.compare.rows import Row
from toolkit.compare.trial_figures import TrialResult
from toolkit.files.secrets import hide_words

SCHEMA_VERSION: Literal[1] = 1
RESULTS_FILE = "results.json"
# More than any comparison has; reports are made for a page that somebody reads.
MAX_ROWS, MAX_TRIALS = 500, 5_000
Scaling = Literal["strong", "weak"]


class InstalledGpu(Model):
    """One GPU."""

    name: Annotated[str, Column("Name that the driver reports.")]
    memory_bytes: Annotated[Bytes, Column("Total memory of this GPU.", unit="bytes")]
    driver: Annotated[str | None, Column("Version of the driver.")] = None
    power_limit_watts: Annotated[NonNegativeReal | None, Column("Power limit in effect.", unit="W")] = None
    max_sm_clock_mhz: Annotated[Count | None, Column("Highest SM clock.", unit="MHz")] = None
    max_memory_clock_mhz: Annotated[Count | None, Column("Highest memory clock.", unit="MHz")] = None


class Disk(Model):
    """The disk that the comparison was written to."""

    filesystem: Annotated[str | None, Column("Its file system.")]
    total_bytes: Annotated[Bytes, Column("Its size.", unit="bytes")]
    free_bytes: Annotated[Bytes, Column("Free space when the comparison was written.", unit="bytes")]


class Environment(Model):
    """The node and the versions that every row ran on."""

    device: Annotated[str, Column("`cpu`, or the accelerator that computed, such as `cuda`.")]
    gpus: Annotated[tuple[InstalledGpu, ...], MaxLen(1024), Column("Every GPU of the node; empty on a CPU.")]
    cpu: Annotated[str | None, Column("Model name of the CPU.")]
    cpu_count: Annotated[
        PositiveCount | None, Column("CPU cores that the processes may use (a container's limit, where there is one).")
    ]
    host_memory_bytes: Annotated[Bytes, Column("Host memory that the processes may use.", unit="bytes")]
    versions: Annotated[dict[str, str], MaxLen(1000), Column("Version of each library, by distribution name.")]
    python: Annotated[str, Column("Version of Python.")]
    git_commit: Annotated[str | None, Column("Commit of the working tree that ran the comparison.")]
    disk: Annotated[Disk | None, Column("The disk that the comparison was written to.")] = None
    links: Annotated[
        str | None,
        Column("How the GPUs are connected: the output of `nvidia-smi topo -m`; null where it is not available."),
    ] = None
    memory_limit_bytes: Annotated[
        Bytes, Column("Host memory that the container (cgroup) allows; null without a limit.", unit="bytes")
    ] = None
    cpu_limit: Annotated[
        NonNegativeReal | None, Column("CPU cores that the container (cgroup) allows; null without a limit.")
    ] = None
    system: Annotated[str | None, Column("Operating system and kernel.")] = None


class ComparedJob(Model):
    """The fine-tuning job that every row trains."""

    model: Annotated[str, Column("Hub id or folder of the model.")]
    dataset: Annotated[str, Column("Hub id or file of the data; several with `, ` between them.")]
    training_arguments: Annotated[
        tuple[str, ...],
        MaxLen(10_000),
        AfterValidator(lambda words: tuple(hide_words(words))),
        Column("What followed `--`, as the training script received it; each secret is `***`."),
    ]
    untimed_steps: Annotated[Count, Column("Optimizer steps at the start that no speed counts.")]
    seed: Annotated[Integer, Column("Seed of data order and initialisation, the same for every row.")]
    per_device_train_batch_size: Annotated[PositiveCount, Column("Sequences per accumulation step and rank.")]
    gradient_accumulation_steps: Annotated[PositiveCount, Column("Accumulation steps per optimizer step.")]
    compute_dtype: Annotated[str, Column("Dtype of the forward and backward passes, such as `float32` or `bfloat16`.")]


class ComparisonMethod(Model):
    """How the rows were measured and compared."""

    repeats: Annotated[PositiveCount, Column("Repeats of each row that were planned.")]
    order_seed: Annotated[Integer, Column("Seed of the running order.")]
    interval: Annotated[str, Column("How intervals are computed, in words.")]
    ratio_confidence: Annotated[Share, Column("Confidence level of each `ratio_interval` (0 to 1).")]
    target_interval: Annotated[
        NonNegativeReal | None,
        Column(
            "A trial ended early once half the 95 % confidence interval of its median step was within this fraction of"
            " the median; null: all steps ran."
        ),
    ] = None
    scaling: Annotated[
        Scaling | None,
        Column(
            "`strong`: the same global batch for each number of processes; `weak`: the same batch per process; null"
            " with a single number of processes."
        ),
    ] = None


class Results(Model):
    """A comparison of presets on one fine-tuning job. An unknown is null; bytes are integers; keys may be added."""

    model_config = ConfigDict(title=RESULTS_FILE)

    schema_version: Annotated[
        Literal[1], Column("Version of this schema; raised when a key changes its meaning or is removed.")
    ] = SCHEMA_VERSION
    created: Annotated[
        str,
        Field(json_schema_extra={"format": "date-time"}),
        Column("When the comparison was written (ISO 8601, UTC)."),
    ]
    reference: Annotated[Name, Column("The baseline: the preset that the others are compared with.")]
    environment: Annotated[Environment, Column("The node and the versions that every row ran on.")]
    job: Annotated[ComparedJob, Column("The fine-tuning job that every row trains.")]
    rows: Annotated[tuple[Row, ...], Column("One per preset and number of processes, in the order of the options.")]
    trials: Annotated[tuple[TrialResult, ...], Column("One per trial that ran, in the running order.")]
    method: Annotated[ComparisonMethod, Column("How the rows were measured and compared.")]
    price_per_gpu_hour: Annotated[
        NonNegativeReal | None, Column("Price of one GPU for an hour, as given; null if none was given.")
    ] = None

    @property
    def on_cpu(self) -> bool:
        """The comparison ran without a GPU."""
        return self.environment.device == "cpu"

    @property
    def gpu_memory_bytes(self) -> int | None:
        """Memory of one GPU, the smallest where they differ."""
        return min((gpu.memory_bytes for gpu in self.environment.gpus if gpu.memory_bytes), default=None)

    @property
    def single_runs(self) -> bool:
        """No row was repeated, so that none has an interval."""
        return not any(row.repeated for row in self.rows)

    @property
    def world_sizes(self) -> list[int]:
        """Numbers of processes, ascending."""
        return sorted({row.world_size for row in self.rows})

    @property
    def labelled_rows(self) -> list[tuple[str, Row]]:
        """Rows with short labels: the preset, with the number of processes or the trial where that is ambiguous."""
        presets = Counter(row.preset for row in self.rows)
        sizes = Counter(row.key for row in self.rows)
        return [
            (
                row.preset
                if presets[row.preset] == 1
                else f"{row.preset} n{row.world_size}"
                if sizes[row.key] == 1
                else row.trial,
                row,
            )
            for row in self.rows
        ]

    def baseline(self, world_size: int) -> Row | None:
        """Return the baseline's completed row with the same number of processes."""
        same = (row for row in self.rows if (row.preset, row.world_size) == (self.reference, world_size))
        return next((row for row in same if row.completed), None)

    def peak_bytes(self, row: Row) -> int | None:
        """Return the row's peak: allocated on a GPU, resident host memory on a CPU."""
        return row.peak_host_bytes if self.on_cpu else row.peak_allocated_bytes

"""`results.json` as a type: one job, the machine, rows and trials. Reports are made from it alone."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, ValidationError

from toolkit.compare.rows import Row, Run, Shareable
from toolkit.errors import ToolkitError
from toolkit.files.documents import explain, read_json
from toolkit.files.paths import user_path
from toolkit.files.secrets import hide_words
from toolkit.installation import documentation_address
from toolkit.record.columns import Bytes, Column, Count, Model, NonNegativeReal, PositiveCount, Share
from toolkit.units import MIB

RESULTS_FILE = "results.json"
MAX_RESULTS_BYTES = 256 * MIB  # rows and trials have six values per step, one per line
Scaling = Literal["strong", "weak"]


class InstalledGpu(Model):
    name: str
    """Name that the driver reports."""
    memory_bytes: Annotated[Bytes, Column(unit="bytes")]
    """Total memory of this GPU."""
    driver: str | None = None
    """Version of the driver."""
    power_limit_watts: Annotated[NonNegativeReal | None, Column(unit="W")] = None
    """Power limit in effect."""
    max_sm_clock_mhz: Annotated[Count | None, Column(unit="MHz")] = None
    """Highest SM clock."""
    max_memory_clock_mhz: Annotated[Count | None, Column(unit="MHz")] = None
    """Highest memory clock."""


class Disk(Model):
    filesystem: str | None
    """Its file system."""
    total_bytes: Annotated[Bytes, Column(unit="bytes")]
    """Its size."""
    free_bytes: Annotated[Bytes, Column(unit="bytes")]
    """Free space when the comparison was written."""


class Environment(Model):
    """The node and the versions that every row ran on."""

    device: str
    """`cpu` or `cuda`."""
    gpus: tuple[InstalledGpu, ...]
    """Every GPU of the node."""
    cpu: str | None = None
    """Model of the CPU."""
    cpu_count: PositiveCount | None = None
    """CPU cores that the processes may use."""
    host_memory_bytes: Annotated[Bytes, Column(unit="bytes")] = None
    """Host memory that the processes may use."""
    versions: dict[str, str]
    """Version of each library."""
    python: str
    """Version of Python."""
    git_commit: str | None = None
    """Commit of the toolkit."""
    disk: Disk | None = None
    """Disk of the comparison."""
    links: str | None = None
    """Output of `nvidia-smi topo -m`."""
    memory_limit_bytes: Annotated[Bytes, Column(unit="bytes")] = None
    """Memory limit of the container."""
    cpu_limit: NonNegativeReal | None = None
    """CPU limit of the container."""
    system: str | None = None
    """Operating system and kernel."""


class ComparedJob(Model):
    """The fine-tuning job that every row trains."""

    script: str | None = None
    """Your own script or module."""
    script_sha256: str | None = None
    """Digest of its file."""
    model: Shareable | None
    """Hub id or folder of the model."""
    dataset: Shareable | None
    """Hub ids or files of the data."""
    training_arguments: Annotated[tuple[Shareable, ...], AfterValidator(lambda words: tuple(hide_words(words)))]
    """What followed `--`; secrets are `***`."""
    stop_after_steps: PositiveCount | None = None
    """Steps after which each trial was stopped."""
    untimed_steps: Count
    """First steps that no speed counts."""
    seed: int | None
    """Random seed. For your own script: as the Trainer had it in the baseline's first trial."""
    per_device_train_batch_size: PositiveCount | None
    """Sequences per accumulation step and rank."""
    gradient_accumulation_steps: PositiveCount | None
    """Accumulation steps per optimizer step."""
    compute_dtype: str
    """Dtype of forward and backward."""


class ComparisonMethod(Model):
    """How the rows were measured and compared."""

    repeats: PositiveCount
    """Planned repeats of each row."""
    order_seed: int
    """Seed of the running order."""
    search: bool = False
    """Of `toolkit tune`."""
    interval: str
    """How intervals are computed, in words."""
    ratio_confidence: Share
    """Confidence level of each `ratio_interval`."""
    target_interval: NonNegativeReal | None = None
    """Fraction of the median step at which half its 95 % interval ended a trial."""
    ranks_per_gpu: PositiveCount = 1
    """Ranks that shared each GPU."""
    scaling: Scaling | None = None
    """`strong`: the same global batch for each number of processes. `weak`: the same batch per process."""


class Results(Model):
    """A comparison of presets on one fine-tuning job. An unknown is null; bytes are integers; keys may be added."""

    schema_version: Literal[1] = 1
    """Raised when a key changes its meaning."""
    created: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    """ISO 8601, UTC."""
    reference: str
    """The baseline."""
    environment: Environment
    """Node and versions of every row."""
    job: ComparedJob
    """The job that every row trains."""
    rows: tuple[Row, ...]
    """One per preset and number of processes, in the order of the options."""
    trials: tuple[Run, ...]
    """One per trial, in running order."""
    method: ComparisonMethod
    """How rows were measured and compared."""
    unfinished: bool = False
    """True if it stopped before its last trial."""
    price_per_gpu_hour: NonNegativeReal | None = None
    """Price of one GPU for an hour."""

    @property
    def on_cpu(self) -> bool:
        return self.environment.device == "cpu"

    @property
    def world_sizes(self) -> list[int]:
        """Numbers of processes, ascending."""
        return sorted({row.world_size for row in self.rows})

    @property
    def labelled_rows(self) -> list[tuple[str, Row]]:
        """Rows with short labels: the preset, with the number of processes or the trial where that is ambiguous."""
        presets = Counter(row.preset for row in self.rows)
        sizes = Counter(row.key for row in self.rows)

        def label(row: Row) -> str:
            if presets[row.preset] == 1:
                return row.preset
            return f"{row.preset} n{row.world_size}" if sizes[row.key] == 1 else row.trial

        return [(label(row), row) for row in self.rows]

    def hardware(self, world_size: int) -> str:
        """Return what the processes ran on: `2 CPU processes`, `2 × NVIDIA H100`."""
        if self.on_cpu:
            return f"{world_size} CPU {'process' if world_size == 1 else 'processes'}"
        names = {gpu.name for gpu in self.environment.gpus}
        shared = self.method.ranks_per_gpu
        ranks = f"{world_size} ranks on " if shared > 1 else ""
        return f"{ranks}{-(-world_size // shared)} × {names.pop() if len(names) == 1 else 'GPU'}"

    @property
    def shows_speeds(self) -> bool:
        """False for ranks that share GPUs, and for single runs on a CPU: no interval says how their speeds vary."""
        return self.method.ranks_per_gpu == 1 and (not self.on_cpu or self.method.repeats > 1)

    def as_reported(self) -> Self:
        """Return the results as reports show them."""
        if self.shows_speeds:
            return self
        return self.updated(
            rows=tuple(row.without_speeds() for row in self.rows),
            trials=tuple(trial.without_speeds() for trial in self.trials),
        )

    def baseline(self, world_size: int) -> Row | None:
        """Return the baseline's completed row with the same number of processes."""
        same = (row for row in self.rows if (row.preset, row.world_size) == (self.reference, world_size))
        return next((row for row in same if row.completed), None)

    def peak_bytes(self, row: Row) -> int | None:
        """Return the row's peak: allocated on a GPU, resident host memory on a CPU."""
        return row.peak_host_bytes if self.on_cpu else row.peak_allocated_bytes


def load_results(path: str | Path) -> Results:
    """Return the results in a file, or in a comparison's folder. Raises ToolkitError where they cannot be used."""
    file = results_file(path)
    try:
        return Results.model_validate(read_json(file, max_bytes=MAX_RESULTS_BYTES))
    except ValidationError as error:
        keys = documentation_address("reference/results.md")
        hint = f"{keys} lists the keys; another version of the toolkit may have written it"
        raise ToolkitError(f"{file}: {explain(error)}", hint=hint) from None


def results_file(path: str | Path) -> Path:
    """Return the file with a comparison's results, from its path or its folder's. Raises ToolkitError for none."""
    given = user_path(path)
    file = given / RESULTS_FILE if given.is_dir() else given
    if not file.exists():
        hint = f"name a folder of `toolkit compare` that holds {RESULTS_FILE}"
        if (file.parent / "run.json").is_file():
            hint = f"it is the folder of one run: `toolkit report --share {given}` prints its figures"
        raise ToolkitError(f"no such file: {file}", hint=hint)
    return file

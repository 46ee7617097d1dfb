"""Steps, hours and dollars until a job has trained on its data, of each plan.

>>> job = PlannedJob(max_seq_length=1024, per_device_train_batch_size=2, gradient_accumulation_steps=2)
>>> Work(epochs=2, tokens=1_000_000).steps(job, groups=2)
246
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from toolkit.data.data_files import checked_rows, iter_rows
from toolkit.data.formats import Columns, read_columns, to_sample
from toolkit.errors import ToolkitError
from toolkit.files.paths import is_file
from toolkit.hardware.gpu_table import find_gpu
from toolkit.models.read_model import config_path
from toolkit.plan.candidates import Candidate
from toolkit.plan.interconnect import Range
from toolkit.plan.methods import SFT
from toolkit.plan.options import JobAndGpuOptions
from toolkit.plan.planned_job import PlannedJob
from toolkit.units import SECONDS_PER_HOUR, dollars

PRICE = "--price-per-gpu-hour"
ANY_GPU = ""
# Steps measured on one H200 took 1.0 to 1.4 times the best estimate (docs/evidence/gpu.md).
EXPECT = "expect the upper end"


def ends_text(show: Callable[[float], str], ends: Range) -> str:
    """Return both ends of a range, as every plan is printed.

    >>> ends_text(dollars, (1, 2.5))
    '$1.00 to $2.50'
    """
    return " to ".join(map(show, ends))


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a job trains on: steps, or epochs of tokens that fill their rows, or epochs of rows."""

    epochs: float = 1.0
    max_steps: int | None = None
    tokens: int | None = None
    rows: int | None = None

    def steps(self, job: PlannedJob, *, groups: int) -> int:
        """Return the optimizer steps of `groups` of GPUs that train on different rows, as the Trainer counts them.

        The last batch of an epoch may be smaller, and its last step may have fewer accumulation steps.
        """
        if self.max_steps is not None:
            return self.max_steps
        row_tokens = job.method.spec.rows * job.tokens_per_row
        rows = -(-self.tokens // row_tokens) if self.tokens is not None else self.rows or 0
        rows *= job.method.completions_per_prompt
        batches = math.ceil(rows / (job.per_device_train_batch_size * groups))
        return math.ceil(self.epochs * math.ceil(batches / job.gradient_accumulation_steps))

    @property
    def text(self) -> str:
        """What is counted, for people."""
        if self.max_steps is not None:
            return f"{self.max_steps:,} steps"
        if self.tokens is not None:
            return f"{self.epochs:g} x {self.tokens:,} tokens"
        return f"{self.epochs:g} x {self.rows:,} rows of data, each planned at full length"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """Time and cost of one plan, without loading, evaluation and saving; a range is (low, high)."""

    steps: int
    hours: float | None = None  # best estimate; None if the GPU's peak is unknown
    hours_range: Range | None = None
    precompute_hours: float = 0.0  # part of them: the reference's scores of all rows, before training
    dollars: float | None = None  # None without a price
    dollars_range: Range | None = None
    is_least: bool = False  # True: without the time of generation

    @property
    def time_text(self) -> str:
        """Hours or minutes, for people."""
        if self.hours is None or self.hours_range is None:
            return "n/a"
        unit, scale = ("h", 1) if self.hours >= 2 else ("min", 60)
        low, high = (f"{scale * hours:,.1f}" for hours in self.hours_range)
        first = f", {scale * self.precompute_hours:,.1f} {unit} of it to precompute" if self.precompute_hours else ""
        return f"{'at least ' if self.is_least else ''}{low} to {high} {unit}{first}"

    @property
    def cost_text(self) -> str:
        """Dollars, for people; empty without a price."""
        return "" if self.dollars_range is None else ends_text(dollars, self.dollars_range)


def work_of(options: JobAndGpuOptions, job: PlannedJob, model: str) -> Work | None:
    """Return what the options say that is trained on; None if they say nothing.

    Raises ToolkitError for a data file that cannot be read, and for packed rows without a tokenizer.
    """
    max_steps = None if options.max_steps == -1 else options.max_steps  # -1: the Trainer's default, no limit
    if max_steps is not None and max_steps < 1:
        raise ToolkitError(f"--max-steps is {max_steps}, expected 1 or more")
    if options.dataset_tokens is not None and options.dataset_tokens < 1:
        raise ToolkitError(f"--dataset-tokens is {options.dataset_tokens}, expected 1 or more")
    if job.method.generates and options.dataset_tokens is not None:
        raise ToolkitError(
            f"--dataset-tokens does not say how many prompts {job.method.method} generates from",
            hint="`--dataset FILE`, whose rows are prompts, or `--max-steps N`",
        )
    if max_steps is not None or options.dataset_tokens is not None:
        return Work(epochs=options.num_train_epochs, max_steps=max_steps, tokens=options.dataset_tokens)
    if options.dataset is None:
        return None
    data, epochs, columns = options.dataset, options.num_train_epochs, read_columns(options.column)
    if job.packing:
        return Work(epochs=epochs, tokens=_count_tokens(data, model, columns))
    # TRL's other methods have formats of their own
    is_sft = job.method.method == SFT
    rows = checked_rows(data, columns) if is_sft else iter_rows(data)
    return Work(epochs=epochs, rows=sum(1 for _ in rows))


def _count_tokens(data: Path, model: str, columns: Columns) -> int:
    """The tokens of all texts and messages, without those that a chat template adds."""
    from tokenizers import Tokenizer

    file = config_path(model, known=False).parent / "tokenizer.json"
    if not is_file(file):
        raise ToolkitError(f"{model} has no tokenizer.json to count packed rows with", hint="`--dataset-tokens N`")
    tokenizer, count = Tokenizer.from_file(str(file)), 0
    for data_format, (_, row, _) in checked_rows(data, columns):
        sample = to_sample(row, data_format)
        texts = [sample.text, sample.prompt, sample.completion, *(each["content"] for each in sample.messages or ())]
        count += sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts if isinstance(text, str))
    return count


def read_prices(words: Sequence[str]) -> dict[str, float]:
    """Return dollars per GPU and hour by the GPU's name; under `ANY_GPU` the price that names none.

    >>> read_prices(["2.5", "4090=0.4"])
    {'': 2.5, 'rtx-4090': 0.4}
    """
    prices = {}
    for word in words:
        name, _, text = word.rpartition("=")
        try:
            price = float(text)
        except ValueError:
            price = -1.0
        if not 0 <= price < 10**6:
            hint = f"dollars per GPU and hour: `{PRICE} 2.50`, or `{PRICE} h100=2.50`"
            raise ToolkitError(f"{PRICE} is {word[:80]!r}, expected a number below a million", hint=hint)
        prices[find_gpu(name).name if name else ANY_GPU] = price
    return prices


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What a job trains on, and dollars per GPU and hour by the GPU's name."""

    work: Work | None = None
    prices: Mapping[str, float] = field(default_factory=dict)

    def check(self, gpu: str | None) -> None:
        """Raise ToolkitError for a price without a GPU where several are compared (`gpu` None), or for another only."""
        if gpu is None and ANY_GPU in self.prices:
            price = f"{self.prices[ANY_GPU]:g}"
            hint = f"name it, as in `{PRICE} h100={price}`, or plan for one: `--gpu h100`"
            raise ToolkitError(f"{PRICE} {price} does not say of which GPU, and several are compared", hint=hint)
        if gpu is not None and self.prices and not self.prices.keys() & {gpu, ANY_GPU}:
            raise ToolkitError(f"{PRICE} has no price of {gpu}, which is planned", hint=f"`{PRICE} {gpu}=PRICE`")

    def per_hour(self, plan: Candidate) -> float | None:
        """Return the price of one of a plan's GPUs per hour; None if none was given."""
        return self.prices.get(plan.request.gpu.name.partition(",")[0], self.prices.get(ANY_GPU))

    def per_million_tokens(self, plan: Candidate) -> float | None:
        """Return the price of a million tokens at the best estimate; None without a price or a speed."""
        price = self.per_hour(plan)
        if price is None or plan.speed is None:
            return None
        return price * plan.speed.estimate_seconds / SECONDS_PER_HOUR / plan.speed.tokens_per_step_per_gpu * 1e6

    def range_per_million_tokens(self, plan: Candidate) -> Range | None:
        """Return the same at the fast and at the slow end."""
        estimate = self.per_million_tokens(plan)
        if estimate is None or plan.speed is None:
            return None
        low, high = (estimate * seconds / plan.speed.estimate_seconds for seconds in plan.speed.step_seconds)
        return low, high

    def finish(self, plan: Candidate) -> Finish:
        """Return the time and the cost of a plan's work."""
        assert self.work is not None
        job, work, speed, price = plan.job, self.work, plan.speed, self.per_hour(plan)
        groups = plan.world_size // plan.ranks_per_batch
        steps = work.steps(job, groups=groups)
        if speed is None:
            return Finish(steps=steps)
        epoch = replace(work, epochs=1.0, max_steps=None)
        precompute = (epoch.steps(job, groups=groups) * speed.precompute_seconds) / speed.estimate_seconds
        low, high = ((steps + precompute) * seconds / SECONDS_PER_HOUR for seconds in speed.step_seconds)
        hours = (steps + precompute) * speed.estimate_seconds / SECONDS_PER_HOUR
        hourly = None if price is None else price * plan.world_size
        return Finish(
            steps=steps,
            hours=hours,
            hours_range=(low, high),
            precompute_hours=precompute * speed.estimate_seconds / SECONDS_PER_HOUR,
            dollars=None if hourly is None else hourly * hours,
            dollars_range=None if hourly is None else (hourly * low, hourly * high),
            is_least=speed.without_generation,
        )

    def as_row(self, plan: Candidate) -> dict[str, Any]:
        """Return the keys that time and cost add to a plan with `--json`."""
        return {
            "finish": None if self.work is None else asdict(self.finish(plan)),
            "price_per_gpu_hour": self.per_hour(plan),
            "dollars_per_million_tokens": self.per_million_tokens(plan),
        }


NO_COST = Cost()

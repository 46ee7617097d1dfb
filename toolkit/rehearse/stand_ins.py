"""Stand-ins of a rehearsal: a world whose other ranks do not exist, rows and weights where none are given, and parts of
the Trainer that leave out what depends on other ranks.

The environment of rank r of N comes from accelerate's own launcher, so that the preset's file is read as in a run.
torch's `fake` process group has any size and any rank, and its collectives move nothing.
"""

import logging
import os
import statistics
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback
from transformers.initialization import no_init_weights

from toolkit.engines.live_engine import live_engine
from toolkit.engines.sharded_at_load import distributed_config
from toolkit.job.argument_fields import ModelArguments
from toolkit.launch.command import launcher_environment, rank_environment
from toolkit.observe.observed_run import ObservedRun
from toolkit.observe.observer import Observer
from toolkit.observe.timer import StepTimer
from toolkit.observe.verify.differences import Difference, byte_limit_differences, differences
from toolkit.observe.verify.verification import Verification
from toolkit.parallel.layout import ParallelLayout
from toolkit.presets.spec import PresetSpec
from toolkit.record.measurements import StepRow, read_rows
from toolkit.record.reading import RankReading, Values
from toolkit.rehearse.rehearsal import SYNTHETIC, RehearsedRank, has_local_weights
from toolkit.train.arguments import Arguments
from toolkit.train.data.data_report import DataStats
from toolkit.train.data.dataset import Data, load_data
from toolkit.train.model import loading
from toolkit.train.trainer import TrainerParts

SHARD_VALUE = 0.01
MATRIX_DEVIATION = 0.02  # as transformers initialises most models
MEANINGLESS_COLUMNS = ("loss", "grad_norm", "local_grad_norm", "grad_norm_ranks")
MODEL_STATES = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes")
# A rehearsal measures neither of these: recorded in run.json and shown with every result.
NOT_MEASURED = (
    "losses, gradient norms and accuracies (what other ranks would have sent is not there)",
    "the speed of collectives, and of a step that waits for them",
    "whether all ranks hold the same weights and different batches",
)


# -- the world


def join_fake_world(rehearsed: RehearsedRank, preset: PresetSpec) -> None:
    """Make this process rank r of N. Call it before anything asks for a process group."""
    os.environ.update(launcher_environment(preset, world_size=rehearsed.world_size))
    if rehearsed.fake_tensors:
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # not cpu:0, which fake tensors take for another device
        if preset.traits.uses_ddp:
            return  # its reducer takes no fake tensors: the model is traced without it
    if preset.traits.needs_launcher:
        from accelerate.utils.other import get_free_port

        place = {"world_size": rehearsed.world_size, "rank": rehearsed.rank}
        # the one device that is here
        os.environ.update(rank_environment(**place, local_rank=0, local_world_size=1, master_port=get_free_port()))
    if rehearsed.world_size > 1:  # a group that accelerate and every engine use; a single rank's engine starts its own
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rehearsed.rank, world_size=rehearsed.world_size)
        dist.all_gather_object = _own_object  # pickles of the other ranks would be empty
    preset.traits.expect_no_other_ranks()


def _own_object(objects: list[Any], own: Any, group: Any = None) -> None:
    del group
    objects[:] = [own] * len(objects)


def fill_shards(model: Any) -> None:
    """Fill this rank's shards with a constant, in place of what rank 0 would have sent.

    Uninitialised memory holds NaN at times, and ZeRO skips such a step. A ZeRO-3 model is sharded as soon as it is
    loaded, an FSDP2 model once the Trainer has prepared it.
    """
    for parameter in model.parameters():
        shard = getattr(parameter, "ds_tensor", None)
        shard = parameter.to_local() if shard is None and hasattr(parameter, "to_local") else shard
        if shard is not None and shard.is_floating_point():
            shard.data.fill_(SHARD_VALUE)


def fill_at_random(model: Any) -> None:
    """Fill matrices with copies of one block of random values, and vectors with ones.

    Drawing every value takes 0.6 billion parameters 15 s on one core instead of 2.
    """
    block = torch.randn(1_000_003) * MATRIX_DEVIATION  # a prime number of them, so that rows differ
    for parameter in model.parameters():
        if parameter.ndim < 2:
            parameter.data.fill_(1)
        elif not parameter.is_contiguous():
            parameter.data.normal_(std=MATRIX_DEVIATION)
        else:
            for part in parameter.data.view(-1).split(len(block)):
                part.copy_(block[: len(part)])


class FakeOtherRanks(TrainerCallback):  # type: ignore[misc]
    """Gives the wrapped model what the other ranks would have sent before the first step."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        wrapped = self.trainer.model_wrapped
        if isinstance(wrapped, torch.nn.parallel.DistributedDataParallel):
            wrapped.register_comm_hook(None, _own_bucket)
        if not live_engine(wrapped).reduces_itself:
            fill_shards(wrapped)


def _own_bucket(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads the annotations
    """DDP reads the reduction's result from the future of the all-reduce, which is empty under the fake backend."""
    del state
    buffer = bucket.buffer()
    future: Any = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    future.set_result(buffer)
    return future


# -- rows and weights


def rehearsal_data(args: Arguments) -> tuple[Any, Data]:
    """Return the tokenizer and the rows of `--dataset`; or None and synthetic rows, which need no tokenizer."""
    if args.job.dataset != (SYNTHETIC,):
        tokenizer = loading.load_tokenizer(args.job, chat_template=args.job.chat_template)
        return tokenizer, load_data(tokenizer, args.job, args.training, data_parallel_size=args.data_parallel_size)
    vocabulary = loading.from_pretrained(AutoConfig, args.job).get_text_config().vocab_size
    rows = SyntheticRows(args.global_batch_size, length=args.job.max_seq_length, vocabulary=vocabulary)
    return None, Data(train=rows, stats=rows.stats(packed=args.job.packing))


class SyntheticRows(Dataset[dict[str, Any]]):  # type: ignore[misc]
    """Random tokens, all supervised: rows of the maximum length, so that a batch is as large as it can get.

    `count` is one global batch; the Trainer starts over at its end.
    """

    def __init__(self, count: int, *, length: int, vocabulary: int) -> None:
        self.count, self.length, self.vocabulary = count, length, vocabulary

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, self.vocabulary, (self.length,), generator=generator).tolist()
        return {"input_ids": tokens, "labels": tokens, "rows": [index], "documents": [self.length]}

    def stats(self, *, packed: bool) -> DataStats:
        """Return the statistics that rows of a file would have."""
        return DataStats(
            format=SYNTHETIC,
            rows=self.count,
            dropped_rows=0,
            epoch_rows=self.count,
            truncated_rows=0,
            tokens=self.count * self.length,
            supervised_tokens=self.count * (self.length - 1),
            longest_row_tokens=self.length,
            sample="",
            packs=self.count if packed else None,
            pack_fill_fraction=1.0 if packed else None,
        )


def rehearsal_model(
    arguments: ModelArguments, *, compute_dtype: torch.dtype, layout_at_load: ParallelLayout | None
) -> Any:
    """Return the model of a local folder with weights; without weights, the same shapes with random values.

    With a `layout_at_load`, transformers shards it while it makes it.
    """
    how: dict[str, Any] = {"compute_dtype": compute_dtype, "layout": layout_at_load}
    if has_local_weights(str(arguments.model_name_or_path)):
        model = loading.load_model(arguments, **how)
    else:
        model = model_from_config(arguments, **how)
        if layout_at_load is None:
            fill_at_random(model)
    fill_shards(model)
    return model


def model_from_config(
    arguments: ModelArguments, *, compute_dtype: torch.dtype, layout: ParallelLayout | None = None
) -> Any:
    """Return the model, sharded as it is made where the engine or the `layout` does so.

    Its weights are random with a `layout`, and not initialised without one.
    """
    how: dict[str, Any] = {"dtype": loading.loaded_dtype(arguments, compute_dtype)}
    if arguments.attn_implementation:
        how["attn_implementation"] = arguments.attn_implementation
    if layout is None:
        config = loading.from_pretrained(AutoConfig, arguments)
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=arguments.trust_remote_code, **how)
        model.tie_weights()
    else:
        # An empty checkpoint: transformers shards a model only as it loads it, and makes what one lacks at random.
        how["distributed_config"] = distributed_config(layout, half=compute_dtype == torch.bfloat16)
        plain = loading.model_without_weights(arguments)
        logging.getLogger("transformers.modeling_utils").setLevel(logging.ERROR)  # every weight would be missing
        model = type(plain).from_pretrained(None, config=plain.config, state_dict={}, **how)
    return loading.prepare_model(model, arguments, compute_dtype=compute_dtype)


# -- parts of the Trainer


class RehearsedVerification(Verification):
    """Verifies one rank's readings; sums over ranks and full weights cannot be read."""

    def read_before_training(self, model: Any) -> RankReading:
        del model  # gathered weights would be those that no other rank has sent
        return RankReading.of(initial_weights_sha256=None, packing=None)

    def expected_values(self) -> Values:
        stand_ins = ("packing_mask_bytes", "ddp_comm_hook")  # DDP's hook is `_own_bucket`
        return {name: value for name, value in super().expected_values().items() if name not in stand_ins}

    def differences(self, expected: Values, ranks: list[RankReading], norms: list[Values]) -> list[Difference]:
        del norms  # this rank's share alone
        return differences(expected, ranks)

    def byte_differences(self, ranks: list[RankReading]) -> list[Difference]:
        return byte_limit_differences(ranks)


class RehearsedTimer(StepTimer):
    """Writes rows that are marked as rehearsed and have no loss; reads the allocator's peaks by phase too.

    The peaks of `load`, `forward`, `backward` and `step` are the host's statistics, so nothing waits for the device. A
    CPU has none.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.phase = "load"
        self.phase_peaks: dict[str, dict[str, int]] = {}

    def read_peaks(self) -> dict[str, dict[str, int]]:
        """Return `peak_allocated_bytes` and `peak_reserved_bytes` of every phase, the current one included."""
        if self.cuda:
            sizes = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            before = self.phase_peaks.get(self.phase, {})
            peaks = {name: max(size, before.get(name, 0)) for name, size in zip(PEAKS, sizes, strict=True)}
            self.phase_peaks[self.phase] = peaks
        return self.phase_peaks

    def _enter(self, phase: str) -> None:
        self.read_peaks()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        self.phase = phase

    def add_batch(self, *args: Any) -> None:
        self._enter("forward")
        super().add_batch(*args)

    def enter_backward(self) -> None:
        super().enter_backward()
        self._enter("backward")

    def add_loss(self, loss: torch.Tensor) -> None:
        self._enter("step")
        super().add_loss(loss)

    def read_memory(self) -> dict[str, Any]:
        phases = self.read_peaks().values()  # the allocator's own peaks begin again with each phase
        return super().read_memory() | {name: max(peaks[name] for peaks in phases) for name in PEAKS if phases}

    def _row(self, number: int, step: Any) -> StepRow:
        meaningless: dict[str, Any] = dict.fromkeys(MEANINGLESS_COLUMNS)
        return super()._row(number, step).model_copy(update=meaningless | {"rehearsed": True})

    def _after_row(self, row: StepRow, step: Any) -> None:
        del step  # a loss that is not finite says nothing about the job
        of_steps = f"{row.step}/{self.step_lines.max_steps}"
        print(f"step {of_steps} rehearsed  {row.seconds:.2f} s of compute", flush=True)

    def print_log(self, *_: Any) -> None:
        """Nothing: what is logged has no meaning here."""


REHEARSAL_PARTS = TrainerParts(
    timer=RehearsedTimer, verification=RehearsedVerification, callbacks=lambda trainer: [FakeOtherRanks(trainer)]
)


def measured_facts(
    run: ObservedRun, rehearsed: RehearsedRank, observer: Observer, *, untimed_steps: int
) -> dict[str, Any]:
    """Return what was read back from this rank's live objects after its first step, and its peaks."""
    reading, rows = observer.verification.reading, read_rows(run.folder.rank_rows(rehearsed.rank))
    timer = observer.timer
    assert reading is not None
    assert isinstance(timer, RehearsedTimer)
    timed = [row.seconds for row in rows[untimed_steps:]]
    return {
        **asdict(rehearsed),
        "steps": len(rows),
        **{name: getattr(reading, name) for name in (*MODEL_STATES, "num_params", "num_trainable_params")},
        **{
            name: max((size for row in rows if (size := getattr(row, name))), default=None)
            for name in (*PEAKS, "peak_host_bytes")
        },
        # On a CPU, fp32 arithmetic says nothing about a GPU's step.
        "compute_step_seconds": statistics.median(timed) if timed and str(reading.device).startswith("cuda") else None,
        "not_measured": list(NOT_MEASURED),
        "phase_peaks": timer.read_peaks(),
    }

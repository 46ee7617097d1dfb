"""A training job as the planner sees it, and the checks of its values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import Gpu
from toolkit.hardware.gpus import count_gpus
from toolkit.job.accumulation import ACCUMULATE, SHARDED, WHOLE
from toolkit.job.argument_fields import ARGUMENTS
from toolkit.job.argument_values import Range, check_range, check_word
from toolkit.job.job import BATCH_ARGUMENTS, Job
from toolkit.models.attention import (
    AUTO,
    KERNEL,
    attention_words,
    needs_no_mask,
    packed_attention,
    read_model_attention,
)
from toolkit.models.job_weights import FP32_BITS, JobWeights, QuantizedBase, job_weights
from toolkit.models.lora import ALL_LINEAR, check_adapted_modules, check_lora_targets
from toolkit.models.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS, OptimizerSpec, is_low_rank, optimizer_spec
from toolkit.models.shape import MATH, ModelShape
from toolkit.models.split import WORDS, read_split
from toolkit.models.vision_tower import check_image_tokens
from toolkit.parallel.layout import DEGREES
from toolkit.plan.methods import SFT, SUPERVISED, Method, check_method
from toolkit.plan.programs import OURS, PROGRAMS, TOOLKIT, Numerics, check_numerics, numerics_of
from toolkit.presets.compatibility import ModelLimits
from toolkit.presets.spec import PresetSpec, default_accumulate
from toolkit.presets.support import check_supported
from toolkit.units import GIB

# What TRL's trainers of methods, other than the reward model's, computed their losses from.
EARLIER_LOSSES = {"upcast": "log_softmax", "full": "completions"}
LOSSES = ("chunked", "full", "fused", "chunked_output", "cut", "upcast", "bf16")
# Larger values are typing errors: no cluster has so many GPUs.
LARGEST_DEGREE = 2**10
LARGEST_WORLD_SIZE = 2**20
# torch gives each of its handles of cuBLAS a workspace from the allocator, and each thread has a handle: the one that
# computes the forward, and autograd's. Jobs on an H200 needed 64 MiB more than planned without them.
BLAS_HANDLES = 2
LOG_PROBABILITY_BYTES = 4  # saved per logit between forward and backward
# Options whose default other programs' versions decide.
OPEN_OPTIONS = ("attn_implementation", "pure_bf16", "save_on_gpu", "zero3_init", "looped_experts")

# What a plan depends on, beside the choices that `PlannedJob.of` makes.
PLANNED_ARGUMENTS = (
    *(*BATCH_ARGUMENTS, "packing", "attn_implementation", "lora_r", "lora_target_modules", "load_in_4bit", "optim"),
    *("loss_chunk_tokens", "async_save", "pipeline_schedule", "pipeline_chunks", *DEGREES),
    *("activation_checkpointing_offload", "activation_checkpointing_selective"),
    *("eval_strategy", "per_device_eval_batch_size"),
)


@dataclass(frozen=True, kw_only=True)
class PlannedJob(Job):
    """A job as the planner sees it: every choice made, and what it assumes of the nodes and the rows."""

    loss: str = "chunked"
    """`chunked`: ours, head included; `full`: transformers' own; `fused`: Liger's; `chunked_output`: torchtune's;
    `cut`: cut cross entropy; `upcast`: transformers' of 2024, and TRL's of methods; `bf16`: a loop without fp32."""
    numerics: Numerics = OURS
    activation_checkpointing: bool = False
    gpus_per_node: int = 8
    method: Method = SUPERVISED
    gradient_as_bucket_view: bool | None = None
    """False where gradients under DDP exist twice, on their own and in the buckets; None: in all methods but `sft`."""
    workspace_bytes: int = 0  # what the matrix products of a GPU keep of its memory
    without_fused_attention: bool = False
    image_tokens: int | None = None  # 0: rows of text alone; None: not said, and planned as text
    """Tokens of images in each row, of `tokens_per_row`."""
    freeze_vision_tower: bool = False
    eval_rows: int = 0  # rows whose logits an evaluation keeps on each GPU for `compute_metrics`
    not_given: tuple[str, ...] = ()  # of `OPEN_OPTIONS`
    lengths_differ: bool | None = None
    """True if rows of one micro-batch have different lengths; None: if there is more than one row."""

    @property
    def attention_with_scores(self) -> str | None:
        """The kind of attention that saves its scores, if it does."""
        return "eager" if self.attn_implementation == "eager" else MATH if self.without_fused_attention else None

    @classmethod
    def of(cls, job: Job) -> PlannedJob:
        """Return the planner's view of a job. Raises ToolkitError for an optimizer that is not planned."""
        check_supported(None, Job(optim=job.optim), purpose="plan")
        loss = "fused" if job.use_liger_kernel else "chunked"
        kernels = {"rms_norm": True, "swiglu": True, "geglu": True, **(job.liger_kernel_config or {})}
        return cls(
            **{name: getattr(job, name) for name in PLANNED_ARGUMENTS},
            accumulate=job.chosen_accumulate,
            activation_checkpointing=job.uses_activation_checkpointing,
            use_liger_kernel=job.use_liger_kernel and kernels["rms_norm"] and (kernels["swiglu"] or kernels["geglu"]),
            loss=loss if job.loss == "auto" else job.loss,
            optim_args=job.optim_args,
            other={name: value for name, value in job.other.items() if name == "optim_target_modules"},
            numerics=Numerics(dora=bool((job.lora_config or {}).get("use_dora"))),
        )

    @classmethod
    def from_options(cls, options: object, *, full_length: bool) -> PlannedJob:
        """Return the job of a command's options, which have the names of its fields; None is the field's default."""
        names = (
            *PLANNED_ARGUMENTS,
            "accumulate",
            "optim_args",
            "activation_checkpointing",
            "use_liger_kernel",
            "loss",
            "gradient_as_bucket_view",
            "gpus_per_node",
            "image_tokens",
            "freeze_vision_tower",
            "eval_rows",
        )
        given = {name: value for name in names if (value := getattr(options, name, None)) is not None}
        given["lora_target_modules"] = given.get("lora_target_modules") or ALL_LINEAR
        if given.get("activation_checkpointing_offload") or given.get("activation_checkpointing_selective"):
            given.setdefault("activation_checkpointing", True)
        if getattr(options, "oft_block_size", None):
            given.setdefault("lora_r", 1)  # adapters beside frozen weights, without a rank
        if getattr(options, "per_device_eval_batch_size", None) or given.get("eval_rows"):
            given["eval_strategy"] = "epoch"
        if targets := getattr(options, "optim_target_modules", None):
            given["other"] = {"optim_target_modules": targets if len(targets) > 1 else targets[0]}
        method, lora = Method.from_options(options), given.get("lora_r") is not None
        numerics = numerics_of(options, method=method.method, lora=lora, in_4bit=bool(given.get("load_in_4bit")))
        if "loss" not in given:
            ours = PROGRAMS[numerics.program].loss if method.method == SFT else "chunked"
            given["loss"] = "fused" if given.get("use_liger_kernel") else ours
        not_given = tuple(name for name in OPEN_OPTIONS if getattr(options, name, None) is None and name not in given)
        lengths_differ = False if full_length else None
        return cls(**given, numerics=numerics, method=method, not_given=not_given, lengths_differ=lengths_differ)

    def other_readings(self) -> Iterator[tuple[str, PlannedJob]]:
        """Yield the jobs with more memory that this one may be, each with the option that would say that it is not."""
        numerics, decided = self.numerics, replace(self, not_given=())
        if "attn_implementation" in self.not_given and PROGRAMS[numerics.program].any_attention:
            yield "--attn-implementation sdpa", replace(decided, attn_implementation="eager")
        if "pure_bf16" in self.not_given and numerics.pure_bf16 and numerics.program == "trainer":
            # transformers 4 loads in fp32, and so does a script that says so
            yield "--pure-bf16", replace(decided, numerics=replace(numerics, pure_bf16=False))
        if "save_on_gpu" in self.not_given and numerics.fsdp1 and numerics.program == TOOLKIT:
            yield "--no-save-on-gpu", replace(decided, numerics=replace(numerics, save_on_gpu=True))
        if "zero3_init" in self.not_given and self.is_of_another_program:
            yield "--zero3-init", replace(decided, numerics=replace(numerics, zero3_init=False))

    def least_reading(self) -> PlannedJob:
        """Return the job with the least memory that another program's may be.

        Rows that are cut may all be shorter, here half as long; Unsloth moves checkpoints to the host; and gradients
        can wait sharded between accumulation steps, which nothing says.
        """
        least = self
        if not self.packing and self.lengths_differ is not False:
            length = max(self.max_seq_length // 2, 1)
            least = replace(
                least, max_seq_length=length, image_tokens=self.image_tokens and min(self.image_tokens, length)
            )
        if self.numerics.program == "unsloth" and self.activation_checkpointing:
            least = replace(least, activation_checkpointing_offload=True)
        return replace(least, accumulate=self.accumulate or SHARDED)

    @property
    def is_of_another_program(self) -> bool:
        """True if `toolkit train` does not train this: another program is named, or numerics that it has not."""
        numerics = self.numerics
        others = numerics.fsdp1 or numerics.pure_bf16 or numerics.kbit_training or numerics.fp32_base
        return numerics.program != TOOLKIT or others or self.loss in ("upcast", "bf16", "cut", "chunked_output")

    @property
    def evaluation(self) -> PlannedJob | None:
        """The job of an evaluation's batches; None where there are none.

        Liger's loss makes all logits there: it skips those of the training alone (0.8.5, `lce_forward`: `skip_logits`).
        So does Unsloth's (2026.8.19, `unsloth_prediction_step`: `UNSLOTH_RETURN_LOGITS`), and metrics need them.
        """
        if not self.evaluates or self.method.generates:
            return None
        makes_logits = self.loss == "fused" or self.numerics.program == "unsloth" or self.eval_rows
        loss = "full" if makes_logits and self.loss in ("fused", "cut", "chunked") else self.loss
        return replace(self, per_device_train_batch_size=self.per_device_eval_batch_size, loss=loss)

    @property
    def quantized_base(self) -> QuantizedBase | None:
        """How the base is held, where it is not in the compute dtype, or in NF4 as the toolkit stores it."""
        numerics = self.numerics
        if not (self.load_in_4bit or numerics.load_in_8bit):
            return QuantizedBase(bits=FP32_BITS) if numerics.fp32_base else None
        base = QuantizedBase(
            bits=8 if numerics.load_in_8bit else 4,
            double_quantization=numerics.double_quantization,
            upcast_rest=numerics.kbit_training,
            experts=numerics.experts_in_4bit,
            shards=numerics.sharded_4bit,
        )
        return None if base == QuantizedBase() else base

    @property
    def optimizer(self) -> OptimizerSpec:
        """What the optimizer keeps. Raises ToolkitError for a projection that is not planned."""
        spec = optimizer_spec(self.optim, self.optim_args, self.value("optim_target_modules"))
        if spec is None:
            message = f"--optim_args {self.optim_args} is not planned for --optim {self.optim}"
            words = "rank=128,proj_type=std" if is_low_rank(self.optim) else "rank_fraction=0.25,algorithm=adamw"
            raise ToolkitError(message, hint=f"`--optim_args {words}`")
        return spec

    @property
    def has_bucket_views(self) -> bool:
        """True if DDP's gradients are views of its buckets."""
        given = self.gradient_as_bucket_view
        return (self.method.method == SFT and self.numerics.program == TOOLKIT) if given is None else given

    @property
    def keeps_whole_gradients(self) -> bool:
        """True if gradients are to wait unsharded for the last accumulation step, which is a choice under FSDP.

        Other programs leave it to the Trainer, which makes that choice (transformers 5.23, `_run_epoch`; as in 4.28).
        Under FSDP2 it had no effect before accelerate 1.11 (huggingface/accelerate#3762).
        """
        others = self.numerics.program != TOOLKIT or self.numerics.fsdp1
        chosen = self.accumulate or (WHOLE if others else None)
        return chosen == WHOLE and self.gradient_accumulation_steps > 1

    def accumulate_under(self, preset: PresetSpec) -> str | None:
        """Return `sharded` or `whole`: how gradients wait between accumulation steps; None where there is one step."""
        if preset.traits.chooses_accumulation and self.keeps_whole_gradients:
            return WHOLE
        return (self.accumulate or default_accumulate(preset)) if self.gradient_accumulation_steps > 1 else None

    @property
    def rows(self) -> int:
        """Rows of a forward: a preference pair is two."""
        return self.method.spec.rows * self.per_device_train_batch_size

    @property
    def method_loss(self) -> str:
        """What the method's trainer computes the loss from, as `logits` names it.

        TRL's of 2024 made fp32 logits of all tokens, as LLaMA-Factory's do (0.9, `get_batch_logps`), and those of 2025
        the logits of all that are scored.
        """
        if self.loss in EARLIER_LOSSES and self.method.spec.loss != "scores":
            return EARLIER_LOSSES[self.loss]
        return PROGRAMS[self.numerics.program].method_loss.get(self.method.method, self.method.spec.loss)

    @property
    def tokens_per_forward(self) -> int:
        """Tokens of a forward, all rows at full length."""
        return self.rows * self.tokens_per_row

    @property
    def is_padded(self) -> bool:
        """True if rows of one micro-batch differ in length. Packed rows are full."""
        differ = self.rows > 1 if self.lengths_differ is None else self.lengths_differ
        return differ and not self.packing

    def packs_without_mask(self, shape: ModelShape) -> bool:
        """Return True if packed rows get an attention function that takes the lengths of their documents.

        FlexAttention's mask of blocks counts as none: a few bytes per 128 x 128 positions.
        """
        name = self.attn_implementation
        if not self.packing or name not in (None, AUTO):
            return self.packing and (needs_no_mask(name) or name == "flex_attention")
        model = read_model_attention({"model_type": shape.model_type})
        # any GPU, without a package: what the plan assumes of the memory is the same with flash attention
        return packed_attention(model, capability=(0, 0), half_precision=True) is not None

    @cached_property
    def as_trained(self) -> Job:
        """The job as the compatibility rules see it: losses have names of their own in the planner.

        FSDP1's flat parameters are plain tensors, which every optimizer takes.
        """
        optim = DEFAULT_OPTIMIZER if self.numerics.fsdp1 else self.optim
        return replace(self, loss="auto", use_liger_kernel=self.use_liger_kernel or self.loss == "fused", optim=optim)

    def weights(self, shape: ModelShape, *, element_bytes: int = 2) -> JobWeights:
        """Return the tensors that this job trains and freezes of a model; untrained ones take `element_bytes` each."""
        return job_weights(
            shape,
            self.lora_r,
            self.load_in_4bit,
            self.lora_target_modules,
            element_bytes,
            self.quantized_base,
            self.freeze_vision_tower,
            self.numerics.dora,
            self.numerics.oft_block_size,
        )

    def limits_on(self, shape: ModelShape) -> ModelLimits:
        """Return how far this model can be split, and for what of the job there are no figures then."""
        if not self.degrees:
            return ModelLimits(split=None)
        own_names = {"num_key_value_heads": "num_kv_heads", "num_hidden_layers": "num_layers"}
        fields = {name: getattr(shape, own_names.get(name, name)) for name in ("model_type", *WORDS)}
        not_planned = {}
        if shape.activations_from != "formulas":
            not_planned["tp"] = "there are no formulas for what each tensor of its layers saves"
        adapters = job_weights(shape, self.lora_r, False, self.lora_target_modules).adapters or {}
        if any(tensor.is_expert for layer in adapters.values() for tensor in layer):
            not_planned["lora"] = "it adapts experts, of which no run has shown who holds the adapters"
        return ModelLimits(split=replace(read_split(fields), not_planned=not_planned))

    @property
    def argument_values(self) -> dict[str, Any]:
        """Length, batch, degrees, and what is not the default, as training arguments."""
        values = {name: self.value(name) for name in BATCH_ARGUMENTS} | self.degrees
        kinds = ("activation_checkpointing", "activation_checkpointing_offload", "activation_checkpointing_selective")
        chosen = ("accumulate", *kinds, "lora_r", "load_in_4bit")
        values |= {name: self.value(name) for name in chosen if self.value(name)}
        return values | ({} if self.optim == DEFAULT_OPTIMIZER else {"optim": self.optim})

    @property
    def method_text(self) -> str:
        """Training method, for people."""
        name = "" if self.method.method == SFT else f"{self.method.method.upper()}, "
        if self.lora_r is None:
            return f"{name}full fine-tune"
        base = "QLoRA" if self.load_in_4bit else "8-bit LoRA" if self.numerics.load_in_8bit else "LoRA"
        if block := self.numerics.oft_block_size:
            return f"{name}{base.replace('LoRA', 'OFT')} in blocks of {block}"
        return f"{name}{base} r={self.lora_r}"


def check_planned_job(job: PlannedJob, shape: ModelShape) -> None:
    """Raise ToolkitError for values out of range, and for combinations that cannot be trained."""
    for name in (*PLANNED_ARGUMENTS, "gpus_per_node"):
        value = getattr(job, name)
        if isinstance(value, int) and not isinstance(value, bool):
            limits = ARGUMENTS[name].metadata.get("limits") if name in ARGUMENTS else None
            check_size("--" + name.replace("_", "-"), value, LARGEST_DEGREE if limits is None else int(limits.highest))
    rows, is_lora = job.per_device_train_batch_size, job.lora_r is not None
    check_method(job.method, rows=rows, row_tokens=job.tokens_per_row, lora=is_lora)
    losses = ("chunked", "fused", *(() if job.method.spec.loss == "scores" else EARLIER_LOSSES))
    if job.method.method != SFT and (job.packing or job.loss not in losses):
        option = "--packing" if job.packing else "--loss"
        raise ToolkitError(
            f"{option} is for --method {SFT}: {job.method.method} has a loss of its own", hint="leave it out"
        )
    check_word("--loss", job.loss, LOSSES)
    if job.image_tokens or job.freeze_vision_tower:
        check_image_tokens(shape, job.image_tokens or 0, job.tokens_per_row)
    if job.optim in OPTIMIZERS and is_low_rank(job.optim) and not job.value("optim_target_modules"):
        message = f"--optim {job.optim} projects the modules of optim_target_modules, and there are none"
        raise ToolkitError(message, hint="`--optim-target-modules all-linear`")
    check_numerics(job.numerics, lora=is_lora, in_4bit=job.load_in_4bit)
    if job.accumulate is not None:
        check_word("--accumulate", job.accumulate, ACCUMULATE)
    if job.attn_implementation is not None and not KERNEL.fullmatch(job.attn_implementation):
        check_word("--attn-implementation", job.attn_implementation, attention_words())
    model_attention = read_model_attention({"model_type": shape.model_type})
    check_supported(None, job.as_trained, model=ModelLimits(attention=model_attention), purpose="plan")
    if job.lora_r is None:
        return
    if job.lora_r > shape.hidden_size > 0:
        raise ToolkitError(f"--lora-r is {job.lora_r}, expected at most the hidden size {shape.hidden_size}")
    check_lora_targets(shape, job.lora_target_modules)
    if job.numerics.dora or job.numerics.oft_block_size:
        method = "DoRA" if job.numerics.dora else "OFT"
        check_adapted_modules(shape, job.lora_target_modules, method=method)


def on_gpu(job: PlannedJob, gpu: Gpu, *, fp16: bool | None) -> PlannedJob:
    """Return the job with what a GPU decides: what a colocated vLLM takes of it, and fp16 where it has no bf16 units.

    `fp16` is the user's choice. Without it such a GPU has no fused kernel of SDPA for bf16 (torch 2.13,
    `sdp_utils.cpp`: flash attention needs compute capability 8.0, memory-efficient attention for bf16 too).
    """
    if job.numerics.fp8 and not gpu.has_fp8:
        raise ToolkitError(f"--fp8 needs a GPU with FP8 units, and {gpu.name} has none", hint="leave it out")
    job = replace(job, method=replace(job.method, gpu_memory_bytes=gpu.memory_bytes))
    if fp16 is None and gpu.peak_flops("bf16") is None and gpu.peak_flops("fp16") is not None:
        return replace(job, numerics=replace(job.numerics, fp16=True))
    without = gpu.peak_flops("bf16") is None and not job.numerics.fp16 and gpu.peak_flops("fp16") is not None
    return replace(job, without_fused_attention=without and job.attn_implementation in (None, "sdpa"))


@lru_cache(maxsize=64)
def with_attention(shape: ModelShape, name: str | None) -> ModelShape:
    """Return a model of formulas with attention that saves its scores, by `attention_with_scores`; the same object for
    the same model, as caches need it."""
    return replace(shape, attention=name) if name and shape.activations_from == "formulas" else shape


def with_workspaces(job: PlannedJob, gpu: Gpu) -> PlannedJob:
    """Return the job with the workspaces that torch has on a GPU."""
    workspace_bytes = BLAS_HANDLES * gpu.blas_workspace_bytes
    return job if job.workspace_bytes == workspace_bytes else replace(job, workspace_bytes=workspace_bytes)


def check_world_size(world_size: int) -> None:
    """Raise ToolkitError for a number that cannot be a world size."""
    check_size("--num-processes", world_size, LARGEST_WORLD_SIZE)


def scaled(option: str, value: float | None, unit: int) -> int | None:
    """Return an option's value in bytes, None if it is not given. Raises ToolkitError for one out of range."""
    if value is not None and not 0 < value < 10**6:
        raise ToolkitError(f"{option} is {value}, expected more than 0 and below a million")
    return None if value is None else round(value * unit)


def node_memory(given_gib: float | None = None, gpu: str | None = None) -> int | None:
    """Return a node's host memory: as given, or this node's where no GPU is named and one is visible; else None."""
    given = scaled("--host-memory-gib", given_gib, GIB)
    if given is not None or gpu is not None or not count_gpus():
        return given
    from toolkit.hardware.node import usable_memory_bytes  # a browser has no such limits

    return usable_memory_bytes()


def check_size(option: str, value: int, largest: int) -> None:
    """Raise ToolkitError for a value below 1 or above `largest`."""
    check_range(option, value, Range(lowest=1, highest=largest))

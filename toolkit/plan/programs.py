"""The numerics of the program that trains: what it holds in which dtype, and what it allocates beside the toolkit.

`--program NAME` takes the defaults of a program; each of them is an option too, which wins. Every cell of `PROGRAMS`
was read in the source at the version named. What is known to differ and is not planned is in `notes`, with its size
where somebody measured it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.job.argument_values import check_word

TOOLKIT = "toolkit"
FSDP1 = (
    "FSDP1 is planned as FSDP2: with adapters it held 14 to 37 % more (26 published jobs), with offload 34 to 59 % (3)"
)
COMPILED = "torch.compile: plans of compiled jobs were 19 to 33 % too high (five of torchtune, one GPU)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """What a program's numerics decide in a plan."""

    program: str = TOOLKIT
    pure_bf16: bool = False
    """Trained weights in bf16 without fp32 masters, so their gradients and AdamW's states are bf16 too."""
    fsdp2_masters: bool = False
    """Under FSDP2 these are fp32 all the same: accelerate 1.15 converts what is trained (`fsdp_utils.py:815`)."""
    load_in_8bit: bool = False
    looped_experts: bool = False
    """Experts run one after the other in Python: transformers 4, and 5 where torch has no grouped matrix
    multiplication (below 2.9 on GPUs before Hopper; transformers 5.23, `_can_use_grouped_mm`)."""
    kbit_training: bool = False
    """peft's `prepare_model_for_kbit_training`: embeddings, head, norms and the residual stream are fp32."""
    double_quantization: bool = True
    sharded_4bit: bool = True
    """4-bit weights in a floating dtype. accelerate 1.15 leaves those in uint8, bitsandbytes' default, out of FSDP2's
    sharding, so that every rank holds all of them (`fsdp_utils.py:795`)."""
    experts_in_4bit: bool = True  # fused experts are quantized too; transformers 5 quantizes linear layers alone
    fp8: bool = False
    """torchao's `Float8Linear`, which accelerate makes of linear layers but the first and the last: weights, gradients
    and states stay as they are, and what is saved for the backward too (torchao 0.18, `matmul_with_hp_or_float8_args`).
    """
    fp16: bool = False  # fp16 with a loss scale in the place of bf16: the same bytes, other kernels
    peft_input_cast: bool = False
    """Inputs of adapters cast to their fp32, which autocast casts back: a copy for each adapter."""
    lora_dropout: float = 0.0
    dora: bool = False
    oft_block_size: int = 0  # OFT in the place of LoRA; 0: LoRA
    fp32_base: bool = False
    """The base of adapters in fp32, with its residual stream, where it is not quantized; DeepSpeed makes it bf16."""
    expandable_segments: bool = False
    torch_compile: bool = False
    library_buckets: bool = False
    """DeepSpeed's own sizes of buckets: accelerate's file without a DeepSpeed file has no `auto`."""
    fsdp1: bool = False
    save_on_gpu: bool = False
    """FSDP's state dict is gathered on every GPU, in fp32, where nothing sends it to the host: the Trainer did not
    until 4.30, accelerate does since (`get_state_dict`)."""
    zero3_init: bool = True
    """Weights are sharded as they are loaded. With `zero3_init_flag: false` DeepSpeed first moves all of them to each
    GPU (0.19.8, `_configure_distributed_model`)."""
    data_parallel: int = 0  # GPUs of one process, under torch's `DataParallel`; 0: one
    tiled_mlp: bool = False
    """A layer's MLP takes a part of the rows after the other, as in TRL's guide to long rows: its gradients are those
    of one part. What it saves stays."""


REPLICAS = "the speed is that of one GPU, without DataParallel's replicas"
FP8 = "the time that FP8 saves, and what an FP8 all-gather does: matrix products are planned in bf16"
OFT = "the time that OFT's rotations take, of which nothing was measured"
OURS = Numerics()


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """The defaults of one program, and its source."""

    source: str
    numerics: Mapping[str, Any]
    loss: str = "full"  # without its own option for another
    full_numerics: Mapping[str, Any] = field(default_factory=dict)  # of a full fine-tune alone
    quantized_numerics: Mapping[str, Any] = field(default_factory=dict)  # of adapters beside quantized weights alone
    kbit_methods: tuple[str, ...] = ()
    method_loss: Mapping[str, str] = field(default_factory=dict)
    """Methods whose trainer is its own, and what it computes the loss from, as `logits` names it."""
    any_attention: bool = False
    """Where nothing names an attention function, some versions and models have the eager one."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """What is not planned, by the jobs that have it: `lora`, a method's name, or `` for all."""


_NONE: Mapping[str, Any] = {}
_LINEAR_ALONE = {"experts_in_4bit": False}
_BF16 = {"pure_bf16": True, "fsdp2_masters": True}
PROGRAMS: Mapping[str, Program] = {
    TOOLKIT: Program(source="", numerics=_NONE, loss="chunked"),
    "trl": Program(
        source="TRL 1.16.0: trainer/model_config.py:90 (float32), :165 (no nested quantization), "
        "trainer/sft_trainer.py:911, experimental/orpo/orpo_trainer.py:232, experimental/cpo/cpo_trainer.py:222",
        numerics={"double_quantization": False, "peft_input_cast": True, "fp32_base": True, "library_buckets": True},
        full_numerics={"fp32_base": False},
        # the adapters are bf16
        quantized_numerics={"peft_input_cast": False, "fp32_base": False, "sharded_4bit": False, **_LINEAR_ALONE},
        loss="chunked",
        kbit_methods=("orpo", "simpo"),
        any_attention=True,
    ),
    "axolotl": Program(
        source="axolotl 0.18.0: loaders/model.py:473 (norms and embeddings cast back), :606 (bf16), :718; "
        "utils/__init__.py:84, monkeypatch/accelerate/fsdp2.py (its own `fsdp2_prepare_model` converts nothing)",
        numerics={"peft_input_cast": True, "expandable_segments": True},
        full_numerics={"pure_bf16": True},
        notes={"lora": "its Triton kernels for LoRA (`lora_mlp_kernel` and others) save less than is planned"},
        any_attention=True,
    ),
    "llama-factory": Program(
        source="LLaMA-Factory 0.9.5: hparams/model_args.py:291, model/adapter.py:349 (trained weights in fp32), "
        "train/dpo/trainer.py and train/kto/trainer.py (`concatenated_forward`, `forward`: fp32 logits of all tokens)",
        numerics={"peft_input_cast": True},
        method_loss=dict.fromkeys(("dpo", "kto", "orpo", "simpo"), "log_softmax"),
        notes={
            "reward": "the logits that its reward models make too: 8 bytes per token and vocabulary entry",
        },
        any_attention=True,
    ),
    "ms-swift": Program(
        source="ms-swift 4.5.2: arguments/base_args/quant_args.py:42, model_args.py:135 (the checkpoint's dtype), "
        "pipelines/train/tuner.py:402 (adapters alone are converted, from fp16), rlhf_trainers/dpo_trainer.py:119 and "
        "rlhf_mixin.py:158 (logits of all tokens), grpo_trainer.py:1568 (of completions)",
        numerics={"peft_input_cast": True},
        full_numerics=_BF16,
        quantized_numerics={"sharded_4bit": False, **_LINEAR_ALONE},  # quant_args.py: `bnb_4bit_quant_storage`
        method_loss=dict.fromkeys(("dpo", "kto"), "simpo") | dict.fromkeys(("grpo", "rloo"), "completions"),
        notes={"sft": "logits of answers alone (`use_logits_to_keep`): those of prompts are planned, but not made"},
        any_attention=True,
    ),
    "unsloth": Program(
        source="Unsloth 2026.10: its cross entropy without logits, nested quantization",
        numerics=_NONE,
        loss="cut",
        notes={"": "its checkpoints in host memory: 2 bytes per token, hidden size and layer less"},
    ),
    "torchtune": Program(
        source="torchtune 0.6.1: recipes/configs/*/*_single_device.yaml (`dtype: bf16`), modules/loss",
        numerics={"pure_bf16": True},
        loss="chunked_output",
        notes={"": "8-bit optimizers of torchao, and an optimizer step inside of the backward"},
    ),
    "trainer": Program(
        source='transformers 5.23: `from_pretrained(dtype="auto")` keeps a bf16 checkpoint\'s dtype; '
        "utils/quantization_config.py (`bnb_4bit_quant_storage` is uint8)",
        numerics={"peft_input_cast": True},
        quantized_numerics={"sharded_4bit": False, **_LINEAR_ALONE},
        full_numerics=_BF16,
        any_attention=True,
    ),
}
NUMERICS_OPTIONS = tuple(
    field.name for field in fields(Numerics) if field.name not in ("program", "fsdp2_masters", "library_buckets")
)


def numerics_of(options: object, *, method: str, lora: bool, in_4bit: bool) -> Numerics:
    """Return the numerics of a command's options: those given, and for the others the program's.

    Raises ToolkitError for an unknown program.
    """
    name = getattr(options, "program", None) or TOOLKIT
    check_word("--program", name, list(PROGRAMS))
    program = PROGRAMS[name]
    given = {each: value for each in NUMERICS_OPTIONS if (value := getattr(options, each, None)) is not None}
    quantized = in_4bit or bool(given.get("load_in_8bit"))
    chosen = dict(program.numerics) | dict(_NONE if lora else program.full_numerics)
    if quantized:
        chosen |= dict(program.quantized_numerics) | {"kbit_training": method in program.kbit_methods}
    chosen |= {"fsdp2_masters": False} if "pure_bf16" in given else {}
    return Numerics(program=name, **(chosen | given))


def numerics_text(numerics: Numerics) -> str:
    """Return what differs from the toolkit's numerics, for people; empty where nothing does."""
    words = {
        "pure_bf16": "trained weights and states in bf16",
        "kbit_training": "fp32 embeddings, norms and residual stream",
        "dora": "DoRA",
        "fp8": "linear layers in FP8",
        "fp16": "fp16",
        "fp32_base": "base in fp32",
        "expandable_segments": "expandable segments",
        "torch_compile": "compiled",
        "fsdp1": "FSDP1",
        "save_on_gpu": "saved from the GPU",
        "tiled_mlp": "MLP in tiles",
        "looped_experts": "experts in a loop",
        "data_parallel": "GPU 0 of DataParallel",
    }
    parts = [f"numerics of {numerics.program}"] if numerics.program != TOOLKIT else []
    parts += [text for name, text in words.items() if getattr(numerics, name)]
    parts += ["fp32 under FSDP2"] if numerics.fsdp2_masters else []
    parts += [] if numerics.double_quantization else ["no double quantization"]
    parts += [] if numerics.sharded_4bit else ["4-bit weights in uint8, whole on each GPU"]
    parts += [] if numerics.experts_in_4bit else ["fused experts not quantized"]
    return ", ".join(parts)


def check_numerics(numerics: Numerics, *, lora: bool, in_4bit: bool) -> None:
    """Raise ToolkitError for numerics that contradict the job."""
    if numerics.load_in_8bit and in_4bit:
        raise ToolkitError("--load-in-8bit and --load-in-4bit are both given", hint="leave one out")
    if numerics.fp8 and (numerics.fp16 or lora):
        raise ToolkitError("--fp8 is planned for a full fine-tune beside bf16", hint="leave it out")
    if numerics.dora and numerics.oft_block_size:
        raise ToolkitError("--dora and --oft-block-size are both given", hint="leave one out")
    if numerics.dora and not lora:
        raise ToolkitError("--dora needs --lora-r", hint="add `--lora-r 16`")
    for option, is_given in {"8bit": numerics.load_in_8bit, "kbit": numerics.kbit_training}.items():
        if is_given and not lora:
            name = {"8bit": "--load-in-8bit", "kbit": "--kbit-training"}[option]
            raise ToolkitError(f"{name} needs --lora-r: quantized weights are not trained", hint="add `--lora-r 16`")
    if numerics.kbit_training and not (in_4bit or numerics.load_in_8bit):
        raise ToolkitError("--kbit-training needs quantized weights", hint="add `--load-in-4bit`")


def numerics_notes(numerics: Numerics, kinds: Collection[str]) -> tuple[str, ...]:
    """Return what of a program is known to differ from the plan of a job of these kinds (`Program.notes`)."""
    others = {
        COMPILED: numerics.torch_compile,
        FSDP1: numerics.fsdp1,
        OFT: bool(numerics.oft_block_size),
        REPLICAS: numerics.data_parallel > 1,
        FP8: numerics.fp8,
    }
    noted = PROGRAMS[numerics.program].notes.items()
    return (*(note for kind, note in noted if kind in kinds), *(note for note, holds in others.items() if holds))

"""Options of `toolkit plan` and `toolkit recommend`: one dataclass each, from the command line to the planner.

The fields are annotated as Typer parameters, so a new flag is one field here. This module imports nothing of the
planner: `toolkit --help` loads it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from toolkit.flags import PRESET_HELP
from toolkit.job.argument_values import MAX_SEQ_LENGTH
from toolkit.models.optimizers import DEFAULT_OPTIMIZER
from toolkit.parallel.pipeline_schedule import DEFAULT_SCHEDULE, SCHEDULES

DEFAULT_GPUS_HELP = "by default all that are visible"

GpuName = Annotated[str | None, Option(help="GPU name: h100, a100-80gb, rtx-4090, ...; by default this node's")]
GpuMemory = Annotated[float | None, Option(help="memory of a GPU that the table lacks")]
GpuTflops = Annotated[float | None, Option(help="dense bf16 peak of a GPU that the table lacks")]
SeqLength = Annotated[int, Option(help="tokens per sequence")]
GpusPerNode = Annotated[int, Option(help="GPUs per node")]
MethodName = Annotated[str, Option(help="sft, or as TRL trains it: dpo, kto, orpo, simpo, reward, grpo, rloo")]
PrecomputeFlag = Annotated[
    bool,
    Option("--precompute-ref-log-probs", help="dpo, kto: score with the reference before training, then drop it"),
]


def switch(name: str, text: str) -> Any:
    """Return the flag of an option that is on, off, or left to the program and its versions."""
    return Option(f"--{name}/--no-{name}", help=text, show_default=False)  # Typer would break a default at its hyphens


@dataclass(frozen=True, kw_only=True)
class JobAndGpuOptions:
    """Options of both commands, by the names of their flags."""

    gpu: GpuName = None
    gpu_memory_gib: GpuMemory = None
    gpu_tflops: GpuTflops = None
    gpus_per_node: GpusPerNode = 8
    host_memory_gib: Annotated[float | None, Option(help="host memory of a node, to check offload against")] = None
    max_seq_length: SeqLength = MAX_SEQ_LENGTH
    lora_r: Annotated[int | None, Option(help="train LoRA adapters of this rank instead of all weights")] = None
    load_in_4bit: Annotated[bool, Option("--load-in-4bit", help="QLoRA: quantize the base model to 4 bits")] = False
    optim: Annotated[
        str | None, Option(help=f"optimizer, as in the training arguments; default: {DEFAULT_OPTIMIZER}")
    ] = None
    optim_args: Annotated[str | None, Option(help="arguments of the optimizer: momentum=0.9, or rank=128")] = None
    optim_target_modules: Annotated[
        list[str] | None,
        Option(help="modules that GaLore or APOLLO projects: all-linear, a pattern, or parts of names"),
    ] = None
    equal_lengths: Annotated[
        bool, Option("--equal-lengths", help="all sequences have the full length, so no attention mask is needed")
    ] = False
    accumulate: Annotated[
        str | None,
        Option(help="gradients between accumulation steps: sharded, or whole (FSDP2); default: the preset's"),
    ] = None
    method: MethodName = "sft"
    beta: Annotated[
        float | None, Option(help="`beta` of the method's loss; 0 leaves out the reference model of grpo and rloo")
    ] = None
    precompute_ref_log_probs: PrecomputeFlag = False
    ref_dtype: Annotated[
        str | None, Option(help="dtype of the reference model without DeepSpeed: float32 (the default) or bfloat16")
    ] = None
    num_generations: Annotated[int | None, Option(help="grpo, rloo: completions per prompt; default: TRL's")] = None
    max_completion_length: Annotated[
        int | None, Option(help="tokens of a row that are scored or generated; default: all of --max-seq-length")
    ] = None
    vllm: Annotated[str | None, Option(help="grpo, rloo: none (transformers generates), colocate, or server")] = None
    vllm_gpu_memory_utilization: Annotated[
        float | None, Option(help="share of each GPU that a colocated vLLM takes; default: 0.3")
    ] = None
    vllm_enable_sleep_mode: Annotated[
        bool, Option("--vllm-enable-sleep-mode", help="a colocated vLLM frees its memory while the model trains")
    ] = False
    measured: Annotated[
        Path | None,
        Option(help="run folder of this model on your GPUs: its step calibrates the speeds"),
    ] = None
    dataset: Annotated[Path | None, Option(help="a data file, for the time and the cost to finish")] = None
    column: Annotated[tuple[str, ...], Option(help="as in training: instruction=question; repeatable")] = ()
    dataset_tokens: Annotated[int | None, Option(help="tokens of an epoch, instead of --dataset")] = None
    num_train_epochs: Annotated[float, Option(help="epochs of the data", min=0)] = 1.0
    max_steps: Annotated[int | None, Option(help="optimizer steps, instead of epochs")] = None
    use_liger_kernel: Annotated[bool, Option("--use-liger-kernel", help="Liger's kernels; sft: its fused loss too")] = (
        False
    )
    image_tokens: Annotated[int | None, Option(help="tokens of images among those of a sequence; 0: text", min=0)] = (
        None
    )
    freeze_vision_tower: Annotated[
        bool, Option("--freeze-vision-tower", help="the encoder of images and its projector are not trained")
    ] = False
    fp16: Annotated[bool | None, switch("fp16", "fp16 with a loss scale; default: on a GPU without bf16")] = None


@dataclass(frozen=True, kw_only=True)
class PlanOptions(JobAndGpuOptions):
    """Options of `toolkit plan`, by the names of their flags."""

    num_processes: Annotated[tuple[int, ...], Option(help=f"number of GPUs; repeatable; {DEFAULT_GPUS_HELP}")] = ()
    preset: Annotated[
        tuple[str, ...], Option(help=f"{PRESET_HELP}; repeatable; by default all that support the world size")
    ] = ()
    per_device_train_batch_size: Annotated[
        int | None, Option(help="sequences per GPU and accumulation step; by default the most that fit")
    ] = None
    gradient_accumulation_steps: Annotated[
        int | None, Option(help="accumulation steps per optimizer step; by default for 32 sequences, or 1")
    ] = None
    per_device_eval_batch_size: Annotated[
        int | None, Option(help="sequences per GPU when the job evaluates; by default it does not", min=1)
    ] = None
    eval_rows: Annotated[
        int | None,
        Option(help="rows whose logits compute_metrics needs: all, or of eval_accumulation_steps, of all GPUs", min=1),
    ] = None
    activation_checkpointing: Annotated[
        bool | None, switch("activation-checkpointing", "recompute activations in the backward; by default if needed")
    ] = None
    activation_checkpointing_offload: Annotated[
        bool, Option("--activation-checkpointing-offload", help="keep the checkpointed activations in host memory")
    ] = False
    activation_checkpointing_selective: Annotated[
        bool,
        Option("--activation-checkpointing-selective", help="keep attention's outputs, and recompute only the rest"),
    ] = False
    lora_target_modules: Annotated[
        tuple[str, ...], Option(help="names of the linear layers that get an adapter; repeatable; by default all")
    ] = ()
    packing: Annotated[bool, switch("packing", "pack rows to full length")] = False
    async_save: Annotated[
        bool, Option("--async-save", help="checkpoints are written during training, from a copy in host memory")
    ] = False
    attn_implementation: Annotated[
        str | None, Option(help="attention of packed rows; auto (the default): no mask where the model allows it")
    ] = None
    loss: Annotated[
        str | None,
        Option(
            help="chunked (ours), full, fused (Liger), cut, chunked_output (torchtune), upcast (2024), or bf16;"
            " default: the program's"
        ),
    ] = None
    program: Annotated[
        str | None,
        Option(
            help="whose numerics: llama-factory, ms-swift, toolkit, trl, axolotl, unsloth, torchtune or trainer; the"
            " options below win"
        ),
    ] = None
    pure_bf16: Annotated[bool | None, switch("pure-bf16", "trained weights and states in bf16, no masters")] = None
    load_in_8bit: Annotated[bool | None, Option("--load-in-8bit", help="LoRA on a base in 8 bits")] = None
    double_quantization: Annotated[
        bool | None, switch("double-quantization", "4-bit weights: their constants are quantized too")
    ] = None
    sharded_4bit: Annotated[
        bool | None,
        switch("sharded-4bit", "4-bit weights in a floating dtype; FSDP2 leaves those in uint8 whole on each GPU"),
    ] = None
    experts_in_4bit: Annotated[
        bool | None,
        switch("experts-in-4bit", "4-bit weights: fused experts too, which transformers 5 leaves as they are"),
    ] = None
    looped_experts: Annotated[
        bool | None,
        switch("looped-experts", "experts run one after the other: transformers 4, or torch below 2.9 before Hopper"),
    ] = None
    kbit_training: Annotated[
        bool | None,
        switch("kbit-training", "prepare_model_for_kbit_training: fp32 embeddings, head, norms, residual stream"),
    ] = None
    peft_input_cast: Annotated[bool | None, switch("peft-input-cast", "peft casts adapters' inputs")] = None
    fp32_base: Annotated[bool | None, switch("fp32-base", "LoRA on a base in fp32, as TRL loads it")] = None
    lora_dropout: Annotated[float | None, Option(help="dropout on the inputs of adapters", min=0, max=1)] = None
    fp8: Annotated[bool | None, Option("--fp8", help="linear layers in FP8 by torchao: the memory of bf16")] = None
    oft_block_size: Annotated[
        int | None,
        Option(help="OFT: rotations of layers' inputs in blocks of this size; `toolkit train` has no OFT", min=2),
    ] = None
    dora: Annotated[bool | None, Option("--dora", help="adapters with magnitudes: DoRA")] = None
    expandable_segments: Annotated[
        bool | None, switch("expandable-segments", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    ] = None
    fsdp1: Annotated[bool | None, Option("--fsdp1", help="FSDP1: planned as FSDP2")] = None
    save_on_gpu: Annotated[
        bool | None,
        switch("save-on-gpu", "FSDP: each rank gathers all weights on its GPU to save, as the Trainer did until 4.30"),
    ] = None
    zero3_init: Annotated[bool | None, switch("zero3-init", "ZeRO-3 shards weights as they are loaded")] = None
    data_parallel: Annotated[
        int | None, Option(help="GPUs of one process: DataParallel gathers all logits on the first", min=2)
    ] = None
    torch_compile: Annotated[bool | None, Option("--torch-compile", help="compiled: faster, with the same memory")] = (
        None
    )
    tiled_mlp: Annotated[bool | None, Option("--tiled-mlp", help="the MLP takes a part of the rows at a time")] = None
    gradient_as_bucket_view: Annotated[
        bool | None,
        switch("gradient-as-bucket-view", "ddp: gradients are views of buckets, no second copy; default: for `sft`"),
    ] = None
    pp: Annotated[int | None, Option(help="pipeline parallelism: GPUs that hold different layers")] = None
    pipeline_schedule: Annotated[
        str | None, Option(help=f"order of the stages: {', '.join(SCHEDULES)}; default: {DEFAULT_SCHEDULE}")
    ] = None
    pipeline_chunks: Annotated[int | None, Option(help="stages per GPU of interleaved_1f1b; default: 2")] = None
    tp: Annotated[int | None, Option(help="tensor parallelism: GPUs that split each layer")] = None
    cp: Annotated[int | None, Option(help="context parallelism (ring attention): GPUs that share a sequence")] = None
    sp: Annotated[int | None, Option(help="sequence parallelism (Ulysses): GPUs that share a sequence")] = None
    ep: Annotated[int | None, Option(help="expert parallelism: GPUs that share the experts")] = None
    dp_replicate: Annotated[int | None, Option(help="replicas of the sharded model in a hybrid mesh")] = None
    config: Annotated[
        Path | None,
        Option(help="plan the job of this file: axolotl, TRL, LLaMA-Factory, ms-swift, or our arguments; flags win"),
    ] = None
    price_per_gpu_hour: Annotated[
        tuple[str, ...],
        Option(
            help="dollars per GPU and hour: 2.50 with --gpu, h100=2.50 where several are compared; repeatable",
            metavar="[GPU=]PRICE",
        ),
    ] = ()
    parts: Annotated[
        bool, Option("--parts", help="memory by part and phase, of the chosen preset or of each named")
    ] = False
    verify: Annotated[
        bool, Option("--verify", help="rehearse rank 0 of each plan, and compare the two part by part")
    ] = False


@dataclass(frozen=True, kw_only=True)
class RecommendOptions(JobAndGpuOptions):
    """Options of `toolkit recommend`, by the names of their flags."""

    num_processes: Annotated[int | None, Option(help=f"number of GPUs; {DEFAULT_GPUS_HELP}")] = None
    preset: Annotated[tuple[str, ...], Option(help=f"{PRESET_HELP}; repeatable; considers only these")] = ()
    global_batch_size: Annotated[
        int | None, Option(help="sequences per optimizer step; by default 32, rounded up to a multiple of the GPUs")
    ] = None
    objective: Annotated[str, Option(help="fastest, or least-memory")] = "fastest"
    price_per_gpu_hour: Annotated[float | None, Option(help="dollars per GPU and hour", min=0, max=1_000_000)] = None
    network_gb_per_second: Annotated[
        float | None, Option(help="network bandwidth of a node, all cards, one direction")
    ] = None
    nvme_gb_per_second: Annotated[float | None, Option(help="bandwidth of a node's local NVMe disk")] = None
    gpu_link_gb_per_second: Annotated[
        float | None, Option(help="GPU-to-GPU bandwidth, one direction, of a GPU that the table lacks")
    ] = None
    show_all: Annotated[bool, Option("--all", help="show every alternative and every rejected preset")] = False
    scaling: Annotated[bool, Option("--scaling", help="also show the scaling curve to 1,024 GPUs")] = False

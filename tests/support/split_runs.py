"""Small models that are split over CPU ranks, and one run of each layout on the same rows, with one process beside it.

Every run has 3 optimizer steps of 8 rows, in two accumulation steps: 12 rows are an epoch of 2 steps, of which the last
has 4 rows and one accumulation step. Vocabularies are small, because torch's CPU kernel of a norm is off by 1e-5 to
1e-4 on a matrix of 49,152 rows. Rows have one of two lengths, because torch plans every operation of a split tensor
again for each new shape, which takes longer than the operation.
"""

import json
import math
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launching import ROOT, accelerate_launch, nightly

from toolkit.record.folder import RunFolder
from toolkit.record.measurements import grad_norm, read_steps

STEPS = 3
NUM_ROWS = 12
NUM_EVAL_ROWS = 10  # not a multiple of any layout's rows: the last batch is smaller, or some ranks have one less
ROW_LENGTHS = (31, 47)  # odd, so that ranks that divide each row pad it
ROWS_PER_ACCUMULATION_STEP = 4
SIZES: dict[str, Any] = {
    **{"vocab_size": 288, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512},
    **{"tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama_one": {"model_type": "llama", "num_hidden_layers": 1},  # torch plans clipping on a mesh of 3 for each tensor
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama_mha": {"model_type": "llama", "num_key_value_heads": 4},
    "llama_deep": {"model_type": "llama", "num_hidden_layers": 5},  # 3 and 2 layers in two stages, or 2, 1, 1 and 1
    "qwen3": {"model_type": "qwen3"},  # norms of queries and keys, which tensor parallelism replicates
    "qwen3_moe": {"model_type": "qwen3_moe", **EXPERTS},
}
TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {% generation %}{{ m.content }}</s>{% endgeneration %}{% endfor %}"
LORA = ("--lora_r", "4")
ATTENTION_LORA = (*LORA, "--lora_target_modules", "q_proj", "k_proj", "v_proj", "o_proj")
SAVED = ("--save_strategy", "steps", "--save_steps", "1")
"""Step 1 is in the first epoch. Of a resumed run's two steps, the second shows what the first made of the moments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRun:
    """A run of a preset with its degrees of parallelism."""

    preset: str
    model: str
    layout: dict[str, int]  # the degrees above 1 that every rank must read back; empty for one process
    words: tuple[str, ...] = ()
    baseline: str = ""  # the run in one process that it must equal
    resumes: tuple[str, int] | None = None  # the run and the step from whose checkpoint it resumes
    steps: int = STEPS
    without_fix: str = ""  # a fix of a library that is left out: its module and function

    @property
    def num_ranks(self) -> int:
        return math.prod(size for name, size in self.layout.items() if name != "ep")

    @property
    def data_parallel_size(self) -> int:
        return self.layout.get("dp_shard", 1) * self.layout.get("dp_replicate", 1)

    def arguments(self) -> list[str]:
        degrees = [name for name in ("pp", "tp", "cp", "sp", "ep") if name in self.layout]
        given = [word for name in degrees for word in (f"--{name}", str(self.layout[name]))]
        batch = str(ROWS_PER_ACCUMULATION_STEP // self.data_parallel_size)
        batches = ["--per_device_train_batch_size", batch, "--per_device_eval_batch_size", batch]
        return [*given, *batches, "--max_steps", str(self.steps), *self.words]


def _alone(model: str, *words: str) -> SplitRun:
    return SplitRun(preset="single", model=model, layout={}, words=words)


RECOMPUTED = ("--activation_checkpointing", "true")
# One micro-batch is one accumulation step; packed rows are one row of all documents, of which most are not full.
PACKED = ("--packing", "true", "--per_device_train_batch_size", "2")
FOUR_MICRO_BATCHES = ("--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "4")


def _split(preset: str, model: str, *words: str, baseline: str = "", **layout: int) -> SplitRun:
    return SplitRun(preset=preset, model=model, layout=layout, words=words, baseline=baseline or model)


def _resumed(run: SplitRun, name: str, step: int) -> SplitRun:
    """The run from a checkpoint of another one, which it must equal from there on."""
    return replace(run, baseline="", resumes=(name, step))


def _without_fix(run: SplitRun, fix: str) -> SplitRun:
    return replace(run, baseline="", without_fix=f"toolkit.engines.{fix}")


PIPELINE = "pipeline_1f1b"
PIPELINES = {
    "": _split(PIPELINE, "llama", *SAVED, pp=2),
    "-2x2": _split(PIPELINE, "llama_tied", *RECOMPUTED, dp_replicate=2, pp=2),
    # Step 3 is in the second epoch.
    "-tied": replace(
        _split(PIPELINE, "llama_tied", "--pipeline_schedule", "gpipe", *SAVED, "--save_steps", "3", pp=2),
        baseline="llama_tied-5",
        steps=5,
    ),
    "-of-four": _split(PIPELINE, "llama_deep", *FOUR_MICRO_BATCHES, pp=4),
    "-interleaved": _split(PIPELINE, "llama_deep", "--pipeline_schedule", "interleaved_1f1b", *SAVED, pp=2),
    "-packed": _split(PIPELINE, "llama", *PACKED, baseline="llama-packed", pp=2),
    "-bf16": _split(PIPELINE, "qwen3", "--bf16", "true", baseline="qwen3-bf16", pp=2),
}
SPLIT = {
    **{f"pipeline{name}": run for name, run in PIPELINES.items()},
    "tp": _split("tp", "llama", tp=2),
    "tp-2x2": _split("tp", "llama_tied", dp_replicate=2, tp=2),
    "hsdp_tp": _split("hsdp_tp", "llama_one", dp_replicate=2, dp_shard=2, tp=2),
    "fsdp2_tp": _split("fsdp2_tp", "qwen3", *SAVED, dp_shard=2, tp=2),
    "fsdp2_tp-mha": _split("fsdp2_tp", "llama_mha", *RECOMPUTED, "--accumulate", "whole", dp_shard=2, tp=2),
    "ep": _split("ep", "qwen3_moe", *SAVED, dp_shard=4, ep=2),
    "ep_tp": _split("ep_tp", "qwen3_moe", dp_shard=2, tp=2, ep=2),
    "cp": _split("cp", "llama", *SAVED, cp=2),
    "cp-2x2": _split("cp", "qwen3", *RECOMPUTED, dp_shard=2, cp=2),
    "ulysses": _split("ulysses", "llama", *SAVED, sp=2),
    "ulysses-2x2": _split("ulysses", "qwen3", *RECOMPUTED, dp_shard=2, sp=2),
    "ulysses-bf16": _split("ulysses", "qwen3", "--bf16", "true", baseline="qwen3-bf16", sp=2),
    "tp-lora": _split("tp", "qwen3", *LORA, baseline="qwen3-lora", tp=2),
    "fsdp2_tp-lora": _split("fsdp2_tp", "qwen3", *LORA, *SAVED, baseline="qwen3-lora", dp_shard=2, tp=2),
    "ep-lora": _split("ep", "qwen3_moe", *ATTENTION_LORA, baseline="qwen3_moe-lora", dp_shard=2, ep=2),
    "fsdp2_tp-bf16": _split("fsdp2_tp", "qwen3", "--bf16", "true", baseline="qwen3-bf16", dp_shard=2, tp=2),
}
RUNS = {
    **{name: _alone(name) for name in MODELS},
    "llama_tied-5": replace(_alone("llama_tied"), steps=5),
    "qwen3-lora": _alone("qwen3", *LORA),
    "qwen3_moe-lora": _alone("qwen3_moe", *ATTENTION_LORA),
    "qwen3-bf16": _alone("qwen3", "--bf16", "true"),
    "llama-packed": _alone("llama", *PACKED),
    **SPLIT,
    "tp-without-norm-fix": _without_fix(
        _split("tp", "qwen3", tp=2), "sharded_at_load:_reduce_replicated_gradients_once"
    ),
    "ulysses-without-token-weights": _without_fix(
        _split("ulysses", "llama", sp=2), "split_sequences:_weight_by_tokens"
    ),
    # Resumed in the first epoch (step 1) or in the second (step 3), on the same mesh or on another one.
    **{
        f"{name}-resumed": _resumed(replace(SPLIT[name], words=()), name, 1)
        for name in ("fsdp2_tp", "pipeline", "cp", "ulysses")
    },
    "fsdp2_tp-resumed-on-tp": _resumed(_split("tp", "qwen3", tp=2), "fsdp2_tp", 1),
    "fsdp2_tp-lora-resumed-on-tp": _resumed(SPLIT["tp-lora"], "fsdp2_tp-lora", 1),
    "ep-resumed-on-two": _resumed(_split("ep", "qwen3_moe", dp_shard=2, ep=2), "ep", 1),
    "pipeline-tied-resumed": _resumed(SPLIT["pipeline-tied"], "pipeline-tied", 3),
    "pipeline-interleaved-resumed": _resumed(SPLIT["pipeline-interleaved"], "pipeline-interleaved", 1),
}


# Weights and layers are divided; those that divide the sequence take as long again: `make test-nightly` has all.
LAUNCHED_ALWAYS = ("tp", "pipeline")


def split_runs(*, resumed: bool = False) -> list[Any]:
    """Return the names of the runs that equal one process, or of those that resume, as parameters of a test."""
    chosen = [name for name, run in RUNS.items() if (run.resumes is not None) is resumed and (resumed or run.baseline)]
    always = [name for name in chosen if name in LAUNCHED_ALWAYS]
    return [*always, *nightly(*(name for name in chosen if name not in always))]


def build_models(folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = _byte_tokenizer()
    for name, fields in MODELS.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**SIZES, **fields})).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def _byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {"<pad>": 0, "<s>": 1, "</s>": 2}
    ids |= {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), start=3)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )


def build_rows(folder: Path) -> None:
    """Write conversations to train on and to evaluate; most batches have rows of both lengths."""
    for name, number, seed in (("rows", NUM_ROWS, 0), ("eval_rows", NUM_EVAL_ROWS, 1)):
        draw = random.Random(seed)
        (folder / f"{name}.jsonl").write_text("".join(_row(draw) for _ in range(number)))


def _row(draw: random.Random) -> str:
    template_length = len("_user: __assistant: _")  # a special token for each underscore
    letters = "".join(draw.choices("abirwl ", k=draw.choice(ROW_LENGTHS) - template_length))
    asked = draw.randint(1, len(letters) - 1)
    turns = [{"role": "user", "content": letters[:asked]}, {"role": "assistant", "content": letters[asked:]}]
    return json.dumps({"messages": turns}) + "\n"


def launch(
    run: SplitRun, *, models: Path, rows: Path, folder: Path, checkpoint: Path | None = None, change: str | None = None
) -> None:
    """Train, and stop the test with the end of the log where a rank failed; `change` is of `changed_training.py`."""
    words = ["--model_name_or_path", str(models / run.model), "--dataset", str(rows), "--max_seq_length", "64"]
    words += ["--eval_dataset", str(rows.with_name("eval_rows.jsonl")), "--gradient_accumulation_steps", "2"]
    words += ["--learning_rate", "5e-3", "--weight_decay", "0.1", "--save_strategy", "no", *run.arguments()]
    words += ["--output_dir", str(folder)]
    if checkpoint is not None:
        words += ["--resume_from_checkpoint", str(checkpoint)]
    config = ROOT / "accelerate_configs" / f"{run.preset}.yaml"
    options: dict[str, Any] = {"num_processes": run.num_ranks, "script": change}
    if run.without_fix:
        options |= {"script": "without_fix", "variables": {"TOOLKIT_WITHOUT_FIX": run.without_fix}}
    ended = accelerate_launch(config, *words, **options)
    log = f"{ended.stdout[-3000:]}\n{ended.stderr[-5000:]}"
    assert ended.returncode == 0, f"{run}, exit code {ended.returncode}:\n{log}"


def losses_and_norms(folder: Path) -> tuple[list[float], list[float | None]]:
    steps = read_steps(RunFolder(folder))
    losses = [sum(float(row.loss or 0.0) for row in step) / len(step) for step in steps]
    return losses, [grad_norm(step) for step in steps]

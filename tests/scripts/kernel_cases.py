"""Trainings of one process each: some with a fast path that does not run, others honest. Each is observed.

python kernel_cases.py FOLDER [CASE ...]       # writes FOLDER/CASE/attestation.json
"""

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoConfig, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import moe
from transformers.models.llama import modeling_llama

from toolkit import observe

SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_local_experts": 4}
MAMBA = {"head_dim": 16, "num_heads": 4, "state_size": 8, "n_groups": 1, "expand": 2, "chunk_size": 8}
LENGTH = 8
PACKED = {"position_ids": [0, 1, 2, 3, 0, 1, 2, 3]}
Case = Callable[[], Trainer]
FAULTS: dict[str, Case] = {}
HONEST: dict[str, Case] = {}


def fault(case: Case) -> Case:
    return FAULTS.setdefault(case.__name__, case)


def honest(case: Case) -> Case:
    return HONEST.setdefault(case.__name__, case)


def model_of(kind: str = "llama", auto: str = "AutoModelForCausalLM", *, attn: str | None = None, **sizes: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SIZES | sizes))
    return getattr(transformers, auto).from_config(config, **({} if attn is None else {"attn_implementation": attn}))


def token_rows(**more: Any) -> list[dict[str, Any]]:
    tokens = [[3 + (n + i) % 60 for i in range(LENGTH)] for n in range(8)]
    return [{"input_ids": each, "labels": each, **more} for each in tokens]


def trainer_of(
    model: Any, rows: Sequence[dict[str, Any]] | None = None, *, kind: type[Trainer] = Trainer, **arguments: Any
) -> Trainer:
    given = {"max_steps": 2, "per_device_train_batch_size": 2, "save_strategy": "no", "report_to": "none"} | arguments
    given |= {"disable_tqdm": True, "use_cpu": True, "output_dir": tempfile.mkdtemp(), "remove_unused_columns": False}
    return kind(model=model, args=TrainingArguments(**given), train_dataset=list(rows or token_rows()))


# -- attention


@fault
def attention_dropout() -> Trainer:
    """No kernel for a CPU drops scores."""
    return trainer_of(model_of(attention_dropout=0.1))


@fault
def values_of_another_size() -> Trainer:
    """Heads of queries and values differ, as in multi-head latent attention."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(32, 80)

        def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
            query, key, value = self.project(hidden_states)[:, None].split((24, 24, 32), dim=-1)
            return scaled_dot_product_attention(query, key, value, is_causal=True)[:, 0], None

    model = model_of()
    for layer in model.model.layers:
        layer.self_attn = Attention()
    return trainer_of(model)


@fault
def eager_attention() -> Trainer:
    return trainer_of(model_of(attn="eager"))


@fault
def no_sdpa_for_this_model() -> Trainer:
    """gpt-oss has sinks, and runs in eager attention unless a kernel of the hub is named."""
    return trainer_of(model_of("gpt_oss", head_dim=16, **EXPERTS))


def falls_back(module: Any, *args: Any, **kwargs: Any) -> Any:
    return modeling_llama.eager_attention_forward(module, *args, **kwargs)


@fault
def flash_attention_that_falls_back() -> Trainer:
    AttentionInterface.register("flash_of_a_package", falls_back)
    model = model_of()
    model.config._attn_implementation = "flash_of_a_package"
    return trainer_of(model)


# -- experts and mixers


@fault
def experts_in_a_loop() -> Trainer:
    model = model_of("qwen3_moe", head_dim=16, **EXPERTS)
    model.config._experts_implementation = "eager"
    return trainer_of(model)


@fault
def experts_in_a_list() -> Trainer:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return sum(expert(hidden) for expert in self.experts)

    model = model_of()
    for layer in model.model.layers:
        layer.mlp = Mixture()
    return trainer_of(model)


@fault
def no_grouped_matrix_product() -> Trainer:
    moe._can_use_grouped_mm = lambda *_: False
    return trainer_of(model_of("qwen3_moe", head_dim=16, **EXPERTS))


@fault
def linear_attention_without_its_package() -> Trainer:
    linear = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 16}
    kinds = {"layer_types": ["linear_attention", "full_attention"], "linear_value_head_dim": 16, "head_dim": 16}
    return trainer_of(model_of("qwen3_next", **linear, **kinds, **EXPERTS))


@fault
def mamba_without_its_package() -> Trainer:
    return trainer_of(model_of("mamba2", **MAMBA))


@fault
def convolutions_without_their_package() -> Trainer:
    return trainer_of(model_of("lfm2", layer_types=["conv", "full_attention"]))


# -- kernels of Liger and of the hub


class _Norm(modeling_llama.LlamaRMSNorm):
    """Stands for Liger's: a class of its package."""


_Norm.__module__ = "liger_kernel.transformers.rms_norm"


@fault
def liger_for_an_unknown_model() -> Trainer:
    """Liger writes a line of level INFO, and patches nothing."""
    transformers.trainer.apply_liger_kernel = lambda *_: None
    trainer = trainer_of(model_of("gpt2"))
    trainer.args.use_liger_kernel = True
    return trainer


@fault
def liger_after_the_model_was_made() -> Trainer:
    model = model_of()
    modeling_llama.LlamaRMSNorm = _Norm
    return trainer_of(model)


@fault
def use_kernels_without_effect() -> Trainer:
    model = model_of()
    model._use_kernels = True  # as `kernelize` leaves it where it has no kernel for the device
    return trainer_of(model)


# -- blocks, the compiler, the optimizer


@fault
def one_block_not_checkpointed() -> Trainer:
    class Changed(Trainer):
        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            model.get_submodule("model.layers.1").gradient_checkpointing = False
            return super().training_step(model, *args, **kwargs)

    return trainer_of(model_of(), kind=Changed, activation_checkpointing=True)


@fault
def a_flagged_block_in_evaluation_mode() -> Trainer:
    class Changed(Trainer):
        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            model.get_submodule("model.layers.0").eval()
            return super().compute_loss(model, *args, **kwargs)

    model = model_of()
    model.gradient_checkpointing_enable()
    return trainer_of(model, kind=Changed)


@fault
def checkpointing_switched_off_again() -> Trainer:
    class Changed(Trainer):
        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            model.gradient_checkpointing_disable()
            return super().training_step(model, *args, **kwargs)

    return trainer_of(model_of(), kind=Changed, activation_checkpointing=True)


@fault
def not_compiled() -> Trainer:
    trainer = trainer_of(model_of())
    trainer.args.torch_compile = True  # as with TORCHDYNAMO_DISABLE=1
    return trainer


class _OneByOne(TrainerCallback):
    def on_pre_optimizer_step(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        for group in optimizer.param_groups:
            group["fused"], group["foreach"] = False, False


@fault
def an_optimizer_one_by_one() -> Trainer:
    trainer = trainer_of(model_of())
    trainer.add_callback(_OneByOne())
    return trainer


# -- packed rows


@fault
def packed_rows_with_a_mask() -> Trainer:
    """transformers finds documents by their positions only where there is no mask."""
    return trainer_of(model_of(), token_rows(attention_mask=[1] * LENGTH, **PACKED))


@fault
def packed_rows_of_a_state_space() -> Trainer:
    class WithPositions(transformers.Mamba2ForCausalLM):
        def forward(self, input_ids: Any = None, labels: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
            del position_ids
            return super().forward(input_ids=input_ids, labels=labels, **kwargs)

    model = WithPositions(AutoConfig.for_model("mamba2", **(SIZES | MAMBA)))
    return trainer_of(model, token_rows(**PACKED))


# -- honest


@honest
def plain() -> Trainer:
    return trainer_of(model_of())


@honest
def mixed_precision() -> Trainer:
    return trainer_of(model_of(), bf16=True, gradient_accumulation_steps=2)


@honest
def dropout_of_gpt2() -> Trainer:
    return trainer_of(model_of("gpt2"))


@honest
def packed() -> Trainer:
    return trainer_of(model_of(), token_rows(**PACKED))


@honest
def packed_in_eager_attention() -> Trainer:
    return trainer_of(model_of("qwen3_moe", attn="eager", head_dim=16, **EXPERTS), token_rows(**PACKED))


@honest
def reentrant_checkpoints() -> Trainer:
    how = {"use_reentrant": True}
    return trainer_of(model_of(), activation_checkpointing=True, activation_checkpointing_kwargs=how)


@honest
def adapters_with_checkpoints() -> Trainer:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model_of(), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]))
    return trainer_of(model, activation_checkpointing=True)


@honest
def frozen_blocks_with_checkpoints() -> Trainer:
    model = model_of()
    for part in (model.model.embed_tokens, model.model.layers[0]):
        part.requires_grad_(False)
    return trainer_of(model, activation_checkpointing=True)


@honest
def a_block_that_the_loss_does_not_reach() -> Trainer:
    """As the last vision layer of LLaVA: its output has a graph, and nobody reads it."""

    class Beside(modeling_llama.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            unread = self.beside(torch.zeros(1, 4, 32), position_embeddings=(torch.ones(1, 4, 16),) * 2)
            del unread
            return super().forward(*args, **kwargs)

    model = Beside(AutoConfig.for_model("llama", **SIZES))
    model.beside = modeling_llama.LlamaDecoderLayer(model.config, 0)
    return trainer_of(model, activation_checkpointing=True)


@honest
def some_blocks_by_the_scripts_own_choice() -> Trainer:
    model = model_of()
    model.gradient_checkpointing_enable()
    model.model.layers[1].gradient_checkpointing = False
    return trainer_of(model)


@honest
def a_classifier() -> Trainer:
    rows = [{"input_ids": row["input_ids"], "labels": 1} for row in token_rows()]
    return trainer_of(model_of("bert", "AutoModelForSequenceClassification"), rows)


@honest
def images() -> Trainer:
    model = model_of("vit", "AutoModelForImageClassification", image_size=8, patch_size=4)
    rows = [{"pixel_values": torch.ones(3, 8, 8).tolist(), "labels": 1} for _ in range(8)]
    return trainer_of(model, rows, activation_checkpointing=True)


@honest
def an_encoder_and_a_decoder() -> Trainer:
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    return trainer_of(model_of("t5", "AutoModelForSeq2SeqLM", **sizes), activation_checkpointing=True)


@honest
def another_optimizer() -> Trainer:
    return trainer_of(model_of(), optim="adafactor")


@honest
def its_own_optimizer() -> Trainer:
    model = model_of()
    trainer = trainer_of(model)
    trainer.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return trainer


@honest
def a_model_of_its_own() -> Trainer:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.head(self.embed(input_ids))
            return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    return trainer_of(Own())


@honest
def somebody_profiles() -> Trainer:
    trainer = trainer_of(model_of())
    sys.setprofile(lambda *_: None)
    return trainer


def main(folder: str, *names: str) -> None:
    saved: list[tuple[ModuleType, str, Any]] = [(modeling_llama, "LlamaRMSNorm", modeling_llama.LlamaRMSNorm)]
    saved.append((moe, "_can_use_grouped_mm", moe._can_use_grouped_mm))
    for name, case in (FAULTS | HONEST).items():
        if names and name not in names:
            continue
        trainer = case()
        run = Path(folder) / name
        run.mkdir(parents=True)
        observe(trainer, folder=run, prepared=True)
        trainer.train()
        sys.setprofile(None)
        for module, attribute, value in saved:
            setattr(module, attribute, value)


if __name__ == "__main__":
    main(*sys.argv[1:])

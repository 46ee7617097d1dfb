"""Trace the training step of TRL's own trainers on fake tensors, without a GPU and without weights.

    python trace_methods.py CASES.json TOKENIZER_FOLDER

All cases of one call have one preset and one world size. Prints a line of JSON for each: peaks by phase and part, the
bytes of the model states, and the rows of forwards with a graph and without. Values that only logging reads are made
up: a scalar that is read is 1, and a mask is true everywhere, so that all tokens count as completion. TRL's Triton
kernels, which no CPU has, are replaced by functions that allocate what those allocate.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from toolkit.presets import load_preset
from toolkit.rehearse.rehearsal import RehearsedRank

KINDS = {  # class and module of each method's trainer and configuration
    "dpo": ("DPO", "trl.trainer.dpo"),
    "kto": ("KTO", "trl.trainer.kto"),
    "reward": ("Reward", "trl.trainer.reward"),
    "orpo": ("ORPO", "trl.experimental.orpo.orpo"),
    "simpo": ("CPO", "trl.experimental.cpo.cpo"),
    "grpo": ("GRPO", "trl.trainer.grpo"),
    "rloo": ("RLOO", "trl.trainer.rloo"),
}
PAIRS = [{"prompt": "a", "chosen": " b", "rejected": " c"}] * 4
ROWS = {
    **{"kto": [{"prompt": "a", "completion": " b", "label": bool(index % 2)} for index in range(4)]},
    **dict.fromkeys(("grpo", "rloo"), [{"prompt": "a"}] * 4),
}
CLASSES = {"kto": {"loss_type": "kto"}, "simpo": {"loss_type": "simpo", "cpo_alpha": 0.0}}


def batch_of(case: dict[str, Any]) -> dict[str, Any]:
    """Return the batch that the method's collator would make of rows that all have the full length."""
    import torch

    method, rows, length = case["method"], case["rows"], case["length"]

    def tokens(number: int, size: int = length) -> Any:
        return torch.zeros(number, size, dtype=torch.int64)

    ones = torch.ones(rows, length, dtype=torch.int64)
    if method in ("dpo", "reward"):
        both = torch.cat([ones, ones])
        batch = {"input_ids": tokens(2 * rows), "attention_mask": both}
        return batch | ({"completion_mask": both} if method == "dpo" else {})
    if method == "kto":
        names = ("input_ids", "attention_mask", "completion_mask")
        own = dict(zip(names, (tokens(rows), ones, ones), strict=True))
        return (
            own | {f"KL_{name}": value for name, value in own.items()} | {"label": torch.ones(rows, dtype=torch.bool)}
        )
    if method in ("orpo", "simpo"):
        prefixes = ("prompt", "chosen", "rejected")
        batch = {f"{prefix}_input_ids": tokens(rows) for prefix in prefixes}
        batch |= {f"{prefix}_attention_mask": ones for prefix in prefixes}
        return batch | {f"{prefix}_labels": tokens(rows) for prefix in prefixes[1:]}
    prompt = length - case["completion"]
    masks = {"prompt_mask": ones[:, :prompt], "completion_mask": ones[:, prompt:]}
    ids = {"prompt_ids": tokens(rows, prompt), "completion_ids": tokens(rows, case["completion"])}
    return (
        ids
        | masks
        | {"advantages": torch.ones(rows), "num_items_in_batch": torch.tensor(1.0), "old_logps": torch.ones(rows)}
    )


def patches(stack: contextlib.ExitStack, case: dict[str, Any]) -> None:
    """Make values up that only logging reads, and leave out what Triton's kernels do not allocate."""
    import torch
    from torch._subclasses import fake_impls
    from transformers import masking_utils
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    from toolkit.models.fake_tensors import replaced

    def made_up(fake_mode: Any, func: Any, tensor: Any) -> Any:
        del fake_mode, func
        return 1.0 if tensor.dtype.is_floating_point else True if tensor.dtype == torch.bool else 1

    def everywhere(fake_mode: Any, func: Any, mask: Any) -> Any:
        del fake_mode, func
        is_label = mask.shape == (case["rows"], case["length"] - 1) and "completion" in case
        number = case["rows"] * case["completion"] if is_label else mask.numel()  # of tokens that are scored
        return mask.new_empty((number, mask.dim()), dtype=torch.int64)

    operations = fake_impls.op_implementations_dict
    operations[torch.ops.aten._local_scalar_dense.default] = made_up
    operations[torch.ops.aten.nonzero.default] = everywhere
    for name in ("_forward_tile", "_backward_tile", "_addmm_fp32"):
        stack.enter_context(replaced(chunked_logprob, name, lambda *_, **__: None))
    stack.enter_context(replaced(utils, "_use_triton", lambda _: True))  # only completions are scored
    stack.enter_context(replaced(utils, "selective_log_softmax", log_softmax_of_kernel))
    # rows of full length need no mask, which a run reads from the values of the padding
    stack.enter_context(replaced(masking_utils, "is_tracing", lambda *_: False))


def log_softmax_of_kernel(logits: Any, index: Any, *_: Any, **__: Any) -> Any:
    """Save what `kernels/logprob_entropy.py` saves: the logits as they are, and statistics of each token."""
    import torch

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Any, index: Any) -> Any:
            found = [torch.empty(logits.shape[:-1]) for _ in range(4)]  # two of them are returned
            ctx.save_for_backward(logits, index, *found[2:])
            return found[0]

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            del gradient
            return torch.empty_like(ctx.saved_tensors[0], memory_format=torch.contiguous_format), None

    return Kernel.apply(logits, index)


def made_trainer(case: dict[str, Any], tokenizer: str) -> Any:
    """Build the trainer as its users do, with a model that has no memory; call it inside the fake mode."""
    import importlib

    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from transformers.initialization import no_init_weights

    from toolkit.models.fake_tensors import replaced

    method, lora_r = case["method"], case.get("lora_r")
    name, path = KINDS[method]
    module = importlib.import_module(f"{path}_trainer")
    config_class = getattr(importlib.import_module(f"{path}_config"), f"{name}Config")
    config = AutoConfig.from_pretrained(Path(case["config"]).parent)
    builder: Any = AutoModelForCausalLM
    if method == "reward":
        config.num_labels, config.pad_token_id, builder = 1, 0, AutoModelForSequenceClassification
    dtype = torch.float32 if lora_r is None else torch.bfloat16
    with no_init_weights():
        model = builder.from_config(config, dtype=dtype)
        reference = builder.from_config(config, dtype=dtype) if case.get("reference") else None
    model.tie_weights()
    options: dict[str, Any] = CLASSES.get(method, {}) | case.get("options", {})
    more: dict[str, Any] = {}
    if reference is not None:
        reference.tie_weights()
        more["ref_model"] = reference
    if method in ("grpo", "rloo"):
        more["reward_funcs"] = lambda completions, **_: [0.0] * len(completions)
        options = {"num_generations": 2, "max_completion_length": case["completion"]} | options
        more["train_dataset"] = Dataset.from_list(ROWS[method])
    if lora_r is not None:
        more["peft_config"] = LoraConfig(r=lora_r, target_modules="all-linear", task_type=None)
    with unset_fake_temporarily() as fake, contextlib.ExitStack() as stack:

        def inside(function: Any, *given: Any, **named: Any) -> Any:
            with fake:
                return function(*given, **named)

        for made in ("get_peft_model", "prepare_fsdp", "create_model_from_path"):
            if hasattr(module, made):
                stack.enter_context(replaced(module, made, functools.partial(inside, getattr(module, made))))
        if reference is None and hasattr(module, "create_model_from_path"):

            def reference_like(*_: Any, **given: Any) -> Any:
                with fake, no_init_weights():
                    built = builder.from_config(config, dtype=given.get("dtype", torch.float32))
                    built.tie_weights()
                return built

            stack.enter_context(replaced(module, "create_model_from_path", reference_like))
        arguments = config_class(
            output_dir="/tmp/nothing",
            per_device_train_batch_size=case["rows"],
            use_cpu=True,
            bf16=True,
            report_to="none",
            gradient_checkpointing=case.get("checkpointing", False),
            **options,
        )
        trainer = getattr(module, f"{name}Trainer")(
            model=model,
            args=arguments,
            processing_class=AutoTokenizer.from_pretrained(tokenizer),
            **{"train_dataset": Dataset.from_list(ROWS.get(method, PAIRS))} | more,
        )
    trainer._prepare_inputs = lambda inputs: inputs  # GRPO would generate; the others would move the batch
    return trainer


def prepared(trainer: Any) -> Any:
    """Wrap the model by the Trainer's own preparation; the optimizer is made afterwards, as `rehearse.trace` does."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None:
        plugin.cpu_ram_efficient_loading = False
    if trainer.args.gradient_checkpointing:
        trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    wrapped, _ = trainer._prepare_for_training(1, None, None)
    trainer.optimizer = None
    trainer.create_optimizer(wrapped)
    trainer.current_gradient_accumulation_steps = 1
    wrapped.train()
    return wrapped


def score(trainer: Any, case: dict[str, Any]) -> None:
    """Take the reference's log-probabilities, as `_generate_and_score_completions` does."""
    import torch

    rows = torch.zeros(case["rows"], case["length"], dtype=torch.int64)
    given = {"input_ids": rows, "attention_mask": rows + 1, "logits_to_keep": case["completion"]}
    trainer._get_per_token_logps_and_entropies(trainer.ref_model, **given, batch_size=case["rows"])


def trace(case: dict[str, Any], tokenizer: str) -> dict[str, Any]:
    """Return the peaks of one optimizer step, and the bytes of the model states that stay between steps."""
    import torch
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import AutoConfig

    from toolkit.engines.tensors import local, optimizer_state_tensors
    from toolkit.models.fake_tensors import LiveMemory, on_fake_tensors, replaced
    from toolkit.rehearse.trace import TracedModelStates

    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._reset_state()
    memory = LiveMemory(vocab_size=AutoConfig.from_pretrained(Path(case["config"]).parent).vocab_size)
    engine = load_preset(case["preset"]).engine
    with contextlib.ExitStack() as stack:
        stack.enter_context(on_fake_tensors(memory, engine=engine))
        patches(stack, case)
        trainer = made_trainer(case, tokenizer)
        wrapped = prepared(trainer)
        original, forwards = trainer.compute_loss, Counter[str]()

        def count(_: Any, args: Any, kwargs: Any) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            forwards["graph" if torch.is_grad_enabled() else "no_graph"] += hidden.shape[0]

        for model in filter(None, (wrapped, getattr(trainer, "ref_model", None))):
            first = next(module for name, module in model.named_modules() if name.endswith("layers.0"))
            first.register_forward_pre_hook(count, with_kwargs=True)

        def compute_loss(*given: Any, **named: Any) -> Any:
            with memory.phase("forward"):
                return original(*given, **named)

        stack.enter_context(replaced(trainer, "compute_loss", compute_loss))
        trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
        states = TracedModelStates(memory)
        states.serials["reference"] = set()
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        with memory.phase("step"):
            trainer.optimizer.step()
        wrapped.zero_grad()
        if case["method"] in ("grpo", "rloo") and trainer.ref_model is not None:
            with memory.phase("score"), torch.no_grad():
                score(trainer, case)
        with memory.phase("backward"):
            trainer.training_step(wrapped, batch_of(case), None)
        states.record("gradient", [local(p.grad) for p in trained if p.grad is not None])
        with memory.phase("step"):
            trainer.optimizer.step()
        states.record("parameter", [local(p) for p in wrapped.parameters()])
        states.record("optimizer", [local(state) for state in optimizer_state_tensors(trainer.optimizer)])
        reference = getattr(trainer, "ref_model", None)
        states.record("reference", [] if reference is None else [local(p) for p in reference.parameters()])
        found = {}
        for phase in sorted(memory.peaks.keys() & {"score", "forward", "backward", "step"}):
            parts: Counter[str] = Counter()
            for serial, (tag, size) in memory.peaks[phase].storages.items():
                parts[next((part for part, serials in states.serials.items() if serial in serials), tag)] += size
            found[phase] = {"total_bytes": memory.peaks[phase].total_bytes, "parts": dict(parts.most_common())}
    return {"peaks": found, "states": states.bytes, "rows": dict(forwards)}


def main() -> None:
    """Trace all cases of a file, one after the other."""
    warnings.filterwarnings("ignore")
    cases, tokenizer = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2]
    from toolkit.engines.fsdp2_on_cpu import enable_fsdp_on_cpu
    from toolkit.rehearse.stand_ins import join_fake_world

    world = RehearsedRank(world_size=cases[0]["world_size"], rank=0, fake_tensors=True)
    join_fake_world(world, load_preset(cases[0]["preset"]))
    enable_fsdp_on_cpu()
    for case in cases:
        print(json.dumps({"case": case} | trace(case, tokenizer)), flush=True)


if __name__ == "__main__":
    main()

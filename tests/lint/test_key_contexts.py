"""Unknown keys, words and types as people write them: what is said, what is offered, and what an edit may write."""

import json
from pathlib import Path

import pytest

from toolkit.lint.check import fixed_text, lint_paths
from toolkit.lint.findings import Finding, LintRule
from toolkit.lint.rules import keys, values

RULES = {each.name for module in (keys, values) for each in vars(module).values() if isinstance(each, LintRule)}
ACCELERATE = "distributed_type: MULTI_GPU\nnum_processes: 8\n"
FSDP = "distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 2\n"
DEEPSPEED = "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config:\n  zero_stage: 2\n"
TRAINER = "output_dir: out\nper_device_train_batch_size: 1\nbf16: true\nsave_strategy: steps\n"


def top(**more: object) -> str:
    return json.dumps({"zero_optimization": {"stage": 2}} | more)


def zero(**more: object) -> str:
    return json.dumps({"zero_optimization": {"stage": 3} | more})


def of_key(folder: Path, text: str, key: str) -> Finding | None:
    """Lint a file, and return the one finding about a key."""
    (folder / ".git").mkdir(exist_ok=True)
    path = folder / ("a.json" if text.startswith("{") else "a.yaml")
    path.write_text(text)
    found = [each for each in lint_paths([path]).findings if each.key == key and each.rule in RULES]
    assert len(found) < 2
    return found[0] if found else None


@pytest.mark.parametrize(
    ("text", "key", "fix"),
    [
        # a name that has only some of a key's words may mean something else, or another of several keys
        (top(batch_size=4), "batch_size", "`train_batch_size` or `train_micro_batch_size_per_gpu`, if you mean that"),
        (top(expert_parallel_size=2), "expert_parallel_size", "`expert_parallel`, if you mean that"),
        (zero(bucket_size=5000), "zero_optimization.bucket_size", "if you mean that"),
        (zero(reduce_bucket=5000), "zero_optimization.reduce_bucket", "`reduce_bucket_size`, if you mean that"),
        (f"{FSDP}  fsdp_prefetch: true\n", "fsdp_config.fsdp_prefetch",
         "`fsdp_backward_prefetch` or `fsdp_forward_prefetch`"),
        (f"{DEEPSPEED}  zero_init: true\n", "deepspeed_config.zero_init", "`zero3_init_flag`, if you mean that"),
        (f"{DEEPSPEED}  offload_optimizer: {{device: cpu}}\n", "deepspeed_config.offload_optimizer",
         "`offload_optimizer_device: cpu`"),
        (f"{ACCELERATE}megatron: x\n", "megatron", "`megatron_lm_config`, if you mean that"),
        (f"{TRAINER}adam_beta: 0.9\n", "adam_beta", "`adam_beta1` or `adam_beta2`, unless"),
        (f"{TRAINER}per_device_batch_size: 4\n", "per_device_batch_size", "`per_device_eval_batch_size`, unless"),
        (f"{TRAINER}fsdp: true\nfsdp_config: {{xla_config: {{}}}}\n", "fsdp_config.xla_config", "if you mean that"),
        # what is refused now is not replaced by a name that is deprecated
        (zero(stage3_gather_bf16_weights_on_model_save=True),
         "zero_optimization.stage3_gather_bf16_weights_on_model_save", "`stage3_gather_16bit_weights_on_model_save`"),
        (zero(cpu_offload_params=True), "zero_optimization.cpu_offload_params", '`offload_param: {"device": "cpu"}`'),
        # what was wished for has another name or place here, and is lost by removing it
        (top(max_grad_norm=1.0), "max_grad_norm", "`gradient_clipping`"),
        (top(zero_stage=3), "zero_stage", '`"zero_optimization": {"stage": ...}`'),
        (top(lr_scheduler={"type": "constant"}), "lr_scheduler", "remove it: no `scheduler`"),
        (zero(bf16={"enabled": True}), "zero_optimization.bf16", "move it to the top level"),
        (zero(device="cpu"), "zero_optimization.device", "into `zero_optimization.offload_optimizer` or into"),
        (f"{ACCELERATE}master_port: 29500\n", "master_port", "`main_process_port`"),
        (f"{ACCELERATE}bf16: true\n", "bf16", "`mixed_precision: bf16`"),
        (f"{FSDP}  fsdp_mixed_precision: bf16\n", "fsdp_config.fsdp_mixed_precision", "`mixed_precision` at the top"),
        (f"{TRAINER}fsdp: true\nfsdp_config: {{offload_params: true}}\n", "fsdp_config.offload_params",
         "`cpu_offload`"),
        (f"{TRAINER}fsdp: true\nfsdp_config: {{mixed_precision: bf16}}\n", "fsdp_config.mixed_precision", "`bf16`"),
        # a value in the form that the key takes
        (f"{FSDP}  fsdp_transformer_layer_cls_to_wrap: [A, B]\n", "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
         '"A,B"'),
        (zero(offload_optimizer="cpu"), "zero_optimization.offload_optimizer", '`{"device": "cpu"}`'),
        (top(fp16={"min_loss_scale": 1e-10}), "fp16.min_loss_scale", "`1`, or more"),
        (zero(stage="3"), "zero_optimization.stage", "0, 1, 2 or 3"),
        (f"{TRAINER}report_to: wandb,tensorboard\n", "report_to", "`[wandb,tensorboard]`"),
        (f"{TRAINER}save_total_limit: None\n", "save_total_limit", "`null`"),
        (f"{TRAINER}max_steps: 1e3\n", "max_steps", "`1000`"),
        (f"{ACCELERATE}mixed_precision: none\n", "mixed_precision", '`"no"`'),
        (top(scheduler={"type": "CosineWarmup"}), "scheduler.type", "`WarmupCosineLR`"),
    ],
)  # fmt: skip
def test_what_may_be_meant_is_offered_and_not_written(text: str, key: str, fix: str, tmp_path: Path) -> None:
    found = of_key(tmp_path, text, key)
    assert found is not None
    assert fix in found.fix
    assert fixed_text(Path(found.file)) == text


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        (top(gradient_acumulation_steps=4), '"gradient_acumulation_steps"', '"gradient_accumulation_steps"'),
        (top(wall_clock_break_down=True), '"wall_clock_break_down"', '"wall_clock_breakdown"'),
        (top(micro_batch_size_per_gpu=4), '"micro_batch_size_per_gpu"', '"train_micro_batch_size_per_gpu"'),
        (f"{FSDP}  ofload_params: true\n", "ofload_params", "fsdp_offload_params"),
        (f"{FSDP}  fsdp_offload_param: true\n", "fsdp_offload_param", "fsdp_offload_params"),
        (f"{FSDP}parallelism_config:\n  dp_shard_size: 8\n", "  dp_shard_size", "  parallelism_config_dp_shard_size"),
        (f"{DEEPSPEED}  zero3_save_16_bit_model: true\n", "zero3_save_16_bit_model", "zero3_save_16bit_model"),
    ],
)
def test_what_is_certain_is_written(text: str, old: str, new: str, tmp_path: Path) -> None:
    path = tmp_path / ("a.json" if text.startswith("{") else "a.yaml")
    path.write_text(text)
    assert fixed_text(path) == text.replace(old, new)


@pytest.mark.parametrize(
    ("text", "key", "level", "part"),
    [
        (f"{ACCELERATE}kt_config: {{enabled: true}}\n", "kt_config", "note", "refuses to start"),  # by plain accelerate
        # transformers' parser converts no value of a file
        (f'{TRAINER}gradient_checkpointing_kwargs: {{}}\ntf32: "False"\n', "tf32", "warning", "counts as true"),
        (f'{TRAINER}num_train_epochs: "3"\n', "num_train_epochs", "warning", "cannot count"),
        (json.dumps({"output_dir": "o", "save_strategy": "no", "per_device_train_batch_size": 1,
                     "learning_rate": "1e-4"}), "learning_rate", "warning", "cannot count"),
        (f"{TRAINER}max_steps: null\n", "max_steps", "warning", "null"),
        (f"{TRAINER}bf16_full_eval: auto\n", "bf16_full_eval", "error", "counts as true"),
        (f"{TRAINER}log_level: INFO\n", "log_level", "error", "debug, info"),
        (f'{ACCELERATE}num_machines: "2"\n', "num_machines", "error", "text"),
        (f'{ACCELERATE}main_process_port: "29500"\n', "main_process_port", "error", "text"),
        (top(optimizer={"type": "AdamW8bit"}), "optimizer.type", "error", "AdamW8bit"),
        ('{"zero_optimization": {}, "train_batch_size": 8, "train_batch_size": 4}', "train_batch_size", "warning",
         "DeepSpeed refuses"),
    ],
)  # fmt: skip
def test_a_value_that_its_reader_does_not_take_is_found(
    text: str, key: str, level: str, part: str, tmp_path: Path
) -> None:
    (tmp_path / "requirements.txt").write_text("transformers>=5\n")
    path = tmp_path / ("a.json" if text.startswith("{") else "a.yaml")
    path.write_text(text)
    assert (level, True) in [
        (each.level, part in each.message) for each in lint_paths([path]).findings if each.key == key
    ]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (top(_comment="mine", comment="mine", **{"//": "mine"}), ""),
        (top(optimizer={"type": "adamw"}), "optimizer.type"),
        (top(optimizer={"type": "RMSprop"}), "optimizer.type"),
        (f"{FSDP}  fsdp_sharding_strategy: full_shard\n", "fsdp_config.fsdp_sharding_strategy"),
        (f"{ACCELERATE}mixed_precision: BF16\n", "mixed_precision"),
        ('distributed_type: MULTI_GPU\nnum_processes: "8"\n', "num_processes"),
        (f'{ACCELERATE}use_cpu: "false"\n', "use_cpu"),  # the ranks read it as text
        ('distributed_type: "NO"\nnum_processes: 1\nnum_machines: "1"\n', "num_machines"),
        (f'{TRAINER}tf32: "True"\n', "tf32"),
        (f"{TRAINER}deepspeed_config: ds.json\n", "deepspeed_config"),
        (f"{TRAINER}save_total_limit: null\n", "save_total_limit"),
        (f"{TRAINER}num_train_epochs: ${{epochs}}\nseed: '{{{{ seed }}}}'\n", "num_train_epochs"),
        (f"{TRAINER}eval_delay: null\n", "eval_delay"),
        ("model_name_or_path: a/b\ndataset_name: c/d\nmax_length: 5\npacking: true\nmax_steps: '3'\n", "max_steps"),
    ],
)
def test_what_the_reader_takes_is_not_reported(text: str, key: str, tmp_path: Path) -> None:
    assert of_key(tmp_path, text, key) is None


def test_a_script_that_converts_a_number_may_have_it_as_text(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text('c = yaml.safe_load(open("a.yaml"))\nsteps = int(c["max_steps"])\n')
    assert of_key(tmp_path, f'{TRAINER}max_steps: "3"\n', "max_steps") is None


def test_an_option_takes_a_word_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("accelerate launch --num_processes 2 --mixed_precision BF16 x.py\n")
    assert [(each.key, each.fix) for each in lint_paths([tmp_path / "a.sh"]).findings] == [
        ("mixed_precision", "`bf16`")
    ]


def test_a_rename_is_offered_with_its_words_where_the_value_is_none_of_them(tmp_path: Path) -> None:
    text = "distributed_type: FSDP\nfsdp_config:\n  fsdp_backward_prefetch_policy: BEFORE\n"
    finding = of_key(tmp_path, text, "fsdp_config.fsdp_backward_prefetch_policy")
    assert finding is not None
    assert finding.fix.startswith("remove it, or `fsdp_backward_prefetch` with one of BACKWARD_PRE, ")

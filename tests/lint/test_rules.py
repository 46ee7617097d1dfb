"""Each rule reports a bad file at its line, and has no finding in a good one."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from job_scripts import SCRIPT_CASES
from program_files import PROGRAM_CASES
from refused_arguments import (
    ALONE,
    ALONE_BY_TRL,
    BF16_STATES,
    REFUSED,
    REFUSED_BY_DEEPSPEED,
    REFUSED_BY_GRPO,
    REFUSED_BY_PEFT,
    REFUSED_IN_BLOCKS,
    REFUSED_LATER,
    REFUSED_NESTED,
    WORDS_OF_DEEPSPEED,
    WORDS_OF_TRL,
    WRONG_IN_BLOCKS,
)

from toolkit.lint.check import fixed_text, lint_paths
from toolkit.lint.document import read_text
from toolkit.lint.findings import CHECKED_VERSIONS, Finding
from toolkit.lint.rules import RULES

FSDP = "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n"
FSDP1 = "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 1\n"
DEEPSPEED = "distributed_type: DEEPSPEED\ndeepspeed_config:\n"
PAIR = f"{DEEPSPEED}  deepspeed_config_file: ds.json\n"
SCHEDULE = {"params": {"warmup_min_ratio": 0, "total_num_steps": 9}}
IN_JSON = ('{"zero_optimization": {"stage": 2}, "scheduler": ', "}")
SFT = "model_name_or_path: a/b\ndataset_name: c/d\nmax_length: 512\n"
TRL = "model_name_or_path: Qwen/Qwen3-8B\nlearning_rate: 0.1\n"
OWN_PARSER = """import argparse, deepspeed
def parser_of():
    parser = argparse.ArgumentParser()
    group = parser.add_argument_group("b")
    group.add_argument("--beta", "-b")
    parser.add_argument("--lr", type=float)
    return parser
parser = parser_of()
parser.add_argument("--steps")
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()
"""
OR_A_FILE = """@dataclass
class Mine:
    model: str = "a"
parser = HfArgumentParser((Mine,))
if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
    (mine,) = parser.parse_json_file(json_file=os.path.abspath(sys.argv[1]))
else:
    (mine,) = parser.parse_args_into_dataclasses()
"""
OWN_DATACLASS = """@dataclass
class Mine:
    model: str = "a"
    lr_x: bool = False
    packs: bool = True
parser = HfArgumentParser((Mine,))
mine = parser.parse_args_into_dataclasses()[0]
"""
OF_TRL = "from trl import GRPOConfig, ModelConfig\nfrom . import other\n" + OWN_DATACLASS.replace(
    "HfArgumentParser((Mine,))", "TrlParser((Mine, GRPOConfig, ModelConfig))"
).replace("_into_dataclasses()[0]", "_and_config()")
MESH = f"{FSDP}parallelism_config:\n  parallelism_config_dp_shard_size: 2\n"


def zero(stage: int, **more: object) -> str:
    return json.dumps({"zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True} | more})


@dataclass(frozen=True)
class Case:
    """A bad and a good file for one rule; `line` is where the finding is in the bad file, None for a missing key."""

    rule: str
    bad: str
    good: str
    line: int | None
    name: str = "mine.yaml"
    deepspeed_json: str | None = None  # text of a ds.json next to it
    script: str | None = None  # text of a train.py next to it
    fixed: str | None = None  # the bad file after `--fix`, where the fix is mechanical


NVME = {"device": "nvme", "nvme_path": "/local"}
CASES = [
    Case("unknown-key", "distributed_type: MULTI_GPU\nmixed_precison: bf16\n",
         "distributed_type: MULTI_GPU\nmixed_precision: bf16\n", 2,
         fixed="distributed_type: MULTI_GPU\nmixed_precision: bf16\n"),
    Case("unknown-nested-key", f"{FSDP}  fsdp_reshard_after_forwrd: false  # keep\n",
         f"{FSDP}  reshard_after_forward: false\n", 4, fixed=f"{FSDP}  fsdp_reshard_after_forward: false  # keep\n"),
    Case("unknown-deepspeed-key", '{\n"zero_optimization": {"stage": 1},\n"gradient_cliping": "auto"}',
         '{"_why": "a comment", "zero_optimization": {"stage": 1}, "gradient_clipping": "auto"}', 3, "ds.json",
         fixed='{\n"zero_optimization": {"stage": 1},\n"gradient_clipping": "auto"}'),
    Case("dotted-key", '{"zero_optimization": {"stage": 3,\n"reduce_bucket_size": 5},\n'
         '"zero_optimization.reduce_bucket_size": 5}', zero(3, reduce_bucket_size=5), 3, "ds.json"),
    Case("offload-param-below-stage-3",
         '{"zero_optimization": {"stage": 1, "offload_param":\n{"device": "cpu"}},\n"zero_optimization.stage": 3}',
         zero(3, offload_param={"device": "cpu"}), 1, "ds.json"),
    Case("wrong-type", f"{DEEPSPEED}  deepspeed_config_file: 5\n", PAIR, 3),
    Case("degrees-differ-from-processes", f"{MESH}  parallelism_config_cp_size: 2\nnum_processes: 8\n",
         f"{MESH}  parallelism_config_cp_size: 2\nnum_processes: 4\n", 5),
    Case("wrong-type", "distributed_type: FSDP\nnum_processes: -2\n", "distributed_type: FSDP\nnum_processes: -1\n", 2),
    *(Case("unknown-word", f"{bad}: treu\n", f"{bad}: 'True'\n", bad.count("\n") + 1)
      for start in ("fsdp: true\nmax_steps: 1\nfsdp_config:\n",) for bad in (
          f"{FSDP}  fsdp_reshard_after_forward", f"{start}  reshard_after_forward",
          f"{start}  version: 1\n  use_orig_params")),
    Case("wrong-type", f"{DEEPSPEED}  zero_stage: two\n", f'{DEEPSPEED}  zero_stage: "2"\n', 3),
    Case("wrong-type", "distributed_type: MULTI_GPU\ngpu_ids: [0, 1]\n",
         'distributed_type: MULTI_GPU\ngpu_ids: "0,1"\n', 2),
    Case("wrong-deepspeed-type", '{"zero_optimization": {"stage": 3,\n"reduce_bucket_size": "large"}}',
         zero(3, reduce_bucket_size="auto", stage3_prefetch_bucket_size=5e8), 2, "ds.json"),
    Case("wrong-deepspeed-type", '{"zero_optimization":\ntrue}', '{"zero_optimization":\n{"stage": 0}}', 1, "ds.json"),
    Case("wrong-argument-type", "learning_rate: 1e-5\nlogging_steps: often\n",
         'learning_rate: 1e-5\nlogging_steps: 5\n', 2),
    Case("wrong-argument-type", f"{TRL}beta: 0.1\nloss_weights: [1.0, 0.5]\n",
         f"{TRL}beta: 0.1\nloss_type: [sigmoid, sft]\nloss_weights: [1.0, 0.5]\n", 4),
    Case("padding-free-ignored", f"{TRL}beta: 0.1\npadding_free: true\n", f"{TRL}packing: true\npadding_free: true\n",
         4, fixed=f"{TRL}beta: 0.1\n"),
    Case("padding-free-ignored", f"{TRL}packing: true\npadding_free: false\n",
         f"{TRL}packing: true\npacking_strategy: wrapped\npadding_free: false\n", 4, fixed=f"{TRL}packing: true\n"),
    Case("padding-free-refused", f"{TRL}padding_free: true\n", f"{TRL}padding_free: true\nmax_length: null\n", 3),
    Case("refused-nested-key", '{"zero_optimization": {"stage": 1,\n"reduce_bucket": 5}}',
         '{"zero_optimization": {"stage": 1, "reduce_bucket_size": 5}}', 2, "ds.json"),
    Case("refused-nested-key", '{"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}}',
         '{"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}', 1, "ds.json",
         fixed='{"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}'),
    Case("refused-nested-key", '{"zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto",\n"loss_scale": 0}}',
         '{"zero_optimization": {"stage": 1}, "fp16": {"enabled": "auto", "loss_scale": 0}}', 2, "ds.json"),
    *(Case("refused-nested-argument", f"output_dir: out\n{bad}", f"output_dir: out\n{good}", 2)
      for bad, good in (*REFUSED_NESTED, *REFUSED_LATER)),
    *(Case("wrong-deepspeed-type", bad, good, 2, "ds.json") for bad, good in WRONG_IN_BLOCKS),
    *(Case("refused-nested-key", bad, good, 2, "ds.json") for bad, good in REFUSED_IN_BLOCKS),
    Case("refused-nested-key", '{"zero_optimization": {},\n"aio": {"thread_count": 1}}',
         '{"zero_optimization": {}, "aio": {"intra_op_parallelism": 1}}', 2, "ds.json",
         fixed='{"zero_optimization": {},\n"aio": {"intra_op_parallelism": 1}}'),
    Case("removed-training-argument", f"{SFT}tp_size: 2\n", f"{SFT}tp_sizes: 2\n", 4),
    Case("unknown-nested-key", "distributed_type: MULTI_GPU\nfp8_config:\n  amax_history_length: 32\n",
         "distributed_type: MULTI_GPU\nfp8_config:\n  amax_history_len: 32\n  fp8_format: E4M3\n", 3,
         fixed="distributed_type: MULTI_GPU\nfp8_config:\n  fp8_amax_history_len: 32\n"),
    Case("unknown-nested-key", "distributed_type: MULTI_GPU\ndynamo_config:\n  backend: INDUCTOR\n  dynamic: true\n",
         "distributed_type: MULTI_GPU\ndynamo_config:\n  dynamo_backend: INDUCTOR\n  use_dynamic: true\n", 4),
    Case("removed-deepspeed-key", '{"zero_optimization": {"stage": 1},\n "elasticity": {"enabled": false}}',
         '{"zero_optimization": {"stage": 1}}', 2, "ds.json", fixed='{"zero_optimization": {"stage": 1}}'),
    Case("deprecated-zero-key", '{"zero_optimization": {"stage": 2, "cpu_offload": true}}',
         '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}', 1, "ds.json"),
    Case("removed-training-argument", f"{SFT}evaluation_strategy: epoch  # each\n", f"{SFT}eval_strategy: epoch\n", 4,
         fixed=f"{SFT}eval_strategy: epoch  # each\n"),
    Case("removed-training-argument", "warmup_ratio: 0.1\nlearning_rate: 0.1\n",
         "warmup_steps: 0.1\nlearning_rate: 0.1\n", 1),
    Case("removed-training-argument", "learning_rate: 1\noverwrite_output_dir: true\n",
         "learning_rate: 1\nfinetuning_type: lora\noverwrite_output_dir: true\n", 2),
    Case("deprecated-training-argument", "learning_rate: 0.1\ngradient_checkpointing: true\n",
         "learning_rate: 0.1\nactivation_checkpointing: true\n", 2),
    Case("misspelt-training-argument", "learning_rte: 0.1\nmax_steps: 2\n", "learning_rate: 0.1\nmax_length: 2\n", 1),
    Case("unknown-fsdp-config-key", "max_steps: 2\nfsdp: true\nfsdp_config:\n  reshard_after_forwrd: false\n",
         "max_steps: 2\nfsdp: true\nfsdp_config:\n  fsdp_reshard_after_forward: false\n", 4,
         fixed="max_steps: 2\nfsdp: true\nfsdp_config:\n  reshard_after_forward: false\n"),
    Case("duplicate-key", "max_steps: 2\nlearning_rate: 1\nmax_steps: 3\n", "max_steps: 3\nlearning_rate: 1\n", 3),
    Case("starts-one-process", "distributed_type: MULTI_CPU\nnum_processes: 2\n",
         "distributed_type: MULTI_GPU\nuse_cpu: true\n", 1),
    Case("starts-one-process", 'distributed_type: "NO"\nnum_processes: 8\n',
         'distributed_type: "NO"\nnum_processes: 1\n', 1),
    Case("unquoted-no", "distributed_type: MULTI_GPU\nmixed_precision: no\n",
         'distributed_type: MULTI_GPU\nmixed_precision: "no"\n', 2,
         fixed='distributed_type: MULTI_GPU\nmixed_precision: "no"\n'),
    Case("pdsh-by-default", f"num_machines: 2\n{DEEPSPEED}  zero_stage: 2\n",
         f"num_machines: 2\n{DEEPSPEED}  deepspeed_multinode_launcher: standard\n", None),
    Case("never-forwarded", f"{DEEPSPEED}  zero_stage: 3\n  offload_param_nvme_path: /local\n",
         f"{DEEPSPEED}  zero_stage: 3\n  offload_param_nvme_path: none\n", 4),
    Case("block-not-in-force", "distributed_type: MULTI_GPU\nfsdp_config:\n  fsdp_version: 2\n",
         "distributed_type: MULTI_GPU\nfsdp_config: {}\n", 2),
    Case("block-not-in-force", "distributed_type: FSDP\ndeepspeed_config:\n  zero_stage: 2\n",
         "distributed_type: XLA\nfsdp_config:\n  xla_fsdp_v2: true\n", 2),
    Case("dp-replicate-alone", f"{FSDP}parallelism_config:\n  parallelism_config_dp_replicate_size: 2\n"
         "  parallelism_config_dp_shard_size: 1\n",
         f"{MESH}  parallelism_config_dp_replicate_size: 2\n", 5),
    Case("cp-with-sp", f"{MESH}  parallelism_config_cp_size: 2\n  parallelism_config_sp_size: 2\n",
         f"{MESH}  parallelism_config_cp_size: 2\n", 7),
    Case("cp-needs-fsdp2", f"{FSDP1}parallelism_config:\n  parallelism_config_cp_size: 2\n",
         f"{MESH}  parallelism_config_cp_size: 2\n", 5),
    Case("block-not-in-force", "distributed_type: MULTI_GPU\nfsdp_config:\n  parallel: [tp]\n  fsdp_version: 2\n",
         "distributed_type: MULTI_GPU\nfsdp_config:\n  parallel: [tp]\n", 2),
    Case("tp-with-fsdp2", f"{MESH}  parallelism_config_tp_size: 2\n",
         "distributed_type: MULTI_GPU\nparallelism_config:\n  parallelism_config_tp_size: 2\n", 6),
    Case("sp-below-stage-3", f"{PAIR}parallelism_config:\n  parallelism_config_sp_size: 2\n",
         f"{DEEPSPEED}  zero_stage: 3\nparallelism_config:\n  parallelism_config_sp_size: 2\n", 5,
         deepspeed_json=zero(2)),
    Case("sp-below-stage-3", f"{PAIR}  parallel: [dp_shard, sp]\n", f"{DEEPSPEED}  zero_stage: 3\n  parallel: [sp]\n",
         4, deepspeed_json=zero(1)),
    Case("sp-attention", f"{DEEPSPEED}  zero_stage: 3\nparallelism_config:\n  parallelism_config_sp_size: 2\n"
         "  parallelism_config_sp_attn_implementation: eager\n",
         f"{DEEPSPEED}  zero_stage: 3\nparallelism_config:\n  parallelism_config_sp_size: 2\n"
         "  parallelism_config_sp_attn_implementation: flash_attention_2\n", 6,
         fixed=f"{DEEPSPEED}  zero_stage: 3\nparallelism_config:\n  parallelism_config_sp_size: 2\n"
         "  parallelism_config_sp_attn_implementation: sdpa\n"),
    Case("parallel-needs-toolkit", f"{FSDP}  parallel: [dp_shard, cp]\n", FSDP, 4),
    Case("remote-by-default", "max_steps: 2\npush_to_hub: true\n", "max_steps: 2\npush_to_hub: false\n", 2),
    Case("fsdp1-by-omission", "distributed_type: FSDP\nfsdp_config:\n  fsdp_offload_params: false\n", FSDP, None),
    Case("fsdp1-reshard-ignored", f"{FSDP1}  fsdp_reshard_after_forward: SHARD_GRAD_OP\n",
         f"{FSDP1}  fsdp_sharding_strategy: SHARD_GRAD_OP\n", 4,
         fixed=f"{FSDP1}  fsdp_sharding_strategy: SHARD_GRAD_OP\n"),
    Case("fsdp1-reshard-ignored",
         "distributed_type: FSDP\nfsdp_config:\n  fsdp_reshard_after_forward: SHARD_GRAD_OP\n",
         "distributed_type: FSDP\nfsdp_config:\n  fsdp_reshard_after_forward: FULL_SHARD\n", 3),
    Case("fsdp2-reshard-word", f"{FSDP}  fsdp_reshard_after_forward: SHARD_GRAD_OP\n",
         f"{FSDP}  fsdp_reshard_after_forward: false\n", 4, fixed=f"{FSDP}  fsdp_reshard_after_forward: false\n"),
    Case("fsdp2-strategy-ignored", f"{FSDP}  fsdp_sharding_strategy: SHARD_GRAD_OP\n",
         f"{FSDP}  fsdp_reshard_after_forward: false\n", 4),
    Case("fsdp2-obsolete-key", f"{FSDP}  fsdp_use_orig_params: true  # FSDP1\n  fsdp_offload_params: true\n",
         f"{FSDP1}  fsdp_use_orig_params: true\n", 4, fixed=f"{FSDP}  fsdp_offload_params: true\n"),
    Case("loading-without-sync", f"{FSDP1}  fsdp_sync_module_states: false\n",
         f"{FSDP1}  fsdp_sync_module_states: false\n  fsdp_cpu_ram_efficient_loading: false\n", 4,
         fixed=f"{FSDP1}  fsdp_sync_module_states: true\n"),
    Case("sharded-final-save", f"{FSDP}  fsdp_state_dict_type: SHARDED_STATE_DICT\n",
         f"{FSDP}  fsdp_state_dict_type: FULL_STATE_DICT\n", 4),
    Case("layer-class-of-another-model", f"{TRL}fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer\n",
         f"{TRL}fsdp_transformer_layer_cls_to_wrap: Qwen3DecoderLayer\n", 3),
    Case("layer-class-of-one-model", f"{FSDP}  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer\n", FSDP, 4),
    Case("refused-by-accelerate", f"{FSDP}  fsdp_activation_checkpointing_offload: true\n",
         f"{FSDP}  fsdp_activation_checkpointing_offload: true\n  fsdp_activation_checkpointing: true\n", 4),
    Case("refused-by-accelerate", f"{FSDP}  fsdp_state_dict_type: LOCAL_STATE_DICT\n", FSDP, 4),
    Case("refused-by-accelerate", f"{DEEPSPEED}  deepspeed_multinode_launcher: openmpi\nnum_machines: 2\n",
         f"{DEEPSPEED}  deepspeed_multinode_launcher: standard\nnum_machines: 2\n", 3),
    Case("refused-by-accelerate", "distributed_type: MULTI_GPU\ngpu_ids: 3\n",
         "distributed_type: MULTI_GPU\ngpu_ids: 3\nnum_machines: 2\n", 2),
    Case("uneven-processes", "distributed_type: FSDP\nnum_machines: 2\nnum_processes: 5\n",
         "distributed_type: FSDP\nnum_machines: 2\nnum_processes: 6\n", 3),
    Case("uneven-processes", 'distributed_type: FSDP\nnum_machines: 2\nnum_processes: 2\ngpu_ids: "0,1"\n',
         'distributed_type: FSDP\nnum_machines: 2\nnum_processes: 4\ngpu_ids: "0,1"\n', 3),
    Case("never-taken", "distributed_type: FSDP\nnum_machines: 2\nrdzv_backend: c10d\n",
         "distributed_type: FSDP\nnum_machines: 2\nrdzv_backend: static\nsame_network: true\n", 3),
    Case("whole-model-on-each-rank", f"{DEEPSPEED}  zero_stage: 3\n  zero3_init_flag: false\n",
         f"{DEEPSPEED}  zero_stage: 2\n  zero3_init_flag: false\n", 4),
    Case("unknown-word", "distributed_type: FDSP\n", "distributed_type: FSDP\nmixed_precision: BF16\n", 1),
    Case("unknown-word", f"{FSDP1}  fsdp_sharding_strategy: FULL\n",
         f"{FSDP1}  fsdp_sharding_strategy: full_shard\n", 4),
    Case("unknown-word", "max_steps: 1\noptim: adamw_8bits\n", "max_steps: 1\noptim: ${OPTIM}\nreport_to: all\n", 2),
    Case("unknown-word", "finetuning_type: lora\neval_strategy: step\n",
         "finetuning_type: lora\neval_strategy: steps\noptim: adamw_of_ours\n", 2),
    Case("unknown-nested-key", f"{DEEPSPEED}  stage3_gather_16bit_weights_on_model_save: true\n",
         f"{DEEPSPEED}  zero3_save_16bit_model: true\n", 3, fixed=f"{DEEPSPEED}  zero3_save_16bit_model: true\n"),
    Case("stage-3-without-gather", f"{DEEPSPEED}  zero_stage: 3\n  zero3_save_16bit_model: false\n",
         f"{DEEPSPEED}  zero_stage: 3\n  zero3_save_16bit_model: true\n", 4),
    Case("checkpointing-block-unread",
         '{"zero_optimization": {}, "activation_checkpointing": {"cpu_checkpointing": true}}',
         '{"zero_optimization": {}, "activation_checkpointing": {}}', 1, "ds.json"),
    Case("wrong-deepspeed-type", '{"zero_optimization": {"stage": "3"}}', zero(3), 1, "ds.json"),
    *(Case("refused-alone" if bad.startswith(ALONE) else "refused-by-trainer",
           f"output_dir: out\n{bad}", f"output_dir: out\n{good}", 2) for bad, good in REFUSED),
    *(Case("refused-by-trl" if bad.startswith(ALONE_BY_TRL) else "refused-by-grpo",
           f"output_dir: out\n{bad}max_completion_length: 9\n",
           f"output_dir: out\n{good}max_completion_length: 9\n", 2) for bad, good in REFUSED_BY_GRPO),
    *(Case("refused-by-deepspeed", bad, good, 2, "ds.json") for bad, good in REFUSED_BY_DEEPSPEED),
    *(Case("bf16-states", bad, good, 2, "ds.json") for bad, good in BF16_STATES),
    *(Case("unknown-word", bad, good, 2, "ds.json") for bad, good in WORDS_OF_DEEPSPEED),
    *(Case("refused-by-peft", f"{SFT}use_peft: true\n{bad}", f"{SFT}use_peft: true\n{good}", 5)
      for bad, good in REFUSED_BY_PEFT),
    Case("auto-is-kept", '{"train_batch_size": "auto", "zero_optimization": {"stage": 3,\n"sub_group_size": "auto"}}',
         zero(3, reduce_bucket_size="auto") , 2, "ds.json"),
    Case("refused-by-accelerate", "distributed_type: MULTI_GPU\nnum_machines: 2\nmachine_rank: 2\n",
         "distributed_type: MULTI_GPU\nnum_machines: 2\nmachine_rank: 1\n", 3),
    Case("refused-by-accelerate", f"{FSDP}  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n  fsdp_min_num_params: 1e8\n",
         f"{FSDP}  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n  fsdp_min_num_params: 100000000\n", 5),
    Case("refused-alone", "do_train: true\noutput_dir: a\nlr_scheduler_type: warmup_stable_decay\n",
         "do_train: true\noutput_dir: a\nlr_scheduler_type: warmup_stable_decay\n"
         "lr_scheduler_kwargs: {num_decay_steps: 1}\n", 3),
    Case("refused-alone", "do_train: true\noutput_dir: a\nddp_backend: ncll\n",
         "do_train: true\noutput_dir: a\nddp_backend: cpu:gloo,cuda:nccl\n", 3),
    *(Case("unknown-word", f'{{"zero_optimization": {{}}, "scheduler": {{"type": "WarmupLR",\n"params": {bad}}}}}',
           f'{{"zero_optimization": {{}}, "scheduler": {{"type": "WarmupLR",\n"params": {good}}}}}', 2, "ds.json")
      for bad, good in [('{"warmup_type": "cosine"}', '{"warmup_type": "log"}')]),
    Case("refused-by-trl", f"{SFT}sync_ref_model: true\nprecompute_ref_log_probs: true\n",
         f"{SFT}sync_ref_model: true\nprecompute_ref_log_probs: false\n", 4),
    *(Case("unknown-word", f"{SFT}{bad}\n", f"{SFT}{good}\n", 4) for bad, good in WORDS_OF_TRL),
    Case("unknown-word", "distributed_type: MULTI_GPU\ndynamo_config:\n  dynamo_mode: max\n",
         "distributed_type: MULTI_GPU\ndynamo_config:\n  dynamo_mode: max-autotune\n", 3),
    Case("wrong-deepspeed-type", '{"zero_optimization": {"stage": 1},\n"wall_clock_breakdown": "false"}',
         '{"zero_optimization": {"stage": 1},\n"wall_clock_breakdown": "true"}', 2, "ds.json"),
    Case("unknown-parameter", '{"zero_optimization": {}, "optimizer": {"type": "AdamW", "params": {\n"rate": 1}}}',
         '{"zero_optimization": {}, "optimizer": {"type": "AdamW", "params": {\n"lr": 1}}}', 2, "ds.json"),
    Case("unknown-parameter", json.dumps(SCHEDULE | {"type": "WarmupDecayLR"}, indent=1).join(IN_JSON),
         json.dumps(SCHEDULE | {"type": "WarmupCosineLR"}).join(IN_JSON), 3, "ds.json"),
    Case("wrong-deepspeed-type", '{"zero_optimization": {}, "optimizer": {"type": "Adam", "params": {\n"lr": "2e-5"}}}',
         '{"zero_optimization": {}, "optimizer": {"type": "Adam", "params": {"lr": "auto"}}}', 2, "ds.json"),
    Case("never-forwarded", f"{DEEPSPEED}  zero_stage: 3\n  offload_param_device: nvme\n",
         f"{DEEPSPEED}  zero_stage: 3\n  offload_param_device: cpu\n", 4),
    Case("never-forwarded", f"{DEEPSPEED}  zero_stage: 3\n  offload_optimizer_device: nvme\n",
         f"{DEEPSPEED}  zero_stage: 2\n  offload_optimizer_device: cpu\n", 4),
    Case("unknown-parameter", json.dumps({"type": "WarmupDecayLR", "params": {}}, indent=1).join(IN_JSON),
         json.dumps({"type": "WarmupLR", "params": {}}).join(IN_JSON), 2, "ds.json"),
    Case("unknown-word", json.dumps(SCHEDULE | {"type": "WarmupCosineAnnealing"}, indent=1).join(IN_JSON),
         json.dumps(SCHEDULE | {"type": "CosineAnnealingLR"}).join(IN_JSON), 6, "ds.json"),
    Case("four-and-eight-bits", "load_in_4bit: true\nload_in_8bit: true\noutput_dir: out\n",
         "load_in_4bit: true\nload_in_8bit: false\noutput_dir: out\n", 2),
    Case("max-steps-and-epochs", "num_train_epochs: 2\nmax_steps: 10\n", "num_train_epochs: 2\nmax_steps: -1\n", 1),
    Case("number-as-text", "learning_rate: 1e-4\nmax_steps: 1\n", "learning_rate: 1.0e-4\nmax_steps: 1\n", 1,
         fixed="learning_rate: 1.0e-4\nmax_steps: 1\n"),
    Case("number-as-text", "weight_decay: 1e-2\n", "dataset_name: a/b\nweight_decay: 1e-2\n", 1),
    Case("not-indented", "gradient_checkpointing_kwargs:\nuse_reentrant: false\nmax_steps: 1\n",
         "gradient_checkpointing_kwargs:\n  use_reentrant: false\nmax_steps: 1\n", 2),
    Case("unknown-fsdp-config-key",
         '{"version": 2,\n"reshard_after_forwrd": true, "state_dict_type": "FULL_STATE_DICT"}',
         '{"version": 2,\n"reshard_after_forward": true, "state_dict_type": "FULL_STATE_DICT"}', 2, "fsdp.json",
         fixed='{"version": 2,\n"reshard_after_forward": true, "state_dict_type": "FULL_STATE_DICT"}'),
    Case("fsdp1-key-of-trainer", "fsdp: true\nfsdp_config:\n  use_orig_params: true\n",
         "fsdp: true\nfsdp_config:\n  version: 1\n  use_orig_params: true\n", 3,
         fixed="fsdp: true\nfsdp_config:\n"),
    Case("whole-gradients-between-steps", "fsdp: true\ngradient_accumulation_steps: 4\n",
         "fsdp: true\ngradient_accumulation_steps: 4\n"
         "accelerator_config: {gradient_accumulation_kwargs: {sync_each_batch: false}}\n", 2),
    Case("not-auto",
         '{"gradient_clipping": "auto", "zero_optimization": {}, "train_batch_size": 16,\n"bf16": {"enabled": true}}',
         '{"zero_optimization": {"stage": 1}, "train_batch_size": "auto", "bf16": {"enabled": "auto"}}', 1, "ds.json"),
    Case("yaml-not-auto", f"{DEEPSPEED}  zero_stage: 2\n  gradient_accumulation_steps: 1\n",
         f"{DEEPSPEED}  zero_stage: 2\n  gradient_accumulation_steps: auto\n", 4),
    Case("no-zero-block", '{"train_batch_size": "auto"}', zero(0), None, "ds.json"),
    Case("fp16-and-bf16-json", '{"zero_optimization": {}, "fp16": {"enabled": true}, "bf16": {"enabled": true}}',
         '{"zero_optimization": {}, "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}', 1, "ds.json"),
    Case("batch-arithmetic",
         '{"zero_optimization": {}, "train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}',
         '{"zero_optimization": {}, "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}', 1, "ds.json"),
    Case("batch-arithmetic", '{"zero_optimization": {}, "gradient_accumulation_steps": 0}',
         '{"zero_optimization": {}, "gradient_accumulation_steps": 1}', 1, "ds.json",
         fixed='{"zero_optimization": {}, "gradient_accumulation_steps": "auto"}'),
    Case("offload-param-below-stage-3", '{"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}',
         zero(3, offload_param={"device": "cpu"}), 1, "ds.json", fixed='{"zero_optimization": {"stage": 2}}'),
    Case("offload-param-below-stage-3", f"{DEEPSPEED}  offload_param_device: cpu\n  zero_stage: 2\n",
         f"{DEEPSPEED}  offload_param_device: cpu\n  zero_stage: 3\n", 3, fixed=f"{DEEPSPEED}  zero_stage: 2\n"),
    Case("nvme-without-path", zero(3, offload_optimizer={"device": "nvme"}), zero(3, offload_optimizer=NVME), 1,
         "ds.json"),
    Case("nvme-below-stage-3", zero(2, offload_optimizer=NVME), zero(2, offload_optimizer={"device": "cpu"}), 1,
         "ds.json"),
    Case("bf16-states", zero(2).replace("{", '{"bf16": {"bf16_optimizer_states": true}, ', 1), zero(2), 1, "ds.json"),
    Case("bf16-states", zero(2).replace("{", '{"bf16": {"bf16_master_weights_and_grads": true}, ', 1),
         zero(2, offload_optimizer={"device": "cpu"}).replace(
             "{", '{"bf16": {"bf16_master_weights_and_grads": true}, ', 1), 1, "ds.json"),
    Case("nvme-prefetch", zero(3, offload_param=NVME, stage3_prefetch_bucket_size="auto"),
         zero(3, offload_optimizer=NVME, stage3_prefetch_bucket_size="auto"), 1, "ds.json",
         fixed=zero(3, offload_param=NVME, stage3_prefetch_bucket_size=0)),
    Case("sub-group-size-zero", zero(3, sub_group_size=0), zero(3, sub_group_size=1e9), 1, "ds.json"),
    Case("max-live-parameters-zero", zero(3, stage3_max_live_parameters=0), zero(3), 1, "ds.json"),
    Case("overlap-below-stage-3", zero(2, overlap_comm=True), zero(3, overlap_comm=True), 1, "ds.json"),
    *(Case("optimizer-of-json", f'{{"zero_optimization": {{}}, "optimizer": {{"type": "AdamW", "params": {{{lr}}}}}}}',
           zero(1), 1, "ds.json") for lr in ('"lr": 0.1', '"lr": "auto"')),
    Case("optimizer-of-json", '{"zero_optimization": {},\n"scheduler": {"type": "WarmupDecayLR", "params": {}}}',
         zero(1), 2, "ds.json"),
    Case("more-processes-than-gpus", "CUDA_VISIBLE_DEVICES=5,7 accelerate launch --config_file ds.json x.py\n",
         "CUDA_VISIBLE_DEVICES=4,5,6,7 accelerate launch --config_file ds.json x.py\n", 1, "run.sh",
         deepspeed_json='{"distributed_type": "FSDP", "num_processes": 4}'),
    Case("offload-without-cpu-adam",
         '{"zero_force_ds_cpu_optimizer": false, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}',
         '{"zero_force_ds_cpu_optimizer": false, "zero_optimization": {"stage": 2}}', 1, "ds.json"),
    Case("stage-3-without-gather", '{"zero_optimization": {"stage": 3}}', zero(3), None, "ds.json"),
    Case("stage-3-without-gather", zero(3, reduce_bucket_size="auto").replace("true", "false"), zero(3), 1, "ds.json"),
    Case("fp16-and-bf16", "max_steps: 2\nfp16: true\nbf16: true\n", "max_steps: 2\nfp16: false\nbf16: true\n", 2),
    Case("checkpointing-twice",
         "fsdp: true\nactivation_checkpointing: true\nfsdp_config: {activation_checkpointing: true}\nmax_steps: 1\n",
         "fsdp: true\nfsdp_config: {activation_checkpointing: true}\nmax_steps: 1\n", 2,
         fixed="fsdp: true\nfsdp_config: {activation_checkpointing: true}\nmax_steps: 1\n"),
    Case("4bit-not-sharded", "learning_rate: 0.1\nload_in_4bit: true\nfsdp: true\n",
         "learning_rate: 0.1\nload_in_4bit: true\nfsdp: true\nbnb_4bit_quant_storage: bfloat16\n", 2),
    Case("sharded-save-only-model",
         "fsdp: true\nfsdp_config: {state_dict_type: SHARDED_STATE_DICT}\nsave_only_model: true\n",
         "fsdp: true\nfsdp_config: {state_dict_type: FULL_STATE_DICT}\nsave_only_model: true\n", 3,
         fixed="fsdp: true\nfsdp_config: {state_dict_type: SHARDED_STATE_DICT}\n"),
    Case("save-only-model-best", "fsdp: true\nsave_only_model: true\nload_best_model_at_end: true\n",
         "fsdp: true\nload_best_model_at_end: true\n", 2),
    Case("fsdp-as-words", "max_steps: 2\nfsdp: full_shard auto_wrap\n", "max_steps: 2\nfsdp: true\n", 2),
    Case("deepspeed-file-missing", f"{DEEPSPEED}  deepspeed_config_file: gone.json\n", f"{DEEPSPEED}  zero_stage: 2\n",
         3, deepspeed_json=zero(1)),
    Case("deepspeed-file-missing", PAIR, f"{DEEPSPEED}  zero_stage: 2\n", 3, deepspeed_json=zero(1)),
    Case("deepspeed-file-no-json", "learning_rate: 1\ndeepspeed: a.yaml\n", "learning_rate: 1\ndeepspeed: a.json\n", 2),
    Case("byte-order-mark", "\ufeff" + zero(2), zero(2), 1, "ds.json"),
    Case("key-owned-by-json", f"{PAIR}  zero_stage: 1\n  zero3_init_flag: true\n", f"{PAIR}  zero3_init_flag: true\n",
         4, deepspeed_json=zero(1)),
    Case("precision-owned-by-json", f"{PAIR}mixed_precision: bf16\n", PAIR, 4, deepspeed_json=zero(1)),
    Case("batch-arithmetic-of-pair", f"num_processes: 2\n{PAIR}", f"num_processes: 4\n{PAIR}", 1,
         deepspeed_json='{"zero_optimization": {}, "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4,'
                ' "gradient_accumulation_steps": 1}'),
    Case("differs-from-json", "deepspeed: ds.json\ngradient_accumulation_steps: 2\n",
         "deepspeed: ds.json\ngradient_accumulation_steps: 4\n", 2,
         deepspeed_json='{"zero_optimization": {}, "gradient_accumulation_steps": 4}'),
    Case("auto-batch-at-stage-3", "deepspeed: ds.json\nauto_find_batch_size: true\n", "deepspeed: ds.json\n", 2,
         deepspeed_json=zero(3)),
    Case("offload-replaces-optimizer", "deepspeed: ds.json\noptim: adamw_bnb_8bit\n",
         "deepspeed: ds.json\noptim: adamw_torch\n", 2,
         deepspeed_json='{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}'),
    Case("two-engines", "accelerate launch --config_file ds.json --multi_gpu x.py\n",
         "accelerate launch --config_file ds.json --use_fsdp x.py\n", 1, "run.sh",
         deepspeed_json='{"distributed_type": "FSDP"}'),
    Case("rank-of-file", "#SBATCH --nodes=2\nsrun accelerate launch --config_file ds.json x.py\n",
         "#SBATCH --nodes=2\nsrun accelerate launch --config_file ds.json --machine_rank $R x.py\n", 2, "job.sbatch",
         deepspeed_json='{"distributed_type": "MULTI_GPU", "num_machines": 2, "machine_rank": 0}'),
    Case("sharded-save-only-model",
         "accelerate launch --config_file ds.json x.py --bf16 --do_train --save_only_model\n",
         "accelerate launch --config_file ds.json x.py --bf16 --do_train\n", 1, "run.sh",
         deepspeed_json='{"distributed_type": "FSDP", "fsdp_config": {"fsdp_state_dict_type": "SHARDED_STATE_DICT"}}'),
    Case("inference-below-stage-3", "torchrun train.py --bf16 --do_predict --output_dir a --deepspeed ds.json\n",
         "torchrun train.py --bf16 --do_predict --do_train --output_dir a --deepspeed ds.json\n", 1, "run.sh",
         deepspeed_json='{"zero_optimization": {"stage": 2}}'),
    Case("inference-below-stage-3", "torchrun train.py --bf16 --do_eval --output_dir a --deepspeed ds.json\n",
         "torchrun other.py --bf16 --do_eval --output_dir a --deepspeed ds.json\n", 1, "run.sh",
         deepspeed_json='{"zero_optimization": {"stage": 2}}', script="if training_args.do_train: pass"),
    Case("deepspeed-without-standard", "accelerate launch --config_file ds.json --num_machines 2 x.py\n",
         "accelerate launch --config_file ds.json --num_machines 2 --deepspeed_multinode_launcher standard x.py\n", 1,
         "run.sh", deepspeed_json='{"distributed_type": "DEEPSPEED"}'),
    Case("no-head", "accelerate launch --config_file ds.json x.py\n",
         "accelerate launch --config_file ds.json --main_process_ip $HEAD x.py\n", 1, "run.sh",
         deepspeed_json='{"distributed_type": "MULTI_GPU", "num_machines": 2}'),
    Case("local-rank-with-dash", "python -m torch.distributed.launch train.py\n",
         "python -m torch.distributed.launch --use_env train.py\n", 1, "run.sh",
         script="parser = argparse.ArgumentParser()\nparser.add_argument('--local_rank')\nparser.parse_args()\n"),
    Case("local-rank-with-dash", "python -m torch.distributed.launch train.py\n", "torchrun train.py\n", 1, "run.sh",
         script="parser = argparse.ArgumentParser()\nparser.add_argument('--lr')\nparser.parse_args()\n"),
    Case("local-rank-with-dash", "python -m torch.distributed.launch other.py\n",
         "python -m torch.distributed.launch train.py\n", 1, "run.sh", script="parser.add_argument('--local-rank')\n"),
    Case("file-not-read", "accelerate launch train.py a.yaml\n", "accelerate launch train.py --config a.yaml\n", 1,
         "run.sh", script="parser = TrlParser(Mine)\n"),
    Case("file-not-read", "torchrun train.py a.yaml --lr 1\n", "torchrun other.py a.yaml\n", 1, "run.sh",
         script="args, = HfArgumentParser(Mine).parse_args_into_dataclasses()\n"),
    *(Case("unknown-script-option", f"{bad}\n", f"{good}\n", 1, "run.sh", script=source)
      for bad, good, source in (
          ("torchrun train.py --rate 1", "torchrun train.py --l 1 --beta=2 --steps 3 other.py", OWN_PARSER),
          ("torchrun train.py --beta_1 1", "torchrun other.py --beta_1 1", OWN_PARSER),
          ("deepspeed train.py", "deepspeed --no_local_rank train.py --deepspeed", OWN_PARSER),
          ("torchrun train.py --rate 1", "torchrun train.py --no-packs --model a --lr-x", OWN_DATACLASS),
          ("torchrun train.py --rate 1", "torchrun train.py --model a", OR_A_FILE),
          ("deepspeed train.py", "torchrun train.py --model=$M", OWN_DATACLASS),
          ("torchrun train.py --rate 1", "torchrun train.py --model a --num_generations 8 --config a.yaml", OF_TRL),
          ("torchrun train.py --max_neg 1", "deepspeed train.py --output_dir out --model a",
           OWN_DATACLASS.replace("class Mine:", "class Mine(TrainingArguments):")),
      )),
    Case("refused-by-llama-factory", "llamafactory-cli train --stage sft --finetuning_type lora --do_train\n",
         "llamafactory-cli train $CONFIG --stage sft --finetuning_type lora --do_train\n", 1, "run.sh"),
    Case("batch-arithmetic-of-pair", "torchrun --nproc-per-node 1 x.py --bf16 --do_train --deepspeed ds.json\n",
         "torchrun --nproc-per-node 2 x.py --bf16 --do_train --deepspeed ds.json\n", 1, "run.sh",
         deepspeed_json='{"zero_optimization": {"stage": 2}, "train_batch_size": 8,'
         ' "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}'),
    Case("deepspeed-without-launcher", "python -u x.py --deepspeed ds.json --bf16 --do_train --output_dir out\n",
         "torchrun x.py --deepspeed ds.json --bf16 --do_train --output_dir out\n", 1, "run.sh"),
    Case("refused-by-trainer", "python3 x.py --bf16 --do_train --output_dir out \\\n  --load_best_model_at_end true\n",
         "python3 x.py --bf16 --do_train --output_dir out \\\n  --load_best_model_at_end false\n", 2, "run.sh"),
    *(Case("batch-arithmetic-of-pair", f"deepspeed {bad} x.py --deepspeed_config ds.json\n",
           f"deepspeed {good} x.py --deepspeed_config ds.json\n", 1, "run.sh", deepspeed_json=json)
      for bad, good, json in (
          ("--num_gpus 3", "--num_gpus 4", '{"zero_optimization": {}, "train_batch_size": 16}'),
          ("--include localhost:0,1,2", "--include=localhost:4,5",
           '{"zero_optimization": {}, "train_batch_size": 16, "gradient_accumulation_steps": 8}'),
          ("--num_gpus 8", "--num_gpus 8 --hostfile h",
           '{"zero_optimization": {}, "train_batch_size": 4, "train_micro_batch_size_per_gpu": "auto"}'),
          ("--num_gpus 8", "--num_gpus 2", '{"zero_optimization": {}, "train_batch_size": 8,'
           ' "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}'),
      )),
    Case("no-batch-size", "deepspeed: ds.json\noutput_dir: out\nbf16: true\n", "output_dir: out\nbf16: true\n",
         None, deepspeed_json='{"zero_optimization": {"stage": 2}}'),
]  # fmt: skip
CASES += [
    Case(
        "refused-hostfile",
        "deepspeed --hostfile ds.json x.py\n",
        "deepspeed x.py\n",
        1,
        "run.sh",
        deepspeed_json=f"#\n{each}",
    )
    for each in ("a slots=2\nb lots=2\n", "a slots=2\na slots=2\n")
]
CASES += [
    Case("refused-hostfile", "deepspeed --hostfile ds.json --include a:0,2 x.py\n",
         "deepspeed --hostfile ds.json --include a:0,1@b x.py\n", 1, "run.sh",
         deepspeed_json="# nodes\na slots=2\nb slots=2\n"),
]  # fmt: skip
CASES += [Case("script-missing", "torchrun tain.py -a 1\n", "torchrun test.py -a 1\n", 1, "run.sh", script="main()\n")]
CASES += [Case(rule, bad, good, line, name) for rule, bad, good, line, name in SCRIPT_CASES]
CASES += [Case(rule, bad, good, line, fixed=fixed) for rule, bad, good, line, fixed in PROGRAM_CASES]
IDS = [f"{case.rule}-{index}" for index, case in enumerate(CASES)]


def written(folder: Path, case: Case, text: str) -> Path:
    (folder / case.name).write_text(text)
    if case.deepspeed_json is not None:
        (folder / "ds.json").write_text(case.deepspeed_json)
    if case.script is not None:
        (folder / "train.py").write_text(case.script)
    return folder / case.name


def findings(path: Path, rule: str) -> list[Finding]:
    return [each for each in lint_paths([path]).findings if each.rule == rule]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_bad_file_has_a_finding_at_its_line_and_a_good_one_has_none(case: Case, tmp_path: Path) -> None:
    path = written(tmp_path, case, case.bad)
    found = findings(path, case.rule)
    assert [each.line for each in found][:1] == [case.line]
    read_text(fixed_text(path), str(path))  # what is fixed can be read
    assert all(each.message and each.fix and each.checked_against.split()[0] in CHECKED_VERSIONS for each in found)
    assert findings(written(tmp_path, case, case.good), case.rule) == []


@pytest.mark.parametrize("case", [case for case in CASES if case.fixed is not None], ids=lambda case: case.rule)
def test_a_mechanical_fix_gives_exactly_this_file_and_no_more_finding(case: Case, tmp_path: Path) -> None:
    path = written(tmp_path, case, case.bad)
    fixed = fixed_text(path)
    assert fixed == case.fixed
    assert findings(written(tmp_path, case, fixed), case.rule) == []


def test_every_rule_has_a_bad_and_a_good_file_and_a_description() -> None:
    assert {rule.name for rule in RULES} == {case.rule for case in CASES}
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(rule.description and rule.fix and rule.level in ("error", "warning", "note") for rule in RULES)


def test_the_json_that_a_yaml_names_is_linted_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ds.json").write_text(
        '{"train_batch_size": "auto", "zero_optimization": {"stage": 1},\n"gradient_cliping": 1}'
    )
    (tmp_path / "mine.yaml").write_text(PAIR)
    linted = lint_paths([tmp_path / "mine.yaml"])
    assert [Path(file).name for file in linted.files] == ["mine.yaml", "ds.json"]
    assert [(Path(each.file).name, each.line, each.rule) for each in linted.findings] == [
        ("mine.yaml", 3, "deepspeed-file-missing"),
        ("ds.json", 2, "unknown-deepspeed-key"),
    ]
    monkeypatch.chdir(tmp_path)  # where the libraries find the JSON
    assert [each.rule for each in lint_paths([Path("mine.yaml")]).findings] == ["unknown-deepspeed-key"]


def test_what_an_older_library_still_accepts_is_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}, "elasticity": {}}')
    monkeypatch.setattr("toolkit.lint.check.installed_version", lambda _: "0.19.6")
    assert lint_paths([tmp_path]).findings == []
    monkeypatch.setattr("toolkit.lint.check.installed_version", lambda _: "0.20.0")
    assert [each.rule for each in lint_paths([tmp_path]).findings] == ["removed-deepspeed-key"]


# -- docs/reference/lint.md; its table of rules is made when the site is built

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "lint.md").read_text()


def test_the_page_names_every_option_every_key_of_the_json_and_every_version() -> None:
    words = (*(each.name for each in dataclasses.fields(Finding)), "--fix", "--in-place", "--json")
    assert [word for word in words if f"`{word}`" not in PAGE] == []
    assert [f"{name} {version}" for name, version in CHECKED_VERSIONS.items() if f"{name} {version}" not in PAGE] == []

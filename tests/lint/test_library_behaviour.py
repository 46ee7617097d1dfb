"""The installed libraries, bash and torchrun behave as the lint rules say: shown on a CPU, or found in their source."""

import ast
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from fork_server import SERVER_VARIABLE
from launching import cpu_environment, fork_server, run_warm, torchrun
from refused_arguments import (
    BF16_STATES,
    REFUSED,
    REFUSED_BY_DEEPSPEED,
    REFUSED_BY_PEFT,
    REFUSED_IN_BLOCKS,
    REFUSED_NESTED,
    WORDS_OF_DEEPSPEED,
    WRONG_IN_BLOCKS,
)

from toolkit.convert.job_script import launcher_tables, read_script
from toolkit.job.trainer_schema import trainer_argument_names
from toolkit.lint.findings import CHECKED_VERSIONS
from toolkit.lint.rules import RULES
from toolkit.lint.rules.conditions import DPO_KEYS
from toolkit.lint.rules.programs import DATASET
from toolkit.presets import removed_keys as removed
from toolkit.versions import attention_names, installed_version, version_numbers

nightly = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
ACCEPTED = "nothing"  # the library raised nothing
# Settings that libraries accept, and that have no finding.
NO_FINDING = {"prefix-is-added": "false", "field-names-are-taken": ACCEPTED, "pair-alone": ACCEPTED}

# What the library did, or a part of its error message.
EXPECTED: dict[str, Any] = {
    "unknown-key": "had unknown keys (['mixed_precison'])",
    "unknown-nested-key": "true",  # the default, though the misspelt key said false
    "starts-one-process": ["simple_launcher", "simple_launcher", "multi_gpu_launcher"],
    "unquoted-no": "'bool' object has no attribute 'lower'",
    "pdsh-by-default": ["deepspeed", "--hostfile", "None", "--no_local_rank", "--launcher", "pdsh"],
    "never-forwarded": {"device": "nvme", "nvme_path": "none"},  # of offload_param, though the YAML names a path
    "block-not-in-force": "not set",
    "dp-replicate-alone": "no dimension for FSDP to shard across",
    "cp-with-sp": "mutually exclusive",
    "tp-with-fsdp2": "cannot import name 'ReplicateParallel'",
    "sp-attention": "'eager' and 'flex_attention' are not supported with sequence parallelism",
    "parallel-needs-toolkit": [],  # variables that carry it to the ranks
    "fsdp1-by-omission": "1",
    "fsdp1-reshard-ignored": ["ShardingStrategy.FULL_SHARD", "None"],  # SHARD_GRAD_OP was asked for
    "fsdp2-reshard-word": "invalid truth value shard_grad_op",
    "fsdp2-strategy-ignored": True,  # resharded after forward, though SHARD_GRAD_OP was asked for
    "fsdp2-obsolete-key": [None, None, None, None],
    "loading-without-sync": "set `--fsdp_sync_module_states` to `True`",
    "key-owned-by-json": "accelerate config variables will be ignored",
    "precision-owned-by-json": "accelerate config variables will be ignored",
    "no-zero-block": "Please specify the ZeRO optimization config",
    "deepspeed-file-missing": "Expected a string path to an existing deepspeed config",
    "duplicate-key": [2, 2],
    "unknown-deepspeed-key": ACCEPTED,
    "dotted-key": [500_000_000, 1000],  # of `zero_optimization.reduce_bucket_size: 1000`, and of the key in its block
    "fp16-and-bf16-json": "cannot be simultaneously enabled",
    "batch-arithmetic": "train_batch_size is not equal to",
    "batch-arithmetic-of-pair": "16 != 4 * 2 * 1",
    "offload-param-below-stage-3": ACCEPTED,
    "nvme-without-path": ACCEPTED,
    "overlap-below-stage-3": [False, True],  # the defaults at stage 2 and 3
    "misspelt-training-argument": "not used by the HfArgumentParser: ['learning_rte']",
    "fp16-and-bf16": "At most one of fp16 and bf16",
    "unknown-fsdp-config-key": True,  # the default, though the misspelt key said false
    "not-auto": "gradient_accumulation_steps=4 vs hf gradient_accumulation_steps=2",
    "optimizer-of-json": "DummyOptim",  # DeepSpeed builds its own, though adafactor was asked for
}
# Rules that rest on the same behaviour as another rule.
SHOWN_BY_ANOTHER = {"yaml-not-auto": "not-auto", "differs-from-json": "not-auto"}
SHOWN_BY_ANOTHER |= {"no-head": "uneven-processes"}
SHOWN_BY_ANOTHER |= {"deepspeed-without-standard": "pdsh-by-default", "fsdp1-key-of-trainer": "fsdp2-obsolete-key"}
# Behaviour that only GPUs, disks or long runs show, and where the library states it: package, module, text.
FOUND_IN_SOURCE = {
    "inference-below-stage-3": (
        "transformers",
        "integrations/deepspeed.py",
        "ZeRO inference only makes sense with ZeRO",
    ),
    "file-not-read": (
        "transformers",
        "hf_argparser.py",
        "Some specified arguments are not used by the HfArgumentParser",
    ),
    "eight-bits-under-fsdp1": ("torch", "distributed/fsdp/_flat_param.py", "Cannot flatten integer dtype tensors"),
    "local-rank-with-dash": ("torch", "distributed/run.py", 'cmd_args.append(f"--local-rank={macros.local_rank}")'),
    "standalone-on-several": ("torch", "distributed/run.py", 'args.rdzv_endpoint = "localhost:0"'),
    "refused-hostfile": ("deepspeed", "launcher/runner.py", "Hostfile contains a bad entry"),
    "deepspeed-without-launcher": ("deepspeed", "comm/comm.py", "from mpi4py import MPI"),
    "two-engines": ("accelerate", "commands/launch.py", "You can only use one of `--cpu`, `--multi_gpu`"),
    "rank-of-file": ("accelerate", "utils/launch.py", "args.node_rank = int(args.machine_rank)"),
    "no-such-port": ("torch", "distributed/elastic/rendezvous/utils.py", "between 0 and 65536."),
    "jit-checkpoint": ("transformers", "trainer_jit_checkpoint.py", "self.is_checkpoint_requested = True"),
    "cp-needs-fsdp2": ("accelerate", "state.py", "Using `cp_size>1` requires FSDP2"),
    "degrees-differ-from-processes": (
        "accelerate",
        "parallelism_config.py",
        "total_size ({self.total_size}) does not match",
    ),
    "checkpointing-twice": ("transformers", "trainer.py", "can't both be set to True"),
    "sharded-save-only-model": ("transformers", "trainer.py", "with FSDP state dict type 'SHARDED_STATE"),
    "save-only-model-best": ("transformers", "trainer.py", "`save_only_model` along with `load_best_model_at_end`"),
    "auto-batch-at-stage-3": ("transformers", "trainer.py", "isn't supported yet with DeepSpeed Zero-3"),
    "stage-3-without-gather": ("accelerate", "accelerator.py", "Cannot get 16bit model weights"),
    # run by tests/train/test_training_methods.py
    "offload-replaces-optimizer": ("accelerate", "utils/deepspeed.py", 'defaults["adamw_mode"] = False'),
    "offload-without-cpu-adam": ("accelerate", "accelerator.py", '"zero_force_ds_cpu_optimizer", True)'),
    # what becomes of the weights is run by tests/train/model/test_four_bit.py
    "4bit-not-sharded": ("accelerate", "utils/fsdp_utils.py", "Exclude non-floating frozen Params4bit from FSDP"),
    "whole-gradients-between-steps": ("transformers", "trainer.py", 'plugin_kwargs.get("sync_each_batch", False)'),
    "padding-free-ignored": ("trl", "trainer/dpo_trainer.py", "            self.padding_free = False\n"),
    "padding-free-refused": (
        "trl",
        "trainer/sft_trainer.py",
        "if self.padding_free and not args.packing and args.max_length is not None and not self._is_vision_dataset:",
    ),
    "sharded-final-save": (
        "transformers",
        "trainer.py",
        'if "FULL_STATE_DICT" in str(self.accelerator.state.fsdp_plugin',
    ),
    "layer-class-of-another-model": ("accelerate", "utils/fsdp_utils.py", "Could not find the transformer layer class"),
    "layer-class-of-one-model": ("accelerate", "utils/dataclasses.py", "Could not find the transformer layer class"),
    "refused-by-accelerate": ("accelerate", "utils/dataclasses.py", "FSDP2 does not support LOCAL_STATE_DICT"),
    "uneven-processes": ("accelerate", "utils/launch.py", "args.nproc_per_node = str(num_processes // num_machines)"),
    "whole-model-on-each-rank": ("accelerate", "utils/operations.py", "deepspeed_plugin.is_zero3_init_enabled()"),
    "checkpointing-block-unread": ("deepspeed", "runtime/activation_checkpointing/checkpointing.py", "def configure("),
    "visible-devices-ignored": ("deepspeed", "launcher/runner.py", "but ignoring it because one or several of"),
    "include-with-count": ("deepspeed", "launcher/runner.py", "Cannot specify num_nodes/gpus with include/exclude"),
    "file-behind-local-rank": ("deepspeed", "launcher/launch.py", 'cmd.append(f"--local_rank={local_rank}")'),
    "four-and-eight-bits": (
        "trl",
        "trainer/model_config.py",
        "You can't use 8 bit and 4 bit precision at the same time",
    ),
    "byte-order-mark": ("accelerate", "utils/deepspeed.py", "config = json.load(f)"),
    "deepspeed-file-no-json": ("accelerate", "utils/deepspeed.py", "config = json.load(f)"),
    "unread-by-trl": ("trl", "trainer/utils.py", "    if model_args.use_peft is False:\n        return None\n"),
    "refused-by-grpo": ("trl", "trainer/grpo_config.py", "if self.generation_batch_size % self.num_generations != 0:"),
    "max-steps-and-epochs": ("transformers", "trainer.py", "if args.max_steps > 0:"),
    "nvme-below-stage-3": (
        "deepspeed",
        "runtime/zero/stage_1_and_2.py",
        "offload_optimizer_config.device != OffloadDeviceEnum.none:\n            self.cpu_offload = True",
    ),
    "bf16-states": ("deepspeed", "runtime/config.py", "bf16_optimizer_states requires bf16_master_weights_and_grads"),
    "nvme-prefetch": ("deepspeed", "runtime/swap_tensor/partitioned_param_swapper.py", "already assigned swap buffer"),
}
# Programs that are not installed beside the others: their source was read once.
NOT_INSTALLED = {"axolotl", "llamafactory", "ms-swift", "verl", "openrlhf"}
# Properties of a cluster or a policy, and costs that are measured elsewhere.
NOT_SHOWN = {
    *("remote-by-default", "sub-group-size-zero"),
    "max-live-parameters-zero",
    "more-processes-than-gpus",
    # of SLURM, and of two jobs at once
    *("only-first-node", "signal-to-batch-shell", "folder-made-too-late"),
    *("directive-behind-command", "more-processes-than-granted"),
    "waits-for-lost-node",
}


@cache
def seen() -> dict[str, Any]:
    """Return what the libraries did; one process for all rules, forked, because importing them takes longest."""
    lists = {
        "deepspeed": sorted(removed.DEEPSPEED_REMOVED),
        "zero": list(removed.ZERO_REMOVED),
        "deprecated": list(removed.ZERO_DEPRECATED),
        "arguments": sorted(removed.TRAINING_ARGUMENTS_REMOVED),
    }
    script = str(ROOT / "tests" / "scripts" / "lint_truths.py")
    os.environ[SERVER_VARIABLE] = fork_server()
    done = run_warm([sys.executable, script, json.dumps(lists)], cpu_environment())
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.rpartition("SEEN ")[2]))


@nightly
@pytest.mark.parametrize("rule", [*EXPECTED, *NO_FINDING])
def test_the_library_does_what_the_rule_says(rule: str) -> None:
    expected, found = (EXPECTED | NO_FINDING)[rule], seen()[rule]
    assert expected in found if isinstance(expected, str) else found == expected


def source_of(package: str, module: str) -> str:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / module).read_text()


@nightly
@pytest.mark.parametrize("rule", FOUND_IN_SOURCE)
def test_the_source_of_the_library_states_what_a_cpu_cannot_show(rule: str) -> None:
    package, module, sentence = FOUND_IN_SOURCE[rule]
    assert sentence in source_of(package, module)


@nightly
def test_deepspeed_refuses_unknown_and_removed_keys_and_accepts_deprecated_ones() -> None:
    assert all("Extra inputs are not permitted" in message for message in seen()["refused-nested-key"])
    said = seen()["removed-deepspeed-key"]
    assert set(said) == set(removed.DEEPSPEED_REMOVED) | set(removed.ZERO_REMOVED)
    assert all("removed" in each for each in said.values())
    assert set(seen()["deprecated-zero-key"].values()) == {ACCEPTED}


@nightly
def test_the_libraries_raise_for_values_of_a_wrong_type() -> None:
    assert [each.partition(":")[0] for each in seen()["wrong-type"]] == [
        *("AttributeError", "AttributeError", "ValueError", "ValueError", "ValidationError", "ValidationError"),
        "TypeError",
    ]


@nightly
def test_trl_turns_padding_free_on_for_packed_rows_and_writes_dotted_keys() -> None:
    packed = 'self.padding_free = args.padding_free or (args.packing and args.packing_strategy in {"bfd", "bfd_split"})'
    assert packed in source_of("trl", "trainer/sft_trainer.py")
    assert '"zero_optimization.reduce_bucket_size": hidden_size' in source_of("trl", "models/utils.py")
    own = [key for key in DPO_KEYS if f"    {key}: " in source_of("trl", "trainer/dpo_config.py")]
    assert own == list(DPO_KEYS)
    assert [key for key in DPO_KEYS if f"    {key}: " in source_of("trl", "trainer/sft_config.py")] == []


@nightly
def test_transformers_refuses_each_removed_argument_and_has_what_replaces_it() -> None:
    assert all("Some keys are not used" in each for each in seen()["removed-training-argument"].values())
    assert any("`activation_checkpointing` instead" in message for message in seen()["deprecated-training-argument"])
    assert "False is not a valid SaveStrategy" in seen()["unquoted-no-strategy"][0]
    assert set(removed.TRAINING_ARGUMENTS_RENAMED.values()) <= trainer_argument_names()
    replacements = [str(new) for new in removed.TRAINING_ARGUMENTS_REMOVED.values() if new and "=" not in new]
    assert {new.partition(":")[0] for new in replacements} - {"warmup_steps"} <= trainer_argument_names()


@nightly
@pytest.mark.parametrize(
    ("library", "name"),
    [(library, name) for library, gone in removed.IMPORTS_REMOVED.items() for names in gone.values() for name in names],
)
def test_a_name_that_needs_an_older_library_is_not_in_the_installed_one(library: str, name: str) -> None:
    if library == "ms-swift" and importlib.util.find_spec("swift") is None:
        pytest.skip("needs ms-swift")
    is_module = "." in name
    there = importlib.util.find_spec(name) if is_module else getattr(importlib.import_module(library), name, None)
    assert there is None


@nightly
@pytest.mark.launch
def test_sequence_parallelism_below_stage_3_makes_gradients_as_many_times_too_large_as_it_has_ranks() -> None:
    ended = torchrun("sequence_parallel_norm.py", "2", num_processes=2)
    assert ended.returncode == 0, ended.stderr[-3000:]
    alone, in_parts = map(float, ended.stdout.rpartition("NORMS ")[2].split()[:2])  # the Trainer prints behind it
    assert in_parts == pytest.approx(2 * alone, rel=1e-5)  # at stage 3 they are equal


@nightly
def test_words_in_fsdp_mean_version_2_hybrid_ones_are_refused_and_the_keys_are_those_of_the_source() -> None:
    version, reshard, refused = seen()["fsdp-as-words"]
    assert (version, reshard, "is only available with FSDP1" in refused) == (2, False, True)
    source = source_of("transformers", "training_args.py")
    assert [key for key in removed.TRAINER_FSDP_KEYS if f'"{key}"' not in source] == []


def test_every_rule_is_shown_found_in_source_or_listed_as_neither() -> None:
    own_tests = {"refused-nested-key", "removed-deepspeed-key", "deprecated-zero-key"}
    own_tests |= {"removed-training-argument", "deprecated-training-argument", "fsdp-as-words", "sp-below-stage-3"}
    own_tests |= {"wrong-type", "wrong-deepspeed-type", "wrong-argument-type"}
    own_tests |= {"rank-of-first-node", "head-is-localhost", "each-node-alone", "no-rendezvous", "node-rank-missing"}
    own_tests |= {"fixed-rendezvous-id", "launcher-per-gpu", "refused-by-trainer", "refused-alone"}
    own_tests |= {"refused-by-trl", "refused-by-deepspeed", "refused-by-peft", "auto-is-kept", "no-batch-size"}
    own_tests |= {"unknown-word", "never-taken", "behind-the-script", "flag-with-value", "unknown-variable"}
    own_tests |= {"unknown-trl-setting", "unknown-parameter"}  # by TRL's schema and DeepSpeed's classes
    own_tests |= {"refused-nested-argument", "option-without-dashes"}
    own_tests |= {"variable-behind-command", "unknown-launcher-option", "count-of-slurm"}
    own_tests |= {"unknown-script-option", "folder-of-copy", "script-missing", "server-in-front"}
    own_tests |= {rule.name for rule in RULES if rule.library in NOT_INSTALLED}
    own_tests |= {
        *("refused-value", "shell-slip", "text-for-number"),
        "blank-in-assignment",
        "lost-line",
        "typographic-quotes",
        "not-exported",
        "number-as-text",
        "not-indented",
    }
    shown = EXPECTED.keys() | SHOWN_BY_ANOTHER.keys() | FOUND_IN_SOURCE.keys() | own_tests
    assert {rule.name for rule in RULES} == shown | NOT_SHOWN
    assert [rule.name for rule in RULES if rule.level == "error" and rule.name in NOT_SHOWN] == []


@nightly
def test_the_rules_were_checked_with_the_installed_versions() -> None:
    # the first three are no Python packages
    for library in CHECKED_VERSIONS.keys() - {"slurm", "bash", "kubernetes", *NOT_INSTALLED}:
        assert version_numbers(installed_version(library) or "") == version_numbers(CHECKED_VERSIONS[library]), library


# -- what the libraries raise

# Lines of a raise -> rule that says it, or why none does.
HARDWARE, CODE = "depends on the GPU or the packages of the node", "a value that only code can pass"
TYPE = "the type of a value that hardly anybody writes"
RAISES = {
    ("transformers", "training_args.py"): {
        "Failed to initialize torch.distributed": HARDWARE,
        "evaluation strategy": "refused-by-trainer",
        "Tried passing in a callable to": CODE,
        "--tf32 requires Ampere": HARDWARE,
        "`torch_empty_cache_steps` must be": "refused-alone",
        "logging strategy": "refused-by-trainer",
        "--logging_steps must be an integer": "refused-by-trainer",
        "--eval_steps must be an integer": "refused-by-trainer",
        "--save_steps must be an integer": "refused-by-trainer",
        "--load_best_model_at_end requires": "refused-by-trainer",
        "error_message": HARDWARE,
        "At most one of fp16 and bf16 can be True, but": "fp16-and-bf16",
        "At most one of fp16 and bf16 can be True for full eval": "refused-alone",
        "reduce_lr_on_plateau requires an eval": "refused-by-trainer",
        "reduce_lr_on_plateau requires torch": HARDWARE,
        "greedy requires an eval": "refused-by-trainer",
        "Got warmup_steps": "refused-alone",
        "--dataloader_prefetch_factor": "refused-alone",
        "Using the `Trainer` with `PyTorch`": HARDWARE,
        "Passing `'use_configured_state':True`": CODE,
        "Tried to use an already configured": CODE,
        "Setting `strategy` as 'steps'": CODE,
        "`auto_wrap_policy` must be one of": "unknown-word",
        "is only available with FSDP1": "refused-by-trainer",
        "Unknown `fsdp` option": "refused-by-trainer",
        "invalid truth value": "wrong-argument-type",
    },
    ("trl", "trainer/grpo_config.py"): {
        "does not support sequence-dim parallelism": CODE,
        "log_completions_hub_repo is set": "refused-by-trl",
        "auto_find_batch_size is not supported": "refused-by-trl",
        "must be divisible by the global batch size": "refused-by-grpo",
        "can not be both configured": "refused-by-trl",
        "The global eval batch size": "refused-by-grpo",
        "must be divisible by num_generations": "refused-by-grpo",
        "requires at least 2 generations": "refused-by-grpo",
        "must be less than": "refused-by-grpo",
        "At least one of `vllm_importance_sampling": "only with an empty clip of the default",
    },
    ("trl", "trainer/rloo_config.py"): {
        "does not support sequence-dim parallelism": CODE,
        "auto_find_batch_size is not supported": "refused-by-trl",
        "must be divisible by the global batch size": "refused-by-grpo",
        "can not be both configured": "refused-by-trl",
        "The global eval batch size": "refused-by-grpo",
        "must be divisible by num_generations": "refused-by-grpo",
        "requires at least 2 generations": "refused-by-grpo",
    },
    ("trl", "trainer/dpo_config.py"): {"`loss_weights`": "wrong-argument-type"},
    ("trl", "trainer/model_config.py"): {"You can't use 8 bit and 4 bit": "four-and-eight-bits"},
    ("trl", "trainer/distillation_config.py"): {
        "beta must be in": "experimental, and `beta` is also DPO's",
        "": "experimental",
    },
    ("accelerate", "utils/dataclasses.py"): {
        "Please specify the ZeRO optimization config": "no-zero-block",
        "MS-AMP is not supported": "only MS-AMP",
        "Invalid optimization level for MS-AMP": "only MS-AMP",
        "not found in kwargs": "auto-is-kept",
        "Please correct the following DeepSpeed config values": "differs-from-json",
        "arg cannot be set to": "precision-owned-by-json",
        "When `zero3_init_flag` is set": HARDWARE,
        "the following accelerate config variables will be ignored": "key-owned-by-json",
        "DeepSpeed version must be": HARDWARE,
        "Could not find a transformer layer class": "layer-class-of-one-model",
        "must be enabled manually": CODE,
        "'enabled' can only be set": CODE,
        "FSDP2 requires PyTorch": HARDWARE,
        "please set to a `bool`": "fsdp2-reshard-word",
        "This is not supported with FSDP1": CODE,
        "Invalid auto wrap policy": "unknown-word",
        "`min_num_params` must be an integer": CODE,
        "forward_prefetch is not yet implemented": CODE,
        "requires `activation_checkpointing=True`": "refused-by-accelerate",
        "requires `fsdp_version=2`": "refused-by-accelerate",
        "no available devices found": HARDWARE,
        "FSDP2 does not support LOCAL_STATE_DICT": "refused-by-accelerate",
        "Could not find the transformer layer class": "layer-class-of-one-model",
        "Invalid mixed precision": CODE,
        "mixed_precision_policy must be": CODE,
        "`cpu_offload` must be": CODE,
        "is only available in PyTorch": HARDWARE,
        "Invalid cp_comm_strategy": "unknown-word",
        "`sp_seq_length` must be provided": "the launcher's default is a length that varies",
        "not supported with sequence parallelism": "sp-attention",
        "or a hub-hosted flash attention kernel": "sp-attention",
        "TP requires transformers": HARDWARE,
    },
    ("deepspeed", "runtime/config.py"): {
        "DeepSpeedConfigError(message)": "removed-deepspeed-key",
        "Invalid module names for torch autocast": CODE,
        "Invalid dtype for torch autocast": "unknown-word",
        "Invalid communication_data_type": "unknown-word",
        "Invalid {GRADIENT_ALLREDUCE_OP}": "unknown-word",
        "invalid tag_validation": "unknown-word",
        "checkpoint::parallel_write::pipeline_stage": "unknown-word",
        "Expected a string path to an existing": "deepspeed-file-missing",
        'must be "auto" or a list of name': "a key that DeepSpeed 0.19 alone has",
        "='sum' is not supported with": "refused-by-deepspeed",
        "cannot be simultaneously enabled": "fp16-and-bf16-json",
        "has to be greater than 0": "batch-arithmetic",
        "train_batch_size is not equal": "batch-arithmetic-of-pair",
        "needs to be provided": "no-batch-size",
        "is not defined": "batch-arithmetic",
        "Maximum supported ZeRO stage": "wrong-deepspeed-type",
        "is only supported with ZeRO Stage": "refused-by-deepspeed",
        "requires bf16_master_weights_and_grads": "bf16-states",
    },
    ("deepspeed", "runtime/zero/config.py"): {
        "compute_grad_norm=false": "refused-by-deepspeed",
        "Partial offloading only": "refused-by-deepspeed",
    },
    ("deepspeed", "runtime/precision_config.py"): {
        "must be a number": TYPE,
        "must be an integer": TYPE,
        "must be a finite number": TYPE,
        "fp16.loss_scale must be >= 0": "refused-by-deepspeed",
        "must be > 0 when dynamic loss scaling": "refused-by-deepspeed",
    },
    ("deepspeed", "runtime/zenflow/zenflow_config.py"): {
        "select_strategy must be one of": "unknown-word",
        "is a string, it must be": TYPE,
        "is a number, it must be at least 1": TYPE,
        "must be an integer": TYPE,
        "must be a float": TYPE,
    },
    ("deepspeed", "runtime/config_utils.py"): {
        "Duplicate keys in DeepSpeed config": "duplicate-key",
        "raise e": CODE,
        "is not a field in": CODE,
        "is a required field": CODE,
        "Cannot provide deprecated parameter": "refused-by-deepspeed",
    },
    ("peft", "tuners/lora/config.py"): {
        "`target_parameters` must be": "a list in the arguments of each program",
        "cannot be used when `target_modules` is a str": "programs pass a list",
        "When `layers_pattern` is specified": "refused-by-peft",
        "DoRA does not support megatron_core": CODE,
        "The required package": HARDWARE,
        "`loftq_config` must be specified": "refused-by-peft",
        "lora_bias=True": "no program passes it on",
    },
    ("accelerate", "commands/launch.py"): {
        "DeepSpeed is not installed": HARDWARE,
        "--no_python cannot be used with TPU": HARDWARE,
        "Your training script should have": HARDWARE,
        "Docker containers are not supported": HARDWARE,
        "Please install sagemaker": HARDWARE,
        "SageMaker requires a python": HARDWARE,
        "CalledProcessError": "the script's own failure",
        "You can only use one of": "flags of the launcher, which name each other in the message",
        "at least 2 processes to use `--multi_gpu`": "refused-by-accelerate",
        "You cannot use `--use_parallelism_config`": "flags of the launcher, which name each other in the message",
        "Less than two GPU ids": "refused-by-accelerate",
        "bf16 mixed precision requires": HARDWARE,
        "manually pass in `--num_processes`": "a file without num_processes leaves it to the flag",
    },
}


# Of a module's many classes, those that read a file's settings.
PLUGINS = (
    *(
        "LoraConfig",
        "DeepSpeedPlugin",
        "FullyShardedDataParallelPlugin",
        "TorchContextParallelConfig",
        "TorchTensorParallelConfig",
    ),
    "DeepSpeedSequenceParallelConfig",
)


def raises_in(text: str, *, only: tuple[str, ...] = (), asserts: bool = False) -> list[str]:
    """The text of each raise, with the lines of its message; of some classes alone, and with what is asserted."""
    tree = ast.parse(text)
    parts = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name in only] or [tree]
    nodes = [node for part in parts for node in ast.walk(part)]
    raises = [each for each in nodes if isinstance(each, ast.Raise) and each.exc is not None]
    return [ast.unparse(each) for each in raises + [each for each in nodes if isinstance(each, ast.Assert) and asserts]]


@nightly
@pytest.mark.parametrize("place", RAISES, ids="/".join)
def test_every_raise_of_the_arguments_has_a_rule_or_a_reason(place: tuple[str, str]) -> None:
    known, only = RAISES[place], PLUGINS if "dataclasses" in place[1] or place[0] == "peft" else ()
    raised = raises_in(source_of(*place), only=only, asserts=place[0] == "deepspeed")
    unknown = [each for each in raised if not any(part in each.replace("\\'", "'") for part in known)]
    assert unknown == []
    assert [part for part in known if not any(part in each.replace("\\'", "'") for each in raised)] == []
    names = {rule.name for rule in RULES}
    assert {what for what in known.values() if "-" in what and " " not in what} <= names


ARGUMENTS = """from transformers import TrainingArguments
def read(text): TrainingArguments(**yaml.safe_load(text), output_dir="out", use_cpu=True, report_to="none")
"""
DEEPSPEED_CONFIG = """import os
os.environ["DS_ACCELERATOR"] = "cpu"
from deepspeed.runtime.config import DeepSpeedConfig
def read(text): DeepSpeedConfig(json.loads(text))
"""
ADAPTER = """import torch
from peft import LoraConfig, get_peft_model
def read(text):
    names = {"lora_r": "r", "lora_target_modules": "target_modules"}
    given = {names.get(key, key): value for key, value in yaml.safe_load(text).items()}
    get_peft_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), LoraConfig(**{"target_modules": ["0"], **given}))
"""
# What `auto` becomes in the ranks is not known before a model is there; what is left of it raises.
AUTO = """from accelerate.utils import DeepSpeedPlugin
def read(text): DeepSpeedPlugin(hf_ds_config=json.loads(text)).deepspeed_config_process(must_match=False)
"""
KEPT = ('{"zero_optimization": {"stage": 3, "sub_group_size": "auto"}', '{"zero_optimization": {"stage": 3}}')
REFUSALS = {
    "Trainer": (ARGUMENTS, [*REFUSED, *REFUSED_NESTED]),
    "DeepSpeed": (
        DEEPSPEED_CONFIG,
        [
            *(*REFUSED_BY_DEEPSPEED, *BF16_STATES, *WORDS_OF_DEEPSPEED, *WRONG_IN_BLOCKS, *REFUSED_IN_BLOCKS),
            ("{}", '{"train_batch_size": 1}'),
        ],
    ),
    "peft": (
        ADAPTER,
        [
            *REFUSED_BY_PEFT,
            ("layers_pattern: a\n", "layers_pattern: a\nlayers_to_transform: [0]\n"),
            ("init_lora_weights: loftq\n", "init_lora_weights: true\n"),
        ],
    ),
    "accelerate": (AUTO, [KEPT]),
}


@nightly
@pytest.mark.parametrize("library", REFUSALS)
def test_a_library_raises_for_each_bad_file_of_its_rules_and_for_no_good_one(library: str) -> None:
    reader, pairs = REFUSALS[library]
    code = f"import json, sys, yaml\n{reader}for text in json.loads(sys.argv[1]):\n"
    code += "    try: read(text); said = '0'\n    except Exception: said = '1'\n"
    code += "    print('SAID', said)\n"
    texts = json.dumps([text for pair in pairs for text in pair])
    done = subprocess.run([sys.executable, "-c", code, texts], capture_output=True, text=True, check=True)
    said = [line.split()[1] == "1" for line in done.stdout.splitlines() if line.startswith("SAID")]
    assert said == [True, False] * len(pairs)


@nightly
def test_accelerate_and_the_trainer_fill_auto_in_where_the_table_says() -> None:
    sources = [source_of("accelerate", name) for name in ("accelerator.py", "utils/dataclasses.py")]
    source = "".join([*sources, source_of("transformers", "integrations/deepspeed.py")])
    assert [key for key in launcher_tables()["filled"] if f'"{key}"' not in source] == []


@nightly
def test_the_tables_of_launchers_and_variables_are_those_of_the_installed_versions() -> None:
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.run import get_args_parser

    tables = launcher_tables()
    options = {action.dest: action for action in launch_command_parser()._actions}
    assert set(tables["told_by_flags"]) <= {*options, "tpu_use_cluster"}
    defaults = {name: options[name].default for name in tables["never_taken"]}
    assert defaults == tables["never_taken"]
    for tool, actions in {"accelerate": options.values(), "torchrun": get_args_parser()._actions}.items():
        flags = {
            word.lstrip("-").replace("_", "-") for each in actions if each.nargs == 0 for word in each.option_strings
        }
        assert flags <= set(tables["flags"][tool])
        words = {word[2:].replace("_", "-") for each in actions for word in each.option_strings if word[:2] == "--"}
        assert words <= set(tables["options"][tool])
        assert set(tables["launcher_options"][tool]) <= {each.dest for each in actions}
    assert "allow_abbrev=False" in source_of("accelerate", "commands/launch.py")
    allocator = source_of("torch", "include/c10/cuda/CUDAAllocatorConfig.h")
    form = tables["forms"]["variables"]["PYTORCH_ALLOC_CONF"]["form"]
    keys = re.findall(r'"([a-z_]+)"', allocator[allocator.index("getKeys()") :].partition("};")[0])
    assert [key for key in keys if key != "a_host_register" and not re.fullmatch(form, f"{key}:1")] == ["amalloc"]
    plugin = source_of("accelerate", "utils/dataclasses.py") + source_of("accelerate", "utils/launch.py")
    missing = [
        name for name in tables["variables"]["FSDP"] if f'"{name}"' not in plugin and f'"FSDP_{name}"' not in plugin
    ]
    assert missing == []


OPTIONS = """from argparse import ArgumentParser
from dataclasses import dataclass
from transformers import HfArgumentParser
from deepspeed.launcher.runner import parse_args
@dataclass
class Mine:
    packs: bool = True
plain = ArgumentParser()
plain.add_argument("--batch_size")
read = {"plain": plain.parse_args, "deepspeed": parse_args}
read["dataclass"] = HfArgumentParser(Mine).parse_args_into_dataclasses
def refuses(parser, *words):
    try:
        read[parser](list(words))
    except (SystemExit, ValueError):
        return True
"""


@nightly
def test_parsers_refuse_options_that_they_do_not_have_dashes_of_deepspeed_and_one_dash_for_two() -> None:
    code = f"""{OPTIONS}
taken = ["plain --batch 1", "dataclass --no-packs", "deepspeed --num_gpus 2 x"]
refused = ["plain --batch-size 1", "plain --local_rank=0", "dataclass --local_rank=0", "dataclass -packs true"]
assert [refuses(*each.split()) for each in [*taken, *refused, "deepspeed --num-gpus 2 x"]] == [None] * 3 + [True] * 5
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=cpu_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


FLAGS = [
    ("--use_fsdp --fsdp_version 2 --fsdp_state_dict_type SHARDED_STATE_DICT", "FSDP_STATE_DICT_TYPE"),
    ("--use_deepspeed --zero_stage 3 --zero3_init_flag false", "ACCELERATE_DEEPSPEED_ZERO3_INIT"),
]


@nightly
@pytest.mark.parametrize(("flags", "variable"), FLAGS)
def test_flags_of_accelerate_launch_reach_the_ranks_as_the_keys_of_its_file_do(
    flags: str, variable: str, tmp_path: Path
) -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    call = read_script(f"accelerate launch --num_processes 2 {flags} train.py\n").launches[0]
    file = tmp_path / "same.yaml"
    data: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "mixed_precision": "no"}
    for key, value in call.as_yaml.items():
        block, _, name = key.rpartition(".")
        data |= {block: data.get(block, {}) | {name: yaml.safe_load(value)}} if block else {name: value}
    file.write_text(yaml.safe_dump(data | {"num_processes": 2}))

    def environment(*words: str) -> dict[str, str]:
        args = _validate_launch_command(launch_command_parser().parse_args([*words, "train.py"]))[0]
        args.deepspeed_fields_from_accelerate_config = ""
        named = prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else prepare_multi_gpu_env(args)
        return {name: value for name, value in named.items() if name.startswith(("FSDP", "ACCELERATE_DEEPSPEED"))}

    empty = tmp_path / "empty.yaml"
    empty.write_text("compute_environment: LOCAL_MACHINE\nmixed_precision: 'no'\ndistributed_type: 'NO'\n")
    by_flags, by_file = (
        environment("--config_file", str(empty), *flags.split()),
        environment("--config_file", str(file)),
    )
    assert variable in by_flags
    assert by_flags == by_file


@nightly
@pytest.mark.parametrize("options", ["--nnodes 1 --node-rank 1", "--nnodes 2 --node-rank 2"])
def test_a_rank_of_a_node_above_their_number_is_that_of_no_node(options: str) -> None:
    config = torchrun_config(*options.split(), "--master-addr", "node1")
    assert config.rdzv_configs["rank"] >= config.max_nodes  # a static rendezvous, which waits for rank 0


@nightly
def test_words_of_accelerate_are_those_of_its_enums() -> None:
    from accelerate.utils import (
        ComputeEnvironment,
        DistributedType,
        DynamoBackend,
        PrecisionType,
        constants,
        str_to_bool,
    )

    words = {key: table["words"] for key, table in launcher_tables()["words"]["accelerate"].items()}
    assert words["compute_environment"] == [each.value for each in ComputeEnvironment]
    assert set(words["distributed_type"]) == {each.value for each in DistributedType}
    assert set(words["mixed_precision"]) == {each.value for each in PrecisionType}
    assert [each.upper() for each in words["dynamo_config.dynamo_backend"]] == DynamoBackend.list()
    assert set(constants.TORCH_DYNAMO_MODES) <= set(words["dynamo_config.dynamo_mode"])
    for name in ("auto_wrap_policy", "sharding_strategy", "state_dict_type", "backward_prefetch"):
        assert set(getattr(constants, f"FSDP_{name.upper()}")) <= set(words[f"fsdp_config.{name}"])
    switch, reshard = launcher_tables()["words"]["trainer"], words["fsdp_config.reshard_after_forward"]
    assert {*map(str_to_bool, switch["fsdp_config.reshard_after_forward"]["words"])} == {0, 1}
    assert {*constants.FSDP_SHARDING_STRATEGY, *"12345"} <= {*reshard}
    with pytest.raises(ValueError, match="invalid truth value"):
        str_to_bool("treu")


@nightly
def test_schedules_of_deepspeed_and_their_parameters_are_those_of_its_classes() -> None:
    import inspect

    import torch
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
    from deepspeed.runtime import lr_schedules

    tables, torchs = launcher_tables(), vars(torch.optim.lr_scheduler)
    classes = {name for name, each in torchs.items() if inspect.isclass(each) and hasattr(each, "get_last_lr")}
    assert set(tables["words"]["deepspeed"]["scheduler.type"]["words"]) == {
        "null",  # no schedule
        *lr_schedules.VALID_LR_SCHEDULES,
        *(name for name in classes if not name.startswith("_")),
    }
    optimizers = {
        "adam": (FusedAdam, DeepSpeedCPUAdam, torch.optim.Adam, torch.optim.AdamW),
        "lion": (FusedLion, DeepSpeedCPULion),
        "lamb": (FusedLamb,),
        "adagrad": (DeepSpeedCPUAdagrad, torch.optim.Adagrad),
        "sgd": (torch.optim.SGD,),
    }
    for name, parameters in tables["parameters"].items():
        makes = [getattr(lr_schedules, name)] if name in vars(lr_schedules) else optimizers[name.removesuffix("w")]
        taken = {parameter for make in makes for parameter in [*inspect.signature(make).parameters][1:]}
        taken |= {"torch_adam", "adam_w_mode"} if name in ("adam", "adamw") else set()  # taken out before
        assert taken - {"max_grad_norm"} == {*parameters}, name  # which the engine refuses before
    for name in ("WarmupDecayLR", "WarmupCosineLR"):
        needed = inspect.signature(getattr(lr_schedules, name)).parameters["total_num_steps"]
        assert needed.default is inspect.Parameter.empty
    untested = source_of("deepspeed", "runtime/engine.py")
    assert 'Please add <"zero_allow_untested_optimizer": true> in the configuration' in untested


def test_trl_and_peft_raise_for_other_words() -> None:
    from datasets import Dataset
    from peft import TaskType
    from trl import pack_dataset
    from trl.scripts.utils import DatasetConfig

    tables = launcher_tables()["words_of_programs"]
    of_trl = [table for name, table in tables.items() if "trl" in name or name == "grpo"]
    words = [f'"{word}"' for table in of_trl for each in table.values() for word in each["words"]]
    assert DatasetConfig.__dataclass_fields__.keys() == {*DATASET}
    folder = Path(str(importlib.util.find_spec("trl").origin)).parent  # type: ignore[union-attr]
    source = "".join(each.read_text() for each in folder.rglob("*.py"))
    of_peft = {f'"{each.value}"' for each in TaskType} | {'"nf4"', '"fp4"', '"True"', '"False"', '"true"', '"false"'}
    attention = {*tables["trl"]["attn_implementation"]["words"]}
    assert attention - {"*paged*", "*/*"} == {*attention_names()} - {"paged|eager"}  # of transformers' own source
    others = of_peft | {f'"{word}"' for word in attention}
    assert [word for word in words if word not in source and word not in (*others, '"*.*"')] == []
    assert "args.per_device_train_batch_size <= 1" in source  # of KTO
    with pytest.raises(ValueError, match="Invalid packing strategy"):
        pack_dataset(Dataset.from_dict({"input_ids": [[1]]}), 4, strategy="bfd2")


@pytest.mark.parametrize(
    ("script", "printed"),
    [
        ("echo a \\\n  b\n  --c d 2>/dev/null; echo $?", b"a b 127"),  # a command of its own, which is not found
        ("echo a \\ \n  --c d 2>/dev/null; echo $?", b"a 127"),
        ("A=1; bash -c 'echo [$A]'", b"[]"),
        ("A = 1 2>/dev/null; export B = 1 2>/dev/null; echo [$A$B]", b"[]"),
        ("A=(b c); D=12345; echo $A ${D:3}; set -- 2&>/dev/null; [$D = 1] 2>/dev/null; echo $?", b"b 45 127"),
        ("export A=“x”; echo $A", "“x”".encode()),
        ("A='--b c'; B=d; set -- \"$A\" '$B' $B_$A; echo $# $2 $3; [ 1 == 1] 2>/dev/null || echo $?", b"4 $B --b 2"),
        ("bash -n -O extglob <<< 'touch a; if true' 2>&1 | grep -c 'syntax error'; ls a 2>/dev/null", b"1"),
    ],
)
def test_bash_does_with_lost_lines_variables_and_quotes_what_the_rules_say(script: str, printed: bytes) -> None:
    assert b" ".join(subprocess.run(["bash", "-c", script], capture_output=True, check=False).stdout.split()) == printed


@nightly
def test_torch_refuses_values_of_another_form(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "1")
    with pytest.raises(ValueError, match="must be OFF, INFO, or DETAIL"):
        torch.distributed.set_debug_level_from_env()
    for refused in ("expandable_segments:true", "expandable_segments=True"):
        with pytest.raises((ValueError, RuntimeError)):
            torch._C._accelerator_setAllocatorSettings(refused)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="must be an integer"):
        parse_rendezvous_endpoint("a:PORT", default_port=1)
    with pytest.raises(ValueError, match="gpus"):
        torchrun_config("--nproc-per-node=gpus")


# -- launchers on several nodes

# Two nodes, as srun starts a command on them.
SRUN = 'srun() { SLURM_PROCID=0 "$@"; SLURM_PROCID=1 "$@"; }; SLURM_PROCID=0; '


def torchrun_config(*options: str) -> Any:
    from torch.distributed.run import config_from_args, parse_args

    return config_from_args(parse_args([*options, "train.py"]))[0]


@pytest.mark.parametrize(
    ("script", "printed"),
    [
        (f'{SRUN} srun bash -c "echo $SLURM_PROCID"', b"0 0"),
        (f"{SRUN} srun bash -c 'echo $SLURM_PROCID'", b"0 1"),
        ("head=$(scontrol-that-is-missing 2>/dev/null || echo localhost); echo $head", b"localhost"),
        # a copy of a job in another folder, as slurmd runs it
        (
            "cd `mktemp -d`; mkdir a b; echo A=1 > a/e.sh; echo '. `dirname $0`/e.sh' > a/j; cp a/j b; "
            "bash a/j; echo $?; bash b/j 2>&1 | grep -o 'No such file'",
            b"0 No such file",
        ),
    ],
)
def test_every_node_is_rank_0_where_the_first_one_expands_and_a_missing_head_is_localhost(
    script: str, printed: bytes
) -> None:
    assert b" ".join(subprocess.check_output(["bash", "-c", script], timeout=20).split()) == printed


@nightly
def test_torchruns_defaults_on_several_nodes() -> None:
    assert torchrun_config().max_nodes == 1
    for count in ("a100:4", ""):  # what SLURM_GPUS_PER_NODE is with a type, and where nothing says it
        with pytest.raises(ValueError, match="Unsupported nproc_per_node"):
            torchrun_config(f"--nproc-per-node={count}")
    config = torchrun_config("--nnodes", "2")
    assert (config.rdzv_endpoint.partition(":")[0], config.rdzv_configs["rank"]) == ("127.0.0.1", 0)
    config = torchrun_config("--nnodes", "2", "--master-addr", "node1")
    assert (config.rdzv_endpoint.partition(":")[0], config.rdzv_configs["rank"]) == ("node1", 0)
    config = torchrun_config("--nnodes", "1:2", "--rdzv-backend", "c10d")
    assert (config.run_id, config.max_restarts, config.shutdown_timeout) == ("none", 0, 30)

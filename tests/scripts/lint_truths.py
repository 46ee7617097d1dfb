"""What the installed libraries do with the files that `toolkit lint` speaks about, in one process, as JSON.

Values are what was seen: a raised error's text, an environment variable, a field.
"""

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
os.chdir(tempfile.mkdtemp())
warnings.simplefilter("ignore")

import yaml  # noqa: E402
from accelerate.commands import launch  # noqa: E402
from accelerate.parallelism_config import ParallelismConfig  # noqa: E402
from accelerate.utils import (  # noqa: E402
    DeepSpeedPlugin,
    DeepSpeedSequenceParallelConfig,
    FullyShardedDataParallelPlugin,
)
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env  # noqa: E402
from deepspeed.runtime.config import DeepSpeedConfig  # noqa: E402
from transformers import HfArgumentParser, TrainingArguments  # noqa: E402
from transformers.integrations.deepspeed import deepspeed_optim_sched  # noqa: E402

SEEN: dict[str, Any] = {}
CLEAN = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "FSDP_"))}


def raised(action: Callable[[], Any]) -> str:
    try:
        action()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def launched(text: str, processes: int = 2) -> tuple[str, Any]:
    """Which launcher `accelerate launch` would start, and with which arguments."""
    Path("mine.yaml").write_text(text)
    chosen: list[tuple[str, Any]] = []
    for name in ("simple_launcher", "multi_gpu_launcher", "deepspeed_launcher"):
        setattr(launch, name, lambda args, name=name: chosen.append((name, args)))
    words = ["--config_file", "mine.yaml", "--main_process_port", "0", "--num_processes", str(processes), "script.py"]
    launch.launch_command(launch.launch_command_parser().parse_args(words))
    return chosen[0]


def ranks_environment(text: str) -> dict[str, str]:
    name, args = launched(text)
    return prepare_deepspeed_cmd_env(args)[1] if name == "deepspeed_launcher" else prepare_multi_gpu_env(args)


def in_rank(text: str, make: Callable[[], Any]) -> Any:
    """What a rank makes of the environment that the launcher gives it."""
    given = ranks_environment(text)
    os.environ.clear()
    os.environ.update(given)
    try:
        return make()
    finally:
        os.environ.clear()
        os.environ.update(CLEAN)


def fsdp(*lines: str, version: int | None = 2, before: str = "") -> str:
    block = [f"fsdp_version: {version}"] * (version is not None) + list(lines)
    return before + "distributed_type: FSDP\nfsdp_config:\n" + "".join(f"  {line}\n" for line in block)


# FSDP1's plugin asks for a GPU as soon as it synchronises.
NO_SYNC = ("fsdp_sync_module_states: false", "fsdp_cpu_ram_efficient_loading: false")
DEEPSPEED = "distributed_type: DEEPSPEED\ndeepspeed_config:\n"


def accelerate_truths() -> None:
    SEEN["unknown-key"] = raised(lambda: launched("distributed_type: MULTI_GPU\nmixed_precison: bf16\n"))
    nested = ranks_environment(fsdp("fsdp_reshard_after_forwrd: false"))
    SEEN["unknown-nested-key"] = nested["FSDP_RESHARD_AFTER_FORWARD"]
    SEEN["prefix-is-added"] = ranks_environment(fsdp("reshard_after_forward: false"))["FSDP_RESHARD_AFTER_FORWARD"]
    SEEN["starts-one-process"] = [
        launched("distributed_type: MULTI_CPU\n")[0],
        launched('distributed_type: "NO"\nnum_processes: 8\n', processes=8)[0],
        launched("distributed_type: MULTI_GPU\nuse_cpu: true\n")[0],
    ]
    SEEN["unquoted-no"] = raised(lambda: ranks_environment("distributed_type: MULTI_GPU\nmixed_precision: no\n"))
    several = "num_machines: 2\nmain_process_ip: 127.0.0.1\n" + DEEPSPEED + "  zero_stage: 2\n"
    SEEN["pdsh-by-default"] = prepare_deepspeed_cmd_env(launched(several)[1])[0][:6]
    nvme = DEEPSPEED + "  zero_stage: 3\n  offload_param_device: nvme\n  offload_param_nvme_path: /local\n"
    zero = in_rank(nvme, lambda: DeepSpeedPlugin().deepspeed_config["zero_optimization"])
    SEEN["never-forwarded"] = zero["offload_param"]
    other = ranks_environment("distributed_type: MULTI_GPU\nfsdp_config:\n  fsdp_version: 2\n")
    SEEN["block-not-in-force"] = other.get("ACCELERATE_USE_FSDP", "not set")
    state: Any = SimpleNamespace(multi_device=False, num_processes=2, is_fsdp2=True, is_main_process=True)
    SEEN["dp-replicate-alone"] = raised(lambda: ParallelismConfig(dp_replicate_size=2)._validate_accelerator(state))
    SEEN["cp-with-sp"] = raised(lambda: ParallelismConfig(cp_size=2, sp_size=2))
    tensor_parallel = "transformers.integrations.tensor_parallel"  # as in accelerate's `_prepare_tp`
    SEEN["tp-with-fsdp2"] = raised(lambda: exec(f"from {tensor_parallel} import ReplicateParallel"))
    SEEN["sp-attention"] = raised(lambda: DeepSpeedSequenceParallelConfig(sp_attn_implementation="eager"))
    listed = "distributed_type: MULTI_GPU\nfsdp_config:\n  parallel: [dp_shard, tp]\n"
    plain = ranks_environment("distributed_type: MULTI_GPU\n")
    SEEN["parallel-needs-toolkit"] = sorted(set(ranks_environment(listed).items()) - set(plain.items()))


def fsdp_truths() -> None:
    SEEN["fsdp1-by-omission"] = ranks_environment(fsdp("fsdp_offload_params: false", version=None))["FSDP_VERSION"]
    word = "fsdp_reshard_after_forward: SHARD_GRAD_OP"
    one = in_rank(fsdp(word, *NO_SYNC, version=1), FullyShardedDataParallelPlugin)
    SEEN["fsdp1-reshard-ignored"] = [str(one.sharding_strategy), str(one.reshard_after_forward)]
    SEEN["fsdp2-reshard-word"] = raised(lambda: in_rank(fsdp(word), FullyShardedDataParallelPlugin))
    two = in_rank(fsdp("fsdp_sharding_strategy: SHARD_GRAD_OP"), FullyShardedDataParallelPlugin)
    SEEN["fsdp2-strategy-ignored"] = two.reshard_after_forward
    obsolete = ["fsdp_backward_prefetch: BACKWARD_PRE", "fsdp_forward_prefetch: true", "fsdp_use_orig_params: true"]
    old = in_rank(fsdp(*obsolete, "fsdp_sync_module_states: true"), FullyShardedDataParallelPlugin)
    names = ("backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states")
    SEEN["fsdp2-obsolete-key"] = [getattr(old, name) for name in names]
    unsynced = fsdp("fsdp_sync_module_states: false")
    SEEN["loading-without-sync"] = raised(lambda: ranks_environment(unsynced))


def pair_truths() -> None:
    Path("ds.json").write_text('{"zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"}}')
    pair = DEEPSPEED + "  deepspeed_config_file: ds.json\n"
    SEEN["pair-alone"] = raised(lambda: in_rank(pair + "  zero3_init_flag: false\n", DeepSpeedPlugin))
    SEEN["key-owned-by-json"] = raised(lambda: in_rank(pair + "  zero_stage: 1\n", DeepSpeedPlugin))
    SEEN["precision-owned-by-json"] = raised(lambda: in_rank(pair + "mixed_precision: bf16\n", DeepSpeedPlugin))
    SEEN["wrong-type"] = [
        raised(lambda: in_rank(DEEPSPEED + "  deepspeed_config_file: 5\n", DeepSpeedPlugin)),
        raised(lambda: ranks_environment("distributed_type: MULTI_GPU\ngpu_ids: [0, 1]\n")),
        raised(lambda: in_rank(DEEPSPEED + "  zero_stage: two\n", DeepSpeedPlugin)),
        raised(lambda: in_rank(fsdp("fsdp_offload_params: cpu"), FullyShardedDataParallelPlugin)),
    ]
    SEEN["no-zero-block"] = raised(lambda: DeepSpeedPlugin(hf_ds_config={"train_batch_size": "auto"}))
    SEEN["deepspeed-file-missing"] = raised(lambda: DeepSpeedPlugin(hf_ds_config="gone.json"))
    Path("elsewhere").mkdir()
    os.chdir("elsewhere")
    SEEN["deepspeed-file-relative"] = raised(lambda: DeepSpeedPlugin(hf_ds_config="ds.json"))
    os.chdir("..")
    SEEN["duplicate-key"] = [json.loads('{"a": 1, "a": 2}')["a"], yaml.safe_load("a: 1\na: 2\n")["a"]]


def deepspeed_truths(removed: list[str], removed_zero: list[str], deprecated: dict[str, Any]) -> None:
    def config(zero: dict[str, Any] | None = None, **more: Any) -> str:
        given = {"train_batch_size": 1, "zero_optimization": {"stage": 1} | (zero or {})} | more
        return raised(lambda: DeepSpeedConfig(given))

    SEEN["unknown-deepspeed-key"] = config(gradient_cliping=1.0)
    dotted, nested = "zero_optimization.reduce_bucket_size", {"stage": 3, "reduce_bucket_size": 1000}
    both = ({"zero_optimization": {"stage": 3}, dotted: 1000}, {"zero_optimization": nested})
    SEEN["dotted-key"] = [
        DeepSpeedConfig({"train_batch_size": 1} | each).zero_config.reduce_bucket_size for each in both
    ]
    SEEN["wrong-type"] += [config({"stage": "two"}), config({"reduce_bucket_size": "big"})]
    SEEN["refused-nested-key"] = [config({"reduce_bucket": 5}), config({"offload_optimizer": {"devise": "cpu"}})]
    SEEN["refused-nested-key"].append(config(bf16={"enabled": True, "loss_scale": 0}))
    SEEN["field-names-are-taken"] = config({"stage": 3, "prefetch_bucket_size": 5})
    SEEN["removed-deepspeed-key"] = {name: config(**{name: {"enabled": False}}) for name in removed}
    SEEN["removed-deepspeed-key"] |= {name: config({name: 1}) for name in removed_zero}
    SEEN["deprecated-zero-key"] = {name: config({name: True}) for name in deprecated}
    SEEN["fp16-and-bf16-json"] = config(fp16={"enabled": True}, bf16={"enabled": True})
    SEEN["batch-arithmetic"] = config(train_batch_size=10, train_micro_batch_size_per_gpu=4)
    pair = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    SEEN["batch-arithmetic-of-pair"] = config(train_batch_size=16, **pair)
    SEEN["offload-param-below-stage-3"] = config({"stage": 2, "offload_param": {"device": "cpu"}})
    SEEN["nvme-without-path"] = config({"stage": 3, "offload_optimizer": {"device": "nvme"}})
    SEEN["overlap-below-stage-3"] = [
        DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": {"stage": at}}).zero_config.overlap_comm
        for at in (2, 3)
    ]


def transformers_truths(removed: list[str]) -> None:
    def arguments(**given: Any) -> TrainingArguments:
        return TrainingArguments(output_dir="out", use_cpu=True, **given)

    parser = HfArgumentParser(TrainingArguments)
    SEEN["removed-training-argument"] = {
        name: raised(lambda name=name: parser.parse_dict({"output_dir": "out", name: None})) for name in removed
    }
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        arguments(gradient_checkpointing=True)
    SEEN["deprecated-training-argument"] = [str(each.message) for each in said if each.category is FutureWarning]
    SEEN["misspelt-training-argument"] = raised(lambda: parser.parse_dict({"output_dir": "out", "learning_rte": 1}))
    SEEN["wrong-type"].append(raised(lambda: arguments(logging_steps="often")))
    SEEN["fp16-and-bf16"] = raised(lambda: arguments(fp16=True, bf16=True))
    SEEN["unquoted-no-strategy"] = [raised(lambda k=k: arguments(**{k: False})) for k in ("save_strategy",)]
    dropped = arguments(fsdp=True, fsdp_config={"reshard_after_forwrd": False})
    SEEN["unknown-fsdp-config-key"] = dropped.fsdp_plugin_args["reshard_after_forward"]
    words = arguments(fsdp="shard_grad_op")
    SEEN["fsdp-as-words"] = [words.fsdp_plugin_args["fsdp_version"], words.fsdp_plugin_args["reshard_after_forward"]]
    SEEN["fsdp-as-words"].append(raised(lambda: arguments(fsdp="hybrid_shard")))
    fighting = {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 4, "bf16": {"enabled": True}}
    args = arguments(deepspeed=fighting, gradient_accumulation_steps=2)
    SEEN["not-auto"] = raised(lambda: args.hf_deepspeed_config.trainer_config_finalize(args, None, 10))
    own = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": {}}}
    args = arguments(deepspeed=own, optim="adafactor")
    SEEN["optimizer-of-json"] = type(deepspeed_optim_sched(None, args.hf_deepspeed_config, args, 10, [])[0]).__name__


if __name__ == "__main__":
    lists = json.loads(sys.argv[1])
    accelerate_truths()
    fsdp_truths()
    pair_truths()
    deepspeed_truths(lists["deepspeed"], lists["zero"], lists["deprecated"])
    transformers_truths(lists["arguments"])
    print("SEEN " + json.dumps(SEEN, default=str))

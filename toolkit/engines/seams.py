"""Private names of libraries that the toolkit uses: what each is for, and the versions in which it is known.

A name is `module:object`, or `module::attribute` where only instances have it; then the attribute's name is looked for
in the module's source. `tests/engines/test_seams.py` resolves every row against the installed versions, and refuses a
private name in `toolkit/` that has no row. So a new version of a library shows what to look through before it is used.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from toolkit.errors import ToolkitError
from toolkit.versions import installed_version

KNOWN_IN: Mapping[str, str] = {
    "transformers": "5.23.0",
    "accelerate": "1.15.0",
    "torch": "2.13.0",
    "deepspeed": "0.19.8",
    "peft": "0.21.2",
    "trl": "1.16.0",
}
"""The versions in which the rows were read; those of constraints.txt."""


class Seam(NamedTuple):
    name: str
    why: str

    @property
    def library(self) -> str:
        return self.name.partition(".")[0].partition(":")[0]

    @property
    def attribute(self) -> str:
        return self.name.rpartition(":")[2].rpartition(".")[2]

    def is_there(self) -> bool:
        module, _, path = self.name.partition(":")
        try:
            found = importlib.import_module(module)
        except ImportError:
            return False
        if path.startswith(":"):
            return path[1:] in inspect.getsource(found)
        for part in path.split("."):
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True


OBSERVED_METHODS = (
    *("train", "get_batch_samples", "training_step", "compute_loss", "evaluation_loop", "prediction_step"),
    *("_get_num_items_in_batch", "_get_grad_norm", "_maybe_log_save_evaluate", "_save_checkpoint", "_get_output_dir"),
    "_finalize_training",
)
"""Methods of the Trainer that the observer stands for."""

_TRAINER = "transformers.trainer:Trainer."
SEAMS: tuple[Seam, ...] = (
    *(Seam(_TRAINER + name, "the observer notes what passes") for name in OBSERVED_METHODS if name.startswith("_")),
    Seam(_TRAINER + "_clip_grad_norm", "verification clips a gradient of its own; stages of a pipeline clip together"),
    Seam(_TRAINER + "_get_train_sampler", "rows in the order that all presets share"),
    Seam(_TRAINER + "_get_eval_sampler", "evaluation rows in their order"),
    Seam(_TRAINER + "_load_from_checkpoint", "weights that a checkpoint stores in other pieces"),
    Seam(_TRAINER + "_load_best_model", "the best model of an engine that gathers it"),
    Seam(_TRAINER + "_prepare_inputs", "the batch on its device, where packing looks at it"),
    Seam(_TRAINER + "_prepare_context_parallel_inputs", "parts of a sequence, beside what is packed"),
    Seam(_TRAINER + "_prepare_for_training", "the engine in effect, before a step is traced"),
    Seam(_TRAINER + "_save_optimizer_and_scheduler", "states of stages, and of a model sharded at load"),
    Seam(_TRAINER + "_load_optimizer_and_scheduler", "the same"),
    Seam("transformers.trainer_optimizer:_OPTIMIZER_HANDLERS", "the options that each optimizer reads"),
    Seam("transformers.integrations.integration_utils::_metrics", "what a TrainJob's status shows of a run"),
    Seam("transformers.training_args::_n_gpu", "one process with several visible GPUs would run DataParallel"),
    Seam("transformers.modeling_utils:PreTrainedModel._from_config", "a rehearsal's models have no weights to load"),
    Seam("transformers.modeling_utils:PreTrainedModel._load_pretrained_model", "weights as they are loaded"),
    Seam("transformers.modeling_utils:_get_resolved_checkpoint_files", "a rehearsal reads no files of weights"),
    Seam("transformers.core_model_loading::_is_hf_initialized", "4-bit weights are not initialised again"),
    Seam("transformers.distributed.mixin::_mesh_manager", "the meshes of a model sharded at load"),
    Seam("transformers.modeling_utils::_no_split_modules", "the layers of a model that is counted"),
    Seam("transformers.modeling_utils::_supports_flash_attn", "what attention a model can run"),
    Seam("transformers.modeling_utils::_supports_sdpa", "the same"),
    Seam("transformers.modeling_utils::_use_kernels", "whether kernels of the hub were asked for"),
    Seam("transformers.modeling_utils::_loss_function", "the loss that a chunked one takes the place of"),
    Seam("transformers.modeling_utils::_compatible_flash_implementations", "flash attention by another name"),
    Seam("transformers.configuration_utils::_attn_implementation", "the attention in effect"),
    Seam("transformers.configuration_utils::_experts_implementation", "the experts' kernel in effect"),
    Seam("transformers.configuration_utils::_name_or_path", "the base of an adapter"),
    Seam("transformers.modeling_layers::_gradient_checkpointing_func", "what checkpoints a layer"),
    Seam("transformers.masking_utils:AttentionMaskInterface._global_mapping", "the mask of packed rows"),
    Seam("transformers.integrations.moe:_can_use_grouped_mm", "fake tensors take a GPU's path of experts"),
    Seam(
        "transformers.distributed.sharding_utils:DtensorShardOperation._slice_and_cat",
        "fused weights on a CPU",
    ),
    Seam("transformers.conversion_mapping:_MODEL_TO_CONVERSION_PATTERN", "experts as a checkpoint stores them"),
    Seam(_TRAINER + "_sync_replicated_trainable_parameters", "averaged once: adapters on a model sharded at load"),
    Seam("transformers.distributed.utils::_dense_mesh", "the mesh of layers"),
    Seam("transformers.distributed.utils::_expert_mesh", "the mesh of experts"),
    Seam("accelerate.state:PartialState._shared_state", "FSDP2 on a CPU; an Accelerator that was made too early"),
    Seam("accelerate.state::_mixed_precision", "the precision of FSDP2 on a CPU"),
    Seam("accelerate.commands.launch:_validate_launch_command", "the environment that a preset's file means"),
    Seam("accelerate.accelerator::_is_accelerate_prepared", "loaders and optimizers of a loop"),
    Seam("torch.distributed.fsdp._fully_shard._fsdp_state::_fsdp_param_group", "what is gathered together"),
    Seam("torch.distributed.fsdp._fully_shard._fsdp_state::_fsdp_param_groups", "the same, from torch 2.13 on"),
    Seam("torch.distributed.fsdp._fully_shard:_fully_shard", "a trace makes its mesh outside of fake tensors"),
    Seam("torch.distributed.fsdp._fully_shard._fully_shard:FSDPModule._get_fsdp_state", "state of a sharded module"),
    Seam("torch.distributed.fsdp._fully_shard._fsdp_param::_unsharded_param", "gradients that wait whole"),
    Seam("torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup", "what a trace tags as gathered"),
    Seam("torch.distributed.tensor._sharding_prop:ShardingPropagator", "shapes of fake shards"),
    Seam("torch.distributed.tensor.experimental._context_parallel:_attention", "ring attention on a CPU"),
    Seam("torch.distributed.tensor.experimental._context_parallel._attention:_templated_ring_attention", "the same"),
    Seam(
        "torch.distributed.tensor.experimental._context_parallel._attention:_templated_ring_attention_backward",
        "the same",
    ),
    Seam("torch.distributed.algorithms._checkpoint.checkpoint_wrapper:CheckpointWrapper", "recomputed layers"),
    Seam("torch._ops::_schema", "the arguments of an attention kernel, for its dropout"),
    Seam("torch.distributed.algorithms._checkpoint.checkpoint_wrapper:OffloadWrapper", "offloaded activations"),
    Seam("torch.distributed.tensor:DTensor._local_tensor", "this rank's part"),
    Seam("torch.distributed.checkpoint.filesystem::_get_metadata_path", "metadata is read without unpickling code"),
    Seam("torch.nn.parallel.distributed::_comm_hooks", "the hook that sends gradients"),
    Seam("torch.nn.modules.module:Module._apply", "modules of fake tensors are moved"),
    Seam("torch.nn.modules.module::_parameters", "parameters are replaced in place"),
    Seam("torch.nn.modules.module::_buffers", "the same of buffers"),
    Seam("torch.nn.modules.module::_modules", "the same of modules"),
    Seam("torch.nn.modules.module::_forward_hooks", "NEFTune's noise"),
    Seam("torch.nn.modules.module::_compiled_call_impl", "modules that run compiled"),
    Seam("torch._dynamo.eval_frame::_orig_mod", "the module inside the compiler's wrapper"),
    Seam("torch._dynamo.utils:counters", "graphs and breaks of the compiler"),
    Seam("torch._dynamo.utils:guard_failures", "recompilations"),
    Seam("torch._inductor.codecache:CppPythonBindingsCodeCache", "a compiler that cannot compile here is known before"),
    Seam("torch._inductor.cpu_vec_isa:supported_vec_isa_list", "the same"),
    Seam("torch._inductor.cpu_vec_isa:x86_isa_checker", "the same"),
    Seam("torch:_C", "whether autograd runs, and operators by name"),
    Seam("torch:_C._current_graph_task_id", "a forward inside the backward is a recomputation"),
    Seam("torch:_C._autograd", "what has the next"),
    Seam("torch:_dynamo", "lengths that the compiler takes as variable"),
    Seam("torch:_C._autograd._top_saved_tensors_default_hooks", "hooks that experts' weights must pass by"),
    Seam("torch._subclasses.fake_tensor:FakeTensor", "shapes without memory"),
    Seam("torch._subclasses.fake_tensor:FakeTensorMode", "the same"),
    Seam("torch._subclasses.fake_tensor:unset_fake_temporarily", "the same"),
    Seam("torch._subclasses.fake_tensor:DataDependentOutputException", "what needs values"),
    Seam("torch._subclasses.fake_tensor:DynamicOutputShapeException", "the same"),
    Seam("torch._subclasses.fake_tensor:UnsupportedOperatorException", "the same"),
    Seam("torch.utils._python_dispatch:TorchDispatchMode", "every operator of a trace"),
    Seam("torch.utils._python_dispatch:_disable_current_modes", "what a trace does not count"),
    Seam("torch.utils._pytree:tree_leaves", "tensors in any nest"),
    Seam("torch.utils._pytree:tree_map", "the same"),
    Seam("torch.utils._pytree:tree_map_only", "the same"),
    Seam("torch:Tensor._cdata", "storages by their address"),
    Seam("torch.testing._internal.distributed.fake_pg:FakeStore", "a rehearsal's process group"),
    Seam("torch:ops.aten._scaled_dot_product_flash_attention_for_cpu", "a ring's attention on a CPU"),
    Seam("torch:ops.aten._scaled_dot_product_flash_attention_for_cpu_backward", "the same"),
    Seam("torch.cuda.memory:_record_memory_history", "snapshots of the allocator"),
    Seam("torch.cuda.memory:_dump_snapshot", "the same"),
    Seam("torch.distributed.pipelining.schedules::_stage", "the toolkit's loop runs stages"),
    Seam("torch.distributed.pipelining.schedules::_stages", "the same"),
    Seam("torch.distributed.pipelining.schedules::_num_stages", "the same"),
    Seam("torch.distributed.pipelining.schedules::_n_microbatches", "the same"),
    Seam("deepspeed.runtime.zero.stage3::_swappable_optimizer_subgroup", "what NVMe must hold"),
    Seam("deepspeed.runtime.engine:DeepSpeedEngine._zero3_consolidated_16bit_state_dict", "adapters alone, gathered"),
    Seam("deepspeed.runtime.engine::_config", "where checkpoints are written"),
    Seam("deepspeed.utils.groups:_get_sequence_parallel_group", "ranks that share a sequence"),
    Seam("deepspeed.utils.groups:_get_sequence_parallel_rank", "the same"),
    Seam("deepspeed.utils.groups:_get_sequence_parallel_world_size", "the same"),
    Seam("torch.distributed.nn.functional:_AllGather", "gradients of a gathered sequence under gloo"),
    Seam("peft.tuners.tuners_utils:_get_in_out_features", "adapters on weights that transformers has divided"),
    Seam("peft.tuners.tuners_utils:_check_lora_target_modules_mamba", "adapters of a model that is counted"),
    Seam("peft.utils.transformers_weight_conversion:_MOE_TARGET_MODULE_MAPPING", "adapters of fused experts"),
    Seam("trl.trainer.utils:_CHUNKED_LOGPROB_CHUNK_SIZE", "log-probabilities without a GPU's kernels"),
    Seam("threading:_shutdown", "a rank ends without waiting for its threads"),
    Seam("atexit:_run_exitfuncs", "but runs what was registered for its end"),
    Seam("sys:_getframe", "which line asked a fake tensor for a value"),
    Seam("sys:_current_frames", "where a rank hangs"),
)


def missing() -> Iterator[Seam]:
    """Yield the rows that the installed versions lack, of libraries that are installed."""
    absent = {name for name in KNOWN_IN if installed_version(name) is None}
    yield from (seam for seam in SEAMS if seam.library not in absent and not seam.is_there())


def check_methods(trainer: object) -> None:
    """Raise ToolkitError where a Trainer lacks a method that the observer stands for."""
    lacking = [name for name in OBSERVED_METHODS if not hasattr(trainer, name)]
    if lacking:
        known, here = KNOWN_IN["transformers"], installed_version("transformers")
        raise ToolkitError(
            f"the Trainer of transformers {here} has no `{lacking[0]}`, by which runs are observed",
            hint=f'`pip install "transformers=={known}"`, in which it is known',
        )

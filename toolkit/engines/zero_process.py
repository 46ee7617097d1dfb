"""DeepSpeed in the process of a rank: chosen by the launcher, set up before a model is loaded, and while it is."""

import functools
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from toolkit.engines.zero import nvme_blocks


def is_launched() -> bool:
    """Return True if accelerate's launcher has chosen DeepSpeed for this process."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


def is_used(training: Any) -> bool:
    """Return True if a Trainer of these `TrainingArguments` trains with DeepSpeed."""
    return training.deepspeed_plugin is not None


def offload_blocks(training: Any) -> dict[str, dict[str, Any]]:
    """Return the blocks of the configuration in effect that offload to NVMe, by name; they may be changed."""
    config = training.deepspeed_plugin.deepspeed_config if is_used(training) else {}
    return nvme_blocks(config.get("zero_optimization") or {})


def set_changed_blocks(training: Any) -> None:
    """Let `from_pretrained` read what was changed in the blocks: it has a copy."""
    training.deepspeed_plugin.set_deepspeed_weakref()


def shards_while_loading() -> bool:
    """Return True if ZeRO-3 shards each weight as the model is loaded."""
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    return bool(is_deepspeed_zero3_enabled())


def shard_loaded(model: Any) -> None:
    """Shard a model that was loaded whole."""
    import deepspeed
    from transformers.integrations.deepspeed import deepspeed_config

    deepspeed.zero.Init(module=model, config_dict_or_path=deepspeed_config())


def shard_no_more_models() -> None:
    """From here on let transformers make models whole: under ZeRO-3 `from_config` would shard them too."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()


def join_group_on_cpu() -> None:
    """Let DeepSpeed join the group of CPUs. `zero.Init` would otherwise read a world size of 1."""
    import deepspeed

    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("gloo")


def join_group_when_configured() -> None:
    """Let somebody's script join it as it is configured: ZeRO-3 divides a model while it is loaded, by that group."""
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    configure = HfDeepSpeedConfig.__init__

    @functools.wraps(configure)
    def configure_and_join(self: Any, *args: Any, **kwargs: Any) -> None:
        configure(self, *args, **kwargs)
        join_group_on_cpu()

    HfDeepSpeedConfig.__init__ = configure_and_join


def import_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon, as every ZeRO run does, so that it is compiled when it is called and not when defined.

    torch.compile imports inductor: 1.4 CPU-seconds and 45 MiB per rank. Does nothing where DeepSpeed has no Muon.
    """
    from deepspeed.runtime import compiler

    compile_now = compiler.compile
    compiler.compile = lambda: lambda function: _compiled_when_called(function, compile_now())
    try:
        with suppress(ImportError):
            import deepspeed.runtime.zero.muon.original_muon  # noqa: F401
    finally:
        compiler.compile = compile_now


def _compiled_when_called(function: Callable[..., Any], decorator: Callable[..., Any]) -> Callable[..., Any]:
    compiled = functools.cache(lambda: decorator(function))
    return functools.wraps(function)(lambda *args, **kwargs: compiled()(*args, **kwargs))

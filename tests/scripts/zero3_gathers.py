"""Count the elements that ZeRO-3 has gathered or is gathering on rank 0 of 2: at the end of the forward, and at most.

$ python zero3_gathers.py cases.json

A case is {"config": PATH, "preset": FILE, "lora_r": null}. The process group is torch's `fake` one, whose collectives
move nothing. Prints one JSON line per case, of the second step: the first shows DeepSpeed the order of modules.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.observe.rank_process import prepare_environment
from toolkit.plan.training_setup import engine_settings
from toolkit.presets import load_preset
from toolkit.train.model.loading import cast_weights


def main() -> None:
    stdout, sys.stdout = sys.stdout, sys.stderr  # deepspeed prints
    prepare_environment()
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    for case in json.loads(Path(sys.argv[1]).read_text()):
        print(json.dumps(gathered(started(case))), file=stdout, flush=True)


def started(case: dict[str, Any]) -> Any:
    """Return DeepSpeed's engine with AdamW, as the preset's file configures it."""
    config = AutoConfig.from_pretrained(Path(case["config"]).parent)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if case["lora_r"]:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=case["lora_r"], target_modules="all-linear", task_type="CAUSAL_LM"))
        cast_weights(model, torch.bfloat16)
    preset = load_preset(case["preset"])
    settings = engine_settings(preset, world_size=2, hidden_size=config.hidden_size)
    wanted = dict(preset.deepspeed_config() or {})
    wanted["zero_optimization"] |= {
        "reduce_bucket_size": settings.reduce_bucket,
        "stage3_prefetch_bucket_size": settings.prefetch_bucket,
        "stage3_param_persistence_threshold": settings.persistence_threshold,
    }
    wanted |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
    wanted |= {"bf16": {"enabled": True}, "zero_allow_untested_optimizer": True}
    wanted.pop("train_batch_size")
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    engine, *_ = deepspeed.initialize(model=model.train(), optimizer=optimizer, config=wanted, dist_init_required=False)
    return engine


def gathered(engine: Any) -> dict[str, int]:
    counts: list[int] = []
    fetch = PartitionedParameterCoordinator.fetch_sub_module

    def counting(coordinator: Any, *args: Any, **kwargs: Any) -> None:
        fetch(coordinator, *args, **kwargs)
        counts.append(vars(coordinator)["_PartitionedParameterCoordinator__n_available_params"])

    tokens = torch.ones(1, 8, dtype=torch.long)
    with patch.object(PartitionedParameterCoordinator, "fetch_sub_module", counting):
        for _ in range(2):
            counts.clear()
            loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
            at_end = counts[-1]
            engine.backward(loss)
            engine.step()
    return {"end_of_forward": at_end, "highest": max(counts)}


if __name__ == "__main__":
    main()

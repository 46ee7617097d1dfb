"""Train two steps of TRL's DPO with a reference model, and write the bytes of it that each rank holds.

accelerate launch ... -m toolkit.observe --output-dir RUN dpo_with_reference.py MODEL OUT_FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer


def held_bytes(model: Any) -> int:
    """Whole parameters or shards, and what ZeRO-3 keeps whole beside its shards."""
    held = 0
    for parameter in model.parameters():
        if hasattr(parameter, "ds_tensor"):
            held += parameter.ds_tensor.numel() * parameter.ds_tensor.element_size()
            held += parameter.ds_numel * parameter.element_size() if parameter.ds_persist else 0
        else:
            shard = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            held += shard.numel() * shard.element_size()
    return held


def main() -> None:
    """Rows of a few tokens: the bytes do not depend on them."""
    model, folder = sys.argv[1:]
    arguments = DPOConfig(
        output_dir=folder,
        per_device_train_batch_size=1,
        max_steps=2,
        max_length=32,
        use_cpu=True,
        bf16=True,
        save_strategy="no",
        report_to="none",
    )
    trainer = DPOTrainer(
        model=model,
        args=arguments,
        processing_class=AutoTokenizer.from_pretrained(model),
        train_dataset=Dataset.from_list([{"prompt": "a", "chosen": " b", "rejected": " c"}] * 8),
    )
    rank = trainer.args.process_index
    Path(folder, f"reference{rank}.json").write_text(json.dumps(held_bytes(trainer.ref_model)))
    trainer.train()


if __name__ == "__main__":
    main()

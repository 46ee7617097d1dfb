"""A user's own script: their model, their rows, transformers' Trainer, and a preset through the Python door.

    torchrun --nproc_per_node 2 own_trainer.py PRESET MODEL OUTPUT

The toolkit's attestation rides along as a callback, so that what is in effect is read by the code that reads it in a
run of the toolkit's own.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

from toolkit import load_preset
from toolkit.train.rank_process import leave


def main(preset_name: str, model_folder: str, output: str) -> None:
    preset = load_preset(preset_name)
    args = preset.training_arguments(
        output_dir=output,
        max_steps=1,
        per_device_train_batch_size=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )

    import torch
    from transformers import AutoModelForCausalLM, Trainer

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model.config.use_cache = False
    rows = [{"input_ids": list(range(n, n + 16)), "labels": list(range(n, n + 16))} for n in range(8)]
    trainer = Trainer(model=model, args=args, train_dataset=rows)
    trainer.add_callback(attestation(preset, trainer, Path(output)))
    trainer.train()


def attestation(preset, trainer, folder: Path):
    from toolkit.train.attest.attestation import Attestation
    from toolkit.train.health.progress import Progress
    from toolkit.train.launch_context import LaunchContext

    launch = LaunchContext.of_preset(preset, trainer.args.world_size)
    # What the toolkit's own Trainer has beside transformers': how it divides the ranks, and the rows that it counted.
    trainer.run = SimpleNamespace(arguments=SimpleNamespace(layout=None), layout_at_load=None)
    trainer.first_batches = []
    return Attestation(folder / "attestation.json", launch, trainer=trainer, progress=Progress())


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave(0)

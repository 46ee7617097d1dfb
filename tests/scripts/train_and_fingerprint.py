"""The training script, which also writes the live model's logits on fixed tokens just before it saves, and counts the
collectives of each step.

Started like `-m toolkit.train`; all ranks take part in the forward, since shards are on all of them.
"""

import sys
from pathlib import Path

import toolkit.train.__main__ as door
from toolkit.observe.rank_process import prepare_environment

FIXED_TOKENS = [[1, 4093, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 2]]


def main() -> int:
    prepare_environment()
    import torch
    from count_collectives import count_steps  # beside this script; its constant is read from tests too

    import toolkit.train.script as script

    save = script.save_final_model

    def fingerprint_and_save(trainer, tokenizer, folder: Path) -> None:
        trainer.model_wrapped.eval()
        with torch.no_grad():
            tokens = torch.tensor(FIXED_TOKENS, device=trainer.args.device) % trainer.model.config.vocab_size
            logits = trainer.model_wrapped(input_ids=tokens).logits
        if trainer.args.process_index == 0:
            torch.save(logits.float().cpu(), folder / "live_logits.pt")
        save(trainer, tokenizer, folder)

    script.save_final_model = fingerprint_and_save
    count_steps()
    return door.main(sys.argv[1:])


if __name__ == "__main__":
    door.leave(main())

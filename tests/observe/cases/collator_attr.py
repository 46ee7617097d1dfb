# a curriculum: a callback raises the collator's masking probability
import sys
from common import *
from transformers import TrainerCallback


class Mask:
    p = 0.0

    def __call__(self, rows):
        b = {k: torch.stack([r[k] for r in rows]) for k in rows[0]}
        if self.p:
            b["labels"][:] = -100
            b["labels"][:, 8:] = b["input_ids"][:, 8:]
        return b


class Curriculum(TrainerCallback):
    def on_step_end(self, a, state, control, **kw):
        if state.global_step == 2:
            t.data_collator.p = 1.0


inner = Mask()
t = Trainer(
    model=model(),
    args=args(sys.argv[1], dataloader_prefetch_factor=None),
    train_dataset=Rows(),
    data_collator=inner,
    callbacks=[Curriculum()],
)
t.train()
print("SCRIPT DONE p =", inner.p, "is it mine:", isinstance(t.data_collator, Mask))

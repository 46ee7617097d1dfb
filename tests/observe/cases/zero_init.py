# freezes all but a head; unfreezes the rest after step 2
import sys
from common import *
from transformers import TrainerCallback


class Unfreeze(TrainerCallback):
    def on_step_end(self, a, state, control, model=None, **kw):
        if state.global_step == 2:
            [p.requires_grad_(True) for p in model.parameters()]


m = model()
[p.requires_grad_(False) for p in m.model.parameters()]
t = Trainer(
    model=m, args=args(sys.argv[1], ddp_find_unused_parameters=True), train_dataset=Rows(), callbacks=[Unfreeze()]
)
t.train()
print("SCRIPT DONE")

# a callback that scales gradients of the head before the optimizer's step, after clipping
import sys
from common import *
from transformers import TrainerCallback


class Scale(TrainerCallback):
    def on_pre_optimizer_step(self, a, state, control, model=None, **kw):
        for n, p in model.named_parameters():
            if p.grad is not None and "embed" in n:
                p.grad.mul_(0.0)


t = Trainer(model=model(), args=args(sys.argv[1]), train_dataset=Rows(), callbacks=[Scale()])
t.train()
print("SCRIPT DONE")

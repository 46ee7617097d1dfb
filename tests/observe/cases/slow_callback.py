# a callback that computes a benchmark of its own between two steps
import sys, time
from common import *
from transformers import TrainerCallback


class Slow(TrainerCallback):
    def on_step_end(self, a, state, control, model=None, **kw):
        if state.global_step == 2:
            end = time.time() + int(sys.argv[2])
            while time.time() < end:
                with torch.no_grad():
                    model(torch.randint(3, 128, (1, 16)))


t = Trainer(model=model(), args=args(sys.argv[1]), train_dataset=Rows(), callbacks=[Slow()])
t.train()
print("SCRIPT DONE", flush=True)

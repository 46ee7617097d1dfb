import sys
from common import *
from transformers import TrainerCallback


class Bad(TrainerCallback):
    def on_step_end(self, a, state, control, **kw):
        if state.global_step == 3:
            raise ValueError("my callback failed")


t = Trainer(model=model(), args=args(sys.argv[1]), train_dataset=Rows(), callbacks=[Bad()])
t.train()
print("SCRIPT DONE")

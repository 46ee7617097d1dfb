import sys, os
from common import *
from transformers import TrainerCallback


class Bad(TrainerCallback):
    def on_step_end(self, a, state, control, **kw):
        if state.global_step == 3 and os.environ.get("RANK") == "1":
            raise KeyError("only rank 1")


if sys.argv[2:] == ["exits"] and os.environ["RANK"] == "1":
    sys.exit(3)
t = Trainer(model=model(), args=args(sys.argv[1]), train_dataset=Rows(), callbacks=[Bad()])
t.train()
print("SCRIPT DONE")

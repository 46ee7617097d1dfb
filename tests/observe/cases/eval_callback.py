# a callback that evaluates over eval_dataloader by itself: model(**batch)
import sys
from common import *
from transformers import TrainerCallback


class Perplexity(TrainerCallback):
    def on_step_end(self, a, state, control, model=None, **kw):
        if state.global_step == 2:
            control.should_evaluate = True

    def on_evaluate(self, a, state, control, model=None, eval_dataloader=None, **kw):
        if eval_dataloader is None:
            print("no loader")
            return
        losses = []
        with torch.no_grad():
            for batch in eval_dataloader:
                losses.append(model(**batch).loss.item())
        print("MY PPL", round(sum(losses) / len(losses), 4), flush=True)


t = Trainer(model=model(), args=args(sys.argv[1]), train_dataset=Rows(), eval_dataset=Rows(8), callbacks=[Perplexity()])
t.train()
print("SCRIPT DONE")

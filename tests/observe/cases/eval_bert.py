# a callback that evaluates a BERT classifier by itself: model(**batch)
import sys
from common import *
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback

set_seed(0)
m = BertForSequenceClassification(
    BertConfig(vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
)


class R(Rows):
    def __getitem__(self, i):
        return {"input_ids": self.x[i], "attention_mask": torch.ones_like(self.x[i]), "labels": int(self.x[i][0] % 2)}


class Accuracy(TrainerCallback):
    def on_epoch_end(self, a, state, control, model=None, train_dataloader=None, **kw):
        hits = n = 0
        for batch in train_dataloader:
            with torch.no_grad():
                p = model(**batch).logits.argmax(-1)
            hits += int((p == batch["labels"]).sum())
            n += len(p)
        print("MY ACC", hits / n, flush=True)


t = Trainer(
    model=m, args=args(sys.argv[1], max_steps=-1, num_train_epochs=1), train_dataset=R(16), callbacks=[Accuracy()]
)
t.train()
print("SCRIPT DONE")

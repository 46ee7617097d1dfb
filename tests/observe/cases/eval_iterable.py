# a map-style training set, and a streamed evaluation set
import sys
from common import *
from torch.utils.data import IterableDataset


class It(IterableDataset):
    def __iter__(self):
        yield from (Rows()[i] for i in range(8))


t = Trainer(
    model=model(), args=args(sys.argv[1], eval_strategy="steps", eval_steps=2), train_dataset=Rows(), eval_dataset=It()
)
t.train()
print("SCRIPT DONE", t.evaluate()["eval_loss"])

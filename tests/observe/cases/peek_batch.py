# looks at a batch of the Trainer's loader before train(), and its collator after
import sys
from common import *
from transformers import default_data_collator

t = Trainer(model=model(), args=args(sys.argv[1]), train_dataset=Rows(), data_collator=default_data_collator)
assert t.data_collator is default_data_collator
b = next(iter(t.get_train_dataloader()))
print("shapes", {k: tuple(v.shape) for k, v in b.items()})
t.train()
b = next(iter(t.get_train_dataloader()))
print("shapes", {k: tuple(v.shape) for k, v in b.items()})
print("SCRIPT DONE")

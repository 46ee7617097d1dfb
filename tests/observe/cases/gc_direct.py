# gradient checkpointing switched on by the model's method, not by TrainingArguments
import sys
from common import *

m = model()
m.config.use_cache = False
m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
t = Trainer(model=m, args=args(sys.argv[1]), train_dataset=Rows())
t.train()
print("SCRIPT DONE")

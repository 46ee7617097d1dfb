# calls train() twice on one Trainer, then once on another
import sys
from common import *

t = Trainer(model=model(), args=args(sys.argv[1], max_steps=3), train_dataset=Rows())
t.train()
t.args.max_steps = 2
t.train()
t2 = Trainer(model=model(), args=args(sys.argv[1], max_steps=2), train_dataset=Rows())
t2.train()
print("SCRIPT DONE", type(t2).__name__, type(t2) is Trainer)

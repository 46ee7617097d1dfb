import sys
from common import *

t = Trainer(model=model(), args=args(sys.argv[1], max_steps=2), train_dataset=Rows())
t.train()
print("SCRIPT DONE")
sys.exit(3)

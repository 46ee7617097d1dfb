import sys
from common import *

t = Trainer(model=model(), args=args(sys.argv[1], fp16=True), train_dataset=Rows())
t.train()
print("SCRIPT DONE")

# two models, two Trainers, one after the other
import sys
from common import *

for lr in (1e-4, 1e-3):
    t = Trainer(model=model(), args=args(sys.argv[1], max_steps=2, learning_rate=lr), train_dataset=Rows())
    t.train()
print("SCRIPT DONE")

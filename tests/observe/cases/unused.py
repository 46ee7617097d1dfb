# a head that the loss does not use, find_unused_parameters
import sys
from common import *

m = model()
m.extra = torch.nn.Linear(32, 32)
m.extra2 = torch.nn.Parameter(torch.zeros(3, 5))
t = Trainer(model=m, args=args(sys.argv[1], ddp_find_unused_parameters=True), train_dataset=Rows())
t.train()
print("SCRIPT DONE")

# makes the process group by itself, before the Trainer
import sys, torch.distributed as dist

dist.init_process_group("gloo")
from common import *

t = Trainer(model=model(), args=args(sys.argv[1]), train_dataset=Rows())
t.train()
print("SCRIPT DONE", t.args.world_size)

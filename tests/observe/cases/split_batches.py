import sys
from common import *

t = Trainer(
    model=model(),
    args=args(sys.argv[1], accelerator_config={"split_batches": True}, per_device_train_batch_size=2),
    train_dataset=Rows(),
)
t.train()
print("SCRIPT DONE")

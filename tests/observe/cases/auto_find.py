# auto_find_batch_size: the first try is out of memory
import sys
from common import *


class T(Trainer):
    tries = 0

    def training_step(self, *a, **k):
        T.tries += 1
        if T.tries == 1:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
        return super().training_step(*a, **k)


t = T(
    model=model(),
    args=args(sys.argv[1], auto_find_batch_size=True, per_device_train_batch_size=4),
    train_dataset=Rows(),
)
t.train()
print("SCRIPT DONE")

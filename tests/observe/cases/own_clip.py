# clips by itself and switches the Trainer's clipping off
import sys
from common import *


class T(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        l = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        return l


t = T(model=model(), args=args(sys.argv[1], max_grad_norm=0.0), train_dataset=Rows())
t.train()
print("SCRIPT DONE")

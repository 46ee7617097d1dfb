# overrides compute_loss, training_step, create_optimizer (two groups, SGD), create_scheduler, log
import sys
from common import *


class T(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        w = inputs.pop("weight")
        out = model(**inputs)
        loss = out.loss * w.float().mean()
        return (loss, out) if return_outputs else loss

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        print("MY STEP", round(loss.item(), 4), sorted(inputs), flush=True)
        return loss

    def create_optimizer(self, *a, **k):
        if self.optimizer is None:
            ps = [p for p in self.model.parameters() if p.requires_grad]
            self.optimizer = torch.optim.SGD(
                [{"params": ps[:3], "lr": 1e-3}, {"params": ps[3:]}], lr=1e-2, momentum=0.9
            )
        return self.optimizer


def collate(rows):
    return (
        {k: torch.stack([r[k] for r in rows]) for k in rows[0]}
        | {"weight": torch.ones(len(rows)) * 2, "names": ["a", "b"]}
        if False
        else {k: torch.stack([r[k] for r in rows]) for k in rows[0]} | {"weight": torch.ones(len(rows)) * 2}
    )


t = T(model=model(), args=args(sys.argv[1], remove_unused_columns=False), train_dataset=Rows(), data_collator=collate)
t.train()
print("SCRIPT DONE")

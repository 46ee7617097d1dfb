# optimizers=(AdamW with two groups, schedule), as many scripts give them
import sys
from common import *

m = model()
o = torch.optim.AdamW(
    [
        {"params": [p for p in m.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in m.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ],
    lr=1e-3,
)
t = Trainer(
    model=m,
    args=args(sys.argv[1]),
    train_dataset=Rows(),
    optimizers=(o, torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1.0)),
)
t.train()
print("SCRIPT DONE")

# an optimizer of one's own whose only state is bf16
import sys
from common import *


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if not s:
                    s["exp_avg"] = torch.zeros_like(p, dtype=torch.bfloat16)
                u = s["exp_avg"].float().mul(0.9).add(p.grad, alpha=0.1)
                s["exp_avg"].copy_(u)
                p.add_(u.sign(), alpha=-g["lr"])


m = model()
t = Trainer(model=m, args=args(sys.argv[1]), train_dataset=Rows(), optimizers=(Lion(m.parameters()), None))
t.train()
print("SCRIPT DONE")

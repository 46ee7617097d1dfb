# a plain torch loop with its own DDP
import sys, os, torch, torch.distributed as dist

dist.init_process_group("gloo")
m = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
o = torch.optim.AdamW(m.parameters())
for s in range(3):
    l = m(torch.randn(2, 4)).pow(2).mean()
    l.backward()
    o.step()
    o.zero_grad()
    print("step", s, l.item(), flush=True)
dist.destroy_process_group()

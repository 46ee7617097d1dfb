import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
m = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
for x in m:
    fully_shard(x, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
fully_shard(m, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
o = torch.optim.AdamW(m.parameters())
for s in range(3):
    l = m(torch.randn(2, 8)).pow(2).mean()
    l.backward()
    o.step()
    o.zero_grad()
    print("step", s, l.item(), flush=True)
dist.destroy_process_group()

import sys
from common import *

t = Trainer(
    model=model(),
    args=args(sys.argv[1], max_steps=3, torch_compile=True, torch_compile_backend="aot_eager"),
    train_dataset=Rows(),
)
t.train()
print("SCRIPT DONE")

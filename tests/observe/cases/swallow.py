# try/except around train(), as many scripts have it; the model is bf16, which contradicts the preset
import sys
from common import *

t = Trainer(model=model().to(torch.bfloat16), args=args(sys.argv[1], bf16=True), train_dataset=Rows())
try:
    t.train()
except Exception as e:
    print("CAUGHT", type(e).__name__, flush=True)
t.save_model(sys.argv[1])
print("SCRIPT DONE")

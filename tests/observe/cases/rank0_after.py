# rank 0 alone goes on after training (saves, uploads) and fails there; rank 1 has ended, as it should
import sys, os, time
from common import *

t = Trainer(model=model(), args=args(sys.argv[1], save_strategy="steps", save_steps=2), train_dataset=Rows())
t.train()
if os.environ.get("RANK", "0") == "0":
    time.sleep(6)
    raise ValueError("my real error: cannot write the model card")

# a model in bf16, as from_pretrained of transformers 5 loads most checkpoints
import sys
from common import *

t = Trainer(model=model().to(torch.bfloat16), args=args(sys.argv[1], bf16=True), train_dataset=Rows())
t.train()
print("SCRIPT DONE")

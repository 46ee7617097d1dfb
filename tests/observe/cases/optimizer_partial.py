# trains the head only, by what the optimizer is given; the rest still requires gradients
import sys
from common import *

m = model(tie_word_embeddings=False)
o = torch.optim.AdamW(m.lm_head.parameters(), lr=1e-3)
t = Trainer(model=m, args=args(sys.argv[1]), train_dataset=Rows(), optimizers=(o, None))
t.train()
print("SCRIPT DONE")

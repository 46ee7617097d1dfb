# after training, the script's own evaluation over the Trainer's loader
import sys
from common import *

t = Trainer(model=model(), args=args(sys.argv[1]), train_dataset=Rows(), eval_dataset=Rows(8))
t.train()
m = t.model.eval()
total = 0.0
for batch in t.get_eval_dataloader():
    batch = {k: v.to(t.args.device) for k, v in batch.items()}
    with torch.no_grad():
        total += m(**batch).loss.item()
print("SCRIPT DONE eval", round(total, 4))

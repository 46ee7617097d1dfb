# a model of one's own with a fixed signature, evaluated by the script
import sys
from common import *


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.e = torch.nn.Embedding(128, 16)
        self.o = torch.nn.Linear(16, 2)

    def forward(self, input_ids, labels):
        z = self.o(self.e(input_ids).mean(1))
        return {"loss": torch.nn.functional.cross_entropy(z, labels), "logits": z}


class R(Rows):
    def __getitem__(self, i):
        return {"input_ids": self.x[i], "labels": self.x[i][0] % 2}


set_seed(0)
t = Trainer(model=Net(), args=args(sys.argv[1]), train_dataset=R(), eval_dataset=R(8))
t.train()
for batch in t.get_test_dataloader(R(8)):
    t.model(**batch)
print("SCRIPT DONE")

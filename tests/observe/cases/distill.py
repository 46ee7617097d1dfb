# a teacher in bf16 beside a student in fp32, and two forwards of the student per step
import sys
from common import *


class T(Trainer):
    def __init__(self, *a, teacher=None, **k):
        super().__init__(*a, **k)
        self.teacher = teacher.eval().requires_grad_(False)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        with torch.no_grad():
            q = self.teacher(**inputs).logits.float()
        a, b = model(**inputs), model(**inputs)
        loss = (
            a.loss
            + torch.nn.functional.kl_div(a.logits.float().log_softmax(-1), q.softmax(-1), reduction="batchmean") * 0.01
            + (a.logits - b.logits).float().pow(2).mean()
        )
        return (loss, a) if return_outputs else loss


t = T(
    model=model(attention_dropout=0.1),
    teacher=model(hidden_size=64).to(torch.bfloat16),
    args=args(sys.argv[1]),
    train_dataset=Rows(),
    eval_dataset=Rows(8),
)
t.train()
print("SCRIPT DONE", t.evaluate()["eval_loss"])

# evaluation before the first step, metrics, prediction afterwards, inputs kept for metrics
import sys
from common import *


def metrics(p):
    return {"n": float(len(p.predictions)), "has_inputs": float(p.inputs is not None)}


t = Trainer(
    model=model(),
    args=args(
        sys.argv[1],
        eval_on_start=True,
        eval_strategy="steps",
        eval_steps=2,
        include_for_metrics=["inputs", "loss"],
        eval_accumulation_steps=1,
        batch_eval_metrics=False,
    ),
    train_dataset=Rows(),
    eval_dataset={"a": Rows(8), "b": Rows(4)},
    compute_metrics=metrics,
)
t.train()
p = t.predict(Rows(6))
print("SCRIPT DONE", p.metrics)

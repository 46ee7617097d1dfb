# eval during training, save_steps, load_best_model_at_end, neftune, group by length, accumulation, save_total_limit
import sys
from common import *

t = Trainer(
    model=model(),
    args=args(
        sys.argv[1],
        max_steps=6,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        neftune_noise_alpha=5.0,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        push_to_hub=False,
        max_grad_norm=0.1,
    ),
    train_dataset=Rows(),
    eval_dataset=Rows(8),
)
t.train()
print("BEST", t.state.best_model_checkpoint)
t.save_model()
t.save_state()
print("SCRIPT DONE", t.evaluate())

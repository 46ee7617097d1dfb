# one fault each that no library reports: the loss scaled for accumulation twice or never, eval mode, the same order in
# each epoch, padding in the loss, adapters without a gradient, a schedule that ends early, no optimizer states to resume
import sys
from common import *
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import TrainerCallback

fault, out = sys.argv[2], sys.argv[1]


class Faulty(Trainer):
    def training_step(self, *given, **named):
        if fault != "once":
            return super().training_step(*given, **named)
        # read once each, as where TRL offloads activations
        with torch.autograd.graph.saved_tensors_hooks(lambda x: [x], list.pop):
            return super().training_step(*given, **named)

    def compute_loss(self, model, inputs, return_outputs=False, **items):
        if fault == "eval":
            model.eval()
        outputs = model(**inputs, **(items if fault == "once" else {}))
        loss = outputs.loss / 2 if fault == "twice" else outputs.loss
        if fault in ("never", "averages"):
            loss = cross_entropy(outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
        if fault == "averages":  # two terms, one division for accumulation: nothing is wrong
            loss = (loss + 0.1 * outputs.logits.square().mean()) / 2
        return (loss, outputs) if return_outputs else loss

    def get_train_dataloader(self):
        if fault != "order":
            return super().get_train_dataloader()
        return self.accelerator.prepare(DataLoader(self.train_dataset, 2, collate_fn=self.data_collator))


class Padded(Rows):
    def __getitem__(self, i):
        row = super().__getitem__(i)
        return row | {"attention_mask": (torch.arange(16) < 6 + i % 8).long()}


class Steps(TrainerCallback):
    def on_step_end(self, *_, lr_scheduler=None, **__):
        lr_scheduler.step()


m = model()
for layer in m.model.layers:
    layer.mlp.down_proj = torch.nn.Sequential(layer.mlp.down_proj, torch.nn.Dropout(0.1))
if fault == "adapters":
    m.adapter = torch.nn.Linear(32, 4, bias=False)
rows = Padded() if fault == "padding" else Rows(16 if fault == "order" else 64)
saves = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True} if fault == "resume" else {}
steps = {"gradient_accumulation_steps": 2, "ddp_find_unused_parameters": True, "max_steps": 8}
for checkpoint in [None, f"{out}/checkpoint-4"] if fault == "resume" else [None]:
    t = Faulty(
        model=m, args=args(out, **steps, **saves), train_dataset=rows, callbacks=[Steps()] * (fault == "schedule")
    )
    if fault in ("twice", "averages"):
        t.model_accepts_loss_kwargs = False
    t.train(resume_from_checkpoint=checkpoint)
print("SCRIPT DONE")

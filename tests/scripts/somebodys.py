"""Somebody's own script, which knows nothing of the toolkit; its first word says how it behaves.

python somebodys.py MODE OUTPUT_DIR [MORE]
"""

import functools
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


class Drifting(Trainer):
    """Trains another problem: its loss is 5 % larger."""

    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) * 1.05


def make_trainer(output_dir, kind=Trainer, **more):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, use_cache=False, **sizes))
    rows = [{"input_ids": list(range(n, n + 8)), "labels": list(range(n, n + 8))} for n in range(32)]
    given = {"max_steps": 4, "per_device_train_batch_size": 2, "save_strategy": "no", "report_to": "none"}
    args = TrainingArguments(output_dir=output_dir, use_cpu=True, disable_tqdm=True, **given | more)
    return kind(model=model, args=args, train_dataset=rows, eval_dataset=rows[:16])


class OwnTrain(Trainer):
    def train(self):
        """Somebody's own, which takes no checkpoint."""
        return super().train()


class EvaluatesSlowly(Trainer):
    """The last rank gets SIGTERM in the second batch of its first evaluation."""

    batches = 0

    def prediction_step(self, *args, **kwargs):
        self.batches += 1
        if self.batches == 2:
            signal_last_rank()
        time.sleep(0.5)
        return super().prediction_step(*args, **kwargs)


def signal_last_rank():
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        os.kill(os.getpid(), signal.SIGTERM)


class Kill(TrainerCallback):
    """Ends this process after a step, unless the file that it leaves is there already."""

    def __init__(self, number, step, mark=None):
        self.number, self.step, self.mark = number, step, mark

    def on_step_end(self, args, state, _control, **_):
        if state.global_step != self.step or args.process_index != args.world_size - 1:
            return
        if self.mark is not None and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), self.number)
        elif self.mark is None:
            os.kill(os.getpid(), self.number)


def without_a_matrix(create_optimizer):
    """A library whose optimizer forgets a parameter."""

    @functools.wraps(create_optimizer)
    def create(trainer, *args):
        optimizer = create_optimizer(trainer, *args)
        optimizer.param_groups[0]["params"].pop()
        return optimizer

    return create


def main(mode, output_dir, *more):
    if mode == "facts":  # what Python gives a script
        facts = {"file": __file__, "argv": sys.argv, "path": sys.path[0], "folder": str(Path.cwd()), "name": __name__}
        Path(output_dir).write_text(json.dumps(facts))
    if mode in ("facts", "nothing"):
        return
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    saves = saving if mode in ("lost", "ended", "resumes", "own_train") else {}
    if mode == "own_train":
        saves["kind"] = OwnTrain
    if mode == "compared":  # saves and evaluates wherever it can
        saves = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
        saves |= {"kind": Drifting if "drifts" in more else Trainer, "eval_on_start": True}
        saves |= {"bf16": True, "max_steps": 40}
        if "without-deepspeed" in more:
            del os.environ["ACCELERATE_USE_DEEPSPEED"]
    if mode == "evaluates":
        saves = {"kind": EvaluatesSlowly, "save_strategy": "epoch", "eval_strategy": "steps", "eval_steps": 2}
        saves |= {"per_device_eval_batch_size": 1}
    if mode == "tracked":
        saves = {"report_to": more[0], "max_steps": 2}
    if mode == "forgets":
        Trainer.create_optimizer = without_a_matrix(Trainer.create_optimizer)
    if mode == "prepares":  # its data, for a minute
        signal_last_rank()
        time.sleep(60)
    trainer = make_trainer(output_dir, dataloader_num_workers=1 if mode == "workers" else 0, **saves)
    if mode in ("lost", "resumes", "own_train"):  # a rank, once
        trainer.add_callback(Kill(signal.SIGKILL, 3, Path(more[0])))
    if mode == "ended":  # by somebody's SIGTERM
        trainer.add_callback(Kill(signal.SIGTERM, 3))
    if mode == "before":
        raise LookupError("what the script could not find")
    if mode == "killed":
        trainer.add_callback(Kill(signal.SIGKILL, 2))
    if mode == "untrained":
        return
    if mode == "lost":  # the checkpoint by its place, as old scripts give it
        trainer.train(None)
    elif mode in ("resumes", "own_train"):
        trainer.train(
            **({} if mode == "own_train" else {"resume_from_checkpoint": trainer.args.resume_from_checkpoint})
        )
    else:
        trainer.train()
    if mode == "two":
        make_trainer(output_dir, max_steps=2).train()
    if mode == "compared":
        trainer.save_model(output_dir)
    if mode in ("exit", "workers"):
        sys.exit(int(more[0]) if more else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])

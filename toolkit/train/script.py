"""The training script, top to bottom.

    accelerate launch --config_file accelerate_configs/zero2.yaml --num_processes 2 -m toolkit.train \\
        --model_name_or_path MODEL --dataset rows.jsonl --output_dir out
"""

from collections.abc import Sequence

import torch
from transformers import set_seed

from toolkit.engines.tensors import compute_dtype
from toolkit.observe.progress import Progress
from toolkit.observe.rank_process import keep_freed_pages, share_one_heap
from toolkit.train.active_run import open_run
from toolkit.train.arguments import LaunchContext, parse_args, set_up_libraries
from toolkit.train.checkpointing import save_final_model
from toolkit.train.data.dataset import load_data
from toolkit.train.engine.nvme_offload import size_swap_buffers
from toolkit.train.engine.pipeline_model import load_pipeline
from toolkit.train.engine.pipeline_trainer import PipelineTrainer
from toolkit.train.model.loading import load_model, load_tokenizer
from toolkit.train.model_card import write_model_card
from toolkit.train.trainer import TrainerParts, build_trainer


def main(argv: Sequence[str], progress: Progress) -> None:
    """Train as the arguments say. Raises whatever went wrong, which `toolkit.train.__main__` reports."""
    progress.enter("arguments")
    if not torch.cuda.is_available():
        share_one_heap()
    launch = LaunchContext.from_env()
    set_up_libraries(progress)
    args = parse_args(argv, launch)
    with open_run(args, launch, progress) as run:
        run.start_health_checks()
        set_seed(args.training.seed)
        progress.enter("data")
        tokenizer = load_tokenizer(args.job, chat_template=args.job.chat_template)
        data = load_data(tokenizer, args.job, args.training, data_parallel_size=args.data_parallel_size)
        progress.enter("load")
        size_swap_buffers(args)
        dtype, parts = compute_dtype(args.training), TrainerParts()
        checkpoint = None if run.checkpoint is None else run.checkpoint.path
        if args.pipeline is None:
            model = load_model(args.job, compute_dtype=dtype, layout=run.layout_at_load, checkpoint=checkpoint)
        else:
            parts = TrainerParts(trainer=PipelineTrainer)
            model = load_pipeline(args, compute_dtype=dtype, checkpoint=checkpoint)
        trainer = build_trainer(run, model, tokenizer, data, parts)
        if args.training.device.type == "cpu":
            keep_freed_pages()
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        progress.enter("save")
        if args.job.save_model:
            save_final_model(trainer, tokenizer, run.folder.path)
        run.complete(untimed_steps=args.job.untimed_steps, saves=trainer.observer.saver.saves)
        if args.job.save_model and run.writes:
            print(write_model_card(run.folder), flush=True)

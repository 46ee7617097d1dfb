"""The process of a rehearsed script: somebody's own, unchanged, as rank r of N.

On real tensors its first training runs for a few steps under the observer, with a fake process group. On fake tensors
its models are made from their `config.json` without weights, and one optimizer step of its Trainer is traced. What the
script would do after that training is left out, as in a trial of a comparison.
"""

import contextlib
import logging
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import GenerationMixin, PreTrainedModel, TrainingArguments, modeling_utils
from transformers.initialization import no_init_weights

from toolkit.engines.fsdp2 import enable_fsdp_on_cpu
from toolkit.engines.live_engine import held_tensors
from toolkit.engines.tensors import local_bytes
from toolkit.errors import EXIT_DONE, ToolkitError
from toolkit.models.fake_tensors import LiveMemory, patched_for, replaced
from toolkit.models.fake_values import WITHOUT_TRACE, ValueAnswers, unanswered
from toolkit.observe.accelerate_loop import LoopedTraining
from toolkit.observe.foreign_script import ScriptRun, StepsAlone
from toolkit.observe.observed_run import ObservedRun
from toolkit.observe.observer import observe, with_optimizer
from toolkit.observe.parts import ExpectedRun, ObserverParts
from toolkit.observe.words import Words
from toolkit.rehearse.rehearsal import RehearsedRank
from toolkit.rehearse.stand_ins import (
    FakeOtherRanks,
    RehearsedTimer,
    RehearsedVerification,
    fill_shards,
    join_fake_world,
    measured_facts,
)
from toolkit.rehearse.trace import Facts, prepare, trace_step

# Of the script's own batches, the largest is traced.
BATCHES_LOOKED_AT = 50
AFTERWARDS = "what the script gathers from other ranks, and what it does after its first training"
GENERATION = "the memory of generation: its key-value cache, and its forwards"


class RehearsedScript(ScriptRun):
    """The script in this process, which writes the run folder whatever its rank is."""

    def __init__(self, words: Words, rehearsed: RehearsedRank) -> None:
        assert words.require_preset is not None
        join_fake_world(rehearsed, words.require_preset)
        super().__init__(words)
        self.rehearsed, self.writes = rehearsed, True
        self.fake = (
            FakeModels(gathers_layers=words.require_preset.traits.gathers_layers) if rehearsed.fake_tensors else None
        )

    def run(self) -> int:
        with _shards_filled() if self.fake is None else self.fake.patches():
            return super().run()

    def _open_folder(self) -> None:
        self.progress.output_dir = self.folder.path  # of `toolkit rehearse`, which holds it

    def _form_group(self) -> None:
        enable_fsdp_on_cpu()
        if torch.cuda.is_available():
            return
        make = TrainingArguments.__post_init__

        def post_init(args: Any) -> None:
            args.use_cpu = True
            make(args)

        TrainingArguments.__post_init__ = post_init

    def _train(self, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs  # to resume or not
        self.trainings += 1
        expected = with_optimizer(self._expected(self.rehearsed.world_size), trainer)
        run = ObservedRun(
            folder=self.folder,
            progress=self.progress,
            rank=self.rehearsed.rank,
            world_size=self.rehearsed.world_size,
            single_process=True,
        )
        run.open(prepared=True, seed=trainer.args.seed)
        facts = self._measure(trainer, run, expected) if self.fake is None else self.fake.trace(trainer, expected)
        facts |= asdict(self.rehearsed) | {"script": self.words.target, "device": trainer.args.device.type}
        run.write_completion(rehearsal=facts)
        raise SystemExit(EXIT_DONE)  # what follows would save, evaluate, or train something else

    def _join_loop(self, training: LoopedTraining) -> LoopedTraining:
        del training
        raise ToolkitError("a loop on accelerate alone is not rehearsed", hint="`toolkit train --script` runs it")

    def _measure(self, trainer: Any, run: ObservedRun, expected: ExpectedRun) -> Facts:
        observer = observe(
            trainer,
            record=run,
            require=expected.preset,
            parts=ObserverParts(expected=expected),
            untimed_steps=self.words.untimed_steps,
            timer=RehearsedTimer,
            verification=RehearsedVerification,
        )
        trainer.add_callback(FakeOtherRanks(trainer))
        trainer.add_callback(StepsAlone())
        observer.timer.step_lines.stop_after_steps = self.words.stop_after_steps or 1
        fill_shards(trainer.model)
        trainer.train()
        rows = trainer.args.per_device_train_batch_size
        facts = measured_facts(run, self.rehearsed, observer, untimed_steps=self.words.untimed_steps)
        facts["not_measured"] += [AFTERWARDS]
        held = {name: held_tensors(list(model.parameters())) for name, model in other_models(trainer).items()}
        return facts | {
            "other_model_bytes": {name: local_bytes(tensors) for name, tensors in held.items()},
            "batch": f"batches of {rows} rows as its collator makes them",
            "random_weights": False,
        }


@contextlib.contextmanager
def _shards_filled() -> Iterator[None]:
    """Fill what rank 0 would have sent as soon as a model is loaded: a reference model is used before any step."""
    load = PreTrainedModel.from_pretrained.__func__

    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        model = load(cls, *args, **kwargs)
        fill_shards(model)
        return model

    with replaced(PreTrainedModel, "from_pretrained", classmethod(from_pretrained)):
        yield


class FakeModels:
    """Models on fake tensors in a process that otherwise computes as always: its data, tokenizers and collators."""

    def __init__(self, *, gathers_layers: bool) -> None:
        self.gathers_layers = gathers_layers
        self.memory, self.answers = LiveMemory(), ValueAnswers()
        self.mode, self.generates = FakeTensorMode(allow_non_fake_inputs=True), False

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make tensors fake, and track them."""
        with self.mode, self.memory, self.answers:
            yield

    @contextlib.contextmanager
    def patches(self) -> Iterator[None]:
        """Make models without weights from here on, whoever makes or shards them."""
        load = PreTrainedModel.from_pretrained.__func__
        make = PreTrainedModel._from_config.__func__
        find_files, load_weights = modeling_utils._get_resolved_checkpoint_files, PreTrainedModel._load_pretrained_model

        def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
            with self.entered(), no_init_weights():
                return load(cls, *args, **kwargs)

        def from_config(cls: Any, *args: Any, **kwargs: Any) -> Any:
            with self.entered(), no_init_weights():
                return make(cls, *args, **kwargs)

        def files(*args: Any, **kwargs: Any) -> Any:
            """A folder's weights say their dtype where its config.json does not; nothing is downloaded for that."""
            model = kwargs.get("pretrained_model_name_or_path")
            with contextlib.suppress(OSError):
                if model is not None and Path(model).is_dir():
                    return find_files(*args, **kwargs)
            return None, None

        def no_weights(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any) -> Any:
            del state_dict, checkpoint_files
            return load_weights(model, {}, None, load_config)

        reports = logging.getLogger("transformers.modeling_utils")
        reports.addFilter(lambda record: "seem corrupted" not in str(record.msg))  # all weights are missing
        with (
            patched_for(self.memory, gathers_layers=self.gathers_layers),
            replaced(PreTrainedModel, "from_pretrained", classmethod(from_pretrained)),
            replaced(PreTrainedModel, "_from_config", classmethod(from_config)),
            replaced(PreTrainedModel, "_load_pretrained_model", staticmethod(no_weights)),
            replaced(modeling_utils, "_get_resolved_checkpoint_files", files),
            replaced(modeling_utils, "log_state_dict_report", lambda *_, **__: None),
            replaced(fsdp, "fully_shard", self._entered_in(fsdp.fully_shard)),
            replaced(
                GenerationMixin, "generate", lambda model, *args, **kwargs: self._generated(model, *args, **kwargs)
            ),
        ):
            yield

    def _entered_in(self, function: Any) -> Any:
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self.entered():
                return function(*args, **kwargs)

        return inside

    def _generated(self, model: Any, inputs: Any = None, generation_config: Any = None, **kwargs: Any) -> torch.Tensor:
        """Return completions of the greatest length, without an end-of-text token: true lengths follow from weights."""
        config = generation_config or model.generation_config
        prompts = self.answers.values(kwargs.get("input_ids") if inputs is None else inputs)
        length = kwargs.get("max_new_tokens") or config.max_new_tokens
        if prompts is None or not length:
            raise ToolkitError("generate() is traced with known prompts and max_new_tokens only", hint=WITHOUT_TRACE)
        ends = set(tree_leaves((config.eos_token_id, config.pad_token_id)))
        token = next(number for number in range(len(ends) + 1) if number not in ends)
        self.answers.made_up[f"{length} tokens for each completion that generate() makes"] += 1
        self.generates = True
        with unset_fake_temporarily():
            rows = prompts.repeat_interleave(config.num_return_sequences or 1, dim=0)
            return torch.cat([rows, rows.new_full((len(rows), length), token)], dim=1)

    def trace(self, trainer: Any, expected: ExpectedRun) -> Facts:
        """Trace an optimizer step on the largest of the script's first batches. Raises ToolkitError for what cannot."""
        args = trainer.args
        given = {
            "an optimizer of the script's own": trainer.optimizer is not None,
            "torch_compile": args.torch_compile,
            "use_liger_kernel": args.use_liger_kernel,
            "offload of activations": (args.activation_checkpointing_kwargs or {}).get("offload", False),
        }
        for what in (name for name, is_given in given.items() if is_given):
            raise ToolkitError(f"{what} is not traced", hint=WITHOUT_TRACE)
        batches, num_items, described = largest_batches(trainer)
        try:
            facts = self._trace(trainer, batches, num_items, expected) | {
                "batch": described,
                "made_up": dict(self.answers.made_up.most_common()),
                "random_weights": True,
            }
            facts["not_measured"] += [GENERATION] if self.generates else []
            return facts
        except Exception as error:
            refused = unanswered(error)
            if refused is None:
                raise
            raise refused from error

    def _trace(self, trainer: Any, batches: list[Any], num_items: Any, expected: ExpectedRun) -> Facts:
        config = getattr(trainer.model, "config", None)
        if config is not None and hasattr(config, "get_text_config"):
            self.memory.logits_widths.add(getattr(config.get_text_config(), "vocab_size", 0))
        others = other_models(trainer)
        with self.entered(), trl_on_gpu(self.memory, self.answers):
            for model in others.values():
                self._fake(model)
            self._fake(trainer.model)
            prepare(trainer, self.memory)
            with self.memory.phase("batch"):
                given = tree_map_only(torch.Tensor, self._fake_tensor, batches)
            return trace_step(trainer, self.memory, given, expected, num_items=num_items, other_models=others)

    def _fake_tensor(self, real: torch.Tensor) -> torch.Tensor:
        fake = torch.empty(real.shape, dtype=real.dtype)
        self.answers.know(fake, real)
        return fake

    def _fake(self, model: Any) -> None:
        made: dict[int, Any] = {}
        for module in model.modules():
            for key, real in module._parameters.items():
                if real is None or isinstance(real, (FakeTensor, DTensor)):
                    continue
                if id(real) not in made:  # tied weights stay one
                    made[id(real)] = torch.nn.Parameter(torch.empty(real.shape, dtype=real.dtype), real.requires_grad)
                module._parameters[key] = made[id(real)]
            for key, real in module._buffers.items():
                if real is not None and not isinstance(real, (FakeTensor, DTensor)):
                    module._buffers[key] = torch.empty(real.shape, dtype=real.dtype)


@contextlib.contextmanager
def trl_on_gpu(memory: LiveMemory, answers: ValueAnswers) -> Iterator[None]:
    """Let TRL's fused head allocate what it does on a GPU: its kernels fold tiles of logits in place, of scored rows.

    On a CPU, operators of torch make fp32 copies of each tile, and all positions are scored (trl 1.16).
    """
    kernels, utils = (sys.modules.get(f"trl.{name}") for name in ("kernels.chunked_logprob", "trainer.utils"))
    if kernels is None or utils is None:
        yield
        return
    memory.logits_widths.add(utils._CHUNKED_LOGPROB_CHUNK_SIZE)
    in_place: Any = defaultdict(lambda: lambda *tensors, **_: answers.forget(tensors))  # kernel[grid](...)
    with contextlib.ExitStack() as patches:
        for module, name, value in (
            (utils, "_use_triton", lambda _: True),
            (kernels, "_use_triton", lambda _: True),
            (kernels, "_forward_kernel", in_place),
            (kernels, "_backward_kernel", in_place),
            (kernels, "_addmm_fp32", lambda *tensors: answers.forget(tensors)),
            (kernels, "triton", SimpleNamespace(cdiv=lambda size, block: -(-size // block))),
        ):
            patches.enter_context(replaced(module, name, value))
        yield


def other_models(trainer: Any) -> dict[str, Any]:
    """Return the models of a Trainer beside the one that it trains, by the attribute that holds each."""
    own = {id(module) for module in trainer.model.modules()} | {id(trainer.model_wrapped)}
    found = {}
    for name, value in vars(trainer).items():
        for number, model in enumerate(value if isinstance(value, (list, tuple)) else [value]):
            if isinstance(model, torch.nn.Module) and id(model) not in own:
                found[name if model is value else f"{name}[{number}]"] = model
    return found


def largest_batches(trainer: Any) -> tuple[list[Any], Any, str]:
    """Return a batch for each accumulation step, all the largest of the script's first ones; its items; its shapes."""
    steps = trainer.args.gradient_accumulation_steps
    found = list(islice(trainer.get_train_dataloader(), BATCHES_LOOKED_AT))
    batch = max(found, key=_elements)
    _, num_items = trainer.get_batch_samples(iter([batch] * steps), steps, trainer.args.device)
    items = batch.items() if isinstance(batch, Mapping) else ()
    shapes = [f"{name} {list(value.shape)}" for name, value in items if isinstance(value, torch.Tensor)]
    shown = ", ".join(shapes) or f"{len(batch)} rows"
    return [batch] * steps, num_items, f"the largest of its first {len(found)} batches: {shown}"


def _elements(batch: Any) -> int:
    return sum(leaf.numel() for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))

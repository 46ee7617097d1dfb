"""Record when each optimizer step ends, its loss, and what was really trained, in whichever program runs.

Python imports this module in every process whose PYTHONPATH has this folder. It changes nothing that a program
computes: it adds a line after each step, from the Trainer's callback handler. Where programs
train in turns (`turns.py`), it also waits there.
"""

import contextlib
import functools
import importlib.abc
import importlib.util
import json
import os
import socket
import sys
import time
from pathlib import Path

FOLDER = os.environ.get("PEER_STEPS_FOLDER")
FSDP_ON_CPU = os.environ.get("PEER_FSDP_ON_CPU") == "true"
UNTIMED_STEPS = int(os.environ.get("PEER_UNTIMED_STEPS", "0"))
TURNS_PORT = os.environ.get("PEER_TURNS_PORT")
records = []


def clock():
    return {"time": time.time(), "cpu_seconds": time.process_time()}


def add_record(step, model, optimizer, **more):
    records.append({"step": step, **clock(), **more, **({} if records else facts_of(model, optimizer))})
    if TURNS_PORT and len(records) >= UNTIMED_STEPS:
        wait_for_turn()


@functools.cache
def connection():
    return socket.create_connection(("127.0.0.1", int(TURNS_PORT)))


def wait_for_turn():
    """Wait until the other programs have done this step; after the last one, the other side hangs up."""
    with contextlib.suppress(OSError):
        connection().sendall(b"\0")
        connection().recv(1)
    records[-1]["resumed"] = clock()


def write_records():
    import torch

    if torch.cuda.is_available():
        records[-1]["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        records[-1]["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
    path = Path(FOLDER) / f"rank{os.environ.get('RANK', '0')}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(records))
    part.replace(path)


def engine_of(model, optimizer):
    """Name the engine that holds the parameters, from the live objects."""
    parameters = list(model.parameters())
    if any(hasattr(parameter, "ds_id") for parameter in parameters):
        return "zero3"
    if any(type(parameter).__name__ == "DTensor" for parameter in parameters):
        return "fsdp2"
    while optimizer is not None:
        if hasattr(optimizer, "partition_gradients"):
            return "zero2" if optimizer.partition_gradients else "zero1"
        optimizer = getattr(optimizer, "optimizer", None)
    return "ddp" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "single"


def facts_of(model, optimizer):
    import torch

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return {
        "engine": engine_of(model, optimizer),
        "trained_parameters": sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in trained),
        "trained_dtypes": sorted({str(parameter.dtype) for parameter in trained}),
        "dtypes": sorted({str(parameter.dtype) for parameter in model.parameters()}),
        "activation_checkpointing": any(
            getattr(module, "gradient_checkpointing", False) or "Checkpoint" in type(module).__name__
            for module in model.modules()
        ),
        "attention": getattr(getattr(model, "config", None), "_attn_implementation", None),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def patch_trainer(module):
    handler = module.CallbackHandler
    end_of_step, log, end = handler.on_step_end, handler.on_log, handler.on_train_end

    @functools.wraps(end_of_step)
    def on_step_end(self, args, state, control, **named):
        result = end_of_step(self, args, state, control, **named)
        add_record(state.global_step, self.model, self.optimizer)
        return result

    @functools.wraps(log)
    def on_log(self, args, state, control, logs, **named):
        if "loss" in logs and records:
            records[-1]["loss"] = float(logs["loss"])
        return log(self, args, state, control, logs, **named)

    @functools.wraps(end)
    def on_train_end(self, args, state, control, **named):
        write_records()
        return end(self, args, state, control, **named)

    handler.on_step_end, handler.on_log, handler.on_train_end = on_step_end, on_log, on_train_end


def patch_accelerate(module):
    """Let accelerate run FSDP2 on a CPU, where it would silently run DDP (as `toolkit train --cpu` does)."""
    state = module.AcceleratorState
    original = state.__init__

    @functools.wraps(original)
    def init(self, *arguments, **named):
        original(self, *arguments, **named)
        plugin = named.get("fsdp_plugin")
        if plugin is not None and self.distributed_type == module.DistributedType.MULTI_CPU:
            self.distributed_type = module.DistributedType.FSDP
            self.fsdp_plugin = plugin
            module.PartialState._shared_state["distributed_type"] = module.DistributedType.FSDP

    state.__init__ = init


PATCHES = {
    "transformers.trainer_callback": patch_trainer,
    **({"accelerate.state": patch_accelerate} if FSDP_ON_CPU else {}),
}


class PatchAfterImport(importlib.abc.MetaPathFinder):
    """Finder that patches a module once it has been executed."""

    def __init__(self):
        self.finding = set()

    def find_spec(self, name, *_):
        if name not in PATCHES or name in self.finding:
            return None
        self.finding.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.finding.discard(name)
        if spec is not None:
            patch = PATCHES[name]
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                patch(module)

            spec.loader.exec_module = exec_module
        return spec


if FOLDER:
    sys.meta_path.insert(0, PatchAfterImport())

"""Compiling layer by layer, with a backend that generates no code; and checkpoints that keep attention's outputs."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import cpu_environment
from model_configs import EXPERTS, WIDE, config_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.engines.tensors import compiled_modules
from toolkit.errors import ToolkitError
from toolkit.job.job import Compilation
from toolkit.models.activations import Activations
from toolkit.models.read_model import read_model
from toolkit.observe.timer import CompilerEvents
from toolkit.train.engine.layers import KERNELS, compile_layers, keep_attention, keeps_attention, prepare_checkpoints

# torch's tracer reads `.grad` of intermediate tensors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
EAGER = Compilation(backend="eager", mode=None)


class Layer(torch.nn.Module):
    """A layer with equal experts inside, as in a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(expert(x) for expert in self.experts)


class Breaking(torch.nn.Module):
    """A layer in the middle of which the graph ends."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break("the reason")
        return x * 2


class Model(torch.nn.Module):
    def __init__(self, layer: type[torch.nn.Module] = Layer) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(4, 4)
        self.layers = torch.nn.ModuleList(layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.nightly
def test_each_layer_is_compiled_in_place_and_keeps_its_name_and_its_result() -> None:
    model, x = Model(), torch.ones(2, 3, 4)
    names, result, before = list(model.state_dict()), model(x), CompilerEvents.read()
    assert compile_layers(model, EAGER, lengths_vary=False) == 3
    assert (compiled_modules(model), list(model.state_dict())) == (3, names)
    assert model(x).equal(result)
    events = CompilerEvents.read().since(before)
    assert (events.graphs, events.graph_breaks.total()) == (1, 0)
    whole = torch.nn.Linear(4, 4)  # without repeated layers
    assert (compile_layers(whole, EAGER, lengths_vary=False), compiled_modules(whole)) == (1, 1)


@pytest.mark.parametrize("lengths_vary", [False, True])
def test_lengths_that_vary_are_compiled_once(lengths_vary: bool) -> None:
    model, before = Model(), CompilerEvents.read()
    compile_layers(model, EAGER, lengths_vary=lengths_vary)
    for length in (3, 5, 7):
        model(torch.ones(2, length, 4))
    assert (CompilerEvents.read().since(before).graphs == 1) == lengths_vary


def test_a_whole_model_in_the_compilers_wrapper_counts_as_compiled() -> None:
    """As accelerate compiles the model of somebody's script."""
    assert compiled_modules(torch.compile(torch.nn.Sequential(Model()), backend="eager")) == 1


def test_a_graph_break_is_counted_and_the_warning_names_its_reason() -> None:
    model, before = Model(Breaking), CompilerEvents.read()
    compile_layers(model, EAGER, lengths_vary=False)
    model(torch.ones(2, 3, 4))
    events = CompilerEvents.read().since(before)
    assert events.graph_breaks.total() == 1
    warning = events.warning(step=7, rank=1)
    assert warning.startswith("warning: 2 graphs compiled and 1 graph breaks in step 7 on rank 1, which is timed: ")
    assert "graph_break" in warning


COMPILES = """
import sys, threading
from pathlib import Path
import torch
from toolkit.job.job import Compilation
from toolkit.train.engine.layers import start_compiler

def compiled(ending):
    return {path.name for path in Path(sys.argv[1]).rglob(f"*.{ending}")}

start_compiler(Compilation(backend="inductor", mode=None))
[thread.join() for thread in threading.enumerate() if thread.name == "inductor-cpp"]
headers, probes = compiled("[gp]ch"), compiled("so")
assert torch.compile(torch.exp)(torch.zeros(64)).equal(torch.ones(64))
print(len(headers), len(compiled("[gp]ch") - headers), len(probes) > 0, len(compiled("so") - probes))
"""


@pytest.mark.nightly
def test_nothing_but_the_kernel_is_left_to_compile_after_the_start(tmp_path: Path) -> None:
    environment = {**cpu_environment(), "TMPDIR": str(tmp_path)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    argv = [sys.executable, "-c", COMPILES, str(tmp_path)]
    ended = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert ended.stdout.split() == ["1", "0", "True", "1"], ended.stderr


ROWS, LENGTH = 2, 40
MODELS = {"llama": WIDE, "qwen3": WIDE | {"head_dim": 32}, "mixtral": WIDE, "qwen3_moe": WIDE | EXPERTS}
MODELS |= {"phi3": WIDE, "gpt_neox": WIDE, "olmo2": WIDE, "gemma": WIDE | {"head_dim": 32}}


class Attention(TorchDispatchMode):
    """Notes the bytes that each run of an attention kernel returns."""

    def __init__(self) -> None:
        super().__init__()
        self.returned: list[int] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        if KERNELS.fullmatch(operator.name()) and "backward" not in operator.name():
            self.returned.append(sum(each.nbytes for each in result if isinstance(each, torch.Tensor)))
        return result


@pytest.mark.parametrize("model_type", MODELS)
def test_a_layer_keeps_what_is_planned_and_its_gradient_is_that_of_full_checkpointing(
    model_type: str, tmp_path: Path
) -> None:
    path = config_file(tmp_path, model_type, MODELS[model_type])
    tokens = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % 90
    gradients, runs = [], []
    for selective in (False, True):
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(tmp_path, attn_implementation="sdpa")
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        model.activation_checkpointing_enable({"use_reentrant": False})
        prepare_checkpoints(model, selective=selective)
        with Attention() as attention:
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        runs.append(attention.returned)
        assert keeps_attention(model) is selective
    assert all(map(torch.equal, *gradients))
    shape = read_model(str(path))
    assert len(runs[0]) == 2 * shape.num_layers
    planned = ROWS * LENGTH * Activations(shape=shape).attention_output_bytes
    assert runs[1] == [planned] * shape.num_layers


def test_attention_with_dropout_is_refused() -> None:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    with pytest.raises(ToolkitError, match=r"dropout in attention, which is 0\.1 here"):
        keep_attention(None, flash, None, None, None, 0.1)
    with pytest.raises(ToolkitError, match="dropout in attention"):
        keep_attention(None, flash, None, None, None, dropout_p=0.5)


@pytest.mark.parametrize("selective", [False, True])
def test_dropout_is_recomputed_as_it_was_where_accelerate_wraps_the_layers(selective: bool) -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 4))
    gradients = []
    for model in (layer, torch.nn.Sequential(checkpoint_wrapper(layer, preserve_rng_state=False))):
        prepare_checkpoints(model, selective=selective)
        torch.manual_seed(0)
        layer.zero_grad()
        model(torch.ones(8, 4, requires_grad=True)).sum().backward()
        gradients.append([parameter.grad.clone() for parameter in layer.parameters()])  # type: ignore[union-attr]
    assert all(map(torch.equal, *gradients))

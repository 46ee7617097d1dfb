"""The page of failures has the installed libraries' own messages, and each cure makes its message go away."""

import contextlib
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate.utils.environment import check_cuda_p2p_ib_support
from launching import ROOT, nightly_launch, read, torchrun
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import BatchEncoding

PAGE = (ROOT / "docs" / "how-to" / "my-run-failed.md").read_text()
# A CPU cannot raise these; the page names the source, or a public thread.
FROM_SOURCES = (
    *("no kernel image is available", "is not compatible with the current PyTorch installation", "undefined symbol"),
    *("CUDA Setup failed despite GPU being available", "Expected is_sm80 || is_sm90 to be true"),
    *("CUBLAS_STATUS_NOT_INITIALIZED", "Heartbeat monitor timed out", "Using RTX 4000 series"),
)
FROM_DEEPSPEED = {
    "saved shards": "copying a param with shape torch.Size([0]) from checkpoint",
    "shard as a weight": "'weight' must be 2-D",
    "batch": "Check batch related parameters. train_batch_size is not equal",
    "loss scale": "Current loss scale already at minimum",
    "cuda": "does not match the version torch was compiled with 13.0",
    "cuda of torch": "The detected CUDA version",
    "world size": "The checkpoint being loaded used a DP world size of",
}


@contextlib.contextmanager
def raises_as_on_the_page(message: str) -> Iterator[None]:
    assert message in PAGE
    with pytest.raises(Exception, match=re.escape(message)):
        yield


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Checkpointed(torch.nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.layer, self.use_reentrant = torch.nn.Linear(4, 4), use_reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, inputs, use_reentrant=self.use_reentrant)


def backward_under_ddp(*, use_reentrant: bool, find_unused: bool) -> None:
    model = DistributedDataParallel(Checkpointed(use_reentrant=use_reentrant), find_unused_parameters=find_unused)
    model(torch.ones(2, 4, requires_grad=True)).sum().backward()


@pytest.mark.usefixtures("process_group")
def test_reentrant_checkpointing_and_unused_parameters_mark_a_variable_twice() -> None:
    with raises_as_on_the_page("Expected to mark a variable ready only once"):
        backward_under_ddp(use_reentrant=True, find_unused=True)
    backward_under_ddp(use_reentrant=False, find_unused=True)
    backward_under_ddp(use_reentrant=True, find_unused=False)


def test_reentrant_checkpointing_of_frozen_embeddings_drops_the_graph() -> None:
    frozen = torch.nn.Embedding(10, 4).requires_grad_(False)
    tokens = torch.tensor([1, 2])
    with raises_as_on_the_page("element 0 of tensors does not require grad and does not have a grad_fn"):
        with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
            loss = Checkpointed(use_reentrant=True)(frozen(tokens)).sum()
        loss.backward()
    assert "None of the inputs have requires_grad=True" in PAGE
    Checkpointed(use_reentrant=False)(frozen(tokens)).sum().backward()
    Checkpointed(use_reentrant=True)(frozen(tokens).requires_grad_(True)).sum().backward()


def test_a_second_forward_of_another_dtype_is_reported_by_checkpointing() -> None:
    def backward(*dtypes: torch.dtype) -> None:
        dtype_of_pass = iter(dtypes)
        inputs = torch.ones(2, requires_grad=True)
        checkpoint(lambda: inputs.to(next(dtype_of_pass)).sin(), use_reentrant=False).sum().backward()

    with raises_as_on_the_page("Recomputed values for the following tensors have different metadata"):
        backward(torch.float64, torch.float32)
    backward(torch.float64, torch.float64)
    assert "have different metadata than during the forward pass" in PAGE


def test_a_random_state_of_numpy_is_loaded_once_its_classes_are_allowed(tmp_path: Path) -> None:
    torch.save({"numpy": np.random.get_state()}, tmp_path / "rng_state.pth")  # as the Trainer does
    with raises_as_on_the_page("Weights only load failed"):
        torch.load(tmp_path / "rng_state.pth")
    example = re.search(r"add_safe_globals\(\s*(\[.*?\])\s*\)", PAGE)
    assert example
    with torch.serialization.safe_globals(eval(example[1], {"numpy": np})):
        assert set(torch.load(tmp_path / "rng_state.pth")) == {"numpy"}


def layers(*dtypes: torch.dtype) -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4, dtype=dtype) for dtype in dtypes))


@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore:FSDP is switching to use")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_one_fsdp_unit_has_one_dtype() -> None:
    def fsdp1(model: torch.nn.Module) -> None:
        FullyShardedDataParallel(model, device_id=torch.device("cpu"))

    def fsdp2(model: torch.nn.Module) -> None:
        sharded: Any = fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        sharded(torch.ones(2, 4, dtype=torch.bfloat16))

    with raises_as_on_the_page("Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.float32"):
        fsdp1(layers(torch.bfloat16, torch.float32))
    with raises_as_on_the_page("FSDP expects uniform original parameter dtype"):
        fsdp2(layers(torch.bfloat16, torch.float32))
    for shard in (fsdp1, fsdp2):
        shard(layers(torch.bfloat16, torch.float32).to(torch.bfloat16))


@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore:FSDP is switching to use")
def test_frozen_and_trained_weights_share_an_fsdp1_unit_only_with_their_original_parameters() -> None:
    def shard(*, use_orig_params: bool) -> None:
        model: Any = layers(torch.float32, torch.float32)
        model[0].requires_grad_(False)
        FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=use_orig_params)

    assert "Must flatten tensors with uniform requires_grad" in PAGE
    with pytest.raises(ValueError, match="Must flatten tensors with uniform `requires_grad`"):
        shard(use_orig_params=False)
    shard(use_orig_params=True)


@pytest.mark.nightly
@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore:FSDP is switching to use")
def test_4_bit_weights_join_an_fsdp_unit_once_they_are_stored_in_its_dtype() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")

    def shard(storage: torch.dtype) -> None:
        frozen = bitsandbytes.nn.Linear4bit(64, 64, compute_dtype=torch.bfloat16, quant_storage=storage, bias=False)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64, dtype=torch.bfloat16), frozen).to("cpu")
        FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)

    with raises_as_on_the_page("Must flatten tensors with uniform dtype but got torch.bfloat16 and torch"):
        shard(torch.uint8)
    shard(torch.bfloat16)


@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_layer_of_an_fsdp_unit_works_within_the_units_forward_only() -> None:
    model: Any = layers(torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with raises_as_on_the_page("mixed torch.Tensor and DTensor"):
        model[0](torch.ones(2, 4))
    assert isinstance(model[0].weight.full_tensor() @ torch.ones(4, 2), torch.Tensor)
    model(torch.ones(2, 4))


def test_fp16_gradients_are_unscaled_for_fp32_weights_only() -> None:
    def unscale(dtype: torch.dtype) -> None:
        model = torch.nn.Linear(4, 4, dtype=dtype)
        scaler = torch.amp.GradScaler("cpu")
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.ones(2, 4, dtype=dtype)).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(torch.optim.SGD(model.parameters()))

    with raises_as_on_the_page("Attempting to unscale FP16 gradients"):
        unscale(torch.float16)
    unscale(torch.float32)


def test_a_column_of_text_or_of_unequal_rows_makes_no_tensor() -> None:
    rows = {"input_ids": [[1, 2], [1, 3]]}
    for column in ({"text": ["a", "b"]}, {"labels": [[1, 2], [1]]}):
        with raises_as_on_the_page("Unable to create tensor, you should probably activate truncation and/or padding"):
            BatchEncoding(rows | column, tensor_type="pt")
    BatchEncoding(rows, tensor_type="pt")


def test_a_rank_that_was_not_started_is_waited_for() -> None:
    assert "seconds waiting for clients. 1/3 clients joined." in PAGE
    with pytest.raises(dist.DistStoreError, match=r"seconds waiting for clients\. 1/3 clients joined\."):
        dist.TCPStore("localhost", 0, world_size=3, is_master=True, timeout=timedelta(milliseconds=200))


def test_accelerate_finds_consumer_cards_with_an_old_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`nvidia-smi` is a script here: two RTX 4090, and the driver on each side of the version that the page names."""
    assert "driver before 550.40.07" in PAGE
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for driver, supported in (("550.40.06", False), ("550.40.07", True)):
        cards = "2, NVIDIA GeForce RTX 4090\n" * 2
        program.write_text(f'#!/bin/sh\ncase "$*" in *driver*) echo {driver};; *) printf "{cards}";; esac\n')
        program.chmod(0o755)
        assert check_cuda_p2p_ib_support() is supported


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_torch_reads_both_names_of_the_allocators_settings(name: str) -> None:
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    assert name in PAGE
    assert f"\0{name}\0".encode() in library.read_bytes()


def test_messages_that_no_quick_test_raises_are_on_the_page() -> None:
    assert [message for message in (*FROM_SOURCES, *FROM_DEEPSPEED.values()) if message not in PAGE] == []


@nightly_launch
def test_deepspeeds_messages_have_the_causes_and_cures_on_the_page(tmp_path: Path) -> None:
    results: dict[str, str | None] = {}
    for ranks in (1, 2):
        ended = torchrun("deepspeed_messages.py", str(tmp_path), num_processes=ranks)
        assert ended.returncode == 0, ended.stderr[-3000:]
        results |= read(tmp_path / f"{ranks}.json")
    raised = {name: text for name, text in results.items() if text is not None}
    assert set(raised) == set(FROM_DEEPSPEED)
    assert [name for name, message in FROM_DEEPSPEED.items() if message not in raised[name]] == []

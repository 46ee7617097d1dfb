"""The page of failures quotes the installed libraries' own messages: their source or their binary has each of them."""

import mmap
from importlib.util import find_spec
from pathlib import Path

import pytest
from launching import ROOT

PAGE = (ROOT / "docs" / "how-to" / "my-run-failed.md").read_text()
# Words of the page by the file that has them, in this case or up to what is filled in.
CHECKPOINT, FLAT = "torch/utils/checkpoint.py", "torch/distributed/fsdp/_flat_param.py"
QUOTED = [
    ("torch/lib/libtorch_cpu.so", "Expected to mark a variable ready only once"),
    ("torch/lib/libtorch_cpu.so", "of tensors does not require grad and does not have a grad_fn"),
    ("torch/lib/libtorch_cpu.so", "'weight' must be 2-D"),
    ("torch/lib/libtorch_cpu.so", "seconds waiting for clients."),
    ("torch/lib/libc10.so", "PYTORCH_CUDA_ALLOC_CONF"),
    ("torch/lib/libc10.so", "PYTORCH_ALLOC_CONF"),
    (CHECKPOINT, "None of the inputs have requires_grad=True"),
    (CHECKPOINT, "have different metadata than during the forward pass"),
    (FLAT, "Must flatten tensors with uniform dtype but got"),
    (FLAT, "Must flatten tensors with uniform `requires_grad`"),
    ("torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py", "FSDP expects uniform original parameter dtype"),
    ("torch/distributed/tensor/_dispatch.py", "mixed torch.Tensor and DTensor"),
    ("torch/serialization.py", "Weights only load failed"),
    ("torch/amp/grad_scaler.py", "Attempting to unscale FP16 gradients"),
    ("torch/nn/modules/module.py", "copying a param with shape"),
    ("torch/utils/cpp_extension.py", "The detected CUDA version"),
    ("transformers/tokenization_utils_base.py", "you should probably activate truncation and/or padding"),
    ("accelerate/utils/environment.py", "550.40.07"),
    ("deepspeed/runtime/config.py", "Check batch related parameters. train_batch_size is not equal"),
    ("deepspeed/runtime/fp16/loss_scaler.py", "Current loss scale already at minimum"),
    ("deepspeed/ops/op_builder/builder.py", "version torch was compiled with"),
    ("deepspeed/runtime/engine.py", "The checkpoint being loaded used a DP"),
]


@pytest.mark.parametrize(("file", "words"), QUOTED)
def test_a_message_of_the_page_is_the_librarys(file: str, words: str) -> None:
    assert words.replace("`", "") in PAGE.replace("`", "")
    spec = find_spec(file.partition("/")[0])
    assert spec is not None
    assert spec.origin is not None
    with (Path(spec.origin).parents[1] / file).open("rb") as source:
        assert mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ).find(words.encode()) >= 0

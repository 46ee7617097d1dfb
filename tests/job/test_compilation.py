"""`--torch_compile` before a launch: backends, modes and what a node lacks."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.errors import ToolkitError
from toolkit.job.compilation import BACKENDS, MODES
from toolkit.job.job import Job
from toolkit.presets import load_preset
from toolkit.presets.preset_checks import check_arguments


@pytest.mark.parametrize(
    ("arguments", "words", "hint"),
    [
        ({"torch_compile_backend": "inductr"}, "--torch_compile_backend is 'inductr', expected one of", "inductor"),
        ({"torch_compile_backend": "tensorrt"}, "--torch_compile_backend is 'tensorrt'", "torch_compile_backend"),
        ({"torch_compile_mode": "max-autotun"}, "--torch_compile_mode is 'max-autotun'", "max-autotune"),
        ({"torch_compile_backend": "aot_eager", "torch_compile_mode": "default"}, "is inductor's", "leave"),
        ({"torch_compile_backend": "cudagraphs"}, "needs a GPU", "leave it out on a CPU"),
    ],
)
def test_a_value_that_cannot_compile_is_refused(arguments: dict[str, Any], words: str, hint: str) -> None:
    with pytest.raises(ToolkitError) as refused:
        check_arguments(Job.from_values(arguments), load_preset("ddp"), num_processes=2, on_cpu=True)
    assert words in refused.value.message
    assert hint in str(refused.value.hint)


def test_inductor_on_a_cpu_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ToolkitError, match="--torch_compile needs the C\\+\\+ compiler 'no-such-compiler'"):
        check_arguments(Job.from_values({"torch_compile": "true"}), load_preset("ddp"), num_processes=2, on_cpu=True)
    without_code = {"torch_compile": "true", "torch_compile_backend": "aot_eager"}
    assert check_arguments(Job.from_values(without_code), load_preset("ddp"), num_processes=2, on_cpu=True) == []


def test_zero3_is_refused_and_zero2_is_not() -> None:
    arguments = {"torch_compile": "true", "torch_compile_backend": "eager"}
    with pytest.raises(ToolkitError, match="graph ends at each linear layer") as refused:
        check_arguments(Job.from_values(arguments), load_preset("zero3"), num_processes=2, on_cpu=True)
    assert "fsdp2" in str(refused.value.hint)
    assert check_arguments(Job.from_values(arguments), load_preset("zero2"), num_processes=2, on_cpu=True) == []


def test_the_backends_and_modes_are_torchs() -> None:
    import torch._dynamo
    import torch._inductor

    assert set(BACKENDS) <= set(torch._dynamo.list_backends(exclude_tags=()))
    assert set(MODES) <= set(torch._inductor.list_mode_options())

"""QLoRA's bytes as planned, against what bitsandbytes holds; and what of 8 bits and packing is planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launching import LLAMA_8B_CONFIG, ROOT, read, toolkit
from test_models import config_file

from toolkit.errors import ToolkitError
from toolkit.installed import is_importable
from toolkit.models.read import read_model
from toolkit.plan.engine import engine_of
from toolkit.plan.job import Job, check_job
from toolkit.plan.memory import plan_memory
from toolkit.plan.of_run import job_of
from toolkit.plan.states import model_states
from toolkit.plan.weights import Weights, weights_of
from toolkit.presets import load_preset

MEASURED = read(ROOT / "benchmarks" / "results" / "quantized_bytes.json")
needs_bitsandbytes = pytest.mark.skipif(not is_importable("bitsandbytes"), reason="bitsandbytes is not installed")


def quantized(config: Path) -> tuple[Weights, int]:
    """Tensors, and bytes of all parameters in one process."""
    shape = read_model(str(config))
    weights = weights_of(shape, MEASURED["lora_r"], True)
    engine = engine_of(load_preset("single"), world_size=1, hidden_size=shape.hidden_size)
    return weights, model_states(engine, weights).parameter_bytes


@pytest.mark.parametrize("row", MEASURED["rows"], ids=lambda row: row["architecture"])
def test_the_plan_has_the_bytes_that_were_measured(row: dict[str, Any], tmp_path: Path) -> None:
    fields = {name: value for name, value in row["config"].items() if name != "model_type"}
    weights, parameter_bytes = quantized(config_file(tmp_path, row["config"]["model_type"], fields))
    assert (weights.num_quantized, parameter_bytes) == (row["held"]["num_in_4bit"], row["held"]["parameter_bytes"])


@needs_bitsandbytes
@pytest.mark.filterwarnings("ignore")
def test_bitsandbytes_holds_the_planned_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    row = MEASURED["rows"][0]
    assert __import__("quantized_bytes").held(row["config"], tmp_path) == row["held"]


def test_a_weight_of_4_bits_by_hand() -> None:
    (layer,) = read_model(str(LLAMA_8B_CONFIG)).layer_kinds
    weights = weights_of(read_model(str(LLAMA_8B_CONFIG)), 16, True)
    names = {tensor.name for tensor, _ in weights.in_4bit}
    assert names == {tensor.name for tensor in layer if "proj" in tensor.name}
    # q_proj: 4096 x 4096 weights in 262,144 blocks of 64, those in 1,024 of 256, and tables of 16 + 256 + 1 numbers
    packed, scales, second, tables = 8_388_608, 262_144, 4 * 1_024, 4 * 273
    per_element = weights.quantized_bytes / weights.num_quantized
    assert per_element == pytest.approx((packed + scales + second + tables) / 4096**2, rel=1e-3)
    # embeddings and head stay in fp32: 2 * 128256 * 4096, beside norms and adapters
    plain = weights.num_trained + weights.num_frozen - weights.num_quantized
    assert plain - weights.num_trained == 2 * 128_256 * 4_096 + 65 * 4_096


def test_a_pack_keeps_what_a_mask_makes_it_keep() -> None:
    def kept(**how: Any) -> int:
        job = Job(max_seq_length=2048, **how)
        return plan_memory(
            read_model(str(LLAMA_8B_CONFIG)), load_preset("fsdp2"), world_size=8, job=job
        ).peak.allocated_bytes

    assert kept(packing=True) > kept()
    assert kept(packing=True, per_device_train_batch_size=2) == kept(per_device_train_batch_size=2)


@pytest.mark.parametrize("optim", ["adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"])
def test_8_bit_states_are_refused_by_name(optim: str) -> None:
    shape = read_model(str(LLAMA_8B_CONFIG))
    with pytest.raises(
        ToolkitError, match=f"--optimizer {optim}: optimizer states of 8 bits are not planned"
    ) as refused:
        check_job(Job(optimizer=optim), shape)
    assert "`--optimizer fused`" in str(refused.value.hint)
    with pytest.raises(ToolkitError, match=f"--optim {optim} is not planned"):
        job_of({"optim": optim})


def test_what_is_no_adamw_is_not_planned_as_one() -> None:
    assert job_of({"optim": "adamw_torch"}).optimizer == "foreach"
    assert job_of({}).optimizer == "fused"
    with pytest.raises(ToolkitError, match="--optimizer is 'adafactor', expected one of fused, foreach"):
        check_job(Job(optimizer="adafactor"), read_model(str(LLAMA_8B_CONFIG)))
    with pytest.raises(ToolkitError, match="--optim adafactor is not planned"):
        job_of({"optim": "adafactor"})


@pytest.mark.parametrize("command", ["plan", "recommend"])
def test_a_quantized_checkpoint_is_refused_with_its_method(command: str, tmp_path: Path) -> None:
    fields = json.loads(LLAMA_8B_CONFIG.read_text()) | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    done = toolkit(command, str(tmp_path), "--world-size", "8", "--gpu", "h100")
    assert (done.returncode, done.stdout) == (2, "")
    assert "quantized already (`quantization_config`, method gptq)" in done.stderr
    assert "--load-in-4bit" in done.stderr


def test_8_bit_loading_is_no_option_and_its_neighbour_is_named() -> None:
    done = toolkit("plan", str(LLAMA_8B_CONFIG), "--world-size", "8", "--gpu", "h100", "--load-in-8bit")
    assert done.returncode == 2
    assert "--load-in-8bit" in done.stderr
    assert "--load-in-4bit" in done.stderr

"""LoRA on SmolLM2-135M-Instruct with the real data, one run per engine on two CPU ranks."""

from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, accelerate_launch, attested_ranks, losses

pytestmark = [pytest.mark.launch, pytest.mark.nightly]  # the tutorials train this model too

# Rank 8 on all linear layers of 30 layers: 8 x (in + out) each of
# q 576->576, k and v 576->192, o 576->576, gate and up 576->1536, down 1536->576.
LORA_PARAMETERS = 30 * 8 * (2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536))
TOTAL = 134_515_008 + LORA_PARAMETERS


@pytest.fixture(scope="module", params=["zero2", "fsdp2"])
def run(request: Any, tmp_path_factory: pytest.TempPathFactory, real_model: Path, faq_sharegpt: Path) -> Path:
    """A few LoRA steps under one preset."""
    folder = tmp_path_factory.mktemp("real") / str(request.param)
    words = ["--model_name_or_path", str(real_model), "--dataset", str(faq_sharegpt), "--max_seq_length", "64"]
    words += ["--lora_r", "8", "--learning_rate", "2e-3", "--lr_scheduler_type", "constant", "--max_steps", "5"]
    words += ["--per_device_train_batch_size", "2", "--save_strategy", "no", "--output_dir", str(folder)]
    config = ROOT / "accelerate_configs" / f"{request.param}.yaml"
    ended = accelerate_launch(config, *words, script="train_and_fingerprint.py")
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
    assert "data: sharegpt format, 503 rows" in ended.stdout
    return folder


def test_the_loss_of_the_real_model_falls_while_only_the_adapters_are_trained(run: Path) -> None:
    found = losses(run)
    assert len(found) == 5
    assert found[0] < 6  # a trained model, not noise: ln(49152) is 10.8
    assert sum(found[3:]) / 2 < found[0] - 0.3
    for rank in attested_ranks(run):
        assert (rank["num_trainable_params"], rank["num_params"]) == (LORA_PARAMETERS, TOTAL)
        assert rank["gradient_bytes"] == 4 * LORA_PARAMETERS // 2  # fp32, sharded by two


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft 0.21 under transformers 5.23
def test_the_adapter_loads_with_peft_and_gives_the_live_model_s_logits(run: Path, real_model: Path) -> None:
    import torch
    from peft import PeftModel
    from scripts.train_and_fingerprint import FIXED_TOKENS
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.float32)
    tokens = torch.tensor(FIXED_TOKENS)
    with torch.no_grad():
        untrained = base(input_ids=tokens).logits
        reloaded = PeftModel.from_pretrained(base, run)(input_ids=tokens).logits
    live = torch.load(run / "live_logits.pt")
    torch.testing.assert_close(reloaded, live, rtol=1e-4, atol=1e-4)
    assert (untrained - live).abs().max() > 0.1  # the adapter does something
    assert not (run / "model.safetensors").exists()  # the base is not saved again

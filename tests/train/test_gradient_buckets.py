"""Under DDP, gradients are views of its buckets: the same training without a second copy of them."""

import re
from pathlib import Path

import pytest
from launching import ROOT, accelerate_launch, nightly
from split_runs import losses_and_norms


@pytest.mark.launch
@pytest.mark.parametrize("accumulation_steps", nightly("2", "1"))
def test_gradients_are_views_of_ddps_buckets_and_the_run_is_the_same(
    accumulation_steps: str, tiny_model: Path, faq_alpaca: Path, tmp_path: Path
) -> None:
    words = ["--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--max_seq_length", "64"]
    words += ["--max_steps", "3", "--learning_rate", "1e-3", "--per_device_train_batch_size", "2", "--seed", "7"]
    words += ["--gradient_accumulation_steps", accumulation_steps, "--save_strategy", "no"]
    trained, storages = {}, {}
    for change in ("count_gradient_storages", "gradients_beside_buckets"):
        out = ["--output_dir", str(tmp_path / change)]
        ended = accelerate_launch(ROOT / "accelerate_configs" / "ddp.yaml", *words, *out, script=change)
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
        found = re.findall(r"(\d+) gradients in (\d+) storages", ended.stdout)
        assert len(found) == 2 * 3  # ranks, steps
        trained[change] = losses_and_norms(tmp_path / change)
        storages[change] = {(int(gradients), int(number)) for gradients, number in found}
    assert trained["count_gradient_storages"] == trained["gradients_beside_buckets"]
    assert all(number < gradients / 2 for gradients, number in storages["count_gradient_storages"])
    assert all(number == gradients for gradients, number in storages["gradients_beside_buckets"])

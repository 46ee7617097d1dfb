"""Under DDP, gradients are views of its buckets: the same training without a second copy of them."""

import re
from pathlib import Path

import pytest
from launching import accelerate_launch, nightly, succeeded
from split_runs import losses_and_norms


@pytest.mark.launch
@pytest.mark.parametrize("accumulation_steps", nightly("2", "1"))
def test_gradients_are_views_of_ddps_buckets_and_the_run_is_the_same(
    accumulation_steps: str, tiny_job: list[str], tmp_path: Path
) -> None:
    words = [*tiny_job, "--max_steps", "3", "--learning_rate", "1e-3", "--per_device_train_batch_size", "2"]
    words += ["--seed", "7", "--gradient_accumulation_steps", accumulation_steps, "--save_strategy", "no"]
    trained, storages = {}, {}
    for change in ("count_gradient_storages", "gradients_beside_buckets"):
        out = ["--output_dir", str(tmp_path / change)]
        ended = succeeded(accelerate_launch("ddp", *words, *out, script=change))
        found = re.findall(r"(\d+) gradients in (\d+) storages", ended.stdout)
        assert len(found) == 2 * 3  # ranks, steps
        trained[change] = losses_and_norms(tmp_path / change)
        storages[change] = {(int(gradients), int(number)) for gradients, number in found}
    assert trained["count_gradient_storages"] == trained["gradients_beside_buckets"]
    assert all(number < gradients / 2 for gradients, number in storages["count_gradient_storages"])
    assert all(number == gradients for gradients, number in storages["gradients_beside_buckets"])

"""Three faults injected into live ranks, each caught by the check meant for it: 33 were (docs/evidence/trust.md)."""

import os
import subprocess
import sys
from pathlib import Path

from launching import ROOT, nightly_launch, read

from toolkit.compare.results import load_results

FAULTY_RANKS = ROOT / "tests" / "support" / "faulty_ranks"
# Row, and the fault in its ranks -> the first difference that the verification must report, or None: parity finds it.
FAULTS = {"bf16_adam": "optimizer_dtype", "no_clipping": "gradient norm at the optimizer", "order_on_rank_1": None}


@nightly_launch
def test_an_injected_fault_fails_its_own_check_and_has_no_speed_and_a_trial_without_one_passes_all(
    tmp_path: Path, tiny_job: list[str]
) -> None:
    """`ddp` is compared with itself and with three faults, one trial each."""
    variants = [word for name in FAULTS for word in ("--variant", f"{name}=ddp")]
    options = ["--preset", "ddp", *variants, "--num-processes", "2", "--repeats", "1", "--target-interval", "0"]
    job = [*tiny_job, "--max_steps", "8", "--per_device_train_batch_size", "2", "--learning_rate", "1e-3"]
    argv = [sys.executable, "-m", "toolkit", "compare", *options, "--cpu", "--output", str(tmp_path), "--", *job]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(FAULTY_RANKS), str(ROOT)])}
    subprocess.run(argv, env=environment, stdout=subprocess.DEVNULL, check=True)
    rows = {row.trial.removesuffix("-n2"): row for row in load_results(tmp_path).rows}
    for name, fact in FAULTS.items():
        row, run = rows[name], tmp_path / rows[name].run_folder
        assert f"fault {name} acts on rank" in (run / "train.log").read_text()
        if fact is None:
            assert row.failed_parity
            assert (row.parity_message or "").startswith("batch of step ")
        else:
            assert row.status == "attestation_failed", row.message
            assert read(run / "attestation.json")["differences"][0]["fact"] == fact
        assert (row.tokens_per_second, row.rank) == (None, None)
    control = rows["ddp"]
    assert "acts on rank" not in (tmp_path / control.run_folder / "train.log").read_text()
    assert (control.status, control.parity) == ("completed", "reference")
    assert (control.tokens_per_second or 0) > 0

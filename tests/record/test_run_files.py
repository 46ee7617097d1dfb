"""The seconds of a save beside the notice that clouds give."""

import pytest

from toolkit.record.run_files import SaveRecord, describe_slowest_save

ON_SLURM = {"SLURM_JOB_ID": "7"}


def save(step: int, seconds: float | None, **more: float) -> SaveRecord:
    return SaveRecord(kind="checkpoint", step=step, seconds=seconds, **more)


@pytest.mark.parametrize(
    ("environment", "warns"),
    [
        ({}, False),  # a laptop
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "TORCHELASTIC_MAX_RESTARTS": "0"}, False),  # one node
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, True),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "TORCHELASTIC_MAX_RESTARTS": "3"}, True),
        *[({name: "7"}, True) for name in ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "SKYPILOT_TASK_ID")],
    ],
)
def test_a_save_that_is_longer_than_the_shortest_notice_is_a_warning_where_a_node_may_be_taken_back(
    environment: dict[str, str], warns: bool
) -> None:
    described = describe_slowest_save([save(10, 12.0), save(20, 41.0), save(30, 13.0)], environment)
    assert (described is not None) is warns
    if described is not None:
        assert described.startswith("warning: checkpoint-20 took 41.0 s to save; ")
        assert "30 s (Google Cloud, Azure) to 120 s (AWS)" in described


def test_the_fingerprint_counts_and_the_wait_for_an_earlier_save_does_not() -> None:
    described = describe_slowest_save([save(10, 20.0, stall_seconds=75.0, waited_seconds=35.0)], ON_SLURM)
    assert described is not None
    assert described.startswith("warning: checkpoint-10 took 40.0 s to save; ")


def test_a_fast_save_and_no_complete_checkpoint_are_not_mentioned() -> None:
    assert describe_slowest_save([save(10, 29.0)], ON_SLURM) is None
    assert describe_slowest_save([], ON_SLURM) is None
    unfinished = [save(10, None), SaveRecord(kind="model", step=10, seconds=50.0)]
    assert describe_slowest_save(unfinished, ON_SLURM) is None

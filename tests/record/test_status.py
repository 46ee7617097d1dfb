"""Each status of a run means one exit code."""

from __future__ import annotations

import pytest

from toolkit.record import status


@pytest.mark.parametrize("name", status.STATUSES)
def test_a_status_means_one_exit_code(name: str) -> None:
    expected = {"completed": 0, "out_of_memory": 3, "host_out_of_memory": 3}.get(name, 1)
    assert status.exit_code_of(name) == expected
    assert status.exit_code_of(name, invalid_input=True) == 2

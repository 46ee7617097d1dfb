"""Bash and torchrun behave as the lint rules about several nodes say."""

from __future__ import annotations

import subprocess

import pytest
from torch.distributed.run import config_from_args, parse_args

# Two nodes, as srun starts a command on them.
SRUN = 'srun() { SLURM_PROCID=0 "$@"; SLURM_PROCID=1 "$@"; }; SLURM_PROCID=0; '


def output_of(script: str) -> list[str]:
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=20, check=True)
    return ended.stdout.split()


@pytest.mark.parametrize(
    ("command", "ranks"), [('bash -c "echo $SLURM_PROCID"', ["0", "0"]), ("bash -c 'echo $SLURM_PROCID'", ["0", "1"])]
)
def test_every_node_is_rank_0_where_the_first_one_expands(command: str, ranks: list[str]) -> None:
    assert output_of(f"{SRUN} srun {command}") == ranks


def test_a_head_that_is_not_found_becomes_localhost() -> None:
    assert output_of("head=$(scontrol-that-is-missing 2>/dev/null || echo localhost); echo $head") == ["localhost"]


def test_torchrun_starts_one_node_unless_it_is_told_more() -> None:
    assert config_from_args(parse_args(["train.py"]))[0].max_nodes == 1


def test_torchrun_on_two_nodes_without_an_endpoint_meets_at_localhost_with_rank_0() -> None:
    config = config_from_args(parse_args(["--nnodes", "2", "train.py"]))[0]
    assert (config.rdzv_endpoint.partition(":")[0], config.rdzv_configs["rank"]) == ("127.0.0.1", 0)


def test_torchrun_with_a_head_and_no_rank_has_rank_0() -> None:
    config = config_from_args(parse_args(["--nnodes", "2", "--master-addr", "node1", "train.py"]))[0]
    assert (config.rdzv_endpoint.partition(":")[0], config.rdzv_configs["rank"]) == ("node1", 0)


def test_torchrun_has_the_rendezvous_id_none_no_restarts_and_30_s_to_stop() -> None:
    config = config_from_args(parse_args(["--nnodes", "1:2", "--rdzv-backend", "c10d", "train.py"]))[0]
    assert (config.run_id, config.max_restarts, config.shutdown_timeout) == ("none", 0, 30)

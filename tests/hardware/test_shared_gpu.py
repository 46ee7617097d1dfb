"""Several real ranks on one GPU: what each rank's environment is, and which NCCL decides it. The GPUs are names."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import PYTHON_PATH, accelerate_launch, nightly, nightly_launch, read, run_captured, succeeded

from toolkit.errors import ToolkitError
from toolkit.hardware.shared_gpu import WAYS, rank_variables, refused_by_nccl, sharing_ranks

SOCKETS = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_NET", "NCCL_NVLS_ENABLE", "NCCL_MNNVL_ENABLE")


def launched(rank: int, *, ranks_per_gpu: int = 2, size: int = 4, **changes: str) -> dict[str, str]:
    """What torchrun gives a rank of one node, with two GPUs to see."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    place = {"CUDA_VISIBLE_DEVICES": "0,1", "TOOLKIT_RANKS_PER_GPU": str(ranks_per_gpu)}
    return {name: str(number) for name, number in numbers.items()} | place | changes


@pytest.mark.parametrize(("nccl", "way"), [((2, 29, 7), "hosts"), (None, "hosts"), ((2, 30, 7), "one-host")])
def test_each_rank_is_a_node_of_its_own_with_one_device(nccl: tuple[int, ...] | None, way: str) -> None:
    ranks = [rank_variables(launched(rank), nccl=nccl) for rank in range(4)]
    assert [rank["CUDA_VISIBLE_DEVICES"] for rank in ranks] == ["0", "0", "1", "1"]
    assert {(rank["LOCAL_RANK"], rank["LOCAL_WORLD_SIZE"]) for rank in ranks} == {("0", "1")}
    place = {"CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
    assert {frozenset(rank.keys() - place) for rank in ranks} == {frozenset(WAYS[way])}
    if way == "hosts":
        assert len({rank["NCCL_HOSTID"] for rank in ranks}) == 4
        assert {tuple(rank[name] for name in SOCKETS) for rank in ranks} == {("lo", "lo", "Socket", "0", "0")}
    else:
        assert {rank["NCCL_MULTI_RANK_GPU_ENABLE"] for rank in ranks} == {"1"}


def test_what_the_user_has_set_stays_and_a_process_of_a_rank_is_where_the_rank_is() -> None:
    environment = launched(3, NCCL_SOCKET_IFNAME="eth0", TOOLKIT_RANKS_PER_GPU_BY="hosts")
    environment |= rank_variables(environment, nccl=(2, 30, 7))
    assert (environment["NCCL_SOCKET_IFNAME"], environment["NCCL_HOSTID"]) == ("eth0", "toolkit-rank-3")
    assert environment | rank_variables(environment, nccl=(2, 30, 7)) == environment


def test_a_process_that_is_no_rank_and_ranks_with_gpus_of_their_own_are_left_alone() -> None:
    assert rank_variables(launched(1, ranks_per_gpu=1), nccl=None) == {}
    alone = {"TOOLKIT_RANKS_PER_GPU": "2", "CUDA_VISIBLE_DEVICES": "0"}  # `single`, the fork server, a launcher
    assert (rank_variables(alone, nccl=None), sharing_ranks(alone)) == ({}, None)


@pytest.mark.parametrize(
    ("environment", "message", "hint"),
    [
        (launched(4, size=8), "8 processes with 2 ranks per GPU need 4 GPUs, and 2 are visible", "`--ranks-per-gpu 4`"),
        (launched(0, CUDA_VISIBLE_DEVICES=""), "need 2 GPUs, and 0 are visible here", "leave `--ranks-per-gpu` out"),
        (launched(0, GROUP_WORLD_SIZE="2"), "--ranks-per-gpu is for the GPUs of one node", "leave it out"),
        (launched(0, TOOLKIT_RANKS_PER_GPU="x"), "TOOLKIT_RANKS_PER_GPU is 'x', expected a whole", "--ranks-per-gpu 2"),
        (launched(0, TOOLKIT_RANKS_PER_GPU="0"), "TOOLKIT_RANKS_PER_GPU is '0', expected a whole", "--ranks-per-gpu 2"),
        (
            launched(0, TOOLKIT_RANKS_PER_GPU_BY="mps"),
            "TOOLKIT_RANKS_PER_GPU_BY is 'mps', expected one-host or hosts",
            "",
        ),
    ],
)
def test_ranks_that_cannot_be_placed_are_refused(environment: dict[str, str], message: str, hint: str) -> None:
    with pytest.raises(ToolkitError) as refused:
        rank_variables(environment, nccl=None)
    assert message in refused.value.message
    assert hint in (refused.value.hint or "")


@pytest.mark.parametrize(
    "last",
    [  # of the libraries 2.29.7 and 2.30.7
        "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000",
        "Last error:\nMultiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this"
        " configuration.",
    ],
)
def test_nccls_refusal_says_what_to_do(last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused_by_nccl("unhandled cuda error") is None
    error = refused_by_nccl(f"NCCL error in: ProcessGroupNCCL.cpp:3690, invalid usage\n{last}")
    assert str(error).count("\n") == 1
    assert "`--ranks-per-gpu 2`" in (error.hint or "")
    for name, text in launched(1).items():
        monkeypatch.setenv(name, text)
    assert "TOOLKIT_RANKS_PER_GPU_BY=hosts" in (getattr(refused_by_nccl(last), "hint", None) or "")


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_nccls_version_is_that_of_the_library_in_torchs_package_and_torch_is_not_imported(tmp_path: Path) -> None:
    library = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    source = tmp_path / "nccl.c"
    source.write_text("int ncclGetVersion(int *version) { *version = 23007; return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    code = "import sys; from toolkit.hardware.shared_gpu import nccl_version as v; print(v(), 'torch' in sys.modules)"
    path = os.pathsep.join([PYTHON_PATH, str(tmp_path)])
    ended = run_captured([sys.executable, "-c", code], os.environ | {"PYTHONPATH": path})
    assert ended.stdout.strip() == "(2, 30, 7) False", ended.stderr


@pytest.mark.parametrize("words", [["toolkit.train", "--max_steps", "1"], ["toolkit.observe", "mine.py"]])
def test_a_rank_without_a_gpu_to_share_ends_in_two_lines(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    environment = os.environ | launched(0, CUDA_VISIBLE_DEVICES="", PYTHONPATH=PYTHON_PATH)
    ended = run_captured([sys.executable, "-m", *words], environment, cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.splitlines() == [
        "error: 4 processes with 2 ranks per GPU need 2 GPUs, and 0 are visible here",
        "  hint: leave `--ranks-per-gpu` out",
    ]


# -- real ranks; on a CPU torch does not look at the devices


@pytest.mark.launch
@pytest.mark.cold_start  # the fork server sees no device
@pytest.mark.parametrize("preset", nightly("ddp", "zero3", "fsdp2"))
def test_ranks_that_are_nodes_of_their_own_train_together_and_show_no_speed(
    preset: str, tmp_path: Path, tiny_job: list[str]
) -> None:
    words = [*tiny_job, "--per_device_train_batch_size", "2", "--max_steps", "4", "--output_dir", str(tmp_path / "run")]
    variables = {"CUDA_VISIBLE_DEVICES": "0", "TOOLKIT_RANKS_PER_GPU": "2"}
    ended = succeeded(accelerate_launch(preset, *words, variables=variables, cold=True))
    run, ranks = read(tmp_path / "run" / "run.json"), read(tmp_path / "run" / "attestation.json")["ranks"]
    assert (run["ranks_per_gpu"], run["world_size"], len(ranks)) == (2, 2, 2)
    assert len({rank["sharding"] for rank in ranks}) == 1
    measured = run["measured"]
    assert (measured["steps"], measured["tokens_per_second"], measured["step_seconds_median"]) == (4, None, None)
    assert measured["last_loss"] > 0
    assert re.search(r"^done: 4 steps, loss .*; speeds n/a: 2 ranks share a GPU;", ended.stdout, re.MULTILINE)
    assert "tokens/s" not in ended.stdout


SCRIPT = """
import os
import pathlib
import time
names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "NCCL_HOSTID")
print("rank:", *(os.environ.get(name) for name in names), flush=True)
pathlib.Path("said-" + os.environ["RANK"]).touch()
while len(list(pathlib.Path().glob("said-*"))) < 4:  # the launcher ends all ranks with the first that ends
    time.sleep(0.1)
"""


@nightly_launch
def test_a_script_of_ones_own_finds_its_rank_placed_under_any_launcher(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT)
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "4", "-m", "toolkit.observe", "--output-dir"]
    words += [str(tmp_path / "run"), "--ranks-per-gpu", "2", str(script)]
    environment = os.environ | {
        "PYTHONPATH": PYTHON_PATH,
        "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b",
        "OMP_NUM_THREADS": "1",
    }
    ended = run_captured([sys.executable, *words], environment, cwd=tmp_path)
    lines = sorted(line for line in ended.stdout.splitlines() if line.startswith("rank:"))
    assert lines == [f"rank: {rank} 0 1 GPU-{'aabb'[rank]} toolkit-rank-{rank}" for rank in range(4)], ended.stderr

"""axolotl, LLaMA-Factory and ms-swift run observed, each in an environment of its own and without a change.

The environments are built once, in the cache; `benchmarks/peer_jobs/environments.py` has their versions.
"""

import functools
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT, read, run_captured

sys.path[:0] = [str(ROOT / "benchmarks")]

from peer_jobs import environments  # noqa: E402
from peer_jobs.commands import PROGRAMS, environment_of  # noqa: E402
from peer_jobs.job import Job, Setting, prepare  # noqa: E402

from toolkit.files.paths import cache_folder  # noqa: E402
from toolkit.record.folder import RunFolder  # noqa: E402
from toolkit.record.measurements import read_rows  # noqa: E402

pytestmark = [pytest.mark.launch, pytest.mark.nightly]

ENVIRONMENTS = (cache_folder() / "peer-environments").resolve()
# Program -> the module that it starts on each rank.
MODULES = {"axolotl": "axolotl.cli.train", "llamafactory": "llamafactory.launcher", "ms-swift": "swift.cli.pt"}
# Without bf16, ddp's YAML still computes in it, and the presets of DeepSpeed do not. With bf16, axolotl also loads the
# weights in it, which ddp's specification contradicts.
COMPARED = {"axolotl": ("fp32", "zero1", "zero2")}
IN_BF16 = ("bf16", "ddp", "zero2")


@functools.cache
def reason_unbuilt(program: str) -> str | None:
    """Build a program's environment unless it is there, and return why pip cannot, or None."""
    try:
        environments.build(program, ENVIRONMENTS)
    except environments.Unbuildable as reason:
        return str(reason)
    environments.compile_ops(program, ENVIRONMENTS)
    return None


def run(program: str, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m toolkit` in the program's environment, on its own job file or words."""
    if (reason := reason_unbuilt(program)) is not None:
        pytest.skip(f"pip cannot build the environment of {program}: {reason}")
    python = environments.python_of(program, ENVIRONMENTS)
    precision, *_ = COMPARED.get(program, IN_BF16)
    setting = Setting(steps=3, untimed_steps=1, max_length=32, precision=precision)
    model, rows = prepare(folder / "job", setting)
    # Without an engine: the preset is the toolkit's.
    job = Job(preset="ddp", method="full", setting=setting, model=model, rows=rows)
    launch = PROGRAMS[program](job, str(python), folder)
    for name, text in launch.files.items():
        (folder / name).write_text(text)
    words = launch.argv[launch.argv.index("pt") + 1 :] if program == "ms-swift" else [str(folder / "job.yaml")]
    extensions = environments.extensions_of(program, ENVIRONMENTS)
    variables = environment_of(launch, job, python=python, extensions=extensions, folder=folder)
    del variables["PEER_STEPS_FOLDER"]
    own = [*command, "--num-processes", "2", "--cpu", "--module", MODULES[program], "--output-dir", str(folder / "run")]
    environment = variables | {"PYTHONPATH": str(ROOT)}
    return run_captured([str(python), "-m", "toolkit", *own, "--", *words], environment, cwd=folder)


@pytest.mark.parametrize("preset", ["ddp", "zero2"])
@pytest.mark.parametrize("program", MODULES)
def test_another_programs_training_is_verified_under_a_preset(program: str, preset: str, tmp_path: Path) -> None:
    ended = run(program, tmp_path, "train", "--preset", preset)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    ranks = [read_rows(RunFolder(tmp_path / "run").rank_rows(rank)) for rank in (0, 1)]
    assert [[row.step for row in rows] for rows in ranks] == [[1, 2, 3], [1, 2, 3]]
    assert len({row.batch_sha256 for rows in ranks for row in rows}) == 6
    assert read(tmp_path / "run" / "attestation.json")["verdict"] == "attested"


@pytest.mark.parametrize("program", MODULES)
def test_another_programs_training_is_the_same_under_two_presets(program: str, tmp_path: Path) -> None:
    _, first, second = COMPARED.get(program, IN_BF16)
    words = ["--preset", first, "--preset", second, "--stop-after-steps", "3", "--repeats", "1"]
    ended = run(program, tmp_path, "compare", *words)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    rows = read(tmp_path / "run" / "results.json")["rows"]
    assert [row["status"] for row in rows] == ["completed", "completed"], [row["message"] for row in rows]
    assert [row["parity"] for row in rows] == ["reference", "agrees"], [row["parity_message"] for row in rows]

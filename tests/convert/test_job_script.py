"""How much of a shell script the rules see, and that every job file of ours has no finding."""

import subprocess
from pathlib import Path

import pytest
from cluster_jobs import run_cluster, write_inputs
from job_scripts import GOOD, TASK

from toolkit.convert.job_script import read_script
from toolkit.errors import ToolkitError
from toolkit.lint.check import lint_paths
from toolkit.lint.document import read_text


def test_a_call_has_the_options_of_its_continued_lines_and_the_most_nodes_of_a_range_count() -> None:
    (call,) = read_script('a=1\nsrun torchrun \\\n  --nnodes=2 --rdzv_id "$ID" \\\n  train.py --bf16\n').launches
    assert (call.tool, call.line) == ("torchrun", 2)
    assert call.options == {"nnodes": "2", "rdzv-id": "$ID"}
    assert (call.script, call.arguments, call.is_complete) == ("train.py", {"bf16": (None, 4)}, True)
    assert [read_script(f"#SBATCH {words}\n").nodes for words in ("-N 4", "--nodes=1-3", "--time=5")] == [4, 3, None]


@pytest.mark.parametrize(
    ("text", "script", "arguments", "is_complete"),
    [
        ("torchrun -m a.b --lr=1 --x 1 2\n", "a.b", {"lr": "1", "x": ["1", "2"]}, True),
        ("A='--bf16 --lr 1'\ntorchrun t.py $A\n", "t.py", {"bf16": None, "lr": "1"}, True),
        ('A=(--lr 1)\nA+=(--b "x y")\ntorchrun t.py "${A[@]}"\n', "t.py", {"lr": "1", "b": "x y"}, True),
        ("torchrun t.py --lr 1 $EXTRA_ARGS\n", "t.py", {"lr": "1"}, False),
        ("torchrun t.py --lr $LR | tee log\n", "t.py", {"lr": "$LR"}, True),
        ("trl sft --config a.yaml --lr 1\n", "trl sft", {"config": "a.yaml", "lr": "1"}, True),
        (
            "N=$(python -c 'print(len(\"a\"))')\nLR=1\nLR=2\ntorchrun t.py --lr $LR > log 2>&1\n",
            "t.py",
            {"lr": "2"},
            True,
        ),
        (
            "B=2\nG=$((64/(B*4)))\ntorchrun t.py --a $G --b $((8 % 3)) --c $(expr 16 / $B) --d $((1/0)) --e $((N*2))\n",
            "t.py",
            {"a": "8", "b": "2", "c": "8", "d": "$((1/0))", "e": "$((N*2))"},
            True,
        ),
        ("accelerate-launch --quiet t.py --a 'b; c' && echo --d\n", "t.py", {"a": "b; c"}, True),
    ],
)
def test_the_words_behind_a_script_are_split_as_bash_and_the_launcher_split_them(
    text: str, script: str, arguments: dict[str, object], is_complete: bool
) -> None:
    (call,) = read_script(text).launches
    assert (call.script, call.is_complete) == (script, is_complete)
    assert {name: value for name, (value, _) in call.arguments.items()} == arguments


ENDS_IN_THE_MIDDLE = ("", "#", "'", '"', "<<", "<<'", "<<A", "<<A\n", "\\", "a\\\n", "$(", "#SBATCH", "#SBATCH --")


@pytest.mark.parametrize(
    ("text", "tools"),
    [
        ("python3 -m torch.distributed.run x.py\n", ["torchrun"]),
        ('LAUNCH="accelerate launch --num_machines 2"\nsrun bash -c "$LAUNCH x.py"\n', ["accelerate"]),
        ("deepspeed --hostfile hosts x.py\n", ["deepspeed"]),
        ("# torchrun x.py\npip install deepspeed\nls deepspeed/\n", []),
        ("srun bash -c '\n  # torchrun a.py\n  torchrun b.py'\n", ["torchrun"]),
        *((text, []) for text in ENDS_IN_THE_MIDDLE),
    ],
)
def test_launchers_are_found_outside_of_comments(text: str, tools: list[str]) -> None:
    assert [call.tool for call in read_script(text).launches] == tools


@pytest.mark.parametrize(
    ("text", "expands"),
    [
        ("echo $X", True),
        ('echo "$X"', True),
        ("echo '$X'", False),
        ("echo \\$X", False),
        ("# it's $X", False),
        ("cat <<END\n$X\nEND", True),
        ("cat <<'END'\nit's $X\nEND", False),
        ("cat <<-'END'\n\tit's\n\tEND\necho $X", True),
        ('echo "it\'s" $X', True),
        ("n=${#nodes[@]}; echo $X", True),
    ],
)
def test_what_the_shell_expands_is_what_bash_expands(text: str, expands: bool) -> None:
    assert read_script(text).expands_at(text.index("$X")) is expands
    ended = subprocess.run(["bash", "-c", text], env={"X": "found"}, capture_output=True, timeout=20, check=True)
    assert (b"found" in ended.stdout) is expands


def test_lines_of_a_skypilot_task_are_those_of_the_file() -> None:
    assert read_text(TASK, "task.yaml").script.launches[0].line == 5
    assert read_text("num_nodes: 1\nrun: torchrun train.py\n", "task.yaml").script.launches[0].line == 2


def test_a_script_that_trains_nothing_is_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "setup.sh").write_text("#!/bin/bash\npip install deepspeed\n")
    (tmp_path / "job.sbatch").write_text(GOOD)
    with pytest.raises(ToolkitError, match="or a job script"):
        lint_paths([tmp_path / "setup.sh"])
    assert [Path(file).name for file in lint_paths([tmp_path]).files] == ["job.sbatch"]


@pytest.mark.parametrize("nodes", ["1", "2", "1:2"])
def test_the_job_files_of_toolkit_cluster_have_no_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], nodes: str
) -> None:
    training, hosts = write_inputs(tmp_path), [f"--host=node{number}" for number in range(int(nodes[-1]))]
    engines = {"slurm": [], "ssh": hosts, "skypilot": ["--gpu", "H100", "--mount", f"s3://b={tmp_path}"]}
    for engine, options in engines.items():
        if engine == "skypilot" and nodes == "1:2":
            continue  # refused
        file = tmp_path / {"slurm": "job.sbatch", "ssh": "job.sh", "skypilot": "task.yaml"}[engine]
        words = [engine, "--preset", "zero2", "--nodes", nodes, *options, "--preflight", "--output", str(file)]
        code, _, errors = run_cluster([*words, "--", *training], capsys)
        assert code == 0, errors
        assert lint_paths([file]).findings == []


def test_a_launcher_that_a_variable_names_is_read_where_the_variable_is_used() -> None:
    script = read_script(
        'RUN="accelerate launch --num_processes 4"\nARRAY=(torchrun --nnodes 2)\n'
        'srun bash -c "$RUN train.py --bf16"\n"${ARRAY[@]}" other.py\necho "$RUN"\n'
    )
    calls = [(call.tool, call.line, call.script, list(call.arguments)) for call in script.launches]
    assert calls == [("accelerate", 3, "train.py", ["bf16"]), ("torchrun", 4, "other.py", [])]
    assert script.launches[0].options == {"num-processes": "4"}
    assert "srun" in script.launches[0].before
    (call,) = read_script('ARGS=" \\\n  --bf16 \\\n  --seed 1"\ntorchrun x.py $ARGS\n').launches
    assert call.arguments == {"bf16": (None, 2), "seed": ("1", 3)}  # on their own lines


@pytest.mark.parametrize(
    ("line", "before"),
    [
        ("A=1 python x.py && B='2; 3' ", " B='2; 3' "),
        ("export A=1; C=1 echo hi || B=2 ", "export A=1; B=2 "),
        ("cd x; srun -N 2 bash -c 'cd y && A=1 ", " srun -N 2 bash -c 'cd y && A=1 "),
    ],
)
def test_the_earlier_commands_of_a_line_are_not_in_front_of_a_launcher(line: str, before: str) -> None:
    assert read_script(f"{line}torchrun train.py\n").launches[0].before == before

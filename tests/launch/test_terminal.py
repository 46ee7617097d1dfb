"""A terminal gets one live line and no noise of libraries; a pipe gets plain lines. On a real pseudo-terminal."""

import re
import subprocess
import sys
from pathlib import Path

from launching import ROOT, cpu_environment, nightly_launch, read
from terminals import on_a_terminal

from toolkit.launch.terminal import LiveLine, OutputFilter
from toolkit.record.timeline import add_moment

STEPS = [f"step {step}/2  loss 2.0000  1.00 s  100 tokens/s  peak 1.00 GiB RSS" for step in (1, 2)]
SHOW = f"""
from toolkit.launch.terminal import LiveLine
with LiveLine() as live:
    for line in {["data: 2 rows", *STEPS, "done: 2 steps"]!r}:
        live.print(line)
        live.live.refresh()
"""


def on_wide_terminal(command: list[str], **variables: str) -> str:
    return on_a_terminal(command, cpu_environment() | {"TERM": "xterm"} | variables, columns=200)


def test_on_a_terminal_each_step_replaces_the_one_before() -> None:
    written = on_wide_terminal([sys.executable, "-c", SHOW])
    *lines, live, end = written.split("\n")
    assert "\x1b[1A\x1b[2K" in end  # the line above is erased: the live one
    lines = [line.rpartition("\x1b[2K")[2] for line in lines]
    assert [re.sub(r"\x1b\[[?0-9]*[A-Za-z]|\r", "", line) for line in lines] == ["data: 2 rows", "done: 2 steps"]
    assert all(step in written for step in STEPS)
    assert STEPS[1] in live


def test_a_dumb_terminal_and_a_pipe_get_plain_lines() -> None:
    ended = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, cwd=ROOT, check=True)
    for written in (ended.stderr, on_wide_terminal([sys.executable, "-c", SHOW], TERM="dumb")):
        assert written.splitlines() == ["data: 2 rows", *STEPS, "done: 2 steps"]


def test_the_live_line_names_the_phase_and_keeps_the_time_left_at_80_columns(tmp_path: Path) -> None:
    live = LiveLine(tmp_path / "timeline.jsonl")
    live.console.width = 80
    assert str(live._line()) == "0 s  importing the libraries"
    add_moment(live.timeline or Path(), "load")
    assert live.describe(87) == "1 min 27 s  loading the model"
    add_moment(live.timeline or Path(), "train")
    assert live.describe(88) == "1 min 28 s  in the first step"
    live.text = "step 3/40  loss 2.0000  grad_norm 1.234  1.00 s  100 tokens/s  peak 1.00 GiB RSS  35 s left"
    assert str(live._line()) == "0 s  step 3/40  35 s left  loss 2.0000  grad_norm 1.234  1.00 s  100 tokens/s"
    add_moment(live.timeline or Path(), "end")
    assert live.describe(9) == "9 s  ending the processes"


def test_deprecations_of_libraries_are_counted_and_other_warnings_are_shown_once(tmp_path: Path) -> None:
    printed: list[str] = []
    shown = OutputFilter(printed.append)
    library, own = "/venv/lib/site-packages/torch/distributed/c10d.py:7", "/home/me/train.py:3"
    for _ in range(3):
        shown(f"{library}: FutureWarning: `all_gather_base` is deprecated")
        shown("  warnings.warn(")
        shown(f"{own}: UserWarning: the rate is high")
        shown("  warn('the rate is high')")
    shown.summarise(tmp_path / "train.log")
    assert printed == [
        f"{own}: UserWarning: the rate is high",
        "  warn('the rate is high')",
        f"left out: 3 FutureWarnings, 2 UserWarnings; see {tmp_path / 'train.log'}",
    ]


def test_lines_that_look_like_an_error_and_are_none_are_left_out() -> None:
    printed: list[str] = []
    shown = OutputFilter(printed.append)
    shown("Failed to load CPU gemm_4bit_forward from kernels-community: No module named 'kernels'. Please make sure")
    shown("DeepSpeed deepspeed.ops.comm.deepspeed_shm_comm_op built successfully")
    shown("RuntimeError: DeepSpeed op cpu_adam failed to build")
    shown("{'loss': '8.318', 'grad_norm': '4.258', 'learning_rate': '5e-05', 'epoch': '0.0625'}")  # also from all ranks
    assert printed == ["RuntimeError: DeepSpeed op cpu_adam failed to build"]


def test_redrawn_bars_are_left_out_and_what_follows_one_is_shown() -> None:
    printed: list[str] = []
    shown = OutputFilter(printed.append)
    shown("Tokenizing train dataset:   0%|          | 0/16 [00:00<?, ? examples/s]")
    shown("Generating train split: 16 examples [00:00, 5526.09 examples/s]")
    shown(" 17%|█▋        | 1/6 [00:04<00:22,  4.46s/it]verified: zero3, 2 ranks")
    shown("100%|██████████| 1/1 [00:00<00:00, 1065.08it/s]\x1b[A")
    shown("   \x1b[Astep 2/30  loss 10.78")
    shown("{'loss': '0.6931', 'names': ['a|b']}")
    shown("")
    assert printed == ["verified: zero3, 2 ranks", "step 2/30  loss 10.78", "{'loss': '0.6931', 'names': ['a|b']}"]


@nightly_launch
def test_a_rate_far_too_high_ends_as_diverged_on_a_live_terminal(
    tiny_model: Path, faq_alpaca: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "toolkit", "train", "--preset", "ddp", "--num-processes", "2", "--cpu", "--"]
    command += ["--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--max_seq_length", "256"]
    command += ["--output_dir", str(tmp_path / "run"), "--max_steps", "8", "--learning_rate", "1e6"]
    written = on_wide_terminal(command)
    assert re.search(r"\r\x1b\[2K\d+ s  step 8/8  loss [\d.]+  grad_norm 0  ", written)
    assert "done, but it may have diverged: 8 steps, " in written
    assert re.fullmatch(
        r"grad_norm was exactly 0 in steps \d to 8", read(tmp_path / "run" / "run.json")["warnings"][-1]
    )

"""Options of `toolkit simulate` that are refused, by name, before anything is simulated."""

import pytest
from command_line import run_command
from launching import LLAMA_8B_CONFIG

PIPELINE, FAILURES = "pipeline --stages 4 --micro-batches 8", "failures --gpus 1024"
TIMES, MODEL = "--forward-ms 10 --backward-ms 15", f"--model {LLAMA_8B_CONFIG} --gpu h100"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (f"{PIPELINE} --stages 0", "--stages is 0, expected 1 to 4,096"),
        (f"{PIPELINE} --schedule 1f2b", "--schedule is '1f2b', expected gpipe, 1f1b"),
        (f"{PIPELINE} --forward-ms -3 --backward-ms 3", "--forward-ms is -3.0, expected more than 0, at most 10,000"),
        (f"{PIPELINE} --stages 4096 --micro-batches 1048576 --schedule gpipe", "operations are too many"),
        (f"{PIPELINE} --micro-batches 3 --schedule 1f1b", "--micro-batches is 3, but 1f1b on 4 stages needs 4"),
        (f"{PIPELINE} --micro-batches 9 --schedule interleaved_1f1b", "runs them in 2 equal rounds"),
        (f"{PIPELINE} --forward-ms 3", "--backward-ms is missing"),
        (f"{PIPELINE} {TIMES} --transfer-ms inf", "--transfer-ms is inf"),
        (f"{PIPELINE} --num-layers 3", "3 layers are too few for 4 stages"),
        (f"{PIPELINE} --num-layers 12 --schedule interleaved_1f1b", "12 layers are not divisible by 4 stages of 2"),
        (f"{PIPELINE} --gpu h100", "--gpu has no effect without --model"),
        (f"{PIPELINE} {MODEL} --forward-ms 3", "--forward-ms has no effect with --model"),
        (f"{PIPELINE} {MODEL} --tp 3", "--tp 3 does not work for this model: 3 does not divide its 32 attention heads"),
        (f"{PIPELINE} {MODEL} --method grpo", "--method grpo generates"),
        (f"{FAILURES} --gpus 100000000", "--gpus is 100000000, expected 1 to 10,000,000"),
        (f"{FAILURES} --failures-per-1000-node-days nan", "--failures-per-1000-node-days is nan"),
        (f"{FAILURES} --restart-minutes -5", "--restart-minutes is -5.0, expected 0 to 100,000"),
        (f"{FAILURES} --spare-nodes 3", "--spare-nodes has no effect without --repair-hours"),
        (f"{FAILURES} --gpus 10000000", "2,965,625 failures in 1 x 365 days are too many to simulate"),
        (f"{FAILURES} --run-folder no-such-run", "no-such-run is no run folder"),
        (f"{FAILURES} --run-folder x --checkpoint-seconds 3", "--checkpoint-seconds has no effect with --run-folder"),
        ("stragglers --workers 1", "--workers is 1, expected 2 to"),
        ("stragglers --workers 4 --backup-workers 4", "--backup-workers is 4, expected 1 to 3"),
        ("stragglers --distribution gauss", "--distribution is 'gauss', expected"),
        ("stragglers --distribution exponential --spread 1.5", "--spread is 1.5, expected 0 to 1"),
        ("stragglers --workers 1000 --steps 1001", "more than 1,000,000 batches"),
        ("stragglers --run-folder run --spread 0.1", "--run-folder and --spread both"),
        ("stragglers --run-folder no-such-run", "no-such-run has no timed step"),
        ("stragglers --gpu h100", "--gpu has no effect"),
        (f"stragglers --workers 4 {MODEL} --gpus-per-node 3", "4 GPUs do not fill nodes of 3"),
    ],
)
def test_invalid_input_is_refused_by_name(words: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_command(["simulate", *words.split()], capsys)
    assert (code, out) == (2, "")
    assert named in err
    assert err.startswith("error: ")

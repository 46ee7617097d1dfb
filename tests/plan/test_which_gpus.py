"""`toolkit plan MODEL` without a GPU: which GPUs, how many, and what they cost."""

import pytest
from command_line import json_of, run_command
from launching import LLAMA_8B_CONFIG

WORDS = ["plan", str(LLAMA_8B_CONFIG), "--per-device-train-batch-size", "1"]
Capsys = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_each_gpu_has_the_fewest_that_fit_and_half_of_them_do_not(capsys: Capsys) -> None:
    found = json_of(WORDS, capsys)["plans"]
    assert len({row["gpu"] for row in found}) == len(found) > 10
    assert {row["verdict"] for row in found} == {"fits"}
    assert not any("offload" in row["preset"] for row in found)
    few = next(row for row in found if row["gpu"] == "h100-sxm")
    where = ["--gpu", "h100", "--num-processes", str(few["world_size"] // 2)]
    halved = json_of([*WORDS, *where], capsys)["plans"]
    assert [row["preset"] for row in halved if row["verdict"] == "fits" and "offload" not in row["preset"]] == []
    totals = [row["world_size"] * (row["planned_peak_bytes"] + row["headroom_bytes"]) for row in found]
    assert totals == sorted(totals)


def test_with_prices_the_cheapest_token_comes_first_and_gpus_without_one_are_left_out(capsys: Capsys) -> None:
    prices = [word for price in ("l40s=0.1", "h100=99", "a100-80gb=1") for word in ("--price-per-gpu-hour", price)]
    found = json_of([*WORDS, *prices], capsys)
    assert [row["gpu"] for row in found["plans"]] == ["l40s", "a100-80gb", "h100-sxm"]
    costs = [row["dollars_per_million_tokens"] for row in found["plans"]]
    assert costs == sorted(costs)
    assert found["summary"].startswith("cheapest of those with a price: ")


def test_the_table_names_the_gpus_and_fits_a_terminal(capsys: Capsys) -> None:
    code, out, err = run_command([*WORDS, "--dataset-tokens", "1000000"], capsys)
    assert (code, err) == (0, "")
    assert out.startswith("the least memory in all: ")
    table, finish = (block.splitlines() for block in out.split("\n\n")[1:3])
    assert {line.split("  ")[0] for line in table[1:-1]} & {"h100-sxm", "rtx-5090", "rtx-3090"}
    assert max(map(len, table + finish[1:])) <= 80


def test_a_number_of_gpus_and_a_preset_restrict_the_answer(capsys: Capsys) -> None:
    found = json_of([*WORDS, "--num-processes", "4", "--preset", "zero3_cpu_offload"], capsys)["plans"]
    assert {(row["world_size"], row["preset"]) for row in found} == {(4, "zero3_cpu_offload")}


@pytest.mark.parametrize(
    ("words", "reason", "hint"),
    [
        (["--preset", "zero2", "--optim", "schedule_free_adamw"],
         "--optim schedule_free_adamw does not work under preset 'zero2'", "hint: `--preset ddp`"),
        (["--tp", "3"], "--tp 3 does not work for this model: 3 does not divide its 32 attention heads",
         "hint: `--tp 2`"),
        (["--max-seq-length", "10000000"], "nothing fits on up to 1,024 of any GPU", "--activation-checkpointing"),
        (["--price-per-gpu-hour", "t4=0.2"], "nothing fits on up to 1,024 of t4", "hint: "),  # it has no bf16
        (["--load-in-4bit"], "--load-in-4bit needs --lora-r", ""),
    ],
)  # fmt: skip
def test_a_job_that_no_number_of_gpus_trains_is_refused_with_the_reason(
    words: list[str], reason: str, hint: str, capsys: Capsys
) -> None:
    code, out, err = run_command([*WORDS, *words], capsys)
    assert (code, out) == (2, "")
    assert reason in err
    assert hint in err

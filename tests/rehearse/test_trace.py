"""A rehearsal on fake tensors counts the model states of its rank and the tensors of each phase."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from command_line import check_answer
from launching import toolkit
from model_configs import LLAMA, NUM_PARAMS

# The first of four ranks holds 253 of 1009 rows of the embedding and the head, and a quarter of the rest.
HELD = NUM_PARAMS // 4 + 2 * (253 * 4 - 1009) * 64 // 4

pytestmark = pytest.mark.launch

Trace = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """16 rows of 256 tokens under FSDP2, so that logits outweigh everything else, with a kind of accumulation."""
    path = tmp_path_factory.mktemp("traced") / "config.json"
    path.write_text(json.dumps(LLAMA))
    words = ["--model_name_or_path", str(path), "--max_seq_length", "256", "--per_device_train_batch_size", "16"]
    words += ["--loss", "full", "--gradient_accumulation_steps", "2"]

    @cache
    def trace(accumulate: str, *more: str) -> dict[str, Any]:
        given = ["--fake-tensors", "--json", "--", *words, "--accumulate", accumulate, *more]
        ended = toolkit("rehearse", "--preset", "fsdp2", "--num-processes", "4", *given)
        assert ended.returncode == 0, ended.stderr
        check_answer("rehearse", answer := dict(json.loads(ended.stdout)))
        return answer

    return trace


@pytest.mark.nightly
def test_fake_tensors_hold_the_model_states_of_this_rank_only(trace: Trace) -> None:
    traced = trace("sharded")
    held = {"parameter_bytes": 4 * HELD, "gradient_bytes": 4 * HELD, "optimizer_bytes": 8 * HELD}
    assert traced["num_params"] == NUM_PARAMS
    assert {part: traced[part] for part in held} == held
    step = traced["peaks"]["step"]["parts"]
    assert [step[part] for part in ("parameter", "gradient", "optimizer")] == list(held.values())


def test_fake_tensors_count_the_logits_and_their_copies(trace: Trace) -> None:
    """bf16 logits, their fp32 copy and its log-softmax are alive when the loss is taken; in backward one more."""
    logits, peaks = 16 * 256 * 1009, trace("sharded")["peaks"]
    assert peaks["forward"]["parts"]["logits"] == (2 + 4 + 4) * logits
    assert peaks["backward"]["parts"]["logits"] >= (4 + 4) * logits
    assert peaks["forward"]["total_bytes"] == sum(peaks["forward"]["parts"].values())


@pytest.mark.nightly
def test_fake_tensors_count_what_waits_between_accumulation_steps(trace: Trace) -> None:
    """The bf16 gradients of all parameters, or a quarter of them in fp32."""
    peaks = {name: trace(name)["peaks"] for name in ("sharded", "whole")}
    waiting = {name: peak["forward"]["total_bytes"] for name, peak in peaks.items()}
    assert waiting["whole"] - waiting["sharded"] == 2 * NUM_PARAMS - 4 * HELD
    assert [peak["step"]["parts"]["gradient"] for peak in peaks.values()] == [4 * HELD] * 2


@pytest.mark.nightly
def test_fake_tensors_count_what_selective_checkpointing_keeps(trace: Trace) -> None:
    """Per layer and token attention's output in bf16, and an fp32 statistic of each head."""
    full, on = ("--activation_checkpointing", "true"), ("--activation_checkpointing_selective", "true")
    traced = [trace("sharded", *words)["peaks"]["forward"]["total_bytes"] for words in ((*full, *on), full)]
    heads, width = LLAMA["num_attention_heads"], LLAMA["hidden_size"]
    assert traced[0] - traced[1] == LLAMA["num_hidden_layers"] * 16 * 256 * (2 * width + 4 * heads)

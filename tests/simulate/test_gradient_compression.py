"""Bytes of compressed gradients, against measured ones too, and error feedback that loses nothing."""

from __future__ import annotations

import math
from pathlib import Path

import numpy
import pytest

from toolkit.errors import ToolkitError
from toolkit.models.config_fields import ConfigFields
from toolkit.models.read_model import shape_from_config
from toolkit.simulate.gradient_compression import (
    BLOCK,
    ErrorFeedback,
    largest,
    parse_compression,
    power_sgd_elements,
    quantized,
)

ROOT = Path(__file__).parent.parent.parent
SHAPES = [(64, 100), (64,)]
METHODS = ["none", "top_k:0.1", "random_k:0.1", "quantize:1", "quantize:2", "quantize:8", "power_sgd:2"]


@pytest.mark.parametrize(
    ("method", "payload_bytes"),
    [
        ("none", 4 * 6464),
        ("top_k:0.01", 8 * 65),  # an index and a value for each of 64.64 elements, rounded up
        ("random_k:0.01", 4 * 65),
        ("quantize:4", 3232 + 4 * 13),  # half a byte each, and a scale for each block of 512
        ("quantize:1", 808 + 4 * 13),
        ("power_sgd:2", 4 * (2 * 164 + 64)),
    ],
)
def test_a_worker_sends_these_bytes(method: str, payload_bytes: int) -> None:
    assert parse_compression(method).payload_bytes(SHAPES) == payload_bytes


def test_power_sgd_sends_a_matrix_whole_where_two_factors_save_less_than_half() -> None:
    assert power_sgd_elements((64, 100), 19) == 164 * 19
    assert power_sgd_elements((64, 100), 20) == 6400


def test_an_all_gather_grows_with_the_workers_and_an_all_reduce_does_not() -> None:
    gathered = [parse_compression("quantize:8").collective(SHAPES, workers=n).sent_bytes for n in (2, 9)]
    assert gathered[1] == 8 * gathered[0]
    reduced = [parse_compression("power_sgd:2").collective(SHAPES, workers=n).sent_bytes for n in (2, 1000)]
    assert reduced[1] < 2 * reduced[0]


@pytest.mark.parametrize(
    ("hook", "method", "relative"),
    [
        ("allreduce", "none", 0.0),
        ("top_k", "top_k:0.01", 0.0),
        ("power_sgd", "power_sgd:1", 0.0),
        # torch's hook also sends a zero point per 512 elements
        ("int8", "quantize:8", 0.008),
    ],
)
def test_bytes_are_those_that_ddp_hooks_sent(hook: str, method: str, relative: float) -> None:
    """Measured with two gloo ranks on a Llama of 3.2 M parameters: docs/evidence/speed-and-memory.md."""
    measured = {"allreduce": 12_879_104, "top_k": 257_584, "power_sgd": 206_336, "int8": 3_270_280}
    fields = {"model_type": "llama", "vocab_size": 49152, "hidden_size": 64, "intermediate_size": 128}
    fields |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    fields |= {"max_position_embeddings": 512, "tie_word_embeddings": True}
    shape = shape_from_config(ConfigFields(fields, "config.json"))
    assert shape is not None
    shapes = [tensor.shape for layer in (*shape.layers, shape.outer) for tensor in layer]
    assert parse_compression(method).payload_bytes(shapes) == pytest.approx(measured[hook], rel=relative)


@pytest.mark.parametrize("method", METHODS)
def test_what_is_not_sent_is_held_back_and_nothing_is_lost(method: str) -> None:
    generator = numpy.random.default_rng(0)
    feedback, given, sent = ErrorFeedback(parse_compression(method), seed=0), 0.0, 0.0
    for _ in range(5):
        gradients = [generator.normal(size=(3, 8, 90)), generator.normal(size=(3, 40, 6))]
        given = given + gradients[0].mean(axis=0)
        sent = sent + feedback.mean(gradients)[0]
    held = feedback.unsent[0].mean(axis=0) if feedback.unsent else 0.0
    assert numpy.allclose(sent + held, given)
    assert method == "none" or abs(held).max() > 1e-3, "something was held back"


def test_the_largest_elements_of_each_worker_are_sent() -> None:
    flat = numpy.array([[1.0, -5.0, 2.0, 0.5], [9.0, 1.0, -1.5, 8.0]])
    assert largest(flat, 2).tolist() == [[0.0, -5.0, 2.0, 0.0], [9.0, 0.0, 0.0, 8.0]]


def test_one_bit_is_the_sign_times_the_mean_magnitude_of_a_block() -> None:
    flat = numpy.full((1, BLOCK + 2), 3.0)
    flat[0, BLOCK:] = [-1.0, 5.0]
    assert quantized(flat, bits=1)[0, -3:].tolist() == [3.0, -3.0, 3.0]


def test_more_bits_round_to_multiples_of_the_largest_magnitude() -> None:
    flat = numpy.array([[7.0, 1.4, -3.6, 0.0]])
    assert quantized(flat, bits=4).tolist() == [[7.0, 1.0, -4.0, 0.0]]
    assert quantized(numpy.zeros((1, 4)), bits=4).tolist() == [[0.0] * 4]


def test_power_sgd_sends_a_matrix_of_its_rank_exactly() -> None:
    generator = numpy.random.default_rng(0)
    matrix = generator.normal(size=(30, 2)) @ generator.normal(size=(2, 40))
    feedback = ErrorFeedback(parse_compression("power_sgd:2"), seed=0)
    (mean,) = feedback.mean([numpy.stack([matrix, matrix])])
    assert numpy.allclose(mean, matrix)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("topk:0.1", "unknown compression 'topk'"),
        ("none:1", "none has no number"),
        ("top_k", "expected a number from 1e-06 to 1"),
        ("top_k:0", "expected a number from 1e-06 to 1"),
        ("top_k:nan", "expected a number from 1e-06 to 1"),
        ("quantize:2.5", "expected a whole number from 1 to 8"),
        ("quantize:9", "expected a whole number from 1 to 8"),
        ("power_sgd:inf", "expected a whole number from 1 to 1024"),
    ],
)
def test_what_is_no_compression_is_refused_with_an_example(text: str, message: str) -> None:
    with pytest.raises(ToolkitError, match=message) as refused:
        parse_compression(text)
    assert refused.value.hint


def test_a_label_is_read_back() -> None:
    assert [parse_compression(method).label for method in METHODS] == METHODS
    assert math.isclose(parse_compression("top_k:1e-3").amount, 0.001)

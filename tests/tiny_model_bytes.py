"""Bytes that each of two ranks holds for the fixture `tiny_model` under bf16, worked out by hand."""

from __future__ import annotations

NUM_PARAMS = 3_219_776
NORM_PARAMS = 5 * 64
# DeepSpeed keeps bf16 parameters and fp32 masters; under DDP and FSDP2 the fp32 parameter is its own master.
BF16_BYTES = {
    "ddp": {"parameter": 4 * NUM_PARAMS, "gradient": 4 * NUM_PARAMS, "optimizer": 8 * NUM_PARAMS},
    "zero1": {"parameter": 2 * NUM_PARAMS, "gradient": 2 * NUM_PARAMS, "optimizer": 12 * NUM_PARAMS // 2},
    "zero2": {"parameter": 2 * NUM_PARAMS, "gradient": 2 * NUM_PARAMS // 2, "optimizer": 12 * NUM_PARAMS // 2},
    "zero3": {
        "parameter": 2 * NUM_PARAMS // 2 + 2 * NORM_PARAMS,  # norms are gathered at all times
        "gradient": 2 * NUM_PARAMS // 2,
        "optimizer": 12 * NUM_PARAMS // 2,
    },
    "fsdp2": {"parameter": 4 * NUM_PARAMS // 2, "gradient": 4 * NUM_PARAMS // 2, "optimizer": 8 * NUM_PARAMS // 2},
}

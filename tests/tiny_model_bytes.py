"""Bytes that each of two ranks holds for the fixture `tiny_model` under bf16, worked out by hand."""

from __future__ import annotations

NUM_PARAMS = 3_219_776
NORM_PARAMS = 5 * 64
# DeepSpeed keeps bf16 parameters and fp32 masters; under DDP and FSDP2 the fp32 parameter is its own master.
BF16_BYTES = {
    name: dict(zip(("parameter", "gradient", "optimizer"), sizes, strict=True))
    for name, sizes in {
        "ddp": (4 * NUM_PARAMS, 4 * NUM_PARAMS, 8 * NUM_PARAMS),
        "zero1": (2 * NUM_PARAMS, 2 * NUM_PARAMS, 12 * NUM_PARAMS // 2),
        "zero2": (2 * NUM_PARAMS, 2 * NUM_PARAMS // 2, 12 * NUM_PARAMS // 2),
        # norms are gathered at all times
        "zero3": (2 * NUM_PARAMS // 2 + 2 * NORM_PARAMS, 2 * NUM_PARAMS // 2, 12 * NUM_PARAMS // 2),
        "fsdp2": (4 * NUM_PARAMS // 2, 4 * NUM_PARAMS // 2, 8 * NUM_PARAMS // 2),
    }.items()
}

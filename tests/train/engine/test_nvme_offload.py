"""Sizes of DeepSpeed's NVMe swap buffers."""

from __future__ import annotations

from toolkit.train.engine.nvme_offload import buffers


def test_a_buffer_holds_the_largest_shard_and_there_is_one_per_tensor_gathered_together() -> None:
    assert buffers({"attention": [8, 8, 8, 8], "head": [100]}) == {"buffer_size": 100, "buffer_count": 4}
    assert buffers({"norm": [3]}) == {"buffer_size": 3, "buffer_count": 2}

"""The digest of weights: one changed value or place changes it, and how a tensor is divided does not."""

import numpy as np
import pytest
import torch

from toolkit.observe.verify import weights_digest as weights_digest_module
from toolkit.observe.verify.weights_digest import checksum, flat_checksum, odd_numbers, weights_digest

CHUNKS = pytest.mark.parametrize("chunk", [4, weights_digest_module.CHUNK])


@CHUNKS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64])
def test_a_checksum_is_the_sum_of_bits_times_odd_numbers_modulo_two_to_the_64(
    dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_digest_module, "CHUNK", chunk)
    values = (torch.randn(5, 7, 3, generator=torch.Generator().manual_seed(0)) * 9).to(dtype)
    signed = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[values.element_size()]
    bits = values.view(torch.uint8).numpy().view(signed).astype(np.int64).view(np.uint64)
    for dimension, size in enumerate(values.shape):
        numbers = odd_numbers(0, size, dimension, values.device).numpy().view(np.uint64)
        assert (numbers % 2 == 1).all()
        bits = bits * numbers.reshape([-1 if axis == dimension else 1 for axis in range(3)])
    assert np.uint64(int(checksum(values)) % 2**64) == bits.sum(dtype=np.uint64)


@CHUNKS
@pytest.mark.parametrize("shape", [(7,), (6, 5), (30, 100), (4, 3, 9), ()])
def test_shards_of_any_dimension_have_the_sum_of_the_whole(
    shape: tuple[int, ...], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_digest_module, "CHUNK", chunk)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for dimension, size in enumerate(shape):
        for ranks in (2, 3, size, size + 1):
            starts = [rank * -(-size // ranks) for rank in range(ranks)]
            shards = whole.tensor_split(starts[1:], dimension)
            offsets = [[start if axis == dimension else 0 for axis in range(len(shape))] for start in starts]
            total = sum(checksum(shard, offset) for shard, offset in zip(shards, offsets, strict=True))
            assert int(total) == int(checksum(whole))


@CHUNKS
@pytest.mark.parametrize("shape", [(7,), (6, 5), (4, 3, 9), (2, 3, 2, 2), ()])
def test_ranges_of_the_flattened_tensor_have_the_sum_of_the_whole(
    shape: tuple[int, ...], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_digest_module, "CHUNK", chunk)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    flat = whole.flatten()
    for size in range(1, len(flat) + 1):
        total = sum(flat_checksum(part, shape, size * rank) for rank, part in enumerate(flat.split(size)))
        assert int(total) == int(checksum(whole))
    assert int(flat_checksum(flat[:0], shape, len(flat))) == 0


def test_one_value_a_place_a_name_and_a_transposition_change_the_digest() -> None:
    def digest(weight: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype = torch.float32) -> str:
        model = torch.nn.Linear(16, 16)
        model.load_state_dict({"weight": weight, "bias": bias})
        return weights_digest(model, dtype)

    weight, bias = torch.randn(16, 16, generator=torch.Generator().manual_seed(2)), torch.zeros(16)
    assert digest(weight, bias) == digest(weight.clone(), bias)
    nudged = weight.clone()
    nudged[3, 5] = torch.nextafter(nudged[3, 5], torch.tensor(9.0))
    others = [nudged, weight.T, weight.flip(0), weight.flip(1), weight.roll(1, 0), -weight]
    others += [weight[[1, 0, *range(2, 16)]], weight[:, [1, 0, *range(2, 16)]]]
    assert len({digest(each, bias) for each in [weight, *others]}) == 1 + len(others)
    assert digest(weight, bias + 1) != digest(weight, bias)
    # the last bit of fp32 is not in bf16
    assert digest(nudged, bias, torch.bfloat16) == digest(weight, bias, torch.bfloat16)
    other_name = torch.nn.ModuleDict({"other": torch.nn.Linear(16, 16)})
    other_name["other"].load_state_dict({"weight": weight, "bias": bias})
    assert weights_digest(other_name, torch.float32) != digest(weight, bias)

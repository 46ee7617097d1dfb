"""What the tensors of every architecture are put together from: widths, linear layers, norms.

>>> [tensor.name for tensor in linear("fc1", 8, 4, bias=True)]
['fc1.weight', 'fc1.bias']
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.errors import ToolkitError
from toolkit.models.fields import Fields
from toolkit.models.shape import Layer, Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Widths:
    """What every architecture has."""

    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


def kv_heads_of(fields: Fields, heads: int, default: int | None) -> int:
    kv_heads = fields.size("num_key_value_heads", default=default or heads)
    if heads % kv_heads:
        raise ToolkitError(f"{fields.where}: num_key_value_heads is {kv_heads}, expected a divisor of {heads} heads")
    return kv_heads


def head_dim_of(fields: Fields, hidden: int, heads: int, default: int | None) -> int:
    if fields.values.get("head_dim") is None and default is None and hidden % heads:
        raise ToolkitError(f"{fields.where}: hidden_size {hidden} is not a multiple of {heads} num_attention_heads")
    return fields.size("head_dim", default=default or hidden // heads)


def linear(name: str, rows: int, columns: int, *, bias: bool = False) -> Layer:
    weight = Tensor(name=f"{name}.weight", shape=(rows, columns))
    return (weight, Tensor(name=f"{name}.bias", shape=(rows,))) if bias else (weight,)


def norm(name: str, width: int) -> Layer:
    return (Tensor(name=f"{name}.weight", shape=(width,)), Tensor(name=f"{name}.bias", shape=(width,)))

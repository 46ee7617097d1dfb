"""Bytes of the tensors that exist on a CPU, as torch's dispatcher makes them, and of those that autograd saves."""

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that exist, and the most of them since `peak` was set."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(tensor.untyped_storage()) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        result = func(*args, **(kwargs or {}))
        for storage in [each.untyped_storage() for each in tree_leaves(result) if isinstance(each, Tensor)]:
            if id(storage) not in given:
                self.live += storage.nbytes()
                weakref.finalize(storage, self.free, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def free(self, freed: int) -> None:
        self.live -= freed


@contextlib.contextmanager
def saved_storages(known: Iterable[Tensor] = ()) -> Iterator[dict[int, int]]:
    """Yield the bytes of each storage that autograd saves here, once, but for those of known tensors."""
    of_known, saved = {tensor.untyped_storage()._cdata for tensor in known}, dict[int, int]()
    alive = []  # the address of a freed storage would be used again

    def pack(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        if tensor.untyped_storage()._cdata not in of_known:
            saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved

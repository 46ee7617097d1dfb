"""Compare what ranks must hold alike: each trained weight that several data-parallel ranks have, after the same steps.

Ranks that hold the same part of a weight sum its bits where it lies, and send a digest: a reduction gives all of them
the same bits. What tensor or expert parallelism lets each rank compute for itself may differ in its last bits: such
weights are compared over data parallelism alone. Where a weight has no copy, learning rates and steps are compared.
"""

import hashlib
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from toolkit.engines.live_engine import live_engine
from toolkit.engines.tensors import clean_name, innermost_optimizer, local, uncompiled, without_adapters
from toolkit.engines.torch_live import is_shard
from toolkit.engines.zero_live import is_zero3
from toolkit.observe.verify.weights_digest import checksum
from toolkit.record.reading import RankReading

COMPUTED_APART = ("pp", "tp", "ep")  # mesh dimensions whose ranks have other layers, or compute gradients apart
# Imported by a program that averages weights, and by nothing else.
LOCAL_SGD_MODULES = {"accelerate.local_sgd", "torch.distributed.algorithms.model_averaging.averagers"}


class ReplicaCheck:
    """Compares the ranks of one Trainer. `gather` returns every rank's value, and is collective."""

    def __init__(self, trainer: Any, gather: Callable[[Any], list[Any]]) -> None:
        self.trainer, self.gather, self.rates = trainer, gather, list[Any]()
        self.synced, self.hint = True, ""
        """`synced` is False where DDP's last forward was in `no_sync`; `hint` is what the last `read` tells."""

    def note_rates(self) -> None:
        """Note the learning rates of a step: after a schedule's end all are 0. One on a GPU is read later."""
        rates = [group["lr"] for group in getattr(self._optimizer(), "param_groups", ()) if "lr" in group]
        self.rates = [rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in rates]

    def _optimizer(self) -> Any:
        return innermost_optimizer(live_engine(self.trainer.model_wrapped).optimizer(self.trainer))

    def read(self) -> RankReading:
        """Return this rank's `replicas`, learning rates, and its optimizer's own count of steps, 0 without. Collective.

        `replicas` is None where no other rank holds the same, otherwise `equal`, or a word for why it is not.
        """
        rates = sorted(set(map(float, self.rates)))
        states = [state for state in self._optimizer().state.values() if isinstance(state, dict)]
        steps = int(max((float(state.get("step", 0)) for state in states), default=0))
        pieces, places = trained_pieces(self.trainer), Counter[str]()
        for held in self.gather(list(pieces)):
            places.update(held)
        sums = {
            place: dict(zip(held, torch.stack(list(map(checksum, held.values()))).tolist(), strict=True))
            for place, held in pieces.items()
            if places[place] > 1
        }
        word, self.hint = "equal" if sums else None, ""
        ranks = self.gather(
            {place: hashlib.sha256(repr(each).encode()).hexdigest() for place, each in sums.items()}
            | {"facts": f"learning rate {' and '.join(f'{rate:g}' for rate in rates)}, {steps} optimizer steps"}
        )
        for place in sorted(place for place, number in places.items() if number > 1):
            digests = {rank: each[place] for rank, each in enumerate(ranks) if place in each}
            usual = Counter(digests.values()).most_common(1)[0][0]  # the first rank's, where two are as frequent
            if others := [rank for rank, digest in digests.items() if digest != usual]:
                usual_rank = next(rank for rank, digest in digests.items() if digest == usual)
                details, both = self.gather(sums.get(place)), (usual_rank, others[0])
                self.hint = self._describe(details[both[0]], details[both[1]], both, [ranks[n]["facts"] for n in both])
                if self.trainer.args.process_index in others:
                    trains_apart = "local_sgd" if sys.modules.keys() & LOCAL_SGD_MODULES else "no_sync"
                    word = "different" if self.synced else trains_apart
        return RankReading.of(replicas=word, learning_rates=rates, optimizer_steps=steps)

    def _describe(self, usual: dict[str, int], other: dict[str, int], ranks: tuple[int, ...], facts: list[str]) -> str:
        wrapped, names = self.trainer.model_wrapped, [name for name in usual if usual[name] != other.get(name)]
        why = "their gradients were not reduced over all ranks, or the update was another"
        if not self.synced:
            why = "the backward was in `no_sync`: ranks exchanged no gradients"
            why += ", as local SGD does, which averages weights later" if sys.modules.keys() & LOCAL_SGD_MODULES else ""
        elif facts[0] != facts[1]:
            why = f"{facts[1]} on rank {ranks[1]}, {facts[0]} on rank {ranks[0]}"
        elif names and set(names) <= set(getattr(wrapped, "parameters_to_ignore", ())):
            why = "DDP was told to ignore it"
        differ = f"{names[0]} on rank {ranks[1]} differs" if names else "the trained weights differ"
        return f"{differ} from rank {ranks[0]}'s, as {len(names)} of {len(usual)} do: {why}"


def trained_pieces(trainer: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Return the parts of trained weights on this rank by place: ranks with the same place hold the same part.

    Empty where that is not known: without an engine's wrapper, and under FSDP1.
    """
    wrapped, pieces = uncompiled(trainer.model_wrapped), dict[str, dict[str, torch.Tensor]]()
    plain = trainer.accelerator.unwrap_model(wrapped, keep_torch_compile=False)
    manager = getattr(without_adapters(plain), "_mesh_manager", None)
    meshes = [] if manager is None else [manager._dense_mesh, manager._expert_mesh]
    meshes += [plain.ranks.mesh] if hasattr(plain, "num_params_of_all_stages") else []
    here = {
        name: mesh.get_local_rank(name) for mesh in meshes for name in COMPUTED_APART if name in mesh.mesh_dim_names
    }
    if not (here or live_engine(wrapped).holds_copies):
        return {}
    if any(isinstance(module, FullyShardedDataParallel) for module in wrapped.modules()):
        return {}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""  # another GPU's kernels round otherwise
    for name, parameter in sorted((clean_name(name), p) for name, p in plain.named_parameters()):
        held, place = local(parameter.data), dict(here)
        is_gathered = not is_zero3(parameter) or parameter.ds_status.name == "AVAILABLE"
        is_expert = getattr(parameter, "allreduce", True) is False  # of DeepSpeed's mixtures of experts
        if not parameter.requires_grad or not is_gathered or is_expert or hasattr(held, "__tensor_flatten__"):
            continue
        if isinstance(parameter.data, DTensor):
            mesh = parameter.device_mesh
            names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
            axes = zip(names, parameter.placements, strict=True)
            divided = [name for name, each in axes if is_shard(each) or name in COMPUTED_APART]
            place |= {name: mesh.get_local_rank(names.index(name)) for name in divided}
        pieces.setdefault(f"{gpu} {sorted(place.items())}", {})[name] = held
    return pieces

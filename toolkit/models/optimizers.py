"""Optimizers by their name in `--optim`: class, and dtypes and bytes of their states, as each library makes them.

    >>> matrix = UpdatedTensor(shape=(4096, 4096))
    >>> [OPTIMIZERS[name].state_bytes([matrix]) for name in ("adamw_torch_fused", "adamw_bnb_8bit", "adafactor")]
    [134217728, 34080768, 32768]

The planner adds these bytes up for the tensors of a model, and the run-time verification for the live ones. Every other
optimizer of transformers runs too, and is neither planned nor verified by name: `NOT_PLANNED` says why. Those of
Microsoft's `dion` are planned alone: a script makes them itself.
Read in the sources of torch 2.13, transformers 5.23, bitsandbytes 0.50.2 and torchao 0.18.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from toolkit.files.documents import read_table

FP32_BYTES = 4
# bitsandbytes and torchao leave smaller tensors in fp32 (`min_8bit_size`; torchao, `_AdamBase._new_buffer`).
MIN_QUANTIZED_ELEMENTS = 4096
# Elements that share one fp32 scale: bitsandbytes' `blocksize`; torchao's, as transformers sets it for 4 and 8 bits.
BLOCK_ELEMENTS = 256
MUON = "muon"  # the toolkit's own name: transformers has no Muon
# Classes of Microsoft's dion, at 0a059a4 of 2026-08, which a script makes: the Trainer has no name for them. Papers:
# https://arxiv.org/abs/2504.05295 (Dion), 2512.16928 (Dion2), 2510.05491 (NorMuon).
OF_SCRIPTS = {"dion": "Dion", "dion2": "Dion2", "dion3": "NorDion2", "normuon": "NorMuon"}


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdatedTensor:
    """A tensor that the optimizer of one rank updates: a parameter, its shard, or a flat partition of several."""

    shape: tuple[int, ...]
    count: int = 1  # tensors of this kind
    is_embedding: bool = False  # the weight of an embedding, which a tied head shares
    is_hidden_matrix: bool = False  # the trained weight of a linear layer other than the head
    is_projected: bool = False  # GaLore or APOLLO keeps states of a projection of its gradient
    whole_rows: int = 0  # rows of the matrix of which FSDP2 has given this rank a part; 0 for a whole one

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


_States = Callable[[UpdatedTensor], dict[str, int]]  # bytes of the states of one tensor, by dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """One optimizer of `--optim`."""

    optim: str
    class_name: str  # package and class, as the run-time verification reads them
    states: _States
    shared_bytes: int = 0  # tables that all quantized tensors of a rank share
    paged: bool = False  # states may leave the GPU for host memory, page by page
    step_copies: int = 0  # whole fp32 copies of what it updates, during the step
    targets: str | tuple[str, ...] = ()  # modules whose weights are projected (`optim_target_modules`)
    follows_weights: bool = False  # states have the dtype of the weights
    is_fp32_adamw: bool = False  # AdamW with fp32 states: the numerics contract (docs/concepts/numerics.md)

    def state_bytes(self, tensors: Iterable[UpdatedTensor]) -> int:
        """Return the bytes of all states of these tensors."""
        held = [(self.states(tensor), tensor.count) for tensor in tensors]
        quantized = any("uint8" in states for states, _ in held)
        return sum(sum(states.values()) * count for states, count in held) + self.shared_bytes * quantized

    def projects(self, module: str) -> bool:
        """Return True if the states of a linear layer are those of a projection, as transformers chooses layers.

        (`check_target_module_exists`: a text is a pattern of the whole name, a list has parts of names and patterns.)
        """
        if isinstance(self.targets, str):
            is_all = self.targets.replace("_", "-") == "all-linear"
            return is_all or re.fullmatch(self.targets, module) is not None
        return any(target in module or re.fullmatch(target, module) is not None for target in self.targets)

    def state_dtypes(self, tensors: Iterable[UpdatedTensor]) -> str | None:
        """Return the dtypes of the states of these tensors: `float32+uint8`; None without states."""
        return "+".join(sorted({dtype for tensor in tensors for dtype in self.states(tensor)})) or None


def _fp32(states: int) -> _States:
    return lambda tensor: {"float32": FP32_BYTES * states * tensor.num_elements} if states else {}


def _bitsandbytes_8bit(states: int) -> _States:
    """Embeddings stay in fp32: the Trainer registers an override for each (`create_optimizer`)."""

    def held(tensor: UpdatedTensor) -> dict[str, int]:
        if tensor.is_embedding or tensor.num_elements < MIN_QUANTIZED_ELEMENTS:
            return _fp32(states)(tensor)
        blocks = -(-tensor.num_elements // BLOCK_ELEMENTS)
        return {"uint8": states * tensor.num_elements, "float32": FP32_BYTES * states * blocks}

    return held


def _adafactor(tensor: UpdatedTensor) -> dict[str, int]:
    """Second moments as one row and one column per matrix (https://arxiv.org/abs/1804.04235); no first moment."""
    *outer, columns = tensor.shape or (1,)
    if not outer:
        return _fp32(1)(tensor)
    return {"float32": FP32_BYTES * (math.prod(outer) + math.prod(outer[:-1]) * columns)}


def _of_hidden(optim: str, *, fraction: float = 1.0, multiple: int = 1, others: int = 2) -> _States:
    """Momentum of hidden matrices, and more under Dion and NorMuon; AdamW's two states of all others, or Lion's one.

    Dion's Q has as many columns as its rank, and the columns of a matrix for rows; or the rows, if it is transposed,
    as a wide one is, and every one that FSDP2 shards by rows (`_init_opt_state_dion`).
    """

    def held(tensor: UpdatedTensor) -> dict[str, int]:
        if not tensor.is_hidden_matrix:
            return _fp32(others)(tensor)
        rows, columns = tensor.shape
        more = rows if optim in ("dion3", "normuon") else 0  # the variance of each row
        if optim == "dion":
            shorter = min(tensor.whole_rows or rows, columns)
            rank = min(multiple * math.ceil(fraction * shorter / multiple), shorter)
            more = rank * (rows if tensor.whole_rows else shorter)
        return {"float32": FP32_BYTES * (tensor.num_elements + more)}

    return held


def _projected(states: _States, *, rank: int, proj_type: str, limited: bool) -> _States:
    """States of a projection of matrices, and the projection itself (galore-torch 1.0; apollo-torch 1.0.3).

    `std` projects the shorter side. An SVD has no more vectors than that side, a random projection has `rank`.
    """

    def held(tensor: UpdatedTensor) -> dict[str, int]:
        if not tensor.is_projected:
            return states(replace(tensor, is_embedding=False))
        rows, columns = tensor.shape
        of_columns = {"std": rows >= columns, "reverse_std": rows < columns, "right": True, "left": False}[proj_type]
        width = min(rank, rows, columns) if limited else rank
        found = states(UpdatedTensor(shape=(rows, width) if of_columns else (width, columns)))
        projection = width * (columns if of_columns else rows)
        return found | {"float32": found.get("float32", 0) + FP32_BYTES * projection}

    return held


def _bitsandbytes(name: str, states: int, optims: str) -> Iterator[OptimizerSpec]:
    for optim in optims.split():
        in_8bit = optim.endswith("8bit")
        yield OptimizerSpec(
            optim=optim,
            class_name=f"bitsandbytes.{name}",
            states=_bitsandbytes_8bit(states) if in_8bit else _fp32(states),
            # Its `dynamic` and `udynamic` code tables: one for momenta, one for the variance.
            shared_bytes=min(states, 2) * FP32_BYTES * 256 if in_8bit else 0,
            paged=optim.startswith("paged"),
            is_fp32_adamw=name == "AdamW" and not in_8bit,
        )


def _torchao(optim: str, *, bits: int) -> OptimizerSpec:
    """Two moments, each with its own table of 2**bits values. A tensor that is not whole blocks stays in fp32."""

    def states(tensor: UpdatedTensor) -> dict[str, int]:
        blocks, rest = divmod(tensor.num_elements, BLOCK_ELEMENTS)
        if tensor.num_elements < MIN_QUANTIZED_ELEMENTS or rest:
            return _fp32(2)(tensor)
        return {"uint8": 2 * tensor.num_elements * bits // 8, "float32": 2 * FP32_BYTES * (blocks + 2**bits)}

    return OptimizerSpec(optim=optim, class_name=f"torchao.AdamW{bits}bit", states=states)


def _torch(optim: str, class_name: str, states: _States) -> OptimizerSpec:
    return OptimizerSpec(optim=optim, class_name=class_name, states=states, follows_weights=True)


_ADAMW = replace(_torch("adamw_torch_fused", "torch.AdamW", _fp32(2)), is_fp32_adamw=True)
_ALL = (
    _ADAMW,
    replace(_ADAMW, optim="adamw_torch", step_copies=1),  # torch's foreach kernels; fused ones make no copy
    *_bitsandbytes("AdamW", 2, "adamw_bnb_8bit adamw_8bit paged_adamw_8bit paged_adamw_32bit"),
    _torchao("adamw_torch_8bit", bits=8),
    _torchao("adamw_torch_4bit", bits=4),
    OptimizerSpec(optim="adafactor", class_name="transformers.Adafactor", states=_adafactor),
    *_bitsandbytes("Lion", 1, "lion_32bit lion_8bit paged_lion_32bit paged_lion_8bit"),
    *_bitsandbytes("AdEMAMix", 3, "ademamix ademamix_8bit paged_ademamix_32bit paged_ademamix_8bit"),
    *_bitsandbytes("RMSprop", 1, "rmsprop_bnb rmsprop_bnb_32bit rmsprop_bnb_8bit"),
    _torch(MUON, "toolkit.MuonWithAdamW", _of_hidden(MUON)),
    *(_torch(optim, f"dion.{name}", _of_hidden(optim)) for optim, name in OF_SCRIPTS.items()),
    _torch("adagrad", "torch.Adagrad", _fp32(1)),
    # schedulefree 1.4.1: `z`, the weights that are trained, beside those that are evaluated, and no momentum.
    _torch("schedule_free_adamw", "schedulefree.AdamWScheduleFree", _fp32(2)),
    _torch("schedule_free_radam", "schedulefree.RAdamScheduleFree", _fp32(2)),
    _torch("schedule_free_sgd", "schedulefree.SGDScheduleFree", _fp32(1)),
    _torch("galore_adamw", "galore_torch.AdamW", _fp32(2)),
    OptimizerSpec(
        optim="galore_adamw_8bit",
        class_name="galore_torch.AdamW8bit",
        states=_bitsandbytes_8bit(2),
        shared_bytes=2 * FP32_BYTES * 256,
    ),
    OptimizerSpec(optim="galore_adafactor", class_name="galore_torch.Adafactor", states=_adafactor),
    _torch("apollo_adamw", "apollo_torch.AdamW", _fp32(2)),
    _torch("rmsprop", "torch.RMSprop", _fp32(1)),
    _torch("sgd", "torch.SGD", _fp32(0)),  # and momentum, if it is set
)
OPTIMIZERS: Mapping[str, OptimizerSpec] = {spec.optim: spec for spec in _ALL}
"""By name in `TrainingArguments.optim`, the Trainer's default first."""
DEFAULT_OPTIMIZER = _ALL[0].optim
NOT_PLANNED: Mapping[str, str] = read_table(__file__, "not_planned")


def why_not_planned(optim: str) -> str | None:
    """Return why an optimizer is not planned; None for one that is, and for one that nobody knows.

    >>> why_not_planned("lomo")
    'it updates each weight in the backward pass, without an optimizer step'
    """
    found = (why for name, why in NOT_PLANNED.items() if optim.startswith(name))
    return None if optim in OPTIMIZERS else next(found, None)


def optimizer_spec(
    optim: str, optim_args: str | None = None, targets: str | Iterable[str] | None = None
) -> OptimizerSpec | None:
    """Return what an optimizer keeps with these `--optim_args`; None for one that is not known.

    `targets` are transformers' `optim_target_modules`.

    >>> optimizer_spec("sgd", "momentum=0.9").state_bytes([UpdatedTensor(shape=(10,))])
    40
    """
    spec, given = OPTIMIZERS.get(optim), parse_optimizer_arguments(optim_args)
    if spec is not None and is_low_rank(optim):
        return _low_rank(spec, given, targets)
    if spec is not None and optim in OF_SCRIPTS:
        return _of_scripts(spec, given)
    if spec is None or optim not in ("sgd", "rmsprop"):
        return spec
    has_momentum = float(given.get("momentum", 0)) != 0
    is_centered = optim == "rmsprop" and given.get("centered", "").lower() in ("true", "1", "yes")
    return replace(spec, states=_fp32((optim == "rmsprop") + has_momentum + is_centered))


def is_low_rank(optim: str) -> bool:
    """Return True for optimizers that keep states of a projection."""
    return optim.startswith(("galore_", "apollo_"))


def _low_rank(
    spec: OptimizerSpec, given: Mapping[str, str], targets: str | Iterable[str] | None
) -> OptimizerSpec | None:
    proj_type, rank = given.get("proj_type", "std"), given.get("rank", "128")
    if proj_type not in ("std", "reverse_std", "right", "left") or not rank.isdecimal() or int(rank) < 1:
        return None
    random = spec.optim.startswith("apollo") and given.get("proj", "random") == "random"
    states = _projected(spec.states, rank=int(rank), proj_type=proj_type, limited=not random)
    return replace(spec, states=states, targets=targets if isinstance(targets, str) else tuple(targets or ()))


def _of_scripts(spec: OptimizerSpec, given: Mapping[str, str]) -> OptimizerSpec | None:
    """Read Dion's ranks and the `algorithm` of its other groups; None for dtypes of its own, which are not planned."""
    fraction, multiple = given.get("rank_fraction", "1"), given.get("rank_multiple_of", "1")
    others = {"adamw": 2, "lion": 1}.get(given.get("algorithm", "adamw"))
    is_fraction = re.fullmatch(r"1(\.0*)?|0?\.\d*[1-9]\d*", fraction) is not None
    if others is None or not is_fraction or not re.fullmatch("[1-9][0-9]*", multiple) or "dtype" in str([*given]):
        return None
    return replace(spec, states=_of_hidden(spec.optim, fraction=float(fraction), multiple=int(multiple), others=others))


def same_states(one: str, other: str) -> bool:
    """Return True if one optimizer can continue with the states of the other.

    >>> same_states("adamw_torch", "adamw_torch_fused"), same_states("adamw_8bit", "paged_adamw_32bit")
    (True, False)
    """
    specs = [OPTIMIZERS[name] for name in (one, other) if name in OPTIMIZERS]
    matrix = UpdatedTensor(shape=(MIN_QUANTIZED_ELEMENTS,))
    return one == other or (len(specs) == 2 and len({(s.class_name, s.state_bytes([matrix])) for s in specs}) == 1)


def parse_optimizer_arguments(text: str | None) -> dict[str, str]:
    """Return `--optim_args` as the Trainer reads it: names and values, with commas between."""
    parts = str(text).replace(" ", "").split(",") if text else []
    return {name: value for name, _, value in (part.partition("=") for part in parts)}

"""Training methods beside supervised fine-tuning, as TRL runs them: what each adds to the memory of a rank.

Read in the source of TRL 1.16 and checked against traces of its own trainers (docs/evidence/plan-accuracy.md;
`tests/plan/test_methods.py` fails where a default of TRL changes):

- DPO makes one forward of 2·B rows, then the reference's forward while the policy's graph is alive. KTO scores the
  mismatched completions of its KL term before that, without a graph. A reward model has 2·B rows and a head of one row.
- DPO, KTO, GRPO and RLOO take log-probabilities from tiles of logits, of completion tokens only, and recompute them in
  the backward: no logits exist. ORPO and SimPO (of `trl.experimental`) make the logits of all tokens.
- A reference model exists without adapters, unless DPO or KTO precompute its log-probabilities, or the beta of GRPO or
  RLOO is 0. It has the policy's dtype, fp32 unless told otherwise, and DeepSpeed casts it to the compute dtype. ZeRO-3
  and FSDP2 shard it; FSDP2 as a single unit, so that its forward gathers all of it, into a buffer that is copied.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from toolkit.engines.engine import EngineSettings
from toolkit.engines.zero import PERSISTENCE_THRESHOLD, partition_share
from toolkit.errors import ToolkitError
from toolkit.job.argument_values import check_word
from toolkit.models.activations import ATTENTION_INPUTS, MLP_INPUTS
from toolkit.models.job_weights import job_weights, rows_share, total
from toolkit.models.shape import ModelShape, Tensor
from toolkit.presets.compatibility import Reason
from toolkit.presets.spec import PresetSpec

SFT = "sft"
REF_DTYPES = {"float32": 4, "bfloat16": 2}
VLLM_MODES, VLLM_SHARE = ("none", "colocate", "server"), 0.3
GATHERED_COPIES = 2  # FSDP2's flat buffer of the all-gather, and the parameters that are copied out of it
_REFERENCE = ("beta", "precompute_ref_log_probs", "ref_dtype")
_GENERATION = (
    *("beta", "ref_dtype", "num_generations", "max_completion_length", "vllm", "vllm_gpu_memory_utilization"),
    "vllm_enable_sleep_mode",
)
_SETTINGS = tuple(dict.fromkeys((*_REFERENCE, *_GENERATION)))


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodSpec:
    """What a method's trainer in TRL does."""

    rows: int = 1  # rows of a forward per row of the micro-batch: a preference pair is two
    loss: str = (
        "log_probs"  # `log_probs`: tiles; `orpo`, `simpo`: all logits; `scores`: a number per row; `sft`: `--loss`
    )
    beta: float | None = None  # TRL's default; None: no reference model
    num_generations: int = 0  # TRL's default; 0: completions are in the data
    options: tuple[str, ...] = ()
    trainer: str | None = None  # of TRL, where it has no script for the method, `trl.scripts.METHOD`


METHODS = {
    SFT: MethodSpec(loss=SFT),
    "dpo": MethodSpec(rows=2, beta=0.1, options=_REFERENCE),
    "kto": MethodSpec(beta=0.1, options=_REFERENCE),
    "orpo": MethodSpec(rows=2, loss="orpo", options=("beta",), trainer="trl.experimental.orpo.ORPOTrainer"),
    "simpo": MethodSpec(
        rows=2, loss="simpo", options=("beta",), trainer='trl.experimental.cpo.CPOTrainer with loss_type="simpo"'
    ),
    "reward": MethodSpec(rows=2, loss="scores"),
    "grpo": MethodSpec(beta=0.0, num_generations=8, options=_GENERATION),
    "rloo": MethodSpec(beta=0.05, num_generations=2, options=_GENERATION),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """A training method and those of its settings that decide memory; None: TRL's default."""

    method: str = SFT
    beta: float | None = None
    precompute_ref_log_probs: bool = False
    ref_dtype: str | None = None
    num_generations: int | None = None
    max_completion_length: int | None = None
    vllm: str | None = None
    vllm_gpu_memory_utilization: float | None = None
    vllm_enable_sleep_mode: bool = False
    use_liger_kernel: bool = False
    gpu_memory_bytes: int = 0  # memory of the GPU, of which a colocated vLLM takes a share

    @classmethod
    def from_options(cls, options: object) -> Method:
        """Return the method of a command's options, which have the names of its fields."""
        return cls(
            **{field.name: getattr(options, field.name) for field in fields(cls) if hasattr(options, field.name)}
        )

    @property
    def given(self) -> tuple[str, ...]:
        """The settings that were given."""
        return tuple(name for name in _SETTINGS if getattr(self, name) not in (None, False))

    @property
    def spec(self) -> MethodSpec:
        """What its trainer does. Raises ToolkitError for a word that is no method."""
        if self.method in ("lora", "qlora", "full"):
            hint = "`--lora-r 16` plans adapters; without it all parameters are trained"
            raise ToolkitError(f"--method is '{self.method}', expected {', '.join(METHODS)}", hint=hint)
        check_word("--method", self.method, list(METHODS))
        return METHODS[self.method]

    @property
    def generates(self) -> bool:
        """True if completions are generated during training."""
        return self.spec.num_generations > 0

    @property
    def completions_per_prompt(self) -> int:
        """Rows that are trained for each row of the data."""
        return (self.num_generations or self.spec.num_generations) if self.generates else 1

    @property
    def smallest_batch(self) -> int:
        """The smallest micro-batch: KTO's KL term needs the completion of another row."""
        return 2 if self.method == "kto" else 1

    @property
    def vllm_bytes(self) -> int:
        """What a colocated vLLM takes of each GPU; 0 without one."""
        share = VLLM_SHARE if self.vllm_gpu_memory_utilization is None else self.vllm_gpu_memory_utilization
        return int(share * self.gpu_memory_bytes) if self.vllm == "colocate" else 0

    @property
    def scores_reference(self) -> bool:
        """True if the log-probabilities of a reference are computed at all."""
        if self.spec.beta is None:
            return False
        return not self.generates or (self.spec.beta if self.beta is None else self.beta) != 0

    @property
    def scoring_forwards(self) -> int:
        """Forwards without a graph per accumulation step, each of as many rows as are trained.

        Of the reference; KTO scores the mismatched completions of its KL term too, under the policy and the reference.
        RLOO scores under the policy that generated; so does GRPO where vLLM generated (importance sampling).
        """
        reference = self.scores_reference and not self.precompute_ref_log_probs
        if self.method == "kto":
            return 1 + 2 * reference
        rescored = self.method == "rloo" or (self.method == "grpo" and self.vllm in ("colocate", "server"))
        return rescored + reference

    @property
    def precomputed_forwards(self) -> int:
        """Forwards of the rows of each accumulation step that are made once, before training."""
        return (2 if self.method == "kto" else 1) if self.precompute_ref_log_probs else 0

    def has_reference(self, *, lora: bool) -> bool:
        """Return True if a second model is held during training."""
        return self.scores_reference and not lora and not self.precompute_ref_log_probs

    def model(self, shape: ModelShape) -> ModelShape:
        """Return the model that is trained: a reward model has a head of one row, and never a tied one."""
        if self.spec.loss != "scores" or shape.vocab_size <= 1:  # another stage of a pipeline has the head
            return shape
        kept = tuple(t for t in shape.outer if not t.name.startswith(("lm_head", "embed_out")))
        score = Tensor(name="score.weight", shape=(1, shape.hidden_size))
        return replace(shape, outer=(*kept, score), tied_embeddings=False, vocab_size=1)

    def completion_tokens(self, row_tokens: int) -> int:
        """Return the largest number of tokens of a row that are generated or scored; all, where no limit is given."""
        return min(self.max_completion_length or row_tokens, row_tokens) - (self.max_completion_length is None)

    def scored_tokens(self, rows: int, row_tokens: int) -> int:
        """Return the tokens of a forward whose log-probabilities are needed."""
        return rows * self.completion_tokens(row_tokens)


SUPERVISED = Method()


def check_method(method: Method, *, rows: int, row_tokens: int, lora: bool) -> None:
    """Raise ToolkitError for a setting of another method, and for settings that contradict each other."""
    name, spec = method.method, method.spec
    for setting in method.given:
        if setting not in spec.options:
            users = [other for other, spec in METHODS.items() if setting in spec.options]
            option = "--" + setting.replace("_", "-")
            raise ToolkitError(
                f"{option} has no meaning for --method {name}", hint=f"leave it out, or `--method {users[0]}`"
            )
    if method.beta is not None and method.beta < 0:
        raise ToolkitError(f"--beta is {method.beta}, expected 0 or more", hint="leave it out for TRL's default")
    if method.ref_dtype is not None:
        check_word("--ref-dtype", method.ref_dtype, list(REF_DTYPES))
    if method.ref_dtype is not None and not method.has_reference(lora=lora):
        why = "adapters are switched off instead" if lora else "there is no reference model"
        raise ToolkitError(f"--ref-dtype has no effect: {why}", hint="leave it out")
    if rows < method.smallest_batch:
        message = "TRL's KTO takes no --per-device-train-batch-size below 2: the KL term needs other rows' completions"
        raise ToolkitError(message, hint="`--per-device-train-batch-size 2`")
    if method.max_completion_length is not None and not 0 < method.max_completion_length < row_tokens:
        message = (
            f"--max-completion-length is {method.max_completion_length}, and a row, prompt included, has {row_tokens}"
        )
        raise ToolkitError(message, hint=f"`--max-seq-length {row_tokens + max(method.max_completion_length, 0)}`")
    _check_vllm(method)


def _check_vllm(method: Method) -> None:
    share = method.vllm_gpu_memory_utilization
    if method.vllm is not None:
        check_word("--vllm", method.vllm, VLLM_MODES)
    given = {
        "--vllm-gpu-memory-utilization": share is not None,
        "--vllm-enable-sleep-mode": method.vllm_enable_sleep_mode,
    }
    for option, is_given in given.items():
        if is_given and method.vllm != "colocate":
            place = "not used" if method.vllm in (None, "none") else "on other GPUs"
            raise ToolkitError(f"{option} needs --vllm colocate: vLLM is {place}", hint="add `--vllm colocate`")
    if share is not None and not 0 < share < 1:
        raise ToolkitError(
            f"--vllm-gpu-memory-utilization is {share}, and training needs a part of the same GPU",
            hint="`--vllm-gpu-memory-utilization 0.3`, TRL's default",
        )


def check_generations(method: Method, completions: int, *, num_processes: int) -> None:
    """Raise ToolkitError where `completions`, those of one step on all GPUs, are not whole groups of one prompt."""
    group = method.num_generations or method.spec.num_generations
    if group < 0 or group == 1:
        raise ToolkitError(f"--num-generations is {group}, expected at least 2", hint="`--num-generations 2`")
    if group and completions % group:
        divisors = [size for size in range(2, completions + 1) if completions % size == 0]
        nearest = min(divisors, key=lambda size: abs(size - group), default=None)
        hint = "use a larger batch" if nearest is None else f"`--num-generations {nearest}`"
        if num_processes > 1 and completions // num_processes * (num_processes - 1) % group == 0:
            hint += f", or `--num-processes {num_processes - 1}` where vLLM has a GPU of its own"
        raise ToolkitError(
            f"{completions} completions per step are not divisible by --num-generations {group}", hint=hint
        )


def not_planned(method: Method, preset: PresetSpec) -> Reason | None:
    """Return why a preset is not planned for a method; None where it is."""
    if method.method == SFT or not preset.parallel:
        return None
    why = f"is planned for --method {SFT} only: {method.method} has not been traced where ranks share rows or layers"
    return Reason(rule="method", why=why, message=f"preset {preset.name!r} {why}", hint="`--preset zero3`")


def reference_bytes(engine: EngineSettings, shape: ModelShape, method: Method) -> int:
    """Return the bytes of the reference model that a rank holds during the entire run."""
    weights = job_weights(shape).trained
    if engine.traits.gathers_layers:
        each = REF_DTYPES[method.ref_dtype or "float32"]
        return each * total(weights, lambda tensor: rows_share(tensor.shape, ranks=engine.shard_ranks))
    if not engine.traits.has_flat_states:
        return REF_DTYPES[method.ref_dtype or "float32"] * shape.num_params
    if not engine.shards_parameters:
        return engine.element_bytes * shape.num_params
    # TRL prepares it before the Trainer fills in `auto`, so DeepSpeed's default decides what stays whole.
    ranks, whole = engine.world_size, PERSISTENCE_THRESHOLD
    kept = (
        0 if ranks == 1 else total(weights, lambda tensor: tensor.num_elements if tensor.num_elements <= whole else 0)
    )
    return engine.element_bytes * (total(weights, lambda t: partition_share(t.num_elements, ranks=ranks)) + kept)


def reference_buffer_bytes(engine: EngineSettings, shape: ModelShape, method: Method, gathered: int) -> int:
    """Return what the reference's forward allocates beside activations; `gathered` is what ZeRO-3 gathers.

    Under autocast, which caches the casts of weights that are not frozen, and TRL freezes none: a bf16 copy of all
    linear layers. Under FSDP2 all weights twice.
    """
    if engine.traits.gathers_layers:
        return GATHERED_COPIES * engine.element_bytes * shape.num_params
    if engine.traits.has_flat_states:
        return gathered
    if not engine.autocasts or method.ref_dtype == "bfloat16":
        return 0
    return 2 * sum(t.num_elements * n for kind, n in shape.layer_kinds.items() for t in kind if t.is_linear_weight)


def adapter_input_bytes(shape: ModelShape) -> int:
    """Return the bytes per token that peft's casts add to what all layers save, under autocast.

    peft casts the input of each adapter to fp32, and autocast casts that back: a copy for each reader, and one of the
    output of attention. `toolkit train` switches peft's cast off; TRL does not.
    """
    total_bytes = 0
    for kind, count in shape.layer_kinds.items():
        readers = sum(t.is_linear_weight and t.name.split(".")[-2] in (*ATTENTION_INPUTS, *MLP_INPUTS) for t in kind)
        copies = max(0, readers - 2) * shape.hidden_size + shape.num_attention_heads * shape.head_dim
        total_bytes += 2 * copies * count
    return total_bytes

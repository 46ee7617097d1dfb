"""Rules about accelerate's `fsdp_config`, whose two versions give the same words different meanings."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.lint.document import ACCELERATE, Document
from toolkit.lint.findings import ERROR, WARNING, Edit, Match, rule
from toolkit.lint.rules.settings import as_bool, as_enum, fsdp_key, fsdp_setting, fsdp_version, is_fsdp, shorten

# FSDP1's sharding strategies as FSDP2's boolean (accelerate's own `to-fsdp2`); the others have no equivalent.
RESHARD_AFTER_FORWARD = {"FULL_SHARD": True, "1": True, "SHARD_GRAD_OP": False, "2": False}
FSDP1_ONLY_KEYS = ("backward_prefetch", "forward_prefetch", "sync_module_states", "use_orig_params")


@rule("fsdp1-by-omission", WARNING, ACCELERATE, library="accelerate", fix="fsdp_version: 2")
def fsdp1_by_omission(doc: Document) -> Iterator[Match]:
    """Without `fsdp_version`, `accelerate launch` runs FSDP1, which transformers calls deprecated; the Trainer's own
    `fsdp` means FSDP2."""
    if is_fsdp(doc) and fsdp_setting(doc, "version") is None:
        yield Match(
            key="fsdp_config.fsdp_version",
            message="fsdp_version is missing: this runs FSDP1",
            fix="`fsdp_version: 2`, and its keys; or state `fsdp_version: 1`",
        )


@rule(
    "fsdp1-reshard-ignored", ERROR, ACCELERATE, library="accelerate", fix="fsdp_sharding_strategy, or FSDP2's boolean"
)
def fsdp1_reshard_ignored(doc: Document) -> Iterator[Match]:
    """Under FSDP1 the launcher always exports `fsdp_sharding_strategy` (FULL_SHARD by default), and it takes
    precedence: `fsdp_reshard_after_forward` has no effect."""
    reshard, strategy = fsdp_setting(doc, "reshard_after_forward"), fsdp_setting(doc, "sharding_strategy")
    if not is_fsdp(doc) or fsdp_version(doc) != 1 or reshard is None:
        return
    as_strategy = {"TRUE": "FULL_SHARD", "FALSE": "SHARD_GRAD_OP", "1": "FULL_SHARD", "2": "SHARD_GRAD_OP"}
    intended = as_strategy.get(as_enum(reshard), as_enum(reshard))
    runs = as_enum("FULL_SHARD" if strategy is None else strategy)
    if intended != as_strategy.get(runs, runs):
        key = fsdp_key(doc, "reshard_after_forward")
        can_rename = strategy is None and isinstance(reshard, str)
        yield Match(
            key=key,
            message=f"FSDP1 runs {shorten(runs)}, not {shorten(reshard)}",
            fix=f"`fsdp_sharding_strategy: {shorten(intended)}`",
            edit=Edit(key=key, rename="fsdp_sharding_strategy") if can_rename else None,
        )


@rule("fsdp2-reshard-word", ERROR, ACCELERATE, library="accelerate", fix="true (full shard) or false (shard_grad_op)")
def fsdp2_reshard_word(doc: Document) -> Iterator[Match]:
    """FSDP2 accepts only true or false for `fsdp_reshard_after_forward`; a strategy of FSDP1 raises in every rank."""
    reshard = fsdp_setting(doc, "reshard_after_forward")
    if is_fsdp(doc) and fsdp_version(doc) == 2 and reshard is not None and as_bool(reshard) is None:
        key, value = fsdp_key(doc, "reshard_after_forward"), RESHARD_AFTER_FORWARD.get(as_enum(reshard))
        yield Match(
            key=key,
            message=f"{shorten(reshard)} is not a boolean: FSDP2 raises",
            fix="`true` or `false`" if value is None else f"`{str(value).lower()}`",
            edit=None if value is None else Edit(key=key, value=value),
        )


@rule("fsdp2-strategy-ignored", ERROR, ACCELERATE, library="accelerate", fix="fsdp_reshard_after_forward: false")
def fsdp2_strategy_ignored(doc: Document) -> Iterator[Match]:
    """FSDP2 does not read `fsdp_sharding_strategy` from the launcher: `fsdp_reshard_after_forward` decides, by default
    full shard."""
    strategy = as_enum(fsdp_setting(doc, "sharding_strategy"))
    reshard = as_bool(fsdp_setting(doc, "reshard_after_forward", True))
    if not is_fsdp(doc) or fsdp_version(doc) != 2 or not strategy or RESHARD_AFTER_FORWARD.get(strategy) == reshard:
        return
    fixes = {
        "SHARD_GRAD_OP": "`fsdp_reshard_after_forward: false`",
        "NO_SHARD": "`distributed_type: MULTI_GPU`",
    }
    yield Match(
        key=fsdp_key(doc, "sharding_strategy"),
        message=f"FSDP2 runs {'full shard' if reshard else 'shard_grad_op'}, not {shorten(strategy)}",
        fix=fixes.get(strategy, "`parallelism_config_dp_replicate_size` for a hybrid mesh"),
    )


@rule("fsdp2-obsolete-key", WARNING, ACCELERATE, library="accelerate", fix="nothing")
def fsdp2_obsolete_key(doc: Document) -> Iterator[Match]:
    """The key belongs to FSDP1; FSDP2 has no such setting and ignores it."""
    if not is_fsdp(doc) or fsdp_version(doc) != 2:
        return
    strategy = RESHARD_AFTER_FORWARD.get(as_enum(fsdp_setting(doc, "sharding_strategy")))
    redundant = strategy is not None and strategy == as_bool(fsdp_setting(doc, "reshard_after_forward", True))
    for name in (*FSDP1_ONLY_KEYS, *(["sharding_strategy"] if redundant else [])):
        if fsdp_setting(doc, name) is not None:
            key = fsdp_key(doc, name)
            yield Match(
                key=key, message=f"fsdp_{name} belongs to FSDP1 and has no effect", fix="remove it", edit=Edit(key=key)
            )


@rule("loading-without-sync", ERROR, ACCELERATE, library="accelerate", fix="fsdp_sync_module_states: true, or no key")
def loading_without_sync(doc: Document) -> Iterator[Match]:
    """`accelerate launch` refuses `fsdp_sync_module_states: false` while `fsdp_cpu_ram_efficient_loading` is on, which
    is its default, also under FSDP2."""
    efficient_loading = as_bool(fsdp_setting(doc, "cpu_ram_efficient_loading", True))
    if is_fsdp(doc) and fsdp_setting(doc, "sync_module_states") is False and efficient_loading is not False:
        key = fsdp_key(doc, "sync_module_states")
        yield Match(
            key=key,
            message="the launcher refuses it while fsdp_cpu_ram_efficient_loading is on",
            fix="`fsdp_sync_module_states: true`, or `fsdp_cpu_ram_efficient_loading: false`",
            edit=Edit(key=key, value=True) if fsdp_version(doc) == 1 else None,
        )


@rule("full-state-dict", WARNING, ACCELERATE, library="accelerate", fix="fsdp_state_dict_type: SHARDED_STATE_DICT")
def full_state_dict(doc: Document) -> Iterator[Match]:
    """Each save gathers the complete model and optimizer in the host memory of rank 0: 12 bytes per parameter with
    Adam in fp32, 84 GB for 7 billion parameters."""
    if is_fsdp(doc) and as_enum(fsdp_setting(doc, "state_dict_type")) == "FULL_STATE_DICT":
        yield Match(
            key=fsdp_key(doc, "state_dict_type"),
            message="each save gathers model and optimizer on rank 0",
            fix="`SHARDED_STATE_DICT`, and merge afterwards",
        )

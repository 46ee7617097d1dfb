"""Rules about accelerate's `fsdp_config`, whose two versions give the same words other meanings."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.lint.document import ACCELERATE, Document
from toolkit.lint.finding import ERROR, WARNING, Edit, Hit, rule
from toolkit.lint.rules.values import fsdp, fsdp_key, fsdp_version, is_fsdp, shown, truth, word

# FSDP1's words as FSDP2's boolean (accelerate's own `to-fsdp2`); the others have no equal.
RESHARD = {"FULL_SHARD": True, "1": True, "SHARD_GRAD_OP": False, "2": False}
OBSOLETE = ("backward_prefetch", "forward_prefetch", "sync_module_states", "use_orig_params")


@rule("fsdp1-by-omission", WARNING, ACCELERATE, library="accelerate", fix="fsdp_version: 2")
def fsdp1_by_omission(doc: Document) -> Iterator[Hit]:
    """Without `fsdp_version`, `accelerate launch` runs FSDP1; the Trainer's own `fsdp` means FSDP2, and
    transformers calls FSDP1 deprecated."""
    if is_fsdp(doc) and fsdp(doc, "version") is None:
        yield Hit(key="fsdp_config.fsdp_version", message="fsdp_version is not given: this is FSDP1",
                  fix="`fsdp_version: 2`, and its keys; or say `fsdp_version: 1`")  # fmt: skip


@rule(
    "fsdp1-reshard-ignored", ERROR, ACCELERATE, library="accelerate", fix="fsdp_sharding_strategy, or FSDP2's boolean"
)
def fsdp1_reshard_ignored(doc: Document) -> Iterator[Hit]:
    """Under FSDP1 the launcher always exports `fsdp_sharding_strategy` (FULL_SHARD if not given), and it wins:
    `fsdp_reshard_after_forward` has no effect."""
    asked, strategy = fsdp(doc, "reshard_after_forward"), fsdp(doc, "sharding_strategy")
    if not is_fsdp(doc) or fsdp_version(doc) != 1 or asked is None:
        return
    wanted = {"TRUE": "FULL_SHARD", "FALSE": "SHARD_GRAD_OP", "1": "FULL_SHARD", "2": "SHARD_GRAD_OP"}
    asked_word, runs = wanted.get(word(asked), word(asked)), word(strategy if strategy is not None else "FULL_SHARD")
    if asked_word != wanted.get(runs, runs):
        key = fsdp_key(doc, "reshard_after_forward")
        renames = strategy is None and isinstance(asked, str)
        yield Hit(
            key=key,
            message=f"FSDP1 runs {shown(runs)}, not {shown(asked)}",
            fix=f"`fsdp_sharding_strategy: {shown(asked_word)}`",
            edit=Edit(key=key, rename="fsdp_sharding_strategy") if renames else None,
        )


@rule("fsdp2-reshard-word", ERROR, ACCELERATE, library="accelerate", fix="true (full shard) or false (shard_grad_op)")
def fsdp2_reshard_word(doc: Document) -> Iterator[Hit]:
    """FSDP2 takes only true or false for `fsdp_reshard_after_forward`; FSDP1's word raises in every rank."""
    asked = fsdp(doc, "reshard_after_forward")
    if is_fsdp(doc) and fsdp_version(doc) == 2 and asked is not None and truth(asked) is None:
        key, value = fsdp_key(doc, "reshard_after_forward"), RESHARD.get(word(asked))
        fix = "`true` or `false`" if value is None else f"`{str(value).lower()}`"
        edit = None if value is None else Edit(key=key, value=value)
        yield Hit(key=key, message=f"{shown(asked)} is no boolean: FSDP2 raises", fix=fix, edit=edit)


@rule("fsdp2-strategy-ignored", ERROR, ACCELERATE, library="accelerate", fix="fsdp_reshard_after_forward: false")
def fsdp2_strategy_ignored(doc: Document) -> Iterator[Hit]:
    """FSDP2 reads no `fsdp_sharding_strategy` from the launcher: it shards as `fsdp_reshard_after_forward` says,
    by default fully."""
    strategy, reshard = word(fsdp(doc, "sharding_strategy")), fsdp(doc, "reshard_after_forward", True)
    if not is_fsdp(doc) or fsdp_version(doc) != 2 or not strategy or RESHARD.get(strategy) == truth(reshard):
        return
    key = fsdp_key(doc, "sharding_strategy")
    fixes = {"SHARD_GRAD_OP": "`fsdp_reshard_after_forward: false`",
             "NO_SHARD": "`distributed_type: MULTI_GPU`"}  # fmt: skip
    runs = "full shard" if truth(reshard) else "shard_grad_op"
    yield Hit(key=key, message=f"FSDP2 runs {runs}, not {shown(strategy)}",
              fix=fixes.get(strategy, "`parallelism_config_dp_replicate_size` for a hybrid mesh"))  # fmt: skip


@rule("fsdp2-obsolete-key", WARNING, ACCELERATE, library="accelerate", fix="nothing")
def fsdp2_obsolete_key(doc: Document) -> Iterator[Hit]:
    """FSDP2 has no such setting: the key of FSDP1 has no effect."""
    if not is_fsdp(doc) or fsdp_version(doc) != 2:
        return
    strategy = RESHARD.get(word(fsdp(doc, "sharding_strategy")))
    same = strategy is not None and strategy == truth(fsdp(doc, "reshard_after_forward", True))
    for name in (*OBSOLETE, *(["sharding_strategy"] if same else [])):
        if fsdp(doc, name) is not None:
            key = fsdp_key(doc, name)
            yield Hit(key=key, message=f"fsdp_{name} is FSDP1's and has no effect", fix="leave it out",
                      edit=Edit(key=key))  # fmt: skip


@rule("loading-without-sync", ERROR, ACCELERATE, library="accelerate", fix="fsdp_sync_module_states: true, or no key")
def loading_without_sync(doc: Document) -> Iterator[Hit]:
    """`accelerate launch` refuses `fsdp_sync_module_states: false` while `fsdp_cpu_ram_efficient_loading` is on,
    which it is by default, under FSDP2 too."""
    loading = truth(fsdp(doc, "cpu_ram_efficient_loading", True))
    if is_fsdp(doc) and fsdp(doc, "sync_module_states") is False and loading is not False:
        key = fsdp_key(doc, "sync_module_states")
        yield Hit(key=key, message="the launcher refuses it while efficient loading is on",
                  fix="`fsdp_sync_module_states: true`, or `fsdp_cpu_ram_efficient_loading: false`",
                  edit=Edit(key=key, value=True) if fsdp_version(doc) == 1 else None)  # fmt: skip


@rule("full-state-dict", WARNING, ACCELERATE, library="accelerate", fix="fsdp_state_dict_type: SHARDED_STATE_DICT")
def full_state_dict(doc: Document) -> Iterator[Hit]:
    """Each save gathers the whole model and optimizer in the host memory of rank 0: 12 bytes a parameter with Adam
    in fp32, 84 GB for 7 billion."""
    kind = word(fsdp(doc, "state_dict_type"))
    if is_fsdp(doc) and kind == "FULL_STATE_DICT":
        yield Hit(key=fsdp_key(doc, "state_dict_type"), message="each save gathers everything on rank 0",
                  fix="`SHARDED_STATE_DICT`, and merge afterwards")  # fmt: skip

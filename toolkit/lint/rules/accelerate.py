"""Rules about what `accelerate launch` starts: processes, machines, launchers, parallel degrees."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.lint.document import ACCELERATE, TRAINER, Document
from toolkit.lint.finding import ERROR, NOTE, WARNING, Edit, Hit, rule
from toolkit.lint.rules.values import (
    degree,
    fsdp_version,
    integer,
    is_deepspeed,
    is_fsdp,
    shown,
    truth,
    word,
)

# What only one machine or one model knows, and the value that says nothing.
MACHINE_FACTS: dict[str, object] = {
    "num_processes": None,
    "num_machines": 1,
    "machine_rank": 0,
    "main_process_ip": None,
    "main_process_port": None,
    "gpu_ids": "all",
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": None,
}
# Others, XLA for one, have uses of their own for these blocks.
ENGINES = ("NO", "MULTI_GPU", "MULTI_CPU", "DEEPSPEED", "FSDP")
# Words for which YAML reads an unquoted `no` as false, and false is none of them.
ACCELERATE_WORDS = ("mixed_precision",)
TRAINER_WORDS = ("eval_strategy", "save_strategy", "logging_strategy")


@rule(
    "starts-one-process", ERROR, ACCELERATE, library="accelerate",
    fix="distributed_type: MULTI_GPU (with use_cpu: true for gloo on CPUs)",
)  # fmt: skip
def starts_one_process(doc: Document) -> Iterator[Hit]:
    """`NO`, and `MULTI_CPU` without `mpirun_config`, start one process, whatever `num_processes` says."""
    kind, processes = word(doc.get("distributed_type")), integer(doc.get("num_processes"))
    kind = "NO" if doc.get("distributed_type") is False else kind
    alone = kind == "NO" and (processes or 1) > 1
    if alone or (kind == "MULTI_CPU" and processes != 1 and not doc.block("mpirun_config")):
        count = f"num_processes is {processes}, and" if processes else "any --num_processes is ignored:"
        yield Hit(
            key="distributed_type",
            message=f"{count} distributed_type {kind} starts one process",
            fix="`num_processes: 1`" if kind == "NO" else "`distributed_type: MULTI_GPU`, with `use_cpu: true`",
        )


@rule("machine-facts", NOTE, ACCELERATE, library="accelerate", fix="the launcher's flags, for example --num_processes")
def machine_facts(doc: Document) -> Iterator[Hit]:
    """The file holds on one machine or for one model only: another one starts the wrong number of processes."""
    found = [key for key, nothing in MACHINE_FACTS.items() if doc.get(key) not in (None, nothing)]
    if found:
        names = ", ".join(f"{key.rpartition('.')[2]} {shown(doc.get(key))}" for key in found)
        yield Hit(key=found[0], message=f"facts of one machine: {names}", fix="give them on the command line")


@rule("unquoted-no", ERROR, ACCELERATE, TRAINER, library="accelerate", fix='"no", in quotes')
def unquoted_no(doc: Document) -> Iterator[Hit]:
    """YAML reads an unquoted `no` as false, which is no value of this key: accelerate and transformers raise."""
    for key in ACCELERATE_WORDS if doc.kind == ACCELERATE else TRAINER_WORDS:
        if doc.get(key) is False:
            yield Hit(key=key, message=f"{key} is false, not the word no", fix=f'`{key}: "no"`',
                      edit=Edit(key=key, value="no"))  # fmt: skip


@rule("pdsh-by-default", WARNING, ACCELERATE, library="accelerate", fix="deepspeed_multinode_launcher: standard")
def pdsh_by_default(doc: Document) -> Iterator[Hit]:
    """On several machines accelerate starts DeepSpeed's own launcher with pdsh: it needs pdsh, passwordless ssh and
    a hostfile, and without `deepspeed_hostfile` it is given the file `None`."""
    launcher = doc.get("deepspeed_config.deepspeed_multinode_launcher")
    if is_deepspeed(doc) and (integer(doc.get("num_machines")) or 1) > 1 and launcher in (None, "pdsh"):
        file = doc.get("deepspeed_config.deepspeed_hostfile")
        yield Hit(
            key="deepspeed_config.deepspeed_multinode_launcher",
            message=f"{doc.get('num_machines')} machines are started with pdsh and the hostfile {shown(file)}",
            fix="`deepspeed_multinode_launcher: standard`, and start the command on each machine",
        )


@rule(
    "never-forwarded", ERROR, ACCELERATE, library="accelerate", fix="a DeepSpeed JSON, named by deepspeed_config_file"
)
def never_forwarded(doc: Document) -> Iterator[Hit]:
    """`accelerate launch` never hands the NVMe paths of the YAML to the ranks: DeepSpeed gets the path `none`."""
    for what in ("optimizer", "param"):
        key = f"deepspeed_config.offload_{what}_nvme_path"
        if doc.get(key) not in (None, "none") and not doc.has("deepspeed_config.deepspeed_config_file"):
            yield Hit(key=key, message=f"{shown(doc.get(key))} never reaches the ranks", fix="write it into a JSON")


@rule("block-not-in-force", WARNING, ACCELERATE, library="accelerate", fix="the distributed_type of the block")
def block_not_in_force(doc: Document) -> Iterator[Hit]:
    """A block of another engine is read and has no effect: `distributed_type` alone chooses the engine."""
    for block, kind in {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED"}.items():
        found = word(doc.get("distributed_type"))
        if doc.block(block) and found in ENGINES and found != kind:
            yield Hit(key=block, message=f"distributed_type is {shown(found)}: {block} has no effect",
                      fix=f"`distributed_type: {kind}`, or leave {block} out")  # fmt: skip


@rule("dp-replicate-alone", ERROR, ACCELERATE, library="accelerate", fix="parallelism_config_dp_shard_size above 1")
def dp_replicate_alone(doc: Document) -> Iterator[Hit]:
    """FSDP2 with nothing to shard across (`dp_shard` and `cp` both 1) is refused when training is prepared.

    A file without `num_processes` leaves the degrees to the launcher's flags.
    """
    if not doc.has("num_processes") and not doc.has("parallelism_config.parallelism_config_dp_shard_size"):
        return
    if is_fsdp(doc) and degree(doc, "dp_replicate") > 1 and degree(doc, "dp_shard") < 2 and degree(doc, "cp") < 2:
        yield Hit(key="parallelism_config.parallelism_config_dp_replicate_size",
                  message="replicates and shards nothing: accelerate refuses",
                  fix="`parallelism_config_dp_shard_size`: ranks a replica, or plain MULTI_GPU")  # fmt: skip


@rule("cp-with-sp", ERROR, ACCELERATE, library="accelerate", fix="one of the two sizes 1")
def cp_with_sp(doc: Document) -> Iterator[Hit]:
    """Context and sequence parallelism together are refused."""
    if degree(doc, "cp") > 1 and degree(doc, "sp") > 1:
        yield Hit(key="parallelism_config.parallelism_config_sp_size", message="cp and sp exclude each other",
                  fix="`parallelism_config_sp_size: 1`, or cp_size 1")  # fmt: skip


@rule("cp-needs-fsdp2", ERROR, ACCELERATE, library="accelerate", fix="distributed_type: FSDP with fsdp_version: 2")
def cp_needs_fsdp2(doc: Document) -> Iterator[Hit]:
    """Context parallelism needs FSDP2: without it accelerate refuses when the ranks start."""
    if degree(doc, "cp") > 1 and not (is_fsdp(doc) and fsdp_version(doc) == 2):
        yield Hit(key="parallelism_config.parallelism_config_cp_size", message="cp without FSDP2 is refused",
                  fix="`distributed_type: FSDP` and `fsdp_version: 2`")  # fmt: skip


@rule("remote-by-default", WARNING, TRAINER, library="transformers", fix="false, and the flag where it is meant")
def remote_by_default(doc: Document) -> Iterator[Hit]:
    """Whoever runs the file uploads the model, or runs code that a repository ships, without being asked."""
    means = {"push_to_hub": "uploads the model to the hub", "trust_remote_code": "runs the code of a repository"}
    for key, what in means.items():
        if truth(doc.get(key)):
            yield Hit(key=key, message=f"every run {what}", fix=f"`{key}: false`, and `--{key}` where it is meant")

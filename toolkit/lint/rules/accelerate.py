"""Rules about what `accelerate launch` starts: processes, nodes, launchers, parallel degrees, and FSDP."""

import math
import re
from collections.abc import Iterator
from pathlib import Path

from toolkit.convert.job_script import launcher_tables
from toolkit.files.documents import read_configuration
from toolkit.lint.document import ACCELERATE, AXOLOTL, TRAINER, Document
from toolkit.lint.findings import ERROR, NOTE, WARNING, Match, rule
from toolkit.lint.rules import settings
from toolkit.lint.rules.settings import as_bool, as_enum, as_int, engine_of, fsdp_key, fsdp_setting, shorten
from toolkit.parallel.layout import PARALLEL_KEY

# Engines that ignore the other engines' blocks; XLA, for one, reads `fsdp_config` too.
ENGINES = ("NO", "MULTI_GPU", "MULTI_CPU", "DEEPSPEED", "FSDP")
# Keys with a value `no`, which YAML reads as false unless it is quoted.
KEYS_WITH_NO = {ACCELERATE: ("mixed_precision",), TRAINER: ("eval_strategy", "save_strategy", "logging_strategy")}


@rule(ERROR, ACCELERATE, library="accelerate", fix="distributed_type: MULTI_GPU (with use_cpu: true for gloo on CPUs)")
def starts_one_process(doc: Document) -> Iterator[Match]:
    """`NO`, and `MULTI_CPU` without `mpirun_config`, start a single process, whatever `num_processes` is."""
    kind, processes = engine_of(doc), as_int(doc.get("num_processes"))
    start = doc.start or (doc.named_by.start if doc.named_by else None)
    if start is not None and re.search(r"\b(?:mpirun|mpiexec)\b", start.before):
        return  # which starts the others
    not_distributed = kind == "NO" and (processes or 1) > 1
    if not_distributed or (kind == "MULTI_CPU" and processes != 1 and not doc.block("mpirun_config")):
        count = f"num_processes is {processes}, but" if processes else "any --num_processes is ignored:"
        also = ", or `num_processes: 1`" if kind == "NO" else ", with `use_cpu: true`"
        unless = "" if kind == "NO" else ", unless mpirun starts the launcher"
        level = NOTE if "single" in Path(doc.path).stem else None  # as TRL's single_gpu.yaml means it
        message = f"{count} distributed_type {kind} starts one process{unless}"
        yield Match("distributed_type", message, f"`distributed_type: MULTI_GPU`{also}", level=level)


@rule(ERROR, ACCELERATE, TRAINER, library="accelerate", fix='"no", in quotes')
def unquoted_no(doc: Document) -> Iterator[Match]:
    """YAML reads an unquoted `no` as false, which this key does not accept: accelerate and transformers raise."""
    for key in KEYS_WITH_NO[doc.kind or ACCELERATE]:
        # of another rule, which has it with quotes too
        is_refused = key == "mixed_precision" and settings.is_deepspeed(doc) and settings.names_json(doc)
        if doc.get(key) is False and not is_refused:
            yield Match(key, f"{key} is false, not the word no", f'`{key}: "no"`', value="no")


@rule(WARNING, ACCELERATE, library="accelerate", fix="the block's own distributed_type")
def block_not_in_force(doc: Document) -> Iterator[Match]:
    """The block of another engine has no effect: `distributed_type` alone selects the engine."""
    found, blocks = engine_of(doc), {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED"}
    is_both = all(map(doc.block, blocks)) and found not in blocks.values()  # of which each block is for another run
    for block, kind in blocks.items():
        read_by_accelerate = set(doc.block(block)) - {PARALLEL_KEY, "gradient_accumulation_steps", "gradient_clipping"}
        if read_by_accelerate and found != kind and (found in ENGINES or doc.call is not None):
            has_own = bool(doc.block(f"{found.lower()}_config"))  # the engine's own block says that it is meant
            fix = f"remove {block}, or " if has_own else ""
            fix += f"`distributed_type: {kind}`" + ("" if has_own else f", or remove {block}")
            fix = f"`--use_{kind.lower()}`" if doc.call else fix
            message = f"distributed_type is {found or 'not said'}: {block} has no effect"
            may_say = doc.call is not None and "config-file" not in doc.call.options and not found
            if doc.call is None and doc.is_flag("distributed_type"):
                message = f"the command's option selects {found}: {block} has no effect"
                fix = f"remove {block}, or the option"
            message += ", unless the default file of `accelerate config` selects it" if may_say else ""
            level, line = NOTE if may_say or is_both else None, doc.call.line if doc.call else None
            yield Match(block, message, fix, line=line, level=level)


@rule(ERROR, ACCELERATE, library="accelerate", removed_in="1.10.0", fix="degrees whose product is num_processes")
def degrees_differ_from_processes(doc: Document) -> Iterator[Match]:
    """accelerate raises where the product of the parallel degrees is not the number of processes."""
    processes = as_int(doc.get("num_processes"))
    degrees = {name: settings.parallel_degree(doc, name) for name in ("dp_replicate", "dp_shard", "tp", "cp")}
    product = math.prod(degrees.values())
    if processes is None or settings.fsdp_version(doc) != 2 or product < 2 or settings.parallel_degree(doc, "sp") > 1:
        return
    if product != processes:
        factors = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
        largest = max(degrees, key=lambda name: degrees[name])
        fix = f"degrees whose product is {processes}, or `num_processes: {product}`"
        yield Match(settings.parallel_size_key(largest), f"{factors} is not num_processes {processes}", fix)


@rule(ERROR, ACCELERATE, library="deepspeed", fix="stage 3")
def sp_below_stage_3(doc: Document) -> Iterator[Match]:
    """Below stage 3 sequence parallelism makes gradients sp times too large. Adam's losses hardly show it, the gradient
    norm does.
    """
    json = doc.deepspeed_json
    stage = as_int(doc.get("deepspeed_config.zero_stage", 2)) or 0 if json is None else settings.zero_stage(json)
    degree, listed = settings.parallel_degree(doc, "sp"), doc.block("deepspeed_config").get(PARALLEL_KEY)
    if settings.is_deepspeed(doc) and stage < 3 and (degree > 1 or (isinstance(listed, list) and "sp" in listed)):
        message = f"stage {stage} makes gradients {degree if degree > 1 else 'sp'} times too large"
        fix = "`stage` 3, as in the preset `ulysses`"
        yield Match(settings.parallel_size_key("sp") if degree > 1 else "deepspeed_config.parallel", message, fix)


# -- `fsdp_config`, whose two versions give the same words different meanings

# FSDP1's sharding strategies as FSDP2's boolean (accelerate's own `to-fsdp2`); the others have no equivalent.
RESHARD_AFTER_FORWARD = {"FULL_SHARD": True, "1": True, "SHARD_GRAD_OP": False, "2": False}
FSDP1_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
FSDP1_ONLY_KEYS = ("backward_prefetch", "forward_prefetch", "sync_module_states", "use_orig_params")


def _fsdp1_strategy(value: object) -> str:
    """Return the name of a strategy of FSDP1, which accelerate numbers, and torch begins with `_` in one case."""
    names = {"TRUE": "FULL_SHARD", "FALSE": "SHARD_GRAD_OP", **dict(zip("12345", FSDP1_STRATEGIES, strict=True))}
    return names.get(as_enum(value), as_enum(value).lstrip("_"))


@rule(WARNING, ACCELERATE, library="accelerate", fix="fsdp_sharding_strategy, or FSDP2's boolean")
def fsdp1_reshard_ignored(doc: Document) -> Iterator[Match]:
    """Under FSDP1 the launcher's `fsdp_sharding_strategy` (FULL_SHARD by default) wins over
    `fsdp_reshard_after_forward`.
    """
    reshard, strategy = fsdp_setting(doc, "reshard_after_forward"), fsdp_setting(doc, "sharding_strategy")
    if settings.fsdp_version(doc) != 1 or reshard is None:
        return
    intended = _fsdp1_strategy(reshard)
    runs = _fsdp1_strategy("FULL_SHARD" if strategy is None else strategy)
    if intended != runs:
        key = fsdp_key(doc, "reshard_after_forward")
        can_rename = strategy is None and isinstance(reshard, str)
        message = f"FSDP1 runs {shorten(runs)}, not {shorten(reshard)}"
        fix = f"`fsdp_sharding_strategy: {intended}`" if intended in FSDP1_STRATEGIES else "remove it"
        fix += "" if as_bool(reshard) is None else ", or `fsdp_version: 2`, which has the boolean"
        yield Match(key, message, fix, rename="fsdp_sharding_strategy" if can_rename else None)


@rule(WARNING, ACCELERATE, library="accelerate", removed_in="1.6.0", fix="fsdp_reshard_after_forward: false")
def fsdp2_strategy_ignored(doc: Document) -> Iterator[Match]:
    """FSDP2 does not read `fsdp_sharding_strategy` from the launcher: `fsdp_reshard_after_forward` decides, by default
    full shard."""
    strategy = as_enum(fsdp_setting(doc, "sharding_strategy"))
    reshard = as_bool(fsdp_setting(doc, "reshard_after_forward", True))
    if settings.fsdp_version(doc) != 2 or not strategy or RESHARD_AFTER_FORWARD.get(strategy) == reshard:
        return
    fixes = {"SHARD_GRAD_OP": "`fsdp_reshard_after_forward: false`", "NO_SHARD": "`distributed_type: MULTI_GPU`"}
    message = f"FSDP2 runs {'full shard' if reshard else 'shard_grad_op'}, not {shorten(strategy)}"
    fix = fixes.get(strategy, "`parallelism_config_dp_replicate_size` for a hybrid mesh")
    yield Match(fsdp_key(doc, "sharding_strategy"), message, fix)


@rule(WARNING, ACCELERATE, library="accelerate", removed_in="1.6.0", fix="nothing")
def fsdp2_obsolete_key(doc: Document) -> Iterator[Match]:
    """The key belongs to FSDP1; FSDP2 has no such setting and ignores it."""
    if settings.fsdp_version(doc) != 2:
        return
    strategy = RESHARD_AFTER_FORWARD.get(as_enum(fsdp_setting(doc, "sharding_strategy")))
    redundant = strategy is not None and strategy == as_bool(fsdp_setting(doc, "reshard_after_forward", True))
    for name in (*FSDP1_ONLY_KEYS, *(["sharding_strategy"] if redundant else [])):
        is_refused = name == "sync_module_states" and as_bool(fsdp_setting(doc, name)) is False  # loading-without-sync
        if fsdp_setting(doc, name) is not None and not is_refused:
            key = fsdp_key(doc, name)
            yield Match(key, f"fsdp_{name} belongs to FSDP1 and has no effect", "remove it", remove=True)


@rule(ERROR, ACCELERATE, library="accelerate", fix="a multiple of num_machines, at most a process per GPU")
def uneven_processes(doc: Document) -> Iterator[Match]:
    """accelerate starts `num_processes // num_machines` on each node and drops the rest. NCCL refuses more processes on
    a node than `gpu_ids` has entries.
    """
    processes, machines = as_int(doc.get("num_processes")), as_int(doc.get("num_machines")) or 1
    written = re.search(r"^num_machines:[ ]*(\d+)", doc.text, re.MULTILINE)
    if written and settings.is_template(doc.get("num_machines")) and (processes or 1) < int(written[1]):
        machines = int(written[1])  # a command has a variable in its place
    is_filtered = any(doc.get(f"deepspeed_config.deepspeed_{each}_filter") for each in ("inclusion", "exclusion"))
    if not processes or processes < 1 or machines < 1 or is_filtered or engine_of(doc) == "NO":
        return  # a filter of hosts decides, or one process is started
    ids = str(doc.get("gpu_ids") or "all")
    per_node = processes // machines
    if processes % machines:
        total = f"{per_node * machines} processes, {per_node} on each of {machines} nodes"
        fix = f"a multiple of {machines}, or the number of machines"
        yield Match("num_processes", f"{processes} starts {total}", fix)
    is_open = ids == "all" or settings.is_template(ids) or as_bool(doc.get("use_cpu"))
    gpus = per_node if is_open else len(ids.strip(" ,").split(","))
    fix = f"`num_processes: {gpus * machines}`"
    if per_node > gpus:
        fix += ", or more `gpu_ids`"
        yield Match("gpu_ids", f"{per_node} processes on a node share the GPUs {shorten(ids)}", fix)
    elif 0 < per_node < gpus:
        message = f"{per_node} of {gpus} GPUs of a node get a process: num_processes counts those of all nodes"
        level = WARNING if machines > 1 else NOTE  # or vLLM has them
        yield Match("num_processes", message, fix, level=level)


@rule(WARNING, ACCELERATE, library="accelerate", fix="the flags of accelerate launch")
def never_taken(doc: Document) -> Iterator[Match]:
    """`accelerate launch` takes no value for these from the YAML: their defaults apply."""
    table = {name: default for name, default in launcher_tables()["never_taken"].items() if doc.get(name) is not None}
    many = (as_int(doc.get("num_machines")) or 1) > 1
    differ = [name for name in ("rdzv_backend",) if many and as_enum(doc.get(name)) not in ("", "STATIC")]
    differ += [name for name in ("enable_cpu_affinity",) if as_bool(doc.get(name))]
    if differ:
        unread = ", ".join(f"{name} {shorten(doc.get(name))}" for name in table)
        values = {name: "" if name == "enable_cpu_affinity" else f" {shorten(doc.get(name))}" for name in differ}
        flags = " ".join(f"--{name}{value}" for name, value in values.items())
        message = f"accelerate launch never takes these from the file: {unread}"
        yield Match(differ[0], message, f"`accelerate launch {flags}`")


@rule(ERROR, ACCELERATE, TRAINER, AXOLOTL, library="accelerate", fix="the class of the model's own layers, or nothing")
def layer_class_of_another_model(doc: Document) -> Iterator[Match]:
    """The model that the command names has no such layers: accelerate raises "Could not find the transformer layer
    class"."""
    name = "transformer_layer_cls_to_wrap"
    names = doc.named_by or doc
    in_block, model = fsdp_setting(doc, name), names.get("model_name_or_path", names.get("base_model"))
    key = f"fsdp_{name}" if in_block is None else fsdp_key(doc, name)
    classes = doc.get(key) if in_block is None else in_block
    is_others = doc.kind == ACCELERATE and engine_of(doc) != "FSDP"
    if not isinstance(classes, str) or settings.is_template(classes) or is_others:
        return
    from toolkit.models.decoders import LLAMA_FAMILY, OTHER_DECODERS
    from toolkit.models.read_model import known_models, made_from, same_shape

    known = None
    if isinstance(model, str) and not settings.is_template(model):
        known = model if model in known_models() else same_shape(model) or made_from(Path(model).name)
    family = {each.replace("_", "") for each in LLAMA_FAMILY}  # whose layers are all named alike
    types = {*family, *(each.replace("_", "") for each in OTHER_DECODERS)}
    its = "" if known is None else str(read_configuration(known_models()[known]).get("model_type")).replace("_", "")
    for each in classes.split(","):
        name = re.sub("(?:Decoder)?(?:Layer|Block)$", "", each.strip())
        if (of := name.lower()) in family and not each.strip().endswith("DecoderLayer"):
            fix = f"`{name}DecoderLayer`, or remove it: accelerate takes the model's own classes"
            if f"class {each.strip()}(" not in doc.reader_source:
                yield Match(key, f"no model of transformers has a {each.strip()}: accelerate raises", fix)
        elif its in types and of in types and not (its.startswith(of) or of.startswith(its)):
            message = f"{model.rpartition('/')[2]} has no {each.strip()}: accelerate raises"
            yield Match(key, message, "remove it: accelerate takes the model's own classes")

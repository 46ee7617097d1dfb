"""Read a model's shape from a hub id, a folder, or a `config.json`; no weights are fetched or opened.

Architectures with formulas are read here in milliseconds. transformers builds all others on the meta device, in a child
process (`python -m toolkit.models.count_from_transformers`) that imports torch and takes 10 to 30 s. Its answer depends
on the configuration, on the counting code and on the installed libraries only, so it is stored under a hash of these in
`cache_folder() / "counted-models"` and read in a millisecond from then on. Without these libraries, and where the count
takes too long, another size of the same family that was counted is scaled (`toolkit.models.families`).
"""

import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError, nearest, shown
from toolkit.files import write_text
from toolkit.files.documents import parse_json, read_json, read_json_object
from toolkit.files.paths import cache_folder, user_path
from toolkit.hardware.gpu_table import Gpu
from toolkit.installation import missing_package
from toolkit.models.config_fields import CONFIG, MODEL_TYPES, ConfigFields, read_config
from toolkit.models.decoders import shape_from_config, types_with_formulas, with_next_token_layers
from toolkit.models.families import COUNTED, differing, family_count
from toolkit.models.shape import Adapter, Adapters, CountedActivations, Layer, ModelShape, Tensor
from toolkit.models.vision_tower import patches_per_token
from toolkit.versions import installed_version, model_types

# Facts of well-known models, `OWNER/NAME/config.json` each, with their source in `_source`.
KNOWN = Path(__file__).with_name("known")
COUNTING_SECONDS = 300
COUNTING_CPU_SECONDS = 30  # imports included; linear attention in Python would take longer
REFUSED = "refused: "  # start of the line in which the child process says why it cannot count
COUNTING_MODULES = ("count_from_transformers", "fake_tensors")
COUNTING_LIBRARIES = ("transformers", "torch", "peft")
MAX_REASON = 300  # characters of what transformers says
TUNING, STORED = ({*words.split()} for words in MODEL_TYPES["words_of_names"].values())
MEASURED = "`toolkit rehearse --script YOUR_SCRIPT` measures it"
# Owners that store other owners' models by their names, ModelScope's among them.
COPIERS = {"unsloth", "nousresearch", "thudm", "zhipuai", "llm-research", "ai-modelscope"}
# What tells a language model from others of its kind.
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
# Models of code on the hub that have the tensors of an architecture of transformers.
SAME_TENSORS = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}


def read_model(MODEL: str, *, count: bool = True) -> ModelShape:  # noqa: N803
    """Return the shape of MODEL.

    With `count=False`, an architecture that has neither formulas nor a count is an error, since counting it takes
    seconds. Raises ToolkitError for a model that is missing, unreadable, incomplete, or not a language model.
    """
    path = config_path(MODEL)
    values = read_config(path)
    fields = ConfigFields(as_transformers_has_it(values), str(path))
    _check_type(fields)
    shape = shape_from_config(fields)
    if shape is not None:
        return with_next_token_layers(shape, fields) if values.get("model_type") == "mimo" else shape
    counted = count_shape(path, fields.values, waits=count)
    if counted is None:
        raise ToolkitError(f"there are no formulas for model_type {fields.values['model_type']!r}", hint=_known())
    return replace(counted, patches_per_token=patches_per_token(fields.values))


def as_transformers_has_it(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration; those of code on the hub with the type that has its tensors."""
    same = SAME_TENSORS.get(str(values.get("model_type")))
    return values if same is None else {k: v for k, v in values.items() if k != "auto_map"} | {"model_type": same}


def count_shape(config: Path, values: Mapping[str, Any], *, waits: bool = True) -> ModelShape | None:
    """Return the shape of the model that `config` describes; `values` are its fields.

    Without `waits`, None where there is neither a count nor one of its family. Raises ToolkitError if
    transformers cannot build a language model from it, or none that is planned.
    """
    if (bundled := bundled_count(values)) is not None:
        return shape_from_counted(json.loads(bundled.read_text()))
    path, error = cached_count(values), missing_package(*COUNTING_LIBRARIES)
    if (error or config in known_models().values()) and (scaled := _scaled_from_family(values)):
        return scaled
    with contextlib.suppress(ToolkitError):  # missing, or damaged: count again
        return _counted_or_scaled(read_json(path), values)
    if not waits:
        return _scaled_from_family(values)
    if error:
        message = f"{values['model_type']} has no formulas, no bundled model has these dimensions, and {error.message}"
        raise ToolkitError(message, hint=error.hint)
    print(f"counting {values['model_type']}, once, at most {COUNTING_CPU_SECONDS} s of a processor", file=sys.stderr)
    try:
        counted = _run_child(config)
    except ToolkitError:
        if scaled := _scaled_from_family(values):
            return scaled
        raise
    shape = _counted_or_scaled(counted, values)
    with contextlib.suppress(OSError):  # a read-only cache is no error
        write_text(path, json.dumps(counted))
    return shape


def _counted_or_scaled(counted: Any, values: Mapping[str, Any]) -> ModelShape:
    """The shape that was counted; where the count of its activations did not end, with those of its family."""
    shape = shape_from_counted(counted)
    return shape if shape.why_not_counted is None else _scaled_from_family(values) or shape


def _scaled_from_family(values: Mapping[str, Any]) -> ModelShape | None:
    result = family_count(values, itertools.chain(*_counted_folders().values()))
    return None if result is None else replace(shape_from_counted(result[0]), scaled_from=result[1])


def bundled_count(values: Mapping[str, Any]) -> Path | None:
    """Return what is shipped of the same model; None where nothing is."""
    folders = _counted_folders().get(str(values.get("model_type")), ())
    return next((each / COUNTED for each in folders if not differing(values, each)), None)


@functools.cache
def _counted_folders() -> Mapping[str, list[Path]]:
    folders: dict[str, list[Path]] = {}
    for path in known_models().values():
        if path.with_name(COUNTED).exists():
            folders.setdefault(as_transformers_has_it(json.loads(path.read_text()))["model_type"], []).append(
                path.parent
            )
    return folders


def cached_count(values: Mapping[str, Any]) -> Path:
    """Return the path of the cache entry of a configuration, whether or not it exists.

    The name is a hash of everything that decides the answer, so an upgrade of a library counts again.
    """
    versions = {library: installed_version(library) for library in COUNTING_LIBRARIES}
    digest = hashlib.sha256(json.dumps([values, versions], sort_keys=True).encode())
    for module in COUNTING_MODULES:
        digest.update((Path(__file__).parent / f"{module}.py").read_bytes())
    return cache_folder() / "counted-models" / f"{digest.hexdigest()}.json"


def _run_child(config: Path) -> Any:
    command = [sys.executable, "-m", "toolkit.models.count_from_transformers", str(config)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,  # a library that would ask a question gets no answer
            stdout=subprocess.PIPE,  # its stderr is this process's: it says what it counts
            encoding="utf-8",
            errors="replace",
            timeout=COUNTING_SECONDS,
            check=False,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        )
    except subprocess.TimeoutExpired:
        raise ToolkitError(f"{config}: transformers did not build the model within {COUNTING_SECONDS} s") from None
    lines = done.stdout.splitlines()
    if done.returncode:
        refused = next((line for line in lines if line.startswith(REFUSED)), "no reason given")
        reason = refused.removeprefix(REFUSED)[:MAX_REASON]
        what = f"{config}: no language model can be counted from it: {reason}"
        raise ToolkitError(what, hint=f"architectures that need no transformers: {_known()}")
    return parse_json(lines[-1] if lines else "", f"{config}: what transformers counted")


def shape_from_counted(counted: Any) -> ModelShape:
    """Return the shape that the child process describes. Raises ToolkitError for anything else."""
    try:
        fields = dict(counted)
        kinds = [_tensors(layer) for layer in fields.pop("layers_of_kind")]
        layers = tuple(kinds[number] for number in fields.pop("kind_of_layer"))
        adapters = [_adapters(layer) for layer in fields.pop("adapters_of_layer")]
        return ModelShape(
            layers=layers,
            outer=_tensors(fields.pop("outer")),
            counted_on="meta device",
            counted_activations=CountedActivations.read(fields.pop("activations"), fields.pop("counted_rank")),
            counted_adapters=dict(zip(layers, adapters, strict=True)),  # layers with equal tensors have equal adapters
            outer_adapters=_adapters(fields.pop("outer_adapters")),
            **fields,
        )
    except (LookupError, TypeError, ValueError) as error:
        raise ToolkitError(f"counted tensors are damaged: {' '.join(str(error).split())[:MAX_REASON]}") from None


def _tensors(rows: Any) -> Layer:
    return tuple(Tensor(name=name, shape=tuple(shape), in_linear=in_linear) for name, shape, in_linear in rows)


def _adapters(sizes: Any) -> Adapters:
    return tuple(Adapter(target=name, rows=m, columns=n, rank_multiple=rank) for name, m, n, rank in sizes)


# What training loads in bf16: gpt-oss as published (transformers, `Mxfp4Config(dequantize=True)`), and FP8 releases.
DEQUANTIZED_METHODS = ("mxfp4", "fp8")


def check_unquantized(model: str) -> None:
    """Raise ToolkitError for a checkpoint that is already quantized: the size of its weights depends on its method.

    One that is dequantized for training is planned as that.
    """
    quantized = read_config(config_path(model)).get("quantization_config")
    if not quantized and not user_path(model).exists():
        short, stored = hub_id(model).lower().rpartition("/")[2], MODEL_TYPES["stored_by_hub_ids"].items()
        quantized = next((method for method, words in stored if re.search(words, short)), None)
    if quantized:
        method = quantized.get("quant_method", "unknown") if isinstance(quantized, dict) else quantized
        if method in DEQUANTIZED_METHODS:
            _say_once(f"{model}: its {method} weights are planned dequantized to bf16, as `toolkit train` loads them")
            return
        what = f"{model} is already quantized (`quantization_config`, method {str(method)[:40]}), which is not planned"
        hint = "plan the model it was made from, with `--lora-r 16 --load-in-4bit` for 4-bit NF4"
        raise ToolkitError(what, hint=hint)


@functools.cache
def known_models() -> Mapping[str, Path]:
    """Return the hub ids of the models that need no hub to be planned, with their configurations.

    >>> "Qwen/Qwen3-8B" in known_models()
    True
    """
    return {"/".join(path.parts[-3:-1]): path for path in sorted(KNOWN.glob(f"*/*/{CONFIG}"), key=str)}


@functools.cache
def bundled_models() -> Mapping[str, Path]:
    """Return those of the known models that are planned at once: by formulas, a shipped count, or their family's."""
    values = {name: as_transformers_has_it(json.loads(path.read_text())) for name, path in known_models().items()}
    formulas = types_with_formulas()
    return {
        name: known_models()[name]
        for name, each in values.items()
        if each["model_type"] in formulas or bundled_count(each) is not None or _scaled_from_family(each) is not None
    }


def hub_id(model: str) -> str:
    """Return the hub id of a known model that is named without its owner; any other name as it is.

    >>> hub_id("Qwen3-8B"), hub_id("./my-model")
    ('Qwen/Qwen3-8B', './my-model')
    """
    named = (known for known in known_models() if known.partition("/")[2] == model)
    return model if user_path(model).exists() else next(named, model)


@functools.cache
def _say_once(line: str) -> None:
    print(line, file=sys.stderr)


def same_shape(name: str) -> str | None:
    """Return the known model whose shape a published copy or another tuning of it has; None for any other name.

    >>> same_shape("Qwen/Qwen2.5-7B-Instruct"), same_shape("allenai/Olmo-3-7B-Think"), same_shape("Qwen/Qwen2-VL-7")
    ('Qwen/Qwen2.5-7B', 'allenai/Olmo-3-1025-7B', None)
    """
    owner, _, short = name.lower().rpartition("/")
    owner, twins = "" if owner in COPIERS else owner, _twins()
    return twins.get((owner, short)) or twins.get((owner, _untuned(short)))


@functools.cache
def _twins() -> Mapping[tuple[str, str], str]:
    """Known models by owner and name, by the name alone, and by both without words of tuning."""
    copies = {copy: known for known, each in read_json_object(KNOWN / "copies.json").items() for copy in each}
    names = copies | {known: known for known in reversed([*known_models()])}
    named = [(*name.lower().split("/"), known) for name, known in names.items()]
    twins = {(each, _untuned(short)): known for owner, short, known in named for each in ("", owner)}
    return twins | {(each, short): known for owner, short, known in named for each in ("", owner)}


def _untuned(short: str) -> str:
    return "-".join(word for word in short.lower().split("-") if word not in TUNING)


def made_from(name: str) -> str | None:
    """Return the known model that a quantized copy, another owner's copy, or a short name may be of: a guess, to ask.

    >>> made_from("TheBloke/Qwen2.5-7B-Instruct-AWQ"), made_from("llama3.3:70b"), made_from("Qwen2-VL-7")
    ('Qwen/Qwen2.5-7B', 'meta-llama/Llama-3.3-70B-Instruct', None)
    """
    return _squeezed_names().get("".join(_words(name)))


def base_named_in(name: str) -> str | None:
    """Return the known model of a size that a name contains: a guess at what a fine-tune was made from.

    >>> base_named_in("somebody/MedReason-Llama-3.1-8B-v2"), base_named_in("somebody/Phi-4-flash")
    ('meta-llama/Llama-3.1-8B', None)
    """
    words = _words(name)
    parts = (words[start:end] for start in range(len(words)) for end in range(start + 1, len(words) + 1))
    sized = ["".join(part) for part in parts if any(re.fullmatch(r"\d+(\.\d+)?[bm]", word) for word in part)]
    return next((_squeezed_names()[each] for each in sorted(sized, key=len)[::-1] if each in _squeezed_names()), None)


@functools.cache
def _squeezed_names() -> Mapping[str, str]:
    longest_first = sorted(_twins().items(), key=lambda each: -len(each[0][1]))
    return {"".join(_words(short)): known for (_, short), known in longest_first}


def _words(name: str) -> list[str]:
    """The words of a name that say its shape; a file's `Q4_K_M` is none."""
    short = re.sub(r"[-_.]i?q\d_\w+", "", name.lower().rpartition("/")[2])
    return [word for word in re.split("[-_:]", short) if word and word not in TUNING | STORED]


def config_path(model: str, *, known: bool = True) -> Path:
    """Return the path of MODEL's configuration; a hub id's is downloaded into the hub's own cache.

    With `known=False`, that of a well-known model is downloaded too, into the folder of its other files.
    """
    name, path = hub_id(model), user_path(model)
    if path.is_dir():
        if not (path / CONFIG).exists():
            raise ToolkitError(f"{path} has no {CONFIG}", hint="give a folder that holds a Hugging Face model")
        return path / CONFIG
    if path.exists():
        return path
    is_path = model.count("/") > 1 or model.startswith((".", "/", "~")) or model.endswith((".json", "/"))
    folder = path.name.replace("___", ".")  # of the node that trains, as ModelScope's cache writes names
    twin = same_shape(folder if is_path else name) if known else None
    if is_path and twin is None:
        of_other = f"{guess}? Or " if (guess := _guess(path.name)) else ""
        hint = f"{of_other}a hub id, a folder with {CONFIG}, or a {CONFIG}"
        raise ToolkitError(f"no such file or folder: {model}", hint=hint)
    if known and name in known_models():
        if _kind_by_name(name) == "an embedding model":
            _say_once(
                f"{model}: planned as a language model, with head and logits; a loss of embeddings is not planned"
            )
        return known_models()[name]
    if twin is not None:
        in_4bit = "; its 4-bit weights are planned with `--lora-r 16`" if stored_in_4bit(model) else ""
        by_name = " is not here, and is planned by its name," if is_path else ": planned"
        _say_once(f"{model}{by_name} with the configuration of {twin}{in_4bit}")
        return known_models()[twin]
    try:
        from toolkit.models.hub import download_config  # with http.client and ssl

        return download_config(name)
    except ToolkitError as error:
        if kind := _kind_by_name(name):
            raise _no_decoder(f"{name}, by its name,", kind) from None
        if text := MODEL_TYPES["text_parts"].get(name.lower().rpartition("/")[2]):
            raise _needs_code(name, text) from None
        if (guess := _guess(name)) is None:
            raise
        stored = STORED & {*re.split("[-_:]", name.lower().rpartition("/")[2])}
        in_4bit = " with `--lora-r 16 --load-in-4bit`" if stored else ""
        raise ToolkitError(error.message, hint=f"{guess}{in_4bit}? Or {error.hint}") from None


def _guess(name: str) -> str | None:
    names = {each.lower() if "/" in name else each.partition("/")[2].lower(): each for each in known_models()}
    # a typing error changes no number: with another one it is another size or generation
    same = [each for each in names if re.findall(r"\d+", each) == re.findall(r"\d+", name)]
    close = made_from(name) or names.get(nearest(name.lower(), same, cutoff=0.9) or "")
    if close == name:
        return None
    base = None if close else base_named_in(name)
    return f"did you mean `{close}`" if close else base and f"if it is a fine-tune, plan its base, maybe `{base}`"


def _kind_by_name(name: str) -> str | None:
    """What a hub id says of its model, without its owner: `bartowski` has quantized copies, and no BART."""
    short = name.lower().rpartition("/")[2]
    return next((kind for kind, words in MODEL_TYPES["words_of_hub_ids"].items() if re.search(words, short)), None)


def stored_in_4bit(model: str) -> bool:
    """Return True for a model whose name says that its weights are in 4 bits: adapters alone are trained on them."""
    return "4bit" in model.lower()


def model_and_gpu(model: str, find_gpu: Callable[[], Gpu]) -> tuple[ModelShape, Gpu]:
    """Return a model's shape and a GPU. Raises ToolkitError with what is wrong about both."""
    try:
        check_unquantized(model)
        shape = read_model(model)
    except ToolkitError as error:
        try:
            find_gpu()
        except ToolkitError as other:
            hint = "; ".join(filter(None, (error.hint, other.hint)))
            raise ToolkitError(f"{error.message}; {other.message}", hint=hint) from None
        raise
    return shape, find_gpu()


def _check_type(fields: ConfigFields) -> None:
    model_type = fields.values.get("model_type")
    if not isinstance(model_type, str):
        raise ToolkitError(f"{fields.source} has no `model_type`", hint=f"for example `llama`; known: {_known()}")
    if kind := _other_kind(model_type, fields.values):
        raise _no_decoder(model_type, kind)
    for why, types_of_kind in MODEL_TYPES["not_counted"].items():
        if model_type in types_of_kind.split():
            raise ToolkitError(f"{model_type} is not planned: {why}", hint=MEASURED)
    types = model_types()
    if model_type in MODEL_TYPES["needs_code_of_the_hub"]["types"].split() and model_type not in types:
        raise _needs_code(f"{fields.source}: model_type {shown(model_type)}", text_part(fields.values))
    if model_type not in types_with_formulas() and types and model_type not in types:
        close = nearest(model_type[:200], types, cutoff=0.85)
        if "auto_map" in fields.values:
            raise _needs_code(f"{fields.source}: model_type {shown(model_type)}", text_part(fields.values))
        # another generation, and no typing error
        if close and re.sub(r"\d", "", close) == re.sub(r"\d", "", model_type):
            version = installed_version("transformers")
            hint = f"transformers {version} has `{close}` and does not have this one; a newer version may"
            raise ToolkitError(f"{fields.source}: unknown model_type {shown(model_type)}", hint=hint)
        hint = f"did you mean `{close}`?" if close else f"known: {_known()}, and {len(types)} types of transformers"
        raise ToolkitError(f"{fields.source}: unknown model_type {shown(model_type)}", hint=hint)


def _needs_code(what: str, text: str | None) -> ToolkitError:
    hint = f"its language model has the sizes of {text}: plan that" if text else None
    hint = hint or "plan a model of the same shape that transformers has"
    return ToolkitError(f"{what} needs code from the hub, which is not run", hint=hint)


def text_part(values: Mapping[str, Any]) -> str | None:
    """Return the known model that has the sizes of a configuration, or of its language model's part."""
    parts = [values, *(part for name, part in values.items() if name.endswith("_config") and isinstance(part, dict))]
    dense = [part for part in parts if not any("expert" in name for name in part)]
    sizes = [[part.get(name) for name in SIZES] for part in dense]
    known = ((name, json.loads(path.read_text())) for name, path in known_models().items())
    return next((name for name, each in known if [each.get(size, 0) for size in SIZES] in sizes), None)


def _no_decoder(what: str, kind: str) -> ToolkitError:
    message = f"{what} is {kind}, whose heads and losses are not planned: only decoders are"
    return ToolkitError(message, hint=f"{MEASURED}; a decoder is planned, for example Qwen/Qwen3-0.6B")


def _other_kind(model_type: str, values: Mapping[str, Any]) -> str | None:
    """What a configuration describes that is no causal language model; None where nothing says so."""
    for kind, types_of_kind in MODEL_TYPES["no_decoders"].items():
        if model_type in types_of_kind.split() and not values.get("is_decoder"):
            return kind
    classes = values.get("architectures")
    name = str(classes[0]) if isinstance(classes, list) and classes else ""
    if values.get("is_encoder_decoder") is True:
        return "an encoder with a decoder"
    if name.endswith(("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")):
        return f"stored as a classifier ({name})"
    # BLOOM's own checkpoints are stored as `BloomModel`
    is_base = name.endswith("Model") and not name.endswith("LMHeadModel") and model_type != "bloom"
    if is_base or values.get("use_bidirectional_attention") is True:
        return f"stored as an embedding model ({name})"
    return None


def _known() -> str:
    return ", ".join(types_with_formulas())


DENSE, MIXTURES_WITH_ADAPTED_EXPERTS, MIXTURES_WITH_FROZEN_EXPERTS = (
    tuple(names.split()) for names in MODEL_TYPES["checked"].values()
)
# `tests/fixtures/quantized_bytes.json`: bytes that bitsandbytes held.
QUANTIZED = ("gemma2", "gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3")
CHECKED = (*types_with_formulas(), *DENSE, *MIXTURES_WITH_ADAPTED_EXPERTS, *MIXTURES_WITH_FROZEN_EXPERTS)


def is_checked(model_type: str, *, in_4bit: bool) -> bool:
    """Return True if a test compares the planned tensors of an architecture with the libraries' own.

    `toolkit plan` calls model states exact for these only.
    """
    return model_type in (QUANTIZED if in_4bit else CHECKED)

"""Other sizes of a family that transformers counted: tensors by the family's terms, activations scaled by widths.

`terms.json` beside a counted model has each dimension of its tensors as a sum of products of sizes in the
configuration (`tests/scripts/family_terms.py` derives it). Tensors of another size are exact, or the family is not
used. What its layers save is scaled from the nearest counted size, by the widths that a token passes through.

`fields.json` beside it has the fields of its configuration as transformers resolves them (`bundled_models.py` there
writes it): by these, the configuration that a hub or a fine-tune stores is known to be of the same model.
"""

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

TERMS, COUNTED, FIELDS = "terms.json", "counted.json", "fields.json"
# Fields of a configuration that decide no tensor and nothing that is saved.
NO_DIMENSIONS = {
    *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "initializer_range", "use_cache"),
    *("quantization_config", "bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"),
    *("max_position_embeddings", "model_max_length", "image_grid_pinpoints"),
}
WINDOW = ("sliding_window", "max_window_layers")
HARMLESS = re.compile(r"^_|^mtp_|_token|^output_|^return_|^model_type$|^is_encoder_decoder$|^rope_|_index$")
TIED, HEAD = "tie_word_embeddings", "lm_head.weight"
SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_kv_heads", "head_dim", "vocab_size"),
    *("num_experts", "experts_per_token"),
)
LAYERS, DEPTHS = "num_hidden_layers", ("depth", "num_hidden_layers")
# Sizes that say how many of the first layers are of another kind.
FIRST_LAYERS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
BLOCK = re.compile(r"^(.*?\.)(\d+)\.")
Row = list[Any]
Values = Mapping[str, Any]


def scalars(values: Values, prefix: str = "", *, with_missing: bool = False) -> dict[str, Any]:
    """Return the whole numbers, switches and names of a configuration by their path, those of its parts included."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and key.endswith("config"):
            result |= scalars(value, f"{prefix}{key}.", with_missing=with_missing)
        elif isinstance(value, bool | int | str) or (value is None and with_missing):
            result[prefix + key] = value
    return result


def nested(values: Values) -> dict[str, Any]:
    """Return a configuration with its language model's fields in `text_config`, where older files have them above."""
    if "vision_config" not in values or "text_config" in values or "hidden_size" not in values:
        return dict(values)
    outer = {name: value for name, value in values.items() if name.endswith("_config") or HARMLESS.search(name)}
    return outer | {"text_config": {name: value for name, value in values.items() if name not in outer}}


def fields(values: Values, prefix: str = "") -> dict[str, Any]:
    """Return the fields that may decide tensors or activations, by path: of real numbers, only rates of dropout."""
    result: dict[str, Any] = {}
    unused = NO_DIMENSIONS.union(WINDOW if values.get("use_sliding_window") is False else ())
    for key, value in values.items():
        if key in unused or (HARMLESS.search(key) and (key != "model_type" or "vision" in prefix)):
            continue
        if isinstance(value, dict):
            result |= fields(value, f"{prefix}{key}.") if key.endswith("config") else {}
        elif "drop" in key or float not in map(type, value if isinstance(value, list) else [value]):
            result[prefix + key] = value
    return result


def differing(values: Values, folder: Path) -> list[str]:
    """Return the paths of the fields in which a configuration differs from that of a counted model."""
    stated = fields(nested(values))
    needed, default, derived, other = json.loads((folder / FIELDS).read_text())
    return [
        *(path for path, value in needed.items() if stated.get(path) not in (value, other.get(path, value))),
        *(path for path, value in default.items() if stated.get(path, value) not in (value, other.get(path, value))),
        *(path for path, value in derived.items() if stated.get(path) not in (None, value)),
    ]


def _with_vocabulary(values: Values, folder: Path) -> dict[str, Any] | None:
    different = differing(values, folder) if (folder / FIELDS).exists() else []
    size = fields(nested(values)).get(different[0]) if len(different) == 1 else None
    if type(size) is not int or not different[0].endswith("vocab_size"):
        return None
    counted, before = _counted(folder), _counted(folder)["vocab_size"]
    more = size - before  # Mllama embeds eight tokens more than its vocabulary has
    outer = [
        [name, [rows + more if before <= rows < before + 64 else rows for rows in shape], is_linear]
        for name, shape, is_linear in counted["outer"]
    ]
    return counted | {"outer": outer, "vocab_size": size}


def decides(path: str) -> bool:
    """Return True for a field that may decide dimensions; numbers of layers decide how many layers there are."""
    name = path.rpartition(".")[2]
    return not (name in NO_DIMENSIONS or name in DEPTHS or name in (*FIRST_LAYERS, TIED) or HARMLESS.search(name))


def family_count(values: Values, counted: Iterable[Path]) -> tuple[dict[str, Any], str] | None:
    """Return what transformers would count of a configuration, and the size that its activations are scaled from.

    `counted` are the folders of counted models. None where no family has terms that hold for the configuration.
    """
    values, counted = nested(values), list(counted)
    for folder in (each for each in counted if _values(each).get("model_type") == values.get("model_type")):
        if result := _with_vocabulary(values, folder):
            return _with_activations(result, [folder])
    types = _types(values)
    sizes = [
        each for each in counted if all(types.get(path, name) == name for path, name in _types(_values(each)).items())
    ]
    for base in (folder for folder in sizes if (folder / TERMS).exists()):
        result = _with_terms(values, base)
        if result is not None:
            kinds = [_names(layer) for layer in result["layers_of_kind"]]
            same = [each for each in sizes if [_names(layer) for layer in _counted(each)["layers_of_kind"]] == kinds]
            if same:
                return _with_activations(result, same)
    return None


def _with_activations(result: dict[str, Any], same: Sequence[Path]) -> tuple[dict[str, Any], str]:
    nearest = min(same, key=lambda each: abs(math.log(_width(result) / _width(_counted(each)))))
    rows = [_scaled(row, result, _counted(nearest)) for row in _counted(nearest)["activations"]]
    return result | {"activations": rows}, nearest.name


def _types(values: Values) -> dict[str, str]:
    """The type of a model and those of its parts, where stated; any encoder of images may stand beside a text part."""
    return {
        path: name for path, name in scalars(values).items() if path.endswith("model_type") and "vision" not in path
    }


@functools.cache
def _values(folder: Path) -> dict[str, Any]:
    return nested(json.loads((folder / "config.json").read_text()))


@functools.cache
def _counted(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / COUNTED).read_text()))


def _names(layer: Sequence[Row]) -> list[str]:
    return [row[0] for row in layer]


def _text(values: Values) -> Values:
    inner = values.get("text_config", values.get("llm_config"))
    return inner if isinstance(inner, dict) else values


def _with_terms(values: Values, base: Path) -> dict[str, Any] | None:
    """What would be counted, by the terms of another size; None where they do not hold, or do not say it."""
    terms, counted = json.loads((base / TERMS).read_text()), _counted(base)
    old, sizes = (_resolved(each, terms["defaults"]) for each in (_values(base), values))
    kinds = _kinds(_text(values), _text(_values(base)), counted["kind_of_layer"])
    # a size that the terms have in another place, for example beside `text_config`
    names = {path.rpartition(".")[2] for path in terms["free"]}
    elsewhere = {path for path in {*old, *sizes} if path.rpartition(".")[2] in names} - {*terms["free"]}
    if kinds is None or any(old.get(path) != sizes.get(path) for path in {*terms["fixed"], *elsewhere}):
        return None

    def dimensions(place: str, counted_as: Sequence[int]) -> list[int]:
        result = []
        for at, before in enumerate(counted_as):
            term, *same = terms["terms"][f"{place} {at}"].split("|")
            # it is no sum of products, or the configuration has the size by another name
            if any(old[name] != sizes[name] for name in same) or evaluate(term, old) != before:
                raise KeyError(place)
            result.append(evaluate(term, sizes))
            if result[-1] < 1:  # a part that this size is without
                raise KeyError(place)
        return result

    def tensors(part: str, rows: Iterable[tuple[str, Row]]) -> list[Row]:
        return [[row[0], dimensions(f"{part} {place}", row[1]), row[2]] for place, row in rows]

    used = sorted(set(kinds))
    first = [counted["kind_of_layer"].index(kind) for kind in used]
    stated = (each.get(TIED) for each in (values, _text(values), terms["defaults"]))  # the whole model's decides
    tied = next((bool(each) for each in stated if each is not None), counted["tied_embeddings"])
    depths = {
        value: sizes[path] for path, value in old.items() if path.rpartition(".")[2] in DEPTHS and "vision" in path
    }
    try:
        described: dict[str, Any] = {
            name: evaluate(terms["terms"][f"size {name}"], sizes) for name in SIZES if f"size {name}" in terms["terms"]
        }
        outer = tensors("outer", _blocks(counted["outer"], depths))
        layers = [tensors(str(kind), _named(counted["layers_of_kind"][kind])) for kind in used]
        of_kind = [
            _adapters(_named(counted["adapters_of_layer"][at]), counted["layers_of_kind"][kind], layer)
            for kind, at, layer in zip(used, first, layers, strict=True)
        ]
        outer_adapters = _adapters(_blocks(counted["outer_adapters"], depths), counted["outer"], outer)
    except (KeyError, ZeroDivisionError):
        return None
    if tied != counted["tied_embeddings"]:
        # an embedding that is the head too is in a linear layer, as peft and bitsandbytes see it
        outer = [
            [name, shape, tied if "embed_tokens" in name else linear] for name, shape, linear in outer if name != HEAD
        ]
        outer += [] if tied else [[HEAD, [described["vocab_size"], described["hidden_size"]], True]]
    window = sizes.get("text_config.sliding_window", sizes.get("sliding_window")) or None
    described |= {"num_layers": len(kinds), "tied_embeddings": tied, "outer": outer, "outer_adapters": outer_adapters}
    described |= {"layers_of_kind": layers, "kind_of_layer": [used.index(kind) for kind in kinds]}
    described |= {"adapters_of_layer": [of_kind[used.index(kind)] for kind in kinds], "sliding_window": window}
    return counted | described


def _adapters(rows: Iterable[tuple[str, Row]], old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """Adapters of the new tensors; `rows` have those of the old ones, beside the name of the tensor that they adapt."""
    before, after = ({name.removesuffix(".weight"): shape for name, shape, _ in each} for each in (old, new))
    result = []
    for place, (target, rows_of_b, columns, multiple) in rows:
        name, shape = place.removesuffix(".weight"), after[target.removesuffix(".weight")]
        is_turned = before[name][-2:] != [rows_of_b, columns]
        times = multiple // before[name][0] * shape[0] if len(shape) == 3 else multiple
        result.append([target, *(reversed(shape[-2:]) if is_turned else shape[-2:]), times])
    return result


def _named(rows: Sequence[Row]) -> list[tuple[str, Row]]:
    return [(row[0], row) for row in rows]


def _blocks(rows: Sequence[Row], depths: Mapping[int, int]) -> Iterator[tuple[str, Row]]:
    """Rows outside the layers with the name that has their terms; a tower gets as many blocks as it has now."""
    blocks = [BLOCK.match(row[0]) for row in rows]
    counts = Counter(block[1] for block in {block[1] + block[2]: block for block in blocks if block}.values())
    for row, block in zip(rows, blocks, strict=True):
        if block is None or counts[block[1]] not in depths:
            yield row[0], row
        elif row[0].startswith(f"{block[1]}0.") and row[0] == next(
            each[0] for each in rows if each[0].startswith(block[1])
        ):
            start = f"{block[1]}0."
            of_first = [each for each in rows if each[0].startswith(start)]
            for number in range(depths[counts[block[1]]]):
                yield from (
                    (each[0], [f"{block[1]}{number}.{each[0].removeprefix(start)}", *each[1:]]) for each in of_first
                )


def _resolved(values: Values, defaults: Values) -> dict[str, Any]:
    """The sizes of a configuration, with what transformers puts where it states none."""
    sizes = dict(defaults) | (stated := scalars(values))
    # a name that transformers maps to the other
    sizes |= {f"{path[:-7]}local_experts": size for path, size in stated.items() if path.endswith("num_experts")}
    prefix = "text_config." if "text_config.hidden_size" in sizes else ""
    if heads := sizes.get(f"{prefix}num_attention_heads"):
        sizes.setdefault(f"{prefix}num_key_value_heads", heads)
        sizes.setdefault(f"{prefix}head_dim", sizes[f"{prefix}hidden_size"] // heads)
    return sizes


def evaluate(term: str, sizes: Values) -> int:
    """Return the value of a sum of products."""

    def product(names: Iterable[str]) -> int:
        return math.prod(int(each) if each.lstrip("-").isdigit() else sizes[each] for each in names)

    parts = (part.split("/") for part in term.split("+"))
    return sum(product(above.split("*")) // product(below) for above, *below in parts)


def _kinds(new: Values, old: Values, kinds: Sequence[int]) -> list[int] | None:
    """The kind of each layer, where what the configurations say of each layer decides it."""
    count, before = new.get(LAYERS), old.get(LAYERS)
    if not isinstance(count, int) or before != len(kinds):
        return None
    names = [name for name, row in old.items() if decides(name) and isinstance(row, list | str) and len(row) == before]
    if any(not isinstance(new.get(name), list | str) or len(new[name]) != count for name in names):
        return None

    def marks(values: Values, at: int) -> tuple[Any, ...]:
        return (*(values[name][at] for name in names), *(at < (values.get(name) or 0) for name in FIRST_LAYERS))

    kind_of = {marks(old, at): kind for at, kind in enumerate(kinds)}
    if all(kind_of[marks(old, at)] == kind for at, kind in enumerate(kinds)):
        result = [kind_of.get(marks(new, at), -1) for at in range(count)]
        return None if -1 in result else result
    return None


# -- activations


def _widths(layer: Sequence[Row], counted: Values) -> float:
    share = (counted["experts_per_token"] or 0) if counted["num_experts"] else 0
    total = 0.0
    for _, shape, _ in layer:
        total += sum(shape[1:]) * share if len(shape) == 3 and shape[0] == counted["num_experts"] else sum(shape)
    return total


def _width(counted: Values) -> float:
    layers = [_widths(layer, counted) for layer in counted["layers_of_kind"]]
    return float(sum(layers[kind] for kind in counted["kind_of_layer"]))


def _elements(layer: Sequence[Row]) -> int:
    return sum(math.prod(shape) for _, shape, _ in layer)


def _scaled(row: Values, new: Values, old: Values) -> dict[str, Any]:
    """A row of counted activations, scaled to another size; bf16 copies of weights grow with the weights."""
    copies = row["autocast"] and not row["lora"]

    def sizes(counted: Values) -> dict[str, tuple[float, float, float]]:
        """By what the parts grow: constant, per token, and per token and position."""
        layers, count = counted["layers_of_kind"], len(counted["kind_of_layer"])
        scores = (counted["attention"] == "eager" and counted["num_attention_heads"]) or 1  # a Mamba has no heads
        widest, hidden = max(_widths(layer, counted) for layer in layers), counted["hidden_size"]
        matrix = max(math.prod(shape) for layer in layers for _, shape, _ in layer)
        head = _elements([each for each in counted["outer"] if "lm_head" in each[0]]) or counted["vocab_size"] * hidden
        every = sum(_elements(layers[kind]) for kind in counted["kind_of_layer"])
        largest = max(_elements(layer) for layer in layers)
        width = _width(counted)
        return {
            "layers": (every if copies else width, width, count * scores),
            "largest_layer": (largest if copies else widest, widest, scores),
            "backward": (widest if row["lora"] else matrix, widest, scores),
            "outer": (head if copies else hidden, hidden, scores),
        }

    after, before = sizes(new), sizes(old)
    parts = {
        part: [value * more / less for value, more, less in zip(row[part], after[part], before[part], strict=True)]
        for part in after
    }
    return {**row, **{part: [round(fixed), round(token), position] for part, (fixed, token, position) in parts.items()}}

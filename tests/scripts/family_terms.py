"""Derive how the tensors of the counted models follow from their configurations, into `terms.json` beside each count.

    python tests/scripts/family_terms.py                  # those without terms
    python tests/scripts/family_terms.py --again --check  # derive all again, and compare: the nightly job

Each size in a configuration is doubled, alone and where needed in pairs, and the model is built on the meta device each
time, cut to as few layers as have all kinds. What does not follow as a sum of products is left out, and so is a size
that cannot be doubled. `toolkit.models.families` plans other sizes of the same family with these terms.
"""

import argparse
import copy
import itertools
import json
import math
import sys
import warnings
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.utils import logging

from toolkit.models import count_from_transformers as counting
from toolkit.models.families import COUNTED, TERMS, decides, evaluate, family_count, nested, scalars
from toolkit.models.read_model import known_models

SMALL = 512
SAME = ("layers_of_kind", "kind_of_layer", "outer", "adapters_of_layer", "outer_adapters", "num_kv_heads", "head_dim")
POWERS = {Fraction(2) ** power: power for power in (-2, -1, 1, 2)}
Leaves = dict[str, int]
"""Whole numbers of a description by their place in it."""


def leaves(config: Any) -> Leaves:
    """Return what a cut model has: sizes, and each dimension of its tensors, by kind of layer and name."""
    with torch.device("meta"):
        model = counting.model_class(config).from_config(config, trust_remote_code=False)
    described = counting.describe_tensors(model)
    result = {f"size {name}": value for name, value in described.items() if type(value) is int and value}
    parts = {"outer": described["outer"]}
    parts |= {str(kind): tensors for kind, tensors in enumerate(described["layers_of_kind"])}
    for part, tensors in parts.items():
        result |= {f"{part} {name} {at}": size for name, shape, _ in tensors for at, size in enumerate(shape)}
    return result


def derive(path: Path) -> dict[str, Any]:
    """Return the terms of one model."""
    values = nested(json.loads(path.read_text()))
    config = AutoConfig.from_pretrained(str(path.parent), trust_remote_code=False)
    defaults = scalars(type(config)().to_dict(), with_missing=True)
    with torch.device("meta"):
        model = counting.model_class(config).from_config(config, trust_remote_code=False)
    kinds = counting._kind_of_each_layer(model)
    resolved = scalars(config.to_dict())

    def built(sizes: Mapping[str, Any]) -> Leaves:
        changed = copy.deepcopy(values)
        for name, size in sizes.items():
            *folders, last = name.split(".")
            inner = changed
            for folder in folders:
                inner = inner[folder]
            inner[last] = size
        cut = counting._with_fewer_layers(type(config).from_dict(changed), kinds)
        return leaves(cut)

    sizes = (name for name, value in resolved.items() if type(value) is int and value > 0)
    names = [name for name in sizes if decides(name) and _reachable(values, name)]
    switches = [name for name, value in resolved.items() if isinstance(value, bool) and _reachable(values, name)]
    base = {name: resolved[name] for name in names}
    start = built(base)
    free = [name for name in switches if _same(built, base | {name: not resolved[name]}, start)]
    doubled: dict[str, Leaves] = {}
    for name in names:
        try:
            doubled[name] = built(base | {name: 2 * base[name]})
            if doubled[name].keys() != start.keys():
                raise ValueError("other tensors")
        except Exception:
            doubled.pop(name, None)
    pairs: dict[tuple[str, str], Leaves] = {}
    terms: dict[str, str] = {}
    for place, value in start.items():
        moved = {name: Fraction(doubled[name][place], value) for name in doubled if doubled[name][place] != value}
        if all(ratio in POWERS for ratio in moved.values()):
            term: str | None = _product(value, base, moved)
        else:
            for pair in itertools.combinations(moved, 2):
                if pair not in pairs:
                    pairs[pair] = built(base | {name: 2 * base[name] for name in pair})
            term = _sum(place, value, base, list(moved), doubled, pairs)
        terms[place] = term or "|".join([str(value), *moved])
    # a multiple of each part's heads, since a head's width is rounded down
    step = 3 * math.lcm(8, *(size for name, size in base.items() if name.endswith("num_attention_heads")))
    for name in (name for name in doubled if base[name] > SMALL):  # what is rounded follows no product
        try:
            other = built(base | {name: base[name] + step})
        except Exception:  # not a multiple of what it has to be one of
            continue
        sizes = base | {name: base[name] + step}
        for place, term in terms.items():
            if "|" not in term and evaluate(term, sizes) != other[place]:
                moved_by = [each for each in doubled if doubled[each][place] != start[place]]
                terms[place] = "|".join([str(start[place]), *moved_by])
    fixed = [name for name in defaults if decides(name) and name not in (*doubled, *free)]
    stated = {name: value for name, value in defaults.items() if decides(name) and value is not None}
    return {"fixed": fixed, "free": sorted(doubled), "defaults": stated, "terms": terms}


def _same(build: Callable[[Mapping[str, Any]], Leaves], sizes: Mapping[str, Any], start: Leaves) -> bool:
    try:
        return build(sizes) == start
    except Exception:  # whatever a model's code raises for a switch that it cannot have
        return False


def _reachable(values: Mapping[str, Any], name: str) -> bool:
    *folders, _ = name.split(".")
    return all(isinstance(values := values.get(folder), dict) for folder in folders)  # type: ignore[assignment]


def _product(value: int, base: Mapping[str, int], moved: Mapping[str, Fraction]) -> str:
    factor, above, below = Fraction(value), [], []
    for name, ratio in moved.items():
        power = POWERS[ratio]
        factor /= Fraction(base[name]) ** power
        above += [name] * max(power, 0)
        below += [name] * max(-power, 0)
    above = [*([str(factor.numerator)] if factor.numerator != 1 or not above else []), *above]
    below = [*([str(factor.denominator)] if factor.denominator != 1 else []), *below]
    return "*".join(above) + "".join(f"/{each}" for each in below)


def _sum(
    place: str, value: int, base: Mapping[str, int], names: list[str], doubled: Mapping[str, Leaves], pairs: Any
) -> str | None:
    more = {name: doubled[name][place] - value for name in names}
    both = {
        p: leaf[place] - doubled[p[0]][place] - doubled[p[1]][place] + value
        for p, leaf in pairs.items()
        if p[0] in more and p[1] in more
    }
    parts = []
    rest = Fraction(value)
    for (first, second), size in both.items():
        if size:
            parts.append((Fraction(size, base[first] * base[second]), [first, second]))
            rest -= size
    for name, size in more.items():
        alone = size - sum(each for pair, each in both.items() if name in pair)
        if alone:
            parts.append((Fraction(alone, base[name]), [name]))
            rest -= alone
    if rest:
        parts.append((rest, []))
    if any(factor.denominator != 1 for factor, _ in parts):
        return None
    return "+".join("*".join([str(factor.numerator), *those]) for factor, those in parts)


def main() -> int:
    """Derive what is missing; with `--check`, return 1 where terms differ from the stored ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="hub ids; by default all")
    parser.add_argument("--again", action="store_true", help="derive those with a file too")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where terms differ")
    options = parser.parse_args()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    different = []
    for name in options.names or known_models():
        path = known_models()[name]
        if options.check and not path.with_name(TERMS).exists():  # it follows from another size
            continue
        if not path.with_name(COUNTED).exists() or (path.with_name(TERMS).exists() and not options.again):
            continue
        values, folders = (
            json.loads(path.read_text()),
            [each.parent for each in known_models().values() if each.with_name(COUNTED).exists()],
        )
        if not options.again and (follows := family_count(values, folders)) is not None:
            counted = json.loads(path.with_name(COUNTED).read_text())
            if all(follows[0][part] == counted[part] for part in SAME):
                continue
        try:
            derived = derive(path)
        except Exception as error:
            print(name, "not derived:", str(error)[:200], flush=True)
            continue
        text = json.dumps(derived, separators=(",", ":")) + "\n"
        print(name, len(derived["terms"]), "terms", flush=True)
        if options.check:
            different += [name] if text != path.with_name(TERMS).read_text() else []
        else:
            path.with_name(TERMS).write_text(text)
    print("\n".join(f"differs: {name}" for name in different))
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())

"""Count the bundled models that have no formulas, as transformers builds them, into files beside their configurations.

    python tests/scripts/bundled_models.py                  # those without a count; as often as it takes
    python tests/scripts/bundled_models.py --again --check  # count all again, and compare: the nightly job

A count takes 10 to 60 s of a processor, more than `toolkit plan` spends.
It is what `toolkit plan` reads in an installation without transformers.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from toolkit.models import count_from_transformers as counting
from toolkit.models.config_fields import ConfigFields
from toolkit.models.decoders import shape_from_config
from toolkit.models.families import FIELDS, fields, nested
from toolkit.models.read_model import COUNTED, as_transformers_has_it, bundled_models, known_models

SECONDS = 150  # of a processor, for models whose layers differ in many ways


def count(config: Path, result: Path) -> None:
    """Write what transformers counts of a configuration; a model that cannot be counted gets no file."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    counting.COUNTING_CPU_SECONDS = SECONDS
    with result.with_suffix(".part").open("w") as part, contextlib.redirect_stdout(part):
        try:
            counting.main([str(config)])
            sys.stdout.flush()
            counted = json.loads(Path(result.with_suffix(".part")).read_text())
            if counted["why_not_counted"]:
                print(f"{config.parent.name}: {counted['why_not_counted']}", file=sys.stderr)
            else:
                result.write_text(json.dumps(counted, separators=(",", ":")) + "\n")
        except BaseException as error:
            print(f"{config.parent.name}: {str(error)[:300]}", file=sys.stderr)
    result.with_suffix(".part").unlink(missing_ok=True)
    os._exit(0)


def resolved_fields(config: Path) -> list[dict[str, Any]]:
    """Return the fields of a configuration as transformers resolves them, for `toolkit.models.families.differing`.

    Those that another file of the same model states too; those that it may leave out, since they are the defaults; and
    those that it may leave out or have without a value, since they follow from others.
    """
    resolved = counting.read_configuration(config)
    stated, default = fields(nested(json.loads(config.read_text()))), fields(type(resolved)().to_dict())
    groups: list[dict[str, Any]] = [{}, {}, {}, {}]
    for path, value in fields(resolved.to_dict()).items():
        is_default = path in default and default[path] == value
        groups[1 if is_default else 0 if path in stated else 2][path] = value
    known = groups[0] | groups[1]
    groups[3] = {path: value for path, value in stated.items() if path in known and known[path] != value}
    groups[2] |= {path: value for path, value in stated.items() if all(path not in group for group in groups)}
    return groups


def has_formulas(config: Path, values: dict[str, Any]) -> bool:
    """Return True if the formulas cover a configuration: those of its type may not, as those of StableLM 2 12B."""
    return shape_from_config(ConfigFields(values, str(config))) is not None


def main() -> int:
    """Count what is missing within the time; with `--check`, return 1 where a new count differs from the old one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="hub ids, counted in this order; by default all")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no count after this time")
    parser.add_argument("--again", action="store_true", help="count those with a file too")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a count differs")
    options = parser.parse_args()
    start, different = time.monotonic(), []
    planned = {} if options.again else bundled_models()
    for name in options.names or known_models():
        config = known_models()[name]
        values: dict[str, Any] = as_transformers_has_it(json.loads(config.read_text()))
        path = config.with_name(COUNTED)
        if has_formulas(config, values) or (name in planned and name not in options.names):
            continue
        if options.check and not path.exists() and name not in options.names:  # it follows from another size
            continue
        if (path.exists() and not options.again) or time.monotonic() - start > options.seconds:
            continue
        result = path.with_suffix(".new") if options.check else path
        count(config, result)
        print(name, "counted" if result.exists() else "not counted", round(time.monotonic() - start), flush=True)
        resolved = json.dumps(resolved_fields(config), separators=(",", ":")) + "\n"
        if options.check:
            same = result.exists() and path.exists() and result.read_text() == path.read_text()
            different += [] if same and resolved == path.with_name(FIELDS).read_text() else [name]
            result.unlink(missing_ok=True)
        elif result.exists():
            path.with_name(FIELDS).write_text(resolved)
    print("\n".join(f"differs: {name}" for name in different))
    return int(bool(different))


if __name__ == "__main__":
    AutoConfig  # noqa: B018 - imported before the first fork
    sys.exit(main())

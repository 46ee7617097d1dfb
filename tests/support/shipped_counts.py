"""What transformers counts of the architectures that a GPU measured, 12 s of a processor each: shipped, not counted.

    python tests/support/shipped_counts.py    # count again what other code or other libraries counted

A shipped count is used only with the code and the libraries that counted it; otherwise it is counted.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from toolkit.models import read_model
from toolkit.models.read_model import COUNTING_LIBRARIES, COUNTING_MODULES, cached_count, count_shape
from toolkit.versions import installed_version

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests" / "fixtures" / "counted_models.json"
COUNTED = ("cohere2-2b", "deepseek-v3-2b", "falcon-1b", "glm4-2b", "starcoder2-3b")


def code() -> str:
    """Return the digest of the code that counts."""
    files = (Path(read_model.__file__).with_name(f"{module}.py") for module in COUNTING_MODULES)
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def libraries() -> dict[str, str]:
    """Return the versions of the libraries that count, whatever device they are built for."""
    return {name: str(installed_version(name)).partition("+")[0] for name in COUNTING_LIBRARIES}


def shipped() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(FILE.read_text())
    return content


def fill_cache() -> None:
    """Write the shipped counts into the cache of this process, if code and libraries would count the same."""
    content = shipped()
    if (content["code"], content["libraries"]) == (code(), libraries()):
        for model in content["models"].values():
            path = cached_count(model["config"])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(model["counted"]))


def count(name: str) -> dict[str, Any]:
    """Let transformers count a model, whatever the cache has; return its entry of the file."""
    from validate import CONFIGS

    path = cached_count(CONFIGS[name])
    path.unlink(missing_ok=True)
    config = path.with_suffix(".config")
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(json.dumps(CONFIGS[name]))
    count_shape(config, CONFIGS[name])
    return {"config": CONFIGS[name], "counted": json.loads(path.read_text())}


def main() -> None:
    """Count and write the file."""
    sys.path[:0] = [str(ROOT / "benchmarks" / "gpu"), str(ROOT / "benchmarks")]
    models = {name: count(name) for name in COUNTED}
    lines = [f"{json.dumps(name)}: {json.dumps(model)}" for name, model in models.items()]
    head = f'{{"code": {json.dumps(code())}, "libraries": {json.dumps(libraries())}, "models": {{\n'
    FILE.write_text(head + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    main()

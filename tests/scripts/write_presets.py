"""Write the settings of each JSON in `ds_configs/` into the accelerate YAML that repeats them: `make presets`."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Presets that another's JSON serves.
SHARED = {"ulysses": "zero3"}
SETTINGS_BLOCK = re.compile(r"^  deepspeed_config_file: \|\n(?: {4}.*\n)+", re.MULTILINE)


def expected_text(path: Path) -> str:
    """Return the text that an accelerate YAML should have; another engine's has it already."""
    name = SHARED.get(path.stem, path.stem)
    text, source = path.read_text(), ROOT / "ds_configs" / f"{name}.json"
    if not source.exists():
        return text
    # The Trainer fills in its own precision; for a loop on accelerate, nobody but this file says bf16.
    settings = json.loads(source.read_text()) | {"bf16": {"enabled": True}}
    lines = "".join(f"    {line}\n" for line in json.dumps(settings, indent=2).splitlines())
    written, count = SETTINGS_BLOCK.subn(lambda _: f"  deepspeed_config_file: |\n{lines}", text)
    assert count == 1, f"{path} has {count} blocks `deepspeed_config_file: |`"
    return written


if __name__ == "__main__":
    for path in sorted((ROOT / "accelerate_configs").glob("*.yaml")):
        path.write_text(expected_text(path))

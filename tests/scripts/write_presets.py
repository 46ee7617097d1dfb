"""Write the settings of each JSON in `ds_configs/` into the accelerate YAML that repeats them: `make presets`."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Presets that another's JSON serves.
SHARED = {"ulysses": "zero3"}
SETTINGS_BLOCK = re.compile(r"^  deepspeed_config_file: \|\n(?: {4}.*\n)+", re.MULTILINE)


def expected_text(path: Path) -> str:
    """Return the text that an accelerate YAML should have; another engine's has it already."""
    text, source = path.read_text(), ROOT / "ds_configs" / f"{SHARED.get(path.stem, path.stem)}.json"
    if not source.exists():
        return text
    lines = "".join(f"    {line}\n" for line in source.read_text().splitlines())
    written, count = SETTINGS_BLOCK.subn(lambda _: f"  deepspeed_config_file: |\n{lines}", text)
    assert count == 1, f"{path} has {count} blocks `deepspeed_config_file: |`"
    return written


if __name__ == "__main__":
    for path in sorted((ROOT / "accelerate_configs").glob("*.yaml")):
        path.write_text(expected_text(path))

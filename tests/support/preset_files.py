"""Preset files that tests write, and the presets that the command line lists."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from command_line import exit_code


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, newline="")
    return path


def deepspeed_pair(folder: Path, config: dict[str, Any]) -> Path:
    write(folder / "mine.json", json.dumps(config))
    return write(
        folder / "mine.yaml", "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: mine.json\n"
    )


def listed_presets() -> dict[str, dict[str, Any]]:
    with redirect_stdout(io.StringIO()) as printed:
        assert exit_code("presets", "--json") == 0
    return {row["name"]: row for row in json.loads(printed.getvalue())}

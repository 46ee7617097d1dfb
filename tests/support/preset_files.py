"""Preset files that tests write, and the presets that the command line lists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launching import toolkit


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
    return {row["name"]: row for row in json.loads(toolkit("presets", "--json").stdout)}

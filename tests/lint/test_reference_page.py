"""docs/reference/lint.md is generated from the rules. To write it again:

python tests/lint/test_reference_page.py
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import jsonschema
from typer.testing import CliRunner

from toolkit.cli.program import app
from toolkit.lint.findings import CHECKED_VERSIONS
from toolkit.lint.rules import RULES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "lint.md"
KEYS = ["file", "key", "line", "level", "rule", "message", "fix", "checked_against"]
KIND_NAMES = {"accelerate": "accelerate", "deepspeed": "DeepSpeed JSON", "trainer": "Trainer"}
KIND_NAMES |= {"sbatch": "sbatch", "shell": "shell script", "skypilot": "SkyPilot"}


def table() -> str:
    lines = ["| rule | level | in | what really happens | write instead | checked with |", "| :--- " * 6 + "|"]
    for rule in RULES:
        kinds = ", ".join(KIND_NAMES[kind] for kind in rule.kinds)
        since = f", from {rule.removed_in}" if rule.removed_in else ""
        cells = [f"`{rule.name}`", rule.level, kinds, rule.description, rule.fix, rule.checked_against + since]
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines)


def counts() -> str:
    levels = Counter(rule.level for rule in RULES)
    return f"{len(RULES)} rules: {levels['error']} errors, {levels['warning']} warnings, {levels['note']} notes."


def written(text: str) -> str:
    for name, new in {"rules": table(), "counts": counts()}.items():
        pattern = rf"(<!-- generated: {name} -->\n).*?(\n<!-- /generated -->)"
        assert re.search(pattern, text, re.DOTALL), f"docs/reference/lint.md has no block {name}"
        text = re.sub(pattern, lambda found, new=new: found[1] + new + found[2], text, flags=re.DOTALL)
    return text


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == written(PAGE.read_text()), "run: python tests/lint/test_reference_page.py"


def test_the_page_names_every_option_every_key_of_the_json_and_every_version() -> None:
    text = PAGE.read_text()
    assert [word for word in (*KEYS, "--fix", "--in-place", "--json") if f"`{word}`" not in text] == []
    assert [f"{name} {version}" for name, version in CHECKED_VERSIONS.items() if f"{name} {version}" not in text] == []


def test_the_json_has_the_keys_that_the_page_names(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("distributed_type: FSDP\nnum_processes: 2\n")
    found = json.loads(CliRunner().invoke(app, ["lint", str(tmp_path / "mine.yaml"), "--json"]).stdout)
    text = {"type": "string"}
    properties = dict.fromkeys(KEYS, text) | {"line": {"type": ["integer", "null"]}}
    properties["level"] = {"enum": ["error", "warning", "note"]}
    row = {"type": "object", "properties": properties, "required": KEYS, "additionalProperties": False}
    schema = {"properties": {"findings": {"type": "array", "items": row}}, "required": ["findings"]}
    jsonschema.validate(found, schema)
    assert len(found["findings"]) == 2


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))

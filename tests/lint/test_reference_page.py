"""docs/reference/lint.md describes the command as it is; the table of rules is made when the site is built."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
from typer.testing import CliRunner

from toolkit.cli.program import app
from toolkit.lint.findings import CHECKED_VERSIONS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "lint.md"
KEYS = ["file", "key", "line", "level", "rule", "message", "fix", "checked_against"]


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

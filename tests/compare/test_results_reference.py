"""The JSON Schema and the reference tables are what the declared columns give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toolkit.compare.columns import columns_of
from toolkit.compare.read_results import load_results
from toolkit.compare.results_reference import DOCS, SCHEMA, TABLES, docs_text, schema_text

FIXTURES = Path(__file__).parents[1] / "fixtures"
UPDATE = "run `python -m toolkit.compare.results_reference`"


def test_the_schema_is_up_to_date() -> None:
    assert SCHEMA.read_text("utf-8") == schema_text(), UPDATE


def test_the_documentation_is_up_to_date() -> None:
    text = DOCS.read_text("utf-8")
    assert docs_text(text) == text, UPDATE


@pytest.mark.parametrize("name", TABLES)
def test_every_key_is_declared_with_its_meaning(name: str) -> None:
    columns = columns_of(TABLES[name])
    assert list(columns) == list(TABLES[name].model_fields)
    assert all(column.meaning.endswith(".") for column in columns.values())


@pytest.mark.parametrize("name", ["results_small.json", "results_made_up_gpus.json", "comparison_before_typed_results"])
def test_results_that_were_read_have_every_key_of_the_schema(name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is in the extra [dev]")
    schema = json.loads(schema_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(load_results(FIXTURES / name).model_dump(mode="json"), schema)


@pytest.mark.parametrize(
    "change",
    [{"ratio_to_reference": 1.0}, {"status": "exploded"}, {"peak_host_bytes": 1.5}, {"preset": None}],
    ids=["ratio of a failed row", "unknown status", "fraction of a byte", "no preset"],
)
def test_the_schema_refuses(change: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is in the extra [dev]")
    document = load_results(FIXTURES / "results_small.json").model_dump(mode="json")
    document["rows"][2].update(change)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, json.loads(schema_text()))

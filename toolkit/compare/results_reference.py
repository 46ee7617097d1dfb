"""Generate `results.schema.json` and the tables of docs/reference/results.md from the declared columns.

    python -m toolkit.compare.results_reference

writes both in a working tree; a test fails where they are not up to date.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from toolkit.compare.columns import columns_of
from toolkit.compare.result_values import Failure, FlopsPerToken, MemoryByPhase, Probe, Timeline, TimelineRank
from toolkit.compare.results import ComparedJob, ComparisonMethod, Disk, Environment, InstalledGpu, Results
from toolkit.compare.rows import Row
from toolkit.compare.trial_figures import Figures, TrialResult

SCHEMA = Path(__file__).with_name("results.schema.json")
DOCS = Path(__file__).parents[2] / "docs" / "reference" / "results.md"
# Marks of the generated tables in the documentation, by model.
TABLES: dict[str, type[BaseModel]] = {
    model.__name__: model
    for model in (
        *(Results, Environment, InstalledGpu, Disk, ComparedJob, ComparisonMethod, Row, TrialResult, Failure, Probe),
        *(MemoryByPhase, FlopsPerToken, Timeline, TimelineRank),
    )
}
JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object"}


def schema_text() -> str:
    """Return the JSON Schema of `results.json` as this version writes it: every key is required."""
    schema = Results.model_json_schema(mode="serialization")
    described = {"$schema": "https://json-schema.org/draft/2020-12/schema", **_without_titles(schema)}
    return json.dumps(described | {"title": Results.model_config["title"]}, indent=2, ensure_ascii=False) + "\n"


def _without_titles(schema: Any) -> Any:
    """Drop the titles that pydantic makes of field names; keys named `title` are not affected."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _without_titles(value) for key, value in schema.items() if key != "title" or isinstance(value, dict)}


def docs_text(text: str) -> str:
    """Return the documentation with its tables as the declarations give them."""
    for name, model in TABLES.items():
        begin, end = f"<!-- columns of {name} -->", "<!-- end -->"
        assert begin in text, f"docs/reference/results.md has no table of {name}"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = "\n".join([f"{before}{begin}", "", *table_lines(model), "", f"{end}{after}"])
    return text


def table_lines(model: type[BaseModel]) -> Iterator[str]:
    """Yield the reference table of a model; a trial's leaves out what it shares with a row."""
    yield "| key | type | unit | meaning |"
    yield "| :--- | :--- | :--- | :--- |"
    for key, column in columns_of(model).items():
        if model is TrialResult and key in Figures.model_fields:
            continue
        of_a_row = f" Of a row: {column.repeats}." if column.repeats and model is Row else ""
        shown = _type_text(model.model_fields[key].annotation)
        yield f"| `{key}` | {shown} | {column.unit or ''} | {column.meaning}{of_a_row} |"


def _type_text(annotation: Any) -> str:
    """A type as JSON names it.

    >>> _type_text(float | None)
    'number or null'
    """
    if annotation is type(None):
        return "null"
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type_text(item) for item in get_args(annotation)))
    if origin is Literal:
        return " or ".join(
            f"`{json.dumps(value)}`" if not isinstance(value, str) else "string" for value in get_args(annotation)[:1]
        )
    if origin is tuple:
        return "array"
    if origin is not None and hasattr(annotation, "__metadata__"):
        return _type_text(get_args(annotation)[0])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "object"
    return JSON_TYPES[origin or annotation]


def main() -> None:
    """Write the schema and the documentation's tables."""
    SCHEMA.write_text(schema_text(), "utf-8")
    DOCS.write_text(docs_text(DOCS.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()

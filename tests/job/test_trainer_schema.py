"""What transformers accepts, as the package ships it and as a process of its own describes it."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolkit.errors import ToolkitError
from toolkit.job import trainer_schema as schema
from toolkit.job.argument_fields import TrainerArguments
from toolkit.job.trainer_schema import SHIPPED, describe_installed, trainer_schema


@pytest.fixture
def another_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Another transformers than the package describes; the cache folder."""
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(schema, "installed_version", lambda library: "99.0" if library == "transformers" else None)
    trainer_schema.cache_clear()
    yield tmp_path / "trainer_schema" / "99.0.json"
    trainer_schema.cache_clear()


def test_the_package_describes_the_pinned_transformers_as_it_describes_itself() -> None:
    assert describe_installed() == SHIPPED.read_text()


def test_our_fields_have_the_defaults_of_the_trainer() -> None:
    from transformers import TrainingArguments

    theirs = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    ours = {field.name: field.default for field in dataclasses.fields(TrainerArguments)}
    assert {name: getattr(theirs[name], "value", theirs[name]) for name in ours} == ours


def test_another_version_is_described_once_and_then_read_from_the_cache(
    another_version: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = json.loads(SHIPPED.read_text()) | {"transformers": "99.0", "trackers": ["new_tracker"]}
    monkeypatch.setattr(schema, "describe_installed", lambda: json.dumps(content))
    assert trainer_schema().trackers == ("new_tracker",)
    assert json.loads(another_version.read_text()) == content
    trainer_schema.cache_clear()
    monkeypatch.setattr(schema, "describe_installed", lambda: pytest.fail("the cache has it"))
    assert trainer_schema().trackers == ("new_tracker",)


def test_a_damaged_cache_is_written_again(another_version: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    another_version.parent.mkdir()
    another_version.write_text('{"transformers": ')
    content = json.loads(SHIPPED.read_text()) | {"transformers": "99.0"}
    monkeypatch.setattr(schema, "describe_installed", lambda: json.dumps(content))
    assert "max_steps" in trainer_schema().fields
    assert json.loads(another_version.read_text()) == content


@pytest.mark.usefixtures("another_version")
def test_a_transformers_that_cannot_be_imported_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'ImportError: no torch' >&2\nexit 1\n")
    os.chmod(broken, 0o755)  # noqa: PTH101
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(ToolkitError, match=r"transformers 99\.0 cannot be imported: ImportError: no torch"):
        trainer_schema()


def test_without_transformers_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "installed_version", lambda _: None)
    trainer_schema.cache_clear()
    try:
        with pytest.raises(ToolkitError, match="transformers is not installed") as refused:
            trainer_schema()
        assert refused.value.hint == "`make setup` in the clone installs it"
    finally:
        trainer_schema.cache_clear()

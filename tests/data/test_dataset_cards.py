"""The header of a copied data set's README.md may be long, and the error about it stays short."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.data.data_files import resolve_sources
from toolkit.errors import ToolkitError


def test_two_thousand_configurations_are_read_and_twenty_are_listed(tmp_path: Path) -> None:
    entries = "".join(f"- config_name: c{number}\n  data_files: [a, b, c, d, e, f, g, h]\n" for number in range(2000))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{entries}---\n")
    with pytest.raises(ToolkitError, match=r"c18, c19, and 1,980 more"):
        resolve_sources([str(tmp_path)], config="other")

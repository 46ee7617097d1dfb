"""The pages of `toolkit simulate` in headless Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import DESKTOP, PHONE, chromium, open_page
from launching import LLAMA_8B_CONFIG
from playwright.sync_api import Browser, ViewportSize

from toolkit.cli.program import main

pytestmark = pytest.mark.browser
MODEL = ["--model", str(LLAMA_8B_CONFIG), "--gpu", "h100"]
COMMANDS = {
    "pipeline": ["pipeline", "--stages", "8", "--micro-batches", "32", *MODEL],
    "failures": ["failures", "--gpus", "16384", "--spare-nodes", "20", "--repair-hours", "24"],
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_opens_without_errors_requests_or_overflow(browser: Browser, name: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", *COMMANDS[name], "--output-dir", str(tmp_path)])
    for window in (PHONE, DESKTOP):
        check(browser, tmp_path / "simulation.html", window)


def check(browser: Browser, page: Path, window: ViewportSize) -> None:
    with open_page(browser, page, window) as opened:
        assert (opened.errors, opened.external_requests, opened.overflow()) == ([], [], [])
        drawn = opened.page.locator("svg path, svg polyline").first.bounding_box()
        assert drawn is not None
        assert drawn["width"] > 0

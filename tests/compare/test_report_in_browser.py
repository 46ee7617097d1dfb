"""report.html in headless Chromium: it runs without errors, its tables sort, and it fits a phone."""

from pathlib import Path

import pytest
from browser import DESKTOP, PHONE, open_page
from playwright.sync_api import Browser, ViewportSize
from results_documents import FIXTURES, read, write_report

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    small, gpus = (read(FIXTURES / f"results_{name}.json") for name in ("small", "made_up_gpus"))
    for name, results in (("small", small), ("gpus", gpus)):
        write_report(results, folder / name)
    return {"small": folder / "small" / "report.html", "gpus": folder / "gpus" / "report.html"}


@pytest.mark.parametrize("window", [PHONE, DESKTOP], ids=["phone", "desktop"])
@pytest.mark.parametrize("name", ["small", "gpus"])
def test_a_report_opens_without_errors_requests_or_overflow(
    browser: Browser, reports: dict[str, Path], name: str, window: ViewportSize
) -> None:
    with open_page(browser, reports[name], window) as opened:
        assert (opened.errors, opened.external_requests, opened.overflow()) == ([], [], [])


def test_a_click_on_a_heading_sorts_and_rows_that_are_not_compared_stay_last(
    browser: Browser, reports: dict[str, Path]
) -> None:
    with open_page(browser, reports["small"]) as opened:
        table = opened.page.locator("table.sheet").first
        orders = [table.locator("tbody th").all_inner_texts()]
        for _ in range(2):
            table.get_by_role("button", name="grad.").click()
            orders.append(table.locator("tbody th").all_inner_texts())
    ascending, descending = ["zero2", "ddp", "zero3", "fsdp2"], ["ddp", "zero2", "zero3", "fsdp2"]
    assert orders == [descending, ascending, descending]


@pytest.mark.nightly
def test_a_table_that_a_phone_cuts_off_says_that_it_scrolls(browser: Browser, reports: dict[str, Path]) -> None:
    with open_page(browser, reports["gpus"], PHONE) as opened:
        assert opened.page.locator("p.hint").first.inner_text() == "scroll the table sideways →"

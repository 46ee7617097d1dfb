"""Pages opened in headless Chromium, with everything that goes wrong in them recorded."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PHONE = ViewportSize(width=390, height=844)
DESKTOP = ViewportSize(width=1280, height=900)

# Elements that stick out of the window to the right, except those in a box that scrolls or cuts them off.
STICKING_OUT = """() => {
  const inBox = (element) => {
    for (let box = element.parentElement; box && box !== document.body; box = box.parentElement)
      if (getComputedStyle(box).overflowX !== "visible") return true
    return false
  }
  return [...document.body.querySelectorAll("*")]
    .filter((element) => element.getClientRects().length && getComputedStyle(element).position !== "fixed")
    .filter((element) => element.getBoundingClientRect().right > window.innerWidth + 1 && !inBox(element))
    .map((element) => element.outerHTML.slice(0, 120))
}"""


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Start Chromium; skip the test where there is none."""
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


class OpenPage:
    """A page of a folder on disk: what it logged as an error, and what it requested from elsewhere."""

    def __init__(self, page: Page, file: Path) -> None:
        self.page = page
        self.errors: list[str] = []
        self.external_requests: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: self._record(request.url))
        page.goto(file.as_uri(), wait_until="load")

    def _record(self, url: str) -> None:
        if not url.startswith(("file:", "data:", "blob:", "about:")):
            self.external_requests.append(url)

    def overflow(self) -> list[str]:
        """Return what makes the page wider than its window, as the function does."""
        return overflow(self.page)


def overflow(page: Page) -> list[str]:
    """Return what makes a page wider than its window: elements, or the width of the document."""
    width, window = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    return page.evaluate(STICKING_OUT) + ([f"scrollWidth {width}"] if width > window else [])


@contextlib.contextmanager
def open_page(browser: Browser, file: Path, window: ViewportSize = DESKTOP) -> Iterator[OpenPage]:
    page = browser.new_page(viewport=window)
    try:
        yield OpenPage(page, file)
    finally:
        page.close()

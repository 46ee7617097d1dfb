"""The docs site builds without a warning, loads nothing from the network, and works in headless Chromium."""

import functools
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import DESKTOP, PHONE, open_page, overflow
from playwright.sync_api import Browser, ViewportSize
from results_documents import Tags

from toolkit.lint.rules import RULES

ROOT = Path(__file__).resolve().parents[2]
# Links and anchors of the pages themselves are in `test_readme.py`; building the site takes 20 s.
pytestmark = pytest.mark.nightly
PAGES = sorted(path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md"))
PAGES += [Path("project/contributing.html"), Path("project/changelog.html")]
# Pages with the widest tables and listings.
WIDEST = [Path("reference", f"{name}.html") for name in ("cli", "presets", "lint", "results", "python")]
# Attributes by which a browser loads something without a click.
LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "object": "data"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "properdocs", "build", "--strict"]  # with --quiet it counts no warnings
    command += ["--config-file", "docs/site/mkdocs.yml", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    warnings = [line for line in built.stderr.splitlines() if not line.startswith("INFO ")]
    assert (built.returncode, built.stdout, warnings) == (0, "", [])
    return folder


def html(site: Path, page: str) -> str:
    return (site / page).read_text("utf-8")


def test_every_page_is_built_and_in_the_navigation(site: Path) -> None:
    linked = set(re.findall(r'href="([\w./-]+\.html)"', html(site, "index.html")))
    assert {page.as_posix() for page in PAGES} <= linked | {"index.html"}
    assert all((site / page).is_file() for page in PAGES)


def test_no_page_loads_anything_from_the_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        tags = Tags(page.read_text("utf-8")).found
        loaded = [attributes.get(LOADING[tag]) or "" for tag, attributes in tags if tag in LOADING]
        assert [url for url in loaded if re.match(r"(https?:)?//", url)] == [], page
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", style.read_text("utf-8")), style


def test_a_findings_address_is_a_heading_of_the_reference(site: Path) -> None:
    page = html(site, "reference/lint.html")
    assert [rule.name for rule in RULES if f'<h3 id="{rule.name}"' not in page] == []


@pytest.mark.browser
@pytest.mark.parametrize("window", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_a_page_opens_without_errors_requests_or_overflow(browser: Browser, site: Path, window: ViewportSize) -> None:
    with open_page(browser, site / "index.html", window) as opened:
        for page in [Path("index.html"), *WIDEST]:
            opened.page.goto((site / page).as_uri())
            opened.page.wait_for_selector("html.js")  # the theme's script ran
            assert (opened.errors, opened.external_requests, opened.overflow()) == ([], [], []), page


class Host(SimpleHTTPRequestHandler):
    """A host of pages that serves the site under a path, and its 404.html for every wrong address."""

    PREFIX = "/finetune-toolkit/"

    def translate_path(self, path: str) -> str:
        return super().translate_path("/" + path.removeprefix(self.PREFIX) if path.startswith(self.PREFIX) else "/none")

    def send_error(self, code: int, *_: object) -> None:
        page = Path(self.directory, "404.html").read_bytes()
        self.send_response(code)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(page if self.command == "GET" else b"")

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Host, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}{Host.PREFIX}"
    server.shutdown()
    server.server_close()


def test_no_link_of_a_page_begins_at_the_servers_root(site: Path) -> None:
    linking = [page for page in site.rglob("*.html") if re.search(r'(?:href|src)="/(?!/)', page.read_text("utf-8"))]
    assert linking == []


@pytest.mark.browser
@pytest.mark.parametrize("wrong", ["nothing.html", "how-to/nothing.html", "a/b/nothing.html"])
def test_the_page_of_a_wrong_address_has_its_styles_and_links_under_a_path(
    browser: Browser, address: str, wrong: str
) -> None:
    page = browser.new_page(viewport=PHONE)
    page.goto(address + wrong)
    page.wait_for_selector("html.js")  # the theme's script ran
    assert page.evaluate("getComputedStyle(document.querySelector('.md-header')).position") == "sticky"
    assert page.evaluate("[...document.styleSheets].filter(sheet => sheet.href).length") > 2
    assert overflow(page) == []
    page.get_by_role("link", name="the first page").click()
    page.wait_for_url(f"{address}index.html")
    page.close()


@pytest.mark.browser
@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("too close", "concepts/plan.html#verdicts-fits-too-close-does-not-fit"),
        ("cost", "concepts/plan.html#time-and-cost"),
        ("out of memory", "how-to/choose-a-preset.html#out-of-memory"),
        ("planner", "planner/index.html"),
        ("hpZ replica", ".html"),
    ],
)
def test_the_search_finds_first_what_explains_the_words(browser: Browser, site: Path, words: str, place: str) -> None:
    with open_page(browser, site / "index.html") as opened:
        field = opened.page.locator("input.md-search__input")
        field.click()
        field.press_sequentially(words)
        result = opened.page.locator(".md-search-result__item").first
        result.wait_for()
        assert (opened.errors, opened.external_requests) == ([], [])
        links = [link.get_attribute("href") or "" for link in result.locator("a").all()]
        assert any(re.sub(r"\?h=[^#]*", "", link).endswith(place) for link in links), links


# Loading the theme takes longest, so one page shows the articles of all.
SHOW_ARTICLE = """async (article) => {
  document.querySelector("article").outerHTML = article
  await Promise.all([...document.images].map((image) => image.decode()))
}"""


@pytest.mark.browser
def test_every_article_fits_a_phone(browser: Browser, site: Path) -> None:
    with open_page(browser, site / WIDEST[0], PHONE) as opened:
        for page in PAGES:
            if len(page.parts) == 2:  # links and images of a page in a folder; `index.html` is opened above
                (article,) = re.findall(r"<article.*</article>", html(site, page.as_posix()), re.DOTALL)
                opened.page.evaluate(SHOW_ARTICLE, article)
                assert (opened.errors, opened.external_requests, opened.overflow()) == ([], [], []), page

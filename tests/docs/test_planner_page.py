"""The planner page in headless Chromium: its JSON is the command line's, and what a reader sees, hears and types."""

import functools
import json
import shlex
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from browser import DESKTOP, PHONE, open_page, overflow
from command_line import run_command
from model_configs import ARCHITECTURES
from planner_page import build
from playwright.sync_api import Browser, Page

from toolkit.errors import ToolkitError
from toolkit.models.read_model import bundled_models
from toolkit.plan.methods import METHODS
from toolkit.presets import preset_names

# The page that `toolkit page` serves is tested every day, in tests/page.
pytestmark = [pytest.mark.browser, pytest.mark.nightly]

GPUS = ("h100-sxm", "a100-40gb", "rtx-4090", "l40s", "t4", "mi300x")
# A contrast below WCAG AA's of what can be read: the text, its ratio.
LOW_CONTRAST = """() => {
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number)
  const light = (color) => numbers(color).slice(0, 3).map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0)
  const behind = (node) => {
    for (let box = node; box; box = box.parentElement) {
      const color = getComputedStyle(box).backgroundColor
      if (numbers(color)[3] !== 0) return color
    }
  }
  const found = new Set()
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim())
    if (!own || !node.checkVisibility() || ["SCRIPT", "STYLE", "OPTION"].includes(node.tagName)) continue
    const [a, b] = [getComputedStyle(node).color, behind(node)].map(light).sort((x, y) => y - x)
    const ratio = (a + 0.05) / (b + 0.05)
    if (ratio < 4.5) found.add(`${node.textContent.trim().slice(0, 30)}: ${ratio.toFixed(2)}`)
  }
  return [...found]
}"""
NAMELESS = """() => [...document.querySelectorAll("input, select, textarea, button, [role=img]")].filter((node) =>
  !(node.labels?.length || node.getAttribute("aria-label") || node.textContent.trim())).map((node) => node.outerHTML)"""


def job(number: int) -> tuple[str, dict[str, str], str | None]:
    """Return model, fields and configuration of one of the compared jobs; numbers reach all that a plan depends on."""
    fields = {"gpu": GPUS[number % len(GPUS)], "gpus": str(1 << (number % 4)), "nodes": "1" if number % 3 else "2"}
    fields["method"] = list(METHODS)[number // 2 % len(METHODS)] if number % 2 else "sft"
    if number % 2 == 0:
        names = preset_names()
        fields |= {"preset": names[number // 2 % len(names)], "gpus": "8"}
    if number % 3 == 1:
        fields |= {"lora_r": str(8 << number % 3), "load_in_4bit": "on" if number % 4 == 1 else ""}
    if number % 4 == 2:
        fields |= {"per_device_train_batch_size": "2", "gradient_accumulation_steps": "4"}
        fields["activation_checkpointing"] = "on" if number % 8 == 2 else "off"
    if fields["method"] not in ("grpo", "rloo"):  # whose prompts are counted, and not their tokens
        fields |= {"dataset_tokens": "5000000"}
    fields |= {"price_per_gpu_hour": "2.5"}
    fields["max_seq_length"] = str(512 << number % 4)
    if number % 2:
        return list(bundled_models())[number % len(bundled_models())], fields, None
    name, values = ARCHITECTURES[number // 2 % len(ARCHITECTURES)]
    return f"models/{name}", fields, json.dumps({"model_type": name, **values})


@pytest.fixture(scope="module")
def folder(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: ARG001  (nothing is built without)
    made = tmp_path_factory.mktemp("page")
    try:
        build(made)
    except ToolkitError as error:  # no npm, no node, or no network
        pytest.skip(f"the page cannot be built: {error.message}")
    return made


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def requests() -> list[str]:
    return []


@pytest.fixture(scope="module")
def page(browser: Browser, address: str, requests: list[str]) -> Iterator[Page]:
    opened = browser.new_page(viewport=DESKTOP)
    opened.on("request", lambda request: requests.append(request.url))
    opened.goto(address)
    answered(opened)
    yield opened
    opened.close()


def answered(page: Page) -> None:
    """Wait until the form is answered, with a plan or an error."""
    page.wait_for_selector("#answers[aria-busy=false]", timeout=120_000)


def ask(page: Page, request: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = page.evaluate("request => ask({ request })", request)
    return found


def entered(page: Page, name: str, text: str) -> None:
    """Type into a field, and wait for the answer to it."""
    page.locator(f"#{name}").fill(text)
    answered(page)


@pytest.mark.parametrize("number", range(60))
def test_the_page_answers_what_the_command_line_prints(
    number: int, page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, fields, config = job(number)
    if config is not None:
        (tmp_path / model).mkdir(parents=True)
        (tmp_path / model / "config.json").write_text(config)
    monkeypatch.chdir(tmp_path)
    for command in ("plan", "recommend"):
        request = {"command": command, "model": model, "fields": fields, "config": config}
        answer = ask(page, request)
        code, out, err = run_command([*shlex.split(answer["words"])[1:], "--json"], capsys)
        if "error" in answer:
            expected = ToolkitError(answer["error"]["message"], hint=answer["error"]["hint"])
            assert (code, err) == (2, f"error: {expected}\n")
        else:
            assert (code, out) == (0, answer["text"])


def test_every_request_is_for_the_pages_own_folder(page: Page, requests: list[str], address: str) -> None:
    answered(page)
    assert [url for url in requests if not url.startswith((address, "data:", "blob:"))] == []


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        ("GatedRepo", 401, "is gated"),
        ("RepoNotFound", 401, "is not on the hub, or it is private"),
        ("EntryNotFound", 404, "has no config.json"),
        (None, 0, "huggingface.co cannot be reached"),
    ],
)
def test_a_model_that_the_hub_refuses_says_why_and_offers_to_paste_its_file(
    page: Page, code: str | None, status: int, message: str
) -> None:
    headers = {"X-Error-Code": str(code), "Access-Control-Allow-Origin": "*"}
    headers["Access-Control-Expose-Headers"] = "X-Error-Code"
    page.route(
        "https://huggingface.co/**",
        lambda route: route.abort() if code is None else route.fulfill(status=status, headers=headers),
    )
    entered(page, "model", f"owner/{code}")
    shown = page.inner_text("#error-model")
    page.get_by_role("button", name="Paste its config.json instead").click()
    focused = page.evaluate("document.activeElement.id")
    page.unroute("https://huggingface.co/**")
    entered(page, "model", "Qwen/Qwen3-8B")
    assert message in shown
    assert focused == "config"


def test_a_link_carries_all_inputs(page: Page, browser: Browser) -> None:
    page.select_option("#gpu", "l40s")
    entered(page, "gpus", "4")
    entered(page, "price_per_gpu_hour", "1.9")
    link, summary = page.evaluate("location.href"), page.inner_text("#summary")
    page.get_by_role("button", name="Start again").click()
    other = browser.new_page()
    other.goto(link)
    answered(other)
    assert "l40s" in summary
    assert (other.inner_text("#summary"), other.input_value("#price_per_gpu_hour")) == (summary, "1.9")
    other.close()


def test_the_page_fits_a_phone_and_has_contrast_and_names_in_both_color_schemes(page: Page) -> None:
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        for window in (PHONE, DESKTOP):
            page.set_viewport_size(window)
            page.locator(".bar").first.evaluate("bar => { bar.open = true }")
            # An answer that was replaced fades in.
            page.wait_for_function("document.getAnimations().every(each => each.playState === 'finished')")
            assert overflow(page) == []
            assert page.evaluate(LOW_CONTRAST) == []
            assert page.evaluate(NAMELESS) == []


def test_without_javascript_there_is_the_table(browser: Browser, address: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address)
    assert page.locator("table.known tbody tr:visible").count() == len(bundled_models())
    assert page.locator("form:visible, #status:visible").count() == 0
    context.close()


def test_a_page_opened_from_a_disk_says_what_to_type(folder: Path, browser: Browser) -> None:
    with open_page(browser, folder / "index.html") as opened:
        codes = opened.page.locator("#status-text code").all_inner_texts()
        assert codes == ["toolkit page", f"python3 -m http.server -d {folder}"]
        assert opened.errors == opened.external_requests == []

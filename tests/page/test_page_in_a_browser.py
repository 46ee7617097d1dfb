"""The page of `toolkit page` in headless Chromium: what a reader sees, and that the server's rules let it work."""

from collections.abc import Iterator

import pytest
from browser import DESKTOP, PHONE, overflow
from playwright.sync_api import Browser, Page
from served_page import ServedPage, served_page

from toolkit.hardware.gpu_table import GPUS
from toolkit.models.read_model import bundled_models

pytestmark = pytest.mark.browser

# The width that a select needs for its longest option, with its arrow and padding; and its own.
SELECT_WIDTHS = """() => [...document.querySelectorAll("select")].map((each) => {
  const line = document.body.appendChild(document.createElement("span"))
  line.style.font = getComputedStyle(each).font
  line.textContent = each.selectedOptions[0].text
  const needed = line.offsetWidth + 36
  line.remove()
  return [each.id, needed, each.offsetWidth]
})"""
# Pieces of a command that are short, and yet broken into two lines.
BROKEN_WORDS = """() => [...document.querySelectorAll(".command pre span")]
  .filter((each) => each.textContent.length < 24 && each.offsetHeight > 30).map((each) => each.textContent)"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPage]:
    with served_page("--port", 0, cwd=tmp_path_factory.mktemp("served")) as started:
        yield started


@pytest.fixture(scope="module")
def problems() -> list[str]:
    """What the browser logs, and requests to anywhere else."""
    return []


@pytest.fixture(scope="module")
def page(browser: Browser, served: ServedPage, problems: list[str]) -> Iterator[Page]:
    opened = browser.new_page(viewport=DESKTOP)
    opened.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on(
        "request",
        lambda request: (
            None if request.url.startswith((served.address, "blob:", "data:")) else problems.append(request.url)
        ),
    )
    opened.goto(served.address)
    answered(opened)
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def at_the_start(page: Page, served: ServedPage) -> None:
    page.set_viewport_size(DESKTOP)
    show(page, served, "")


def answered(page: Page) -> None:
    page.wait_for_selector("#answers[aria-busy=false]", timeout=120_000)


def show(page: Page, served: ServedPage, words: str) -> None:
    """Open the page with the fields of a link, and wait for its answer."""
    page.goto("about:blank")
    page.goto(f"{served.address}#{words}")
    answered(page)


def test_an_answer_has_a_verdict_a_recommendation_and_bars_with_their_settings(page: Page) -> None:
    assert page.inner_text("#badge") == "It fits"
    assert page.inner_text("#recommended h2").startswith("Recommended: ")
    names = page.locator(".bar .name").all_inner_texts()
    assert len(names) > 5
    assert [name for name in names if " batch " not in name.replace("\n", " ")] == []
    assert [name for name in names if name.endswith("ckpt")]


def test_the_browser_reports_no_error_and_no_request_to_anywhere_else(page: Page, problems: list[str]) -> None:
    with page.expect_download() as download:
        page.get_by_role("button", name="Download the files of").click()
    assert download.value.suggested_filename.endswith(".zip")
    assert problems == []


def test_dpo_has_time_and_cost_and_its_command_the_tokens(page: Page, served: ServedPage) -> None:
    show(page, served, "method=dpo&price_per_gpu_hour=2")
    shown = page.locator("#figures dt").all_inner_texts()
    assert {"Time to train", "Cost"} <= set(shown)
    assert "--dataset-tokens 10000000" in page.locator(".command pre").first.inner_text().replace("\n", " ")


def test_a_method_that_generates_has_no_field_for_tokens(page: Page, served: ServedPage) -> None:
    show(page, served, "method=grpo")
    assert page.locator(".error:visible").count() == 0
    assert not page.is_visible("#dataset_tokens")


@pytest.mark.parametrize(
    ("words", "field", "message"),
    [
        ("max_seq_length=many", "max_seq_length", "“Tokens per sequence” is 'many'"),
        ("gpus=0", "gpus", "“GPUs per node” is 0"),
        ("host_memory_gib=-1", "host_memory_gib", "“Host memory, GiB” is -1.0"),
    ],
)
def test_an_error_names_the_field_as_the_page_does(
    words: str, field: str, message: str, page: Page, served: ServedPage
) -> None:
    show(page, served, words)
    assert message in page.inner_text(f"#error-{field}")
    assert page.get_attribute(f"#{field}", "aria-invalid") == "true"
    page.set_viewport_size(PHONE)
    assert message in page.inner_text("#glance")


def test_a_phone_shows_the_verdict_before_the_form(page: Page) -> None:
    page.set_viewport_size(PHONE)
    line = page.locator("#glance")
    box, first_field = line.bounding_box(), page.locator("#model").bounding_box()
    assert box is not None
    assert first_field is not None
    assert box["y"] + box["height"] <= first_field["y"] < PHONE["height"]
    assert line.inner_text().startswith("It fits ")
    assert " of 79.1 GiB" in line.inner_text()
    page.locator("#num_train_epochs").scroll_into_view_if_needed()
    box = line.bounding_box()
    assert box is not None
    assert box["y"] >= 0, "it stays while the form is read"


@pytest.mark.parametrize("words", ["", "method=dpo&weights=lora&gpu=l40s", "model=meta-llama/Llama-3.1-70B&gpus=1"])
def test_nothing_sticks_out_is_cut_off_or_shown_as_markup(words: str, page: Page, served: ServedPage) -> None:
    show(page, served, words)
    for window in (PHONE, DESKTOP):
        page.set_viewport_size(window)
        page.locator(".bar").first.evaluate("bar => { bar.open = true }")
        assert overflow(page) == []
        assert [each for each in page.evaluate(SELECT_WIDTHS) if each[1] > each[2]] == []
        assert page.evaluate(BROKEN_WORDS) == []
        assert "`" not in page.inner_text("body")


def test_a_card_has_one_number_for_its_memory_and_its_vendors_group(page: Page, served: ServedPage) -> None:
    show(page, served, "gpu=rtx-3090&weights=qlora")
    listed = page.locator("#gpu option:checked").inner_text()
    assert listed.partition(" · ")[2] in page.inner_text("#memory-note")
    groups = page.evaluate("[...document.querySelectorAll('#gpu optgroup')].map((each) => each.label)")
    assert groups == ["NVIDIA", "AMD", "without bf16"]
    memory = {gpu.name: gpu.memory_gib for gpu in GPUS}
    for group in groups:
        options = page.locator(f"#gpu optgroup[label='{group}'] option")
        names = options.evaluate_all("options => options.map((each) => each.value)")
        assert sorted(names, key=lambda name: -memory[name]) == names


def test_a_job_that_needs_more_host_memory_says_so(page: Page, served: ServedPage) -> None:
    show(page, served, "model=meta-llama/Llama-3.1-70B&gpu=rtx-4090&gpus=2")
    assert page.inner_text("#badge") == "It does not fit"
    assert "of host memory per node, which has " in page.inner_text("#summary")
    assert page.locator(".bar .word").first.inner_text() == "host too small"


def test_the_footer_says_what_plans_were_compared_with(page: Page) -> None:
    assert "compared with one H200, never with several GPUs" in page.inner_text("footer")


@pytest.mark.nightly
def test_the_table_of_known_models_is_there_once_it_is_scrolled_to(page: Page) -> None:
    page.locator("#known-heading").scroll_into_view_if_needed()
    page.wait_for_selector("table.known", timeout=300_000)  # planned once, for all of them
    assert page.locator("table.known tbody tr").count() == len(bundled_models())


@pytest.mark.nightly
def test_the_page_says_when_its_server_has_ended(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> None:
    with served_page("--port", 0, cwd=tmp_path_factory.mktemp("other")) as started:
        other = browser.new_page()
        other.goto(started.address)
        answered(other)
        started.interrupt()
        other.locator("#gpus").fill("4")
        other.wait_for_selector("#error-model:visible")
        assert "toolkit page has ended" in other.inner_text("#error-model")
        other.close()

"""What the planner page costs its reader: seconds to the first paint, to the first answer and per change, and bytes.

    python benchmarks/page.py --repeats 5

Builds the page, serves it from this machine with Python's own server, which compresses nothing, and opens it in
headless Chromium, each time with an empty cache. The first answer is the plan, with its bars; the recommendation
follows. A change is one of `CHANGES`, from the keystroke's handler to the plan, and to both.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "site" / "page")]

from planner_page import build  # noqa: E402
from playwright.sync_api import Page, sync_playwright  # noqa: E402

CHANGES = {
    "max_seq_length": "4096",
    "gpus": "4",
    "lora_r": "32",
    "price_per_gpu_hour": "2.2",
    "model": "Qwen/Qwen2.5-7B",
}
ANSWERED = "#answers[aria-busy=false]"
LIMITS = {"first_paint": 0.5, "first_answer": 6.0, "change": 0.3, "megabytes": 8.0}


class Served(SimpleHTTPRequestHandler):
    """A folder, and the bytes that were sent of it."""

    sent = 0

    def copyfile(self, source: Any, outputfile: Any) -> None:
        Served.sent += os.fstat(source.fileno()).st_size
        super().copyfile(source, outputfile)

    def log_message(self, *_: object) -> None:
        pass


def measures(page: Page, name: str) -> list[dict[str, float]]:
    """Return what the page itself measured, in milliseconds."""
    found: list[dict[str, float]] = page.evaluate(
        "name => performance.getEntriesByName(name).map(({ startTime, duration }) => ({ startTime, duration }))", name
    )
    return found


def one_visit(page: Page, address: str) -> dict[str, list[float]]:
    """Return seconds of one visit: paint, first answers, and changes."""
    Served.sent = 0
    page.goto(address)
    page.wait_for_selector(ANSWERED, timeout=120_000)
    paint, plan, both = (measures(page, name)[0] for name in ("first-contentful-paint", "plan", "change"))
    found = {"first_paint": [paint["startTime"] / 1000], "megabytes": [Served.sent / 1e6]}
    found["first_answer"] = [(plan["startTime"] + plan["duration"]) / 1000]
    found["first_answer_and_recommendation"] = [(both["startTime"] + both["duration"]) / 1000]
    page.select_option("#weights", "lora")
    page.wait_for_selector(ANSWERED)
    count = len(measures(page, "plan"))
    for name, text in CHANGES.items():
        page.locator(f"#{name}").fill(text)
        page.wait_for_selector(ANSWERED)
    found["change"] = [each["duration"] / 1000 for each in measures(page, "plan")[count:]]
    found["change_and_recommendation"] = [each["duration"] / 1000 for each in measures(page, "change")[count:]]
    return found


def run(address: str, repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the medians and the highest values of all visits."""
    collected: dict[str, list[float]] = {}
    with sync_playwright() as playwright:
        for number in range(repeats):
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            for name, values in one_visit(browser.new_page(), address).items():
                collected.setdefault(name, []).extend(values)
            browser.close()
            say(f"visit {number + 1} of {repeats}")
    return {name: {"median": statistics.median(values), "highest": max(values)} for name, values in collected.items()}


def main() -> None:
    """Print a line per quantity, and the limit that it is to keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        build(Path(made))
        server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Served, directory=made))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = run(
            f"http://127.0.0.1:{server.server_port}/", arguments.repeats, lambda line: print(line, file=sys.stderr)
        )
        server.shutdown()
    if arguments.json:
        return print(json.dumps(found, indent=1))
    for name, values in found.items():
        limit = f", limit {LIMITS[name]:g}" if name in LIMITS else ""
        print(f"{name:<32} median {values['median']:.3f}, highest {values['highest']:.3f}{limit}")


if __name__ == "__main__":
    main()

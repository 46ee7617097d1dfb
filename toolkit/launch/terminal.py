"""What a terminal shows of a run: one live line instead of a line per step, and no noise of libraries.

train.log keeps every line.
"""

import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from toolkit.engines.zero import LOADED_OP
from toolkit.entry_point import print_message
from toolkit.record.timeline import LAUNCH, read_timeline
from toolkit.record.training_progress import STEP_LINE
from toolkit.units import counted, time_left

# Lines that look like an error and are none: an optional kernel that is not installed, and an op that was loaded. And
# the Trainer's for a log, which the observer prints for all ranks.
_NOISE = re.compile(
    rf"Failed to load CPU gemm_4bit_forward from kernels-community|{LOADED_OP}|"
    r"^{'loss': '[^']*', 'grad_norm': '[^']*', 'learning_rate': '[^']*', 'epoch': '[^']*'}$"
)
# A tqdm bar, which a pipe cuts into a line per redrawing, and how one below it moves up: step lines say the same.
_BAR = re.compile(r"[^|\]]*\d%\|[^|]*\|[^|\[\]]*\[[^\]]*\]|\S[^|\[\]]* \d+ examples \[[^\]]*\]|\s*\x1b\[A")
_WARNING = re.compile(r"(?:\S+: )?(?P<place>\S+\.py:\d+): (?P<kind>\w*Warning): ")
# Of a library to those who write code against it.
_DEPRECATIONS = ("FutureWarning", "DeprecationWarning", "PendingDeprecationWarning")
# A phase of rank 0 other than its steps (`toolkit.record.timeline`), and what the live line calls it.
PHASES = {
    **{LAUNCH: "importing the libraries", "start": "importing the libraries", "arguments": "reading the arguments"},
    **{"data": "reading the data", "load": "loading the model", "engine": "preparing the engine"},
    **{"attest": "verifying the first step", "save": "saving", "evaluate": "evaluating", "end": "ending the processes"},
}


class OutputFilter:
    """Passes on the lines of a run's processes without bars; Python's warnings once, libraries' deprecations never."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self.on_line, self.left_out = on_line, Counter[str]()
        self.places: set[str] = set()
        self.in_warning = False  # Python prints the line of the source, indented, after a warning

    def __call__(self, line: str) -> None:
        """Pass on a line, or count it."""
        if self.in_warning and line.startswith("  "):
            self.in_warning = False
            return
        self.in_warning = False
        if warning := _WARNING.match(line):
            place, kind = warning["place"], warning["kind"]
            if place in self.places or ("site-packages" in place and kind in _DEPRECATIONS):
                self.left_out[kind] += 1
                self.in_warning = True
                return
            self.places.add(place)
        if (text := _BAR.sub("", line)).strip() and not _NOISE.search(line):
            self.on_line(text)

    def summarise(self, log: Path) -> None:
        """Say how many warnings were left out."""
        if self.left_out:
            kinds = ", ".join(counted(count, kind) for kind, count in self.left_out.most_common())
            self.on_line(f"left out: {kinds}; see {log}")


class LiveLine:
    """One line at the bottom of a terminal that says how far a run is; elsewhere nothing. A context manager."""

    def __init__(self, timeline: Path | None = None) -> None:
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.is_live = sys.stderr.isatty() and not self.console.is_dumb_terminal
        self.text, self.timeline, self.started = "", timeline, time.monotonic()
        self.live = Live(console=self.console, get_renderable=self._line, transient=True, redirect_stdout=False)

    def __enter__(self) -> Self:
        if self.is_live:
            self.live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.live.stop()

    def print(self, line: str) -> None:
        """Show a line of a run: a step in place of the one before, anything else above it."""
        if self.is_live and STEP_LINE.match(line):
            self.text = line
        else:
            print_message(line)

    def describe(self, elapsed: float) -> str:
        """Return the live line, `elapsed` seconds after the beginning."""
        moments = read_timeline(self.timeline) if self.timeline else []
        phase = moments[-1].phase if moments else LAUNCH
        words = PHASES.get(phase) or ("" if self.text else "in the first step")
        return "  ".join(filter(None, (time_left(elapsed), words, "" if phase == "end" else self.text)))

    def _line(self) -> Text:
        """The parts that fit, with the time left before the figures of a step."""
        parts = self.describe(time.monotonic() - self.started).split("  ")
        if parts[-1].endswith(" left"):
            parts.insert(next(index for index, part in enumerate(parts, 1) if part.startswith("step ")), parts.pop())
        while len(parts) > 2 and len("  ".join(parts)) >= self.console.width:
            parts.pop()
        return Text("  ".join(parts), no_wrap=True, overflow="ellipsis")

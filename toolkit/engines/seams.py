"""Private names of libraries that the toolkit uses: what each is for, and the versions in which it is known.

The rows are in `seams.yaml`. A name is `module:object`, or `module::attribute` where only instances have it; then the
attribute's name is looked for in the module's source. `tests/engines/test_seams.py` resolves every row against the
installed versions, and refuses a private name in `toolkit/` that has no row. So a new version of a library shows what
to look through before it is used.
"""

import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from toolkit.errors import ToolkitError
from toolkit.files.documents import read_table
from toolkit.versions import installed_version

KNOWN_IN: Mapping[str, str] = {
    "transformers": "5.23.0",
    "accelerate": "1.15.0",
    "torch": "2.13.0",
    "deepspeed": "0.19.8",
    "peft": "0.21.2",
    "trl": "1.16.0",
    "datasets": "5.2.0",
}
"""The versions in which the rows were read; those of constraints.txt."""


class Seam(NamedTuple):
    name: str
    why: str

    @property
    def library(self) -> str:
        return self.name.partition(".")[0].partition(":")[0]

    @property
    def attribute(self) -> str:
        return self.name.rpartition(":")[2].rpartition(".")[2]

    def is_there(self) -> bool:
        module, _, path = self.name.partition(":")
        try:
            found = importlib.import_module(module)
        except ImportError:
            return False
        if path.startswith(":"):
            return path[1:] in inspect.getsource(found)
        for part in path.split("."):
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True


OBSERVED_METHODS = (
    *("train", "get_batch_samples", "training_step", "compute_loss", "evaluation_loop", "prediction_step"),
    *("_get_num_items_in_batch", "_get_grad_norm", "_maybe_log_save_evaluate", "_save_checkpoint", "_get_output_dir"),
    "_finalize_training",
)
"""Methods of the Trainer that the observer stands for."""

_NOTED = [f"transformers.trainer:Trainer.{name}" for name in OBSERVED_METHODS if name.startswith("_")]
_ROWS: dict[str, str] = dict.fromkeys(_NOTED, "the observer notes what passes") | read_table(__file__)
SEAMS = tuple(Seam(name, why) for name, why in _ROWS.items())


def missing() -> Iterator[Seam]:
    """Yield the rows that the installed versions lack, of libraries that are installed."""
    absent = {name for name in KNOWN_IN if installed_version(name) is None}
    yield from (seam for seam in SEAMS if seam.library not in absent and not seam.is_there())


def check_methods(trainer: object) -> None:
    """Raise ToolkitError where a Trainer lacks a method that the observer stands for."""
    lacking = [name for name in OBSERVED_METHODS if not hasattr(trainer, name)]
    if lacking:
        known, here = KNOWN_IN["transformers"], installed_version("transformers")
        what = f"the Trainer of transformers {here} has no `{lacking[0]}`, by which runs are observed"
        raise ToolkitError(what, hint=f'`pip install "transformers=={known}"`, in which it is known')

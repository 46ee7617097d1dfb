"""The answers of `toolkit page`, in the Python of a browser: what it cannot read is replaced before it is imported."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import toolkit.versions as versions

# What the planner reads in the source of transformers, which is not here: as it was where the page was built. Before
# the imports below, which take these names.
FACTS = json.loads(Path(__file__).with_name("transformers_facts.json").read_text())
versions.attention_names = lambda: tuple(FACTS["attention_names"])
versions.model_types = lambda: tuple(FACTS["model_types"])
versions.model_plans = lambda model_type: FACTS["model_plans"].get(model_type, {})
versions.model_class_flags = lambda model_type: FACTS["model_class_flags"].get(model_type)

import toolkit.models.read_model as models  # noqa: E402
import toolkit.models.split as split  # noqa: E402
import toolkit.presets.preset as preset_files  # noqa: E402
from toolkit.cli import page  # noqa: E402
from toolkit.errors import ToolkitError  # noqa: E402
from toolkit.models.hub import hub_refusal  # noqa: E402
from toolkit.models.shape import ModelShape  # noqa: E402

# The files of the presets do not change while a page is open.
preset_files.read_preset = functools.cache(preset_files.read_preset)


count_here = models.count_shape
models.cached_count = lambda _: Path("no-cache")  # which is named by the modules that count, and these are not here

split.is_importable = lambda _: True  # what transformers has a plan for is among the facts


def count_in_browser(config: Path, values: Mapping[str, Any], *, waits: bool = True) -> ModelShape:  # noqa: ARG001  (as there)
    """Return a count that is shipped, or one of its family: no browser can start the process that counts others."""
    if (shipped := count_here(config, values, waits=False)) is not None:
        return shipped
    message = "transformers has to count this architecture, which takes torch and cannot run in a browser"
    known = f"the page has formulas for {', '.join(models.types_with_formulas())}"
    raise ToolkitError(f"{message}; {known}", hint="`toolkit page` counts it where both are installed")


models.count_shape = count_in_browser


def reply(message: str) -> str:
    """Return the answer to a message of the page, both JSON; it says why the hub refused a model, if it did."""
    request = json.loads(message).get("request", {})
    if "refused" not in request:
        return page.reply(message)
    model, status = request["model"], request.get("status")
    if status is None:
        error = ToolkitError(f"huggingface.co cannot be reached, and {model!r} is not a name that the page knows")
    else:
        error = hub_refusal(model, request["refused"], status, address=f"https://huggingface.co/{model}")
    return json.dumps({"error": page.described(error)})

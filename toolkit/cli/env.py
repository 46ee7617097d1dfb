"""`toolkit env`: versions, GPUs and settings of this node, for an issue report."""

from __future__ import annotations

import json

from toolkit.flags import JsonOutput


def env(as_json: JsonOutput = False) -> None:
    """Print versions, GPUs, compilers, memory, disks and variables of this node, for an issue.

    The text is Markdown. Secrets are left out: of a token, it only says that it is set.
    """
    from toolkit.doctor.environment_report import as_markdown, environment_report

    report = environment_report()
    print(json.dumps(report, indent=2) if as_json else as_markdown(report))

"""`toolkit presets`, `toolkit preset show` and `toolkit preset export`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from toolkit.flags import PRESET_HELP, JsonOutput

MIN_TABLE_COLUMNS = 100  # preset names stay complete in a narrow terminal or a pipe

preset_app = typer.Typer(no_args_is_help=True, help="Print a preset, or copy its files.")


def presets(as_json: JsonOutput = False) -> None:
    """List the presets and when to choose each: engine, sharding, degrees, offload, precision, processes."""
    from toolkit.presets.characteristics import characteristics
    from toolkit.presets.preset import list_presets

    found = list_presets()
    if as_json:
        rows = [preset.as_row() | {"contract": characteristics(preset).as_row()} for preset in found]
        print(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("preset", "engine", "sharding", "degrees", "offloads", "precision", "processes", box=None)
    for preset in found:
        devices = {"optimizer": preset.offload_optimizer, "param": preset.offload_param}
        offload = ", ".join(f"{part}: {device}" for part, device in devices.items() if device) or "-"
        degrees = ", ".join(preset.degrees) or "-"
        cells = [preset.name, preset.engine, preset.sharding, degrees, offload]
        table.add_row(*cells, preset.mixed_precision, preset.processes)
    console = Console(width=max(Console().width, MIN_TABLE_COLUMNS), soft_wrap=True, highlight=False)
    console.print(table, soft_wrap=False)
    console.print()
    for preset in found:
        console.print(f"{preset.name}: {preset.summary}", markup=False)


@preset_app.command()
def show(
    name: Annotated[str, typer.Argument(help=PRESET_HELP)],
    form: Annotated[str, typer.Option("--as", help="accelerate, deepspeed or trainer")] = "accelerate",
) -> None:
    """Print a preset as YAML for accelerate, JSON for DeepSpeed, or training arguments."""
    from toolkit.presets.export import preset_text
    from toolkit.presets.preset import load_preset

    print(preset_text(load_preset(name), form), end="")


@preset_app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="folder to write the files to", metavar="DIR")],
    names: Annotated[
        list[str] | None, typer.Argument(help="presets to copy; all if none is named", metavar="NAME...")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="overwrite existing files")] = False,
) -> None:
    """Copy presets to a folder. The copies work from any directory.

    Each DeepSpeed JSON is written next to its YAML. Paths inside the files are absolute: export again after moving
    the folder.
    """
    from toolkit.presets.export import export_presets
    from toolkit.presets.preset import load_preset, preset_names

    for path in export_presets([load_preset(name) for name in names or preset_names()], folder, force=force):
        print(path)

"""Options of `toolkit doctor`."""

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from toolkit.flags import PRESET_HELP, NvmePath


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Options of `toolkit doctor`, by the names of their flags."""

    preset: Annotated[
        str | None, Option(help=f"check what this preset needs; {PRESET_HELP}; with MODEL also its host memory")
    ] = None
    num_processes: Annotated[
        int | None, Option(help="processes per node that the preset runs in; by default one per GPU, or two on a CPU")
    ] = None
    gpus_per_node: Annotated[int | None, Option(help="GPUs that this node must have")] = None
    output_dir: Annotated[
        str | None, Option(help="folder of the run, whose disk is checked; by default the working directory")
    ] = None
    nvme_path: NvmePath = None

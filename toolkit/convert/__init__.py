"""Convert a configuration of TRL, axolotl or LLaMA-Factory to a preset and training arguments, without importing them.

    conversion = convert_file(Path("qlora.yaml"))
    conversion.preset, conversion.arguments, conversion.not_converted

Settings that mean exactly the same are found in `toolkit.job.argument_aliases`; a module per tool decides the others.
"""

from toolkit.convert.conversion import Conversion, NotConverted
from toolkit.convert.files import TOOLS, convert_file
from toolkit.convert.yaml_text import launch_command, yaml_text

__all__ = ["TOOLS", "Conversion", "NotConverted", "convert_file", "launch_command", "yaml_text"]

"""Convert a configuration of TRL, axolotl or LLaMA-Factory to a preset and training arguments, without importing them.

    conversion = convert_file(Path("qlora.yaml"))
    conversion.preset, conversion.arguments, conversion.not_converted

Settings that mean exactly the same are found in `toolkit.job.argument_aliases`; a module per tool decides the others.
"""

from toolkit.convert.conversion import TOOLS, convert_file, launch_command, yaml_text
from toolkit.convert.draft import Conversion, NotConverted

__all__ = ["TOOLS", "Conversion", "NotConverted", "convert_file", "launch_command", "yaml_text"]

"""Print the inputs of the demo job, and prepare them on first use.

python -m toolkit.demo --model            # folder of the default model
python -m toolkit.demo --num-processes    # number of GPUs, at least 2
"""

import argparse
import sys

from toolkit.demo.assets import DATA_ATTRIBUTION, default_data_file, prepare_default_model
from toolkit.entry_point import exit_code_of
from toolkit.hardware.gpus import count_gpus


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.demo", description=(__doc__ or "").partition("\n")[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--prepare", action="store_true", help="prepare the model and the data")
    action.add_argument("--model", action="store_true", help="print the folder of the default model")
    action.add_argument("--data", action="store_true", help="print the file of the default data")
    action.add_argument("--num-processes", action="store_true", help="print the number of GPUs, at least 2")
    arguments = parser.parse_args(argv)

    def work() -> None:
        if arguments.model or arguments.prepare:
            print(prepare_default_model())
        if arguments.data or arguments.prepare:
            print(f"data: {DATA_ATTRIBUTION}", file=sys.stderr)
            print(default_data_file())
        if arguments.num_processes:
            print(max(2, count_gpus()))

    return exit_code_of(work)


if __name__ == "__main__":
    sys.exit(main())

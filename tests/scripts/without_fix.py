"""The training script without one of the toolkit's fixes of a library: `TOOLKIT_WITHOUT_FIX` is MODULE:FUNCTION."""

import importlib
import os
import sys

import toolkit.train.__main__ as door


def main() -> int:
    door.prepare_environment()
    module, function = os.environ["TOOLKIT_WITHOUT_FIX"].split(":")
    found = importlib.import_module(module)
    assert callable(getattr(found, function))
    setattr(found, function, lambda: None)
    return door.main(sys.argv[1:])


if __name__ == "__main__":
    door.leave(main())

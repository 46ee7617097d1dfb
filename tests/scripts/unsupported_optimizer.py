"""The training script without the rules that refuse an optimizer: the library's own behaviour."""

import sys
from typing import Any

import toolkit.train.__main__ as door


def main() -> int:
    door.prepare_environment()
    import toolkit.presets.preset_checks as preset_checks

    def supported(*_: Any, **__: Any) -> None:
        return None

    preset_checks.check_supported = supported
    return door.main(sys.argv[1:])


if __name__ == "__main__":
    door.leave(main())

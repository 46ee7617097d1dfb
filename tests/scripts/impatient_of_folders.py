"""The training script with a second of patience for what another node writes: all machines of the test are one host."""

import sys

import toolkit.train.__main__ as door


def main() -> int:
    door.prepare_environment()
    from toolkit.observe import observed_run

    observed_run.VISIBLE_SECONDS = 1.0
    return door.main(sys.argv[1:])


if __name__ == "__main__":
    door.leave(main())

"""The training script without the shim that makes FSDP2 real on a CPU: accelerate then runs DDP, silently."""

import sys

import toolkit.train.__main__ as door


def main() -> int:
    door.prepare_environment()
    import toolkit.train.arguments as arguments

    arguments.enable_fsdp_on_cpu = lambda: None
    return door.main(sys.argv[1:])


if __name__ == "__main__":
    door.leave(main())

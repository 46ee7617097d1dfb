"""The training script with torch's Muon in fp32: it iterates in bf16, and amplifies the rounding."""

import sys

import toolkit.train.__main__ as door


def main() -> int:
    door.prepare_environment()
    import torch

    setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # noqa: B010  (mypy takes no assignment to a method)
    return door.main(sys.argv[1:])


if __name__ == "__main__":
    door.leave(main())

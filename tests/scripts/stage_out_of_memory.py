"""The training script, in which a pipeline's second rank asks for more memory than there is, in its fourth forward."""

import os
import sys

import toolkit.train.__main__ as door

MORE_THAN_THERE_IS = 2**60


def main() -> int:
    door.prepare_environment()
    import torch

    from toolkit.train.engine.pipeline_model import Stage

    forward, calls = Stage.forward, 0

    def forward_and_allocate(stage, inputs, *, micro_batch):
        nonlocal calls
        calls += 1
        if os.environ["RANK"] == "1" and calls == 4:
            torch.empty(MORE_THAN_THERE_IS)
        return forward(stage, inputs, micro_batch=micro_batch)

    Stage.forward = forward_and_allocate
    return door.main(sys.argv[1:])


if __name__ == "__main__":
    door.leave(main())

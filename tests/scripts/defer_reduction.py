"""The training script with a Trainer that forgets `sync_each_batch`: FSDP2 keeps whole gradients meanwhile."""

import sys

import toolkit.train.__main__ as door


def main() -> int:
    door.prepare_environment()
    from transformers import Trainer

    build = Trainer.create_accelerator_and_postprocess

    def forgetful(self) -> None:
        self.args.accelerator_config.gradient_accumulation_kwargs = None
        build(self)

    Trainer.create_accelerator_and_postprocess = forgetful
    return door.main(sys.argv[1:])


if __name__ == "__main__":
    door.leave(main())

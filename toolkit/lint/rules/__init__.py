"""The rules, one small function each, by family; importing this room registers them in this order."""

from toolkit.lint.rules import keys, accelerate, fsdp, deepspeed, trainer, pairs  # noqa: F401, I001

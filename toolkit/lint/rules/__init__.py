"""The lint rules, one small function each, in one module per topic; they run in the order of their definition."""

from toolkit.lint.findings import LintRule
from toolkit.lint.rules import accelerate, deepspeed, fsdp, keys, multi_node, pairs, sbatch, trainer

RULES: tuple[LintRule, ...] = tuple(
    value
    for module in (keys, accelerate, fsdp, deepspeed, trainer, pairs, multi_node, sbatch)
    for value in vars(module).values()
    if isinstance(value, LintRule)
)

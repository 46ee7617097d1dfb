"""The lint rules, one small function each, in one module per topic; they run in the order of their definition."""

from toolkit.lint.findings import LintRule
from toolkit.lint.rules import accelerate, deepspeed, keys, multi_node, programs, shell, slips, trainer, values
from toolkit.lint.rules.conditions import CONDITIONS

RULES: tuple[LintRule, ...] = (
    *CONDITIONS,
    *(
        value
        for module in (keys, values, programs, accelerate, deepspeed, trainer, multi_node, shell, slips)
        for value in vars(module).values()
        if isinstance(value, LintRule)
    ),
)

"""Plans of commands as users type them."""

from command_line import parsed

from toolkit.plan.options import PlanOptions
from toolkit.plan.planner import Plan, make_plans, plan_request


def planned_command(command: str) -> Plan:
    """Return the first plan of the words that follow `toolkit plan`."""
    context = parsed(["plan", *command.split()])
    names = {name: value for name, value in context.params.items() if name in PlanOptions.__dataclass_fields__}
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in names.items()}
    model = next(value for name, value in context.params.items() if name.lower() == "model")
    return make_plans(plan_request(model, PlanOptions(**options)))[0]

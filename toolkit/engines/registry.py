"""Every engine by its name."""

from toolkit.engines.ddp import Ddp, Pipeline, Single
from toolkit.engines.engine import Engine
from toolkit.engines.fsdp2 import Fsdp2, ShardedAtLoad
from toolkit.engines.zero import Zero

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (Single(), Ddp(), Pipeline(), Fsdp2(), Zero())}
SHARDED_AT_LOAD = ShardedAtLoad()


def engine_named(name: str, *, sharded_at_load: bool = False) -> Engine:
    """Return an engine. Raises KeyError for a name that no preset has."""
    return SHARDED_AT_LOAD if sharded_at_load else ENGINES[name]

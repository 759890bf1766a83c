"""Engines by name or `package.module:Class`, the values of `--engine`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mafrt.config.resolve import Registry, user_line
from mafrt.core.errors import ConfigError, MafrtError
from mafrt.core.text import error_line

if TYPE_CHECKING:
    from mafrt.config.train_config import TrainConfig
    from mafrt.engines import Engine
    from mafrt.models.shared_base import SharedBase

ENGINES = Registry(
    "engine", {"local": "mafrt.runners.build:make_local_engine", "vllm": "mafrt.runners.build:make_vllm_engine"}
)
"""Each is called with `(base, config, window)`, one of the user's own too."""
SHIPPED = ENGINES.names()


def register_engine(name: str, factory: Callable[..., Engine]) -> None:
    """Make `factory` available as `--engine name`. Raises ConfigError for a name that is taken."""
    if not callable(factory):
        raise ConfigError(f"the factory of engine {name!r} must be a class or function, found {factory!r}")
    ENGINES.register(name, factory)


def engine_of(name_or_path: str, base: SharedBase, config: TrainConfig, window: int) -> Engine:
    """The engine of a name or a path: `factory(base, config, window)`, with `window` tokens of prompt and answer.

    Raises:
        ConfigError: it cannot be found or built, or has no `generate`.
    """
    factory: Any = ENGINES.resolve(name_or_path)
    try:
        engine: Engine = factory(base, config, window)
    except MafrtError:
        raise
    except Exception as error:
        raise ConfigError(
            f"engine {name_or_path} could not be built from (base, config, window): {type(error).__name__}: "
            f"{error_line(error)}{user_line(error)}"
        ) from error
    if not callable(getattr(engine, "generate", None)):
        raise ConfigError(f"engine {name_or_path} made a {type(engine).__name__}, which has no generate(requests)")
    return engine

"""Where `Start` stood before it went to `mafrt.core.types`; scripts of that time import it from here."""

from mafrt.core.types import Start

__all__ = ["Start"]

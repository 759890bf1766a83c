"""Tools that agents call by name with arguments: docs/tools.md."""

from mafrt.envs.tools.base import Tool, Toolbox
from mafrt.envs.tools.failed import Failed
from mafrt.envs.tools.registry import make_toolbox

__all__ = ["Failed", "Tool", "Toolbox", "make_toolbox"]

"""The environment API: base class, checker, registry, cloning, tool calls."""

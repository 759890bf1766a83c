"""The one exception of tools."""


class Failed(Exception):
    """A call that a tool could not make; the text is one sentence for the agent."""

"""Pydantic AI in its three tongues: it finds address and key in the environment."""

import sys

from pydantic import BaseModel
from pydantic_ai import Agent


class Sum(BaseModel):
    total: int


def main(model):
    agent = Agent(model, instructions="You add.", output_type=Sum)
    called = []

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Adds."""
        called.append((a, b))
        return a + b

    result = agent.run_sync("2+3")
    return float(result.output == Sum(total=5) and called == [(2, 3)])


if __name__ == "__main__":
    print(main(sys.argv[1]))

"""Budget of a run's coach: reserved before each call, settled by the usage that the provider reports.

A call of unknown usage (no reply in time, a connection that broke) counts as its reservation: the
provider may well have charged for it. A call that the provider refused costs nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from mafrt.core.errors import BudgetSpentError

MILLION = 1_000_000


@dataclass(frozen=True)
class Prices:
    """Dollars per million tokens; None where not known."""

    read: float | None = None
    written: float | None = None

    def cost(self, tokens_in: int, tokens_out: int) -> float:
        """Dollars. Tokens without a price cost nothing here."""
        return ((self.read or 0.0) * tokens_in + (self.written or 0.0) * tokens_out) / MILLION

    @property
    def known(self) -> bool:
        return self.read is not None and self.written is not None


class Budget:
    """Calls, tokens and money of one run. Used from one event loop.

    Args:
        money: dollars that may be spent; None for no limit.
        calls: calls that may be made; None for no limit.
        prices: of tokens.
    """

    def __init__(self, money: float | None = None, calls: int | None = None, prices: Prices | None = None) -> None:
        self.money, self.most_calls, self.prices = money, calls, prices or Prices()
        self.calls = self.tokens_in = self.tokens_out = 0
        self.spent = 0.0
        self._reserved: dict[int, float] = {}
        self._next = 0
        self._settled = asyncio.Event()

    async def reserve(self, tokens_in: int, tokens_out: int) -> Reservation:
        """Set aside the most that a call may cost, waiting for others to be settled if there is too little left.

        Raises:
            BudgetSpentError: too little is left, and no call is under way that might free some.
        """
        cost = self.prices.cost(tokens_in, tokens_out)
        while problem := self._problem(cost):
            if not self._reserved:
                raise BudgetSpentError(problem)
            # Cleared before the wait, so that a call that is settled in between is not missed.
            self._settled.clear()
            await self._settled.wait()
        self._next += 1
        self._reserved[self._next] = cost
        return Reservation(self, self._next, tokens_in, tokens_out)

    def _problem(self, cost: float) -> str | None:
        """Why a call of this cost may not be made now; None if it may."""
        # Calls under way count as made, or many at once would pass the limit together.
        if self.most_calls is not None and self.calls + len(self._reserved) >= self.most_calls:
            return f"the {self.most_calls} calls that coach_max_calls allows are made; raise it to go on"
        if self.money is not None and self.spent + sum(self._reserved.values()) + cost > self.money:
            return (
                f"${self.spent:.4f} of the coach_budget of ${self.money:g} are spent, and the next call may cost "
                f"${cost:.4f}; raise it to go on"
            )
        return None

    def settle(self, number: int, tokens_in: int, tokens_out: int) -> None:
        """A call is over and used so much."""
        del self._reserved[number]
        self.calls += 1
        self.tokens_in += tokens_in
        self.tokens_out += tokens_out
        self.spent += self.prices.cost(tokens_in, tokens_out)
        self._settled.set()

    def counts(self) -> dict[str, float]:
        """Usage so far; the cost only where the prices are known."""
        counters = {"calls": self.calls, "tokens_in": self.tokens_in, "tokens_out": self.tokens_out}
        return {name: float(value) for name, value in counters.items()} | (
            {"cost": self.spent} if self.prices.known else {}
        )

    def restore(self, counts: Mapping[str, float]) -> None:
        """Go on from the usage of an earlier part of the run."""
        self.calls, self.tokens_in, self.tokens_out = (
            int(counts.get(name, 0)) for name in ("calls", "tokens_in", "tokens_out")
        )
        # Runs from before prices were given have no cost, so it is computed from their tokens.
        self.spent = float(counts.get("cost", self.prices.cost(self.tokens_in, self.tokens_out)))


class Reservation:
    """The reservation of one call. Settled exactly once, by whichever method comes first."""

    def __init__(self, budget: Budget, number: int, tokens_in: int, tokens_out: int) -> None:
        self._budget, self._number = budget, number
        self._most = (tokens_in, tokens_out)
        self._open = True

    def used(self, tokens_in: int | None, tokens_out: int | None) -> None:
        """Settle by the provider's usage; a number that it does not give counts as reserved."""
        self._settle(
            self._most[0] if tokens_in is None else tokens_in, self._most[1] if tokens_out is None else tokens_out
        )

    def nothing(self) -> None:
        """The call was refused."""
        self._settle(0, 0)

    def unknown(self) -> None:
        """It is not known whether the call was charged for."""
        self._settle(*self._most)

    def _settle(self, tokens_in: int, tokens_out: int) -> None:
        # Settled once only: a call can both time out and be cancelled.
        if self._open:
            self._open = False
            self._budget.settle(self._number, tokens_in, tokens_out)

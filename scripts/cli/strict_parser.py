"""An argparse parser whose errors are one sentence of ours, without a page of usage before it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any, NoReturn

from mafrt.core.errors import ConfigError


class _Once(argparse.Action):
    """Takes a value, and none a second time: the last one would win in silence."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        parser.first_time(self, f"{option_string} {values}")
        setattr(namespace, self.dest, values)


class OnOrOff(argparse.BooleanOptionalAction):
    """`--name` and `--no-name`, of which one may be given, once."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        parser.first_time(self, option_string)
        super().__call__(parser, namespace, values, option_string)


class StrictParser(argparse.ArgumentParser):
    """Raises ConfigError for words that it does not understand, and for a flag that is given twice unless it extends a
    list; reads `-1e-4` as a value, and completes no flag."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **kwargs})
        self.brief: Callable[[], str] = self.format_help
        """the help that `--help` shows without another word"""
        self._negative_number_matcher = re.compile(r"^-\.?\d")
        self.register("action", None, _Once)
        self.register("action", "store", _Once)
        self._given: dict[argparse.Action, str] = {}

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        self._given = {}
        return super().parse_known_args(*args, **kwargs)

    def first_time(self, action: argparse.Action, typed: str) -> None:
        """Raise ConfigError for a flag that was given before; `typed` is how it was given."""
        if action in self._given:
            raise ConfigError(f"{self._given[action]} and {typed} are both given; leave one of them out.")
        self._given[action] = typed

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[0].upper()}{message[1:].rstrip('.')}; `{self.prog} --help all` lists the flags.")

"""An argparse parser whose errors are one sentence of ours, without a page of usage before it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any, NoReturn

from mafrt.core.errors import ConfigError


class StrictParser(argparse.ArgumentParser):
    """Raises ConfigError for words that it does not understand, reads `-1e-4` as a value, and completes no flag."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **kwargs})
        self.brief: Callable[[], str] = self.format_help
        """the help that `--help` shows without another word"""
        self._negative_number_matcher = re.compile(r"^-\.?\d")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[0].upper()}{message[1:].rstrip('.')}; `{self.prog} --help all` lists the flags.")

"""Coaches: they score each turn between play and credit.

    coach = make_coach(CoachConfig(coach="openai:gpt-5-mini"), rubric="chain")
    verdicts = coach.judge(cases)

A custom coach needs only `Coach` and `Case`; `--coach` takes a shipped name or `package.module:Class`.
"""

from __future__ import annotations

from mafrt.coach.base import Case, Coach, RulesCoach
from mafrt.coach.budget import Budget, Prices
from mafrt.coach.cache import VerdictCache
from mafrt.coach.local_coach import LocalCoach
from mafrt.coach.own_coach import check_coach
from mafrt.coach.providers import PROVIDERS, make_provider
from mafrt.coach.rubric import load_rubric
from mafrt.config.resolve import load_object
from mafrt.config.schema import unknown
from mafrt.config.train_config import CoachConfig
from mafrt.core.errors import CoachError, ConfigError, MafrtError
from mafrt.core.extras import package

__all__ = ["Case", "Coach", "RulesCoach", "make_coach"]

WITHOUT_MODEL = ("none", "rules", "local")
"""Coaches that are no model behind an API; the providers of those are in `mafrt.coach.providers.PROVIDERS`."""


def coach_names() -> tuple[str, ...]:
    """All names that `--coach` takes."""
    return (*WITHOUT_MODEL, *PROVIDERS.names())


def make_coach(config: CoachConfig, rubric: str | None = None) -> Coach:
    """The coach that the settings name; `rubric` is the environment's own. Its model is not needed yet: see `bind`.

    Raises:
        ConfigError: an unknown provider, no model or key, an unreadable rubric, or settings that contradict each other.
        MissingExtraError: the provider's SDK is not installed.
    """
    kind, colon, model = config.coach.partition(":")
    if kind not in coach_names():
        # Three parts are a provider of one's own with its model, two a coach of one's own.
        if model.count(":") < 1 or not all(config.coach.split(":")):
            return _own(config.coach, kind)
        name, _, model = model.partition(":")  # package.module:Class:MODEL, a custom provider
        kind = f"{kind}:{name}"
    if kind in WITHOUT_MODEL and colon:
        raise ConfigError(f"coach is {config.coach!r}, but {kind} takes no model; write --coach {kind}.")
    if kind not in WITHOUT_MODEL and not model:
        raise ConfigError(f"coach is {config.coach!r}; name the model as well, as in {kind}:MODEL.")
    if config.coach_adapter is not None and kind != "local":
        raise ConfigError(f"coach_adapter is for coach local, and coach is {config.coach}; leave it out.")
    if config.coach_base_url is not None and kind in WITHOUT_MODEL:
        raise ConfigError(f"coach_base_url is for a coach behind an API, and coach is {config.coach}; leave it out.")
    if config.coach_rubric is not None and kind == "rules":
        raise ConfigError(
            "coach_rubric is for a judge that reads texts, and coach rules reads the environment's own verifier; "
            "leave it out, or take a judge such as local or openai:MODEL."
        )
    # Asked for by mistake only, since callers skip the coach in that case.
    if kind == "none":
        raise ConfigError("coach is none, so there is no judge.")
    if kind == "rules":
        return RulesCoach()
    criteria = load_rubric(config.coach_rubric, rubric)
    if kind == "local":
        return LocalCoach(criteria, config.coach_adapter, config.coach_max_tokens)
    # Made before the cache is opened, so that a missing key leaves no file behind.
    provider = make_provider(kind, model, config.coach_base_url, config.coach_max_tokens, config.coach_timeout)
    package(f"coach {config.coach}", "coach", "tenacity")
    from mafrt.coach.api_coach import RemoteCoach
    from mafrt.coach.retry import Breaker, Retry

    return RemoteCoach(
        provider,
        criteria,
        config,
        retry=Retry(config.coach_deadline),
        breaker=Breaker(config.coach_deadline),
        budget=Budget(
            config.coach_budget, config.coach_max_calls, Prices(config.coach_price_in, config.coach_price_out)
        ),
        cache=None if config.coach_cache is None else VerdictCache(config.coach_cache, config.coach),
    )


def _own(path: str, kind: str) -> Coach:
    """A coach from `package.module:Class`."""
    if ":" not in path:
        raise ConfigError(f"{unknown('coach', path, coach_names())} (One's own is given as package.module:Class.)")
    try:
        made = load_object(path)
    except ConfigError as error:
        # Both answers are given, since only the user knows which was meant.
        if "." not in kind and "no module" in str(error):  # as likely a provider's name, mistyped
            raise ConfigError(f"{unknown('coach', kind, coach_names())} (As package.module:Class: {error}.)") from error
        raise ConfigError(f"coach {error}") from error
    try:
        given = made()
    except MafrtError:
        raise
    # It is the user's class, so any error is possible, and the sentence names the class.
    except Exception as error:
        raise CoachError(f"coach {path} could not be built: {type(error).__name__}: {error}") from error
    coach = check_coach(given, path)
    coach.name = coach.name or path
    return coach

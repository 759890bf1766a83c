"""Single questions from Python: to a base, with an adapter or without, and to the agents of a team."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, cast

from mafrt.config.resolve import declared
from mafrt.config.schema import unknown
from mafrt.core.errors import ConfigError
from mafrt.core.seeding import seed_of
from mafrt.core.types import Episode, Message, Observation, Request, SamplingParams, Start
from mafrt.environment.base import Env
from mafrt.environment.session import session_of
from mafrt.rollout.player import Player
from mafrt.rollout.prompts import encode_prompt

if TYPE_CHECKING:
    from mafrt.config.team import Team
    from mafrt.models.several_bases import Bases
    from mafrt.models.shared_base import SharedBase


def generate(
    base: SharedBase,
    prompts: str | Sequence[str] | Sequence[Message] | Sequence[Sequence[Message]],
    adapter: str | None = None,
    *,
    system: str = "",
    seed: int = 0,
    **sampling: Any,
) -> str | list[str]:
    """`SharedBase.generate`."""
    several = not isinstance(prompts, str) and not (len(prompts) and isinstance(prompts[0], dict))
    asked = cast("list[Observation]", list(prompts) if several else [prompts])
    how = _sampling(SamplingParams(), sampling)
    requests = [
        Request(encode_prompt(base.tokenizer, system, seen), adapter, how, seed_of(seed, "generate", place))
        for place, seen in enumerate(asked)
    ]
    texts = [made.text for made in base.engine.generate(requests)]
    return texts if several else texts[0]


def chat(
    team: Team, base: Bases, message: Observation, agent: str | None = None, *, seed: int = 0, **sampling: Any
) -> dict[str, str]:
    """`Team.chat`."""
    for name in team.names if agent is None else (agent,):
        spec = team.agent(name)
        if spec.adapter not in base.of_agent(name).records:
            raise ConfigError(f"agent {name!r} speaks with the adapter {spec.adapter!r}, which the base does not hold; "
                              "train it, or give it one by base.load_adapter or base.add_adapter")  # fmt: skip
    how = {name: _sampling(_own_sampling(team, name), sampling) for name in team.names}
    if agent is not None:
        spec, agent_base = team.agent(agent), base.of_agent(agent)
        ids = encode_prompt(agent_base.tokenizer, spec.prompt, message, spec.prompt_at)
        [made] = agent_base.engine.generate([Request(ids, spec.adapter, how[agent], seed)])
        return {agent: made.text}
    if not isinstance(message, str):
        raise ConfigError("found a list of messages for the whole team; give it a text, or name one agent")
    bases = {id(base.of_agent(name)) for name in team.names}
    if len(bases) > 1:
        raise ConfigError("the agents sit on several bases; name one agent, or use mafrt chat")
    task = declared("mafrt.envs.math.tasks:Task")("asked", message, "0")
    env: Env = declared("mafrt.envs.math:MathEnv")(team=team, tasks=[task])
    main = base.main
    player = Player(main.engine, main.tokenizer, team, how, main.context_window)
    episode = one_episode(player, env, seed)
    if episode is None:
        raise ConfigError("the text is too long for the context window of the base")
    return {turn.agent: turn.text for turn in episode.turns}


def one_episode(player: Player, env: Env, seed: int) -> Episode | None:
    """One episode of the environment's first task; None if it was cut because the first prompt was too long."""
    starts = iter([Start("asked", "asked", reset_seed=seed, seed=seed, task=0)])
    episodes, _ = player.play([session_of(env)], lambda slot, finished: next(starts, None))
    return episodes[0] if episodes and episodes[0].turns else None


def _own_sampling(team: Team, name: str) -> SamplingParams:
    return _sampling(SamplingParams(), team.agent(name).given(("max_new_tokens", "temperature", "top_p", "top_k")))


def _sampling(how: SamplingParams, changes: dict[str, Any]) -> SamplingParams:
    known = {field.name: getattr(how, field.name) for field in fields(how)}
    for name in changes:
        if name not in known:
            raise ConfigError(unknown("sampling parameter", name, known))
    stop = changes.get("stop", how.stop)
    return SamplingParams(**known | changes | {"stop": (stop,) if isinstance(stop, str) else tuple(stop)})

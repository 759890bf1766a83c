"""Recorded episodes as training data: turns with their prompts, tokens and returns.

`episodes.jsonl` holds the text and number of tokens of a turn, but not its prompt. Token ids are taken
where a run recorded them; otherwise the episode is played again, with the recorded texts as actions, from the seed
that its group names, and is left out unless task, speakers, length of every prompt and outcome come out the same.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mafrt.config.team import Team
from mafrt.core.errors import DataError, EnvError
from mafrt.core.seeding import seed_of
from mafrt.core.text import brief, keys_of
from mafrt.core.types import Evidence, Observation, Scored, Turn
from mafrt.environment.base import Env
from mafrt.environment.thought_forms import template_thoughts
from mafrt.environment.tool_calls import visible
from mafrt.rollout.prompts import encode_prompt
from mafrt.rollout.task_stream import task_at
from mafrt.runners.offline.dataset import agent_of, check_number, closed, lines, text_of, turn_of

Episodes = list[tuple[str, dict[str, Any]]]
"""Recorded episodes, each after where it stands (`FILE, line N`)."""

EPISODES = "episodes.jsonl"
"""file of a run with its episodes"""
_GROUP = re.compile(r"\d{6,}-(\d{9,})")


@dataclass(frozen=True)
class RecordedTurn:
    """One turn of a recorded episode, with its problem and its return."""

    turn: Turn
    problem: str
    worth: float
    """its return"""
    where: str


def read_episodes(run: str | Path, team: Team | None) -> Episodes:
    """The episodes of a run directory, each with where it stands. Raises DataError as `read_answers` does."""
    path = Path(run) / EPISODES
    if not path.is_file():
        told = (
            "is a file; give a run directory, or records by --records_path"
            if Path(run).is_file()
            else (f"holds no {EPISODES}; give a run directory that was trained with --log_episodes")
        )
        raise DataError(f"{run} {told}")
    episodes: Episodes = []
    for where, episode in lines(path, growing=True):
        turns, info = episode.get("turns"), episode.get("info")
        if not isinstance(turns, list) or not isinstance(info, dict) or "group" not in episode:
            raise DataError(f"{where}: is no episode (it has {keys_of(episode)}); expected group, turns, outcome, info")
        check_number(where, episode, "outcome")
        for turn in turns:
            if not isinstance(turn, dict):
                raise DataError(f"{where}: a turn must be an object, found {brief(turn)}")
            agent_of(where, turn, team)
            text_of(where, turn, "text", empty=True)
            check_number(where, turn, "reward")
            evidence_of(where, turn)
            lacking = [name for name in ("env_step", "stop", "tokens", "prompt_tokens") if name not in turn]
            if lacking:
                raise DataError(f"{where}: a turn lacks {', '.join(lacking)}; it has {keys_of(turn)}")
        episodes.append((where, episode))
    if not episodes:
        raise DataError(f"{path}: holds no episodes yet; let the run finish an iteration first")
    return episodes


def evidence_of(where: str, turn: Mapping[str, Any]) -> Evidence | None:
    """Evidence of a turn as `episode_record` wrote it; None if there is none. Raises DataError."""
    record = turn.get("evidence")
    if record is None:
        return None
    try:
        rules = record.get("rules")
        if rules is not None:
            spans = tuple((str(quote), float(score)) for quote, score in rules.get("spans", ()))
            rules = Scored(float(rules["score"]), str(rules.get("reason", "")), spans)
        return Evidence(record.get("tool_output"), rules, dict(record.get("facts", {})))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{where}: 'evidence' is not as a run writes it, found {brief(record)}") from error


def holds_tokens(episode: Mapping[str, Any]) -> bool:
    """Whether the token ids of prompts and answers are recorded, so that no replay is needed."""
    return all("prompt_ids" in turn and "action_ids" in turn for turn in episode["turns"])


def recorded_turns(
    episodes: Episodes,
    team: Team,
    tokenizer: Any,
    *,
    env: Env | None = None,
    seed: int = 0,
    return_of: Literal["episode", "agent"] = "episode",
) -> tuple[list[RecordedTurn], Counter[str]]:
    """Every turn of recorded episodes with its tokens and its return.

    Args:
        episodes: from `read_episodes`.
        team: its role prompts stand in the prompts, as they did when the episodes were played.
        tokenizer: of the base.
        env: the environment of the run, to play episodes again that were recorded without token ids.
        seed: the run's seed.
        return_of: `episode`: the outcome, or the sum of all rewards where there is none (`evaluation.score`), is the
            return of every turn. `agent`: the sum of the speaker's own rewards from this turn on.

    Returns:
        the turns, and counts: `episodes`, `not_reproduced` (episodes left out because they came out otherwise),
        `no_return` and `silent` (turns left out: no reward and no outcome; no tokens), `retokenised` (turns whose text
        has another number of tokens than were sampled; they are kept).

    Raises:
        DataError: there is an episode without token ids and no `env`, or with ids that the tokenizer does not have.
    """
    recorded: list[RecordedTurn] = []
    counts: Counter[str] = Counter(episodes=len(episodes))
    for where, episode in episodes:
        exact = holds_tokens(episode)
        if not exact and env is None:
            raise DataError(f"{where}: holds no token ids, and there is no environment to play the episode again in")
        tokens = _recorded(where, episode, tokenizer) if exact else _replayed(episode, env, seed, team, tokenizer)
        if tokens is None:
            counts["not_reproduced"] += 1
            continue
        problem = str(episode["info"].get("task", episode["group"]))
        for index, (entry, (prompt, action)) in enumerate(zip(episode["turns"], tokens, strict=True)):
            worth = _return(episode, index, return_of)
            if not action or worth is None:
                counts["silent" if not action else "no_return"] += 1
                continue
            counts["retokenised"] += len(action) != entry["tokens"]
            turn = turn_of(entry["agent"], prompt, action, entry["stop"], entry["text"])
            turn.evidence = evidence_of(where, entry)
            recorded.append(RecordedTurn(turn, problem, worth, where))
    return recorded, counts


def _return(episode: Mapping[str, Any], index: int, of: str) -> float | None:
    turns = episode["turns"]
    if of == "agent":
        turns = [turn for turn in turns[index:] if turn["agent"] == turns[index]["agent"]]
    elif episode["outcome"] is not None:
        return float(episode["outcome"])
    rewards = [turn["reward"] for turn in turns if turn["reward"] is not None]
    return float(sum(rewards)) if rewards else None


def _recorded(where: str, episode: Mapping[str, Any], tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    pairs = [(turn["prompt_ids"], turn["action_ids"]) for turn in episode["turns"]]
    size = len(tokenizer)
    for ids in (ids for pair in pairs for ids in pair):
        if not isinstance(ids, list) or not all(isinstance(i, int) and 0 <= i < size for i in ids):
            raise DataError(
                f"{where}: token ids must be whole numbers below {size}; was it recorded with another base?"
            )
    return pairs


def _replayed(
    episode: Mapping[str, Any], env: Env | None, seed: int, team: Team, tokenizer: Any
) -> list[tuple[list[int], list[int]]] | None:
    """Prompt and action of every turn, or None if the replay does not reproduce the record."""
    assert env is not None
    try:
        seen = observations_of(episode, env, seed, template_thoughts(tokenizer).opened)
    except EnvError:
        return None  # the caller counts it
    tokens = []
    for turn, observation in zip(episode["turns"], seen or (), strict=seen is not None):
        agent = team.agent(turn["agent"])
        prompt = encode_prompt(tokenizer, agent.prompt, observation, agent.prompt_at)
        if len(prompt) != turn["prompt_tokens"]:
            return None
        tokens.append((prompt, closed(tokenizer, turn["text"], turn["stop"])))
    return tokens if seen is not None else None


def observations_of(episode: Mapping[str, Any], env: Env, seed: int, opened: bool) -> list[Observation] | None:
    """Observation of each turn; None if the replay differs from the record. Raises EnvError.

    `opened`: whether the chat template begins every answer inside a thought, which the environment did not hear.
    """
    named = _GROUP.fullmatch(str(episode["group"]))
    if named is None:
        return None
    draw = int(named[1])
    options = None if env.num_tasks is None else {"task": task_at(draw, env.num_tasks, seed)}
    showing, info = env.reset(seed=seed_of(seed, "draw", draw), options=options)
    wanted = episode["info"].get("task")
    if info.get("task") != wanted:
        # Tasks that are stratified come in another order; the record says which one it was.
        named_so = [i for i, task in enumerate(getattr(env, "tasks", ())) if getattr(task, "id", None) == wanted]
        if not named_so:
            return None
        showing, info = env.reset(seed=seed_of(seed, "draw", draw), options={"task": named_so[0]})
    turns, seen, outcome = list(episode["turns"]), [], None
    while turns:
        step = turns[0]["env_step"]
        now = [turn for turn in turns if turn["env_step"] == step]
        turns = turns[len(now) :]
        if [turn["agent"] for turn in now] != list(showing):
            return None
        seen += [showing[turn["agent"]] for turn in now]
        result = env.step({turn["agent"]: visible(turn["text"], opened=opened) for turn in now})
        showing, outcome = dict(result.observations), result.info.get("outcome", outcome)
    return seen if _equal(outcome, episode["outcome"]) else None


def _equal(played: float | None, recorded: float | None) -> bool:
    if played is None or recorded is None:
        return played is recorded
    return math.isclose(played, recorded, rel_tol=1e-9, abs_tol=1e-12)

"""Records to learn from without play: read from JSONL files, or taken from the recorded episodes of runs.

A record of a file is `{"agent": ..., "prompt": text, ...}` or `{"agent": ..., "messages": [...], ...}` with the
answers under the names that the rule asks for: `response`, or `chosen` and `rejected`. What the agent was shown becomes
tokens exactly as in play (`mafrt.prompts`), the team's role prompt included.

`episodes.jsonl` holds what was said and how many tokens it took, but not what the speaker saw. Token ids are taken
where a run recorded them; otherwise the episode is played again, with the recorded texts as actions, from the seed
that its group names, and is left out unless task, speakers, length of every prompt and outcome come out the same.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from mafrt.config import unknown
from mafrt.env import Env
from mafrt.errors import DataError, EnvError
from mafrt.prompts import encode_prompt
from mafrt.runners.tasks import task_at
from mafrt.seeding import permutation, seed_of
from mafrt.team import Team
from mafrt.types import Observation, Stop, Turn

ROLES = ("system", "user", "assistant", "tool")

Episodes = list[tuple[str, dict[str, Any]]]
"""Recorded episodes, each after where it stands (`FILE, line N`)."""

_GROUP = re.compile(r"\d{6,}-(\d{9,})")


@dataclass(frozen=True)
class Answer:
    """One answer of a file, as text."""

    agent: str
    seen: Observation
    text: str
    where: str
    """`FILE, line N`"""


@dataclass
class Record:
    """One term of a loss: an answer, or a chosen and a rejected one to the same prompt."""

    turns: tuple[Turn, ...]
    where: str
    reference: tuple[float, ...] | None = None
    """log-probability of each answer under the reference policy; None: not computed"""

    @property
    def agent(self) -> str:
        return self.turns[0].agent


@dataclass(frozen=True)
class Said:
    """One turn of a recorded episode, with what it was said to and what came of it."""

    turn: Turn
    problem: str
    worth: float
    """its return"""
    where: str


def read_answers(paths: Sequence[str | Path], fields: Sequence[str], team: Team | None) -> list[tuple[Answer, ...]]:
    """The records of JSONL files, in order, with one answer per name in `fields`. Fields of other names are ignored.

    Raises:
        DataError: a file that cannot be read or is empty, or a record that lacks something, holds something of a wrong
            kind, has two equal answers, or names an agent that `team` does not have; it names file and line.
    """
    found: list[tuple[Answer, ...]] = []
    for path in map(Path, paths):
        before = len(found)
        for where, record in _lines(path):
            agent, seen = _agent(where, record, team), _seen(where, record)
            texts = [_text(where, record, name, empty=name == "rejected") for name in fields]
            if len(set(texts)) < len(texts):
                raise DataError(f"{where}: {' and '.join(fields)} are the same text; nothing can be learnt from that")
            found.append(tuple(Answer(agent, seen, text, where) for text in texts))
        if len(found) == before:
            raise DataError(f"{path}: holds no records; expected lines of {{agent, prompt, {', '.join(fields)}}}")
    return found


def encode(answers: Sequence[tuple[Answer, ...]], team: Team, tokenizer: Any) -> list[Record]:
    """Tokens of what was seen and said; every answer closes with the tokenizer's end token.

    Raises DataError for an answer without tokens.
    """
    records = []
    for group in answers:
        first = group[0]
        prompt = encode_prompt(tokenizer, team.agent(first.agent).prompt, first.seen)
        turns = [_turn(a.agent, prompt, _closed(tokenizer, a.text, "eos"), "eos", a.text) for a in group]
        if not all(turn.action_ids for turn in turns):
            raise DataError(f"{first.where}: an empty answer has no tokens, since this base has no end token")
        records.append(Record(tuple(turns), first.where))
    return records


def fit(records: Sequence[Record], window: int, *, skip: bool) -> list[Record]:
    """The records that fit into the context window. Raises DataError for the first that does not, unless `skip`."""
    kept = []
    for record in records:
        longest = max(len(turn.prompt_ids) + len(turn.action_ids) for turn in record.turns)
        if longest <= window:
            kept.append(record)
        elif not skip:
            raise DataError(
                f"{record.where}: prompt and answer have {longest} tokens, more than the context window of {window}; "
                "shorten the record, or leave such records out with --skip_too_long"
            )
    return kept


def digest(records: Iterable[Record]) -> str:
    """16 hex digits that change with any agent, prompt or answer, and with the order of the records."""
    found = hashlib.sha256()
    for record in records:
        for turn in record.turns:
            found.update(repr((turn.agent, list(turn.prompt_ids), list(turn.action_ids))).encode())
        found.update(b"\n")
    return found.hexdigest()[:16]


def steps_per_epoch(count: int, batch_size: int) -> int:
    """Steps of one pass over `count` records, `batch_size` each at most and all of about the same size."""
    return math.ceil(count / batch_size)


def batch_at(step: int, count: int, batch_size: int, seed: int, name: str) -> list[int]:
    """Which of `count` records make up the `step`-th batch: a shuffled pass over all of them, then another."""
    steps = steps_per_epoch(count, batch_size)
    epoch, at = divmod(step, steps)
    order = _order(count, seed, name, epoch)
    return sorted(order[at * count // steps : (at + 1) * count // steps])


@lru_cache(maxsize=64)
def _order(count: int, seed: int, name: str, epoch: int) -> list[int]:
    return permutation(count, seed, "records", name, epoch)


# ---------------------------------------------------------------------------------------------------- recorded episodes


def read_episodes(run: str | Path, team: Team | None) -> Episodes:
    """The episodes of a run directory, each with where it stands. Raises DataError as `read_answers` does."""
    path = Path(run) / "episodes.jsonl"
    if not path.is_file():
        raise DataError(f"{run} holds no episodes.jsonl; give a run directory that was trained with --log_episodes")
    found: Episodes = []
    for where, episode in _lines(path, growing=True):
        turns, info = episode.get("turns"), episode.get("info")
        if not isinstance(turns, list) or not isinstance(info, dict) or "group" not in episode:
            raise DataError(f"{where}: is no episode (it has {_keys(episode)}); expected group, turns, outcome, info")
        _number(where, episode, "outcome")
        for turn in turns:
            if not isinstance(turn, dict):
                raise DataError(f"{where}: a turn must be an object, found {_brief(turn)}")
            _agent(where, turn, team)
            _text(where, turn, "text", empty=True)
            _number(where, turn, "reward")
            lacking = [name for name in ("env_step", "stop", "tokens", "prompt_tokens") if name not in turn]
            if lacking:
                raise DataError(f"{where}: a turn lacks {', '.join(lacking)}; it has {_keys(turn)}")
        found.append((where, episode))
    if not found:
        raise DataError(f"{path}: holds no episodes yet; let the run finish an iteration first")
    return found


def holds_tokens(episode: Mapping[str, Any]) -> bool:
    """Whether the ids of what was seen and said are on record, so that nothing needs to be played again."""
    return all("prompt_ids" in turn and "action_ids" in turn for turn in episode["turns"])


def mine(
    episodes: Episodes,
    team: Team,
    tokenizer: Any,
    *,
    env: Env | None = None,
    seed: int = 0,
    return_of: Literal["episode", "agent"] = "episode",
) -> tuple[list[Said], Counter[str]]:
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
    found: list[Said] = []
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
        for index, (said, (prompt, action)) in enumerate(zip(episode["turns"], tokens, strict=True)):
            worth = _return(episode, index, return_of)
            if not action or worth is None:
                counts["silent" if not action else "no_return"] += 1
                continue
            counts["retokenised"] += len(action) != said["tokens"]
            turn = _turn(said["agent"], prompt, action, said["stop"], said["text"])
            found.append(Said(turn, problem, worth, where))
    return found, counts


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
    """Prompt and action of every turn, or None if playing the episode again does not give what is on record."""
    assert env is not None
    try:
        seen = _observations(episode, env, seed)
    except EnvError:
        return None  # the caller counts it
    tokens = []
    for turn, observation in zip(episode["turns"], seen or (), strict=seen is not None):
        prompt = encode_prompt(tokenizer, team.agent(turn["agent"]).prompt, observation)
        if len(prompt) != turn["prompt_tokens"]:
            return None
        tokens.append((prompt, _closed(tokenizer, turn["text"], turn["stop"])))
    return tokens if seen is not None else None


def _observations(episode: Mapping[str, Any], env: Env, seed: int) -> list[Observation] | None:
    """What the speaker of each turn saw; None if the episode comes out otherwise. Raises EnvError."""
    named = _GROUP.fullmatch(str(episode["group"]))
    if named is None:
        return None
    draw = int(named[1])
    options = None if env.num_tasks is None else {"task": task_at(draw, env.num_tasks, seed)}
    showing, info = env.reset(seed=seed_of(seed, "draw", draw), options=options)
    if info.get("task") != episode["info"].get("task"):
        return None
    turns, seen, outcome = list(episode["turns"]), [], None
    while turns:
        step = turns[0]["env_step"]
        now = [turn for turn in turns if turn["env_step"] == step]
        turns = turns[len(now) :]
        if [turn["agent"] for turn in now] != list(showing):
            return None
        seen += [showing[turn["agent"]] for turn in now]
        result = env.step({turn["agent"]: turn["text"] for turn in now})
        showing, outcome = dict(result.observations), result.info.get("outcome", outcome)
    return seen if _equal(outcome, episode["outcome"]) else None


def _equal(played: float | None, recorded: float | None) -> bool:
    if played is None or recorded is None:
        return played is recorded
    return math.isclose(played, recorded, rel_tol=1e-9, abs_tol=1e-12)


# ---------------------------------------------------------------------------------------------------------- the pieces


def _turn(agent: str, prompt: list[int], action: list[int], stop: Stop, text: str) -> Turn:
    return Turn(agent, prompt, action, [], stop, text, turn=0, env_step=0, adapter_version=0)


def _closed(tokenizer: Any, text: str, stop: str) -> list[int]:
    """Token ids of an answer, with the end token unless it was cut off."""
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    return [*ids, tokenizer.eos_token_id] if stop == "eos" and tokenizer.eos_token_id is not None else ids


def _lines(path: Path, *, growing: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, object) of every line; `growing`: half a line at the end belongs to a run that was killed."""
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                if raw.strip() and not (growing and not raw.endswith(b"\n")):
                    yield f"{path}, line {number}", _object(f"{path}, line {number}", raw, first=number == 1)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); give a file of JSON lines") from error


def _object(where: str, raw: bytes, *, first: bool) -> dict[str, Any]:
    try:
        record = json.loads(raw.decode("utf-8-sig" if first else "utf-8"), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: is not one JSON object ({error}); expected one record a line") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected an object with fields, found {_brief(record)}")
    return record


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _agent(where: str, record: Mapping[str, Any], team: Team | None) -> str:
    name = _text(where, record, "agent", empty=False)
    if team is not None and name not in team.names:
        raise DataError(f"{where}: {unknown('agent', name, team.names)}")
    return name


def _text(where: str, record: Mapping[str, Any], name: str, *, empty: bool) -> str:
    if name not in record:
        raise DataError(f"{where}: lacks the field {name!r}; it has {_keys(record)}")
    value = record[name]
    if not isinstance(value, str) or not (empty or value.strip()):
        kind = "a text" if empty else "a text that is not empty"
        raise DataError(f"{where}: {name!r} must be {kind}, found {_brief(value)}")
    return value


def _seen(where: str, record: Mapping[str, Any]) -> Observation:
    if ("prompt" in record) == ("messages" in record):
        has = "both" if "prompt" in record else f"neither (it has {_keys(record)})"
        raise DataError(f"{where}: expected either 'prompt' or 'messages', found {has}")
    if "prompt" in record:
        return _text(where, record, "prompt", empty=False)
    messages = record["messages"]
    good = isinstance(messages, list) and messages and all(
        isinstance(m, dict) and m.get("role") in ROLES and isinstance(m.get("content"), str) for m in messages
    )  # fmt: skip
    if not good:
        raise DataError(
            f'{where}: \'messages\' must be a list of {{"role": {"|".join(ROLES)}, "content": text}}, '
            f"found {_brief(messages)}"
        )
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{where}: 'messages' must end before the agent speaks, but its last one is the assistant's")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _number(where: str, record: Mapping[str, Any], name: str) -> None:
    value = record.get(name, "")
    good = value is None or (isinstance(value, (int, float)) and math.isfinite(value))
    if not good:
        found = _brief(value) if name in record else "nothing"
        raise DataError(f"{where}: {name!r} must be a finite number or null, found {found}")


def _keys(record: Mapping[str, Any]) -> str:
    return f"the fields {', '.join(map(repr, record))}" if record else "no fields"


def _brief(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"

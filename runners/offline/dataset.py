"""Records to learn from without play: read from JSONL files, in batches that are a pure function of the step.

A record of a file is `{"agent": ..., "prompt": text, ...}` or `{"agent": ..., "messages": [...], ...}` with the
answers under the names that the rule asks for: `response`, or `chosen` and `rejected`. The chats of TRL, which
`mafrt collect` writes, are read too. Prompts become
tokens exactly as in a rollout (`mafrt.rollout.prompts`), the team's role prompt included.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from mafrt.config.schema import Checked, Count, unknown
from mafrt.config.team import Team
from mafrt.core.errors import DataError
from mafrt.core.hf_datasets import dataset_rows, is_dataset
from mafrt.core.reading import read_file, unpacked
from mafrt.core.seeding import permutation
from mafrt.core.text import brief, clean_deep, error_line, keys_of
from mafrt.core.types import Observation, Stop, Turn
from mafrt.environment.contract import ROLES, tools_problem
from mafrt.rollout.prompts import encode_answer, encode_prompt
from mafrt.runners.offline.chat_fields import with_fields_in_text

ONLY_AGENT = "solver"
"""Name of the agent of records that name none, as of tasks with a reward function."""

MOST_MIB = 4096
"""Largest file of records."""


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
class RecordPasses(Checked):
    """Records to learn from, and how they are passed over. Raises ConfigError for a count below 1."""

    records: Sequence[Record]
    """training data"""
    epochs: Count = 1
    """passes over the records"""
    batch_size: Count = 16
    """records of each adapter in an optimizer step"""
    held_out: Sequence[Record] = ()
    """records to measure before and after training"""


def read_answers(paths: Sequence[Any], fields: Sequence[str], team: Team | None) -> list[tuple[Answer, ...]]:
    """The records of JSONL files and of Hugging Face's data sets (`mafrt.core.hf_datasets`), in order, with one answer
    per name in `fields`. Fields of other names are ignored, but for calls, thoughts and tools of chats
    (`chat_fields`). Without a team, and without an `agent` in the first record,
    all are of one agent.

    Raises:
        DataError: a file that cannot be read or is empty, or a record that lacks a field, has a field of a wrong
            type, has two equal answers, or names an agent that `team` does not have; it names file and line.
    """
    groups: list[tuple[Answer, ...]] = []
    for path in paths:
        before = len(groups)
        of_dataset = (
            ((where, _filled(clean_deep(row))) for where, row in dataset_rows(path)) if is_dataset(path) else ()
        )
        for where, written in of_dataset or lines(Path(path)):
            record = in_our_layout(with_fields_in_text(where, written), fields)
            if team is None and not groups and "agent" not in record:
                team = Team.of((ONLY_AGENT,))  # as in the files of other libraries, which know one model
            agent, seen = agent_of(where, record, team), _seen(where, record)
            texts = [text_of(where, record, name, empty=name == "rejected") for name in fields]
            if len(set(texts)) < len(texts):
                raise DataError(f"{where}: {' and '.join(fields)} are the same text; nothing can be learnt from that")
            groups.append(tuple(Answer(agent, seen, text, where) for text in texts))
        if len(groups) == before:
            name = "the data set" if is_dataset(path) else path
            raise DataError(f"{name}: holds no records; expected lines of {{agent, prompt, {', '.join(fields)}}}")
    return groups


def _filled(row: Any) -> Any:
    """A row of a data set without the fields that other rows have and it has not, nested ones included."""
    if isinstance(row, dict):
        return {name: _filled(value) for name, value in row.items() if value is not None}
    return [_filled(value) for value in row] if isinstance(row, list) else row


def encode(answers: Sequence[tuple[Answer, ...]], team: Team, tokenizer: Any) -> list[Record]:
    """Tokens of prompts and answers; every answer closes with the tokenizer's end token.

    Raises DataError for an answer without tokens.
    """
    records = []
    for group in answers:
        first = group[0]
        agent = team.agent(first.agent)
        prompt = encode_prompt(tokenizer, agent.prompt, first.seen, agent.prompt_at)
        turns = [turn_of(a.agent, prompt, closed(tokenizer, a.text, "eos"), "eos", a.text) for a in group]
        if not all(turn.action_ids for turn in turns):
            raise DataError(f"{first.where}: an empty answer has no tokens, since this base has no end token")
        records.append(Record(tuple(turns), first.where))
    return records


def fit(records: Sequence[Record], window: int, *, skip: bool) -> list[Record]:
    """The records that fit into the context window. Raises DataError for the first that does not, unless `skip`."""
    fitting = []
    for record in records:
        longest = max(len(turn.prompt_ids) + len(turn.action_ids) for turn in record.turns)
        if longest <= window:
            fitting.append(record)
        elif not skip:
            raise DataError(
                f"{record.where}: prompt and answer have {longest} tokens, more than the context window of {window}; "
                "shorten the record, or leave such records out with --skip_too_long"
            )
    return fitting


def digest(records: Iterable[Record]) -> str:
    """16 hex digits that change with any agent, prompt or answer, and with the order of the records."""
    digested = hashlib.sha256()
    for record in records:
        for turn in record.turns:
            digested.update(repr((turn.agent, list(turn.prompt_ids), list(turn.action_ids))).encode())
        digested.update(b"\n")
    return digested.hexdigest()[:16]


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


def turn_of(agent: str, prompt: list[int], action: list[int], stop: Stop, text: str) -> Turn:
    return Turn(agent, prompt, action, [], stop, text, turn=0, env_step=0, adapter_version=0)


def closed(tokenizer: Any, text: str, stop: str) -> list[int]:
    """Token ids of an answer, with the end token unless it was cut off."""
    ids = encode_answer(tokenizer, text)
    return [*ids, tokenizer.eos_token_id] if stop == "eos" and tokenizer.eos_token_id is not None else ids


def lines(path: Path, *, growing: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, object) of every line; `growing`: half a line at the end belongs to a run that was killed."""
    try:
        content = read_file(path, most_mib=MOST_MIB)
    except OSError as error:
        runs = ", or a run by --episodes_path" if path.is_dir() else ""
        raise DataError(f"{path} cannot be read ({error.strerror}); give a file of JSON lines{runs}") from error
    try:
        content = unpacked(content, most_mib=MOST_MIB)
    except OSError as error:
        raise DataError(f"{path} {error.strerror}") from error
    for number, raw in enumerate(io.BytesIO(content), start=1):
        if raw.strip() and not (growing and not raw.endswith(b"\n")):
            yield f"{path}, line {number}", _object(f"{path}, line {number}", raw, first=number == 1)


def _object(where: str, raw: bytes, *, first: bool) -> dict[str, Any]:
    try:
        text = raw.decode("utf-8-sig" if first else "utf-8")
        record = clean_deep(json.loads(text, parse_constant=_no_number))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except RecursionError as error:
        raise DataError(f"{where}: is not one JSON object (it is nested too deeply); make it flatter") from error
    except ValueError as error:
        raise DataError(f"{where}: is not one JSON object ({error_line(error)}); expected one record a line") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected an object with fields, found {brief(record)}")
    return record


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")


def in_our_layout(record: Mapping[str, Any], fields: Sequence[str]) -> Mapping[str, Any]:
    """A record in TRL's layouts, or of `mafrt collect --layout turns`, as one of ours; any other record as it is.

    The latter has a chat under `prompt` and the `answer`. TRL has a whole chat under `messages`, of which the last
    message is the answer, or `prompt` and `completion`, and pairs whose `chosen` and `rejected` are chats, with or
    without the prompt in front.
    """
    ours = dict(record)
    if fields == ("response",) and "response" not in ours:
        if "completion" in ours:
            ours["response"] = ours.pop("completion")
        elif "answer" in ours and _chat(ours.get("prompt")):
            ours["response"] = ours.pop("answer")
        elif (chat := _chat(ours.get("messages"))) and chat[-1]["role"] == "assistant":
            ours["messages"], ours["response"] = chat[:-1], chat[-1]["content"]
    if isinstance(ours.get("prompt"), list):
        ours["messages"] = ours.pop("prompt")
    chats = [_chat(ours.get(name)) for name in fields]
    if all(chat and chat[-1]["role"] == "assistant" for chat in chats):
        starts = [chat[:-1] for chat in chats]
        if "prompt" not in ours and "messages" not in ours and all(starts) and starts.count(starts[0]) == len(starts):
            ours["messages"], starts = starts[0], []
        if not any(starts):
            ours |= {name: chat[-1]["content"] for name, chat in zip(fields, chats, strict=True)}
    return ours


def _chat(value: object) -> list[dict[str, Any]]:
    """`value` if it is a list of messages; empty if it is not."""
    known = {"role", "content"}
    good = isinstance(value, list) and all(isinstance(message, dict) and known <= message.keys() for message in value)
    return value if good else []  # type: ignore[return-value]


def agent_of(where: str, record: Mapping[str, Any], team: Team | None) -> str:
    if team is not None and len(team.names) == 1 and "agent" not in record:
        return team.names[0]
    name = text_of(where, record, "agent", empty=False)
    if team is not None and name not in team.names:
        raise DataError(f"{where}: {unknown('agent', name, team.names)}")
    return name


def text_of(where: str, record: Mapping[str, Any], name: str, *, empty: bool) -> str:
    if name not in record:
        raise DataError(f"{where}: lacks the field {name!r}; it has {keys_of(record)}")
    value = record[name]
    if not isinstance(value, str) or not (empty or value.strip()):
        kind = "a text" if empty else "a text that is not empty"
        raise DataError(f"{where}: {name!r} must be {kind}, found {brief(value)}")
    return value


def _seen(where: str, record: Mapping[str, Any]) -> Observation:
    if ("prompt" in record) == ("messages" in record):
        has = "both" if "prompt" in record else f"neither (it has {keys_of(record)})"
        raise DataError(f"{where}: expected either 'prompt' or 'messages', found {has}")
    if "prompt" in record:
        return text_of(where, record, "prompt", empty=False)
    messages = record["messages"]
    good = isinstance(messages, list) and messages and all(
        isinstance(m, dict) and m.get("role") in ROLES and isinstance(m.get("content"), str) for m in messages
    )  # fmt: skip
    if not good:
        raise DataError(
            f'{where}: \'messages\' must be a list of {{"role": {"|".join(ROLES)}, "content": text}}, '
            f"found {brief(messages)}"
        )
    if problem := tools_problem(messages):
        raise DataError(f"{where}: 'messages': {problem}")
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: 'messages' must end before the agent speaks, but its last one is the assistant's; files of "
            "mafrt collect are for train_sft, and pairs have 'chosen' and 'rejected' (docs/dpo_sft.md)"
        )
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def check_number(where: str, record: Mapping[str, Any], name: str) -> None:
    value = record.get(name, "")
    try:
        good = value is None or (isinstance(value, (int, float)) and math.isfinite(value))
    except OverflowError:  # an integer beyond the range of floats
        good = False
    if not good:
        shown = brief(value) if name in record else "nothing"
        raise DataError(f"{where}: {name!r} must be a finite number or null, found {shown}")

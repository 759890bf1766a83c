"""The team and its file.

A team file is a JSON or YAML list of agents, or an object with that list under `agents`:

    - role: reasoner
      prompt: You plan the solution and do not compute.
    - role: actor
      prompt: You carry the plan out and put the answer into \\boxed{}.
      with_answer: true
      lora: {rank: 16, alpha: 32}
      lr: 1e-5

MARFT's own profile files (`role`, `prompt`, `with_answer`, `device`) load as they are: `device` has no meaning
on one shared base and is ignored with a warning, and a prompt that carries its own chat markers is unwrapped,
because the chat template of the base writes them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mafrt.config.agent import ADAPTER_SETTINGS, LORA_SETTINGS, AgentSpec, LoraSpec
from mafrt.config.registered_agents import registered_agent
from mafrt.config.resolve import declared
from mafrt.config.schema import describe, unknown
from mafrt.core.errors import ConfigError
from mafrt.core.reading import parse_json, parse_yaml, read_text
from mafrt.core.text import clean_deep, keys_of
from mafrt.core.types import Message

log = logging.getLogger(__name__)

_CHAT_WRAPPER = re.compile(r"\s*<\|im_start\|>\s*system\s*[:\n]\s*(.*?)\s*(?:<\|im_end\|>\s*)?", re.DOTALL)


@dataclass(frozen=True)
class Team:
    """The agents, in the order in which a workflow lets them speak.

    >>> team = mafrt.Team((mafrt.AgentSpec("planner", prompt="You plan."), mafrt.AgentSpec("solver", with_answer=True)))
    >>> team.names
    ('planner', 'solver')
    """

    agents: tuple[AgentSpec, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "agents", tuple(self.agents))
        if not self.agents:
            raise ConfigError("the team has no agents; give at least one")
        seen: set[str] = set()
        for agent in self.agents:
            if agent.name in seen:
                raise ConfigError(f"role {agent.name!r} appears twice; every agent needs a name of its own")
            seen.add(agent.name)
        folders = {adapter.casefold(): adapter for adapter in self.adapters}
        if sys.platform == "darwin" and len(folders) < len(self.adapters):
            alike = next(adapter for adapter in self.adapters if folders[adapter.casefold()] != adapter)
            raise ConfigError(
                f"the adapters {alike!r} and {folders[alike.casefold()]!r} differ in capitals only, and are one folder "
                "on a Mac; choose another name for one of them"
            )
        for adapter in self.adapters:
            users = [a for a in self.agents if a.adapter == adapter]
            for setting in ADAPTER_SETTINGS:
                asked = [a for a in users if getattr(a, setting) is not None]
                if any(getattr(a, setting) != getattr(asked[0], setting) for a in asked):
                    raise ConfigError(
                        f"agents {', '.join(a.name for a in asked)} share the adapter {adapter!r} but ask for "
                        f"different {setting} settings; give the same, or give each an adapter of its own"
                    )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(a.name for a in self.agents)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Unique adapter names, in the order of the agents."""
        return tuple(dict.fromkeys(a.adapter for a in self.agents))

    def agent(self, name: str) -> AgentSpec:
        for agent in self.agents:
            if agent.name == name:
                return agent
        raise ConfigError(unknown("agent", name, self.names))

    def lora_for(self, adapter: str, default: LoraSpec) -> LoraSpec:
        """The shape of `adapter`: the one its agents ask for, else the run's default."""
        users = [a for a in self.agents if a.adapter == adapter]
        if not users:
            raise ConfigError(unknown("adapter", adapter, self.adapters))
        shape = next((a.lora for a in users if a.lora is not None), default)
        return next((a.lora_shape(default) for a in users if a.given(LORA_SETTINGS)), shape)

    def model_for(self, adapter: str) -> str | None:
        """The base that `adapter` belongs to, as its agents name it; None: the run's."""
        model: str | None = self.settings_for(adapter, ("model",)).get("model")
        return model

    @property
    def models(self) -> tuple[str, ...]:
        """The bases that the team file names, each once, in the order of the agents."""
        return tuple(dict.fromkeys(agent.model for agent in self.agents if agent.model is not None))

    def settings_for(self, adapter: str, names: Collection[str]) -> dict[str, Any]:
        """Values of the named settings that the agents of `adapter` give; those they leave out are missing."""
        chosen: dict[str, Any] = {}
        for agent in self.agents:
            if agent.adapter == adapter:
                chosen |= agent.given(names)
        return chosen

    def frozen(self, freeze: Collection[str] = ()) -> tuple[str, ...]:
        """Agents that never learn: those marked in the team file, and those in `freeze` (`all`: the whole team).

        Raises:
            ConfigError: `freeze` names no agent of the team.
        """
        for name in freeze:
            if name not in self.names and name != "all":
                raise ConfigError(unknown("frozen agent", name, self.names))
        return tuple(a.name for a in self.agents if a.freeze or a.name in freeze or "all" in freeze)

    def check_size(self, n_agents: int | None) -> None:
        """Raise ConfigError if `n_agents` was given and contradicts the team."""
        if n_agents is not None and n_agents != len(self.agents):
            raise ConfigError(
                f"n_agents is {n_agents}, but the team has {len(self.agents)} ({', '.join(self.names)}); "
                "change one of them, or leave n_agents out"
            )

    def chat(
        self, base: Any, message: str | list[Message], agent: str | None = None, *, seed: int = 0, **sampling: Any
    ) -> dict[str, str]:
        """Put a question to one agent, or let the whole team work on it.

        Args:
            base: holds the agents' adapters (`SharedBase`, or `SeveralBases` where one agent is asked).
            message: the question, or a chat for one agent.
            agent: who answers, with its role prompt; None: all speak in turn, each seeing what was said before, as in
                training with the workflow `chain`.
            seed: sampling follows from it.
            sampling: fields of `SamplingParams`; they win over those of the team file.

        Returns:
            Agent -> what it said, in the order of speaking.

        Raises:
            ConfigError: an unknown agent or parameter, or an agent whose adapter the base does not hold.
        """
        answers: dict[str, str] = declared("mafrt.rollout.ask:chat")(self, base, message, agent, seed=seed, **sampling)
        return answers

    @staticmethod
    def of(names: Sequence[str]) -> Team:
        """A team without prompts, an adapter each; the answer of the last agent counts."""
        if isinstance(names, str):
            raise ConfigError(f"Team.of takes a list of names, found the single text {names!r}")
        return Team(tuple(AgentSpec(name, with_answer=i == len(names) - 1) for i, name in enumerate(names)))

    @staticmethod
    def load(path: str | Path) -> Team:
        """Read a team file (JSON or YAML). ConfigError says which agent and which key is wrong."""
        path = Path(path)
        try:
            return Team.parse(_read(path))
        except ConfigError as error:
            raise ConfigError(f"team file {path}: {error}") from error

    @staticmethod
    def parse(data: object) -> Team:
        """A team from the parsed content of a team file: a list of agents, or `{"agents": [...]}`."""
        if isinstance(data, dict):
            if "agents" not in data:
                raise ConfigError(f"expected a list of agents or the key 'agents', found {keys_of(data)}")
            for key in data.keys() - {"agents"}:
                raise ConfigError(unknown("key", str(key), ["agents"]))
            data = data["agents"]
        if not isinstance(data, list):
            raise ConfigError(f"expected a list of agents, found {type(data).__name__}")
        return Team(tuple(_agent(entry, number) for number, entry in enumerate(data, start=1)))

    def to_list(self) -> list[dict[str, Any]]:
        """The team as the content of a team file; values equal to the default are left out."""
        return [_entry(agent) for agent in self.agents]

    def to_json(self) -> str:
        """The text of a team file that loads as an equal team."""
        return json.dumps(self.to_list(), indent=2, ensure_ascii=False) + "\n"


def _entry(agent: AgentSpec) -> dict[str, Any]:
    """An agent as it stands in a team file."""
    entry = {("role" if k == "name" else k): v for k, v in asdict(agent).items() if v is not None}
    if agent.adapter == agent.name:
        del entry["adapter"]
    if not agent.freeze:
        del entry["freeze"]
    if agent.prompt_at == "start":
        del entry["prompt_at"]
    if agent.lora is not None and agent.lora.scope == "all":
        del entry["lora"]["scope"]
    plain: dict[str, Any] = json.loads(json.dumps(entry))
    return plain


_AGENT_KEYS = ("role", "agent", *(f.name for f in fields(AgentSpec) if f.name != "name"))
_OF_THE_RUN = {
    "micro_batch_tokens": "one backward pass holds the turns of all agents, and its size changes no gradient; give "
    "--micro_batch_tokens, or 'micro_batch_tokens' in the settings file.",
}
"""Keys of other libraries' agents that are settings of the run here, and why."""
_LORA_KEYS = tuple(f.name for f in fields(LoraSpec))
_NUMBERS = tuple(setting.name for setting in describe(AgentSpec).values() if setting.kind is float)


def _agent(entry: object, number: int) -> AgentSpec:
    if not isinstance(entry, dict):
        raise ConfigError(f"agent {number} must be an object with the key 'role', found {entry!r}")
    if "agent" in entry:
        made = registered_agent(entry["agent"])
        overrides = {key: value for key, value in entry.items() if key != "agent"}
        entry = {**(_entry(made) if isinstance(made, AgentSpec) else made), **overrides}
    if "role" not in entry:
        raise ConfigError(f"agent {number} lacks the key 'role'; it has {keys_of(entry)}")
    where = f"agent {number} ({entry['role']!r})"
    settings = dict(entry)
    settings["name"] = settings.pop("role")
    if settings.pop("device", None) is not None:
        log.warning("%s: 'device' is ignored: all agents share one base on one device", where)
    if "trainable" in settings:
        settings["freeze"] = _opposite(settings.pop("trainable"), settings.get("freeze"), where)
    for key in settings.keys() - {"name"} - set(_AGENT_KEYS):
        if key in _OF_THE_RUN:
            raise ConfigError(f"{where}: {key} belongs to the run, not to an agent: {_OF_THE_RUN[key]}")
        raise ConfigError(f"{where}: {unknown('key', str(key), _AGENT_KEYS)}")
    lora = settings.get("lora")
    if lora is not None:
        if not isinstance(lora, dict):
            raise ConfigError(f"{where}: lora must be an object with {', '.join(_LORA_KEYS)}, found {lora!r}")
        for key in lora.keys() - set(_LORA_KEYS):
            raise ConfigError(f"{where}: lora: {unknown('key', str(key), _LORA_KEYS)}")
    if settings.get("adapter", "x") == "":
        raise ConfigError(f"{where}: adapter is empty; leave the key out for an adapter of the agent's own")
    for key in _NUMBERS:
        # YAML 1.1 reads 1e-5 (no point in it) as a text.
        if isinstance(settings.get(key), str):
            with contextlib.suppress(ValueError):
                settings[key] = float(settings[key])
    try:
        if lora is not None:
            settings["lora"] = LoraSpec(**lora)
        if isinstance(settings.get("prompt"), str):
            settings["prompt"] = _unwrap(settings["prompt"])
        return AgentSpec(**settings)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"agent {number}: {error}") from error


def _opposite(trainable: object, freeze: object, where: str) -> bool:
    """`trainable`, Dr. MAS's word, as the value of `freeze`."""
    if not isinstance(trainable, bool):
        raise ConfigError(f"{where}: trainable must be true or false, found {trainable!r}")
    if freeze is not None and freeze is trainable:
        raise ConfigError(f"{where}: trainable is {trainable} and freeze is {freeze}; leave one of the two out")
    return not trainable


def _unwrap(prompt: str) -> str:
    match = _CHAT_WRAPPER.fullmatch(prompt)
    return match[1] if match else prompt


def _read(path: Path) -> object:
    try:
        text = read_text(path)
    except OSError as error:
        raise ConfigError(
            f"cannot be read ({error.strerror or error}); give the path of a JSON or YAML file"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8 text ({error.reason} at byte {error.start})") from error
    if not text.strip():
        raise ConfigError("is empty; expected a list of agents, each with the key 'role'")
    if path.suffix.lower() in (".yaml", ".yml"):
        import yaml

        try:
            return clean_deep(parse_yaml(text))
        except yaml.YAMLError as error:
            raise ConfigError(f"is not YAML: {' '.join(str(error).split())}") from error
        except ValueError as error:
            raise ConfigError(f"cannot be used: {error}") from error
    try:
        return clean_deep(parse_json(text))  # JSON can hold half a character, which no file and no tokenizer takes
    except json.JSONDecodeError as error:
        raise ConfigError(f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error
    except ValueError as error:
        raise ConfigError(f"is not JSON: {error}") from error

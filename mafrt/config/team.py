"""The team: names, prompts, adapters, and per-agent settings.

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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mafrt.config.schema import check_number, unknown
from mafrt.core.errors import ConfigError
from mafrt.core.reading import parse_json, parse_yaml, read_text

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9_.-]+")
"""Valid names of agents and adapters, which become folder names and metric names."""

# Beside the adapter folders, a checkpoint holds these; an adapter of the same name would overwrite them.
RESERVED = frozenset({".", "..", "state", "critic.pth", "manifest.json"})

_CHAT_WRAPPER = re.compile(r"\s*<\|im_start\|>\s*system\s*[:\n]\s*(.*?)\s*(?:<\|im_end\|>\s*)?", re.DOTALL)


def name_problem(name: object) -> str | None:
    """Why `name` cannot be the name of an agent or adapter, or None if it can."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        return f"{name!r} is not a valid name (letters, digits, '_', '.' and '-' only)"
    if name.lower() in RESERVED:
        return f"{name!r} is a name that checkpoints use for themselves; choose another"
    return None


@dataclass(frozen=True)
class LoraSpec:
    """Shape of one LoRA adapter: the update of a layer is `alpha / rank * B A`."""

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the linear layers that are adapted (the last part of the module's path)."""

    def __post_init__(self) -> None:
        if isinstance(self.targets, str) or not all(isinstance(t, str) and t for t in self.targets):
            raise ConfigError(f"lora targets must be a list of layer names, found {self.targets!r}")
        object.__setattr__(self, "targets", tuple(self.targets))
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise ConfigError(f"lora rank must be a whole number of at least 1, found {self.rank!r}")
        _number("lora alpha", self.alpha, above=0.0)
        if not self.targets:
            raise ConfigError("lora targets is empty; name at least one linear layer, such as 'q_proj'")


@dataclass(frozen=True)
class AgentSpec:
    """One agent. Fields that are None take the run's default."""

    name: str
    """The key `role` in team files."""
    prompt: str = ""
    """The agent's system prompt; empty: no system message."""
    with_answer: bool = False
    """Whether this agent's answer counts when the task is verified."""
    adapter: str = ""
    """The adapter it speaks with; its own name unless given. Several agents may share one."""
    lora: LoraSpec | None = None
    lr: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_new_tokens: int | None = None
    stop: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not self.adapter:
            object.__setattr__(self, "adapter", self.name)
        for field_name, name in (("role", self.name), ("adapter", self.adapter)):
            if problem := name_problem(name):
                raise ConfigError(f"{field_name}: {problem}")
        where = f"agent {self.name!r}: "
        if not isinstance(self.prompt, str):
            raise ConfigError(f"{where}prompt must be a text, found {self.prompt!r}")
        if not isinstance(self.with_answer, bool):
            raise ConfigError(f"{where}with_answer must be true or false, found {self.with_answer!r}")
        if self.lora is not None and not isinstance(self.lora, LoraSpec):
            raise ConfigError(f"{where}lora must be a LoraSpec, found {self.lora!r}")
        _number(f"{where}lr", self.lr, above=0.0)
        _number(f"{where}temperature", self.temperature, least=0.0)
        _number(f"{where}top_p", self.top_p, above=0.0, most=1.0)
        _number(f"{where}top_k", self.top_k, least=0, whole=True)
        _number(f"{where}max_new_tokens", self.max_new_tokens, least=1, whole=True)
        if self.stop is not None:
            stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
            if not all(isinstance(s, str) and s for s in stop):
                raise ConfigError(f"{where}stop must be a list of texts that are not empty, found {self.stop!r}")
            object.__setattr__(self, "stop", stop)


@dataclass(frozen=True)
class Team:
    """The agents, in the order in which a workflow lets them speak."""

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
        for adapter in self.adapters:
            users = [a for a in self.agents if a.adapter == adapter]
            for setting in ("lora", "lr"):
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
        return next((a.lora for a in users if a.lora is not None), default)

    def check_size(self, n_agents: int | None) -> None:
        """Raise ConfigError if `n_agents` was given and contradicts the team."""
        if n_agents is not None and n_agents != len(self.agents):
            raise ConfigError(
                f"n_agents is {n_agents}, but the team has {len(self.agents)} ({', '.join(self.names)}); "
                "change one of them, or leave n_agents out"
            )

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
                raise ConfigError(f"expected a list of agents or the key 'agents', found {_keys(data)}")
            for key in data.keys() - {"agents"}:
                raise ConfigError(unknown("key", str(key), ["agents"]))
            data = data["agents"]
        if not isinstance(data, list):
            raise ConfigError(f"expected a list of agents, found {type(data).__name__}")
        return Team(tuple(_agent(entry, number) for number, entry in enumerate(data, start=1)))

    def to_list(self) -> list[dict[str, Any]]:
        """The team as the content of a team file; values equal to the default are left out."""
        entries = []
        for agent in self.agents:
            entry = {("role" if k == "name" else k): v for k, v in asdict(agent).items() if v is not None}
            if agent.adapter == agent.name:
                del entry["adapter"]
            entries.append(json.loads(json.dumps(entry)))
        return entries

    def to_json(self) -> str:
        """The text of a team file that loads as an equal team."""
        return json.dumps(self.to_list(), indent=2, ensure_ascii=False) + "\n"


_AGENT_KEYS = ("role", *(f.name for f in fields(AgentSpec) if f.name != "name"))
_LORA_KEYS = tuple(f.name for f in fields(LoraSpec))


def _agent(entry: object, number: int) -> AgentSpec:
    if not isinstance(entry, dict):
        raise ConfigError(f"agent {number} must be an object with the key 'role', found {entry!r}")
    if "role" not in entry:
        raise ConfigError(f"agent {number} lacks the key 'role'; it has {_keys(entry)}")
    where = f"agent {number} ({entry['role']!r})"
    settings = dict(entry)
    settings["name"] = settings.pop("role")
    if settings.pop("device", None) is not None:
        log.warning("%s: 'device' is ignored: all agents share one base on one device", where)
    for key in settings.keys() - {"name"} - set(_AGENT_KEYS):
        raise ConfigError(f"{where}: {unknown('key', str(key), _AGENT_KEYS)}")
    lora = settings.get("lora")
    if lora is not None:
        if not isinstance(lora, dict):
            raise ConfigError(f"{where}: lora must be an object with {', '.join(_LORA_KEYS)}, found {lora!r}")
        for key in lora.keys() - set(_LORA_KEYS):
            raise ConfigError(f"{where}: lora: {unknown('key', str(key), _LORA_KEYS)}")
    if settings.get("adapter", "x") == "":
        raise ConfigError(f"{where}: adapter is empty; leave the key out for an adapter of the agent's own")
    for key in ("lr", "temperature", "top_p"):
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
            return parse_yaml(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"is not YAML: {' '.join(str(error).split())}") from error
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error
    except ValueError as error:
        raise ConfigError(f"is not JSON: {error}") from error


def _number(name: str, value: object, **bounds: Any) -> None:
    """`check_number`, where None means that nothing was set."""
    if value is not None:
        check_number(name, value, **bounds)


def _keys(entry: dict) -> str:
    return f"the keys {', '.join(map(repr, entry))}" if entry else "no keys"

"""Settings of the learning algorithms: the groups of fields that they share, and the registry of their classes.

An algorithm is one frozen dataclass. Its fields are its settings, each declared once, with the algorithm's own
defaults; flags, help, documentation and `args.yaml` follow from them. Class variables hold the facts that no setting
changes: the paper, the critic's input, the schedule. The estimators are in `mafrt.algorithms`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from mafrt.config.algorithm_groups import PolicyLossSettings, RewardSettings, ScheduleSettings
from mafrt.config.resolve import Registry, place_of
from mafrt.config.schema import Setting, describe, unknown
from mafrt.core.errors import ConfigError

DEFAULT_ALGORITHM, _ALIAS = "ppo", "gae"

_PRESETS = "mafrt.algorithms.presets"
REGISTRY = Registry(
    "algorithm",
    {
        "gae": f"{_PRESETS}:Ppo",
        "ppo": f"{_PRESETS}:Ppo",
        "marft": f"{_PRESETS}:Marft",
        "cory": f"{_PRESETS}:Cory",
        "maporl": f"{_PRESETS}:Maporl",
        "ippo": f"{_PRESETS}:Ippo",
        "mappo": f"{_PRESETS}:Mappo",
        "happo": f"{_PRESETS}:Happo",
        "reinforce_pp": f"{_PRESETS}:ReinforcePP",
        "reinforce_pp_baseline": f"{_PRESETS}:ReinforcePPBaseline",
        "grpo": f"{_PRESETS}:Grpo",
        "dapo": f"{_PRESETS}:Dapo",
        "gspo": "mafrt.algorithms.gspo:Gspo",
        "cispo": "mafrt.algorithms.cispo:Cispo",
        "maxrl": "mafrt.algorithms.maxrl:MaxRl",
        "dr_grpo": f"{_PRESETS}:DrGrpo",
        "rloo": f"{_PRESETS}:Rloo",
        "dr_mas": f"{_PRESETS}:DrMas",
        "at_grpo": f"{_PRESETS}:AtGrpo",
        "dr_mamr": "mafrt.algorithms.dr_mamr:DrMamr",
        "ccpo": "mafrt.algorithms.ccpo:Ccpo",
        "rae": "mafrt.algorithms.rae:Rae",
        "gdpo": "mafrt.algorithms.gdpo:Gdpo",
        "c3": f"{_PRESETS}:C3",
        "gigpo": f"{_PRESETS}:GiGpo",
        "opd": "mafrt.algorithms.distillation:OnPolicyDistillation",
        "self_distill": "mafrt.algorithms.distillation:SelfDistillation",
        "spin": "mafrt.algorithms.spin:Spin",
        "vdn": f"{_PRESETS}:Vdn",
        "qmix": f"{_PRESETS}:Qmix",
    },
    elsewhere={
        "appo": "MARFT's APPO is marft with level action",
        "tppo": "MARFT's TPPO is marft with level token",
        "reinforce": "with a batch's mean as baseline it is reinforce_pp, with a group's rloo",
        "reinforce++": "here it is reinforce_pp",
        "reinforce_plus_plus_baseline": "here it is reinforce_pp_baseline",
        "group_norm": "MARTI's group_norm is grpo",
    },
)
"""Named as text, so that this layer and `--help` of other commands do not import the estimators."""


@dataclass(frozen=True)
class AlgorithmSettings(RewardSettings, PolicyLossSettings, ScheduleSettings):
    """The learning rule: rewards, credit, loss and critic.

    Base class of `mafrt.algorithms.Algorithm`, with the settings that every algorithm has.
    """

    normalize_advantages: Literal["none", "batch", "agent"] = "none"
    """centre and scale the finished advantages: not at all, over the batch, or per agent"""

    paper: ClassVar[str] = ""
    """Source, with its arXiv number."""
    compared: ClassVar[str] = ""
    """What a comparison with a rule without its own part has shown, where that part was not shown to help."""
    schedule: ClassVar[Literal["concurrent", "round_robin", "sequential", "swap"]] = "concurrent"
    critic_input: ClassVar[Literal["context", "transcript"] | None] = None
    """Input of the critic: the turn's own context, or the whole transcript and the speaker's name; None: no critic."""
    mixer: ClassVar[Literal["vdn", "qmix"] | None] = None
    """Mixer of the agents' Q into the team's, in place of a critic's values."""
    needs_groups: ClassVar[bool] = False
    """Whether several samples of a task are compared."""
    needs_several_agents: ClassVar[bool] = False
    constant_length: ClassVar[bool] = False
    """Divide a turn's loss by `max_new_tokens` instead of its length (Dr. GRPO)."""
    sampling_rounds: ClassVar[int] = 0
    """Rounds of fresh tasks in place of groups without spread (DAPO), where the run names none."""
    tree_samples: ClassVar[int | None] = None
    """Alternatives of every turn (AT-GRPO), where the run has one sample per task and names none; None: no trees."""
    tree_continues: ClassVar[bool] = False
    """Whether alternatives are played to the end of the episode before they are compared (C3)."""
    updater: ClassVar[str] = "mafrt.runners.update:Updater"
    """Class that learns from a batch, with the stages of `mafrt.runners.update.Updater`."""
    critic_class: ClassVar[str] = "mafrt.training.critic:Critic"
    """Class that fills values and reference, made by its `for_rule`."""
    has_advantages: ClassVar[bool] = True
    """Whether turns are learnt from by advantages; False of a rule that learns from pairs."""
    needs_teacher: ClassVar[bool] = False
    """Whether credit reads `Turn.teacher_logprobs`, which a teacher fills (`mafrt.rollout.teacher`)."""
    one_base: ClassVar[str] = ""
    """Why all agents have to sit on one base; empty if they need not."""
    metrics: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Metrics that only this algorithm has: name, with `/AGENT` where each agent has one -> (meaning, unit)."""
    unused: ClassVar[frozenset[str]] = frozenset()
    """Inherited settings that have no effect in this algorithm: they are no flags of it and may not be set."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.truncation == "bootstrap" and (self.critic_input is None or self.mixer is not None):
            raise ConfigError(
                f"truncation is bootstrap, which needs a critic, and algorithm {algorithm_name(type(self))!r} has "
                "none; choose mask or terminate."
            )
        for item in dataclasses.fields(self):
            if item.name in self.unused and getattr(self, item.name) != item.default:
                raise _not_used(algorithm_name(type(self)), item.name)

    @property
    def name(self) -> str:
        """The registered name, or `package.module:Class`."""
        return algorithm_name(type(self))

    @property
    def critic_reads(self) -> Literal["context", "transcript"] | None:
        """Input of the critic under these settings; None: no critic."""
        return self.critic_input

    @property
    def adds_agents(self) -> bool:
        """Whether a turn's credit adds up what several agents are paid: nonsense where they play against each other."""
        return self.share == "sum"

    def blind_to(self, tree: bool) -> str | None:
        """The part that this rule's credit leaves out where turns are paid as they come, in a few words; None: nothing.

        `tree`: whether alternatives of single turns are compared.
        """
        if tree and not self.tree_continues:
            return "alternatives of a turn are compared by what their own step pays"
        if getattr(self, "turn_credit", "to_go") == "own" and not tree:
            return "turn_credit is own, so a turn is credited with its own pay only"
        return None

    @property
    def needs_influence(self) -> bool:
        """Whether credit reads `Turn.influence`, which takes a pass over the turns that follow (Dr. MAMR)."""
        return False

    @property
    def needs_contribution(self) -> bool:
        """Whether credit reads `Turn.contribution`, for which episodes are played again without an agent (CCPO)."""
        return False

    @classmethod
    def summary(cls) -> str:
        """First line of the docstring."""
        return next(iter(inspect.cleandoc(cls.__doc__ or cls.__name__).splitlines()), cls.__name__).rstrip(".")

    @classmethod
    def settings(cls) -> dict[str, Setting]:
        """The settings that flags and YAML files can give, with the algorithm's own defaults."""
        return {name: setting for name, setting in describe(cls).items() if name not in cls.unused}

    def flat(self) -> dict[str, Any]:
        """The name and all settings, as `args.yaml` keeps them."""
        return {"algorithm": self.name, **{name: getattr(self, name) for name in self.settings()}}

    # The two hooks below make this class a section of a command line (`mafrt.scripts.cli.command`).

    @classmethod
    def flags(cls, algorithm: str | None = None) -> dict[str, Setting]:
        """The settings of all registered algorithms as flags, and those of the named one if it is not registered.

        The default of each is None, which stands for the algorithm's own. The help lists the algorithms that use a
        setting, unless all do.

        Raises:
            ConfigError: `algorithm` is unknown, or declares a setting with another type than the registered ones.
        """
        # The default algorithm first: its help texts are the most general.
        names = [DEFAULT_ALGORITHM, *(name for name in REGISTRY.names() if name not in (DEFAULT_ALGORITHM, _ALIAS))]
        classes = {name: algorithm_class(name) for name in names}
        if algorithm is not None:
            classes.setdefault(algorithm, algorithm_class(algorithm))
        merged: dict[str, dict[str, Setting]] = {}
        for name, kind in classes.items():
            for setting in kind.settings().values():
                merged.setdefault(setting.name, {})[name] = setting
        critics = {name for name, kind in classes.items() if kind.critic_input is not None} | set(merged["critic"])
        settings = {"algorithm": _ALGORITHM_FLAG}
        return settings | {name: _merge(users, classes, critics) for name, users in merged.items()}

    @classmethod
    def from_flags(cls, values: Mapping[str, Any], named: Collection[str]) -> AlgorithmSettings:
        """The settings of the algorithm in `values`, of which only those in `named` were given."""
        known = cls.flags(values["algorithm"])
        given = {name: values[name] for name in named if name in known and name != "algorithm"}
        return make_algorithm(values["algorithm"], given)


_ALGORITHM_FLAG = Setting(
    "algorithm",
    str,
    DEFAULT_ALGORITHM,
    "the learning rule, by name (`mafrt info --algorithms` lists them) or your own package.module:Class",
    optional=False,
    many=False,
    choices=None,
)


def register_algorithm(name: str, kind: type[AlgorithmSettings]) -> None:
    """Make an algorithm available as `--algorithm NAME`. Raises ConfigError if the name is taken."""
    _check_class(name, kind)
    REGISTRY.register(name, kind)


def algorithm_class(name: str) -> type[AlgorithmSettings]:
    """The class of a registered name or of `package.module:Class`.

    Raises:
        ConfigError: an unknown name (names the nearest), a module that cannot be imported, or another kind of class.
    """
    cls: type[AlgorithmSettings] = REGISTRY.resolve(name)
    _check_class(name, cls)
    return cls


def algorithm_name(kind: type[AlgorithmSettings]) -> str:
    """The registered name of a class, or `package.module:Class`."""
    for name in (DEFAULT_ALGORITHM, *REGISTRY.names()):
        if REGISTRY.resolve(name) is kind:
            return name
    return f"{kind.__module__}:{kind.__qualname__}"


def make_algorithm(
    algorithm: str | AlgorithmSettings = DEFAULT_ALGORITHM,
    settings: Mapping[str, Any] | None = None,
    *,
    others: Collection[str] = (),
) -> AlgorithmSettings:
    """An algorithm's settings: its own defaults, and `settings` where they are given.

    Args:
        algorithm: name, `package.module:Class`, or filled settings that `settings` change.
        settings: by field name. None means the algorithm's own default, unless the field takes None.
        others: names that exist beside the algorithm's, for the nearest name in an error.

    Raises:
        ConfigError: a setting that the algorithm does not use (names those that do), an unknown one, a bad value.
    """
    kind = type(algorithm) if isinstance(algorithm, AlgorithmSettings) else algorithm_class(algorithm)
    name = algorithm_name(kind) if isinstance(algorithm, AlgorithmSettings) else algorithm
    flags, names = kind.settings(), {item.name for item in dataclasses.fields(kind)} - kind.unused
    chosen: dict[str, Any] = {}
    for setting, value in (settings or {}).items():
        if setting not in names:
            everywhere = AlgorithmSettings.flags(name)
            if setting not in everywhere:
                raise ConfigError(unknown("setting", setting, {*names, *everywhere, *others}))
            if value is not None:
                raise _not_used(name, setting)
        elif value is not None or setting not in flags or flags[setting].optional:
            chosen[setting] = float(value) if _is_float(flags.get(setting), value) else value
    if isinstance(algorithm, AlgorithmSettings):
        return dataclasses.replace(algorithm, **chosen)
    for setting, declared in flags.items():
        if declared.default is dataclasses.MISSING and setting not in chosen:
            raise ConfigError(
                f"algorithm {name}{place_of(kind)} needs the setting {setting}; give it, or give it a default."
            )
    return kind(**chosen)


def _is_float(setting: Setting | None, value: Any) -> bool:
    """Whether an int stands for a float, so that a run is recorded alike however the number was written."""
    return setting is not None and setting.kind is float and isinstance(value, int) and not isinstance(value, bool)


def _check_class(name: str, kind: Any) -> None:
    if not (isinstance(kind, type) and issubclass(kind, AlgorithmSettings) and dataclasses.is_dataclass(kind)):
        raise ConfigError(
            f"algorithm {name}: {getattr(kind, '__name__', kind)!r}{place_of(kind)} is not an algorithm; expected a "
            "frozen dataclass that inherits from mafrt.algorithms.Algorithm."
        )
    declared = [field for field, kind_of in kind.__annotations__.items() if "ClassVar" not in str(kind_of)]
    if declared and "__dataclass_fields__" not in vars(kind):
        raise ConfigError(
            f"algorithm {name}{place_of(kind)} is no dataclass itself, so that {declared[0]} would be no setting; "
            "write @dataclass(frozen=True) above it."
        )


def _not_used(algorithm: str, setting: str) -> ConfigError:
    users = [name for name in REGISTRY.names() if setting in algorithm_class(name).settings()]
    known = f"; it belongs to {', '.join(users)}" if users else ""
    place = "" if algorithm in REGISTRY else place_of(algorithm_class(algorithm))  # one's own, to be found at once
    return ConfigError(
        f"algorithm {algorithm!r}{place} has no {setting}{known}. Leave it out, or take another algorithm."
    )


def _users(users: Collection[str], names: Collection[str], critics: Collection[str]) -> str:
    """`NAMES: ` of the algorithms that use a setting; empty if all do. `critics` are those that have a critic."""
    others = [name for name in names if name not in users]
    if not others:
        return ""
    if set(users) == critics:
        return "rules with a critic: "
    few = len(others) < len(users)
    return f"all but {', '.join(others)}: " if few else f"{', '.join(sorted(users))}: "


def _merge(users: Mapping[str, Setting], names: Collection[str], critics: Collection[str]) -> Setting:
    """One flag from the same setting of several algorithms."""
    first = next(iter(users.values()))
    for name, setting in users.items():
        if (setting.kind, setting.many) != (first.kind, first.many):
            raise ConfigError(
                f"algorithm {name}{place_of(algorithm_class(name))} declares {setting.name} as "
                f"{setting.kind.__name__}, but {next(iter(users))} declares it as {first.kind.__name__}; rename it."
            )
    told, _, default = first.help.partition("; default: ")
    if not default:
        by_value: dict[Any, list[str]] = {}
        for name, setting in users.items():
            by_value.setdefault(setting.default, []).append(name)
        usual = max(by_value, key=lambda value: len(by_value[value]))
        rest = [f"{_show(v)} for {', '.join(names)}" for v, names in by_value.items() if v != usual]
        default = ", ".join([_show(usual), *rest])
    choices = tuple(dict.fromkeys(choice for s in users.values() for choice in s.choices or ())) or None
    text = f"{_users(users, names, critics)}{told}; default: {default}"
    return Setting(first.name, first.kind, None, text, True, first.many, choices)


def _show(value: Any) -> str:
    return "none" if value is None else ("on" if value else "off") if isinstance(value, bool) else str(value)

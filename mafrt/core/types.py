"""The types that flow from rollout to gradient. Standard library only, so that everything may import them.

Each stage fills its own fields of a `Turn` and touches no other. `None` means "not computed"; `0.0` is a value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

Message: TypeAlias = dict[str, str]
"""One chat message: `{"role": "system" | "user" | "assistant" | "tool", "content": text}`."""

Observation: TypeAlias = "str | list[Message]"
"""Input of an agent: a text (it becomes the user message) or the chat messages themselves."""

OwnTurns: TypeAlias = "Sequence[tuple[int, Sequence[int]]]"
"""Places of messages in an observation, ascending, and the ids that the agent sampled there (`--keep_thoughts`)."""

Stop: TypeAlias = Literal["eos", "length", "stop"]
"""Why a generation ended: the model's end token, the token limit, or one of the request's stop strings."""


@dataclass(frozen=True)
class Scored:
    """A judgement that was made: `score` in 0..10, `reason` in words, `spans` as (quoted text, score in 0..10).

    The first occurrence of a quoted text is meant; the empty text is the turn's end.

    >>> mafrt.Scored(7, "The sum is right, the unit is missing.", spans=(("3 + 4 = 7", 10), ("7 miles", 2))).score
    7
    """

    score: float
    reason: str = ""
    spans: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Unscored:
    """A failed judgement and its reason. It is never turned into a number.

    >>> mafrt.Unscored("the judge gave no score").why
    'the judge gave no score'
    """

    why: str


Verdict: TypeAlias = "Scored | Unscored"


@dataclass(frozen=True)
class Evidence:
    """Facts of the environment about one turn: `env.step` gives it as `info["evidence"] = {agent: Evidence}`.

    It depends on seed and actions alone (no clock times, no paths): it is written to `episodes.jsonl`.

    >>> mafrt.Evidence(rules=mafrt.Scored(10, "legal"), facts={"status": "won"}).rules.score
    10
    """

    tool_output: str | None = None
    """Answers of the turn's tools; None if it used none."""
    rules: Scored | None = None
    """The environment's own judgement, backed by its verifier; `--coach rules` reads it. None if it makes none."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Further facts: JSON-able values, such as a status, or files with their shapes."""

    def updated(self, later: Evidence) -> Evidence:
        """This evidence merged with `later`, whose fields win where they are set."""
        return Evidence(
            self.tool_output if later.tool_output is None else later.tool_output,
            self.rules if later.rules is None else later.rules,
            {**self.facts, **later.facts},
        )


@dataclass(frozen=True)
class Audit:
    """A turn played again several times, beside alternatives from the same history (`mafrt.rollout.audit`)."""

    gain: float
    """Mean return of the turn's continuations less that of its alternatives'."""
    noise: float
    """Variance of the returns of the turn's own continuations."""
    influence: float | None
    """How much more often the next turns differ between alternatives than between continuations of one of them, in
    [-1, 1]; None if nothing is said after the turn."""


@dataclass
class Turn:
    """One generation by one agent.

    All lists of floats have one entry per token of `action_ids`.

    >>> turn = mafrt.Turn("solver", [1, 2], [3, 4], [-0.1, -0.7], "eos", "so 7", turn=0, env_step=0, adapter_version=0)
    >>> turn.advantages is None, turn.reward is None  # later stages fill them
    (True, True)
    """

    agent: str
    prompt_ids: list[int]
    """Exact input of the model."""
    action_ids: list[int]
    """Exact sampled tokens, the end token included if it was sampled; never re-tokenised."""
    logprobs: list[float]
    """Log-probabilities of `action_ids` under the distribution that sampled them."""
    stop: Stop
    text: str
    """`action_ids` decoded without special tokens, for people and for the environment."""
    turn: int
    """Index of this turn within the episode, in speaking order."""
    env_step: int
    """Index of the `env.step` call that consumed this turn; agents that speak simultaneously share it."""
    adapter_version: int
    """Version of the adapter that sampled it."""
    reward: float | None = None
    """Filled from `env.step`; None if the environment gave this agent none."""
    late: list[tuple[int, float]] = field(default_factory=list)
    """Parts of `reward` that came with a later step: `env_step` of that step, and the amount."""
    evidence: Evidence | None = None
    """Filled from `info["evidence"]` of `env.step`; None if the environment gave none."""
    coach: Verdict | None = None
    """Filled by the coach; None if it was not judged."""
    observation: Observation | None = None
    """Observation that the prompt was made from, without the agent's role prompt; filled by the player."""
    own_turns: OwnTurns = ()
    """The agent's own turns in `observation` that stand in the prompt as they were sampled."""
    paid: float | None = None
    """Reward that credit assignment used: the turn's own, its share of the outcome, process reward and penalties. None
    if the turn is out of the loss."""
    parts: dict[str, float] | None = None
    """Where `paid` comes from: `reward`, `coach`, `outcome` and `kl`, in the rule's weights; and `later`, what later
    turns are paid that the rule credits to this one. Parts of 0 are left out."""
    baseline: float | None = None
    """What the rule compared the turn's return with, such as the mean of its group; None if there is no one number."""
    terms: dict[str, float] | None = None
    """What the rule added up to the advantage, in its weights and before the batch is normalised; None for one term."""
    influence: float | None = None
    """Change of the log-probability of the next turn that shows this one, per token in nats, when this one is left out
    of its prompt. None if no later turn shows it."""
    contribution: float | None = None
    """The team's return less its return in the same episode with this turn's agent left out; None if unknown."""
    audit: Audit | None = None
    """Filled for the turns of a sample (`--audit_turns`)."""
    values: list[float] | None = None
    forced: tuple[int, ...] = ()
    """Places in `action_ids` of tokens that the engine put in: their log-probability is 0, and nothing is learnt from
    them."""
    advantages: list[float] | None = None
    returns: list[float] | None = None
    old_logprobs: list[float] | None = None
    ref_logprobs: list[float] | None = None
    teacher_logprobs: list[float] | None = None
    """Log-probabilities of `action_ids` by the teacher, after its own prompt (on-policy distillation)."""

    @property
    def has_signal(self) -> bool:
        """Whether any token has an advantage other than 0."""
        return any(self.advantages or ())


@dataclass(frozen=True)
class Start:
    """How one episode begins. Equal `group` means the same task; `seed` makes its samples differ."""

    id: str
    group: str
    reset_seed: int
    seed: int
    task: int | None = None


@dataclass
class Episode:
    """One play of one task by the whole team.

    >>> mafrt.Episode("17-0", group="problem 17", outcome=1.0).turns
    []
    """

    id: str
    group: str
    """The task instance; the n samples of one problem share it."""
    turns: list[Turn] = field(default_factory=list)
    """In speaking order."""
    outcome: float | None = None
    """The task's own verdict for the team (`info["outcome"]` of the last step), None if the task gives none."""
    info: dict[str, Any] = field(default_factory=dict)
    """JSON-able facts: task id, problem, answer, how it ended (`terminated` | `truncated` | an error)."""
    start: Start | None = None
    """How it began, with which it can be played again; None of an episode that no player made."""
    branches: list[Episode] = field(default_factory=list)
    """Of an episode grown as a tree (`mafrt.rollout.tree_player`): all alternatives of all its turns, the carried ones
    included, each as an episode of one turn. Empty otherwise."""

    @property
    def score(self) -> float:
        """The outcome, or the sum of all rewards where the environment gives no outcome."""
        if self.outcome is not None:
            return self.outcome
        return sum(turn.reward for turn in self.turns if turn.reward is not None)


class Sampled(NamedTuple):
    """How an answer was sampled: tokens of the prompt and of the answer, and why it ended."""

    prompt_tokens: int
    tokens: int
    stop: Stop
    said: Callable[[], list[tuple[str, float]]] | None = None
    """gives the text and the log-probability of each sampled token, the end token left out"""


class StepResult(NamedTuple):
    """Return value of `Env.step`, in Gymnasium's order. Dicts are keyed by agent name.

    >>> mafrt.StepResult({"solver": "Try again."}, {"solver": 0.0}, terminated=False, truncated=False, info={}).rewards
    {'solver': 0.0}
    """

    observations: Mapping[str, Observation]
    rewards: Mapping[str, float]
    terminated: bool
    truncated: bool
    info: dict[str, Any]


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request. `temperature=0` is greedy; `top_p=1` and `top_k=0` switch those off.

    >>> mafrt.SamplingParams(max_new_tokens=64, temperature=0.7, stop=("\\n\\n",)).truncated
    False
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] | None = None
    """tokens that end a generation; None: the base's own end tokens"""
    schema: str = ""
    """JSON schema, as JSON, that the text must fit; empty: none. Only the local engine takes one"""
    thinking_budget: int = 0
    """tokens of thought after which `</think>` is put in; 0: no limit. Only the local engine takes one"""
    thought_opened: bool = False
    """whether an answer begins inside a thought though its prompt does not show it (`--reasoning on`)"""

    @property
    def truncated(self) -> bool:
        """Whether the support is cut, so that the sampler's log-probs are not the policy's own."""
        return self.top_p < 1.0 or self.top_k > 0 or bool(self.schema)


@dataclass(frozen=True)
class Request:
    """One generation to make. `adapter=None` asks the bare base.

    >>> mafrt.Request([1, 2, 3], adapter="solver", sampling=mafrt.SamplingParams(), seed=0).adapter
    'solver'
    """

    prompt_ids: Sequence[int]
    adapter: str | None
    sampling: SamplingParams
    seed: int
    own_turns: OwnTurns = ()
    """the agent's earlier turns in the prompt, for the record"""


@dataclass(frozen=True)
class Completion:
    """Result of a `Request`: ids, log-probabilities under the sampling distribution, and the reason it ended.

    >>> mafrt.Completion([5, 2], [-0.2, -0.01], "eos", "seven", adapter_version=3).stop
    'eos'
    """

    ids: list[int]
    logprobs: list[float]
    stop: Stop
    text: str
    adapter_version: int
    forced: tuple[int, ...] = ()
    """places of tokens that were put in and not sampled; their log-probability is 0"""

"""The baselines on the tasks of an evaluation, and the table that holds them beside the team.

`start` is the team before reinforcement learning: the base without training, or the adapters that the run began with.
Whatever has to be chosen is chosen on other tasks: the answer, the prefix and the imitated episodes on those of
training, demonstrations and the imitation's rate and passes on those of validation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from mafrt.config.team import Team
from mafrt.core.errors import ConfigError
from mafrt.core.progress import stage
from mafrt.core.seeding import seed_of
from mafrt.core.text import counted
from mafrt.engines.prefixed import DemonstratingEngine, PrefixedEngine, VotingEngine
from mafrt.envs.games.base import PLAYERS, Game, play
from mafrt.envs.workflows.task_env import TaskEnv
from mafrt.runners.evaluation import SOLVED, evaluate
from mafrt.runners.evaluation_summary import majority, number, numbers
from mafrt.scripts.baselines.demonstrations import Shown, search
from mafrt.scripts.baselines.imitation import PASSES, SAMPLES, imitate, solved_turns
from mafrt.storage.report import aligned

if TYPE_CHECKING:
    from mafrt.core.types import Episode
    from mafrt.engines import Engine
    from mafrt.environment.base import Env
    from mafrt.models.several_bases import Bases
    from mafrt.rollout.player import Player
    from mafrt.runners.evaluation import Evaluation, EvaluationPlan
    from mafrt.runners.evaluation_summary import Number

TEMPERATURES = (0.3, 0.7, 1.0)
PREFIXES = (
    "\\boxed{",
    "The answer is ",
    "{opening}",
    "{first}",
    "{last}",
    "= ",
    "Step 1: ",
    "Let us think step by step.",
)
"""tried as the beginning of the deciding agents' answers; see `mafrt.engines.prefixed.filled`"""
PREFIX_TASKS = 64
"""training tasks on which a prefix is chosen, by its greedy score"""
CHOICE_TASKS, CHOICE_SAMPLES = 64, 2
"""validation tasks, and sampled answers beside the greedy one, by which demonstrations and imitations are chosen"""
BATCH_TASKS, BATCH_SAMPLES = 16, 2
"""training tasks and their sampled episodes by which a candidate's demonstrations are compared with its parent's"""


@dataclass(frozen=True)
class BaselineRow:
    """Score of one baseline on the held-out tasks."""

    name: str
    sampled: Number | None = None
    """None: not sampled"""
    greedy: Number | None = None
    """None: not played greedily"""
    solved: Number | None = None
    """share of the sampled episodes that solve their task; None: not known"""

    def cells(self) -> tuple[str, str, str, str]:
        return self.name, str(self.sampled or "-"), str(self.greedy or "-"), str(self.solved or "-")

    def values(self) -> dict[str, str | float | None]:
        """Name and means, for a file."""
        measured = {"sampled": self.sampled, "greedy": self.greedy, "solved": self.solved}
        return {"name": self.name, **{key: None if each is None else each.value for key, each in measured.items()}}


@dataclass(frozen=True)
class Baselines:
    """Everything that the baselines are played with."""

    env: Env
    """held-out tasks"""
    train_env: Env
    choice_env: Env
    """validation tasks, by which the imitation is tuned; those of training where there are none"""
    player: Player
    """plays the evaluated team"""
    base: Bases
    start: Team
    """the team with the adapters that it began with, which are on `base`"""
    plan: EvaluationPlan
    """tasks, samples and seed of the evaluation that the baselines are compared with"""
    votes: int
    """sampled answers of the majority vote, and texts of the vote in every turn"""
    episodes: int
    """those of the imitation, and of the search for demonstrations"""
    lr: float
    """middle learning rate of the imitation"""

    def rows(self, team: Evaluation) -> Iterator[BaselineRow]:
        """The evaluated team first, then each baseline as soon as it is measured."""
        yield row("this team", team)
        yield from self.without_model()
        for temperature in TEMPERATURES:
            yield row(f"start, temperature {temperature:g}", self._played(self._player(temperature)))
        voted = self._played(self._player(), samples=self.votes, greedy=False)
        if (most := majority(voted.episodes)) is not None:
            yield BaselineRow(f"start, majority@{self.votes}", most.number)
            yield from self._prefixed(voted)
        by_turn = self._player(wrap=lambda engine: VotingEngine(engine, self.votes))
        name = f"start, in every turn the most frequent of {self.votes} texts"
        yield row(name, self._played(by_turn, samples=1, greedy=False))
        yield from self._demonstrated()
        yield from self._imitated()

    def without_model(self) -> Iterator[BaselineRow]:
        """The most frequent training answer as every answer; in games, the scripted players."""
        env = self.env.unwrapped
        if isinstance(env, Game):
            seeds = [seed_of(self.plan.seed, "task", task) for task in range(self.plan.tasks)]
            for player in PLAYERS:
                scores = [play(env, player, seed) for seed in seeds]
                yield BaselineRow(
                    f"{player} player", number(scores), solved=share_solved([[score] for score in scores])
                )
        answers = answers_of(self.train_env)
        if answers and isinstance(env, TaskEnv):
            constant = Counter(answers).most_common(1)[0][0]
            grades: list[float] = []
            for task in range(min(self.plan.tasks, env.num_tasks or 0)):
                env.choose(task)
                grades += [grade for grade in env.grade([f"\\boxed{{{constant}}}"]) if grade is not None]
            if grades:
                yield BaselineRow(
                    f"constant answer {constant}", number(grades), solved=share_solved([[grade] for grade in grades])
                )

    def _prefixed(self, voted: Evaluation) -> Iterator[BaselineRow]:
        """The prefix that is best on training tasks, for the agents whose answers decide."""
        deciding = sorted({agent for episode in voted.episodes for agent in episode.info.get("answers", {})})
        scores = {}
        with stage("choosing a prefix", len(PREFIXES)) as advance:
            for prefix in PREFIXES:
                player = self._player(deciding=deciding, prefix=prefix)
                scores[prefix] = self._played(player, self.train_env, tasks=PREFIX_TASKS, samples=0).greedy or 0.0
                advance(1)
        best = max(scores, key=lambda prefix: scores[prefix])
        player = self._player(deciding=deciding, prefix=best)
        yield row(f"start, answer begins {best!r}", self._played(player))

    def _imitated(self) -> Iterator[BaselineRow]:
        tasks = -(-self.episodes // SAMPLES)
        count = self.train_env.num_tasks or tasks
        samples = -(-self.episodes // min(count, tasks))
        played = self._played(self._player(), self.train_env, tasks=tasks, samples=samples, greedy=False)
        records = solved_turns(played.episodes, SOLVED)
        name = f"imitation of the solved ones of {counted(len(played.episodes), 'episodes')}"
        if not records:
            yield BaselineRow(f"{name}: none")
            return

        rate, passes = imitate(
            records, self.start, self.base, self.lr, self.plan.seed, lambda: self._value(self._player())
        )
        name += f", {passes} of {PASSES} passes at {rate:.2g}" if passes else ", which is no better than the start"
        yield row(name, self._played(self._player()))

    def _demonstrated(self) -> Iterator[BaselineRow]:
        """The solved turns whose sight before every prompt is best on validation tasks."""
        # What most chat templates write behind an answer.
        end = self.player.tokenizer.encode("\n", add_special_tokens=False)

        def player(shown: Shown) -> Player:
            ids = {name: [token for each in turns for token in (*each, *end)] for name, turns in shown.items()}
            return self._player(wrap=lambda engine: DemonstratingEngine(engine, ids, self.player.context_window))

        def play(shown: Shown, batch: int) -> Sequence[Episode]:
            sizes = {"tasks": BATCH_TASKS, "samples": BATCH_SAMPLES, "seed": seed_of(self.plan.seed, "batch", batch)}
            return self._played(player(shown), self.train_env, greedy=False, **sizes).episodes

        def score(shown: Shown) -> float:
            return self._value(player(shown))

        adapters = {agent.name: agent.adapter for agent in self.start.agents}
        cost = CHOICE_TASKS * (1 + CHOICE_SAMPLES)
        shown, tried = search(play, score, adapters, self.episodes, cost, self.plan.seed)
        count = sum(map(len, shown.values()))
        name = f"start, best of {tried} sets of demonstrations"
        yield row(f"{name}, {counted(count, 'turns')}" if count else f"{name}: none", self._played(player(shown)))

    def _player(
        self,
        temperature: float | None = None,
        deciding: Sequence[str] = (),
        prefix: str = "",
        wrap: Callable[[Engine], Engine] = lambda engine: engine,
    ) -> Player:
        """A player of the start: at a temperature, with a prefix before the answers of `deciding`, engine wrapped."""
        adapters = {agent.name: agent.adapter for agent in self.start.agents}
        player = self.player.with_adapters(adapters)
        if temperature is not None:
            player.sampling = {name: replace(how, temperature=temperature) for name, how in player.sampling.items()}
        if prefix:
            prefixes = {adapters[name]: prefix for name in deciding}
            player.engine = PrefixedEngine(player.engine, self.player.tokenizer, prefixes)
        player.engine = wrap(player.engine)
        return player

    def _value(self, player: Player) -> float:
        """Its mean score on validation tasks, half of it by greedy answers, half by sampled ones.

        Greedy answers alone do not tell imitations apart where all of them are right.
        """
        found = self._played(player, self.choice_env, tasks=CHOICE_TASKS, samples=CHOICE_SAMPLES, greedy=True)
        sampled = fmean(score for scores in found.scores.values() for score in scores)
        return (sampled + (found.greedy or 0.0)) / 2

    def _played(self, player: Player, env: Env | None = None, **changes: Any) -> Evaluation:
        """The episodes of the plan, with these fields of it changed."""
        evaluation = evaluate(env or self.env, player, replace(self.plan, **changes), keep=lambda _: True)
        assert evaluation is not None  # None means interrupted, and nothing here interrupts it
        return evaluation


def row(name: str, evaluation: Evaluation) -> BaselineRow:
    """The row of an evaluation."""
    values = numbers(evaluation)
    solved = share_solved(list(evaluation.scores.values())) if evaluation.scores else None
    return BaselineRow(name, values.get(f"avg@{evaluation.samples}"), values.get("greedy"), solved)


def share_solved(tasks: Sequence[Sequence[float]]) -> Number:
    """The share of solved episodes from the scores of each task's."""
    return number([sum(score >= SOLVED for score in scores) / len(scores) for scores in tasks])


def answers_of(env: Env) -> list[str]:
    """The answers of the tasks of an environment; empty where tasks have none."""
    tasks: Sequence[Any] = getattr(env, "tasks", ())
    answers = [getattr(task, "answer", None) for task in tasks]
    return [answer for answer in answers if isinstance(answer, str) and answer]


def place_start(base: Bases, team: Team, folders: dict[str, Any]) -> Team:
    """Add the adapters that the team began with to `base`; returns the team on them.

    Args:
        folders: adapter -> its PEFT folder; those of an untrained base are absent.

    Raises:
        ConfigError: the team sits on several bases.
    """
    if len(base.parts) > 1:
        raise ConfigError("baselines compare a team on one base, and this team sits on several; leave it out.")
    names = {name: f"{name}_start" for name in team.adapters}
    for name, copy in names.items():
        if name in folders:
            base.load_adapter(copy, folders[name])
        else:
            base.copy_adapter(name, copy)
    return replace(team, agents=tuple(replace(agent, adapter=names[agent.adapter]) for agent in team.agents))


def table(rows: Sequence[BaselineRow], k: int) -> str:
    """The rows for people, with 95% intervals over tasks."""
    return "\n".join(aligned([("", f"avg@{k}", "greedy", "solved"), *(each.cells() for each in rows)]))

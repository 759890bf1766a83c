"""Diagnoses of a running training: reasons why it learns nothing or the wrong thing, with a remedy.

Every check reads the metrics and episodes of an iteration, or an evaluation, and nothing else. A diagnosis is reported
when it is first made, and counted from then on; the summary of the run repeats all of them. Thresholds are stated in
the checks; they are set so that the shipped recipes pass without a diagnosis.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mafrt.core.text import clean_text, counted
from mafrt.core.types import Episode

log = logging.getLogger(__name__)

WINDOW = 5
"""Iterations over which persistent symptoms are looked for."""


@dataclass(frozen=True)
class Diagnosis:
    """One problem of a run."""

    name: str
    """key, such as `no_reward`"""
    sentence: str
    """finding and remedy"""
    iteration: int
    """iteration in which it was first seen"""


@dataclass(frozen=True)
class Seen:
    """What a check reads: the metrics of the last iterations, and of an agent where the check is about one.

    A metric's name that ends in `/` is completed by the agent's.
    """

    past: Sequence[Mapping[str, float]]
    """the present iteration last"""
    agent: str
    first_entropy: float
    """of the agent, in the first iteration; 0 if it was not measured"""
    masks_cut_turns: bool

    def now(self, name: str, default: float = 0.0) -> float:
        """A metric of this iteration."""
        return self.past[-1].get(name + self.agent if name.endswith("/") else name, default)

    def window(self, name: str) -> list[float]:
        """A metric of each of the last `WINDOW` iterations; empty unless all of them have it."""
        name = name + self.agent if name.endswith("/") else name
        values = [metrics[name] for metrics in self.past[-WINDOW:] if name in metrics]
        return values if len(values) == WINDOW else []


CHECKS: tuple[tuple[str, Callable[[Seen], str | None]], ...] = (
    # Several iterations in a row, since one flat batch is chance; a team that solves everything is no patient.
    (
        "flat_returns/",
        lambda s: (
            f"All turns of {s.agent} earned the same in {WINDOW} iterations, so its adapter was left alone. "
            "Remedy: pay it for its own part (rewards in step(), or --coach rules), more --n_samples, or a "
            "higher --temperature."
            if min(s.window("flat_returns/"), default=0) >= 1 and s.now("score") < 0.99
            else None
        ),
    ),
    # Where nearly everything is solved, returns have no variance that could be explained.
    (
        "harmful_critic/",
        lambda s: (
            f"The critic predicts the returns of {s.agent} worse than their mean would: explained variance "
            f"{statistics.median(s.window('explained_variance/')):.1f} over {WINDOW} iterations. Remedy: more "
            "--critic_epoch, a lower --critic_lr, or a rule without a critic (--algorithm grpo --n_samples 8)."
            if statistics.median(s.window("explained_variance/") or [0]) < -1 and s.now("score") < 0.95
            else None
        ),
    ),
    # Compared with the run's own start, since usual entropies differ by tokenizer and task. A low entropy alone is what
    # success looks like, so the score must be low and still as well.
    (
        "entropy_collapse/",
        lambda s: (
            f"{s.agent} always says the same: its entropy fell from {s.first_entropy:.3f} to {s.now('entropy/'):.4f} "
            "nats per token while the score is low. Remedy: a lower --lr, --entropy_coef 0.01, or --kl_coef 0.05."
            if s.first_entropy > 0.05
            and s.now("entropy/", s.first_entropy) < 0.02 * s.first_entropy
            and s.now("score", 1.0) < 0.5
            and _range(s.past) <= 0.1
            else None
        ),
    ),
    # A nat per token within one iteration is far beyond any trust region in use.
    (
        "kl_explosion/",
        lambda s: (
            f"The policy of {s.agent} moved away by "
            + (
                f"{s.now('kl/'):.2f} nats per token in one iteration"
                if s.now("kl/") > 1
                else f"{s.now('ref_kl/'):.1f} nats in all"
            )
            + ". Remedy: a lower --lr, --target_kl 0.05, or --kl_coef 0.05."
            if s.now("kl/") > 1 or s.now("ref_kl/") > 10
            else None
        ),
    ),
    # Nine of ten groups: some without spread are normal, as tasks are too easy or too hard.
    (
        "groups_without_spread",
        lambda s: (
            f"{statistics.fmean(s.window('groups_no_spread')):.0%} of the groups have samples of equal reward, which "
            "teach nothing. Remedy: tasks of another difficulty, more --n_samples, or dynamic sampling (--algorithm "
            "dapo)."
            if min(s.window("groups_no_spread"), default=0) > 0.9
            else None
        ),
    ),
    # The same number has two causes: samples of the iteration before differ by the update itself.
    (
        "stale_samples/",
        lambda s: (
            f"The samples of {s.agent} come from older weights: after the update their log-probabilities differ "
            f"by {s.now('engine_gap/'):.2f} nats per token. Remedy: a lower --lr, or --async_steps 0."
            if s.now("engine_gap/") > 0.5 and s.now("staleness/") > 0.0
            else None
        ),
    ),
    (
        "engine_gap/",
        lambda s: (
            f"The engine does not sample from the weights that {s.agent} trains: their log-probabilities differ "
            f"by {s.now('engine_gap/'):.2f} nats per token. Remedy: check the servers' base and adapters, or "
            "--engine local."
            if s.now("engine_gap/") > 0.5 and s.now("staleness/") <= 0.0
            else None
        ),
    ),
    (
        "stale_samples/",
        lambda s: (
            f"The samples of {s.agent} do not come from the policy that learns: their mean probability ratio is "
            f"{s.now('ratio_mean/'):.2g}. Remedy: fewer --ppo_epoch, a lower --lr, or --async_steps 0."
            if f"engine_gap/{s.agent}" not in s.past[-1] and not 0.2 < s.now("ratio_mean/", 1.0) < 5
            else None
        ),
    ),
    (
        "truncated/",
        lambda s: (
            f"{s.now('truncated_share/'):.0%} of the turns of {s.agent} were cut at max_new_tokens. Remedy: raise "
            "--max_new_tokens, "
            + ("or " if s.masks_cut_turns else "leave such turns out of the loss (--mask_cut_turns), or ")
            + "ask for short answers in its role prompt."
            if s.now("truncated_share/") > 0.5
            else None
        ),
    ),
    (
        "lost_episodes",
        lambda s: (
            f"{s.now('env_lost_share'):.0%} of the episodes were lost to errors of the environment. Remedy: see the "
            "log for the file and line, and mafrt check_env."
            if s.now("env_lost_share") > 0.05
            else None
        ),
    ),
    (
        "not_finite",
        lambda s: (
            "A gradient or a weight was not finite; the step was skipped or the adapter put back. Remedy: a lower "
            "--lr, or --dtype float32."
            if s.now("rollbacks") or s.now("skipped_updates")
            else None
        ),
    ),
)
"""Name of the diagnosis (one that ends in `/` is made of each learning agent), and the check: finding and remedy, or
None."""


class Doctor:
    """Checks every iteration and evaluation of a run.

    Args:
        agents: names of the agents that may learn.
        masks_cut_turns: whether turns that were cut are left out of the loss.
    """

    def __init__(self, agents: Sequence[str], *, masks_cut_turns: bool = False) -> None:
        self.agents, self.masks_cut_turns = tuple(agents), masks_cut_turns
        self.diagnoses: dict[str, Diagnosis] = {}
        self.seen: dict[str, int] = {}
        """diagnosis -> iterations in which it held"""
        self._past: deque[Mapping[str, float]] = deque(maxlen=WINDOW)
        self._entropy: dict[str, float] = {}
        self._best: tuple[float, float] | None = None

    def look(self, iteration: int, metrics: Mapping[str, float], episodes: Sequence[Episode]) -> list[Diagnosis]:
        """Diagnoses that are new in this iteration (counted from 1); each is logged as a warning once."""
        self._past.append(metrics)
        for agent in self.agents:
            if (entropy := metrics.get(f"entropy/{agent}")) is not None:
                self._entropy.setdefault(agent, entropy)
        past, symptoms = list(self._past), list(_rewards(episodes))
        for name, check in CHECKS:
            for agent in self.agents if name.endswith("/") else ("",):
                seen = Seen(past, agent, self._entropy.get(agent, 0.0), self.masks_cut_turns)
                if (sentence := check(seen)) is not None:
                    symptoms.append((name + agent, sentence))
        return self._note(iteration, symptoms)

    def look_at_evaluation(self, iteration: int, metrics: Mapping[str, float], tasks: int) -> list[Diagnosis]:
        """The same for the scores of an evaluation, of which there are `tasks`."""
        return self._note(iteration, self._falling(metrics, tasks))

    def note(self, iteration: int, name: str, sentence: str) -> list[Diagnosis]:
        """Add a diagnosis that another part of the run made."""
        return self._note(iteration, [(name, sentence)])

    def lines(self) -> list[str]:
        """All diagnoses for the end of a run, first seen first."""
        return [
            f"{diagnosis.sentence} (first in iteration {diagnosis.iteration}, "
            f"{self.seen[name]} time{'s' if self.seen[name] > 1 else ''})"
            for name, diagnosis in self.diagnoses.items()
        ]

    def _note(self, iteration: int, symptoms: Iterable[tuple[str, str]]) -> list[Diagnosis]:
        new = []
        for name, sentence in symptoms:
            self.seen[name] = self.seen.get(name, 0) + 1
            # Said once, when it first appears; a line an iteration would bury the others.
            if name not in self.diagnoses:
                self.diagnoses[name] = Diagnosis(name, sentence, iteration)
                new.append(self.diagnoses[name])
                log.warning("iteration %d: %s", iteration, sentence)
        return new

    def _falling(self, metrics: Mapping[str, float], tasks: int) -> Iterator[tuple[str, str]]:
        name = next((name for name in metrics if name.startswith("eval/avg@")), "eval/greedy")
        score = metrics.get(name)
        if score is None or tasks < 1:
            return
        # Standard error of a mean of scores in 0..1, at least; wider scales only make the check more patient.
        error = max(0.25, abs(score) * (1 - min(abs(score), 1))) ** 0.5 / tasks**0.5
        if self._best is not None and score < self._best[0] - 2 * (error**2 + self._best[1] ** 2) ** 0.5:
            yield (
                "falling_score",
                f"The evaluation score fell from {self._best[0]:.3f} to {score:.3f}, beyond its interval, while "
                "training went on. Remedy: go back to the checkpoint before (--load_path RUN/checkpoints/step_N) with "
                "a lower --lr, and keep more of them (--keep_every).",
            )
        if self._best is None or score > self._best[0]:
            self._best = (score, error)


def _rewards(episodes: Sequence[Episode]) -> Iterator[tuple[str, str]]:
    """All episodes were worth the same. A score at the top of the scale is success and no finding."""
    turns = [turn for episode in episodes for turn in episode.turns]
    if len(episodes) < 2 or not turns:
        return
    rewards = [[turn.reward for turn in episode.turns if turn.reward is not None] for episode in episodes]
    worth = [
        None if not paid and episode.outcome is None else sum(paid) + (episode.outcome or 0.0)
        for paid, episode in zip(rewards, episodes, strict=True)
    ]
    # A coach may tell turns apart where the outcomes are equal.
    if len(set(worth)) > 1 or any(turn.coach is not None for turn in turns):
        return
    if worth[0] is None:
        yield (
            "no_reward",
            f"None of {counted(len(episodes), 'episodes')} has a reward or an outcome: nothing to learn. Remedy: "
            'return rewards from step(), or info["outcome"] on the last step (mafrt check_env shows an episode).',
        )
    elif worth[0] < 1:
        answer = clean_text(turns[-1].text).strip().replace("\n", " ")
        yield (
            "equal_rewards",
            f"All {len(episodes)} rewards were {worth[0]:g}; nothing to learn. The last answer was: "
            f"{answer[:200]!r}. Remedy: check that the reward can be reached (mafrt check_env), show the agents "
            "examples first (train_sft), or raise --temperature.",
        )


def _range(past: Sequence[Mapping[str, float]]) -> float:
    """Difference between the best and the worst score of the last iterations."""
    scores = [metrics["score"] for metrics in past[-WINDOW:] if "score" in metrics]
    return max(scores, default=0.0) - min(scores, default=0.0)

"""Diagnoses of a running training: reasons why it learns nothing or the wrong thing, with a remedy.

Every check reads the metrics and episodes of an iteration, or an evaluation, and nothing else. A diagnosis is reported
when it is first made, and counted from then on; the summary of the run repeats all of them. Thresholds are stated in
the checks; they are set so that the shipped recipes pass without a diagnosis.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mafrt.core.text import clean_text
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
        self._past: deque[Mapping[str, float]] = deque(maxlen=200)
        self._entropy: dict[str, float] = {}
        self._best: tuple[float, float] | None = None

    def look(self, iteration: int, metrics: Mapping[str, float], episodes: Sequence[Episode]) -> list[Diagnosis]:
        """Diagnoses that are new in this iteration (counted from 1); each is logged as a warning once."""
        self._past.append(metrics)
        return self._note(iteration, self._symptoms(metrics, episodes))

    def look_at_evaluation(self, iteration: int, metrics: Mapping[str, float], tasks: int) -> list[Diagnosis]:
        """The same for the scores of an evaluation, of which there are `tasks`."""
        return self._note(iteration, self._falling(metrics, tasks))

    def note(self, iteration: int, name: str, sentence: str) -> list[Diagnosis]:
        """Add a diagnosis that another part of the run made."""
        return self._note(iteration, iter([(name, sentence)]))

    def lines(self) -> list[str]:
        """All diagnoses for the end of a run, first seen first."""
        return [
            f"{diagnosis.sentence} (first in iteration {diagnosis.iteration}, "
            f"{self.seen[name]} time{'s' if self.seen[name] > 1 else ''})"
            for name, diagnosis in self.diagnoses.items()
        ]

    def _note(self, iteration: int, symptoms: Iterator[tuple[str, str]]) -> list[Diagnosis]:
        new = []
        for name, sentence in symptoms:
            self.seen[name] = self.seen.get(name, 0) + 1
            # Said once, when it first appears; a line an iteration would bury the others.
            if name not in self.diagnoses:
                self.diagnoses[name] = Diagnosis(name, sentence, iteration)
                new.append(self.diagnoses[name])
                log.warning("iteration %d: %s", iteration, sentence)
        return new

    # --------------------------------------------------------------------------------------------------- checks

    def _symptoms(self, metrics: Mapping[str, float], episodes: Sequence[Episode]) -> Iterator[tuple[str, str]]:
        yield from _rewards(episodes)
        yield from self._noise(metrics)
        yield from self._critic(metrics)
        yield from self._entropy_collapse(metrics)
        yield from self._kl(metrics)
        yield from self._spread(metrics)
        yield from self._engine(metrics)
        yield from _truncated(metrics, self.agents, self.masks_cut_turns)
        yield from _lost(metrics)
        yield from _repaired(metrics)

    def _noise(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        for agent in self.agents:
            recent = self._recent(f"flat_returns/{agent}")
            # Several iterations in a row, since one flat batch is chance; and a team that solves everything is no
            # patient.
            if len(recent) == WINDOW and min(recent) >= 1 and metrics.get("score", 0.0) < 0.99:
                yield (
                    f"flat_returns/{agent}",
                    f"All turns of {agent} earned the same in {WINDOW} iterations, so its adapter was left alone. "
                    "Remedy: pay it for its own part (rewards in step(), or --coach rules), more --n_samples, or a "
                    "higher --temperature.",
                )

    def _critic(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        for agent in self.agents:
            recent = self._recent(f"explained_variance/{agent}")
            # Where nearly everything is solved, returns have no variance that could be explained.
            if len(recent) == WINDOW and statistics.median(recent) < -1 and metrics.get("score", 0.0) < 0.95:
                yield (
                    f"harmful_critic/{agent}",
                    f"The critic predicts the returns of {agent} worse than their mean would: explained variance "
                    f"{statistics.median(recent):.1f} over {WINDOW} iterations. Remedy: more --critic_epoch, "
                    "a lower --critic_lr, or a rule without a critic (--algorithm grpo --n_samples 8).",
                )

    def _entropy_collapse(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        for agent in self.agents:
            value = metrics.get(f"entropy/{agent}")
            if value is None:
                continue
            # Compared with the run's own start, since usual entropies differ by tokenizer and task.
            first = self._entropy.setdefault(agent, value)
            spread = _spread_of_scores(self._past)
            # A low entropy alone is what success looks like, so the score must be low and still as well.
            if first > 0.05 and value < 0.02 * first and metrics.get("score", 1.0) < 0.5 and not spread:
                yield (
                    f"entropy_collapse/{agent}",
                    f"{agent} always says the same: its entropy fell from {first:.3f} to {value:.4f} nats per token "
                    "while the score is low. Remedy: a lower --lr, --entropy_coef 0.01, or --kl_coef 0.05.",
                )

    def _kl(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        for agent in self.agents:
            step, reference = metrics.get(f"kl/{agent}", 0.0), metrics.get(f"ref_kl/{agent}", 0.0)
            # A nat per token within one iteration is far beyond any trust region in use.
            if step > 1 or reference > 10:
                moved = f"{step:.2f} nats per token in one iteration" if step > 1 else f"{reference:.1f} nats in all"
                yield (
                    f"kl_explosion/{agent}",
                    f"The policy of {agent} moved away by {moved}. Remedy: a lower --lr, --target_kl 0.05, or "
                    "--kl_coef 0.05.",
                )

    def _spread(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        recent = self._recent("groups_no_spread")
        # Nine of ten groups: some without spread are normal, as tasks are too easy or too hard.
        if len(recent) == WINDOW and min(recent) > 0.9:
            yield (
                "groups_without_spread",
                f"{statistics.fmean(recent):.0%} of the groups have samples of equal reward, which teach nothing. "
                "Remedy: tasks of another difficulty, more --n_samples, or dynamic sampling (--algorithm dapo).",
            )

    def _engine(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        for agent in self.agents:
            gap = metrics.get(f"engine_gap/{agent}")
            # The same number has two causes: samples of the iteration before differ by the update itself.
            if gap is not None and gap > 0.5 and metrics.get(f"staleness/{agent}", 0.0) > 0.0:
                yield (
                    f"stale_samples/{agent}",
                    f"The samples of {agent} come from older weights: after the update their log-probabilities differ "
                    f"by {gap:.2f} nats per token. Remedy: a lower --lr, or --async_steps 0.",
                )
            elif gap is not None and gap > 0.5:
                yield (
                    f"engine_gap/{agent}",
                    f"The engine does not sample from the weights that {agent} trains: their log-probabilities differ "
                    f"by {gap:.2f} nats per token. Remedy: check the servers' base and adapters, or --engine local.",
                )
            ratio = metrics.get(f"ratio_mean/{agent}")
            if gap is None and ratio is not None and not 0.2 < ratio < 5:
                yield (
                    f"stale_samples/{agent}",
                    f"The samples of {agent} do not come from the policy that learns: their mean probability ratio is "
                    f"{ratio:.2g}. Remedy: fewer --ppo_epoch, a lower --lr, or --async_steps 0.",
                )

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

    def _recent(self, name: str) -> list[float]:
        values = [metrics.get(name) for metrics in list(self._past)[-WINDOW:]]
        return [value for value in values if value is not None]


def _rewards(episodes: Sequence[Episode]) -> Iterator[tuple[str, str]]:
    """All episodes were worth the same. A score at the top of the scale is success and no finding."""
    turns = [turn for episode in episodes for turn in episode.turns]
    if len(episodes) < 2 or not turns:
        return
    worth = [_worth(episode) for episode in episodes]
    # A coach may tell turns apart where the outcomes are equal.
    if len(set(worth)) > 1 or any(turn.coach is not None for turn in turns):
        return
    if worth[0] is None:
        yield (
            "no_reward",
            f"None of the {len(episodes)} episodes has a reward or an outcome, so there is nothing to learn. Remedy: "
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


def _worth(episode: Episode) -> float | None:
    rewards = [turn.reward for turn in episode.turns if turn.reward is not None]
    if not rewards and episode.outcome is None:
        return None
    return sum(rewards) + (episode.outcome or 0.0)


def _spread_of_scores(past: Sequence[Mapping[str, float]]) -> bool:
    scores = [metrics["score"] for metrics in list(past)[-WINDOW:] if "score" in metrics]
    return len(scores) > 1 and max(scores) - min(scores) > 0.1


def _truncated(metrics: Mapping[str, float], agents: Sequence[str], masked: bool) -> Iterator[tuple[str, str]]:
    remedies = ["raise --max_new_tokens", "ask for short answers in its role prompt"]
    remedies += [] if masked else ["leave such turns out of the loss: --mask_cut_turns"]
    for agent in agents:
        share = metrics.get(f"truncated_share/{agent}", 0.0)
        if share > 0.5:
            yield (
                f"truncated/{agent}",
                f"{share:.0%} of the turns of {agent} were cut at max_new_tokens. "
                f"Remedy: {', '.join(remedies[:-1])}, or {remedies[-1]}.",
            )


def _lost(metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    share = metrics.get("env_lost_share", 0.0)
    if share > 0.05:
        yield (
            "lost_episodes",
            f"{share:.0%} of the episodes were lost to errors of the environment. Remedy: see the log for the file "
            "and line, and mafrt check_env.",
        )


def _repaired(metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    if metrics.get("rollbacks", 0) or metrics.get("skipped_updates", 0):
        yield (
            "not_finite",
            "A gradient or a weight was not finite; the step was skipped or the adapter put back. Remedy: a lower "
            "--lr, or --dtype float32.",
        )

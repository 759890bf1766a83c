"""Judging in a run: turns to cases, verdicts to turns, and metrics of the verdicts.

play -> coach -> value -> credit -> learn. With `--coach_feedback` the turns of an episode that goes on are judged while
it is played, and the agents that act next are shown the reason; all other turns are judged in one call after play.

A judge that is gamed rewards turns that the verifier rejects. Two signs within one batch set off an alarm:
- *upside down*: an agent's scores fall as the outcome rises, by a correlation beyond two standard errors (2 / sqrt(n));
- *blind*: the turns that end rejected episodes (outcome 0 or less) get 5 of 10 or more on average, and less than one
  point under the turns that end accepted ones. Agents who speak earlier may be right where the team fails, so only the
  last turn counts here.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mafrt.algorithms.stats import correlation
from mafrt.coach import Case, Coach, RulesCoach, make_coach
from mafrt.coach.own_coach import verdicts_of
from mafrt.config.team import Team
from mafrt.config.train_config import TrainConfig
from mafrt.core import atomic_files
from mafrt.core.errors import CoachError, CoachInterruptedError, ConfigError
from mafrt.core.progress import stage
from mafrt.core.text import real_number
from mafrt.core.transcript import quoted, speakers
from mafrt.core.types import Episode, Scored, Turn, Unscored, Verdict
from mafrt.environment.base import Env
from mafrt.environment.checker import play
from mafrt.environment.contract import ROLES
from mafrt.rollout.prompts import messages_of

if TYPE_CHECKING:
    from mafrt.engines import Engine
    from mafrt.models.several_bases import Bases
    from mafrt.models.shared_base import SharedBase

log = logging.getLogger(__name__)

SHOWN = 600
"""Max characters of a reason shown to agents; it takes room in their context window."""

LEAST = 16
"""Turns (or rejected episodes, of which half as many do) below which nothing is said of a coach's agreement."""
COUNTS = "coach.json"
"""In the run's folder: the coach's name, and its counts so far."""


def decoder(base: SharedBase) -> Callable[[Sequence[int]], str]:
    """Token ids of answers -> text without end tokens."""
    tokenizer, ends = base.tokenizer, base.eos_ids

    def decode(ids: Sequence[int]) -> str:
        answer_ids = [token for token in ids if token not in ends]
        return str(tokenizer.decode(answer_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return decode


class Judge:
    """Applies a coach to the turns of a run.

    Args:
        coach: gives the verdicts.
        config: of the run.
        team: the agents.
        base: its tokenizers turn prompts into text; `local` judges with the model itself, of several with the main one.
        engine: samples for `local`.
        level: `token` asks the coach for spans.
        interrupted: whether the run was asked to stop.

    >>> base, team = mafrt.SharedBase.load("teaching-base"), mafrt.Team.of(["solver"])
    >>> coach = mafrt.make_coach(mafrt.CoachConfig(coach="rules"))
    >>> mafrt.Judge(coach, mafrt.TrainConfig(), team, base, base.engine, "token")
    <Judge rules: of solver, scores times 1.0>
    """

    def __init__(
        self,
        coach: Coach,
        config: TrainConfig,
        team: Team,
        base: Bases,
        engine: Engine,
        level: str,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self.coach = coach
        # The main base serves the coach, so that one copy of a model is enough to judge all agents.
        coach.begin(base.main, engine, interrupted)
        self.folder: Path | None = None
        self.config, self.team = config, team
        self.tokenizers = {name: base.of_agent(name).tokenizer for name in team.names}
        self.decoders = {name: decoder(base.of_agent(name)) for name in team.names}
        # Asked for only where credit can tell tokens apart; a judge's longer answers cost money.
        self.spans = level == "token"
        self.weight = config.algorithm.process_weight
        self.credit: dict[str, Any] = {"coach": True, "decoders": self.decoders}
        """fields of the credit context that depend on the coach"""
        self.before: dict[str, float] = {}
        self.seconds = 0.0
        self.alarmed = False

    def __repr__(self) -> str:
        return f"<Judge {self.coach.name}: of {', '.join(self.team.names)}, scores times {self.weight}>"

    # ------------------------------------------------------------------------------------------------------ judging

    def judge(self, episodes: Sequence[Episode]) -> None:
        """Fill `turn.coach` of every turn that has no score yet, and save the counts. Raises CoachError."""
        try:
            if self.coach.interrupted():  # then the episodes are not whole, and nothing is learnt from them
                raise CoachInterruptedError("the run was asked to stop")
            self._fill([(episode, turn) for episode in episodes for turn in episode.turns])
        # Paid verdicts are kept even if the judge fails midway; the resumed run reads them from the cache.
        finally:
            self.save()

    def feedback(self, turns: Sequence[tuple[Episode, Turn]]) -> list[str]:
        """Judge turns during the rollout; a note on each for the agents that act next, empty for none."""
        self._fill(turns)
        return [_note(turn, self.team.names) for _, turn in turns]

    def _fill(self, turns: Sequence[tuple[Episode, Turn]]) -> None:
        # Turns that feedback has judged during play are not paid for again.
        unjudged = [(episode, turn) for episode, turn in turns if not isinstance(turn.coach, Scored)]
        if not unjudged:
            return
        started = time.perf_counter()
        with stage("judging", len(unjudged)) as advance:
            cases = [self.case(episode, turn) for episode, turn in unjudged]
            # A coach of the user's own may hang or raise.
            coach, deadline_s = self.coach, self.config.coach.coach_deadline
            verdicts = list(coach.judge(cases)) if coach.bounded else verdicts_of(coach, cases, deadline_s)
            advance(len(unjudged))
        self.seconds += time.perf_counter() - started
        # Verdicts are matched by position, so a missing one would shift all the others.
        if len(verdicts) != len(unjudged):
            raise CoachError(
                f"{type(self.coach).__name__}.judge() gave {len(verdicts)} verdicts on {len(unjudged)} cases; give "
                "one for each, in their order."
            )
        for (_, turn), verdict in zip(unjudged, verdicts, strict=True):
            turn.coach = _checked(verdict, self.coach)

    def case(self, episode: Episode, turn: Turn) -> Case:
        """A turn as the coach reads it. With feedback the truth stays out: a reason that tells it would be shown."""
        # With feedback the judge's words are read by agents, and would give the answer away.
        answer = None if self.config.coach.coach_feedback else episode.info.get("answer")
        return Case(
            agent=turn.agent,
            said=turn.text,
            role=self.team.agent(turn.agent).prompt,
            saw=self._saw(turn) if self.coach.reads else "",
            evidence=turn.evidence,
            truth=None if answer is None else str(answer),
            spans=self.spans,
        )

    def _saw(self, turn: Turn) -> str:
        """The prompt of a turn as text, in which no message can be taken for two."""
        seen = [] if turn.observation is None else messages_of(self.team.agent(turn.agent).prompt, turn.observation)
        chat = [(message["role"], quoted(message["content"], headings=ROLES, inside=False)) for message in seen]
        if any(text != message["content"] for (_, text), message in zip(chat, seen, strict=True)):
            return "\n".join(f"{role}\n{text}" for role, text in chat)
        # Decoded from the tokens: a judge must see the prompt as the model saw it, with its template.
        decode = self.tokenizers[turn.agent].decode
        return str(decode(turn.prompt_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    # ------------------------------------------------------------------------------------------------------ numbers

    def too_few(self, episodes: Sequence[Episode]) -> bool:
        """Whether too many turns are unscored for an update."""
        return self.weight != 0.0 and unscored_share(episodes) > self.config.coach.coach_max_unscored

    def metrics(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Scores per agent, how many turns have none, and whether the coach agrees with the task's verdict."""
        metrics: dict[str, float] = {"coach_unscored_share": unscored_share(episodes)}
        skipped = self.too_few(episodes)
        metrics["coach_skipped_updates"] = float(skipped)
        if skipped:
            why = next(t.coach.why for e in episodes for t in e.turns if isinstance(t.coach, Unscored))
            share = 100 * metrics["coach_unscored_share"]
            log.warning(
                "%.0f%% of the turns are without a score (the first because %s), so the update is skipped", share, why
            )
        for name in self.team.names:
            turns = [turn for episode in episodes for turn in episode.turns if turn.agent == name]
            scores = [turn.coach.score for turn in turns if isinstance(turn.coach, Scored)]
            if scores:
                metrics[f"coach_score/{name}"] = sum(scores) / len(scores)
        agreement, alarm = agreement_of(episodes, self.team.names)
        # One warning when the disagreement starts, not one per iteration.
        if alarm and not self.alarmed:
            log.warning("%s; look at its reasons in episodes.jsonl, and at --outcome_veto", alarm)
        self.alarmed = alarm is not None
        return metrics | agreement | {"coach_alarm": float(alarm is not None)}

    def taken(self) -> dict[str, float]:
        """Cost of judging since the last call, by metric name. Depends on caches, so it belongs to the timings."""
        counts = dict(self.coach.counts())
        since = {f"coach_{name}": value - self.before.get(name, 0.0) for name, value in counts.items()}
        since["seconds_coach"], self.seconds = self.seconds, 0.0
        self.before = counts
        return since

    # --------------------------------------------------------------------------------------------------------- disk

    def open(self, folder: Path) -> None:
        """Go on counting calls and money where the run in `folder` stood."""
        log.info("judged by %s", self.coach.name)
        path = folder / COUNTS
        if path.is_file():
            stored = atomic_files.load_json(path)
            # A change of judge in the middle of a run changes the reward; the user has to know.
            if stored.get("coach") != self.coach.name:
                log.warning("judged by %s until now, by %s from now on", stored.get("coach"), self.coach.name)
            self.coach.restore(stored.get("counts", {}))
        self.before, self.folder = dict(self.coach.counts()), folder
        self.save()

    def save(self) -> None:
        """Write the coach's name and counts, atomically, in the process that has opened the run's folder."""
        if self.folder is not None:
            counts = {"coach": self.coach.name, "counts": dict(self.coach.counts())}
            atomic_files.save_json(self.folder / COUNTS, counts)


def prepare_coach(config: TrainConfig, env: Env) -> Coach | None:
    """The coach of the settings, or None; everything that can be refused is refused here, before a model is loaded.

    Raises:
        ConfigError, MissingExtraError: see `make_coach` and `check_rules`.
    """
    if config.coach.coach == "none":
        return None
    coach = make_coach(config.coach, env.rubric)
    if isinstance(coach, RulesCoach):
        check_rules(env)
    return coach


def check_rules(env: Env) -> None:
    """Play one scripted episode to check that `--coach rules` has judgements to read.

    Raises:
        ConfigError: no turn of it was given a rules judgement.
    """
    transcript = play(env.spawn(), seed=0)
    # One scripted episode proves that rules are there, not that every turn has them.
    if isinstance(transcript[-1], str):
        return  # the episode failed; the environment check reports that
    found = [item for _, _, (_, evidence) in transcript[1:] for item in (evidence or {}).values()]
    if not any(evidence.rules for evidence in found):
        raise ConfigError(
            f"coach 'rules' reads the judgement of the environment's own verifier, and {env.class_name} gives none "
            '(info["evidence"] = {agent: Evidence(rules=Scored(...))}); take another coach, or --coach none.'
        )


def unscored_share(episodes: Sequence[Episode]) -> float:
    """Share of all turns that have no score."""
    turns = [turn for episode in episodes for turn in episode.turns]
    return sum(not isinstance(turn.coach, Scored) for turn in turns) / max(len(turns), 1)


def agreement_of(episodes: Sequence[Episode], agents: Sequence[str]) -> tuple[dict[str, float], str | None]:
    """How the scores agree with the outcomes, as far as the batch can tell, and the alarm, if there is one."""
    metrics: dict[str, float] = {}
    alarms = []
    scored = [
        (episode.outcome, turn.coach.score, turn, turn is episode.turns[-1])
        for episode in episodes
        for turn in episode.turns
        if episode.outcome is not None and isinstance(turn.coach, Scored)
    ]
    for agent in agents:
        pairs = [(score, outcome) for outcome, score, turn, _ in scored if turn.agent == agent]
        r = correlation(pairs)
        if r is None:
            continue
        metrics[f"coach_correlation/{agent}"] = r
        # Two standard errors of a correlation without any relation, so that chance seldom raises the alarm.
        if len(pairs) >= LEAST and r < -2.0 / math.sqrt(len(pairs)):
            alarms.append(f"the coach's scores of {agent} fall as the outcome rises (correlation {r:.2f})")
    rejected = [score for outcome, score, _, last in scored if last and outcome <= 0]
    accepted = [score for outcome, score, _, last in scored if last and outcome > 0]
    for name, scores in (("rejected", rejected), ("accepted", accepted)):
        if scores:
            metrics[f"coach_{name}_score"] = sum(scores) / len(scores)
    low = metrics.get("coach_rejected_score", 0.0)
    # Only last turns are compared: an early turn may be good although the episode was lost later.
    if len(rejected) >= LEAST // 2 and low >= 5.0 and low > metrics.get("coach_accepted_score", low) - 1.0:
        alarms.append(f"the coach gives {low:.1f} of 10 to the turns that end episodes which the verifier rejects")
    return metrics, alarms[0] if alarms else None


def _checked(verdict: Any, coach: Coach) -> Verdict:
    """A coach's verdict, checked; a score out of range becomes Unscored, never another number."""
    if verdict is None:
        return Unscored("the coach gave no verdict")
    if isinstance(verdict, Unscored):
        return verdict
    if real_number(verdict) is not None or isinstance(verdict, str):
        verdict = Scored(verdict, "")
    if not isinstance(verdict, Scored):
        raise CoachError(
            f"{type(coach).__name__}.judge() gave a {type(verdict).__name__}; a verdict is Scored(score, reason), a "
            "number from 0 to 10, or Unscored(why)."
        )
    bad = [score for score in (verdict.score, *(score for _, score in verdict.spans)) if _points(score) is None]
    if bad:
        return Unscored(f"the coach gave the score {bad[0]!r}, which is not in 0..10")
    spans = tuple((quote, cast("float", _points(score))) for quote, score in verdict.spans)
    return Scored(cast("float", _points(verdict.score)), str(verdict.reason), spans)


def _points(score: Any) -> float | None:
    """A score in 0..10 as a float, also of NumPy and torch; None for anything else. True and False are no scores."""
    if isinstance(score, str) and re.fullmatch(r"\s*\d+(\.\d+)?\s*", score):
        score = float(score)
    number = None if type(score).__name__ in ("bool", "bool_") else real_number(score)
    return number if number is not None and 0 <= number <= 10 else None


def _note(turn: Turn, names: Sequence[str]) -> str:
    """The note on a turn for the agents that act next; empty if it has no score."""
    if not isinstance(turn.coach, Scored):
        return ""
    reason = turn.coach.reason
    # A judge's essay must not fill the next agent's context window.
    if len(reason) > SHOWN:
        reason = f"{reason[:SHOWN]} ..."
    # Its words may be those of an agent that it quotes.
    reason = quoted(reason, speakers(names))
    return f"Coach on {turn.agent}: {turn.coach.score:g}/10. {reason}".strip()

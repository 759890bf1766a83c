"""The reward of a turn, combined from the environment's reward, the coach's score and the task's outcome.

    r = reward_weight * turn.reward + process_weight * score / 10 (+ outcome_weight * episode.outcome)

The outcome is added to the last turn of the episode (`outcome_to="last"`, MARFT), to all turns of the step that ended
it (`"end"`, used by `mafrt.rollout.tree_player` to score alternatives), to the last turn of every agent (`"each"`) or
to every turn (`"all"`: "each row carries the trajectory's reward" in Dr. MAS, AT-GRPO, GRPO). Token-level rules place a
verdict's overall score on the last tokens of its spans, in proportion to the spans' scores: spans move the reward
within the turn and never change its sum.

With `share="sum"` every turn carries the sum over its episode (CORY's r1 + r2). The outcome then enters the sum once,
for every `outcome_to`, since a sum over "all" would weigh it by the number of turns.

The overlong penalty lowers the reward of a turn near or at its token limit (`overlong_*`, DAPO 2503.14476 eq. 13):

    penalty * min(0, (limit - buffer - tokens) / buffer)          buffer = overlong_buffer * limit

which is 0 up to limit - buffer tokens and -penalty at the limit. It is added after sharing, so only that turn pays it.

The KL penalty in the reward (`kl_coef` above 0) is added after sharing too: every action token gets
-kl_coef * (log pi - log pi_ref), Schulman's k1 (Ziegler 2019, 1909.08593), and the turn their sum. log pi is
`old_logprobs`, or the sampler's where that is None.

A turn of unknown reward leaves the loss and every baseline, and is counted. A reward is unknown if a coach is on but
the turn was not judged (`None` and `Unscored` alike); if a part of it is NaN or infinite; or if the episode was cut
before its outcome, i.e. `outcome` is None although others of its group have one, or in a truncated episode although
others of the batch have one. No substitute number is used. `truncation="mask"` drops truncated episodes,
`mask_cut_turns` drops turns that hit their token limit. A part of weight 0 is not read at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from mafrt.algorithms.stats import total
from mafrt.config.algorithm_groups import RewardSettings
from mafrt.core.errors import ConfigError
from mafrt.core.types import Episode, Scored, Turn

Decode = Callable[[Sequence[int]], str]
Joint: TypeAlias = "Callable[[Row, Sequence[float]], Sequence[float]]"


@dataclass(frozen=True)
class CreditContext:
    """Facts about the batch that credit needs and that are no settings."""

    coach: bool | None = None
    """Whether a coach is on. None: inferred, on if any turn of the batch has a verdict. The runner sets it, since a
    coach that failed on every turn cannot be inferred."""
    decode: Decode | None = None
    """Token ids -> text, to locate a span's last token. None: the action's last token is used for every span."""
    decoders: Mapping[str, Decode] | None = None
    """Agent -> its own `decode`, where agents have different tokenizers."""
    token_limits: Mapping[str, int] | None = None
    """Agent -> max tokens per turn; required if `overlong_buffer` is above 0."""
    kl_coef: float | None = None
    """Current weight of the KL penalty in the reward, as steered by `AdaptiveKL`; None: the setting's."""
    agent_rewards: Mapping[str, RewardSettings] | None = None
    """Agent -> its own reward settings: weights of the parts of its turns' rewards."""
    agent_kl: Mapping[str, float] | None = None
    """Agent -> weight of its own KL penalty in the reward, in place of `kl_coef`."""
    by_turn: bool | None = None
    """Whether turns are paid as they come. None: inferred, if some turn of an episode of several has a reward or a
    score other than 0. See `fill_later`."""
    opponents: bool | None = None
    """Whether agents are paid against each other (`Env.opponents`): pay of later turns then counts for their own
    agent only. None: inferred, if the pay of the agents adds up to 0 in every episode. The runner sets it."""
    memory: dict[str, float] = field(default_factory=dict)
    """What a rule remembers from batch to batch, by names of its own: `credit` reads and changes it, and the runner
    keeps it in checkpoints."""
    joint: Joint | None = None
    """(row, candidate values of its Q_i) -> Q_tot for each candidate; required by `qmix`."""


Dropped = Literal["unjudged", "nonfinite", "truncated", "no_outcome", "cut_by_length"]
"""Reasons to exclude a turn from the loss."""


@dataclass
class Row:
    """One turn with its reward: the input of every credit rule."""

    turn: Turn
    episode: int
    """Position of its episode in the batch; tells trajectories apart even if two share an id."""
    group: str
    position: int = 0
    """Position of the turn in its episode."""
    step: int = 0
    """Index of its environment step in the episode; turns spoken at the same time share it."""
    game: str = ""
    """The environment among those of a mixture (`info["set"]`); empty where there is one."""
    reward: float = 0.0
    """The turn's reward as one number, for rules that give a turn one number."""
    bare: float = 0.0
    """`reward` without the KL penalty; whether rewards differ is asked of these."""
    own_reward: float = 0.0
    """The environment's part of `reward`: the turn's own pay."""
    late: list[tuple[int, float]] = field(default_factory=list)
    """The parts of `own_reward` that came with a later step: `env_step` of that step, and the amount."""
    later: float = 0.0
    """Pay of the turns of its step and of later ones beside this one's own; 0 unless turns are paid as they
    come (`fill_later`)."""
    later_process: float = 0.0
    """The coach's part of `later`."""
    token_rewards: dict[int, float] = field(default_factory=dict)
    """Token index -> reward without the KL penalty, for rules that see tokens; they add up to `reward` less it."""
    kl_rewards: list[float] = field(default_factory=list)
    """The KL penalty's part of `reward`, one number per action token; empty without such a penalty."""
    outcome_reward: float = 0.0
    """The outcome's part of `reward`."""
    process_reward: float = 0.0
    """The coach's part of `reward`."""
    own_turn: int = 0
    """How many turns the agent had before this one in its episode; of an alternative of a tree, whose episode holds
    nothing else, the turn's position in the tree's episode."""
    cut_off: bool = False
    """The last turn of an episode that was truncated, whose future is bootstrapped."""
    dropped: Dropped | None = None
    """Why the turn is out of the loss; None if it is in."""

    @property
    def pay(self) -> float:
        """The turn's own pay, by environment and coach: its reward without outcome and penalties."""
        return self.own_reward + self.process_reward

    @property
    def pay_known(self) -> bool:
        """Whether `pay` is known. A turn may be out of the loss for another reason, such as an unknown KL penalty."""
        return self.dropped != "unjudged" and math.isfinite(self.pay)

    @property
    def key(self) -> tuple[int, int]:
        """Identity of the turn in the batch: positions of its episode and of the turn."""
        return self.episode, self.position

    def paid(self, token: int) -> float:
        """Reward at one token, KL penalty included."""
        reward = self.token_rewards.get(token, 0.0)
        return reward + self.kl_rewards[token] if self.kl_rewards else reward

    def parts(self) -> dict[str, float]:
        """Where the turn's reward comes from, and what it is credited of later pay; parts of 0 are left out."""
        parts = {"reward": self.own_reward, "coach": self.process_reward, "outcome": self.outcome_reward}
        parts |= {"kl": total(self.kl_rewards), "later": self.later}
        return {name: amount for name, amount in parts.items() if amount}

    def fill(self, advantages: list[float], returns: list[float], baseline: float | None = None) -> None:
        """Write one advantage and one return per action token, and what the returns were compared with."""
        self.turn.advantages, self.turn.returns, self.turn.baseline = advantages, returns, baseline

    def drop(self, why: Dropped) -> None:
        """Take the turn out of the loss; the first reason stays."""
        self.dropped = self.dropped or why
        self.turn.advantages = self.turn.returns = self.turn.baseline = self.turn.terms = None


def reward_rows(
    episodes: Sequence[Episode],
    settings: RewardSettings,
    context: CreditContext = CreditContext(),
    *,
    kl_coef: float = 0.0,
) -> tuple[list[list[Row]], int]:
    """One list of rows per episode, in speaking order, and the number of spans that could not be located.

    `kl_coef` is the weight of the KL penalty in the reward; 0 needs no reference.
    """
    of_agents, coached = context.agent_rewards or {}, context.coach
    if coached is None:
        coached = any(turn.coach is not None for episode in episodes for turn in episode.turns)
    spans_lost = 0
    trajectories = []
    # A task without any verdict in its group has no outcome by design; only a partial lack means unknown.
    judged = {episode.group for episode in episodes if episode.outcome is not None}
    # With bootstrap="none" (IPPO, MAPoRL) turns have no successor, so truncation cuts nothing off.
    future = settings.truncation == "bootstrap" and getattr(settings, "bootstrap", "none") != "none"
    for index, episode in enumerate(episodes):
        truncated = episode.info.get("ended") == "truncated"
        spoken: dict[str, int] = {}
        # A step of the environment ends where `env_step` changes, or where an agent speaks again.
        step, at, in_step = -1, None, set[str]()
        game = str(episode.info.get("set", ""))
        payees = _payees(episode, "last" if settings.share == "sum" else settings.outcome_to or "all")
        rows = []
        for position, turn in enumerate(episode.turns):
            if turn.env_step != at or turn.agent in in_step:
                step, at, in_step = step + 1, turn.env_step, set()
            in_step.add(turn.agent)
            row = Row(turn, index, episode.group, position, step, game)
            row.own_turn = turn.turn if "alternative" in episode.info else spoken.get(turn.agent, 0)
            spoken[turn.agent] = row.own_turn + 1
            row.cut_off = truncated and future and position == len(episode.turns) - 1
            # Results of an earlier call must not survive for turns that are dropped now.
            turn.advantages = turn.returns = None
            weights = of_agents.get(turn.agent, settings)
            payee = position in payees and weights.outcome_weight != 0.0
            spans_lost += _pay(row, episode, weights, context, coached=coached, outcome=payee)
            if truncated and settings.truncation == "mask":
                row.drop("truncated")
            if settings.mask_cut_turns and turn.stop == "length":
                row.drop("cut_by_length")
            # Unknown, which is not 0: others of the group have a verdict, or the episode was cut before its own.
            missing = episode.outcome is None and (episode.group in judged or (truncated and bool(judged)))
            # An alternative of a tree that did not end its episode was never due a verdict.
            missing = missing and not ("alternative" in episode.info and "ended" not in episode.info)
            if missing and payee and not row.cut_off:
                row.drop("no_outcome")
            rows.append(row)
        # Penalties come after sharing: they punish the turn that earned them and not its teammates.
        if settings.share == "sum":
            _share(rows)
        if settings.overlong_buffer:
            for row in rows:
                _shorten(row, settings, context)
        for row in rows:
            row.bare = row.reward
            if coef := (context.agent_kl or {}).get(row.turn.agent, kl_coef):
                _penalise(row, coef)
        trajectories.append(rows)
    return trajectories, spans_lost


def payments(rows: Sequence[Row]) -> list[tuple[int, float, str]]:
    """The environment's pay in an episode, as (step, amount, agent): late pay at the step with which it came."""
    out = [(step, amount, row.turn.agent) for row, step, amount in _late(rows)]
    for row in rows:
        amount = total([row.own_reward, *(-late for _, late in row.late)])
        out.append((row.step, amount, row.turn.agent))
    return [payment for payment in out if payment[1]]


def step_rewards(rows: Sequence[Row], *, kl: bool = True) -> list[float]:
    """All that each environment step of an episode pays, one number a step, whatever the order of its turns.

    An outcome that several turns of a step receive is counted once (the mean of its worth to them).
    """
    parts: list[list[float]] = [[] for _ in range(rows[-1].step + 1)]
    for row in rows:
        parts[row.step] += [row.reward if kl else row.bare, -row.outcome_reward]
    for step in range(len(parts)):
        outcomes = [row.outcome_reward for row in rows if row.step == step and row.outcome_reward]
        parts[step] += [total(outcomes) / len(outcomes)] if outcomes else []
    for row, step, amount in _late(rows):
        parts[row.step].append(-amount)
        parts[step].append(amount)
    return [total(part) for part in parts]


def _late(rows: Sequence[Row]) -> list[tuple[Row, int, float]]:
    """Late pay of an episode: the turn that it was recorded with, the step that it came with, and the amount."""
    at = {row.turn.env_step: row.step for row in rows}
    return [(row, at.get(env_step, row.step), amount) for row in rows for env_step, amount in row.late]


def moved_pay(rows: Sequence[Row]) -> dict[tuple[int, int], float]:
    """Numbers to add to the rewards of turns, by their key, so that a chain of the team's turns is paid in time.

    Late pay goes to a turn of the step that it came with.
    """
    last = {row.step: row for row in rows}
    last |= {row.step: row for row in rows if row.turn.action_ids}
    moved: dict[tuple[int, int], list[float]] = {}
    for row, step, amount in _late(rows):
        moved.setdefault(row.key, []).append(-amount)
        moved.setdefault(last[step].key, []).append(amount)
    return {key: total(amounts) for key, amounts in moved.items() if any(amounts)}


def are_opponents(trajectories: Sequence[Sequence[Row]]) -> bool:
    """Whether the environment's pay of the agents adds up to 0 in every episode, and is not all 0."""
    found = False
    for rows in trajectories:
        paid = [row.own_reward for row in rows]
        largest = max(map(abs, paid), default=0.0)
        if not math.isfinite(largest):
            continue
        if abs(total(paid)) > 1e-9 * largest or (largest and len({row.turn.agent for row in rows}) < 2):
            return False
        found = found or largest > 0.0
    return found


def fill_later(
    trajectories: Sequence[Sequence[Row]], *, own: bool, clip: Callable[[float], float] = lambda pay: pay
) -> None:
    """Fill `later` of every row: all pay from its step on beside the turn's own.

    With rewards by turn and an outcome R, the gradient of E[sum r + R] weighs turn t with sum_{u >= t} r_u + R: the
    turn's `reward` (its own pay and R) and `later`. Penalties stay with the turn that earned them. A turn whose later
    pay is unknown leaves the loss.

    Args:
        trajectories: the rows of each episode.
        own: pay of other agents does not count (opponents, and rules by which agents are on their own).
        clip: bound of the pay of one turn.
    """
    for rows in trajectories:
        paid = payments(rows)
        for row in rows:
            after = [other for other in rows if other.step >= row.step and other is not row]
            after = [other for other in after if not own or other.turn.agent == row.turn.agent]
            if gone := next((other.dropped for other in after if not other.pay_known), None):
                row.drop(gone)
                continue
            row.later_process = total(clip(other.process_reward) for other in after)
            agents = {row.turn.agent} if own else {other.turn.agent for other in rows}
            to_go = [clip(amount) for step, amount, agent in paid if step >= row.step and agent in agents]
            # The turn's own pay is in its reward; what came late is counted there, and not twice.
            row.later = total([row.later_process, *to_go, -clip(row.own_reward)])
            if not math.isfinite(row.later):
                row.drop("nonfinite")


def _payees(episode: Episode, outcome_to: str) -> set[int]:
    """Positions of the turns that the outcome is added to."""
    positions = range(len(episode.turns))
    if outcome_to == "all":
        return set(positions)
    if outcome_to == "last":
        return set(positions[-1:])
    if outcome_to == "end":
        return {i for i in positions if episode.turns[i].env_step == episode.turns[-1].env_step}
    return set({episode.turns[i].agent: i for i in positions}.values())


def _pay(
    row: Row, episode: Episode, settings: RewardSettings, context: CreditContext, *, coached: bool, outcome: bool
) -> int:
    """Fill `row`'s rewards, or drop it. Returns how many spans were not located."""
    turn = row.turn
    last = max(len(turn.action_ids) - 1, 0)
    base = 0.0
    if turn.reward is not None and settings.reward_weight != 0.0:
        row.own_reward = settings.reward_weight * turn.reward
        row.late = [(step, settings.reward_weight * amount) for step, amount in turn.late]
        base += row.own_reward
    if outcome and episode.outcome is not None and settings.outcome_weight != 0.0:
        row.outcome_reward = settings.outcome_weight * episode.outcome
        base += row.outcome_reward
    # Rules that see tokens are paid where the turn is complete, at its last token.
    row.reward, row.token_rewards = base, {last: base}
    lost = 0
    if coached and settings.process_weight != 0.0:
        if not isinstance(turn.coach, Scored):
            row.drop("unjudged")
            return 0
        # With a failed outcome, positive process rewards would teach the team to please the judge.
        veto = settings.outcome_veto and episode.outcome is not None and episode.outcome <= 0.0
        earned = settings.process_weight * turn.coach.score / 10.0
        # NaN passes through min() unpredictably, so it is kept and drops the turn below.
        if veto and not math.isnan(earned):
            earned = min(earned, 0.0)
        row.reward += earned
        row.process_reward = earned
        shares = {last: 1.0}
        if turn.coach.spans:
            decode = (context.decoders or {}).get(turn.agent, context.decode)
            lost, shares = _span_shares(turn, turn.coach, decode, last)
        for where, share in shares.items():
            row.token_rewards[where] = row.token_rewards.get(where, 0.0) + share * earned
    if not all(map(math.isfinite, (row.reward, *row.token_rewards.values()))):
        row.drop("nonfinite")
    return lost


def _span_shares(turn: Turn, verdict: Scored, decode: Decode | None, last: int) -> tuple[int, dict[int, float]]:
    """Spans that were not located, and the share of the overall score that each token is paid; they add up to 1.

    A span's share is its score divided by the sum of all spans' scores, so spans move the reward and keep its sum. The
    share of an unlocated span goes to the last token.
    """
    scores = [score for _, score in verdict.spans]
    whole = total(scores)
    if not all(map(math.isfinite, scores)):
        return 0, {last: math.nan}
    # All scores 0 give no proportions, so the spans share equally.
    weights = [score / whole for score in scores] if whole > 0.0 else [1.0 / len(scores)] * len(scores)
    lost, shares = 0, dict[int, list[float]]()
    for (quote, _), weight in zip(verdict.spans, weights, strict=True):
        # The empty quotation is the turn's end: that it stopped there.
        where = _last_token(turn, quote, decode) if quote else last
        lost += where is None
        shares.setdefault(last if where is None else where, []).append(weight)
    return lost, {where: total(some) for where, some in shares.items()}


def _share(rows: list[Row]) -> None:
    """Give every row the sum of its episode's rewards; unknown if any summand is unknown."""
    gone = next((row.dropped for row in rows if row.dropped), None)
    # fsum: the sum must not depend on the order of the turns.
    summed = math.fsum(row.reward for row in rows) if gone is None else 0.0
    for row in rows:
        row.reward = summed
        # Every row carries all of them.
        row.own_reward, row.process_reward, row.outcome_reward, row.late = 0.0, 0.0, 0.0, []
        row.token_rewards = {max(len(row.turn.action_ids) - 1, 0): summed}
        if gone:
            row.drop(gone)


def _shorten(row: Row, settings: RewardSettings, context: CreditContext) -> None:
    """Subtract the overlong penalty from the turn's reward, at its last token."""
    turn = row.turn
    limit = (context.token_limits or {}).get(turn.agent)
    if limit is None:
        raise ConfigError(
            f"agent {turn.agent!r} has no token limit, which the overlong penalty needs; give token_limits, or set "
            "overlong_buffer to 0."
        )
    buffer = settings.overlong_buffer * limit
    share = min(max((len(turn.action_ids) - (limit - buffer)) / buffer, 0.0), 1.0)
    if share:
        last = max(len(turn.action_ids) - 1, 0)
        row.reward -= settings.overlong_penalty * share
        row.token_rewards[last] = row.token_rewards.get(last, 0.0) - settings.overlong_penalty * share


def _penalise(row: Row, coef: float) -> None:
    """Subtract the KL penalty from the turn's reward, token by token."""
    turn = row.turn
    if not turn.action_ids:
        return
    if turn.ref_logprobs is None:
        raise ConfigError(
            f"kl_coef={coef} in the reward needs a reference: turn {turn.turn} of agent {turn.agent!r} has no "
            "ref_logprobs; fill them first, or set kl_coef to 0."
        )
    old = turn.logprobs if turn.old_logprobs is None else turn.old_logprobs
    row.kl_rewards = [coef * (ref - old_logprob) for old_logprob, ref in zip(old, turn.ref_logprobs, strict=True)]
    row.reward += total(row.kl_rewards)
    if not math.isfinite(row.reward):
        row.drop("nonfinite")


def _last_token(turn: Turn, quote: str, decode: Decode | None) -> int | None:
    """Index of the token that completes the first occurrence of `quote`; None if it is not to be found.

    Decoded text grows with its tokens, so the first prefix that holds the quote ends in its last token. The search
    halves the range; a tokenizer may change the last characters of a prefix (half of a multi-byte character), never
    those before, so containment is monotone once the quote is complete.
    """
    if decode is None or quote not in decode(turn.action_ids):
        return None
    low, high = 1, len(turn.action_ids)
    while low < high:
        middle = (low + high) // 2
        if quote in decode(turn.action_ids[:middle]):
            high = middle
        else:
            low = middle + 1
    return low - 1

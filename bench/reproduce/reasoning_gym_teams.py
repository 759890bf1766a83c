"""Where a team matters: tasks of reasoning-gym for two agents, and for one that says the same.

Each data set has a part that is worked out first (the sums before the last, the letters of a word, ...) and an answer
that follows from it. In a team a worker says the first and a finisher, who sees it, the second; one agent alone says
both in one turn, with as many tokens. Both starts imitate the same texts. With outcome only, turns are paid by the data
set's score. Process rewards add, for each turn, the share of the work that is right, and whether the answer follows
from the work that was said, be that right or wrong: the coach of this file. Both sides try the same learning rates with
as many episodes, with a seed of its own; validation tasks choose. The test tasks of the table were looked at by nothing
else. A stage whose results are there is not run again.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench._tables import over_seeds
from bench.reproduce._commands import run
from bench.reproduce.reasoning_gym import demonstrations, imitated, played, tested, write_table
from mafrt.coach.base import Case, Coach
from mafrt.config.team import Team
from mafrt.core.types import Scored, Verdict

SIDES: dict[str, list[dict[str, Any]]] = {
    "team": [
        {"role": "worker", "prompt": "Say the parts.", "max_new_tokens": 24},
        {"role": "finisher", "prompt": "Say the answer.", "max_new_tokens": 8, "with_answer": True},
    ],
    "alone": [
        {"role": "solver", "prompt": "Say the parts, then the answer.", "max_new_tokens": 32, "with_answer": True},
    ],
}
SCOPES: dict[str, dict[str, str]] = {
    "all": {},
    # A transcript is computed once for all who read it: adapters act on an agent's own words, its role prompt is last.
    "action": {"prompt_at": "end", "adapter_scope": "action"},
}
REWARDS: dict[str, tuple[object, ...]] = {
    "outcome only": (),
    "process rewards": ("--coach", "bench.reproduce.reasoning_gym_teams:Parts", "--coach_cache", "none"),
}
# Each turn is paid for its own part, and the outcome.
LEARN = ("--algorithm", "dr_mas", "--turn_credit", "own", "--n_samples", 8, "--ppo_epoch", 1)
SHAPE = ("--lora_rank", 16, "--lora_alpha", 32)
TRIAL_SEED = 1000
"""with which the rates are tried; none of those that are reported"""


@dataclass(frozen=True)
class Kind:
    """A data set in two parts."""

    config: dict[str, int]
    """its settings, beside level 0"""
    asked: str
    """regular expression of what a question gives"""
    work: Callable[..., str]
    """the first part, of what is given: texts without spaces, joined by one"""
    finish: Callable[..., str]
    """the answer that follows from a first part, of its texts and what is given; raises ValueError where none does"""


def value(part: str) -> int:
    """The number behind the equals sign. Raises ValueError."""
    return int(part.rpartition("=")[2])


def running_sums(terms: str) -> str:
    """All but the last of the sums from left to right: `4 + 1 - 9` begins with `4+1=5`."""
    first, *others = re.findall(r"[+-]?\d+", terms.replace(" ", ""))
    total, parts = int(first), []
    for term in others[:-1]:
        parts.append(f"{total}{term}={total + int(term)}")
        total += int(term)
    return " ".join(parts)


def last_sum(parts: Sequence[str], terms: str) -> str:
    if not parts:
        raise ValueError("no sum")
    return str(value(parts[-1]) + int(re.findall(r"[+-]?\d+", terms.replace(" ", ""))[-1]))


def total(parts: Sequence[str], *_: str) -> str:
    return str(sum(map(value, parts)))


def legs(animals: str) -> str:
    """`3*8=24` for `3 spiders`."""
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    parts = []
    for item in animals.split(", "):
        count, name = item.split(" ", 1)
        each = ANIMALS[name if count == "1" else name.removesuffix("s")]
        parts.append(f"{count}*{each}={int(count) * each}")
    return " ".join(parts)


def words_with(letter: str, text: str) -> str:
    """`been=2` for each word that has the letter."""
    counted = ((word, word.lower().count(letter)) for word in text.split())
    return " ".join(f"{word}={count}" for word, count in counted if count)


def isolated(left: str, right: str) -> str:
    """`8*z=24` of `8*z + 5` and `29`: the unknown's multiple, positive, on one side."""
    constant, factor, unknown = 0, 0, ""
    for sign, number, letter in re.findall(r"([+-]?)(\d*)\*?([a-z]?)", left.replace(" ", "")):
        if letter:
            factor, unknown = int(f"{sign}{number or 1}"), letter
        elif number:
            constant = int(sign + number)
    whole = (int(right) - constant) * (1 if factor > 0 else -1)
    return f"{abs(factor)}*{unknown}={whole}"


def quotient(parts: Sequence[str], *_: str) -> str:
    found = re.fullmatch(r"(\d{1,9})\*[a-z]=(-?\d{1,9})", parts[0] if len(parts) == 1 else "")
    if found is None or int(found[1]) == 0 or int(found[2]) % int(found[1]):
        raise ValueError("no whole number follows")
    return str(int(found[2]) // int(found[1]))


TURNED = {
    "front": {"top": "front", "front": "bottom", "bottom": "back", "back": "top"},
    "right": {"top": "right", "right": "bottom", "bottom": "left", "left": "top"},
    "back": {"top": "back", "back": "bottom", "bottom": "front", "front": "top"},
    "left": {"top": "left", "left": "bottom", "bottom": "right", "right": "top"},
    "bottom": {"top": "bottom", "bottom": "top", "front": "back", "back": "front"},
}
"""side that is turned to the top -> where the color of a side was before, if elsewhere"""


def before(_: str, turns: str, side: str) -> str:
    """Where the color of a side was before each turn of a cube, the last turn first."""
    places = []
    sides = "|".join(TURNED)
    for to_top in reversed(re.findall(rf"\b({sides})\b", turns)):
        side = TURNED[to_top].get(side, side)
        places.append(side)
    return " ".join(places)


def color_at(parts: Sequence[str], sides: str, *_: str) -> str:
    colors: dict[str, str] = {side: color for color, side in re.findall(r"- a (\w+) (\w+) side", sides)}
    if not parts or parts[-1] not in colors:
        raise ValueError("no side of the cube")
    return colors[parts[-1]]


KINDS = {
    "color_cube_rotation": Kind(
        {"min_rotations": 1, "max_rotations": 2},
        r"(?s)A cube has:\s*(.*?)\s*The cube is (rotated so.*?)\s*What is now the color of the (\w+) side",
        before,
        color_at,
    ),
    "leg_counting": Kind({"min_animals": 2, "max_animals": 2}, r"in total if you have (.+)\?", legs, total),
    "spell_backward": Kind(
        {"min_word_len": 4, "max_word_len": 5},
        r"sun -> nus\): (\w+)",
        " ".join,
        lambda parts, *_: "".join(reversed(parts)),
    ),
    "chain_sum": Kind({"min_terms": 3, "max_terms": 3}, r"arithmetic problem: ([-+ \d]+) =", running_sums, last_sum),
    "letter_counting": Kind({}, r'letter "(.)" appear in the text: "(.*)"\?', words_with, total),
    "simple_equations": Kind(
        {"min_terms": 2, "max_terms": 2, "max_value": 9},
        r"(?:equation|satisfies|for [a-z]): ([-+* a-z\d]+) = (-?\d+)",
        isolated,
        quotient,
    ),
}


def in_parts(question: str) -> tuple[Kind, tuple[str, ...]]:
    """The kind of a question, and what it gives. Raises ValueError if it is of none."""
    for kind in KINDS.values():
        if found := re.search(kind.asked, question):
            return kind, found.groups()
    raise ValueError(f"no question of these data sets: {question[:200]!r}")


def say(agent: str, info: Mapping[str, Any]) -> str:
    """What an agent is shown to say on a task."""
    kind, given = in_parts(info["problem"])
    parts = kind.work(*given)
    answer = kind.finish(parts.split(), *given)
    return {"worker": parts, "finisher": answer, "solver": f"{parts}\n{answer}"}[agent]


def judged(agent: str, saw: str, said: str) -> dict[str, float]:
    """Of the parts that a turn has: the share of the `work` that is right, and 1 if the `answer` follows from its work.

    Args:
        saw: its prompt; a finisher finds the work there.
    """
    kind, given = in_parts(saw)
    work, _, answer = said.strip().rpartition("\n")
    if agent == "worker":
        work, answer = said, ""
    elif agent == "finisher":
        work = "".join(re.findall(r"^worker: (.*)$", saw, re.MULTILINE)[:1])
    scores = {}
    if agent != "finisher":
        right, parts = kind.work(*given).split(), work.split()
        scores["work"] = sum(a == b for a, b in zip(right, parts, strict=False)) / max(len(right), len(parts))
    if agent != "worker":
        try:
            scores["answer"] = float(answer.strip().lower() == kind.finish(work.split(), *given).lower())
        except ValueError:
            scores["answer"] = 0.0
    return scores


class Parts(Coach):
    """Scores a turn by the parts that it has, in equal shares.

    Who says both parts is paid for an answer only as far as the work is right. Else it learns to say work from which
    the answer is easy (`4*0=0 2*0=0`, then 0); a finisher does not choose its work.
    """

    name = "parts"

    def judge(self, cases: Sequence[Case]) -> list[Verdict]:
        return [self._one(judged(case.agent, case.saw, case.said)) for case in cases]

    def _one(self, parts: Mapping[str, float]) -> Scored:
        paid = dict(parts)
        if "work" in paid and "answer" in paid:
            paid["answer"] *= paid["work"]
        return Scored(10 * statistics.fmean(paid.values()), json.dumps(parts))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--data_sets", nargs="+", default=list(KINDS), choices=KINDS, help="of reasoning-gym")
    parser.add_argument("--rewards", nargs="+", default=list(REWARDS), choices=REWARDS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1001, 1002, 1003])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 3e-4], help="learning rates to choose from")
    parser.add_argument(
        "--tried_on", nargs="+", default=["leg_counting"], choices=KINDS, help="data sets to try them on"
    )
    parser.add_argument("--trial", type=int, default=6, help="iterations of the run that tries a rate")
    parser.add_argument("--validation", type=int, default=32, help="validation tasks that score it")
    parser.add_argument("--imitated", type=int, default=192, help="tasks from which both parts are learnt")
    parser.add_argument("--iterations", type=int, default=10, help="of training")
    parser.add_argument("--episodes", type=int, default=32, help="of an iteration")
    parser.add_argument("--tasks", type=int, default=60, help="test tasks")
    parser.add_argument("--after", type=int, default=0, help="of the test tasks, the first that are left out")
    parser.add_argument("--samples", type=int, default=2, help="sampled answers to each of them")
    parser.add_argument("--adapter_scope", default="all", choices=SCOPES, help="on which words adapters act")
    parser.add_argument("--model_name_or_path", default="smollm2")
    parser.add_argument("--output", type=Path, default=Path("runs/reproduce/reasoning_gym_teams"))
    args = parser.parse_args(argv)
    args.max_new_tokens = 32  # of an agent that sets none
    return args


def words_of(args: argparse.Namespace, name: str, side: str) -> tuple[object, ...]:
    return played(args, name, KINDS[name].config, f"{side}.json")


def start_of(args: argparse.Namespace, name: str, side: str) -> Path:
    """The adapters from which all runs of a side begin."""
    team = f"{side}.json"
    (args.output / name).mkdir(parents=True, exist_ok=True)
    said = demonstrations(name, KINDS[name].config, Team.load(args.output / team), args.imitated, say)
    return imitated(args, args.output / name / f"start_{side}", said, 1e-3, team)


def learnt(args: argparse.Namespace, name: str, side: str, rewards: str, rate: float, seed: int) -> Path:
    """The folder of a run; one of the trial's seed is shorter, and looks at validation tasks."""
    from mafrt.scripts import train

    looks: tuple[str, ...]
    folder: Path = args.output / name / f"{side}_{rewards.split()[0]}_{rate:.0e}_{seed}"
    if not (folder / "summary.json").is_file():
        steps, looks = args.iterations, ("--eval_episodes", "0")
        if seed == TRIAL_SEED:
            steps = args.trial
            looks = ("--eval_episodes", str(args.validation), "--eval_samples", "1")
        sizes = ("--iterations", steps, "--n_rollout_threads", args.episodes, "--seed", seed, "--lr", rate)
        words = (*words_of(args, name, side), *LEARN, *SHAPE, *REWARDS[rewards], *sizes, *looks)
        start = start_of(args, name, side)
        run(train.main, *words, "--load_path", start, "--run_dir", folder, makes=folder / "summary.json")
    return folder


def chosen(args: argparse.Namespace, side: str, rewards: str) -> float:
    """The rate whose short runs end with the best validation scores, sampled and greedy together."""

    def score(rate: float) -> float:
        scores: list[float] = []
        for name in args.tried_on:
            folder = learnt(args, name, side, rewards, rate, TRIAL_SEED)
            last = json.loads((folder / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()[-1])
            scores.append(last["eval/avg@1"] + last["eval/greedy"])
        return statistics.fmean(scores)

    best: float = max(args.rates, key=score)
    return best


def measured(args: argparse.Namespace, name: str, side: str, adapters: Path, path: Path) -> dict[str, float]:
    """Test scores, and the shares of sampled episodes whose work is right, and whose answer follows from it."""
    words = (*words_of(args, name, side), "--k", args.samples, "--no-greedy")
    found = tested(args, words, adapters, path)
    groups = set(sorted(found["scores"])[args.after :])
    scores = [score for group in groups for score in found["scores"][group]]
    parts: dict[str, list[float]] = {"work": [], "answer": []}
    for episode in found["episodes"]:
        for turn in episode["turns"] if episode["group"] in groups else ():
            for key, share in judged(turn["agent"], turn["observation"], turn["text"]).items():
                parts[key].append(float(share == 1))
    own = {"sampled": statistics.fmean(scores), "solved": statistics.fmean(score >= 1 for score in scores)}
    return own | {key: statistics.fmean(shares) for key, shares in parts.items()}


COLUMNS = ("sampled", "solved", "work", "answer")


def compared(args: argparse.Namespace, name: str) -> list[str]:
    """All runs on one data set; the lines of its table."""
    out: Path = args.output / name
    lines = []
    for side in SIDES:
        before = measured(args, name, side, start_of(args, name, side), out / f"start_{side}.json")
        lines.append(f"| {name} | {side}, start | | {' | '.join(f'{before[key]:.3f}' for key in COLUMNS)} | |")
    for rewards in args.rewards:
        runs: dict[str, list[dict[str, float]]] = {}
        for side in SIDES:
            rate = chosen(args, side, rewards)
            runs[side] = []
            for seed in args.seeds:
                folder = learnt(args, name, side, rewards, rate, seed)
                runs[side].append(measured(args, name, side, folder, out / f"{folder.name}.json"))
            cells = " | ".join(over_seeds([one[key] for one in runs[side]]) for key in COLUMNS)
            each = "; ".join(f"{one['sampled']:.3f}" for one in runs[side])
            lines.append(f"| | {side}, {rewards} | {rate:.0e} | {cells} | {each} |")
        gains = {
            key: [ours[key] - theirs[key] for ours, theirs in zip(runs["team"], runs["alone"], strict=True)]
            for key in COLUMNS
        }
        cells = " | ".join(over_seeds(gains[key], "+.3f") for key in COLUMNS)
        each = "; ".join(f"{gain:+.3f}" for gain in gains["sampled"])
        lines.append(f"| | **team minus alone, {rewards}** | | {cells} | {each} |")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    for side, agents in SIDES.items():
        team = [agent | SCOPES[args.adapter_scope] for agent in agents]
        (args.output / f"{side}.json").write_text(json.dumps(team), encoding="utf-8")
    head = "| data set | player | rate | sampled | solved | work right | answer follows | sampled, by seed |"
    write_table(args, head, compared)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Answers to questions: how they are marked in a text, exact match and F1 after SQuAD's normalisation.

Rajpurkar et al. 2016, 1606.05250: lower case, without punctuation and articles, white space collapsed.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from mafrt.envs.math.answers import boxed

_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
WHOLE = ("yes", "no", "noanswer")
"""Answers that have no partial agreement, as in HotpotQA's own evaluation."""


def normalize(text: str) -> str:
    """`The Beatles!` -> `beatles`."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def given_answer(text: str) -> str | None:
    """The content of the last `<answer>` tag, else of the last `\\boxed{}`, else None.

    A last tag that is cut off or empty gives none, and not the answer before it.
    """
    tags = list(_TAG.finditer(text))
    opened = next((n for n in range(len(tags) - 1, -1, -1) if not tags[n][1]), None)
    if opened is None:
        return boxed(text) or None
    closed = tags[opened + 1 : opened + 2]
    return text[tags[opened].end() : closed[0].start()].strip() or None if closed else None


def exact_match(given: str, golden: Sequence[str]) -> float:
    """1.0 if a golden answer equals the given one after normalisation."""
    answer_given = normalize(given)  # once: an answer may be long, and golden ones many
    return float(any(answer_given == normalize(answer) for answer in golden))


def f1(given: str, golden: Sequence[str]) -> float:
    """Highest F1 of the words of the given answer against a golden one."""
    answer_given = normalize(given)
    words = Counter(answer_given.split())
    return max((_f1(answer_given, words, normalize(answer)) for answer in golden), default=0.0)


def _f1(given: str, words: Counter[str], golden: str) -> float:
    """Of normalised texts; `words` are those of `given`."""
    if given != golden and (given in WHOLE or golden in WHOLE):
        return 0.0
    right = Counter(golden.split())
    same = sum(min(count, words[word]) for word, count in right.items())
    if not same:
        return float(given == golden)
    precision, recall = same / words.total(), same / right.total()
    return 2 * precision * recall / (precision + recall)


def mentions(text: str, golden: Sequence[str]) -> bool:
    """Whether a text holds a golden answer, as whole words after normalisation."""
    words = f" {normalize(text)} "
    return any(f" {answer} " in words for answer in map(normalize, golden) if answer)

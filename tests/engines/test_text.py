"""Text at the boundaries: whatever comes in, valid Unicode without control characters goes on."""

from __future__ import annotations

import json
import unicodedata

import pytest
from helpers_models import tiny_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mafrt.config.team import Team
from mafrt.core.text import (
    brief,
    clean_deep,
    clean_text,
    error_line,
    has_controls,
    one_line,
    readable_name,
    shortened,
)
from mafrt.core.types import Evidence, SamplingParams, StepResult
from mafrt.engines.scripted import ScriptedEngine
from mafrt.environment.base import Env
from mafrt.environment.workers import guarded
from mafrt.rollout.player import Player, Start
from mafrt.storage.episode_lines import episode_record

ANYTHING = st.text(st.characters(), max_size=30)
"""Surrogates and control characters included."""


@given(ANYTHING)
def test_a_cleaned_text_is_valid_and_cleaning_it_again_changes_nothing(text):
    cleaned = clean_text(text)
    cleaned.encode("utf-8")
    controls = [c for c in cleaned if unicodedata.category(c) == "Cc" and c not in "\t\n\v\f\r\x85"]
    assert controls == [] and clean_text(cleaned) == cleaned
    if all(unicodedata.category(c) not in ("Cs", "Cc") for c in text):
        assert cleaned is text


def test_what_becomes_of_each_kind_of_text():
    assert clean_text("\ud83d\ude00") == "\N{GRINNING FACE}"  # a pair, as JSON with escapes or JavaScript has it
    assert clean_text("a\ud83d") == clean_text("a\ude00") == clean_text("a\x00") == "a\ufffd"
    assert clean_text("\x1b[31mred\x9b") == "\ufffd[31mred\ufffd"
    assert readable_name("a\r\n\tb\x85") == "a\ufffd\ufffd\ufffdb\ufffd" and has_controls("a\rb")
    assert one_line(" a\n\tb\x1b ") == "a b\ufffd" and not has_controls("a b")
    assert clean_text("tab\tline\r\nend\x0b\x0c\x85") == "tab\tline\r\nend\x0b\x0c\x85"


JSONISH = st.recursive(
    st.none() | st.booleans() | st.integers() | ANYTHING,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANYTHING, inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(JSONISH)
def test_a_cleaned_structure_can_be_written(value):
    json.dumps(clean_deep(value), ensure_ascii=False).encode("utf-8")


def test_what_is_nested_without_end_is_refused_and_short_forms_never_raise():
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(ValueError, match="deeper than 100"):
        clean_deep(endless)

    class Odd:
        def __repr__(self):
            raise RuntimeError("no")

    class Worse(Exception):
        def __str__(self):
            raise RuntimeError("no")

    assert brief(Odd()) == "Odd (its repr raises RuntimeError)"
    assert "ValueError" in brief(10**5000)
    assert error_line(Worse()) == "(its text raises RuntimeError)"
    assert shortened("a\nb\ud800" + "c" * 500) == "a b\ufffd" + "c" * 73 + "..."


class Echo(Env):
    """Shows, reports and records the text that it was made with."""

    agents = ("a",)

    def __init__(self, text):
        self.text = text

    def reset(self, seed=None, options=None):
        return {"a": [{"role": "user", "content": self.text}]}, {"task": self.text, self.text: self.text}

    def step(self, actions):
        evidence = Evidence(self.text, facts={self.text: [self.text]})
        info = {"evidence": {"a": evidence}, "outcome": 1.0}
        return StepResult({}, {}, True, False, info)


@settings(max_examples=25, deadline=None)
@given(ANYTHING, ANYTHING)
@example(seen="\ud800", said="\ud800")
def test_no_text_of_an_environment_or_a_model_ends_play_or_the_record_of_it(seen, said):
    tokenizer = tiny_tokenizer()
    engine = ScriptedEngine(lambda request: said or "x", tokenizer)
    player = Player(engine, tokenizer, Team.of(["a"]), {"a": SamplingParams(max_new_tokens=90)}, 900)
    queue = iter([Start("e", "g", 0, 0)])
    [episode], stats = player.play([Echo(seen)], lambda slot, done: next(queue, None))
    assert stats.env_errors == 0
    json.dumps(episode_record(episode), ensure_ascii=False).encode("utf-8")


@pytest.mark.parametrize("text", ["\ud83d", "\x00", "a\udfffb\x1b[2J", "\ud83d\ude00"])
def test_text_crosses_the_pipe_of_a_worker(text):
    env = guarded(Echo(text), 20)
    observations, _ = env.reset(seed=0)
    assert observations["a"][0]["content"] == clean_text(text)
    result = env.step({"a": text})
    assert result.info["evidence"]["a"].tool_output == clean_text(text)

"""The scripted engine does what a model would do with its answers."""

from __future__ import annotations

import re

import pytest
from helpers_models import tiny_tokenizer

from mafrt.core.errors import ConfigError
from mafrt.core.types import Request, SamplingParams
from mafrt.engines.scripted import ScriptedEngine


def request(adapter="solver", limit=32, prompt=(5, 6)):
    return Request(list(prompt), adapter, SamplingParams(max_new_tokens=limit), seed=0)


def test_answers_come_in_order_per_adapter_and_over_again():
    engine = ScriptedEngine({"solver": ["one", "two"], "verifier": ["yes"]}, tiny_tokenizer())
    asked = [request(), request("verifier"), request(), request(), request("verifier")]
    assert [c.text for c in engine.generate(asked)] == ["one", "yes", "two", "one", "yes"]
    assert engine.requests == asked
    assert engine.generate([]) == []


def test_a_completion_holds_the_ids_and_the_end_token():
    tokenizer = tiny_tokenizer()
    (found,) = ScriptedEngine({"solver": ["x = 4"]}, tokenizer).generate([request()])
    assert found.ids == [*tokenizer.encode("x = 4"), tokenizer.eos_token_id]
    assert tokenizer.decode(found.ids, skip_special_tokens=True) == found.text == "x = 4"
    assert found.logprobs == [0.0] * 6
    assert (found.stop, found.adapter_version) == ("eos", 0)


def test_an_answer_longer_than_the_limit_is_cut_like_a_models():
    tokenizer = tiny_tokenizer()
    (found,) = ScriptedEngine({"solver": ["abcdef"]}, tokenizer).generate([request(limit=4)])
    assert (found.ids, found.text, found.stop) == (tokenizer.encode("abcd"), "abcd", "length")


def test_a_function_sees_the_request():
    engine = ScriptedEngine(lambda asked: f"{asked.adapter}:{len(asked.prompt_ids)}", tiny_tokenizer())
    assert [c.text for c in engine.generate([request(prompt=(7, 8, 9)), request(None)])] == ["solver:3", "None:2"]


def test_an_adapter_without_answers_is_an_error_that_says_who_has_some():
    engine = ScriptedEngine({"solver": ["one"], "mute": []}, tiny_tokenizer())
    for name in ("critic", "mute"):
        with pytest.raises(ConfigError, match=f"'{name}'.*solver"):
            engine.generate([request(name)])


# --- an engine of one's own ------------------------------------------------------------------------------------------

OWN = """
import dataclasses

class Parrot:
    def __init__(self, base, config, window):
        self.base, self.window, self.calls = base, window, 0

    def generate(self, requests):
        from mafrt.core.types import Completion
        self.calls += 1
        ids = self.base.tokenizer.encode("7", add_special_tokens=False)
        return [Completion(ids, [-0.5] * len(ids), "eos", "7", 0) for _ in requests]

class Wrapped:
    def __init__(self, base, config, window):
        from mafrt.engines.local.engine import LocalEngine
        self.inner, self.calls = LocalEngine(base), 0

    def generate(self, requests):
        self.calls += 1
        return self.inner.generate(requests)

class Deaf(Wrapped):
    # It keeps the first weights of every adapter, and says nothing of being another implementation.
    def __init__(self, base, config, window):
        super().__init__(base, config, window)
        self.base, self.first = base, {name: base.adapter_state(name) for name in base.adapters}

    def generate(self, requests):
        now = {name: self.base.adapter_state(name) for name in self.first}
        for name, state in self.first.items():
            self.base.load_adapter_state(name, state)
        answers = super().generate(requests)
        for name, state in now.items():
            self.base.load_adapter_state(name, state)
        return answers

class ByVersion(Deaf):
    # Weights by version, as a server keeps them: those of the check must not pass for those of the run.
    def __init__(self, base, config, window):
        super().__init__(base, config, window)
        self.kept = {}

    def generate(self, requests):
        for name in self.base.adapters:
            self.kept.setdefault((name, self.base.versions[name]), self.base.adapter_state(name))
        self.first = {name: self.kept[name, self.base.versions[name]] for name in self.base.adapters}
        versions = dict(self.base.versions)
        answers = super().generate(requests)
        self.base.versions.update(versions)
        return answers

class Late(Deaf):
    # It takes one update and no other.
    def generate(self, requests):
        if self.calls == 1:
            self.first = {name: self.base.adapter_state(name) for name in self.base.adapters}
        return super().generate(requests)

class Newer(Deaf):
    # It takes weights of a newer version than any that it has seen, so none after those of the check.
    def generate(self, requests):
        self.seen = getattr(self, "seen", {})
        for name, version in self.base.versions.items():
            if version > self.seen.get(name, -1):
                self.seen[name], self.first[name] = version, self.base.adapter_state(name)
        versions = dict(self.base.versions)
        answers = super().generate(requests)
        self.base.versions.update(versions)
        return answers

class Tires(Deaf):
    # It takes updates until its sixth call.
    def generate(self, requests):
        if self.calls < 6:
            self.first = {name: self.base.adapter_state(name) for name in self.base.adapters}
        versions = dict(self.base.versions)
        answers = super().generate(requests)
        self.base.versions.update(versions)
        return answers

class Cut(Wrapped):
    def generate(self, requests):
        return [dataclasses.replace(a, logprobs=a.logprobs[:-1]) for a in super().generate(requests)]

class Fewer(Wrapped):
    def generate(self, requests):
        return super().generate(requests)[1:]

class Unknown(Wrapped):
    def generate(self, requests):
        return [dataclasses.replace(a, ids=[10**6] * len(a.ids)) for a in super().generate(requests)]

class Breaks(Wrapped):
    def generate(self, requests):
        if self.calls > 5:
            {}["node"]
        return super().generate(requests)

class Mute:
    def __init__(self, base, config, window): pass

class Fails:
    def __init__(self, base, config, window): {}["gpu"]
"""


@pytest.mark.slow
@pytest.mark.ci
def test_an_engine_of_one_s_own_is_one_class_in_one_file(tmp_path, monkeypatch):
    import sys

    import toy

    from mafrt.core.errors import ConfigError, ModelError
    from mafrt.engines.checks import check_engine
    from mafrt.runners.build import make_engine

    (tmp_path / "my_engine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    runner = toy.make(engine="my_engine:Wrapped", iterations=1, eval_episodes=0)
    summary = runner.run()
    assert summary.iterations == 1 and runner.engine.calls > 0
    versioned = toy.make(engine="my_engine:ByVersion", iterations=2, eval_episodes=0)
    assert versioned.base.versions == {"first": 0, "second": 0}  # the check leaves no trace
    versioned.run()
    for name, words in [
        ("my_engine:Parrot", "does not hold the base"),
        ("my_engine:Deaf", "'first' changes nothing.*sample with the weights that the base holds now"),
        ("my_engine:Late", "In my_engine:Late"),
    ]:
        with pytest.raises(ModelError) as refused:
            toy.make(engine=name, iterations=1, eval_episodes=0)
        assert re.search(words, str(refused.value)) and "\n" not in str(refused.value), str(refused.value)
    for name, words in [
        ("my_engine:Newer", "an update did not arrive.*sample with the weights that the base holds now"),
        ("my_engine:Tires", "an update did not arrive"),
        ("my_engine:Cut", "of 8 tokens with 7 log-probabilities"),
        ("my_engine:Fewer", "gave 2 answers to 3 requests"),
        ("my_engine:Unknown", "no id below"),
        ("my_engine:Breaks", r"generate\(\) raised KeyError: 'node' \(.*my_engine.py, line \d+\)"),
    ]:
        with pytest.raises(ModelError) as stopped:
            toy.make(engine=name, iterations=6, eval_episodes=0).run()
        assert re.search(words, str(stopped.value)) and "\n" not in str(stopped.value), (name, str(stopped.value))
    for name, words in [
        ("my_engine:Mute", "made a Mute, which has no generate"),
        ("my_engine:Fails", r"KeyError: 'gpu' \(.*my_engine.py, line \d+\)"),
        ("my_engine:Parot", "did you mean 'Parrot'"),
        ("no_engine:X", "no module 'no_engine'"),
        ("vlm", "did you mean 'vllm'"),
    ]:
        with pytest.raises(ConfigError) as caught:
            make_engine(runner.base, toy.settings(engine=name))
        assert re.search(words, str(caught.value)) and "\n" not in str(caught.value), str(caught.value)
    with pytest.raises(ConfigError, match="reads no settings of vLLM"):
        check_engine(toy.settings(engine="my_engine:Parrot", max_loras=2).engine, {}, {})


def test_a_coach_provider_of_one_s_own_is_registered_by_name(monkeypatch):
    from mafrt.coach import Case, make_coach
    from mafrt.coach.providers import PROVIDERS, Reply, register_provider
    from mafrt.config.train_config import CoachConfig
    from mafrt.core.types import Scored

    class House:
        where = "house"

        def __init__(self, model, base_url, max_tokens, timeout_s):
            self.model = model

        async def ask(self, ask):
            return Reply('{"score": 6, "reason": "' + self.model + '"}', False, 1, 1)

        async def close(self):
            pass

    monkeypatch.setattr(PROVIDERS, "_known", dict(PROVIDERS._known))
    register_provider("house", House)
    coach = make_coach(CoachConfig(coach="house:m1", coach_cache=None))
    assert coach.judge([Case("a", "x")]) == [Scored(6.0, "m1")]
    coach.close()

"""Team files: what loads, what is refused and in which words."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mafrt.config.agent import AgentSpec, LoraSpec
from mafrt.config.team import Team
from mafrt.core.errors import ConfigError
from mafrt.environment.registry import make_env

PROFILES = Path(__file__).parents[2] / "profiles"


def write(tmp_path: Path, text: str, name: str = "team.json") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def refused(tmp_path: Path, data: object, *words: str) -> None:
    path = write(tmp_path, data if isinstance(data, str) else json.dumps(data))
    with pytest.raises(ConfigError) as caught:
        Team.load(path)
    text = str(caught.value)
    assert str(path) in text and "\n" not in text
    for word in words:
        assert word in text, text


def test_loads_json_and_yaml_alike(tmp_path):
    from_json = Team.load(
        write(
            tmp_path,
            json.dumps(
                [
                    {"role": "reasoner", "prompt": "Plan."},
                    {"role": "actor", "with_answer": True, "lr": 1e-5, "lora": {"rank": 16, "alpha": 32}, "stop": "\n"},
                ]
            ),
        )
    )
    from_yaml = Team.load(
        write(
            tmp_path,
            # YAML 1.1 reads 1e-5 as a text; it still is a number here.
            "agents:\n- role: reasoner\n  prompt: Plan.\n"
            '- {role: actor, with_answer: true, lr: 1e-5, lora: {rank: 16, alpha: 32}, stop: ["\\n"]}\n',
            "team.yaml",
        )
    )
    assert from_json == from_yaml
    assert from_json.names == ("reasoner", "actor") == from_json.adapters
    assert from_json.agent("actor").lora == LoraSpec(rank=16, alpha=32)
    assert from_json.agent("actor").lr == 1e-5 and from_json.agent("actor").stop == ("\n",)


def test_lora_for_takes_the_agents_own_or_the_default():
    own, default = LoraSpec(rank=4), LoraSpec(rank=2, targets=("q_proj",))
    team = Team((AgentSpec("a", adapter="shared"), AgentSpec("b", adapter="shared", lora=own), AgentSpec("c")))
    assert team.adapters == ("shared", "c")
    assert team.lora_for("shared", default) == own
    assert team.lora_for("c", default) == default
    with pytest.raises(ConfigError, match=r"'shard'.*'shared'"):
        team.lora_for("shard", default)


def test_marft_profile_loads_as_it_is(tmp_path, caplog):
    # The layout of MARFT's profile files: chat markers inside the prompt, a device for each agent.
    data = [
        {
            "role": "reasoner",
            "prompt": "<|im_start|>system: Plan.<|im_end|>",
            "with_answer": False,
            "device": "cuda:1",
        },
        {"role": "actor", "prompt": "<|im_start|>system: Box \\boxed{{}} it.<|im_end|>\n", "with_answer": True},
    ]
    with caplog.at_level(logging.WARNING):
        team = Team.load(write(tmp_path, json.dumps(data)))
    assert [a.prompt for a in team.agents] == ["Plan.", "Box \\boxed{{}} it."]
    assert "device" in caplog.text and caplog.text.count("ignored") == 1


def test_refusals_name_what_is_wrong(tmp_path):
    refused(tmp_path, [{"prompt": "x"}], "agent 1", "lacks the key 'role'", "'prompt'")
    refused(tmp_path, [{"role": "a"}, {"role": "a"}], "'a' appears twice")
    refused(tmp_path, [{"role": "a", "promt": "x"}], "'promt'", "did you mean 'prompt'")
    refused(tmp_path, [{"role": "a", "lora": {"rnk": 3}}], "'rnk'", "did you mean 'rank'")
    refused(tmp_path, [{"role": "a", "lora": 8}], "lora must be an object")
    refused(tmp_path, [{"role": "a", "lora": {"rank": 0}}], "rank", "at least 1")
    refused(tmp_path, [{"role": "a", "lora": {"targets": "q_proj"}}], "targets must be a list")
    refused(tmp_path, [{"role": "a b"}], "'a b' is not a valid name")
    refused(tmp_path, [{"role": "state"}], "checkpoints use")
    refused(tmp_path, [{"role": 3}], "3 is not a valid name")
    refused(tmp_path, [{"role": "a", "adapter": "../x"}], "'../x' is not a valid name")
    refused(tmp_path, [{"role": "a", "adapter": ""}], "adapter is empty")
    refused(tmp_path, [{"role": "a", "with_answer": "yes"}], "true or false", "'yes'")
    refused(tmp_path, [{"role": "a", "temperature": -1}], "temperature", "at least 0")
    refused(tmp_path, [{"role": "a", "top_p": 1.5}], "top_p", "(0, 1]")
    refused(tmp_path, [{"role": "a", "lr": "fast"}], "lr is 'fast'", "'fast'")
    refused(tmp_path, [{"role": "a", "max_new_tokens": 0}], "max_new_tokens")
    refused(tmp_path, [{"role": "a", "stop": [""]}], "stop")
    refused(tmp_path, ["a"], "agent 1 must be an object", "'a'")
    refused(tmp_path, [], "no agents")
    refused(tmp_path, {"agent": []}, "the key 'agents'", "'agent'")
    refused(tmp_path, {"agents": [], "x": 1}, "'x'")
    refused(tmp_path, "3", "expected a list", "int")
    refused(tmp_path, "", "is empty")
    refused(tmp_path, "[{", "is not JSON", "line 1")
    shared = [{"role": r, "adapter": "x", "lora": {"rank": n}} for r, n in (("a", 4), ("b", 8))]
    refused(tmp_path, shared, "a, b share the adapter 'x'", "different lora")
    refused(tmp_path, [{"role": r, "adapter": "x", "lr": n} for r, n in (("a", 1e-4), ("b", 1e-5))], "different lr")
    with pytest.raises(ConfigError, match=r"missing\.json: cannot be read"):
        Team.load(tmp_path / "missing.json")
    with pytest.raises(ConfigError, match="is not YAML"):
        Team.load(write(tmp_path, "a: [", "team.yaml"))
    (tmp_path / "latin.json").write_bytes(b'[{"role": "a", "prompt": "\xe9"}]')
    with pytest.raises(ConfigError, match="not UTF-8"):
        Team.load(tmp_path / "latin.json")


def test_size_is_checked_against_n_agents():
    team = Team.of(["a", "b"])
    team.check_size(None)
    team.check_size(2)
    with pytest.raises(ConfigError, match=r"n_agents is 3, but the team has 2 \(a, b\)"):
        team.check_size(3)


def test_of_lets_the_last_agent_answer():
    assert [a.with_answer for a in Team.of(["a", "b", "c"]).agents] == [False, False, True]
    with pytest.raises(ConfigError, match="list of names"):
        Team.of("actor")


@pytest.mark.parametrize(
    ("name", "roles"), [("dual", 2), ("trio", 3), ("quartet", 4), ("octet", 8)]
)  # MARFT's names of these sizes
def test_shipped_profiles(name, roles):
    team = Team.load(PROFILES / f"math_{name}.json")
    team.check_size(roles)
    assert [a.with_answer for a in team.agents] == [False] * (roles - 1) + [True]
    assert "\\boxed{}" in team.agents[-1].prompt
    assert all(a.prompt and "{{" not in a.prompt for a in team.agents)


names = st.from_regex(r"[A-Za-z0-9_.-]{1,12}", fullmatch=True).filter(
    lambda n: n.lower() not in {".", "..", "state", "critic.pth", "manifest.json"}
)
agents = st.builds(
    AgentSpec,
    name=names,
    # What MARFT's chat markers wrap is unwrapped on loading, so such a prompt does not survive a round trip.
    prompt=st.text().filter(lambda p: "<|im_start|>" not in p),
    with_answer=st.booleans(),
    adapter=st.just("") | names,
    lr=st.none() | st.floats(1e-9, 1),
    top_k=st.none() | st.integers(0, 100),
    stop=st.none() | st.lists(st.text(min_size=1), max_size=3).map(tuple),
    lora=st.none() | st.builds(LoraSpec, rank=st.integers(1, 64), alpha=st.floats(0.1, 64)),
)


@pytest.mark.slow
@settings(deadline=None)  # the machine may be busy
@given(st.lists(agents, min_size=1, max_size=4))
def test_a_team_survives_its_file(specs):
    try:
        team = Team(tuple(specs))
    except ConfigError:
        return  # the same name or adapter drawn twice, with different settings
    assert Team.parse(json.loads(team.to_json())) == team


# -------------------------------------------------------------------------------- settings of single agents


def test_flat_lora_keys_change_single_values_of_the_runs_default(tmp_path):
    data = [
        {"role": "a", "lora_rank": 4},
        {"role": "b", "lora_targets": ["q_proj"], "lora_alpha": "3e1"},
        {"role": "c"},
    ]
    team, default = Team.load(write(tmp_path, json.dumps(data))), LoraSpec(rank=2, alpha=7.0, targets=("v_proj",))
    assert team.lora_for("a", default) == LoraSpec(4, 7.0, ("v_proj",))
    assert team.lora_for("b", default) == LoraSpec(2, 30.0, ("q_proj",))
    assert team.lora_for("c", default) == default
    refused(tmp_path, [{"role": "a", "lora_rank": 4, "lora": {"rank": 4}}], "lora and lora_rank are both given")
    refused(tmp_path, [{"role": "a", "lora_rank": 0}], "'a'", "rank", "at least 1")
    refused(tmp_path, [{"role": r, "adapter": "x", "lora_rank": n} for r, n in (("a", 4), ("b", 8))], "lora_rank")


def test_freeze_and_trainable_are_one_setting(tmp_path):
    data = [{"role": "a", "freeze": True}, {"role": "b", "trainable": False}, {"role": "c", "trainable": True}]
    team = Team.load(write(tmp_path, json.dumps(data)))
    assert team.frozen() == ("a", "b") and team.frozen(["c"]) == ("a", "b", "c") == team.frozen(["all"])
    assert Team.parse(team.to_list()) == team
    with pytest.raises(ConfigError, match="no frozen agent 'd'"):
        team.frozen(["d"])
    refused(tmp_path, [{"role": "a", "freeze": True, "trainable": True}], "leave one of the two out")
    refused(tmp_path, [{"role": "a", "trainable": "no"}], "trainable must be true or false")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("weight_decay", -1, "at least 0"),
        ("max_grad_norm", 0, "above 0"),
        ("optimizer", "sgd", "adamw"),
        ("clip_param", 2, "(0, 1)"),
        ("kl_coef", -0.1, "at least 0"),
        ("entropy_coef", "high", "finite number"),
        ("process_weight", True, "finite number"),
    ],
)
def test_learning_settings_are_checked(tmp_path, key, value, words):
    refused(tmp_path, [{"role": "a", key: value}], key, words)
    shared = [{"role": r, "adapter": "x", key: n} for r, n in (("a", 0.1), ("b", 0.2))]
    if key not in ("optimizer", "process_weight"):  # agents on one adapter may be paid by different weights
        refused(tmp_path, shared, f"different {key}")


def test_an_agent_by_name_and_the_keys_beside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "named_agents.py").write_text(
        "from mafrt import AgentSpec, register_agent\n"
        "@register_agent('strict')\ndef strict():\n    return AgentSpec('judge', prompt='Judge.', temperature=0.2)\n"
        "def plain():\n    return {'role': 'solver', 'lora': {'rank': 2, 'alpha': 4}}\n"
        "def wrong():\n    return 7\ndef broken():\n    raise ValueError('no')\n"
    )
    team = Team.parse([{"agent": "named_agents:plain"}, {"agent": "named_agents:strict", "temperature": 0.5}])
    assert team.names == ("solver", "judge") and team.agent("solver").lora == LoraSpec(2, 4)
    assert team.agent("judge").temperature == 0.5 and team.agent("judge").prompt == "Judge."
    assert Team.parse([{"agent": "strict"}]).names == ("judge",)  # registered once the module was imported
    assert Team.parse(team.to_list()) == team
    refused(tmp_path, [{"agent": "strikt"}], "no agent 'strikt'", "strict")
    refused(tmp_path, [{"agent": "named_agents:wrong"}], "returned a int", "AgentSpec")
    refused(tmp_path, [{"agent": "named_agents:broken"}], "ValueError: no", "named_agents.py")


@pytest.mark.slow
def test_every_team_of_the_page_can_play():
    """The teams of the page are typed as they stand there."""
    page = (PROFILES.parent / "docs" / "team_file.md").read_text(encoding="utf-8")
    teams = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(- .*?)```", page, re.S)]
    assert len(teams) > 1
    for agents in teams:
        # The page leaves out what its paragraph is not about.
        named = [agent for agent in agents if "role" in agent]
        named[-1].setdefault("with_answer", True)
        make_env("math", team=Team.parse(named), workflow="chain").reset(seed=0)


@pytest.mark.parametrize(
    "key", ["lr", "kl_coef", "clip_param", "temperature", "top_k", "max_new_tokens", "lora_rank", "reward_weight"]
)
def test_a_number_of_400_digits_is_no_number_of_a_team(tmp_path, key):
    refused(tmp_path, [{"role": "a", key: 10**400}], "agent 1", "number")
    refused(tmp_path, [{"role": "a", "lora": {"rank": 10**400}}], "agent 1", "whole number")


@pytest.mark.parametrize("name", ["team.json", "team.yaml"])
def test_half_a_character_in_a_team_file_reaches_no_file_and_no_tokenizer(tmp_path, name):
    path = write(tmp_path, '[{"role": "a", "prompt": "p\\ud800", "sees": "\\ud800", "stop": ["\\ud800"]}]', name)
    assert Team.load(path).to_json().encode()
    deep = write(tmp_path, '[{"role": "a", "lora": ' + "[" * 150 + "]" * 150 + "}]", name)
    with pytest.raises(ConfigError, match="nested"):
        Team.load(deep)

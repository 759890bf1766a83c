"""Every workflow with every task source and teams of 1 to 4: a perfect team scores 1, or a refusal names what fits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from mafrt.config.agent import AgentSpec
from mafrt.config.team import Team
from mafrt.core.errors import ConfigError, EnvError
from mafrt.environment.registry import ENVIRONMENTS, make_env, takes
from mafrt.environment.session import Session
from mafrt.envs.code.by_workflow import CODER_TESTER
from mafrt.envs.code.tasks import CodeTask, StdinTest
from mafrt.envs.math import Task
from mafrt.envs.search.questions import Question
from mafrt.envs.search.retrieval import Passage
from mafrt.envs.workflows.registry import WORKFLOWS
from mafrt.scripts.train import main

NAMES = ("ann", "bob", "cyd", "dan")
PROGRAM = "```python\nprint(sum(map(int, input().split())))\n```"
HIDDEN = "4711"
CODE = [CodeTask("c:0", "Read two numbers and print their sum.", stdin=(StdinTest("4000 711\n", f"{HIDDEN}\n"),))]
MATH = [Task("m:0", "What is 3 + 4?", "7")]
PENS = Passage("p", "Box 3", "Box 3 holds 7 pens.")


class Retriever:
    def search(self, query: str, topk: int) -> list[tuple[Passage, float]]:
        return [(PENS, 1.0)]


SOURCES: Mapping[str, tuple[dict[str, Any], str]] = {
    "math": ({"tasks": MATH}, "3 + 4 = 7, so \\boxed{7}."),
    "tasks": ({"tasks": MATH, "reward": lambda text, record: float(record["answer"] in text)}, "It is 7."),
    "search": (
        {"questions": [Question("s:0", "How many pens are in box 3?", ("7",))], "retriever": Retriever()},
        "<answer>7</answer>",
    ),
    "code": ({"tasks": CODE}, PROGRAM),
    "reasoning_gym": ({"name": "leg_counting", "size": 1, "held_out_size": 1}, "<answer>448</answer>"),
}
"""Settings, and the text of an agent that is always right."""
SIZES = {
    "single": (1, 2, 3, 4),
    "multi_turn": (1, 2, 3, 4),
    "chain": (1, 2, 3, 4),
    "tools": (1, 2, 3, 4),
    "router": (1, 2, 3, 4),
    "solver_verifier": (2, 3, 4),
    "vote": (2, 3, 4),
    "debate": (2, 3, 4),
    "pro_con": (2, 3, 4),
    "summary": (3, 4),
    "mixture": (3, 4),
    "mathchat": (3,),
    "search": (3,),
    CODER_TESTER: (1, 2),
}
"""Sizes of the teams that a workflow takes."""
ONLY = {"search": "search", CODER_TESTER: "code"}
"""Workflows that belong to one task source."""
FITS = {
    "solver_verifier": "needs an agent that answers .* and, last in the team, one that judges",
    "vote": "needs at least two agents that answer",
    "debate": "needs at least two agents that answer",
    "pro_con": "needs two debaters",
    "summary": "needs at least two agents that answer beside the last one",
    "mixture": "needs at least two agents that answer beside the last one",
    "mathchat": "is played by three agents .*; take profiles/mathchat.json",
    "search": "is played by three agents .*; take profiles/search.json",
    CODER_TESTER: "by one agent, or by a Coder and a Tester, .*another workflow, such as 'chain'",
}
"""Words of the refusal of a team that does not fit."""


def team_for(workflow: str, size: int) -> Team:
    """The answers of all count, but for the workflows whose roles are fixed."""
    names = NAMES[:size]
    answering = {
        "solver_verifier": names[:-1] or names,
        "mathchat": names[-1:],
        "search": names[-1:],
        CODER_TESTER: names[:1],
    }.get(workflow, names)
    return Team(tuple(AgentSpec(name, with_answer=name in answering) for name in names))


def options_for(workflow: str, size: int, folder: Any) -> dict[str, Any]:
    if workflow == CODER_TESTER:
        return {}
    options: dict[str, Any] = {"workflow": workflow, "horizon": 1 if workflow in ("single", "vote", "summary") else 2}
    if workflow == "router":
        following = dict(zip(NAMES[:size], [*NAMES[1:size], "end"], strict=True))
        (folder / "routes.yaml").write_text(json.dumps({"routes": following}))  # JSON is YAML
        options["routes"] = str(folder / "routes.yaml")
    return options


def played(env: Session, text: str) -> tuple[float | None, set[str], str]:
    """The outcome of an episode in which every agent says `text`, the agents that spoke, and all that they saw."""
    observations, _ = env.reset(seed=1, options={"task": 0})
    spoke: set[str] = set()
    seen: list[str] = []
    for _ in range(50):
        spoke |= observations.keys()
        seen += map(str, observations.values())
        result = env.step(dict.fromkeys(observations, text))
        if result.terminated:
            return result.info.get("outcome"), spoke, "\n".join(seen)
        assert not result.truncated
        observations = result.observations
    raise AssertionError("the episode never ended")


@pytest.mark.cases(24)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("workflow", SIZES)
def test_every_workflow_with_every_source_and_size(workflow, source, tmp_path):
    if source == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
    settings, right = SOURCES[source]
    for size in (1, 2, 3, 4):
        kwargs = {**settings, **options_for(workflow, size, tmp_path), "team": team_for(workflow, size)}
        if workflow == CODER_TESTER and source != "code":
            with pytest.raises(ConfigError, match="no workflow 'coder_tester'"):
                make_env(source, **kwargs, workflow=CODER_TESTER)
        elif size not in SIZES[workflow]:
            with pytest.raises(ConfigError, match=FITS[workflow]) as caught:
                make_env(source, **kwargs)
            assert "\n" not in str(caught.value)
        elif ONLY.get(workflow, source) != source:
            with pytest.raises(ConfigError, match=r"needs the tool 'search'.*tasks that bring it, as train_search"):
                make_env(source, **kwargs)
        else:
            env = make_env(source, **kwargs)
            outcome, spoke, seen = played(env, f"{right}\nVerdict: approve")
            graded = workflow != "pro_con" or size > 2  # two debaters have no jury
            assert outcome == (1.0 if graded else None) and spoke <= set(env.agents)
            assert len(spoke) == size or workflow in ("single", "multi_turn", "search")
            assert HIDDEN not in seen
            assert played(env, "I do not know.")[0] == (0.0 if graded else None)


def test_the_table_holds_every_workflow_and_source():
    assert set(SIZES) == {*WORKFLOWS, CODER_TESTER}
    assert set(SOURCES) == {name for name in ENVIRONMENTS.names() if takes(name, "workflow")}


def test_dsbench_says_why_its_flow_is_fixed(capsys):
    with pytest.raises(EnvError, match=r"no setting 'workflow': every stage .* so the order of turns is fixed"):
        make_env("dsbench", workflow="debate")
    assert main(["--env", "dsbench", "--workflow", "debate"]) == 2
    said = capsys.readouterr().err
    assert "the order of turns is fixed" in said and said.count("\n") == 1

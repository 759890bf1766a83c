"""What `mafrt.X` offers in Python: examples in docstrings, names, representations, single questions."""

from __future__ import annotations

import doctest
import inspect
import json
import runpy
from pathlib import Path

import pytest

import mafrt

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = [
    name for name in mafrt.__all__ if inspect.isclass(getattr(mafrt, name)) or inspect.isfunction(getattr(mafrt, name))
]
PLAIN = {"PlayConfig", "LearnConfig", "TeamConfig", "RunConfig", "CoachConfig", "EngineConfig", "Start", "Provenance",
         "make_coach", "make_algorithm", "Algorithm"}  # fmt: skip
"""Names that the example of another name uses."""


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in PLAIN])
def test_the_example_of_a_public_name_runs(name):
    thing = getattr(mafrt, name)
    found = doctest.DocTestFinder(recurse=False).find(thing, name, globs={"mafrt": mafrt})
    assert sum(len(test.examples) for test in found), f"mafrt.{name} has no example"
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL)
    for test in found:
        said: list[str] = []
        assert runner.run(test, out=said.append).failed == 0, "".join(said)


@pytest.mark.parametrize("name", [name for name in PUBLIC if inspect.isclass(getattr(mafrt, name))])
def test_an_object_says_what_it_is(name):
    kind = getattr(mafrt, name)
    assert kind.__repr__ is not object.__repr__


@pytest.fixture(scope="module")
def base():
    base = mafrt.SharedBase.load("teaching-base")
    for seed, name in enumerate(("reasoner", "actor")):
        base.add_adapter(name, mafrt.LoraSpec(), seed=seed)
    return base


@pytest.mark.slow
def test_a_base_answers_one_prompt_or_several_in_their_order(base):
    chat = [{"role": "user", "content": "3 + 4 ="}]
    one = base.generate("3 + 4 =", max_new_tokens=6, temperature=0)
    assert isinstance(one, str) and one == base.generate(chat, max_new_tokens=6, temperature=0)
    several = base.generate(["9 - 2 =", "3 + 4 ="], max_new_tokens=6, temperature=0)
    assert len(several) == 2 and several[1] == one == base.generate([chat], max_new_tokens=6, temperature=0)[0]
    assert base.generate([]) == []
    assert base.generate("3 + 4 =", seed=1, max_new_tokens=9) == base.generate("3 + 4 =", seed=1, max_new_tokens=9)


def test_answers_follow_the_adapter_as_it_is_now(base):
    name = f"follower_{len(base.records)}"  # of its own in a second try
    base.add_adapter(name, mafrt.LoraSpec(), seed=0)
    before = base.generate("3 + 4 =", name, max_new_tokens=8, temperature=0)
    assert before == base.generate("3 + 4 =", max_new_tokens=8, temperature=0)  # a fresh adapter changes nothing
    import torch

    with torch.no_grad():
        for parameter in base.adapter_parameters(name):
            parameter.normal_(generator=torch.Generator().manual_seed(0))
    base.bump(name)
    assert base.generate("3 + 4 =", name, max_new_tokens=8, temperature=0) != before
    assert base.generate("3 + 4 =", "reasoner", max_new_tokens=8, temperature=0) == before


def test_a_team_speaks_in_turn_and_one_agent_alone(base):
    team = mafrt.Team((mafrt.AgentSpec("reasoner"), mafrt.AgentSpec("actor", with_answer=True)))
    said = team.chat(base, "Tom has 3 pens and buys 4. How many?", max_new_tokens=6, temperature=0)
    assert list(said) == ["reasoner", "actor"]
    alone = team.chat(base, "hello", "reasoner", max_new_tokens=6, temperature=0)
    assert alone == {"reasoner": base.generate("hello", "reasoner", max_new_tokens=6, temperature=0)}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda base: base.generate("x", "stranger"), "stranger"),
        (lambda base: base.generate("x", max_tokens=3), "max_tokens"),
        (lambda base: base.generate("x", temperature=-1), "temperature"),
        (lambda base: mafrt.Team.of(["actor"]).chat(base, "x", "nobody"), "nobody"),
        (lambda base: mafrt.Team.of(["writer"]).chat(base, "x"), "writer"),
        (lambda base: mafrt.Team.of(["actor"]).chat(base, [{"role": "user", "content": "x"}]), "name one agent"),
        (lambda base: mafrt.TrainConfig.of(num_generations=4), "'n_samples'"),
        (lambda base: mafrt.TrainConfig.of(use_wandb=True), "report_to"),
    ],
)
def test_wrong_questions_are_one_sentence(base, wrong, said):
    with pytest.raises(mafrt.MafrtError) as caught:
        wrong(base)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.ci
def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    cells = json.loads((ROOT / "examples" / "team_in_a_notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    code = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    (tmp_path / "cells.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    seen = runpy.run_path("cells.py")
    assert seen["summary"].iterations == 2 and (tmp_path / "my_team" / "actor" / "adapter_config.json").is_file()
    assert "iteration 2/2" in capsys.readouterr().out

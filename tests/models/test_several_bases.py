"""A team on two bases of different families and tokenizers: one copy of each, and learning where it belongs."""

from __future__ import annotations

import inspect
import json
import shutil
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_models import CHARS, CHAT_TEMPLATE, SPECIAL, tiny_base, tiny_model, tiny_tokenizer
from openai import OpenAI
from toy import Digits, settings

from mafrt.config.agent import AgentSpec, LoraSpec
from mafrt.config.team import Team
from mafrt.core.errors import ConfigError, MafrtError, ModelError
from mafrt.core.types import SamplingParams, StepResult
from mafrt.environment.chat_api.server import ChatServer
from mafrt.models.load_bases import load_bases, models_of
from mafrt.models.outside_text import answer_text
from mafrt.models.several_bases import SeveralBases
from mafrt.models.shared_base import SharedBase
from mafrt.runners.build import voices_of
from mafrt.runners.identity import Provenance
from mafrt.runners.on_policy import OnPolicy
from mafrt.scripts.serving.answers import TeamAnswers
from mafrt.scripts.serving.engine_queue import EngineQueue
from mafrt.scripts.serving.trained_team import TrainedTeam
from mafrt.storage.load_path import resolve

pytestmark = pytest.mark.takes(slow=20)

PAIRS = tuple(a + b for a in string.digits for b in string.digits)
LLAMA_SPECIAL = ("<s>", "</s>", "<pad>", "<unk>")
LLAMA_TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "


def llama_tokenizer() -> Any:
    """Two digits are one token, other characters one each: other ids, other lengths, another template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate((*LLAMA_SPECIAL, *PAIRS, *CHARS))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[0-9]{2}|[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.chat_template = LLAMA_TEMPLATE
    return tokenizer


def llama() -> Any:
    size = len(LLAMA_SPECIAL) + len(PAIRS) + len(CHARS)
    return tiny_model("llama", seed=1, width=48, vocab_size=size, pad_token_id=2, eos_token_id=1, bos_token_id=0)


TEAM = Team(
    (
        AgentSpec("first"),
        AgentSpec("second", model="llama"),
        AgentSpec("third", model="llama"),
    )
)


class Three(Digits):
    """`Digits` with a third speaker, and a prompt of digits that the two tokenizers cut differently."""

    agents = ("first", "second", "third")

    def step(self, actions: dict[str, str]) -> StepResult:
        [(name, text)] = actions.items()
        self.said += text
        if name != "third":
            follower = "second" if name == "first" else "third"
            return StepResult({follower: f"{self.word} 1234 {text}"}, {}, False, False, {})
        whole = sum(c in string.digits for c in self.said) / max(len(self.said), 1)
        return StepResult({}, {}, True, False, {"outcome": whole})


def bases() -> SeveralBases:
    parts = {"qwen": tiny_base("qwen3"), "llama": SharedBase(llama(), llama_tokenizer(), "tiny-llama")}
    where = {"first": "qwen", "second": "llama", "third": "llama"}
    return SeveralBases(parts, where, where)


def make(run_dir: Path | None = None, load_path: Path | None = None, **changes: Any) -> OnPolicy:
    torch.set_num_threads(1)
    changed = {"iterations": 3, "eval_episodes": 0, "save_interval": 1, "n_rollout_threads": 8, **changes}
    resume = resolve(load_path) if load_path else None
    return OnPolicy(Three(), TEAM, bases(), settings(**changed), run_dir=run_dir, provenance=Provenance(resume))


def weights(runner: OnPolicy) -> dict[str, bytes]:
    """The bytes of every adapter."""
    return {
        name: b"".join(p.detach().numpy().tobytes() for p in runner.base.adapter_parameters(name))
        for name in TEAM.adapters
    }


def frozen(runner: OnPolicy) -> list[bytes]:
    """The bytes of all weights of the bases that are no adapter's."""
    own = {id(p) for part in runner.base.parts.values() for n in part.adapters for p in part.adapter_parameters(n)}
    return [
        p.detach().numpy().tobytes()
        for part in runner.base.parts.values()
        for p in part.model.parameters()
        if id(p) not in own
    ]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ppo", "mappo", "happo", "grpo"])
def test_three_iterations_move_only_what_learns(algorithm):
    changes = {"n_samples": 4, "kl_coef": 0.01} if algorithm == "grpo" else {}
    runner = make(algorithm=algorithm, freeze=("third",), **changes)
    before, base = weights(runner), frozen(runner)
    runner.run()
    after = weights(runner)
    assert {name for name in before if before[name] != after[name]} == {"first", "second"}
    assert frozen(runner) == base


@pytest.mark.slow
def test_one_copy_of_each_base_however_many_agents_sit_on_it(tmp_path):
    for name, model, tokenizer in (("q", tiny_model(), tiny_tokenizer()), ("l", llama(), llama_tokenizer())):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    one, other = str(tmp_path / "q"), str(tmp_path / "l")
    same = f"{tmp_path}/./l"
    team = Team(tuple(AgentSpec(f"a{i}", model=m) for i, m in enumerate((None, other, same, other, one))))
    assert set(models_of(team, one).values()) == {one, other}
    loaded = load_bases(team, one)
    assert list(loaded.parts) == [one, other]
    assert [loaded.of_agent(f"a{i}") is loaded.parts[other] for i in range(5)] == [False, True, True, True, False]
    # A run's own base on which no agent sits is not loaded, and a team on one base has a plain one.
    alone = load_bases(Team((AgentSpec("a", model=other), AgentSpec("b", model=same))), "teaching-base")
    assert isinstance(alone, SharedBase) and alone.hidden_size == 48


@pytest.mark.slow
def test_every_row_is_computed_by_its_own_base():
    runner = make(algorithm="ppo", kl_coef=0.01)
    runner.assign_adapters()
    batch = runner.collect()
    turns = [turn for episode in batch.episodes for turn in episode.turns]
    computed = runner.updater.learner.logprobs(turns)
    runner.updater.critic.annotate(batch.episodes, dict.fromkeys(TEAM.names, 1.0), values=True, reference=True)
    for turn, own in zip(turns, computed, strict=True):
        part = runner.base.of_agent(turn.agent)
        text = answer_text(part.tokenizer, turn.action_ids, {part.tokenizer.eos_token_id})
        assert text == turn.text
        ids = torch.tensor([turn.prompt_ids + turn.action_ids])
        with torch.no_grad():
            bare = part.model(ids).logits[0, len(turn.prompt_ids) - 1 : -1].log_softmax(-1)
        expected = bare.gather(1, torch.tensor(turn.action_ids)[:, None])[:, 0].tolist()
        # The adapters are fresh, so sampler, learner and reference all equal the bare model of the agent's family.
        for found in (own, turn.logprobs, turn.ref_logprobs):
            assert found == pytest.approx(expected, abs=2e-4)
        assert len(turn.values) == len(turn.action_ids)


@pytest.mark.slow
def test_the_central_critic_reads_a_transcript_in_its_own_tokens():
    runner = make(algorithm="mappo")
    runner.assign_adapters()
    episode = runner.collect().episodes[0]
    part = runner.base.parts["llama"]
    from mafrt.training.critic import central_prompts

    tokenizers = {name: runner.base.of_agent(name).tokenizer for name in TEAM.names}
    prompts = central_prompts([episode], part.tokenizer, 256, tokenizers)
    seen = part.tokenizer.decode(prompts[0][1])
    assert episode.info["task"] in seen and f"first: {episode.turns[0].text}" in seen and seen.endswith("second:")


@pytest.mark.slow
@pytest.mark.ci
def test_resume_is_exact(tmp_path):
    whole = make(tmp_path / "whole", algorithm="ppo")
    whole.run()
    part = make(tmp_path / "part", algorithm="ppo", iterations=2)
    part.run()
    resumed = make(tmp_path / "part", tmp_path / "part", algorithm="ppo")
    resumed.run()
    assert weights(resumed) == weights(whole)
    assert (tmp_path / "part/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()
    heads = [
        [
            p.detach().numpy().tobytes()
            for c in runner.updater.critic.parts.values()
            for p in c.head.state_dict().values()
        ]
        for runner in (whole, resumed)
    ]
    assert heads[0] == heads[1]
    record = json.loads((tmp_path / "whole/run.json").read_text())
    assert record["bases"]["llama"]["fingerprint"] != record["base"]["fingerprint"]


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("rule", [{}, {"algorithm": "dr_mas", "n_samples": 4, "kl_in": "reward"}])
def test_adapters_of_each_base_are_kept_near_those_that_the_run_started_from(rule, tmp_path):
    make(tmp_path / "before").run()
    (tmp_path / "adapters").mkdir()
    for name in TEAM.adapters:
        shutil.copytree(resolve(tmp_path / "before").path / name, tmp_path / "adapters" / name)
    kept = {"reference": "initial", "kl_coef": 0.2, "ppo_epoch": 1, "num_mini_batch": 1, **rule}
    whole = make(tmp_path / "whole", tmp_path / "adapters", **kept)
    start = weights(whole)
    whole.run()
    make(tmp_path / "cut", tmp_path / "adapters", **{**kept, "iterations": 2}).run()
    resumed = make(tmp_path / "cut", tmp_path / "cut", **kept)
    resumed.run()
    assert weights(resumed) == weights(whole) != start
    assert (tmp_path / "cut/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()
    lines = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").open()]
    for name in TEAM.adapters:
        assert abs(lines[0][f"ref_kl/{name}"]) < 1e-5 < abs(lines[2][f"ref_kl/{name}"])
    near = make(tmp_path / "base", tmp_path / "adapters", **{**kept, "reference": "base", "iterations": 1})
    near.run()
    [line] = [json.loads(line) for line in (tmp_path / "base/metrics.jsonl").open()]
    assert max(abs(line[f"ref_kl/{name}"]) for name in TEAM.adapters) > 1e-3


@pytest.mark.slow
def test_async_rollout_keeps_a_copy_on_the_same_base():
    runner = make(algorithm="ppo", async_steps=1, iterations=2)
    runner.run()
    assert runner.base.of_adapter("second@sampler") is runner.base.parts["llama"]


def test_what_is_done_with_one_adapter_is_done_by_its_base():
    """With the signature of the base's own method, and also for an adapter that was put on a base directly."""
    base = bases()
    llama_base = base.parts["llama"]
    base.add_adapter("second", LoraSpec(rank=2), seed=0)
    llama_base.add_adapter("guest", LoraSpec(rank=2), seed=1)
    base.copy_adapter("guest", "copy")
    assert list(llama_base.records) == list(base.adapters) == ["second", "guest", "copy"]
    for method in (name for name, value in vars(SeveralBases).items() if hasattr(value, "__wrapped__")):
        forwarded, own = (inspect.signature(getattr(kind, method)) for kind in (SeveralBases, SharedBase))
        assert forwarded == own, method
    base.load_adapter_state("copy", base.adapter_state("guest"))
    base.bump("copy")
    assert base.versions["copy"] == llama_base.versions["copy"] == 2
    with pytest.raises(ConfigError, match="'nobody'"):
        base.bump("nobody")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"algorithm": "qmix", "n_samples": 4}, ("2 bases", "mixer", "ppo")),
        ({"algorithm": "cory"}, ("swaps the adapters", "ppo")),
        ({"algorithm": "spin", "n_samples": 2}, ("2 bases", "learns pairs on one base", "ppo")),
    ],
)
def test_what_cannot_be_exact_is_refused(changes, words):
    team = Team(tuple(a for a in TEAM.agents if a.name != "third"))
    where = {"first": "qwen", "second": "llama"}
    parts = bases().parts
    with pytest.raises(ConfigError) as caught:
        OnPolicy(Digits(), team, SeveralBases(parts, where, where), settings(**changes))
    said = str(caught.value)
    assert all(word in said for word in words) and "\n" not in said, said


def test_a_base_without_a_chat_template_or_without_a_folder_is_refused_before_loading(tmp_path):
    for name, template in (("good", CHAT_TEMPLATE), ("plain", None)):
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = template
        tiny_model().save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    good = str(tmp_path / "good")
    for model, words in ((tmp_path / "plain", "no chat template"), (tmp_path / "absent", "found no model folder")):
        team = Team((AgentSpec("a"), AgentSpec("b", model=str(model))))
        with pytest.raises(ModelError, match=words) as caught:
            load_bases(team, good)
        assert str(model) in str(caught.value) and "\n" not in str(caught.value)


def test_agents_of_one_adapter_name_one_model():
    with pytest.raises(MafrtError, match="different model settings"):
        Team((AgentSpec("a", adapter="x", model="m"), AgentSpec("b", adapter="x", model="n")))
    assert SPECIAL  # the two vocabularies start with different special tokens
    assert tiny_tokenizer()("12").input_ids != llama_tokenizer()("12").input_ids


@pytest.mark.slow
@pytest.mark.ci
def test_from_the_command_line(tmp_path, monkeypatch, capsys):
    """Train, resume and evaluate a mixed team; `mafrt info` says who sits where."""
    from mafrt.scripts import evaluate, export, info, show, train

    monkeypatch.chdir(tmp_path)
    llama().save_pretrained("llama")
    llama_tokenizer().save_pretrained("llama")
    Path("closers.py").write_text(  # a name that no package has
        "from mafrt import AgentSpec, register_agent\n\n\n"
        "@register_agent('closer')\ndef closer():\n    return AgentSpec('second', prompt='Close.', model='llama')\n"
    )
    Path("team.yaml").write_text("- {role: first, lora_rank: 2}\n- {agent: 'closers:closer', temperature: 0.9}\n")
    assert info.main(["team.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "2 bases, one copy of each" in shown and "together" in shown
    words = ["--env", "toy:Digits", "--profile_path", "team.yaml", "--run_dir", "run", "--iterations", "1"]
    words += ["--n_rollout_threads", "4", "--max_new_tokens", "4", "--eval_episodes", "0", "--dtype", "float32"]
    assert train.main([*words, "--threads", "1"]) == 0
    assert "Loading teaching-base, llama" in capsys.readouterr().out
    saved = json.loads(Path("run/checkpoints/step_000001/second/adapter_config.json").read_text())
    assert Path(saved["base_model_name_or_path"]).name == "llama"
    assert train.main(["--load_path", "run", "--iterations", "2"]) == 0
    evaluated = ["--load_path", "run", "--k", "1", "--threads", "1", "--record_dir", "kept"]
    assert evaluate.main(evaluated) == 0 and show.main(["kept", "--episode", "0"]) == 0
    assert "avg@1" in capsys.readouterr().out
    assert export.main(["--load_path", "run", "--output", "out"]) == 0
    assert "llama" in Path("out/second/README.md").read_text()


@pytest.mark.slow
def test_a_served_team_streams_in_each_agents_own_tokens():
    """The text of the pieces is the whole answer, for agents of either tokenizer."""
    runner = make()
    base, team = runner.base, runner.team
    sampling = {name: SamplingParams(max_new_tokens=6) for name in team.names}
    queue = EngineQueue(runner.engine, settle_s=0.0)
    answers = TeamAnswers()
    answers.ready(TrainedTeam(team, base, queue, sampling, voices_of(base, team, 128), "auto"), None)
    server = ChatServer(answers)
    ask = {"messages": [{"role": "user", "content": "12"}], "seed": 3}
    with OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=300) as client:
        for name in team.names:
            whole = client.chat.completions.create(model=name, **ask).choices[0].message.content
            chunks = client.chat.completions.create(model=name, stream=True, **ask)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole != ""
    server.close()
    queue.close()
    runner.close()

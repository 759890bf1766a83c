"""Adapters of scope `action` (activated LoRA): where they act, in learning, in sampling and in PEFT."""

from __future__ import annotations

import json

import pytest
import torch
from helpers_models import add_random_adapter, tiny_base

from mafrt.config.agent import AgentSpec, LoraSpec
from mafrt.config.team import Team
from mafrt.config.train_config import EngineConfig, LearnConfig, TeamConfig
from mafrt.core.errors import CheckpointError, ConfigError
from mafrt.core.types import Request, SamplingParams, Turn
from mafrt.engines.checks import check_engine
from mafrt.engines.local.engine import LocalEngine
from mafrt.engines.local.transcript_cache import TranscriptCache
from mafrt.models.invocation import active_from, invocation_of
from mafrt.models.kv_cache import prefill
from mafrt.rollout.prompts import encode_prompt
from mafrt.scripts import export, train_math
from mafrt.training.learner import Learner
from mafrt.training.policy_objective import Objective

AGENTS = ("ann", "bob")
STORY = "The red fox sat on the box and ate an apple."


def scoped_base(kind="qwen3", scope="action", **changes):
    base = tiny_base(kind, **changes)
    for number, name in enumerate(AGENTS):
        add_random_adapter(base, name, seed=number, scope=scope)
    return base


def requests(base, tokens=6, samples=2):
    """Both agents over one transcript, and over another one each."""
    asked = [(name, f"{STORY}{own}") for name in AGENTS for own in ("", f" {name}: hm")]
    return [
        Request(encode_prompt(base.tokenizer, "", said), name, SamplingParams(max_new_tokens=tokens), seed)
        for name, said in asked
        for seed in range(samples)
    ]


def turns_of(asked, answers):
    return [
        Turn(r.adapter, list(r.prompt_ids), a.ids, a.logprobs, a.stop, a.text, 0, 0, 0, advantages=[1.0] * len(a.ids))
        for r, a in zip(asked, answers, strict=True)
    ]


def learner_of(base):
    return Learner(base, Team.of(AGENTS), LearnConfig(lr=1e-2, ppo_epoch=1), Objective(), seed=1)


def test_the_adapter_begins_with_the_last_invocation():
    base = tiny_base()
    begin = invocation_of(base.tokenizer, "tiny")
    assert base.tokenizer.decode(begin) == "<|im_start|>assistant\n"
    prompt = encode_prompt(
        base.tokenizer, "", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    )
    assert active_from(prompt, begin) == len(prompt) - len(begin)
    assert active_from([5, 6, 7], begin) == 2  # no invocation: the token whose state predicts the action
    assert active_from([9, 8, 9, 8, 7], (9, 8)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("decoding", ["lean", "expanded"])
def test_sampler_and_trainer_agree(decoding):
    base = scoped_base()
    asked = requests(base)
    answers = LocalEngine(base, decoding=decoding).generate(asked)
    turns = turns_of(asked, answers)
    for turn, ours in zip(turns, learner_of(base).logprobs(turns), strict=True):
        assert torch.allclose(torch.tensor(ours), torch.tensor(turn.logprobs), atol=1e-4)
        # By hand: the base up to the invocation, the adapter from there on.
        ids = turn.prompt_ids + turn.action_ids
        start = active_from(turn.prompt_ids, base.records[turn.agent].invocation)
        index = torch.full((1, len(ids)), base.adapter_index(turn.agent))
        index[0, :start] = -1
        states = base.forward(torch.tensor([ids]), None, index)[0, len(turn.prompt_ids) - 1 : -1]
        expected, _ = base.token_logprobs(states, torch.tensor(turn.action_ids))
        assert torch.allclose(torch.tensor(ours), expected.detach(), atol=1e-5)


@pytest.mark.slow
def test_shared_transcripts_do_not_change_gradients():
    """Both agents' rows of one transcript are one family in a packed pass; alone they are not."""
    base = scoped_base()
    asked = requests(base)
    turns = turns_of(asked, LocalEngine(base).generate(asked))
    learner = learner_of(base)

    def gradients(batches):
        for name in AGENTS:
            for parameter in base.adapter_parameters(name):
                parameter.grad = None
        for batch in batches:
            learner._logprobs(learner._collate(batch, learner.adapter_of), AGENTS)[0].sum().backward()
        return [p.grad.clone() for name in AGENTS for p in base.adapter_parameters(name)]

    for together, alone in zip(gradients([turns]), gradients([[turn] for turn in turns]), strict=True):
        assert torch.allclose(together, alone, rtol=1e-3, atol=1e-4)
        assert together.abs().max() > 0


def test_the_transcript_is_the_bases_own():
    """Keys and values before the invocation do not depend on the agent; those of the invocation do."""
    base = scoped_base()
    prompt = encode_prompt(base.tokenizer, "", STORY)
    start = base.active_from("ann", prompt)
    _, plain = prefill(base, [prompt], [-1])
    _, kv = TranscriptCache(base).prefill([prompt] * 2, [base.adapter_index(name) for name in AGENTS], [start] * 2)
    for ours, expected in zip((*kv.keys, *kv.values), (*plain.keys, *plain.values), strict=True):
        assert torch.allclose(ours[:, :, :start], expected[:, :, :start], atol=1e-5)
        assert not torch.allclose(ours[0, :, start:], ours[1, :, start:], atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("decoding", ["lean", "expanded"])
def test_a_transcript_is_read_once_for_all_agents_and_turns(decoding):
    base = scoped_base()
    engine = LocalEngine(base, decoding=decoding)
    size = len(base.records["ann"].invocation)

    def ask(text):
        prompt = encode_prompt(base.tokenizer, "", text)
        greedy = SamplingParams(max_new_tokens=5, temperature=0.0)
        asked = [Request(prompt, name, greedy, 0) for name in AGENTS]
        before = engine.transcripts.computed
        answers = engine.generate(asked)
        fresh = LocalEngine(scoped_base(), decoding=decoding).generate(asked)
        assert [answer.ids for answer in answers] == [answer.ids for answer in fresh]
        return len(prompt) - size, engine.transcripts.computed - before

    first, computed = ask(STORY)
    assert computed == first + len(AGENTS) * size
    # The next turn adds to the transcript: only from the first difference on is anything read.
    longer, computed = ask(STORY + " It was red.")
    assert longer > first and computed <= longer - len(STORY) + len(AGENTS) * size
    engine.forget()
    whole, computed = ask(STORY)
    assert computed == whole + len(AGENTS) * size


def test_transcripts_that_begin_alike_share_their_beginning():
    base = scoped_base()
    engine = LocalEngine(base)
    prompts = [encode_prompt(base.tokenizer, "", STORY + own) for own in ("", "!", "! So?", " Why?")]
    sampling = SamplingParams(max_new_tokens=3)
    asked = [Request(prompt, "ann", sampling, 7) for prompt in prompts]
    asked.append(Request(prompts[0], None, sampling, 7))  # the bare base reads its prompt by itself
    answers = engine.generate(asked)
    size = len(base.records["ann"].invocation)
    ends = sum(len(prompt) - len(prompts[0]) for prompt in prompts)
    assert engine.transcripts.computed <= len(prompts[0]) + ends + 4 * (2 + size)
    turns = turns_of(asked[:4], answers[:4])
    for turn, ours in zip(turns, learner_of(base).logprobs(turns), strict=True):
        assert torch.allclose(torch.tensor(ours), torch.tensor(turn.logprobs), atol=1e-4)
    alone = LocalEngine(scoped_base()).generate(asked[-1:])[0]
    assert answers[-1].ids == alone.ids


def test_role_prompts_at_the_end_let_agents_share_the_transcript():
    base = scoped_base()
    tokenizer, size = base.tokenizer, len(base.records["ann"].invocation)
    computed = {}
    for at in ("start", "end"):
        engine = LocalEngine(base)
        prompts = [encode_prompt(tokenizer, f"You are {name}.", STORY, at) for name in AGENTS]
        engine.generate([Request(p, n, SamplingParams(2), 0) for p, n in zip(prompts, AGENTS, strict=True)])
        computed[at] = engine.transcripts.computed
    assert tokenizer.decode(prompts[0]).count(f"{STORY}\n\nYou are ann.<|im_end|>") == 1
    assert computed["start"] - computed["end"] >= len(STORY) - 2 * size
    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "Hi"}]
    assert encode_prompt(tokenizer, "Role.", own, "end") == encode_prompt(tokenizer, "", own)
    team = Team((AgentSpec("a", "Be a.", prompt_at="end", lora=LoraSpec(scope="action")), AgentSpec("b", "Be b.")))
    assert Team.parse(team.to_list()) == team
    assert "prompt_at" not in team.to_list()[1]
    with pytest.raises(ConfigError, match="choose one of start, end"):
        AgentSpec("a", prompt_at="middle")


def test_the_cache_of_transcripts_has_a_limit():
    base = scoped_base()
    cache = TranscriptCache(base, max_bytes=1)
    prompt = encode_prompt(base.tokenizer, "", STORY)
    start = base.active_from("ann", prompt)
    for _ in range(2):  # nothing is kept, so that all is read again
        before = cache.computed
        cache.prefill([prompt], [0], [start])
        assert cache.computed - before == len(prompt)


@pytest.mark.slow
def test_peft_computes_the_same_from_the_exported_folder(tmp_path):
    import copy

    from helpers_models import tiny_model
    from peft import PeftModel

    base = scoped_base()
    base.save_adapter("ann", tmp_path / "ann")
    config = json.loads((tmp_path / "ann" / "adapter_config.json").read_text())
    assert config["alora_invocation_tokens"] == list(base.records["ann"].invocation)
    peft = PeftModel.from_pretrained(copy.deepcopy(tiny_model()), tmp_path / "ann").eval()
    ids = torch.tensor([[*encode_prompt(base.tokenizer, "Be kind.", STORY), 20, 30, 40]])
    index = torch.full(ids.shape, base.adapter_index("ann"))
    index[:, : base.active_from("ann", ids[0].tolist())] = -1
    with torch.no_grad():
        theirs = peft(input_ids=ids).logits
        ours = base.logits(base.forward(ids, None, index))
    assert torch.allclose(ours, theirs, atol=1e-4)
    # It comes back with its scope.
    twin = tiny_base()
    twin.load_adapter("ann", tmp_path / "ann")
    assert twin.records["ann"].invocation == base.records["ann"].invocation
    with pytest.raises(CheckpointError, match=r"scope action .*expected all"):
        scoped_base(scope="all").load_adapter("ann", tmp_path / "ann")


def test_copies_keep_the_scope():
    base = scoped_base()
    base.copy_adapter("ann", "ann-twin")
    assert base.records["ann-twin"].invocation == base.records["ann"].invocation


def test_the_setting():
    assert TeamConfig(adapter_scope="action").lora == LoraSpec(scope="action")
    assert AgentSpec("a", adapter_scope="action").lora_shape(LoraSpec(rank=3)) == LoraSpec(rank=3, scope="action")
    with pytest.raises(ConfigError, match="choose one of all, action"):
        TeamConfig(adapter_scope="turn")
    base = tiny_base()
    base.tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(ConfigError, match=r"begins an answer with ''"):
        base.add_adapter("ann", LoraSpec(scope="action"), seed=0)


def test_engines_that_apply_adapters_everywhere_are_refused():
    with pytest.raises(ConfigError, match="'a' has adapter_scope action, but engine vllm"):
        check_engine(EngineConfig(engine="vllm"), {"a": 8}, {"a": ["q_proj"]}, ["a"])
    check_engine(EngineConfig(), {"a": 8}, {"a": ["q_proj"]}, ["a"])


@pytest.mark.slow
@pytest.mark.ci
def test_a_run_with_it(tmp_path, capsys):
    """Training, resume, and export from the command line."""
    run = tmp_path / "run"
    words = "--iterations 1 --n_rollout_threads 8 --max_new_tokens 8 --ppo_epoch 1 --threads 1 --coach rules"
    words += " --profile_path profiles/quickstart_math.json --eval_episodes 0 --adapter_scope action"
    assert train_math.main([*words.split(), "--run_dir", str(run)]) == 0
    assert train_math.main(["--load_path", str(run), "--iterations", "2", "--adapter_scope", "all"]) == 2
    assert "found an adapter of scope action" in capsys.readouterr().err
    assert train_math.main(["--load_path", str(run), "--iterations", "2"]) == 0
    assert "adapter_scope: action" in (run / "args.yaml").read_text()
    whole = tmp_path / "whole_run"
    assert train_math.main([*words.replace("iterations 1", "iterations 2").split(), "--run_dir", str(whole)]) == 0
    assert (run / "episodes.jsonl").read_bytes() == (whole / "episodes.jsonl").read_bytes()
    for name in ("reasoner", "actor"):
        files = [folder / "checkpoints" / "step_000002" / name / "adapter_model.safetensors" for folder in (run, whole)]
        assert files[0].read_bytes() == files[1].read_bytes()
    assert export.main([str(run), "--output", str(tmp_path / "team")]) == 0
    assert f"mafrt serve_team {run}" in capsys.readouterr().out
    assert export.main([str(run), "--output", str(tmp_path / "whole"), "--merged"]) == 2
    assert "leave --merged out" in capsys.readouterr().err and not (tmp_path / "whole").exists()

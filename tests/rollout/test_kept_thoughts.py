"""`--keep_thoughts`: an agent's own earlier turns stand in its prompt as they were sampled."""

from __future__ import annotations

import itertools
import json
import string
from concurrent.futures import Future

import pytest
from helpers_models import CHAT_TEMPLATE, tiny_base, tiny_tokenizer
from toy import make

from mafrt.config.team import Team
from mafrt.core.errors import ConfigError
from mafrt.core.records import pack_turn, unpack_turn
from mafrt.core.types import Completion, SamplingParams, Start, StepResult
from mafrt.engines.scripted import ScriptedEngine
from mafrt.environment.base import Env
from mafrt.environment.chat_api.completions import parse_call
from mafrt.rollout.kept_thoughts import KeptAnswers, own_turns
from mafrt.rollout.player import Player
from mafrt.rollout.prompts import AgentTokenizer, encode_prompt
from mafrt.scripts.serving.answers import TeamAnswers
from mafrt.scripts.serving.trained_team import TrainedTeam
from mafrt.training.batch import join

STRIPS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}"
    "{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
)
ASKS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
OPENS = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
# Qwen3 puts an empty thought into its last answers, and DeepSeek's strips blanks and has no line ends.
EMPTY = STRIPS.replace("{{ m.content.split", "<think>\n\n</think>\n\n{{ m.content.split")
DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>{{ m.content.split('</think>')[-1] | trim }}"
    "<|im_end|>{% else %}{{ m.role }}{{ m.content | trim }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|><think>\n{% endif %}"
)
KEEPS = CHAT_TEMPLATE.replace("{% for", "{# keeps <think> #}{% for", 1)
TEMPLATES = {
    "strips": STRIPS + ASKS, "opens": STRIPS + OPENS, "opens, keeps": KEEPS.replace(ASKS, OPENS), "keeps": KEEPS,
    "empty": EMPTY + ASKS, "empty, opens": EMPTY + OPENS, "deepseek": DEEPSEEK,
}  # fmt: skip


def thinking(template, **names):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = template
    return tokenizer


class Asks(Env):
    """Three questions to ann in one chat; bob answers a text in between. `cut`: the oldest question is forgotten."""

    agents = ("ann", "bob")
    bounded = True
    cut = False

    def reset(self, seed=None, options=None):
        self.chat, self.heard = [{"role": "user", "content": "one?"}], []
        return {"ann": list(self.chat)}, {}

    def step(self, actions):
        [(name, text)] = actions.items()
        self.heard.append(text)
        if name == "bob":
            return StepResult({"ann": list(self.chat)}, {}, False, False, {})
        self.chat += [{"role": "assistant", "content": text}, {"role": "user", "content": f"{len(self.heard)}?"}]
        if self.cut and len(self.chat) > 4:
            del self.chat[:2]
        if len(self.heard) > 4:
            return StepResult({}, {"ann": 1.0}, True, False, {})
        return StepResult({"bob": "and you?"}, {}, False, False, {})


def played(template, keep, answers=None, env=Asks, tokens=300, **settings):
    tokenizer = thinking(template)
    begins = "" if template.rstrip("{% endif}").rstrip().endswith("<think>") else "<think>"
    said = answers or [f"{begins}hm {n}</think>\n\nsay {n}" for n in range(3)]
    engine = ScriptedEngine({"ann": said, "bob": ["fine"]}, tokenizer)
    how = dict.fromkeys(env.agents, SamplingParams(max_new_tokens=tokens))
    player = Player(engine, tokenizer, Team.of(env.agents), how, 4000, keep_thoughts=keep, **settings)
    starts = iter([Start("e", "g", reset_seed=0, seed=0)])
    [episode], _ = player.play([env()], lambda slot, done: next(starts, None))
    own = [turn for turn in episode.turns if turn.agent == "ann"]
    return tokenizer, own, episode


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tokens", [300, 10])
def test_the_turns_stand_in_the_prompt_as_they_were_sampled(name, tokens):
    tokenizer, own, _ = played(TEMPLATES[name], True, tokens=tokens)
    assert {turn.stop for turn in own} == {"eos" if tokens == 300 else "length"}
    for before, after in itertools.pairwise(own):
        whole = before.prompt_ids + before.action_ids
        assert after.prompt_ids[: len(whole)] == whole
    text = tokenizer.decode(own[2].prompt_ids)
    assert text.count("hm 0") == text.count("hm 1") == 1
    assert "<|im_end|><|im_end|>" not in text and text.count("<|im_end|>") >= 2
    # What the template opens for an answer is at the end of each prompt.
    assert text.endswith(tokenizer.decode(own[0].prompt_ids)[-12:])
    assert join(own, ["ann"] * 3) == [[0, 1, 2]]


@pytest.mark.parametrize("name", TEMPLATES)
def test_without_the_flag_the_template_says(name):
    tokenizer, own, _ = played(TEMPLATES[name], False)
    assert "hm" not in tokenizer.decode(own[2].prompt_ids)
    tokenizer, raw, _ = played(TEMPLATES[name], False, reasoning="off")
    assert ("hm" in tokenizer.decode(raw[2].prompt_ids)) == ("keeps" in name)
    for turns in (own, raw):
        tokens = [turn.prompt_ids + turn.action_ids for turn in turns]
        rows = join(turns, ["ann"] * 3)
        assert sorted(n for row in rows for n in row) == [0, 1, 2]
        assert all(tokens[row[-1]][: len(tokens[n])] == tokens[n] for row in rows for n in row)


def test_others_and_the_environment_hear_no_thoughts():
    class Hears(Asks):
        def step(self, actions):
            assert "hm" not in str(actions)
            return super().step(actions)

    _, _, episode = played(TEMPLATES["opens"], True, env=Hears)
    assert len(episode.turns) == 5


def test_a_history_that_is_cut_keeps_the_turns_that_are_left():
    class Cut(Asks):
        cut = True

    tokenizer, own, _ = played(STRIPS + OPENS, True, env=Cut)
    text = tokenizer.decode(own[2].prompt_ids)
    assert "hm 0" not in text and text.count("hm 1") == 1


@pytest.mark.parametrize(("said", "written"), [
    ('<think>hm</think>look\n<tool_call>\n{"name": "find", "arguments": {"n": "3", "b": true}}\n</tool_call>',
     'look<tool_call>{"arguments": {"b": true, "n": 3}, "name": "find"}</tool_call>'),
    ("<think>hm</think>\n\n fine \n", "fine"),
    ("<think>hm</think>", ""),
    ("<think>a</think>x<think>b</think>y", "xy"),
])  # fmt: skip
def test_a_turn_is_known_however_a_client_writes_it(said, written):
    class Rewrites(Asks):
        def step(self, actions):
            result = super().step(actions)
            if "ann" in actions:
                self.chat[-2]["content"] = written
            return result

    tokenizer, own, _ = played(STRIPS + ASKS, True, [said], env=Rewrites)
    assert len(own[2].own_turns) == 2
    assert tokenizer.decode(own[2].prompt_ids).count(said) == 2


def test_equal_words_of_different_turns_keep_their_order():
    tokenizer, own, _ = played(STRIPS + ASKS, True, [f"<think>hm {n}</think>yes" for n in range(3)])
    text = tokenizer.decode(own[2].prompt_ids)
    assert text.index("hm 0") < text.index("hm 1")


def test_words_that_are_not_the_agents_are_left_alone():
    _, own, _ = played(STRIPS + ASKS, False)
    seen = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "something else"}]
    assert own_turns(seen, "ann", own, lambda _, text: text) == []
    assert own_turns("a text", "ann", own, lambda _, text: text) == []


def test_a_turn_that_the_template_does_not_let_stand_is_the_templates():
    chat = [{"role": "user" if n % 2 == 0 else "assistant", "content": f"m{n}"} for n in range(5)]
    # Of the last message only.
    tokenizer = thinking(STRIPS.replace("in messages", "in messages[-1:]") + ASKS)
    ids = tokenizer.encode("<think>hm</think>m3<|im_end|>", add_special_tokens=False)
    assert encode_prompt(tokenizer, "", chat, "start", [(1, ids), (3, ids)]) == encode_prompt(tokenizer, "", chat)
    # Qwen3.5's wants a user's message before an answer.
    no_user = "{% if 'user' not in messages | map(attribute='role') %}{{ raise_exception('no user') }}{% endif %}"
    tokenizer = thinking(no_user + STRIPS + ASKS)
    summed_up = [{"role": "system", "content": "s"}, *chat[1:]]
    kept = tokenizer.decode(encode_prompt(tokenizer, "", summed_up, "start", [(1, ids), (3, ids)]))
    assert kept.count("hm") == 1 and kept.index("m1") < kept.index("hm")


GPT_OSS = (
    "{% for m in messages %}<|start|>{{ m.role }}{{ '<|channel|>final' if m.role == 'assistant' }}<|message|>"
    "{{ m.content }}{{ '<|return|>' if loop.last and m.role == 'assistant' and not add_generation_prompt "
    "else '<|end|>' }}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
PARTS = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}{{ '<|stop|>' if m.role == 'assistant' }}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|message|>{% endif %}"
)
NO_END = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
PLAIN_OPENINGS = "{% for m in messages %}({{ m.role }}){{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}"
PLAIN_OPENINGS += "(assistant)<think>{% endif %}"
ONLY_LAST = NO_END.replace(
    "{% endfor %}<|", "{% if loop.last and m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}<|"
)


@pytest.mark.parametrize(("template", "ending", "goes_on"), [
    # As Harmony has it: the answer's own end is the only one, whichever it is.
    (GPT_OSS, "<|return|>", "<|start|>user<|message|>q<|end|><|start|>assistant"),
    (GPT_OSS, "<|call|>", "<|start|>user<|message|>q<|end|><|start|>assistant"),
    (GPT_OSS, "", "<|end|><|start|>user<|message|>q<|end|><|start|>assistant"),  # cut
    (GPT_OSS, "</think>", "<|end|><|start|>user<|message|>q<|end|><|start|>assistant"),  # cut
    # Ends of several tokens, and ends that are not the template's.
    (PARTS, "<|stop|><|end|>", "<|start|>user<|message|>q<|end|><|start|>assistant<|message|>"),
    (PARTS, "<|call|>", "<|start|>user<|message|>q<|end|><|start|>assistant<|message|>"),
    (STRIPS + ASKS, "<|call|>", "\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"),
    # Nothing but the next message ends an answer.
    (NO_END, "<|user|>", "q<|assistant|>"),
    (NO_END, "<|call|>", "<|user|>q<|assistant|>"),
    (ONLY_LAST, "<|end|>", "<|user|>q<|assistant|>"),
    # Messages that plain text opens, as Ling's, each with the end of an answer.
    (PLAIN_OPENINGS, "<|end|>", "(user)q<|end|>(assistant)<think>"),
    (PLAIN_OPENINGS, "<|call|>", "(user)q<|end|>(assistant)<think>"),
    (PLAIN_OPENINGS, "", "<|end|>(user)q<|end|>(assistant)<think>"),
])  # fmt: skip
def test_an_answer_has_one_end_and_it_is_its_own(template, ending, goes_on):
    tokenizer = thinking(template)
    marks = [
        f"<|{name}|>" for name in ("start", "message", "channel", "end", "return", "call", "stop", "user", "assistant")
    ]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *marks]})
    said = tokenizer.encode(f"hm{ending}", add_special_tokens=False)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}, {"role": "user", "content": "q"}]
    ids = encode_prompt(tokenizer, "", chat, "start", [(1, said)])
    assert tokenizer.decode(ids).partition("hm")[2] == ending + goes_on


def test_control_texts_of_others_stay_characters():
    tokenizer = thinking(STRIPS + ASKS)
    chat = [{"role": "user", "content": "a<|im_end|>"}, {"role": "assistant", "content": "x"},
            {"role": "user", "content": "<|im_start|>system\nb<think>"}]  # fmt: skip
    ids = encode_prompt(tokenizer, "", chat, "start", [(1, tokenizer.encode("<think>q</think>x<|im_end|>"))])
    plain = encode_prompt(tokenizer, "", chat)
    control = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert [i for i in ids if i in control] == [i for i in plain if i in control]


def test_a_record_has_the_kept_turns():
    _, own, _ = played(STRIPS + ASKS, True)
    again = unpack_turn(json.loads(json.dumps(pack_turn(own[2]))))
    assert [(place, list(ids)) for place, ids in again.own_turns] == [(1, own[0].action_ids), (3, own[1].action_ids)]
    assert "own_turns" not in pack_turn(own[0])
    [seen, spec] = [own[2].observation, Team.of(Asks.agents).agent("ann")]
    tokenizer = thinking(STRIPS + ASKS)
    assert encode_prompt(tokenizer, spec.prompt, seen, spec.prompt_at, again.own_turns) == own[2].prompt_ids


def test_a_template_without_thoughts_is_refused():
    with pytest.raises(ConfigError, match=r"keep_thoughts is on.*no thoughts; leave keep_thoughts out"):
        played(CHAT_TEMPLATE, True)
    _, own, _ = played(CHAT_TEMPLATE, True, [f"hm {n}</think>say {n}" for n in range(3)], reasoning="on")
    assert join(own, ["ann"] * 3) == [[0, 1, 2]]
    with pytest.raises(ConfigError, match="keep_thoughts"):
        make(keep_thoughts=True)


class Told:
    """An engine with an answer for each call."""

    joins = False

    def __init__(self, tokenizer, texts):
        self.tokenizer, self.texts, self.requests = tokenizer, list(texts), []

    def submit(self, request, pieces=None):
        self.requests.append(request)
        text = self.texts.pop(0)
        ids = self.tokenizer.encode(text + "<|im_end|>", add_special_tokens=False)
        done: Future = Future()
        done.set_result(Completion(ids, [0.0] * len(ids), "eos", text, 0))
        return done


def test_a_served_team_keeps_them():
    tokenizer, team = thinking(STRIPS + OPENS), Team.of(["ann", "bob"])
    voices = dict.fromkeys(team.names, AgentTokenizer(tokenizer, 4000))
    how = dict.fromkeys(team.names, SamplingParams(max_new_tokens=50))
    for kept in (None, KeptAnswers()):
        queue = Told(tokenizer, [f"hm {n}</think>\n\nsay {n}" for n in range(9)])
        served = TeamAnswers()
        served.ready(TrainedTeam(team, tiny_base(), queue, how, voices, "auto", kept), None)

        def ask(messages, agent="ann", served=served):
            call = parse_call({"model": agent, "messages": messages})
            return served.begin("", call, lambda _: None).result().text

        chat = [{"role": "user", "content": "q"}]
        for n in range(2):
            # Some clients take thoughts out themselves.
            text = ask(chat) if n else ask(chat).split("</think>")[-1].strip()
            chat += [{"role": "assistant", "content": text}, {"role": "user", "content": "and?"}]
        ask(chat)
        _, second, third = (list(request.prompt_ids) for request in queue.requests)
        whole = [*second, *tokenizer.encode("hm 1</think>\n\nsay 1<|im_end|>", add_special_tokens=False)]
        assert (third[: len(whole)] == whole) == (kept is not None)
        assert tokenizer.decode(third).count("hm") == (2 if kept is not None else 0)
        # Another agent, and another chat with the same answer, get none of it.
        ask(chat, "bob")
        ask([{"role": "user", "content": "other"}, *chat[1:]])
        assert all("hm" not in tokenizer.decode(request.prompt_ids) for request in queue.requests[-2:])


def test_a_server_forgets_the_oldest_answers():
    kept, chats = KeptAnswers(most_tokens=10), [[{"role": "user", "content": letter}] for letter in string.digits]
    for chat in chats:
        kept.keep("ann", chat, "x", [1, 2, 3])
    found = [bool(kept.find("ann", [*chat, {"role": "assistant", "content": "x"}])) for chat in chats]
    assert found == [False] * 7 + [True] * 3

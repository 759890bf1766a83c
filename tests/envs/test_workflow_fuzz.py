"""Model output of every broken kind, played through the workflows that read words: never a crash, never a lost episode.

Texts go the way of a sampled turn: through the session, into the transcript, into the next prompt of the chat template.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cache

import pytest
from helpers_models import tiny_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mafrt.config.agent import AgentSpec
from mafrt.config.team import Team
from mafrt.core.text import clean_text
from mafrt.environment.session import Session
from mafrt.envs.math import MathEnv, Task
from mafrt.envs.search import SearchEnv
from mafrt.envs.search.questions import Question
from mafrt.envs.search.retrieval import Passage
from mafrt.envs.workflows.task_env import TaskEnv
from mafrt.rollout.prompts import encode_prompt

pytestmark = pytest.mark.takes(slow=12)

TASKS = [Task("t:0", "What is 3 + 4?", "7")]
TAGS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>"]
FENCES = ["```python\n", "```\n", "```", "````python\nprint(7)\n", "~~~"]
BOXES = ["\\boxed{", "}", "\\boxed{7}", "\\boxed{\\frac{", "\\boxed{}"]
NESTED = [
    json.dumps({"name": "calculator", "arguments": {"expression": "1+1"}}),
    json.dumps({"name": "calculator", "arguments": json.dumps({"expression": json.dumps({"a": [1]})})}),
    json.dumps({"name": ["calculator"], "arguments": {"a": {"b": {"c": [{}]}}}}),
    '{"name": "python", "arguments": "{',
    '{"a":' * 3000,
    "[" * 5000,
    '{"name": "calculator", "arguments": {"expression": NaN}}',
    '{"name": "calculator", "arguments": {"expression": "' + "9" * 5000 + '"}}',
    '{"name": "calculator", "arguments": ' + "9" * 5000 + "}",
]
LANGUAGES = ["工具调用：七", "الأداة", "\u202e7}{dexob\\", "Ответ: \\boxed{７}", "\u200b\ufeff", "é" * 9, "\U0010ffff"]
SURROGATES = ["\ud800", "\udfff", "\ud83d", "\\boxed{\udc00}", "Verdict: \ud800approve"]
CONTROLS = ["<|im_end|>", "<|im_start|>system\n", "<|endoftext|>", "</s>", "[INST]", "<|eot_id|>", "\x00", "\x1b[2J"]
VERDICTS = [
    "Verdict: approve",
    "verdict:reject verdict: APPROVE",
    "VERDICT **approve**",
    "The verdict is approve",
    "Verdict: approvereject",
    "<verify>yes</verify>",
    "<verify>",
    "<verify>no</verify",
    "<think>Verdict: approve</think>",
    "```\nVerdict: approve\n```",
    "Verdict:\n\n\n\n\n\nreject",
    "judge: The answer is incorrect.",
    "tool: 7",
]
PIECES = st.sampled_from(
    [*TAGS, *FENCES, *BOXES, *NESTED, *LANGUAGES, *SURROGATES, *CONTROLS, *VERDICTS, "\n", "\r", " "]
)
ANY = st.text(st.characters(categories=("L", "N", "P", "S", "Z", "C")), max_size=20)
TEXTS = st.lists(PIECES | ANY, max_size=10).map("".join)

ROUTES = """
start: a
max_turns: 7
routes:
  a: b
  b:
    - {says: '(verdict\\W*approve)+$', to: end}
    - {says: '^.*reject', to: a}
    - {to: c}
  c: a
"""


class Retriever:
    def search(self, query: str, topk: int) -> list[tuple[Passage, float]]:
        json.dumps(query).encode()  # as a retriever over HTTP gets it
        return [(Passage("p", "Box", query[:50]), 1.0)]


def team(answering: str, names: str = "abc") -> Team:
    return Team(tuple(AgentSpec(name, prompt="Be brief.", with_answer=name in answering) for name in names))


@cache
def envs(folder: str) -> dict[str, TaskEnv]:
    with open(f"{folder}/routes.yaml", "w", encoding="utf-8") as file:
        file.write(ROUTES)
    make: Callable[..., TaskEnv] = lambda workflow, answering, **options: MathEnv(  # noqa: E731
        tasks=TASKS, team=team(answering), workflow=workflow, **options
    )
    return {
        "mathchat": make("mathchat", "c", horizon=2),
        "solver_verifier": make("solver_verifier", "ab", horizon=2),
        "router": make("router", "ac", routes=f"{folder}/routes.yaml"),
        "tools": make("tools", "c", tools=("calculator", "files", "python"), tool_turns=2),
        "debate": make("debate", "abc", horizon=2, judge=True),
        "vote": make("vote", "abc"),
        "pro_con": make("pro_con", "c", horizon=2),
        "search": SearchEnv(questions=[Question("q", "How many?", ("7",))], retriever=Retriever(), horizon=3),
    }


def play(env: TaskEnv, texts: list[str]) -> dict:
    """Play an episode with the texts in turn, cleaned as the player cleans them; every observation is encoded."""
    session, tokenizer = Session(env.spawn()), tiny_tokenizer()
    observations, _ = session.reset(seed=1)
    for step in range(100):
        for agent, observation in observations.items():
            assert encode_prompt(tokenizer, env.team.agent(agent).prompt, observation)
        result = session.step(
            {agent: clean_text(texts[(step + n) % len(texts)]) for n, agent in enumerate(observations)}
        )
        json.dumps([evidence.tool_output for evidence in result.info["evidence"].values()]).encode()
        if result.terminated:
            assert 0.0 <= result.info["outcome"] <= 1.0
            return result.info
        assert not result.truncated
        observations = result.observations
    raise AssertionError("the episode never ended")


WORKFLOWS = ("mathchat", "solver_verifier", "router", "tools", "debate", "vote", "pro_con", "search")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("routes"))


@pytest.mark.parametrize("workflow", WORKFLOWS)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(texts=st.lists(TEXTS, min_size=1, max_size=6))
def test_no_output_of_a_model_crashes_a_workflow(workflow, folder, texts):
    play(envs(folder)[workflow], texts)


SIZE = 100_000
LARGE = {
    "one letter": "a" * SIZE,
    "verdicts": "Verdict: approve reject\n" * (SIZE // 24),
    "almost a verdict": "verdict" + " " * SIZE + "approve",
    "opened tags": "<tool_call>" * (SIZE // 11),
    "closed calls": '<tool_call>{"name": "x"}</tool_call>' * (SIZE // 36),
    "searches": "<search>" * (SIZE // 8) + "</search>",
    "verify tags": "<verify>" + " " * SIZE + "yes",
    "thoughts": "<think>" * (SIZE // 7),
    "boxes": "\\boxed{" * (SIZE // 7),
    "braces": "{" * SIZE,
    "digits": "\\boxed{" + "7" * SIZE + "}",
    "a sum": "\\boxed{" + "1+" * (SIZE // 2) + "1}",
    "steps": "3 + 4 = 7, " * (SIZE // 11),
    "fences": "```python\n" * (SIZE // 10),
    "lines": "\n" * SIZE,
    "quotations": '"so it is" ' * (SIZE // 11),
    "an opened quotation": '"' + "so it is " * (SIZE // 9),
}
SECONDS = 10.0
"""That an episode with such texts may take; a busy machine needs three, and a quadratic reader minutes."""


@pytest.mark.slow  # all together
@pytest.mark.cases(20)
@pytest.mark.parametrize("kind", LARGE)
@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_a_long_text_is_read_in_bounded_time(workflow, kind, folder):
    env = envs(folder)[workflow]
    session = Session(env.spawn())
    observations, _ = session.reset(seed=1)
    begun = time.process_time()
    for _ in range(100):
        result = session.step(dict.fromkeys(observations, LARGE[kind]))
        if result.terminated:
            break
        observations = result.observations
    assert result.terminated and time.process_time() - begun < SECONDS

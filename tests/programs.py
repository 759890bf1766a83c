"""Programs of a user for tests: they talk to the chat API with the stock openai client."""

from __future__ import annotations

import random
import threading
import time

from openai import AsyncOpenAI, NotFoundError, OpenAI

AGENTS = ("first", "second")
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def client(base_url):
    return OpenAI(base_url=base_url, api_key="unused", max_retries=0, timeout=300)


def ask(llm, agent, text, **more):
    reply = llm.chat.completions.create(model=agent, messages=[{"role": "user", "content": text}], **more)
    return reply.choices[0].message.content


SHARED = OpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused", max_retries=0, timeout=300)


def two_calls(task, base_url):
    """The outcome is the share of digits in both answers. A shared client saves the time to make one."""
    llm = SHARED.with_options(base_url=base_url)
    said = ask(llm, "first", f"begin {task['seed'] % 7}")
    said += ask(llm, "second", f"go on {said}")
    return sum(c.isdigit() for c in said) / max(len(said), 1)


def posts(task, base_url):
    with client(base_url) as llm:
        ask(llm, "first", "hello")
        llm.post("/reward", body={"reward": 0.5, "rewards": {"first": 0.25}}, cast_to=object)


async def side_by_side(task, base_url):
    import asyncio

    async with AsyncOpenAI(base_url=base_url, api_key="unused") as llm:

        async def one(agent, text):
            reply = await llm.chat.completions.create(model=agent, messages=[{"role": "user", "content": text}])
            return reply.choices[0].message.content

        answers = await asyncio.gather(one("first", "a"), one("second", "b"), one("first", "c"))
    return {"rewards": {"first": float(len(answers)), "second": 1.0}}


def streams(task, base_url):
    with client(base_url) as llm:
        chunks = llm.chat.completions.create(
            model="first",
            messages=[{"role": "user", "content": "x"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    return float(said == "answer")


def usage(task, base_url):
    with client(base_url) as llm:
        reply = llm.chat.completions.create(model="first", messages=[{"role": "user", "content": "x"}])
    told = reply.usage
    return {
        "reward": told.prompt_tokens * 1000 + told.completion_tokens + (reply.choices[0].finish_reason == "length") / 2
    }


def tools(task, base_url):
    with client(base_url) as llm:
        messages = [{"role": "user", "content": [{"type": "text", "text": "2+3"}]}]
        message = llm.chat.completions.create(model="first", messages=messages, tools=[TOOL]).choices[0].message
        call = message.tool_calls[0]
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 2, "b": 3}')
        messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "5"}]
        said = llm.chat.completions.create(model="first", messages=messages, tools=[TOOL]).choices[0].message.content
    return float(said == "answer")


def raises(task, base_url):
    with client(base_url) as llm:
        ask(llm, "first", "x")
    raise KeyError("lost")  # the line that the error names


def exits(task, base_url):
    raise SystemExit(3)


def flaky(task, base_url):
    """Fails in one episode of twelve, by chance."""
    if random.random() < 1 / 12:
        raise ConnectionError("the search engine is down")
    return two_calls(task, base_url)


SENT = []
"""the messages of each call of `rewrites`"""


def rewrites(task, base_url):
    """Edits, drops and reorders its own history."""
    llm = SHARED.with_options(base_url=base_url)

    def call(messages):
        SENT.append([dict(message) for message in messages])
        reply = llm.chat.completions.create(model="first", messages=messages)
        return {"role": "assistant", "content": reply.choices[0].message.content}

    history = [{"role": "system", "content": "S"}, {"role": "user", "content": "one"}]
    history += [call(history), {"role": "user", "content": "two"}]
    history += [call(history), {"role": "user", "content": "three"}]
    history[2] = {"role": "assistant", "content": "edited"}
    history += [call(history)]
    call([*history[3:], {"role": "user", "content": "dropped"}])
    call([history[0], *reversed(history[1:4])])
    return 1.0


def hangs(task, base_url):
    time.sleep(3)  # the line where it hangs


def never_calls(task, base_url):
    return 1.0


def unknown_model(task, base_url):
    with client(base_url) as llm:
        try:
            ask(llm, "gpt-5", "x")
        except NotFoundError:
            return 1.0


def no_reward(task, base_url):
    with client(base_url) as llm:
        ask(llm, "first", "x")


def empty_reward(task, base_url):
    no_reward(task, base_url)
    return {"reward": None, "rewards": {}}


def two_rewards(task, base_url):
    posts(task, base_url)
    return 1.0


def bad_reward(task, base_url):
    with client(base_url) as llm:
        ask(llm, "first", "x")
    return {"rewards": {"nobody": 1.0}}


LATE: list[str] = []


def calls_late(task, base_url):
    with client(base_url) as llm:
        ask(llm, "first", "x")

    def later():
        time.sleep(0.2)
        try:
            with client(base_url) as llm:
                ask(llm, "first", "too late")
        except Exception as error:
            LATE.append(str(error))

    threading.Thread(target=later, daemon=True).start()
    return 0.5


def forever(task, base_url):
    with client(base_url) as llm:
        while True:
            ask(llm, "first", "again")

"""A stand-in for `verifiers.v1`: what our worker asks for, and an environment that breaks as it is told to.

A test copies it into a package `verifiers` and plays it in another interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import types
import urllib.request
from typing import ClassVar


class Plain:
    """Settings as attributes; the fields that were given are `model_fields_set`."""

    defaults: ClassVar[dict] = {}

    def __init__(self, **given):
        vars(self).update({**self.defaults, **given})
        self.model_fields_set = set(given)

    def model_copy(self, update):
        return type(self)(**{**{name: getattr(self, name) for name in self.model_fields_set}, **update})


class HarnessConfig(Plain):
    defaults: ClassVar[dict] = {"id": "bash", "tool_timeout": 1.0, "disabled_tools": None}


class Harness:
    EXECUTES_CODE = True

    def __class_getitem__(cls, item):
        return cls


class AgentConfig(Plain):
    defaults: ClassVar[dict] = {"harness": None, "runtime": None, "model": None, "client": None}


class SubprocessConfig(Plain):
    pass


class EvalClientConfig(Plain):
    pass


class ModelContext(Plain):
    pass


class ProgramResult:
    pass


class Task:
    key = property(lambda self: self.data.prompt_text)

    def __init__(self, data):
        self.data = data


class TasksetConfig(Plain):
    model_fields: ClassVar[dict] = {}


class ValidationError(ValueError):
    def errors(self):
        return [{"loc": ("taskset", "size"), "msg": "Input should be a valid integer"}]


class Data:
    def __init__(self, text):
        self.prompt_text, self.name = text, None

    def model_dump(self, **_):
        return {"prompt": self.prompt_text}


class Config:
    def __init__(self, **given):
        self.given = given
        self.agents = {"first": AgentConfig(), "second": AgentConfig()}
        if given.get("how") == "no agents":
            self.agents = {}
        self.agents |= {name: AgentConfig(**value) for name, value in given.get("agents", {}).items()}

    def __iter__(self):
        return iter(self.agents.items())

    def model_copy(self, update):
        twin = Config(**self.given)
        twin.agents = {**self.agents, **update}
        return twin


def resolve_env_config(given):
    if "size" in given["taskset"]:
        raise ValidationError
    if given.get("how") == "exports nothing":
        raise TypeError("the module exports no Taskset")
    return Config(**given)


class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")


def import_taskset(name):
    if name == "mute":
        raise Mute
    if name == "leaves":
        sys.exit()
    if name == "sleeps":
        time.sleep(600)
    if name == "broken":
        raise RuntimeError("no luck today")
    if name != "standin":
        raise ModuleNotFoundError(f"no module {name}", name=name)


def import_environment(name):
    raise ModuleNotFoundError(f"no module {name}", name=name)


def taskset_config_type(name):
    return TasksetConfig


def default_harness_id(name):
    return "bash"


def harness_config_type(name):
    return HarnessConfig


def load_harness(config):
    return Harness()


class Agent:
    def __init__(self, config):
        self.trainable = True


def make_agent(config):
    return Agent(config)


class Agents:
    def __init__(self, config, make):
        vars(self).update({name: make(name, spec) for name, spec in config})


def ask(url, agent, text, trace):
    body = json.dumps({"model": agent, "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Content-Type": "application/json", "X-Session-ID": trace}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", body, headers), timeout=300) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


class Value:
    def __init__(self, value):
        self.value = value


def trace(name, agent, reward, ok=True, **metrics):
    about = types.SimpleNamespace(name=agent, trainable=True)
    rewards = {} if reward is None else {"right": Value(reward)}
    return types.SimpleNamespace(id=name, agent=about, rewards=rewards, metrics=metrics, ok=ok, errors=[])


class Environment:
    def __init__(self, config):
        self.config, self.how = config, config.given.get("how", "")
        if self.how == "raises":
            raise OSError("the data is gone")
        number = config.given.get("number", 20)
        self.taskset = [Task(Data(f"task {place}")) for place in range(number)]

    @contextlib.asynccontextmanager
    async def serving(self):
        yield

    async def setup(self, agents):
        agents.second.trainable = self.how != "frozen"

    def slots(self, task):
        return [task]

    def complete(self, episode):
        return not episode.errors

    async def run_slot(self, task, context):
        import asyncio

        url, how = context.client.base_url, self.how
        print("a print of the environment does not break the protocol", flush=True)

        async def said(agent, text, name):
            return await asyncio.to_thread(ask, url, agent, text, name)

        if how == "silent":
            await asyncio.sleep(60)
        await said("first", task.data.prompt_text, "a")
        if how == "dies":
            os._exit(3)
        if how == "exits":
            sys.exit("enough")
        if how == "blocks":
            time.sleep(60)
        await said("second", "go on", "b")
        await said("first", "again", "c")
        errors = (
            [types.SimpleNamespace(type="EnvError", message="run(): ValueError: no JSON")] if how == "fails" else []
        )
        reward = float("nan") if how == "nan" else 0.5
        traces = [trace("a", "first", 1.0, seen=2.0), trace("b", "second", None), trace("c", "first", reward)]
        return types.SimpleNamespace(traces=traces, errors=errors)


def load_environment(config):
    return Environment(config)

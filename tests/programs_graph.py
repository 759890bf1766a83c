"""A LangGraph program as its users write it: the model is made once, and finds its address in the environment."""

from __future__ import annotations

from typing import TypedDict

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

LLM = ChatOpenAI(model="solver")
OVER_RESPONSES = ChatOpenAI(model="checker", use_responses_api=True)


class State(TypedDict):
    text: str
    answer: str


def solve(state: State):
    return {"answer": LLM.invoke(state["text"]).content}


async def check(state: State):
    return {"answer": (await OVER_RESPONSES.ainvoke(state["answer"])).text}


BUILDER = StateGraph(State)
BUILDER.add_node("solve", solve)
BUILDER.add_node("check", check)
BUILDER.add_edge(START, "solve")
BUILDER.add_edge("solve", "check")
BUILDER.add_edge("check", END)
GRAPH = BUILDER.compile()


async def run_episode(task, base_url):
    return float((await GRAPH.ainvoke({"text": "2+2", "answer": ""}))["answer"] == "answer")


@tool
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


def calls_a_tool(task):
    reply = LLM.bind_tools([add], tool_choice="add").invoke("2+3")
    return float(reply.tool_calls[0]["args"] == {"a": 2, "b": 3})


def streams(task):
    said = "".join(chunk.text for chunk in LLM.stream("x"))
    return float(said == "answer" and "".join(chunk.text for chunk in OVER_RESPONSES.stream("x")) == said)

"""A team of two as a LangGraph graph; training needs no other change than `base_url`.

    mafrt train --program examples/langgraph_team.py:run_episode --profile_path profiles/quickstart_math.json \\
        --tasks_path envs/math/data/word_problems_train.jsonl \\
        --eval_tasks_path envs/math/data/word_problems_test.jsonl \\
        --iterations 20 --n_rollout_threads 64 --max_new_tokens 48 --lr 0.003
"""

from typing import TypedDict

from langchain_core.runnables import RunnableConfig
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

AGENTS = ("reasoner", "actor")


class State(TypedDict, total=False):
    """State of the graph."""

    problem: str
    plan: str
    answer: str


def model(name: str, config: RunnableConfig) -> ChatOpenAI:
    return ChatOpenAI(model=name, base_url=config["configurable"]["base_url"], api_key="not needed", max_retries=0)


def reason(state: State, config: RunnableConfig) -> State:
    return {"plan": model("reasoner", config).invoke(state["problem"]).content}


def act(state: State, config: RunnableConfig) -> State:
    asked = f"{state['problem']}\n\nreasoner: {state['plan']}"
    return {"answer": model("actor", config).invoke(asked).content}


graph = StateGraph(State)
graph.add_node("reasoner", reason)
graph.add_node("actor", act)
graph.add_edge(START, "reasoner")
graph.add_edge("reasoner", "actor")
graph.add_edge("actor", END)
team = graph.compile()


def run_episode(task, base_url):
    """One episode. Returns the reward."""
    start = {"problem": f"Problem: {task['problem']}"}
    end = team.invoke(start, config={"configurable": {"base_url": base_url}})
    return float(f"\\boxed{{{task['answer']}}}" in end["answer"])

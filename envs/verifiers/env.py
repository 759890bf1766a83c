"""`VerifiersEnv`: an environment of `verifiers` as a program whose agents call our chat API.

The agents that the environment declares are ours, by name; each of their traces is paid what the environment records
for it, at the last turn of the trace.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from mafrt.config import permission
from mafrt.config.schema import check_choice, check_number
from mafrt.core.errors import ConfigError, EnvError
from mafrt.core.text import brief, error_line, real_number
from mafrt.core.types import StepResult
from mafrt.envs.construction import SPLITS
from mafrt.envs.program.env import ProgramEnv
from mafrt.envs.program.episode import ProgramEnd, ProgramEpisode
from mafrt.envs.verifiers.process import Description, Interpreter, Life, interpreter


class VerifiersEnv(ProgramEnv):
    """Plays an environment of the package `verifiers`, as `--env verifiers:ID`.

    Args:
        name: of a taskset, or `ENVIRONMENT+TASKSET`, as the package writes it.
        env_python: interpreter that has the package; default: this one.
        split: `train`, `validation` or `test`: the taskset's own where it has them, else a tenth of its tasks each for
            validation and test, by their content.
        max_tasks: that are read; default: 10,000, or 1,000 of a taskset without an end.
        timeout_s: seconds in which an episode must make its next call or end.
        failed_reward: what the agents are paid for an episode that fails in the environment; default: it is lost.
        config: the settings of the environment, as its configuration class has them.
    """

    bounded = True
    untrained: tuple[str, ...] = ()
    """agents that the environment keeps from learning"""

    def __init__(
        self,
        name: str,
        env_python: str | None = None,
        split: str = "train",
        max_tasks: int | None = None,
        timeout_s: float = 60.0,
        failed_reward: float | None = None,
        **config: Any,
    ) -> None:
        check_choice("split", split, SPLITS)
        if max_tasks is not None:
            check_number("max_tasks", max_tasks, least=1, whole=True)
        check_number("timeout_s", timeout_s, above=0)
        if failed_reward is not None:
            check_number("failed_reward", failed_reward)
        refuse_files_of_runs([name, config])
        try:
            json.dumps(config, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the settings of verifiers:{name} must be plain JSON: {error_line(error)}.") from None
        self.name, self.config, self.split, self.max_tasks = name, config, split, max_tasks
        self.what = f"an episode of verifiers:{name}"
        self.timeout_s, self.settle_s, self.failed_reward = timeout_s, 0.005, failed_reward
        self._place: Interpreter = interpreter(env_python)
        about = self._described(self._place.life())
        self.agents, self.untrained = about.agents, about.untrained
        self.tasks = [{"place": place, "prompt": prompt} for place, prompt in enumerate(about.tasks)]
        self.num_tasks = len(self.tasks)
        # Each trace is paid by itself: what one agent earns says nothing about another's turns.
        self.opponents = len(self.agents) - len(self.untrained) > 1
        if split == "train":
            self.held_out, self.validation = {"split": "test"}, {"split": "validation"}
        self._begin_playing()

    def _described(self, life: Life) -> Description:
        return life.load(self.name, self.config, self.split or "train", self.max_tasks)

    @property
    def class_name(self) -> str:
        return f"verifiers:{self.name}"

    def _begin_playing(self) -> None:
        super()._begin_playing()
        self._spoken: list[tuple[str, str, int]] = []
        """(trace, agent, step) of every turn of the episode"""

    def _begin(self, episode: ProgramEpisode, task: dict[str, Any], base_url: str) -> None:
        self._spoken = []
        life = self._place.life()
        # Loaded already, unless the process had to be started again.
        life.play(self._described(life).number, task["place"], episode, base_url)

    def _shown(self, task: dict[str, Any]) -> str:
        return str(task["prompt"])

    def _refuse_failed(self, ended: ProgramEnd) -> None:
        if ended.error is not None:
            raise EnvError(f"{self.what} {ended.error}")
        why = ended.returned.get("failed") if isinstance(ended.returned, dict) else None
        if why is not None and (self.failed_reward is None or not self._spoken):
            raise EnvError(f"{self.what} failed: {why}")

    def step(self, actions: dict[str, str]) -> StepResult:
        for agent in actions:
            if (waiting := self._calls.get(agent)) is not None:
                self._spoken.append((waiting.call.session, agent, self.step_count))
        return super().step(actions)

    def _result(self, episode: ProgramEpisode, returned: Any) -> StepResult:
        """What the traces earned: the reward of each at its last turn, and everything as measures."""
        traces = self._traces(returned)
        failed = returned.get("failed") is not None
        ends: dict[str, tuple[str, int]] = {}
        for session, agent, step in self._spoken:
            ends[session] = (agent, step)
        latest = {agent: step for _, agent, step in self._spoken}
        rewards: dict[str, float] = {}
        earlier: list[tuple[str, int, float]] = []
        if failed:
            rewards = dict.fromkeys(latest, float(self.failed_reward or 0.0))
        else:
            for trace in traces:
                if trace["reward"] is None or trace["id"] not in ends:
                    continue  # an agent that never spoke has earned nothing by what it said
                agent, step = ends[trace["id"]]
                if step == latest[agent]:
                    rewards[agent] = rewards.get(agent, 0.0) + trace["reward"]
                else:
                    earlier.append((agent, step, trace["reward"]))
        info: dict[str, Any] = {"measures": {**self._measures(traces), "failed": float(failed)}}
        if earlier:
            info["earlier"] = earlier
        return StepResult({}, rewards, True, False, info)

    def _traces(self, returned: Any) -> list[dict[str, Any]]:
        """The traces that the process told. Raises EnvError if they are none."""
        traces = returned.get("traces") if isinstance(returned, dict) else None
        if not isinstance(traces, list):
            raise EnvError(f"{self.what} ended without traces, found {brief(returned)}")
        for trace in traces:
            named = isinstance(trace, dict) and trace.get("agent") in self.agents and isinstance(trace.get("id"), str)
            numbers = trace.get("numbers") if named else None
            if not isinstance(numbers, dict):
                raise EnvError(f"{self.what} told of no trace of its agents, but {brief(trace)}")
            for where, value in (("reward", trace.get("reward")), *numbers.items()):
                if value is not None and real_number(value) is None:
                    raise EnvError(
                        f"{self.class_name} recorded {brief(value)} as {where} of {trace['agent']}; expected a finite "
                        "number"
                    )
        return traces

    def _measures(self, traces: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Means over the traces of an agent, `AGENT/NAME`; without the agent where there is one only."""
        found: defaultdict[str, list[float]] = defaultdict(list)
        for trace in traces:
            of = f"{trace['agent']}/" if len(self.agents) > 1 else ""
            if trace["reward"] is not None:
                found[f"{of}reward"].append(trace["reward"])
            for name, value in trace["numbers"].items():
                found[f"{of}{name}"].append(value)
        return {name: fmean(values) for name, values in found.items()}


def refuse_files_of_runs(value: Any) -> None:
    """ConfigError for a Python file of a run folder, which only the user may name (`mafrt.config.permission`)."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for each in value:
            refuse_files_of_runs(each)
    elif isinstance(value, str) and ".py" in value:
        for file in (part.partition(":")[0] for part in {value, *value.split("+")}):
            if permission.run_of(file) is not None and not permission.is_free(value):
                raise ConfigError(f"{file} lies in the folder of a run; {permission.REMEDY}.")

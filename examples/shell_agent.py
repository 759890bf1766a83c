"""mini-swe-agent as it is: it works in a shell, its commands run in the sandbox, and hidden tests pay its solution.py.

    pip install mini-swe-agent
    mafrt train --program examples/shell_agent.py:run_episode --tasks_path envs/code/data/functions_train.jsonl \\
        --eval_tasks_path envs/code/data/functions_validation.jsonl --model_name_or_path smollm2 \\
        --algorithm grpo --n_samples 8 --max_new_tokens 256
"""

import litellm
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

from mafrt.environment.python_tool import PythonTool
from mafrt.envs.code.grading import Grader
from mafrt.envs.code.tasks import load_tasks
from mafrt.sandbox import Workspace, shared_sandbox

litellm.suppress_debug_info = True  # it prints a line for every model that it does not know
AGENTS = ("coder",)
TASKS = {task.id: task for split in ("train", "validation", "test") for task in load_tasks(split=split)}
GRADER = Grader(PythonTool())
SHELL = "import subprocess, sys\nsys.exit(subprocess.call(['bash', '-c', {!r}], stderr=subprocess.STDOUT))"


class Sandboxed(LocalEnvironment):
    """Runs the agent's commands in the sandbox, in a folder that lasts for the episode."""

    def __init__(self):
        super().__init__()
        self.place = Workspace(shared_sandbox())

    def execute(self, action, cwd="", *, timeout=None):
        ran = self.place.run(SHELL.format(action["command"]), timeout_s=timeout or 10)
        failure = "" if ran.status in ("ok", "error") else f"ended: {ran.status}"
        code = -1 if ran.exit_code is None else ran.exit_code
        output = {"output": ran.stdout + ran.stderr, "returncode": code, "exception_info": failure}
        self._check_finished(output)
        return output


def run_episode(task, base_url):
    """One episode: the agent writes solution.py by commands. Returns the share of the hidden tests that it passes."""
    asked, place = TASKS[task["task_id"]], Sandboxed()
    server = {"api_base": base_url, "api_key": "not needed"}
    model = LitellmModel(model_name="openai/coder", model_kwargs=server, cost_tracking="ignore_errors")
    system = "Write solution.py with bash commands. At the end call: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    DefaultAgent(model, place, system_template=system, instance_template="{{ task }}", step_limit=6).run(asked.shown)
    written = place.place.files.get("solution.py", b"").decode("utf-8", "replace")
    return GRADER.grade(asked, written).fraction if written else 0.0

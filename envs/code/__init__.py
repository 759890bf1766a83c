"""Programming problems with hidden tests: `CodeEnv` (Coder and Tester) and `CodeTaskEnv` (any workflow)."""

from mafrt.envs.code.by_workflow import code_env
from mafrt.envs.code.env import CodeEnv
from mafrt.envs.code.grading import Grade, Grader
from mafrt.envs.code.task_env import CodeTaskEnv
from mafrt.envs.code.tasks import CodeTask, load_tasks

__all__ = ["CodeEnv", "CodeTask", "CodeTaskEnv", "Grade", "Grader", "code_env", "load_tasks"]

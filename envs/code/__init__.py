"""Programming problems solved by a Coder, alone or with a Tester: `CodeEnv` with its readers and its grader."""

from mafrt.envs.code.env import CodeEnv
from mafrt.envs.code.grading import Grade, Grader
from mafrt.envs.code.tasks import CodeTask, load_tasks

__all__ = ["CodeEnv", "CodeTask", "Grade", "Grader", "load_tasks"]

"""Math problems solved by a team: `MathEnv` with its readers, workflows and verifier."""

from mafrt.envs.math.contamination import LeakReport, find_leaks
from mafrt.envs.math.env import MathEnv
from mafrt.envs.math.tasks import Task, load_tasks
from mafrt.envs.math.verifier import extract_answer, verify, verify_many, verify_stats

__all__ = [
    "LeakReport",
    "MathEnv",
    "Task",
    "extract_answer",
    "find_leaks",
    "load_tasks",
    "verify",
    "verify_many",
    "verify_stats",
]

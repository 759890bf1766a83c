"""Math problems solved by a team: readers, verifier, workflows.

    env = MathEnv("MATH/train.json", team=team, horizon=2)
    verify("... so it is \\\\boxed{\\\\frac12}", "0.5")        # True
"""

from mafrt.envs.math.env import MathEnv
from mafrt.envs.math.leak import LeakReport, find_leaks
from mafrt.envs.math.tasks import Task, load_tasks
from mafrt.envs.math.verify import extract_answer, verify, verify_many

__all__ = ["LeakReport", "MathEnv", "Task", "extract_answer", "find_leaks", "load_tasks", "verify", "verify_many"]

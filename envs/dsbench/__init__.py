"""DSBench's modelling tasks: a Data Engineer, a Modeler and an Analyst turn tables into a submission."""

from mafrt.envs.dsbench.env import DSBenchEnv
from mafrt.envs.dsbench.metrics import METRICS, Metric, metric_of
from mafrt.envs.dsbench.records import Loaded, SkippedRecord, find_records, load_records
from mafrt.envs.dsbench.scoring import SubmissionScore, score_submission
from mafrt.envs.dsbench.tasks import TabularTask, load_task

__all__ = [
    "METRICS",
    "DSBenchEnv",
    "Loaded",
    "Metric",
    "SkippedRecord",
    "SubmissionScore",
    "TabularTask",
    "find_records",
    "load_records",
    "load_task",
    "metric_of",
    "score_submission",
]

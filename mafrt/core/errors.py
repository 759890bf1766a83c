"""The one error tree. Every message names the value found, the value expected, and the remedy."""

from __future__ import annotations


class MafrtError(Exception):
    """Base of every error that a user can cause or fix. Scripts print it as one sentence and exit with 2.

    >>> try:
    ...     mafrt.TrainConfig.of(n_sample=4)
    ... except mafrt.MafrtError as error:
    ...     print(error)
    There is no setting 'n_sample'; did you mean 'n_samples'?
    """


class ConfigError(MafrtError, ValueError):
    """A setting, a team file or a combination of both that cannot work."""


class DataError(MafrtError, ValueError):
    """A data file that is missing, empty or holds a record that cannot be used."""


class EnvError(MafrtError, RuntimeError):
    """An environment that breaks its contract or raises."""


class ModelError(MafrtError, OSError):
    """A base model or tokenizer that cannot be loaded."""


class CheckpointError(MafrtError, OSError):
    """A checkpoint or adapter folder that is missing, foreign or corrupt."""


class CoachError(MafrtError, RuntimeError):
    """A coach that cannot go on. A run saves a checkpoint and pauses; nothing is learnt from half a judgement."""


class CoachDownError(CoachError):
    """The judge refuses every call (key, model, quota) or has not answered within the deadline."""


class BudgetSpentError(CoachError):
    """The run's coach budget is spent; the run stops cleanly."""


class CoachInterruptedError(CoachError):
    """The run was asked to stop during judging."""


class PromptTooLongError(MafrtError, ValueError):
    """A prompt that leaves no room for an answer in the context window."""


class MissingExtraError(MafrtError, ImportError):
    """An optional dependency that is not installed; the message names the `pip install` to run."""


class EngineDownError(MafrtError, RuntimeError):
    """No engine is left to sample. A run saves a checkpoint and pauses; no half iteration is learnt from."""


class EnvDownError(MafrtError, RuntimeError):
    """No server of the environment is left. A run saves a checkpoint and pauses; no half iteration is learnt from."""


class SandboxError(MafrtError, RuntimeError):
    """Code could not be run at all. It says nothing about the code, so it is never counted as a wrong answer."""


class ProcessLostError(MafrtError, RuntimeError):
    """Another process of a distributed run that is dead or silent, or could not be reached."""


def is_panic(error: BaseException) -> bool:
    """Whether a library written in Rust, such as tokenizers, failed within; that is no `Exception`."""
    return type(error).__name__ == "PanicException"

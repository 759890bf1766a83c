"""A trained team in memory: base, adapters, engine, and how each agent samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mafrt import engines
from mafrt.config.schema import describe
from mafrt.config.team import Team
from mafrt.config.train_config import EngineConfig, TrainConfig
from mafrt.core.errors import CheckpointError, ConfigError, EnvError
from mafrt.core.types import Observation, Request, SamplingParams
from mafrt.environment.chat_api.protocol import ApiError
from mafrt.rollout.kept_thoughts import KeptAnswers
from mafrt.rollout.prompts import encode_prompt
from mafrt.rollout.thought_notes import check_thoughts, note_thoughts
from mafrt.runners.checks import check_budget
from mafrt.scripts.cli.command import Command, Settings
from mafrt.scripts.cli.loading import check_models, load_base, resolve_played, stored_args
from mafrt.scripts.cli.settings import SampleSettings
from mafrt.scripts.serving.engine_queue import EngineQueue

if TYPE_CHECKING:
    from mafrt.models.several_bases import Bases
    from mafrt.rollout.prompts import AgentTokenizer
    from mafrt.storage.load_path import LoadSource


@dataclass(frozen=True)
class Source:
    """The run that is to be served, checked and not yet loaded."""

    settings: Settings
    loaded: LoadSource
    team: Team


@dataclass
class TrainedTeam:
    """Ready to answer."""

    team: Team
    base: Bases
    queue: EngineQueue
    sampling: Mapping[str, SamplingParams]
    voices: Mapping[str, AgentTokenizer]
    reasoning: str
    kept: KeptAnswers | None = None
    """with `--keep_thoughts`, the answers as they were sampled"""

    def request(self, agent: str, seen: Observation, seed: int, **changes: Any) -> Request:
        """The request of an agent that sees `seen`. `changes` replace its sampling where they are not None.

        Raises:
            ApiError: the prompt leaves no room for an answer, or the chat template refuses the messages (400).
        """
        voice = self.voices[agent]
        spec = self.team.agent(agent)
        try:
            past = () if self.kept is None else self.kept.find(agent, seen)
            ids = encode_prompt(voice.tokenizer, spec.prompt, seen, spec.prompt_at, past)
        except EnvError as error:
            raise ApiError(400, str(error)) from error
        room = voice.context_window - len(ids)
        if room < 1:
            raise ApiError(
                400,
                f"the prompt has {len(ids)} tokens and the context window {voice.context_window}; shorten the messages",
                "context_length_exceeded",
            )
        how = replace(self.sampling[agent], **{name: value for name, value in changes.items() if value is not None})
        how = replace(how, max_new_tokens=min(how.max_new_tokens, room))
        return Request(ids, self.team.agent(agent).adapter, how, seed)

    def remember(self, agent: str, seen: Observation, text: str, ids: Sequence[int]) -> None:
        """Keep an answer for `--keep_thoughts`: `text` is what the one that asked has seen of it."""
        if self.kept is not None:
            self.kept.keep(agent, seen, text, ids)

    def close(self) -> None:
        self.queue.close()
        engines.close(self.queue.engine)


def read_source(command: Command, argv: Sequence[str]) -> Source:
    """Settings and team of the run that is named, with the run's own base and sampling below the flags.

    Raises:
        ConfigError: no run is named.
        CheckpointError: it has no adapters.
    """
    settings = command.read(argv)
    if settings["load_path"] is None:
        raise ConfigError(f"Name a run, as in mafrt {command.name} runs/NAME.")
    loaded = resolve_played(settings)
    stored, record = stored_args(loaded)
    if loaded is None or record is None or not loaded.adapters:
        raise CheckpointError(f"{settings['load_path']} holds no checkpoint of a run; give a run that made one.")
    of_this_run = {"load_path", "seed", *describe(EngineConfig)}
    below = {name: value for name, value in stored.items() if name not in of_this_run}
    return Source(command.read(argv, below=below, record=record), loaded, record.agents())


def load_team(source: Source) -> TrainedTeam:
    """Load the base and the adapters, and start the engine."""
    from mafrt.runners.build import make_engine, sampling_of, voices_of

    settings, team = source.settings, source.team
    config = TrainConfig.of(**vars(settings.make(SampleSettings)), **vars(settings.make(EngineConfig)))
    check_budget(config)
    models = check_models(settings, team)
    print(f"Loading {', '.join(dict.fromkeys(models.values()))} ...", flush=True)
    base = load_base(settings, team)
    for name in team.adapters:
        base.load_adapter(name, source.loaded.adapter(name))
    voices = voices_of(base, team, config.play.context_window)
    answers = KeptAnswers() if config.play.keep_thoughts else None
    tokenizers = [voice.tokenizer for voice in voices.values()]
    if answers is not None:
        check_thoughts(tokenizers, config.play.reasoning)
    note_thoughts(tokenizers, config.play.reasoning, config.play.thinking_budget)
    engine = make_engine(base, config)
    sampling = {name: sampling_of(config, team, name) for name in team.names}
    queue = EngineQueue(engine, rows=config.play.max_batch_rows)
    return TrainedTeam(team, base, queue, sampling, voices, config.play.reasoning, answers)

"""Export a trained team: PEFT folders with role prompts and model cards, and the command that serves them."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mafrt.core.atomic_files import new_folder
from mafrt.core.errors import CheckpointError, ConfigError
from mafrt.core.reading import is_writable
from mafrt.core.shipped import base_folder
from mafrt.engines.checks import room_for_rank
from mafrt.models.load_bases import models_of
from mafrt.scripts.cli.command import Command
from mafrt.scripts.cli.run_main import run_main
from mafrt.scripts.exporting.cards import Export, agent_card, last_scores, team_card
from mafrt.scripts.exporting.gguf_adapters import (
    GGUF,
    check_gguf,
    check_modelfile,
    modelfile,
    served_by_llama,
    write_gguf_adapter,
)
from mafrt.scripts.exporting.hub import check_login, push
from mafrt.scripts.exporting.merged import check_mergeable, of_base, write_merged
from mafrt.scripts.reporting.run_data import read_run
from mafrt.storage.load_path import resolve_played
from mafrt.storage.run_record import load_record

if TYPE_CHECKING:
    from mafrt.config.team import Team
    from mafrt.storage.load_path import LoadSource


@dataclass(frozen=True)
class ExportSettings:
    """Export"""

    load_path: str | None = None
    """a run, for its newest checkpoint, or one checkpoint, or its folder `best`"""
    output: str | None = None
    """folder to make; default: `export` in the run"""
    merged: bool = False
    """also write a whole model per adapter, with the adapter merged into the base"""
    gguf: str | None = None
    """also write the adapters for llama.cpp and Ollama; this names the base there: a GGUF file, or a model of Ollama"""
    overwrite: bool = False
    """replace an earlier export in that folder"""
    push_to_hub: str | None = None
    """also upload the export to this repository of the Hugging Face Hub, USER/NAME, which is private if it is new"""
    public: bool = False
    """with --push_to_hub: a new repository can be seen by all"""


COMMAND = Command(
    "export",
    "Export a trained team as PEFT folders with role prompts, model cards and the command that serves them.",
    (ExportSettings,),
    words="load_path",
)
MARK = "mafrt_export.json"
"""Lies in every export; a folder without it is not replaced."""


def export(argv: Sequence[str]) -> int:
    settings = COMMAND.read(argv).make(ExportSettings)
    if settings.load_path is None:
        raise ConfigError("Name a run, as in mafrt export runs/NAME.")
    loaded = resolve_played(settings.load_path)
    made = loaded.checkpoint is not None or loaded.best_of is not None
    if loaded.run is None or not loaded.adapters or not made:
        raise CheckpointError(f"{settings.load_path} holds no checkpoint of a run; give a run that made one.")
    target = Path(settings.output).expanduser() if settings.output else loaded.run / "export"
    check_target(target, settings.overwrite)
    if settings.public and settings.push_to_hub is None:
        raise ConfigError("--public says who sees the repository of --push_to_hub USER/NAME; name it, or leave it out.")
    if settings.push_to_hub is not None:
        check_login(settings.push_to_hub)
    facts = facts_of(loaded, target)
    for flag, given in (("merged", settings.merged), ("gguf", settings.gguf)):
        if given and facts.activated:
            raise ConfigError(
                f"Adapter {facts.activated[0]!r} has adapter_scope action, so it cannot act on all of a transcript; "
                f"leave --{flag} out."
            )
    if settings.gguf is not None:
        if len(facts.base_names) > 1:
            raise ConfigError("--gguf names one base, and the team has several; leave it out.")
        check_modelfile(facts.team.agents, settings.gguf)
        check_gguf(facts.base_names[0])
        if os.path.isfile(settings.gguf):
            # A Modelfile takes a path from its own folder on, and one that leads nowhere as a model to download.
            settings = replace(settings, gguf=os.path.abspath(settings.gguf))
    if settings.merged:
        check_mergeable(facts.base_names, facts.run.settings)
    with new_folder(target) as draft:
        write(draft, facts, loaded)
        if settings.merged:
            for base in facts.base_names:
                folders = {name: path for name, path in loaded.adapters.items() if facts.bases[name] == base}
                write_merged(draft / "merged", base, folders)
        if settings.gguf is not None:
            write_gguf(draft, facts, loaded, settings.gguf)
    for score in facts.scores:
        print(f"{score.name} {score}")
    print(f"The team after iteration {facts.step} is in {target}. Serve it:\n{facts.serve}")
    if settings.gguf is not None:
        print(f"With llama.cpp, in that folder:\n{served_by_llama(settings.gguf, facts.team.adapters)}")
    if settings.push_to_hub is not None:
        print(f"Uploaded to {push(target, settings.push_to_hub, public=settings.public)}")
    return 0


def check_target(target: Path, overwrite: bool) -> None:
    """ConfigError unless the export may be written there."""
    if (why := is_writable(target.parent)) is not None or not target.parent.is_dir():
        raise ConfigError(
            f"output {target} cannot be written ({why or 'its folder does not exist'}); give another one."
        )
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    # Only folders of our own making are ever replaced.
    if not (target / MARK).is_file():
        raise ConfigError(f"output {target} exists and is no export; give a folder that does not exist.")
    if not overwrite:
        raise ConfigError(
            f"output {target} holds an earlier export; give another folder, or replace it with --overwrite."
        )


def facts_of(loaded: LoadSource, target: Path) -> Export:
    """Everything that the cards say. Raises CheckpointError if the run has no record."""
    assert loaded.run is not None
    run, record = read_run(loaded.run), load_record(loaded.run)
    from mafrt.models.peft_format import read_settings

    team = record.agents()
    base = str(run.settings.get("model_name_or_path") or (record.base.name if record.base else "the base"))
    ranks, activated = {}, []
    for name in team.adapters:
        config = read_settings(loaded.adapter(name))
        # vLLM needs room for the largest rank of any layer.
        ranks[name] = max([int(config["r"]), *map(int, (config.get("rank_pattern") or {}).values())])
        if config.get("alora_invocation_tokens"):
            activated.append(name)
    bases = models_of(team, base)
    if activated:  # vLLM reads adapters that act on all tokens
        served = shlex.join(["mafrt", "serve_team", str(loaded.run), "--port", "8000"])
        here = shlex.join(["mafrt", "serve_team", loaded.run.name, "--port", "8000"])
    else:
        served = _vllm_commands(team, bases, ranks, lambda base: str(base_folder(base) or base), str(target.resolve()))
        here = _vllm_commands(team, bases, ranks, str, ".")
    scores = last_scores(run, loaded.step)
    return Export(run, team, bases, loaded.step, scores, ranks, served, activated, here)


def _vllm_commands(
    team: Team, bases: Mapping[str, str], ranks: Mapping[str, int], named: Callable[[str], str], folder: str
) -> str:
    """One server for each base, since a vLLM process serves one model; the adapters lie in `folder`."""
    commands = []
    for number, base in enumerate(dict.fromkeys(bases.values())):
        adapters = [adapter for adapter in team.adapters if bases[adapter] == base]
        words = ["vllm", "serve", named(base), "--enable-lora", "--max-loras", str(len(adapters))]
        words += ["--port", str(8000 + number)] if number else []
        words += ["--max-lora-rank", str(room_for_rank(max(ranks[adapter] for adapter in adapters))), "--lora-modules"]
        words += [f"{agent.name}={folder}/{agent.adapter}" for agent in team.agents if agent.adapter in adapters]
        commands.append(shlex.join(words))
    return "\n".join(commands)


def write(target: Path, facts: Export, loaded: LoadSource) -> None:
    """The folders of all adapters, the team file and the cards."""
    target.mkdir(parents=True)
    for name in facts.team.adapters:
        shutil.copytree(loaded.adapter(name), target / name)
        (target / name / "README.md").write_text(agent_card(facts, name), encoding="utf-8")
    for agent in facts.team.agents:
        path = target / agent.adapter / "role_prompt.txt"
        if path.exists():  # agents that share an adapter have prompts of their own
            path = target / agent.adapter / f"role_prompt_{agent.name}.txt"
        path.write_text(agent.prompt, encoding="utf-8")
    for base in facts.base_names:
        if (template := chat_template(base)) is None:
            continue
        adapters = [name for name in facts.team.adapters if facts.bases[name] == base]
        for folder in [""] if len(facts.base_names) == 1 else adapters:
            (target / folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (target / "team.json").write_text(facts.team.to_json(), encoding="utf-8")
    (target / "README.md").write_text(team_card(facts), encoding="utf-8")
    (target / MARK).write_text(json.dumps({"format": 1, "step": facts.step}) + "\n", encoding="utf-8")


def write_gguf(target: Path, facts: Export, loaded: LoadSource, base: str) -> None:
    """Each adapter as GGUF, and a Modelfile for each agent, in the adapter's folder."""
    for name in facts.team.adapters:
        write_gguf_adapter(target / name / GGUF, loaded.adapter(name), facts.bases[name])
    for agent in facts.team.agents:
        path = target / agent.adapter / "Modelfile"
        if path.exists():  # agents that share an adapter have prompts of their own
            path = target / agent.adapter / f"Modelfile_{agent.name}"
        temperature = facts.run.settings.get("temperature", 1.0) if agent.temperature is None else agent.temperature
        path.write_text(modelfile(agent, base, temperature), encoding="utf-8")


def chat_template(base: str) -> str | None:
    """The chat template of the base; None if it has none or cannot be reached."""
    from mafrt.models.pretrained import read_tokenizer

    try:
        template = read_tokenizer(str(base_folder(base) or base), **of_base(base)).chat_template
    except Exception as error:  # what libraries raise over a file's content has no common class
        print(f"The chat template is left out: the tokenizer of {base} cannot be loaded ({type(error).__name__}).")
        return None
    if isinstance(template, dict):  # several with names
        template = template.get("default")
    return template if isinstance(template, str) else None


main = partial(run_main, export)

if __name__ == "__main__":
    sys.exit(main())

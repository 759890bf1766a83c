"""Loads the base of a team, or its bases: one copy of each, however many agents name it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mafrt.config.team import Team
from mafrt.core.errors import ModelError
from mafrt.core.shipped import base_folder, require_base

if TYPE_CHECKING:
    from mafrt.models.several_bases import Bases


def models_of(team: Team, model: str) -> dict[str, str]:
    """Adapter -> its base: the name in the team file, or `model`.

    Names of one folder count as one, and the first of them stands for all.
    """
    first: dict[str, str] = {}
    bases: dict[str, str] = {}
    for adapter in team.adapters:
        name = team.model_for(adapter) or model
        bases[adapter] = first.setdefault(_place(name), name)
    return bases


def _place(name: str) -> str:
    """The folder of a base, resolved; a hub id as it is."""
    folder = base_folder(name) or Path(name).expanduser()
    return str(folder.resolve()) if folder.is_dir() else name


def check_models(models: Mapping[str, str], *, trust_remote_code: bool = False) -> None:
    """Check bases before any weights are loaded; `models` as of `models_of`.

    Raises:
        ModelError: a folder is missing or holds no model; of several bases, a tokenizer has no chat template.
    """
    from mafrt.models.pretrained import check_base, check_folder

    names = tuple(dict.fromkeys(models.values()))
    for name in names:
        require_base(name)
        check_folder(name, str(base_folder(name) or name))
    if len(names) > 1:
        for name in names:
            check_template(check_base(name, trust_remote_code=trust_remote_code)[2], name)


def check_template(tokenizer: Any, name: str) -> None:
    """Raise ModelError if a base of a mixed team cannot write chats."""
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError(
            f"the tokenizer of {name} has no chat template, which a base in a team of several needs to mark roles; "
            "take an instruction-tuned model, or put a chat_template.jinja into its folder"
        )


def load_bases(team: Team, model: str, **settings: Any) -> Bases:
    """The base of a team, or its bases; `settings` as of `SharedBase.load`.

    The base named `model` is the main one, where an agent sits on it, else that of the first agent.

    Raises:
        ModelError: a base cannot be loaded, or lacks a chat template.
    """
    from mafrt.models.several_bases import SeveralBases
    from mafrt.models.shared_base import SharedBase

    models = models_of(team, model)
    check_models(models, trust_remote_code=bool(settings.get("trust_remote_code")))
    names = sorted(dict.fromkeys(models.values()), key=lambda name: _place(name) != _place(model))
    parts = {name: SharedBase.load(name, **settings) for name in names}
    if len(parts) == 1:
        return parts[names[0]]
    for part in parts.values():
        part.compute.share_machine(part)
    return SeveralBases(parts, {agent.name: models[agent.adapter] for agent in team.agents}, models)

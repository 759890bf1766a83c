"""An export as a repository of a model hub."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mafrt.core.errors import ConfigError, MafrtError
from mafrt.core.text import error_line, shortened

_LOGIN = "run `hf auth login`, or set HF_TOKEN to a token that may write"


class HubError(MafrtError):
    """The hub does not take an export."""


def check_login(name: str) -> None:
    """Ask the hub who is logged in, before anything is written.

    Raises:
        ConfigError: `name` is no USER/NAME.
        HubError: nobody is logged in, or the hub cannot be reached.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        why = shortened(error_line(error), 200)
        raise ConfigError(f"push_to_hub is {shortened(name, 100)!r}; expected USER/NAME ({why}).") from None
    if name.count("/") != 1:
        raise ConfigError(f"push_to_hub is {name!r}; expected USER/NAME.")
    with _told(name):
        _api().whoami()


def push(folder: Path, name: str, *, public: bool) -> str:
    """Upload `folder` into the repository `name`, which is made if it is missing. Returns its address.

    A repository that is there keeps its visibility. Raises HubError.
    """
    api = _api()
    with _told(name):
        url = api.create_repo(name, private=not public, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="A team trained with mafrt")
    return str(url)


def _api() -> Any:
    from huggingface_hub import HfApi

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    return HfApi(library_name="mafrt")


@contextmanager
def _told(name: str) -> Iterator[None]:
    """Errors of the hub's client and of the network as one sentence, without the token that some of them hold."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    try:
        yield
    except LocalTokenNotFoundError:
        raise HubError(f"Nobody is logged in to the model hub; {_LOGIN}.") from None
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            raise HubError(f"The model hub does not let this login write {name} ({status}); {_LOGIN}.") from None
        raise HubError(f"The model hub refuses {name} ({status}): {shortened(error_line(error), 200)}.") from None
    except OfflineModeIsEnabled:
        raise HubError("The model hub is switched off by HF_HUB_OFFLINE; unset it to push.") from None
    except (OSError, httpx.HTTPError) as error:
        raise HubError(f"The model hub cannot be reached ({type(error).__name__}: {error_line(error)}).") from None

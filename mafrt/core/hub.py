"""Whether Hugging Face's hub can be reached, asked before its client does, which would retry for half a minute."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from urllib.parse import urlsplit

from mafrt.core.errors import ConfigError
from mafrt.core.http_request import is_http_address
from mafrt.core.text import shortened

REACH_S = 4.0
"""Seconds in which the hub has to answer."""


def check_endpoint() -> str:
    """The address of the hub. Raises ConfigError for one that is no address."""
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if not is_http_address(endpoint):
        raise ConfigError(f"HF_ENDPOINT is {shortened(endpoint, 200)!r}; expected an address such as https://HOST.")
    return endpoint


def reachable() -> bool:
    """Whether the hub answers within `REACH_S`; a connection through a proxy cannot be probed, and counts as one.

    Raises ConfigError for a hub that is no address.
    """
    endpoint = check_endpoint()
    if any(os.environ.get(name) for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")):
        return True
    place = urlsplit(endpoint)
    port = place.port or (443 if place.scheme == "https" else 80)
    reached = threading.Event()

    def probe() -> None:
        with contextlib.suppress(OSError), socket.create_connection((place.hostname or "", port), REACH_S):
            reached.set()

    prober = threading.Thread(target=probe, daemon=True)  # looking up the name may take longer than any time-out
    prober.start()
    prober.join(REACH_S)
    return reached.is_set()


def stay_offline() -> None:
    """Have the hub's packages look in the local cache alone from now on."""
    from huggingface_hub import constants

    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True  # read when the package is imported, which may have happened

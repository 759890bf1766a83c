"""Checks of an engine's settings before it, or a model, is loaded. Standard library only."""

from __future__ import annotations

import ipaddress
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mafrt.config.agent import ALL_LINEAR
from mafrt.config.train_config import EngineConfig
from mafrt.core.errors import ConfigError, EngineDownError
from mafrt.core.extras import check_package
from mafrt.core.http_request import StatusError, http_request, is_http_address
from mafrt.core.reading import parse_json, read_list, read_text
from mafrt.core.shipped import base_folder
from mafrt.engines.registry import ENGINES, SHIPPED

log = logging.getLogger(__name__)

TOKEN = "MAFRT_VLLM_TOKEN"
"""Environment variable with the servers' token: keys are never arguments."""


RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `max_lora_rank`."""

_LIKE_LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_FUSED = ("qkv_proj", "gate_up_proj", "query_key_value", "dense_h_to_4h", "dense_4h_to_h")
_OTHERS = ("dense", "fc1", "fc2", "c_attn", "c_proj", "c_fc", "w1", "w2", "w3", "wqkv", "wo", "out_proj")
SERVED = frozenset((ALL_LINEAR, *_LIKE_LLAMA, *_FUSED, *_OTHERS))
"""Linear layers, by the last part of their path, that vLLM's models take adapters for."""

OF_VLLM = ("max_loras", "max_lora_rank", "gpu_memory_utilization", "vllm_adapter_dir")
OF_PROCESS = ("max_loras", "gpu_memory_utilization")


def check_system(remedy: str) -> None:
    """ConfigError on a machine that vLLM does not run on."""
    if sys.platform != "linux":
        raise ConfigError(f"vLLM runs on Linux, and this is {sys.platform}; {remedy}.")


def check_engine(
    config: EngineConfig,
    ranks: Mapping[str, int],
    targets: Mapping[str, Sequence[str]],
    activated: Sequence[str] = (),
) -> None:
    """Refuse settings that contradict each other or the adapters.

    Args:
        ranks: rank of each adapter.
        targets: names or paths of the layers that each adapts.
        activated: adapters of scope action.

    Raises:
        MissingExtraError: a package of the engine is not installed.
        ConfigError: everything else.
    """
    if config.engine == "local":
        if config.vllm_servers:
            raise ConfigError(f"vllm_servers is {config.vllm_servers[0]}, but engine is local; add --engine vllm.")
        _refuse(config, OF_VLLM, "engine is local, which has no use for it; add --engine vllm, or leave it out")
        return
    if config.engine not in SHIPPED:
        ENGINES.resolve(config.engine)
        why = f"engine is {config.engine}, which reads no settings of vLLM; leave it out"
        _refuse(config, OF_VLLM, why)
        if config.vllm_servers:
            raise ConfigError(f"vllm_servers is {config.vllm_servers[0]}, but {why}.")
        return
    if activated:
        raise ConfigError(
            f"Adapter {activated[0]!r} has adapter_scope action, but engine {config.engine} applies an adapter to the "
            "transcript too; use --engine local, or --adapter_scope all."
        )
    if config.vllm_servers:
        _check_servers(config)
        check_package("vllm_servers", "servers", "httpx")
    else:
        _refuse(config, ("vllm_adapter_dir",), "there are no vllm_servers to read it; leave it out")
        check_system("give --vllm_servers on a machine that has it, or leave --engine vllm out")
        check_package("engine vllm", "vllm", "vllm")
    if config.max_lora_rank is not None and config.max_lora_rank not in RANKS:
        known = ", ".join(str(rank) for rank in RANKS)
        raise ConfigError(f"max_lora_rank is {config.max_lora_rank}; vLLM takes {known}.")
    for name, rank in ranks.items():
        most = config.max_lora_rank or RANKS[-1]
        if rank > most:
            where = "--max_lora_rank" if config.max_lora_rank else "the largest rank that vLLM knows"
            raise ConfigError(
                f"Adapter {name!r} has rank {rank}, above {where} ({most}); raise the one or lower the other."
            )
    for name, layers in targets.items():
        if any(path.rsplit(".", 2)[-2:-1] == ["experts"] for path in layers):
            raise ConfigError(
                f"Adapter {name!r} has experts among its targets, which engine {config.engine} does not serve yet; "
                "name the others in --lora_targets, such as q_proj k_proj v_proj o_proj, or use --engine local."
            )
        strange = sorted({last for path in layers if (last := path.rsplit(".", 1)[-1]) not in SERVED})
        if strange:
            raise ConfigError(
                f"Adapter {name!r} has the target {strange[0]}, which vLLM does not serve; choose among "
                f"{', '.join(sorted(SERVED))}, or use --engine local."
            )


def server_urls(named: Sequence[str]) -> tuple[str, ...]:
    """The servers' addresses: those that are named, and the lines of a file that is named as `@FILE`.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    urls: list[str] = []
    for name in named:
        try:
            lines = read_list(Path(name[1:]).expanduser()) if name.startswith("@") else [name]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"vllm_servers names the list {name[1:]}, which cannot be read: {error}.") from None
        if not lines:
            raise ConfigError(f"vllm_servers names the list {name[1:]}, which is empty; put an address on each line.")
        urls += lines
    return tuple(urls)


def reach_servers(config: EngineConfig, model: str) -> None:
    """Ask every server for the models that it serves, before the base is loaded.

    Raises:
        EngineDownError: no server answers.
        ConfigError: a server wants another token, or its files describe another base.
    """
    silent = []
    urls = server_urls(config.vllm_servers)
    for url in urls:
        try:
            models = served_bases(url.rstrip("/"))
        except StatusError as error:
            if error.status in (401, 403):
                raise ConfigError(f"{url} refuses the token ({error.status}); set {TOKEN} to its --api-key.") from None
            silent.append(f"{url}: {error}")
        except (OSError, ValueError) as error:
            silent.append(f"{url}: {error}")
        else:
            for served in models:
                _refuse_other_base(url, served, model)
    if urls and len(silent) == len(urls):
        raise EngineDownError(f"No vLLM server answers ({'; '.join(silent)}); start one, or leave --vllm_servers out.")
    for line in silent:
        log.warning("A vLLM server does not answer (%s); the others sample.", line)


def served_bases(url: str) -> list[str]:
    """Where a server says its bases come from. Raises OSError (StatusError) or ValueError where it does not say."""
    token = os.environ.get(TOKEN)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    content = parse_json(http_request(url + "/v1/models", headers=headers, within_s=10, most=2**20))
    if not isinstance(content, dict) or not isinstance(content.get("data"), list):
        raise ValueError("it is no OpenAI-compatible server")
    return [str(card.get("root", "")) for card in content["data"] if not card.get("parent")]


def _refuse_other_base(url: str, served: str, model: str) -> None:
    """Compare the configurations of two model folders; log-probabilities are compared later (`logprob_check`)."""
    served_shape, ours = _shape(Path(served)), _shape(base_folder(model) or Path(model))
    for name in ours.keys() & served_shape.keys():
        if ours[name] != served_shape[name]:
            raise ConfigError(
                f"{url} holds another base ({served}): its {name} is {served_shape[name]}, that of {model} is "
                f"{ours[name]}; start it with the base that is trained."
            )


def _shape(folder: Path) -> dict[str, Any]:
    try:
        config = parse_json(read_text(folder / "config.json"))
    except (OSError, ValueError):
        return {}
    names = ("architectures", "hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size")
    return {name: config[name] for name in names if name in config}


def room_for_rank(rank: int) -> int:
    """The smallest `max_lora_rank` of vLLM that holds adapters of this rank."""
    return next(room for room in RANKS if room >= rank)


def is_loopback(url: str) -> bool:
    """Whether an address is on this machine by its own words; no name is looked up."""
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_servers(config: EngineConfig) -> None:
    _refuse(config, OF_PROCESS, "vllm_servers are started with settings of their own; give it to `vllm serve` instead")
    if config.tensor_parallel_size != 1:
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, but vllm_servers are started with settings of "
            "their own; give it to `vllm serve` instead."
        )
    urls = server_urls(config.vllm_servers)
    for url in urls:
        if not is_http_address(url, bare=True):
            raise ConfigError(f"vllm_servers has {url!r}; expected an address such as http://127.0.0.1:8001.")
    if len({url.rstrip("/") for url in urls}) < len(urls):
        raise ConfigError("vllm_servers names a server twice; give each once.")
    far = [url for url in urls if not is_loopback(url)]
    if far and not os.environ.get(TOKEN):
        raise ConfigError(
            f"The server {far[0]} is not on this machine and there is no token for it; start it with --api-key and set "
            f"{TOKEN} to the same."
        )
    if far and config.vllm_adapter_dir is None:
        raise ConfigError(
            f"The server {far[0]} is not on this machine; give --vllm_adapter_dir, a folder that both see under the "
            "same path."
        )


def _refuse(config: EngineConfig, names: Sequence[str], why: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None:
            raise ConfigError(f"{name} is {value}, but {why}.")

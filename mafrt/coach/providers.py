"""The three SDKs behind one method: a `JudgeQuestion` in, a `Reply` or a `CallFailedError` out.

Their own retries are off, since there is one loop around all of them (`retry.py`). Keys come from the environment and
go into headers; nothing here writes one anywhere, and a message that repeats one is washed before it leaves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from mafrt.coach.api_errors import CallFailedError, failed
from mafrt.coach.judge_prompt import JudgeQuestion
from mafrt.config.resolve import Registry, user_line
from mafrt.core.errors import ConfigError, MafrtError, MissingExtraError
from mafrt.core.extras import install
from mafrt.core.http_bounds import bounded
from mafrt.core.http_request import is_http_address

PROVIDERS = Registry(
    "coach provider",
    {
        "openai": "mafrt.coach.providers:OpenAIProvider",
        "anthropic": "mafrt.coach.providers:AnthropicProvider",
        "google": "mafrt.coach.providers:GoogleProvider",
        "vertex": "mafrt.coach.providers:VertexProvider",
    },
)
"""The one list of providers. Each is called with (model, base_url, max_tokens, timeout_s)."""

_MOST_TOKENS = 10**9
"""Tokens of one call, at most; a larger count is taken for none."""

_MOST_REPLY: dict[str, Any] = {"most": 1 << 20, "parts": 20_000}
"""Bytes of one reply that are read, and brackets, braces and commas: a verdict has a thousandth of both."""

_NETWORK = ("httpx", "httpx2", "httpcore", "aiohttp", "anyio", "h11", "ssl", "socket")
"""Packages whose exceptions mean that the network failed, whichever of them an SDK is built on."""


@dataclass(frozen=True)
class Reply:
    """A judge's reply."""

    text: str
    cut: bool
    """whether it ended at the token limit"""
    tokens_in: int | None
    """read, by the provider's own count; None if it gives none"""
    tokens_out: int | None
    """written, reasoning included"""
    problem: str | None = None
    """why the reply is no judgement, also if its text looks like one: a filter, a refusal, content that is no text"""


class Provider(Protocol):
    """A judge's model behind an API."""

    where: str
    """the address that is asked; part of the cache's key"""

    async def ask(self, ask: JudgeQuestion) -> Reply: ...

    async def close(self) -> None: ...


def make_provider(name: str, model: str, base_url: str | None, max_tokens: int, timeout_s: float) -> Provider:
    """The provider called `name`.

    Raises:
        ConfigError: an unknown name, no model, no key, or an address that cannot be one.
        MissingExtraError: its SDK is not installed.
    """
    if not model or any(c.isspace() for c in model):
        raise ConfigError(f"coach {name}:{model} names no model; give one, as in {name}:MODEL.")
    _check_url(base_url)
    factory = PROVIDERS.resolve(name)
    try:
        provider: Provider = factory(model, base_url, max_tokens, timeout_s)
    except ImportError as error:
        raise MissingExtraError(
            f"coach {name}:{model} needs the package {error.name or name}: {install('coach')}"
        ) from error
    except MafrtError:
        raise
    except Exception as error:
        raise ConfigError(
            f"coach {name}:{model} could not be built from (model, base_url, max_tokens, timeout_s): "
            f"{type(error).__name__}: {error}{user_line(error)}"
        ) from error
    if not all(hasattr(provider, member) for member in ("where", "ask", "close")):
        raise ConfigError(
            f"coach {name}:{model} made a {type(provider).__name__}, which is no provider; it needs where, "
            "ask(ask) and close()."
        )
    return provider


def register_provider(name: str, factory: Callable[[str, str | None, int, float], Provider]) -> None:
    """Make `factory` available as `--coach name:MODEL`. Raises ConfigError for a name that is taken."""
    if not callable(factory):
        raise ConfigError(f"the factory of coach provider {name!r} must be a class or function, found {factory!r}")
    PROVIDERS.register(name, factory)


class OpenAIProvider:
    """OpenAI's chat completions, and every server that speaks them."""

    def __init__(self, model: str, base_url: str | None, max_tokens: int, timeout_s: float) -> None:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        # Self-hosted servers often need no key.
        self._key = _key("openai", "OPENAI_API_KEY", optional=base_url is not None) or "none"
        http = bounded(DefaultAsyncHttpxClient(timeout=timeout_s), **_MOST_REPLY)
        self._client = AsyncOpenAI(
            api_key=self._key, base_url=base_url, max_retries=0, timeout=timeout_s, http_client=http
        )
        self.where = str(self._client.base_url)
        self._model = model
        # The newer name is the only one that OpenAI's reasoning models take; other servers know the older.
        self._limit: dict[str, Any] = {"max_completion_tokens" if base_url is None else "max_tokens": max_tokens}

    async def ask(self, ask: JudgeQuestion) -> Reply:
        form: dict[str, Any] = {}
        if ask.schema is not None:
            wanted = {"name": "verdict", "strict": True, "schema": ask.schema}
            form["response_format"] = {"type": "json_schema", "json_schema": wanted}
        messages: Any = [{"role": "system", "content": ask.system}, {"role": "user", "content": ask.user}]
        try:
            response = await self._client.chat.completions.create(
                model=self._model, messages=messages, **self._limit, **form
            )
        except Exception as error:
            raise _failure(error, self._key) from error
        choice = _first(getattr(response, "choices", None))
        message = getattr(choice, "message", None)
        usage = getattr(response, "usage", None)
        reason = getattr(choice, "finish_reason", None)
        text, problem = _text_of(getattr(message, "content", None))
        if getattr(message, "refusal", None):
            problem = "the judge refused"
        return Reply(
            text=text,
            cut=reason == "length",
            tokens_in=_count(getattr(usage, "prompt_tokens", None)),
            tokens_out=_count(getattr(usage, "completion_tokens", None)),
            problem=_ended_by(reason, "stop", "length") or problem,
        )

    async def close(self) -> None:
        await self._client.close()


class AnthropicProvider:
    """Anthropic's messages."""

    def __init__(self, model: str, base_url: str | None, max_tokens: int, timeout_s: float) -> None:
        from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient

        self._key = _key("anthropic", "ANTHROPIC_API_KEY")
        http = bounded(DefaultAsyncHttpxClient(timeout=timeout_s), **_MOST_REPLY)
        self._client = AsyncAnthropic(
            api_key=self._key, base_url=base_url, max_retries=0, timeout=timeout_s, http_client=http
        )
        self.where = str(self._client.base_url)
        self._model, self._max_tokens = model, max_tokens

    async def ask(self, ask: JudgeQuestion) -> Reply:
        form: dict[str, Any] = {}
        if ask.schema is not None:
            form["output_config"] = {"format": {"type": "json_schema", "schema": ask.schema}}
        try:
            response = await self._client.messages.create(
                model=self._model,
                max_tokens=self._max_tokens,
                system=ask.system,
                messages=[{"role": "user", "content": ask.user}],
                **form,
            )
        except Exception as error:
            raise _failure(error, self._key) from error
        usage = getattr(response, "usage", None)
        read = [
            _count(getattr(usage, name, None))
            for name in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        ]
        blocks = getattr(response, "content", None)
        reason = getattr(response, "stop_reason", None)
        cut = ("max_tokens", "model_context_window_exceeded")
        text, problem = _joined(blocks, lambda block: getattr(block, "type", None) == "text")
        return Reply(
            text=text,
            cut=reason in cut,
            tokens_in=None if read[0] is None else sum(tokens or 0 for tokens in read),
            tokens_out=_count(getattr(usage, "output_tokens", None)),
            problem=_ended_by(reason, "end_turn", "stop_sequence", *cut) or problem,
        )

    async def close(self) -> None:
        await self._client.close()


class GoogleProvider:
    """Gemini with an API key."""

    def __init__(self, model: str, base_url: str | None, max_tokens: int, timeout_s: float) -> None:
        from google import genai

        self._key = _key("google", "GEMINI_API_KEY", "GOOGLE_API_KEY")
        options = _google_options(base_url, timeout_s, "v1beta")
        self._client = genai.Client(vertexai=False, api_key=self._key, http_options=options)
        self.where = base_url or "google"
        self._model, self._max_tokens = model, max_tokens

    async def ask(self, ask: JudgeQuestion) -> Reply:
        from google.genai import types

        form: dict[str, Any] = {}
        if ask.schema is not None:
            form = {"response_mime_type": "application/json", "response_json_schema": ask.schema}
        try:
            response = await self._client.aio.models.generate_content(
                model=self._model,
                contents=ask.user,
                config=types.GenerateContentConfig(
                    system_instruction=ask.system, max_output_tokens=self._max_tokens, **form
                ),
            )
        except Exception as error:
            raise _failure(error, self._key) from error
        candidate = _first(getattr(response, "candidates", None))
        text, problem = _joined(
            getattr(getattr(candidate, "content", None), "parts", None), lambda part: not getattr(part, "thought", None)
        )
        if blocked := getattr(getattr(response, "prompt_feedback", None), "block_reason", None):
            problem = f"the provider blocked the question ({str(getattr(blocked, 'name', blocked))[:40]})"
        reason = getattr(candidate, "finish_reason", None)
        usage = getattr(response, "usage_metadata", None)
        written = [_count(getattr(usage, name, None)) for name in ("candidates_token_count", "thoughts_token_count")]
        return Reply(
            text=text,
            cut=reason == types.FinishReason.MAX_TOKENS,
            tokens_in=_count(getattr(usage, "prompt_token_count", None)),
            tokens_out=None if written[0] is None else sum(tokens or 0 for tokens in written),
            problem=_ended_by(None if reason is None else reason.name, "STOP", "MAX_TOKENS") or problem,
        )

    async def close(self) -> None:
        await self._client.aio.aclose()
        self._client.close()


class VertexProvider(GoogleProvider):
    """Gemini on Vertex AI, with a project and Google's application default credentials."""

    def __init__(
        self, model: str, base_url: str | None, max_tokens: int, timeout_s: float, credentials: Any = None
    ) -> None:
        from google import genai

        project = os.environ.get("VERTEX_PROJECT") or os.environ.get("GOOGLE_CLOUD_PROJECT")
        if not project:
            raise ConfigError(
                f"coach vertex:{model} needs a project; set VERTEX_PROJECT or GOOGLE_CLOUD_PROJECT in the environment."
            )
        location = os.environ.get("VERTEX_LOCATION") or os.environ.get("GOOGLE_CLOUD_LOCATION") or "global"
        file = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
        if file and not Path(file).is_file():
            raise ConfigError(
                f"coach vertex:{model}: GOOGLE_APPLICATION_CREDENTIALS names {file}, which is no file; correct it, or "
                "unset it and use `gcloud auth application-default login`."
            )
        self._key = ""
        self._client = genai.Client(
            vertexai=True,
            project=project,
            location=location,
            credentials=credentials,
            http_options=_google_options(base_url, timeout_s, "v1beta1"),
        )
        self.where = f"{base_url or 'vertex'} {project} {location}"
        self._model, self._max_tokens = model, max_tokens


def _google_options(base_url: str | None, timeout_s: float, version: str) -> Any:
    from google.genai import _api_client, types

    package: Any = getattr(_api_client, "httpx2", None) or getattr(_api_client, "httpx", None)
    # Milliseconds. One attempt said outright: with no retry options at all, it tries a second time. With a client of
    # httpx it does not take aiohttp, which nothing here bounds.
    return types.HttpOptions(
        httpx_async_client=bounded(package.AsyncClient(timeout=timeout_s), **_MOST_REPLY),
        base_url=base_url,
        api_version=version,
        timeout=int(timeout_s * 1000),
        retry_options=types.HttpRetryOptions(attempts=1),
    )


def _key(provider: str, *names: str, optional: bool = False) -> str:
    """The first of these environment variables that is set."""
    for name in names:
        if value := os.environ.get(name, "").strip():
            return value
    if optional:
        return ""
    raise ConfigError(f"coach {provider} needs a key; set {' or '.join(names)} in the environment.")


def _check_url(base_url: str | None) -> None:
    if base_url is None:
        return
    if not is_http_address(base_url):
        raise ConfigError(f"coach_base_url is {base_url!r}; expected an address such as http://127.0.0.1:8000/v1.")
    parts = urlsplit(base_url)
    if parts.username or parts.password or parts.query:
        raise ConfigError(
            f"coach_base_url for {parts.hostname} holds a password or a query, and would be written to args.yaml; give "
            "the address alone, and the key in the environment."
        )


def _failure(error: Exception, key: str) -> Exception:
    """An SDK's exception as a CallFailedError; one that is no failure of a call is returned unchanged."""
    body = getattr(error, "body", None) or getattr(error, "details", None)
    detail = _message(body) or str(getattr(error, "message", None) or error)
    detail = detail.replace(key, "***") if len(key) > 6 else detail
    status = getattr(error, "status_code", None) or (
        getattr(error, "code", None) if type(error).__module__.startswith("google.genai") else None
    )
    if isinstance(status, int) and status >= 300:
        response = getattr(error, "response", None)
        headers: Mapping[str, str] = getattr(response, "headers", None) or {}
        return failed(status, detail, headers, body)
    families = {kind.__module__.split(".")[0] for kind in type(error).__mro__}
    name = type(error).__name__
    if type(error).__module__.startswith("google.auth") and name != "TransportError":
        return CallFailedError("dead", f"Google's credentials cannot be used ({detail})")
    if (
        isinstance(error, (OSError, TimeoutError))
        or families & set(_NETWORK)
        or name in ("APIConnectionError", "APITimeoutError", "TransportError")
    ):
        because = f" {error.__cause__}"[:200] if "onnection" in detail and error.__cause__ else ""
        return CallFailedError("transient", f"no connection, or no whole reply ({name}: {detail[:200]}{because})")
    if isinstance(error, (ValueError, RecursionError)) or name in ("APIResponseValidationError", "APIError"):
        # Half a JSON text, or none; APIError is Google's for a status such as 204.
        return CallFailedError("transient", f"a reply that is not JSON ({detail[:200]})")
    return error


def _message(body: Any) -> str:
    """The provider's own message in an error's body; the SDKs put more around it."""
    inner = body.get("error", body) if isinstance(body, dict) else None
    return str(inner.get("message") or "") if isinstance(inner, dict) else ""


def _first(items: Any) -> Any:
    return items[0] if isinstance(items, (list, tuple)) and items else None


def _text_of(content: Any) -> tuple[str, str | None]:
    """A message's content, and why it is no text."""
    if content is None or isinstance(content, str):
        return content or "", None
    return "", f"the content is a {type(content).__name__} and not a text"


def _joined(parts: Any, wanted: Callable[[Any], bool]) -> tuple[str, str | None]:
    """The texts of the wanted parts of a message, and why they are none."""
    if parts is None:
        return "", None
    if not isinstance(parts, (list, tuple)):
        return "", f"the content is a {type(parts).__name__} and not a list of parts"
    texts = [_text_of(getattr(part, "text", None)) for part in parts if wanted(part)]
    return "".join(text for text, _ in texts), next((problem for _, problem in texts if problem), None)


def _ended_by(reason: Any, *sound: str) -> str | None:
    """The problem with a reply that a content filter, a tool call or the like has ended; None if there is none."""
    if reason is None or reason in sound:
        return None
    return f"the provider ended the reply by {str(reason)[:40]!r}"


def _count(value: Any) -> int | None:
    """A number of tokens; None where the provider gives none that can be one."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_TOKENS else None

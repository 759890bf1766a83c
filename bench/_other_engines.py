"""Other systems that decode, as rivals of `bench rollout`: vLLM, with adapters, and llama.cpp, without.

Both read the rivals' own weights from a temporary folder, llama.cpp as a GGUF file in the same number format, with a
vocabulary of texts that name their own token. Both run inside this process, so that either clock counts them.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from bench._gguf import stored_as, write_gguf
from bench._models import Rivals
from bench._rollout_rivals import Tokens
from mafrt.core.errors import ConfigError
from mafrt.core.types import Request
from mafrt.engines.checks import room_for_rank
from mafrt.engines.vllm.in_process import ON_CPU, QUIET

ENGINES = {"vllm": "vllm", "llama.cpp": "xllamacpp"}
"""name of an engine -> the package that holds it"""
_WORDS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **QUIET, **ON_CPU}


class Engine(Protocol):
    """One that decodes requests greedily, or at temperature 1, without an end token."""

    with_adapters: bool

    def generate(self, requests: Sequence[Request]) -> Tokens: ...

    def close(self) -> None: ...


def open_engine(name: str, models: Rivals, folder: Path, *, dtype: str, window: int, rows: int, threads: int) -> Engine:
    """An engine of `ENGINES` on the rivals' weights.

    Args:
        folder: an empty one for the weights; it is read while the engine opens.
        dtype: number format of weights and cache.
        window: most tokens of a prompt and its answer.
        rows: most rows at once.

    Raises:
        ConfigError: the package is missing, or cannot hold such a model.
    """
    if importlib.util.find_spec(ENGINES[name]) is None:
        raise ConfigError(f"{name} is not installed: found no package {ENGINES[name]!r}; pip install {ENGINES[name]}.")
    if name == "vllm":
        return _Vllm(models, folder, dtype, window, rows, threads)
    return _LlamaCpp(models.plain, folder, dtype, window, rows, threads)


class _Vllm:
    with_adapters = True

    def __init__(self, models: Rivals, folder: Path, dtype: str, window: int, rows: int, threads: int) -> None:
        os.environ.update({word: value for word, value in _WORDS.items() if word not in os.environ})
        from vllm.lora.request import LoRARequest

        vllm: Any = importlib.import_module("vllm")

        models.plain.save_pretrained(folder / "base")
        adapters = list(models.base.records)
        models.peft.save_pretrained(folder / "adapters", selected_adapters=adapters)
        self._lora = {
            name: LoRARequest(name, number, str(folder / "adapters" / name)) for number, name in enumerate(adapters, 1)
        }
        self._vllm = vllm
        rank = max(models.base.records[name].rank for name in adapters)
        self._llm: Any = vllm.LLM(
            model=str(folder / "base"),
            skip_tokenizer_init=True,
            dtype=dtype,
            max_model_len=window,
            max_num_seqs=rows,
            # No two rows share a prompt, so that it would have nothing to reuse but the round before.
            enable_prefix_caching=False,
            enable_lora=True,
            max_loras=len(adapters),
            max_lora_rank=room_for_rank(rank),
        )
        torch.set_num_threads(threads)  # vLLM has its own idea of them

    def generate(self, requests: Sequence[Request]) -> Tokens:
        settings = [
            self._vllm.SamplingParams(
                temperature=r.sampling.temperature,
                max_tokens=r.sampling.max_new_tokens,
                ignore_eos=True,
                detokenize=False,
            )
            for r in requests
        ]
        outs = self._llm.generate(
            [{"prompt_token_ids": r.prompt_ids} for r in requests],
            settings,
            lora_request=[self._lora.get(str(r.adapter)) for r in requests],
            use_tqdm=False,
        )
        return [list(out.outputs[0].token_ids) for out in outs]

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        del self._llm
        gc.collect()
        cleanup_dist_env_and_memory()


class _LlamaCpp:
    with_adapters = False

    def __init__(self, model: Any, folder: Path, dtype: str, window: int, rows: int, threads: int) -> None:
        import xllamacpp

        path = folder / "model.gguf"
        write_gguf(model, path, dtype)
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel = window * rows, rows
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.cache_type_k = params.cache_type_v = stored_as(dtype)
        if dtype == "float32":  # its fused attention rounds to fewer digits
            params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.verbosity = 0
        self._server = xllamacpp.Server(params)

    def generate(self, requests: Sequence[Request]) -> Tokens:
        sampling = requests[0].sampling
        answer = self._server.handle_completions(
            {
                "prompt": [r.prompt_ids for r in requests],
                "n_predict": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "samplers": ["temperature"],
                "cache_prompt": False,
            }
        )
        if "choices" not in answer:
            raise RuntimeError(f"llama.cpp answered {str(answer)[:300]}")
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        return [[int(token) for token in re.findall(r"<(\d+)>", choice["text"])] for choice in choices]

    def close(self) -> None:
        del self._server

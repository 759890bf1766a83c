"""A base with adapters and their optimizers, small enough to read: for the benchmarks of runs as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from mafrt.config.agent import LoraSpec
from mafrt.config.train_config import LearnConfig
from mafrt.core import atomic_files
from mafrt.core.types import Completion, Request, SamplingParams
from mafrt.engines.local.engine import LocalEngine
from mafrt.models.shared_base import SharedBase
from mafrt.storage import checkpoint, load_path
from mafrt.training.optimizer_steps import OptimizerSteps, make_optimizer_steps

OPTIMIZERS = "state/optimizers.pt"


class Training:
    """A base with fresh adapters and AdamW, and an iteration that samples answers and makes one step towards them.

    Args:
        model: name or folder of the base.
        count: number of adapters, on all linear layers.
        rank: of each.
        rows: answers of an iteration, of the adapters in turn.
        tokens: of every prompt, and of every answer.
    """

    def __init__(self, model: str, count: int, rank: int, rows: int, tokens: int) -> None:
        self.rows, self.tokens = rows, tokens
        self.base = SharedBase.load(model)
        self.names = [f"agent{k}" for k in range(count)]
        for seed, name in enumerate(self.names):
            self.base.add_adapter(name, LoraSpec(rank=rank, alpha=2.0 * rank), seed=seed)
        self.steps: OptimizerSteps = make_optimizer_steps(self.base, dict.fromkeys(self.names, LearnConfig()))

    def requests(self) -> list[Request]:
        """Random prompts, the same in every iteration."""
        generator = torch.Generator().manual_seed(1)
        prompts = torch.randint(5, self.base.config.vocab_size, (self.rows, self.tokens), generator=generator)
        asked = SamplingParams(max_new_tokens=self.tokens)
        names = self.names
        return [Request(p, names[row % len(names)], asked, seed=row) for row, p in enumerate(prompts.tolist())]

    def iterate(self) -> None:
        """Sample answers on the base itself, and make one step towards them."""
        requests = self.requests()
        self.learn(requests, LocalEngine(self.base, eos_ids=()).generate(requests))

    def learn(self, requests: Sequence[Request], answers: Sequence[Completion]) -> None:
        """One optimizer step of every adapter towards the answers."""
        # Another engine may end an answer early; every row is then as long all the same.
        said = [(*answer.ids, *[5] * (self.tokens - len(answer.ids))) for answer in answers]
        ids = torch.tensor([(*asked.prompt_ids, *own) for asked, own in zip(requests, said, strict=True)])
        ids = ids.to(self.base.device)
        hidden = self.base.forward(ids, None, torch.arange(len(ids)) % len(self.names))
        spoken = hidden[:, self.tokens - 1 : -1].flatten(0, 1)
        logprobs, _ = self.base.token_logprobs(spoken, ids[:, self.tokens :].flatten())
        (-logprobs.mean()).backward()
        self.steps.step(self.names)
        for name in self.names:
            self.base.bump(name)
            for parameter in self.base.adapter_parameters(name):
                parameter.grad = None

    def save(self, root: Path, step: int) -> Path:
        """Write a checkpoint and return its folder."""
        writers: dict[str, checkpoint.Writer] = {
            name: lambda folder, name=name: self.base.save_adapter(name, folder)  # type: ignore[misc]
            for name in self.names
        }
        writers[OPTIMIZERS] = lambda path: atomic_files.save_tensors(path, self.steps.state())
        return checkpoint.save(root, step, writers, meta={"base": self.base.fingerprint()}, keep_last=2)

    def restore(self, path: Path) -> None:
        """Load a checkpoint of `save`."""
        loaded = load_path.resolve(path)
        for name in self.names:
            self.base.load_adapter(name, loaded.adapter(name))
        self.steps.load_state(atomic_files.load_tensors(loaded.state(Path(OPTIMIZERS).name)))

    def tensors(self) -> list[Tensor]:
        """Weights and optimizer states, in a fixed order."""
        states = [state for own in self.steps.state().values() for state in own["state"].values()]
        weights = [p.detach() for name in self.names for p in self.base.adapter_parameters(name)]
        return [*weights, *(value for state in states for value in state.values() if isinstance(value, Tensor))]

"""TRL's GRPOTrainer with PEFT, in a process of its own, one step at a time.

In one process the two libraries would change each other's heap: a step whose activations no longer fit into the memory
that the last step left has to ask the kernel for more, and where pages are slow to come that took up to half of it.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from bench import _measure
from mafrt.config.agent import ALL_LINEAR
from mafrt.cpu.malloc import keep_freed_memory
from mafrt.models.pretrained import load_pretrained


@dataclass(frozen=True)
class Work:
    """What is trained on."""

    args: argparse.Namespace
    """the benchmark's flags"""
    messages: Sequence[Sequence[dict[str, str]]]
    """one conversation for each prompt"""
    reward: Callable[[str], float]
    """of an answer's text; a function of a module"""
    lr: float
    steps: int
    """number of steps that will be asked for"""


class Trl:
    """A run of TRL. Raises RuntimeError, here or in a later call, with the error of the other process."""

    def __init__(self, work: Work) -> None:
        # Forked, the process would share the locks of threads that it does not have.
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, work), daemon=True)
        self._process.start()
        other.close()
        self.prompt: list[int] = self._answer()
        """token ids of the first prompt, as TRL makes them"""

    def step(self) -> float:
        """Seconds of one iteration."""
        self._pipe.send(None)
        return float(self._answer())

    def logprobs(self, ids: Sequence[int]) -> Tensor:
        """`[1, T, V]` of all tokens after each prefix of `ids`."""
        self._pipe.send(list(ids))
        return torch.from_numpy(self._answer())

    def close(self) -> None:
        self._pipe.close()
        self._process.join(timeout=60)

    def _answer(self) -> Any:
        try:
            answer = self._pipe.recv()
        except EOFError:
            raise RuntimeError("the process with TRL's trainer ended") from None
        if isinstance(answer, BaseException):
            raise RuntimeError(f"TRL's trainer failed: {answer}") from answer
        return answer


def _serve(pipe: Connection, work: Work) -> None:
    torch.set_num_threads(work.args.threads)
    keep_freed_memory()  # as every command of this library does
    try:
        trainer = _make_trainer(pipe, work)
        first = trainer.train_dataset[0]["prompt"]
        given = trainer.processing_class.apply_chat_template(
            first, add_generation_prompt=True, tokenize=True, return_dict=True
        )
        pipe.send(list(given["input_ids"]))
        trainer.train()
    except (EOFError, BrokenPipeError):
        pass  # the benchmark is over
    except Exception as error:
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))


def _make_trainer(pipe: Connection, work: Work) -> Any:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    args = work.args
    clock = _measure.CLOCKS[args.clock]

    class Turnstile(TrainerCallback):
        """TRL's loop cannot be stepped from outside, so it waits here before each step."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            while (asked := pipe.recv()) is not None:
                with torch.no_grad():
                    logits = trainer.model(input_ids=torch.tensor([asked], device=args.device)).logits
                pipe.send(logits.float().log_softmax(-1).cpu().numpy())
            self.started = clock()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            _measure.synchronize(args.device)
            pipe.send(clock() - self.started)

    # As transformers loads it: a SharedBase gives a model norms, products and recurrences of this library.
    model, tokenizer, _ = load_pretrained(
        args.model,
        dtype=args.dtype,
        device=args.device,
        attn_implementation="sdpa",
        trust_remote_code=False,
        bits=None,
    )
    config = GRPOConfig(
        output_dir="runs/bench_trl",
        per_device_train_batch_size=args.prompts * args.samples,
        num_generations=args.samples,
        steps_per_generation=1,
        max_steps=work.steps,
        max_completion_length=args.tokens,
        # As long as ours, which have no end token.
        generation_kwargs={"min_new_tokens": args.tokens},
        learning_rate=work.lr,
        beta=0.0,
        gradient_checkpointing=False,
        loss_type="grpo",
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        use_cpu=args.device == "cpu",
        bf16=False,
        disable_tqdm=True,
        shuffle_dataset=False,
    )
    make: Any = GRPOTrainer
    trainer: Any = make(
        model=model,
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [work.reward(c[0]["content"]) for c in completions],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [list(each) for each in work.messages]}),
        peft_config=LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=ALL_LINEAR),
        callbacks=[Turnstile()],
    )
    return trainer

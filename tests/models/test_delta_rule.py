"""Our forms of the gated delta rule against transformers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bench._gpu.pretend_cuda import PretendCuda
from mafrt.models import delta_rule
from mafrt.models.compute import Compute

FAMILIES = ["qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid"]


def plain(device: str) -> Compute:
    return Compute()


def forms(family: str) -> tuple[Any, Any]:
    """transformers' own, also where a test of this process has loaded such a model before."""
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    step, chunks = (getattr(module, name) for name in (delta_rule.STEP, delta_rule.CHUNKS))
    return getattr(step, "_theirs", step), getattr(chunks, "_theirs", chunks)


def inputs(rows: int, tokens: int, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(tokens)
    heads, width, wide = 3, 8, 5
    q, k = (torch.randn(rows, tokens, heads, width, dtype=dtype) for _ in range(2))
    v = torch.randn(rows, tokens, heads, wide, dtype=dtype)
    g, beta = -3 * torch.rand(rows, tokens, heads), torch.rand(rows, tokens, heads).to(dtype)
    return [q, k, v, g, beta], torch.randn(rows, heads, width, wide)


def apply(form: Any, given: list[Tensor], state: Tensor | None, normed: bool) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta = given
    more = {"output_final_state": True, "use_qk_l2norm_in_kernel": normed, "cu_seqlens": None}
    return form(q, k, v, g=g, beta=beta, initial_state=state, **more)  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normed", [True, False])
def test_a_step_is_transformers_own(family: str, dtype: torch.dtype, normed: bool) -> None:
    theirs, _ = forms(family)
    given, state = inputs(4, 1, dtype)
    before = state.clone()
    with torch.no_grad():
        expected, kept = apply(theirs, given, state, normed)
        found, ours = apply(delta_rule.one_step(theirs, plain), given, state, normed)
    assert found.dtype == expected.dtype and found.shape == expected.shape and ours.shape == kept.shape
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ours, kept)
    assert torch.equal(state, before), "another row may go on from it"


def test_a_step_is_sixteen_launches() -> None:
    theirs, _ = forms("qwen3_5")
    with PretendCuda() as gpu, torch.no_grad():
        given, state = inputs(4, 1, torch.bfloat16)
        given, state = [each.to("cuda") for each in given], state.to("cuda")
        gpu.clear()
        apply(delta_rule.one_step(theirs, plain), given, state, True)
        assert gpu.launched <= 16, gpu.launches


@pytest.mark.parametrize("last", [True, False])
def test_a_chunk_more_is_three_launches_forward_and_few_backward(last: bool) -> None:
    _, theirs = forms("qwen3_5")

    def launches(tokens: int) -> tuple[int, int]:
        given, state = inputs(2, tokens)
        leaves = [each.to("cuda").requires_grad_() for each in given]
        gpu.clear()
        out, kept = apply(delta_rule.even_chunks(theirs, plain), leaves, state.to("cuda"), True)
        forward = gpu.launched
        gpu.clear()
        (out.sum() + kept.sum() if last else out.sum()).backward()
        return forward, gpu.launched

    with PretendCuda() as gpu:
        (forward, backward), (more, back) = launches(2 * delta_rule.CHUNK), launches(8 * delta_rule.CHUNK)
    assert more - forward <= 6 * 3 and back - backward <= 6 * 18, (forward, backward, more, back)


@pytest.mark.cases(12)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens", [1, 2, 33, 64, 65, 130])
@pytest.mark.parametrize("state", [True, False])
def test_even_chunks_are_transformers_own_with_their_gradients(family: str, tokens: int, state: bool) -> None:
    _, theirs = forms(family)
    found, expected = [], []
    for form, into in ((theirs, expected), (delta_rule.even_chunks(theirs, plain), found)):
        given, start = inputs(2, tokens)
        leaves = [each.requires_grad_() for each in given]
        out, kept = apply(form, leaves, start if state else None, True)
        (out.square().sum() + kept.sum()).backward()
        into.extend([out, kept, *(each.grad for each in leaves)])
    for ours, own in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-4)


def test_several_tokens_and_gradients_go_the_way_of_transformers() -> None:
    theirs, _ = forms("qwen3_5")
    calls = []

    def noted(*given: Any, **more: Any) -> Any:
        calls.append(given[0].shape[1])
        return theirs(*given, **more)

    step = delta_rule.one_step(noted, plain)
    with torch.no_grad():
        apply(step, *inputs(2, 3), True)
        apply(step, inputs(2, 1)[0], None, True)
    apply(step, *inputs(2, 1), True)
    assert calls == [3, 1, 1]


def test_states_are_written_over_only_where_that_was_said() -> None:
    given, state = inputs(2, 1)
    said = []

    class Noting(Compute):
        def delta_step(self, *given: Any, in_place: bool = False) -> Any:
            said.append(in_place)
            return super().delta_step(*given)

    step = delta_rule.one_step(forms("qwen3_5")[0], lambda device: Noting())
    with torch.no_grad():
        apply(step, given, state, True)
        with delta_rule.overwritten():
            apply(step, given, state, True)
        apply(step, given, state, True)
    assert said == [False, True, False]


def test_a_packages_convolution_is_called_as_transformers_calls_it() -> None:
    def packages(x: Any, weight: Any, bias: Any = None, seq_idx: Any = None, activation: Any = None) -> Any:
        return x, weight, bias, seq_idx, activation

    given = torch.ones(1, 2, 3), torch.ones(2, 4), None
    taken = delta_rule.conv(packages, plain)
    assert taken(*given, activation="silu", seq_idx=7) == (*given, 7, "silu")
    assert taken(*given, activation="silu") == (*given, None, "silu")

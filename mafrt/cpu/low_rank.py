"""What adapters add to the products of frozen weights, on a CPU (`source/low_rank.c`, `source/gemm.c`).

A table says which rows have whose adapter. With weights in panels the addition is part of the product; with any other
weight it is a pass of its own. Sums are float32, and a row's result does not depend on the other rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from mafrt.cpu.library import library
from mafrt.cpu.low_rank_grads import Targets, plan_of

PANEL = 48
"""outputs in a panel"""
_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}


@dataclass
class Joined:
    """One adapter's weights for layers that share their input, in the base's number format."""

    down: Tensor
    """`[R, in]`: A of all layers, one below the other"""
    blocks: Tensor
    """B of each layer, scaled and transposed, `[r, out]`, one behind the other in one row"""
    ranks: tuple[int, ...]
    """of each layer; 0: the adapter does not target it"""
    widths: tuple[int, ...]
    """outputs of each layer"""
    _up: Tensor | None = None
    _panels: Tensor | None = None
    _back: Joined | None = None

    @property
    def up(self) -> Tensor:
        """`[R, out of all]`: B of each layer, scaled and transposed, as a block of its own among zeros."""
        if self._up is None:
            blocks = self.blocks.split([r * width for r, width in zip(self.ranks, self.widths, strict=True)])
            pairs = zip(blocks, self.ranks, self.widths, strict=True)
            self._up = torch.block_diag(*(block.view(r, width) for block, r, width in pairs))
        return self._up

    @property
    def back(self) -> Joined:
        """The adapter as the inputs' gradient is computed by it: from numbers B^T g by A, as one layer."""
        if self._back is None:
            self._back = Joined(self.down, self.down, (len(self.down),), (self.down.shape[1],))
        return self._back

    @property
    def panels(self) -> Tensor:
        """`blocks` in panels, one behind the other, made once."""
        if self._panels is None:
            shape = _shape(self.ranks, self.widths, _step(self.blocks.dtype))
            self._panels = self.blocks.new_empty(shape.size)
            functions = _functions(self.blocks.dtype)
            assert functions is not None
            functions["low_rank_panels"](*shape.numbers, self.blocks.data_ptr(), self._panels.data_ptr())
        return self._panels

    def tensors(self) -> list[Tensor]:
        """All that it holds, in whichever order kernels read it."""
        back = None if self._back is None else self._back._panels
        return [t for t in (self.down, self.blocks, self._up, self._panels, back) if t is not None]


def join(pairs: Sequence[tuple[Tensor, Tensor, float] | None], widths: Sequence[int], dtype: torch.dtype) -> Joined:
    """From A `[r, in]`, B `[out, r]` and the scaling of each layer; None: the adapter does not target it."""
    ranks = tuple(0 if pair is None else len(pair[0]) for pair in pairs)
    given_pairs = [(pair[0].detach(), pair[1].detach(), pair[2]) for pair in pairs if pair is not None]
    first, size = given_pairs[0][0], given_pairs[0][0].shape[1]
    plain = all(t.dtype == torch.float32 and t.is_contiguous() for a, b, _ in given_pairs for t in (a, b))
    if not plain or not serves(dtype, first.device.type):
        down = torch.cat([a for a, _, _ in given_pairs]).to(dtype)
        blocks = torch.cat([(b.t() * scale).to(dtype).flatten() for _, b, scale in given_pairs])
        return Joined(down, blocks, ranks, tuple(widths))
    down = torch.empty(sum(ranks), size, dtype=dtype)
    blocks = torch.empty(sum(r * width for r, width in zip(ranks, widths, strict=True)), dtype=dtype)
    shape, functions = _shape(ranks, tuple(widths), _step(dtype)), _functions(dtype)
    assert functions is not None
    functions["low_rank_lay_out"](
        *shape.numbers,
        size,
        _pointers([pair and pair[0] for pair in pairs]),
        _pointers([pair and pair[1] for pair in pairs]),
        (ctypes.c_float * len(pairs))(*(0.0 if pair is None else pair[2] for pair in pairs)),
        down.data_ptr(),
        blocks.data_ptr(),
    )
    return Joined(down, blocks, ranks, tuple(widths))


class _Shape(NamedTuple):
    """An adapter's ranks and outputs as the kernels take them, and its panels."""

    numbers: tuple[int, Any, Any]
    """layers, the first rank and the first output of each"""
    places: Any
    """where each panel begins"""
    size: int
    """numbers of all panels"""


@lru_cache(maxsize=256)
def _shape(ranks: tuple[int, ...], widths: tuple[int, ...], step: int) -> _Shape:
    """`step`: ranks are taken by so many."""
    firsts, columns = (0, *accumulate(ranks)), (0, *accumulate(widths))
    sizes = []
    for column in range(0, columns[-1], PANEL):
        layers = [n for n in range(len(widths)) if columns[n] < column + PANEL and columns[n + 1] > column]
        begin, end = firsts[layers[0]] // step * step, -(-firsts[layers[-1] + 1] // step) * step
        sizes.append((end - begin) * PANEL)
    places = (0, *accumulate(sizes))
    return _Shape((len(widths), _integers(firsts), _integers(columns)), _integers(places), places[-1])


def _integers(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


def _step(dtype: torch.dtype) -> int:
    """Ranks that products in panels take at a time."""
    return 2 if dtype == torch.bfloat16 else 1


def in_panels(up: Tensor) -> Tensor:
    """`[r, out]` as `[panels, r, 48]`, in bfloat16 `[panels, r / 2, 48, 2]`; zeros at the end and for an odd r."""
    step = _step(up.dtype)
    whole = functional.pad(up, (0, -up.shape[1] % PANEL, 0, -len(up) % step))
    return whole.reshape(len(whole) // step, step, -1, PANEL).permute(2, 0, 3, 1).contiguous()


class Segments:
    """Runs of rows of one adapter, in the order of the rows, which several tables have in common.

    Args:
        stops: the row behind each run; the last one is the number of rows.
        owners: of each run, -1 for rows without an adapter.
    """

    def __init__(self, stops: Sequence[int], owners: Sequence[int]) -> None:
        self.owners = tuple(owners)
        self.stops = (ctypes.c_int64 * len(stops))(*stops)

    def move(self, stops: Sequence[int]) -> None:
        """Rows were left out: the same runs end elsewhere, some of them without rows now."""
        for place, stop in enumerate(stops):
            self.stops[place] = stop


class LowRank:
    """What rows add to a product, each by its own adapter: `numbers` times B, with `numbers = x A^T`.

    Args:
        segments: of the rows.
        adapters: of each segment; None: it adds nothing.
        widths: outputs of each layer.
        numbers: `[rows, at least columns_for(adapters)]`, their place.
        given: whether they are computed already.
        panels: whether the addition is part of a product in panels.
    """

    def __init__(
        self,
        segments: Segments,
        adapters: Sequence[Joined | None],
        widths: Sequence[int],
        numbers: Tensor,
        *,
        given: bool = False,
        panels: bool,
    ) -> None:
        self.segments, self.adapters, self.widths = segments, adapters, tuple(widths)
        self._numbers: Tensor | None = numbers
        self._given = given
        self._held = (
            *_starts(tuple(one and one.ranks for one in adapters), self.widths),
            None if given else _pointers([one.down if one else None for one in adapters]),
            # Products in panels do not read it, and gradients are taken of what was not given.
            None if given and panels else _pointers([one.blocks if one else None for one in adapters]),
            _pointers([one.panels if one else None for one in adapters]) if panels else None,
            _panel_places(tuple(one and (one.ranks, one.widths) for one in adapters), _step(numbers.dtype))
            if panels
            else None,
        )
        places = (None if array is None else ctypes.addressof(array) for array in self._held)
        stops = ctypes.addressof(segments.stops)
        self._table = _Table(len(adapters), len(widths), stops, *places, numbers.data_ptr(), numbers.stride(0))

    @property
    def reference(self) -> Any:
        """The table as the kernels take it."""
        return ctypes.byref(self._table)

    def release(self) -> Tensor:
        """The numbers, no longer held by the table, which is good for `backward` alone from here on."""
        numbers, self._numbers = self._numbers, None
        assert numbers is not None
        return numbers

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add to the outputs `[rows, out of all]` of a product whose weight is not in panels, in place.

        `x` `[rows, in]`: the inputs, from which the numbers are computed unless they are given.
        """
        if not self._given:
            x = x if x.stride(1) == 1 else x.contiguous()
            _call("low_rank_down", x.dtype, x.data_ptr(), x.stride(0), x.shape[1], self.reference)
        _call("low_rank_up", out.dtype, self.reference, out.data_ptr(), out.stride(0))

    def backward(
        self, grad: Tensor, x: Tensor, low: Tensor, targets: Sequence[Targets | None], count: int
    ) -> tuple[Tensor, list[Tensor | None]]:
        """The gradients, from that of the outputs `[rows, out of all]`.

        Args:
            grad: of the outputs.
            x: the inputs `[rows, in]`.
            low: the numbers, as the product had them.
            targets: of each segment's adapter; None: it gets no gradients.
            count: of the places that targets name.

        Returns:
            Numbers `[rows, ..]` whose product with A is the inputs' gradient, and by place the gradients of A `[r, in]`
            and B `[out, r]`, float32; None for places that no target names.
        """
        # A gradient may be one number that stands for all, as that of a sum is.
        grad, x = (t if t.stride(1) == 1 else t.contiguous() for t in (grad, x))
        shapes = tuple(one and (one.ranks, each) for one, each in zip(self.adapters, targets, strict=True))
        plan = plan_of(self.segments.owners, shapes, self.widths, x.shape[1], count)
        grads = torch.empty(plan.size)
        numbers = torch.empty_like(low)
        table = _Table.from_buffer_copy(self._table)
        table.numbers = numbers.data_ptr()
        _call(
            "low_rank_backward",
            x.dtype,
            grad.data_ptr(),
            grad.stride(0),
            x.data_ptr(),
            x.stride(0),
            x.shape[1],
            low.data_ptr(),
            low.stride(0),
            ctypes.byref(table),
            plan.factors,
            plan.fresh,
            grads.data_ptr(),
            plan.downs,
            plan.ups,
            plan.parts,
            plan.room,
        )
        return numbers, plan.cut(grads)


@lru_cache(maxsize=1024)
def _starts(adapters: tuple[tuple[int, ...] | None, ...], widths: tuple[int, ...]) -> tuple[Any, Any]:
    """The first rank of each layer by segment, and the first output of each layer, as the kernels take them."""
    none = (0,) * (len(widths) + 1)
    ranks = [r for adapter_ranks in adapters for r in ((0, *accumulate(adapter_ranks)) if adapter_ranks else none)]
    columns = (0, *accumulate(widths))
    return _integers(ranks), _integers(columns)


@lru_cache(maxsize=1024)
def _panel_places(adapters: tuple[tuple[tuple[int, ...], tuple[int, ...]] | None, ...], step: int) -> Any:
    """Where each panel begins, by segment, as the kernels take it."""
    # Those of an adapter are kept by `_shape`, and here too, for as long as their addresses are.
    each = [None if one is None else _shape(*one, step).places for one in adapters]
    array = _places([None if places is None else ctypes.addressof(places) for places in each])
    array.held = each
    return array


def columns_for(adapters: Iterable[Joined | None]) -> int:
    """Columns of a table's numbers: the largest sum of ranks, made even for the products in pairs."""
    most = max((sum(one.ranks) for one in adapters if one), default=0)
    return most + most % 2


def serves(dtype: torch.dtype, device: str) -> bool:
    """Whether this machine has the kernels for a number format and a device type."""
    return device == "cpu" and dtype in _SUFFIX and _functions(dtype) is not None


class _Table(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_long) for name in ("segments", "layers")),
        *(
            (name, ctypes.c_void_p)
            for name in ("stops", "ranks", "columns", "down", "up", "up_panels", "places", "numbers")
        ),
        ("ld", ctypes.c_long),
    )


def _pointers(tensors: Sequence[Tensor | None]) -> Any:
    return _places([None if t is None else t.data_ptr() for t in tensors])


def _places(addresses: Sequence[int | None]) -> Any:
    return (ctypes.c_void_p * len(addresses))(*addresses)


_P, _L, _I = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
_ARGUMENTS = {
    "low_rank_lay_out": (_L, _P, _P, _L, _P, _P, _P, _P, _P),
    "low_rank_panels": (_L, _P, _P, _P, _P),
    "low_rank_down": (_P, _L, _L, _P, _I),
    "low_rank_up": (_P, _P, _L, _I),
    "low_rank_backward": (_P, _L, _P, _L, _L, _P, _L, _P, _P, ctypes.c_char_p, _P, _P, _P, _P, _L, _I),
}


def _call(name: str, dtype: torch.dtype, *args: Any) -> None:
    functions = _functions(dtype)
    assert functions is not None
    functions[name](*args, torch.get_num_threads())


@cache
def _functions(dtype: torch.dtype) -> dict[str, Any] | None:
    lib = library()
    if lib is None or dtype not in _SUFFIX or not hasattr(lib, f"low_rank_down_{_SUFFIX[dtype]}"):
        return None
    functions = {name: getattr(lib, f"{name}_{_SUFFIX[dtype]}") for name in _ARGUMENTS}
    for name, function in functions.items():
        function.argtypes, function.restype = _ARGUMENTS[name], None
    return functions

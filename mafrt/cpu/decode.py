"""The parts of a decode step beside its products, on a CPU (`source/decode.c`).

Each takes tensors that lie as the decoder makes them (contiguous, in the model's number format unless said otherwise)
and computes in float32, so a row's result does not depend on the rest of the batch.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mafrt.cpu.library import library

LANES = 16
"""Numbers in a vector of the kernels."""
_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
_P, _L, _I, _F = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_ARGUMENTS: dict[str, list[Any]] = {
    "rms_norm": [_P, _P, _L, _L, _F, _P, _I],
    "silu_product": [_P, _L, _L, _P, _I],
    "attend": [_P, _P, _P, _P, _F, *[_L] * 4, _P, _P, _L, _L, _P, _P, _P, _P, _L, _L, _L, _F, _F, _P, _I],
}


class Heads(NamedTuple):
    """Attention's shape and constants."""

    heads: int
    kv_heads: int
    dim: int
    scale: float
    cap: float | None
    """bound of the scores; None: they have none"""
    eps: float
    """of the norms of queries and keys"""


class FarKeys(NamedTuple):
    """Keys and values of prompts, in the model's number format."""

    keys: Tensor
    """`[prompts, kv heads, dim, room]`, a column each; the room is a multiple of 16"""
    values: Tensor
    """`[prompts, kv heads, longest, dim]`"""
    lengths: Tensor
    """`[prompts]` int64"""
    owner: Tensor
    """`[rows]` int64: the prompt of each row"""


class NearKeys:
    """Keys and values of the rows' own tokens, in buffers that grow.

    Args:
        rows: of the batch.
        shape: of the heads.
        dtype: the model's number format.
    """

    def __init__(self, rows: int, shape: Heads, dtype: torch.dtype) -> None:
        self._rows, self._shape, self._dtype, self._capacity = rows, shape, dtype, 2 * LANES
        self.used = 0
        """positions that are filled"""
        self.blocks, self.values = self._buffers()

    @property
    def keys(self) -> Tensor:
        """`[rows, kv heads, capacity, dim]`, a copy."""
        return self.blocks.transpose(3, 4).flatten(2, 3)

    def _buffers(self) -> tuple[Tensor, Tensor]:
        shape, rows, capacity = self._shape, self._rows, self._capacity
        # Left unfilled: nothing beyond `used` counts.
        blocks = torch.empty(rows, shape.kv_heads, capacity // LANES, shape.dim, LANES, dtype=self._dtype)
        return blocks, torch.empty(rows, shape.kv_heads, capacity, shape.dim, dtype=self._dtype)

    def reserve(self) -> None:
        """Make room for one more position of each row. The capacity doubles when it runs out."""
        if self.used == self._capacity:
            self._capacity *= 2
            self._copy(self.blocks, self.values)

    def keep(self, rows: Tensor) -> None:
        """Leave only the given rows `[kept]`."""
        self._rows = len(rows)
        self._copy(self.blocks[rows], self.values[rows])

    def _copy(self, blocks: Tensor, values: Tensor) -> None:
        self.blocks, self.values = self._buffers()
        begun = -(-self.used // LANES)
        self.blocks[:, :, :begun] = blocks[:, :, :begun]
        self.values[:, :, : self.used] = values[:, :, : self.used]


class DecodeKernels:
    """The kernels of one number format; `decode_kernels` makes them."""

    def __init__(self, lib: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._call: dict[str, Any] = {}
        for name, types in _ARGUMENTS.items():
            function = getattr(lib, f"{name}_{_SUFFIX[dtype]}")
            function.argtypes, function.restype = types, None
            self._call[name] = function

    def rms_norm(self, x: Tensor, factors: Tensor, eps: float) -> Tensor:
        """RMS norm of rows `[rows, d]`; `factors` `[d]` float32."""
        x = x.contiguous()
        out = torch.empty_like(x)
        rows, width = x.shape
        call = self._call["rms_norm"]
        call(x.data_ptr(), factors.data_ptr(), rows, width, eps, out.data_ptr(), torch.get_num_threads())
        return out

    def silu_product(self, gate_up: Tensor) -> Tensor:
        """silu(gate) up `[rows, d]`, of rows `[rows, 2 d]` that hold gate and up side by side."""
        rows, width = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        self._call["silu_product"](gate_up.data_ptr(), rows, width, out.data_ptr(), torch.get_num_threads())
        return out

    def attend(
        self,
        qkv: Tensor,
        rotation: tuple[Tensor, Tensor],
        norms: Tensor | None,
        shape: Heads,
        far: FarKeys,
        near: NearKeys,
        window: int | None,
    ) -> Tensor:
        """Rotate queries and keys, add keys and values to `near`, and attend: `[rows, heads * dim]`.

        Args:
            qkv: `[rows, (heads + 2 kv heads) * dim]`.
            rotation: cosines, and sines with their signs, `[rows, dim]`.
            norms: factors of the queries' and keys' norms `[heads + kv heads, dim]` float32.
            shape: of the heads.
            far: the prompts.
            near: the rows' own tokens so far; the new one's keys and values are added.
            window: tokens that a query may attend to, itself included; None: all.
        """
        near.reserve()
        out = qkv.new_empty(len(qkv), shape.heads * shape.dim)
        self._call["attend"](
            qkv.data_ptr(),
            rotation[0].data_ptr(),
            rotation[1].data_ptr(),
            None if norms is None else norms.data_ptr(),
            shape.eps,
            len(qkv),
            shape.heads,
            shape.kv_heads,
            shape.dim,
            far.keys.data_ptr(),
            far.values.data_ptr(),
            far.keys.shape[3],
            far.values.shape[2],
            far.lengths.data_ptr(),
            far.owner.data_ptr(),
            near.blocks.data_ptr(),
            near.values.data_ptr(),
            near.values.shape[2],
            near.used,
            window or 0,
            shape.scale,
            shape.cap or 0.0,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        near.used += 1
        return out


@cache
def decode_kernels(dtype: torch.dtype, device: str) -> DecodeKernels | None:
    """The kernels for a number format and a device type; None: there are none, and torch computes."""
    lib = library()
    return None if lib is None or device != "cpu" or dtype not in _SUFFIX else DecodeKernels(lib, dtype)

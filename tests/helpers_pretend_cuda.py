"""A GPU that is not there: tensors that say `cuda:0` and compute on the CPU; what a GPU refuses is refused, and what it
makes costly is counted.

    with PretendCuda() as gpu:
        base = tiny_base(device="cuda")     # whatever asks for `cuda` gets it
    gpu.waits                               # where the host waited for the device, by line of mafrt

An operation on tensors of two devices is an error, as on a GPU. A wait is whatever brings numbers to the host, or lays
numbers of the host on the device. Not seen: numerics of CUDA's kernels, streams, several GPUs. It rests on details of
torch that have no promise, so a new version may need changes here.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)

COPIES = ("_to_copy", "copy_")
INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
"""may take places of the CPU, which are then copied"""
COUNTED = ("nonzero", "masked_select", "equal", "bincount", "_unique2", "unique_dim", "unique_consecutive")
"""have results, or shapes of results, that the host must know"""
FREE = {
    *("alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "lift_fresh", "new_empty"),
    *("new_empty_strided", "permute", "select", "set_", "slice", "split", "split_with_sizes", "squeeze", "t"),
    *("transpose", "unbind", "unsqueeze", "view", "_reshape_alias", "_unsafe_view"),
}
"""launch no kernel"""


class MixedDevicesError(RuntimeError):
    """Tensors of two devices in one operation."""


class OnGpu(torch.Tensor):
    """A tensor of the pretended GPU around one of the CPU.

    To torch's C++ it lies on the CPU, so that autograd runs as it does there; Python is told `cuda:0`.
    """

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnGpu:
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype
        )
        made.held = held
        return made

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def __repr__(self, **_: Any) -> str:
        return f"OnGpu({self.held!r})"

    def cpu(self, *_: Any) -> torch.Tensor:
        return PretendCuda.now().read(self)

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], torch.Tensor):
            device, dtype = args[0].device, args[0].dtype
        else:
            kwargs.pop("copy", None)
            device, dtype = torch._C._nn._parse_to(*args, **kwargs)[:2]
        if device is not None and device.type == "cpu":
            whole = PretendCuda.now().read(self)
            return whole if dtype is None else whole.to(dtype)
        return self if dtype in (None, self.dtype) else torch.Tensor.to(self, dtype)

    def cuda(self, *_: Any, **__: Any) -> OnGpu:
        return self

    def tolist(self) -> Any:
        return PretendCuda.now().read(self).tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("a tensor of cuda:0 has no numpy array")

    def data_ptr(self) -> int:
        raise RuntimeError("a kernel of the CPU was given a tensor of cuda:0")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return PretendCuda.now().read(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = self.detach().clone().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            made._is_param = True
        memo[id(self)] = made
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return PretendCuda.now().compute(func, args, kwargs or {})


class _Placing(TorchFunctionMode):
    """Ways onto the device by which torch would ask for a GPU before any operation is seen."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and _is_gpu(kwargs.get("device")):
            made = func(*args, **{name: value for name, value in kwargs.items() if name != "device"})
            return made if isinstance(made, OnGpu) else aten._to_copy(made, device=CUDA)
        if func is torch.Tensor.to and not isinstance(args[0], OnGpu):
            given = {name: value for name, value in kwargs.items() if name != "copy"}
            if len(args) > 1 and isinstance(args[1], OnGpu):
                return aten._to_copy(args[0], device=CUDA, dtype=args[1].dtype)
            if not (len(args) > 1 and isinstance(args[1], torch.Tensor)):
                device, dtype = torch._C._nn._parse_to(*args[1:], **given)[:2]
                if _is_gpu(device):
                    return aten._to_copy(args[0], device=CUDA, dtype=dtype or args[0].dtype)
        return func(*args, **kwargs)


class PretendCuda(TorchDispatchMode):
    """Within it there is one GPU, `cuda:0`. Threads that are started within it have it too."""

    _entered: ClassVar[list[PretendCuda]] = []

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[tuple[str, str]] = Counter()
        """(kind, line of mafrt) -> times that the host waited"""
        self.launches = 0
        """kernels, at least"""
        self.live = self.peak = 0
        """bytes"""
        self._blocks: dict[int, Any] = {}

    @classmethod
    def now(cls) -> PretendCuda:
        return cls._entered[-1]

    def clear(self) -> None:
        self.waits.clear()
        self.launches, self.peak = 0, self.live

    @property
    def waited(self) -> int:
        return sum(self.waits.values())

    # ------------------------------------------------------------------------------------------------- entering

    def __enter__(self) -> PretendCuda:
        self._entered.append(self)
        self._undo = ExitStack()
        cuda: dict[str, Any] = {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "synchronize": lambda device=None: None,
            "empty_cache": lambda: None,
            "mem_get_info": lambda device=None: (70 * 10**9, 80 * 10**9),
            "get_rng_state_all": lambda: [],
            "get_arch_list": lambda: ["sm_90"],
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_name": lambda device=None: "pretended GPU",
            "max_memory_allocated": lambda device=None: self.peak,
            "reset_peak_memory_stats": lambda device=None: None,
        }
        for name, stand_in in cuda.items():
            self._undo.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        optimizer = torch.optim.Optimizer
        for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
            if hasattr(optimizer, name):
                self._undo.enter_context(mock.patch.object(optimizer, name, lambda _: None))
        self._undo.enter_context(self._grouping())
        sdpa = torch.nn.functional.scaled_dot_product_attention
        attention = mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", _attention(sdpa))
        self._undo.enter_context(attention)
        # Otherwise `Module.to` would write into the CPU's tensor, as C++ sees no other device.
        before = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        self._undo.callback(torch.__future__.set_overwrite_module_params_on_conversion, before)
        lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        self._undo.callback(torch._C._set_only_lift_cpu_tensors, lifts)
        run, mode = threading.Thread.run, self

        def with_device(thread: threading.Thread) -> None:
            with _Placing(), _Same(mode):
                run(thread)

        self._undo.enter_context(mock.patch.object(threading.Thread, "run", with_device))
        self._undo.enter_context(_Placing())
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._undo.close()
        self._entered.pop()

    @contextmanager
    def _grouping(self) -> Any:
        """Torch's grouping of tensors for fused optimizers, which asks C++ for their device."""
        import torch.nn.utils.clip_grad as clip
        import torch.optim.optimizer as optimizer
        import torch.utils._foreach_utils as utils

        name = "_group_tensors_by_device_and_dtype"
        original: Callable[..., Any] = getattr(utils, name)

        def grouped(lists: Any, with_indices: bool = False) -> Any:
            with torch.no_grad():
                found = original(lists, with_indices)
            on_gpu = {True: CUDA}
            return {
                (on_gpu.get(any(isinstance(t, OnGpu) for own in some[0] for t in own), device), dtype): some
                for (device, dtype), some in found.items()
            }

        with ExitStack() as undo:
            for module in (utils, clip, optimizer):
                if hasattr(module, name):
                    undo.enter_context(mock.patch.object(module, name, grouped))
            types = getattr(utils, "_foreach_supported_types", None)
            if types is not None and OnGpu not in types:
                types.append(OnGpu)
                undo.callback(types.remove, OnGpu)
            yield

    # ------------------------------------------------------------------------------------------------- computing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.compute(func, args, kwargs or {})

    def compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        flat = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
        there = [value for value in flat if isinstance(value, OnGpu)]
        name = func._schema.name.split("::")[1]
        if not there and not _is_gpu(kwargs.get("device")):
            with _disable_current_modes():
                return func(*args, **kwargs)
        here = [value for value in flat if not isinstance(value, OnGpu)]
        if name in COPIES:
            self._note_copy(name, args, there)
        elif name == "_local_scalar_dense" or name in COUNTED:
            self._wait(name)
        elif name in INDEXED:
            places = [place for place in args[1] if place is not None]
            if any(place.dtype in (torch.bool, torch.uint8) for place in places):
                self._wait("booleans as an index")
            if any(not isinstance(place, OnGpu) for place in places):
                self._wait("places to the device")
            here = [value for value in here if not any(value is place for place in places)]
        if name not in COPIES and (mixed := [value for value in here if value.dim()]):
            shapes = [tuple(value.shape) for value in (*there, *mixed)]
            raise MixedDevicesError(f"{func} with tensors of cuda:0 and of the CPU, {shapes}, at {self._line()}")
        self.launches += name not in FREE
        with _disable_current_modes():
            made = func(*tree_map(_held, args), **{key: tree_map(_held, value) for key, value in kwargs.items()})
        given = {id(value.held): value for value in there}
        if name == "copy_" and not isinstance(args[0], OnGpu):
            return args[0]

        def wrapped(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return given[id(value)] if id(value) in given else self._new(value)

        return tree_map(wrapped, made)

    def read(self, tensor: OnGpu) -> torch.Tensor:
        self._wait("to the host")
        with _disable_current_modes():
            return tensor.held.detach().clone()

    def _note_copy(self, name: str, args: Any, there: list[OnGpu]) -> None:
        if name == "_to_copy" and not isinstance(args[0], OnGpu):
            self._wait("to the device")
        elif name == "copy_" and not isinstance(args[0], OnGpu):
            self._wait("to the host")
        elif name == "copy_" and not isinstance(args[1], OnGpu) and args[1].dim():
            self._wait("to the device")

    def _wait(self, kind: str) -> None:
        self.waits[kind, self._line()] += 1

    def _line(self) -> str:
        frame, outside = sys._getframe(1), ""
        while frame is not None:
            name = frame.f_code.co_filename
            if "site-packages" not in name and not name.endswith("helpers_pretend_cuda.py"):
                if "/mafrt/" in name or "/runners/" in name:
                    return (
                        f"{name.rsplit('/', 2)[-2]}/{name.rsplit('/', 1)[-1]}:{frame.f_lineno} {frame.f_code.co_name}"
                    )
                outside = outside or f"{name.rsplit('/', 1)[-1]}:{frame.f_lineno}"
            frame = frame.f_back
        return outside

    def _new(self, held: torch.Tensor) -> OnGpu:
        storage = held.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._blocks:
            self.live += size
            self.peak = max(self.peak, self.live)

            def gone(_: Any) -> None:
                self.live -= size
                del self._blocks[key]

            self._blocks[key] = weakref.ref(storage, gone)
        return OnGpu(held)


class _Same(TorchDispatchMode):
    """The device in another thread: a mode is a thread's own."""

    def __init__(self, mode: PretendCuda) -> None:
        super().__init__()
        self.mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.mode.compute(func, args, kwargs or {})


def _held(value: Any) -> Any:
    if isinstance(value, OnGpu):
        return value.held
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _is_gpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """Attention written out for tensors of the device: a kernel of the CPU, which torch would choose, takes none."""

    def attention(
        q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, **more: Any
    ) -> Any:
        if not isinstance(q, OnGpu):
            return original(q, k, v, attn_mask, dropout_p, is_causal, **more)
        if (group := q.shape[1] // k.shape[1]) > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q.float() @ k.float().transpose(2, 3) * (more.get("scale") or q.shape[-1] ** -0.5)
        if is_causal:
            attn_mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        return (scores.softmax(-1) @ v.float()).to(q.dtype)

    return attention

"""A GPU that is not there: tensors that say `cuda:0` and compute on the CPU; what a GPU refuses is refused, and what it
makes costly is counted.

    with PretendCuda() as gpu:
        base = tiny_base(device="cuda")     # whatever asks for `cuda` gets it
    gpu.waits                               # where the host waited for the device, by line of mafrt

With `numbers=n` only tensors of up to n elements hold numbers; larger ones, and all that is computed from them, have
nothing but a shape, so that models of real dimensions need neither memory nor time.

An operation on tensors of two devices is an error, as on a GPU. A wait is whatever brings numbers to the host, or lays
numbers of the host on the device. Attention is modelled: flash kernels for half precision without a mask, the
memory-efficient one with a mask. `streams.races` has what two streams used without a wait in between. Not seen:
numerics of CUDA's kernels, several GPUs. It rests on details of torch that have no promise, so a new version may need
changes here.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

import mafrt
import mafrt.runners
from bench._gpu import fused_kernels, streams
from bench._gpu.streams import Stream, Streams
from mafrt.models.gpu.graphs import Recorder

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)

# As they lie on the disk: the folder of a checkout may be called mafrt too.
OURS = tuple(f"{Path(package.__path__[0])}/" for package in (mafrt, mafrt.runners))
OWN = (__file__, fused_kernels.__file__, streams.__file__)
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
KERNELS = {
    **{"sort": 3, "topk": 2, "nonzero": 3, "_unique2": 6, "unique_consecutive": 5, "masked_select": 3},
    **{"index_put_": 1, "_flash_attention_backward": 4},
}
"""launched by an operation where those are several, at least"""
TENSORS_A_LAUNCH = 36
"""of the operations on lists of tensors, whose addresses are the kernel's arguments"""


class MixedDevicesError(RuntimeError):
    """Tensors of two devices in one operation."""


class OnGpu(torch.Tensor):
    """A tensor of the pretended GPU around one of the CPU.

    To torch's C++ it lies on the CPU, so that autograd runs as it does there; Python is told `cuda:0`.
    """

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

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

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
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
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
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
        if func is torch.nn.functional.one_hot and isinstance(args[0], OnGpu):
            # C++ would lay the numbers of the classes on the device that it sees.
            count = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
            classes = torch.arange(int(args[0].max()) + 1 if count < 0 else count, device=CUDA)
            return (args[0].unsqueeze(-1) == classes).long()
        return func(*args, **kwargs)


class PretendCuda(TorchDispatchMode):
    """Within it there is one GPU, `cuda:0`. Threads that are started within it have it too."""

    _entered: ClassVar[list[PretendCuda]] = []

    def __init__(self, numbers: int | None = None, *, lines: bool = False) -> None:
        super().__init__()
        self.numbers = numbers
        """elements of the largest tensor that holds numbers; None: all do"""
        self.lines = lines
        """whether launches and bytes are counted by line too, which takes time"""
        self.waits: Counter[tuple[str, str]] = Counter()
        """(kind, line of mafrt) -> times that the host waited"""
        self.launches: Counter[str] = Counter()
        """operation -> kernels, at least"""
        self.launched_at: Counter[str] = Counter()
        """line of mafrt -> kernels"""
        self.recorded: Counter[str] = Counter()
        """operation -> kernels within recorded work, which is one launch"""
        self._counts = self.launches
        self.live = self.peak = 0
        """bytes"""
        self.at_peak: Counter[str] = Counter()
        """line of mafrt -> bytes that were live at the peak"""
        self._live_at: Counter[str] = Counter()
        self._blocks: dict[int, Any] = {}
        self.streams = Streams()

    @classmethod
    def now(cls) -> PretendCuda:
        return cls._entered[-1]

    def clear(self) -> None:
        for counter in (self.waits, self.launches, self.launched_at, self.recorded):
            counter.clear()
        self.peak = self.live

    @property
    def waited(self) -> int:
        return self.waits.total()

    @property
    def launched(self) -> int:
        return self.launches.total()

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
            "Stream": Stream,
            "current_stream": self.streams.current,
            "stream": self.streams.chosen,
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
        functional = torch.nn.functional
        for name, stand_in in (("scaled_dot_product_attention", _attention), ("rms_norm", _rms_norm)):
            own = stand_in(getattr(functional, name))
            self._undo.enter_context(mock.patch.object(functional, name, own))
        self._undo.enter_context(mock.patch.object(Recorder, "record", self._record))
        available = mock.patch.object(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        self._undo.enter_context(available)
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
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._undo.close()
        self._entered.pop()

    def _record(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """`Recorder.record`: as there, nothing is computed before the first call."""

        def again() -> Any:
            self._launch("recorded work", 1)
            self._counts = self.recorded
            try:
                return work()
            finally:
                self._counts = self.launches

        return again

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
        if name == "_local_scalar_dense" and not _known(there[0]):
            return True if there[0].dtype == torch.bool else 0.0 if there[0].is_floating_point() else 0
        if name not in FREE:
            self._launch(name, KERNELS.get(name, -(-len(args[0]) // TENSORS_A_LAUNCH) if "_foreach" in name else 1))
        if name.startswith("_flash_attention_"):
            return self._flash(name, args, kwargs)
        if name == "copy_" and not isinstance(args[0], OnGpu):
            self._used(there)
            self.streams.current().synchronize()
            with _disable_current_modes():
                return args[0].copy_(args[1].held) if _known(args[1]) else args[0].zero_()
        unknown = self._unknown(name, args, kwargs, there)

        def part(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                own = value.held if isinstance(value, OnGpu) else value
                return _shape_of(own) if unknown else own
            return torch.device("meta" if unknown else "cpu") if isinstance(value, torch.device) else value

        with _disable_current_modes():
            if unknown and func._schema.is_mutable:
                for value in tree_flatten(args[:1])[0]:
                    # In place, from numbers that are not known: what it holds is not known any more.
                    value.held = _shape_of(value.held)
            if unknown and name in INDEXED:
                args = (args[0], [_places(place) for place in args[1]], *args[2:])
                args = (args[0], [at for places in args[1] for at in places], *args[2:])
            values = tree_map(part, args)
            if name == "_conj":  # a mark on what is held would be passed over here, below where torch looks at it
                func = torch.ops.aten._conj_physical.default
            if name == "histc":  # of integers on a GPU, which a CPU knows only of floats
                values = (values[0].float(), *values[1:])
            made = func(*values, **{key: tree_map(part, value) for key, value in kwargs.items()})
            made = made.to(args[0].dtype) if name == "histc" else made
        given = {id(value.held): value for value in there}

        def wrapped(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return given[id(value)] if id(value) in given else self._new(value)

        made = tree_map(wrapped, made)
        if name not in FREE:
            self._used(there, made, args[0] if func._schema.is_mutable else None)
        if name == "_local_scalar_dense" or name in COUNTED:
            self.streams.current().synchronize()
        return made

    def _used(self, read: Any, *written: Any) -> None:
        """One launch on the current stream."""

        def blocks(values: Any) -> set[int]:
            return {t.held.untyped_storage()._cdata for t in tree_flatten(values)[0] if isinstance(t, OnGpu)}

        self.streams.launch(blocks(read), blocks(written), self._line)

    def _unknown(self, name: str, args: Any, kwargs: Any, there: list[OnGpu]) -> bool:
        """Whether the result of an operation has a shape only."""
        if any(not _known(value) for value in there):
            return True
        if self.numbers is None or (name in FREE and there):
            return False
        size = kwargs.get("size", args[0] if args and not there else ())
        made = torch.Size(size).numel() if isinstance(size, (list, tuple, torch.Size)) else 0
        if name == "_to_copy":
            made = args[0].numel()
        # Work on many inputs takes long even where little comes of it.
        return made > self.numbers or sum(value.numel() for value in there) > 64 * self.numbers

    def kernel(self, name: str, compute: Callable[..., Any], *tensors: Tensor | None) -> Any:
        """The results of one launch."""
        self._launch(name, 1)
        held = [t.held if isinstance(t, OnGpu) else t for t in tensors]
        if any(t is not None and t.device.type == "meta" for t in held):
            held = [None if t is None else _shape_of(t) for t in held]
        with _disable_current_modes():
            made = tree_map(lambda t: self._new(t) if isinstance(t, torch.Tensor) else t, compute(*held))
        self._used(tensors, made)
        return made

    def _flash(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Torch's flash kernel over segments, which refuses what it refuses there."""
        forward = name.endswith("forward")
        tensors, rest = (args[:5], args[5:]) if forward else (args[:8], args[8:])
        q, k = tensors[0 if forward else 1], tensors[1 if forward else 2]
        if any(t.dtype not in (torch.float16, torch.bfloat16) for t in tensors[: 3 if forward else 5]):
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        apart = any(t.stride(-1) != 1 for t in tensors[:3])
        if q.shape[-1] % 8 or q.shape[-1] > 256 or q.shape[1] % k.shape[1] or apart:
            raise RuntimeError(f"FlashAttention cannot take queries {tuple(q.shape)} and keys {tuple(k.shape)}")
        for cuts, longest in zip(tensors[-2:], rest[:2], strict=True):
            assert cuts.dtype == torch.int32 and (not _known(cuts) or int(cuts.held.diff().max()) <= longest)
        scale, window = kwargs["scale"], kwargs.get("window_size_left", -1)
        causal = rest[3] or window >= 0
        held = [t.held for t in tensors]
        if any(t.device.type == "meta" for t in held):
            held = [_shape_of(t) for t in held]
        attend: Any = fused_kernels.segments_attention
        back: Any = fused_kernels.segments_attention_backward
        with _disable_current_modes():
            made = (attend if forward else back)(*held, causal, scale, window)
            if forward:
                made = (*made, *(made[0].new_empty(0) for _ in range(3)))
            elif (group := q.shape[1] // k.shape[1]) > 1:
                # Of every query head first, and then summed.
                each = [self._new(t.new_empty(t.shape[0], group * t.shape[1], t.shape[2])) for t in made[1:]]
                del each
            made = tuple(map(self._new, made))
        self._used(tensors, made)
        return made

    def read(self, tensor: OnGpu) -> torch.Tensor:
        self._wait("to the host")
        self._used(tensor)
        self.streams.current().synchronize()
        with _disable_current_modes():
            if _known(tensor):
                return tensor.held.detach().clone()
            # Ones, since a norm of 0 would leave out what follows.
            return torch.full(tensor.shape, int(tensor.dtype != torch.int64), dtype=tensor.dtype)

    def _note_copy(self, name: str, args: Any, there: list[OnGpu]) -> None:
        if name == "_to_copy" and not isinstance(args[0], OnGpu):
            self._wait("to the device")
        elif name == "copy_" and not isinstance(args[0], OnGpu):
            self._wait("to the host")
        elif name == "copy_" and not isinstance(args[1], OnGpu) and args[1].dim():
            self._wait("to the device")

    def _wait(self, kind: str) -> None:
        self.waits[kind, self._line()] += 1

    def _launch(self, name: str, count: int) -> None:
        self._counts[name] += count
        if self.lines and self._counts is self.launches:
            self.launched_at[self._line()] += count

    def _line(self) -> str:
        frame: FrameType | None = sys._getframe(1)
        outside = ""
        while frame is not None:
            name = frame.f_code.co_filename
            if "site-packages" not in name and name not in OWN:
                if name.startswith(OURS):
                    return (
                        f"{name.rsplit('/', 2)[-2]}/{name.rsplit('/', 1)[-1]}:{frame.f_lineno} {frame.f_code.co_name}"
                    )
                outside = outside or f"{name.rsplit('/', 1)[-1]}:{frame.f_lineno}"
            frame = frame.f_back
        return outside

    def _new(self, held: torch.Tensor) -> OnGpu:
        if self.numbers is not None and _known(held) and held.numel() > self.numbers and held._base is None:
            held = _shape_of(held)
        storage = held.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._blocks:
            line = self._line() if self.lines else ""
            self.live += size
            self._live_at[line] += size
            if self.live > self.peak:
                self.peak = self.live
                if self.lines:
                    self.at_peak = Counter(self._live_at)

            def gone(_: Any) -> None:
                self.live -= size
                self._live_at[line] -= size
                del self._blocks[key]
                self.streams.gave_back(key)

            self._blocks[key] = weakref.ref(storage, gone)
            self.streams.took(key)
        return OnGpu(held)


class _Same(TorchDispatchMode):
    """The device in another thread: a mode is a thread's own."""

    def __init__(self, mode: PretendCuda) -> None:
        super().__init__()
        self.mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.mode.compute(func, args, kwargs or {})


def _known(tensor: Any) -> bool:
    return (tensor.held if isinstance(tensor, OnGpu) else tensor).device.type != "meta"


def _shape_of(held: torch.Tensor) -> torch.Tensor:
    if held.device.type == "meta":
        return held
    return torch.empty_strided(held.size(), held.stride(), dtype=held.dtype, device="meta")


def _places(place: Any) -> list[Any]:
    """The places that booleans stand for, whose number must be known for a shape."""
    if place is None or place.dtype not in (torch.bool, torch.uint8):
        return [place]
    return list((place.held if isinstance(place, OnGpu) else place).nonzero(as_tuple=True))


def _is_gpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


class _Attention(torch.autograd.Function):
    """One kernel of attention, forward and backward."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, mask: Any, scale: float, name: str) -> Any:
        def compute(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
            made, lse = fused_kernels.attention(q, k, v, scale, mask)
            if name == "efficient attention":  # has the heads of a step side by side
                made = (
                    torch.empty_like(made.transpose(1, 2), memory_format=torch.contiguous_format)
                    .copy_(made.transpose(1, 2))
                    .transpose(1, 2)
                )
            return made, lse

        out, lse = PretendCuda.now().kernel(name, compute, q, k, v, mask)
        ctx.save_for_backward(q, k, v, out, lse, mask)
        ctx.scale, ctx.name = scale, name
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, lse, mask = ctx.saved_tensors
        learnt = ctx.needs_input_grad[3]

        def compute(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Any) -> Any:
            return fused_kernels.attention_backward(grad, q, k, v, out, lse, ctx.scale, mask, learnt)

        made = PretendCuda.now().kernel(f"{ctx.name}_backward", compute, grads[0], q, k, v, out, lse, mask)
        return (*made, *[None] * (6 - len(made)))


def _attention(original: Callable[..., Any]) -> Callable[..., Any]:
    def attention(
        q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, **more: Any
    ) -> Any:
        if not isinstance(q, OnGpu):
            return original(q, k, v, attn_mask, dropout_p, is_causal, **more)
        scale = more.get("scale") or q.shape[-1] ** -0.5
        flash = attn_mask is None and q.dtype in (torch.float16, torch.bfloat16)
        if not flash and (group := q.shape[1] // k.shape[1]) > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.where(attn_mask, 0.0, -torch.inf).to(q.dtype)
            if attn_mask.shape[-1] % 16:
                attn_mask = torch.nn.functional.pad(attn_mask, (0, -attn_mask.shape[-1] % 16))[..., : k.shape[2]]
        seen = attn_mask
        if is_causal:
            # Of the kernel's own making, and no tensor of the device.
            seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        return _Attention.apply(q, k, v, seen, scale, "flash attention" if flash else "efficient attention")

    return attention


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, eps: float | None) -> Any:
        def compute(x: Tensor, weight: Tensor | None) -> Any:
            if x.device.type == "meta":
                return torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
            factor = x.float().square().mean(-1).add(0.0 if eps is None else eps).rsqrt()
            return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps), factor

        out, factor = PretendCuda.now().kernel("rms norm", compute, x, weight)
        ctx.save_for_backward(x, weight, factor)
        ctx.eps = eps
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, _ = ctx.saved_tensors
        learnt = ctx.needs_input_grad[1]

        def compute(grad: Tensor, x: Tensor, weight: Tensor | None) -> Any:
            return fused_kernels.rms_norm_backward(grad, x, weight, ctx.eps, learnt)

        made = PretendCuda.now().kernel("rms norm backward", compute, grads[0], x, weight)
        return (*made, *[None] * (3 - len(made)))


def _rms_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    def rms_norm(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
        return _RmsNorm.apply(x, weight, eps) if isinstance(x, OnGpu) else original(x, shape, weight, eps)

    return rms_norm

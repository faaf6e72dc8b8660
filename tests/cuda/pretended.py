"""A pretended CUDA device for PyTorch's CPU wheel: tensors of device `cuda` whose data lies on the CPU.

`CudaTensor` is a wrapper subclass made with a CUDA device, so that C++ sees a CUDA tensor: `is_cuda` is True,
autograd and autocast use their CUDA rules. A dispatch mode unwraps, runs the CPU kernel, wraps the results,
and on the way raises where CUDA would (tensors of two devices, NumPy, a host read during a capture) and
counts in `SIM` what the host waits for, what it launches and which kernel `scaled_dot_product_attention`
would take, by line of the project.

It cannot see speed, the numbers of CUDA's kernels, streams, NCCL, nor operations that CUDA lacks or restricts
otherwise.
"""

import collections
import contextlib
import sys
import threading
import types
from pathlib import Path

import torch
import torch.distributed.fsdp
import varlen
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
ROOT = Path(__file__).parent.parent.parent
OWN = (ROOT / "lld", ROOT / "tests")  # a virtual environment in the checkout is not the project's code
guard = None  # the library of start.load_hooks


def is_own(path: Path) -> bool:
    """Whether a file is the project's, the pretended device apart."""
    inside = path.parent == ROOT or any(folder in path.parents for folder in OWN)
    return inside and path.parent != Path(__file__).parent


class Sim:
    """What was seen since `reset`. `busy`: kernels were launched and the host has not waited for them
    since."""

    def __init__(self):
        self.capturing, self.tape, self.busy, self.fused = False, None, False, False
        self.reset()

    def reset(self) -> None:
        counters = ("waits", "copies", "launches", "sdpa", "shapes", "varlen", "graphs")
        for name in counters:
            setattr(self, name, collections.Counter())

    def line(self) -> str:
        """The innermost line of the project that is being executed."""
        frame = sys._getframe(2)
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if is_own(path):
                return f"{path.name}:{frame.f_lineno}"
            frame = frame.f_back
        return "elsewhere"

    def wait(self, what: str) -> None:
        if self.capturing:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")
        self.waits[f"{what} @ {self.line()}"] += 1
        self.busy = False

    def launch(self) -> None:
        self.busy = True
        if not self.capturing and not self.fused:
            self.launches[self.line()] += 1

    @contextlib.contextmanager
    def one_kernel(self):
        """What is launched inside is one kernel on CUDA."""
        self.launch()
        before, self.fused = self.fused, True
        yield
        self.fused = before

    def copy_from_host(self, source: torch.Tensor, blocking: bool) -> None:
        """A copy from pageable memory waits for all that was launched before it; on an idle device it costs
        next to nothing."""
        if self.capturing:
            raise RuntimeError(
                "CUDA error: operation not permitted when stream is capturing (copy from host)"
            )
        self.copies[self.line()] += 1
        if self.busy and (blocking or not getattr(source, "pinned", False)):
            self.wait("copy from host")


SIM = Sim()


class Memory:
    """Bytes of all storages that tensors of the device hold, now and at the peak; not what a kernel takes for
    itself."""

    def __init__(self):
        self.held, self.now, self.peak = collections.Counter(), 0, 0

    def reset_peak(self, *_) -> None:
        self.peak = self.now


class Share:
    """One tensor's share in a storage, until the tensor is gone."""

    def __init__(self, storage):
        self.key, self.size = storage.data_ptr(), storage.nbytes()
        MEMORY.held[self.key] += 1
        if MEMORY.held[self.key] == 1:
            MEMORY.now += self.size
            MEMORY.peak = max(MEMORY.peak, MEMORY.now)

    def __del__(self):
        if MEMORY is None:  # the interpreter is going
            return
        MEMORY.held[self.key] -= 1
        if not MEMORY.held[self.key]:
            del MEMORY.held[self.key]
            MEMORY.now -= self.size


MEMORY = Memory()


class CudaTensor(torch.Tensor):
    @staticmethod
    def __new__(cls, elem, index: int = 0):
        assert type(elem) is torch.Tensor and elem.device.type == "cpu", (type(elem), elem.device)
        options = {
            "strides": elem.stride(),
            "storage_offset": elem.storage_offset(),
            "dtype": elem.dtype,
            "layout": elem.layout,
        }
        with torch.inference_mode(
            elem.is_inference()
        ):  # a view of an ordinary tensor stays ordinary in inference mode
            out = torch.Tensor._make_wrapper_subclass(
                cls, elem.size(), **options, device=torch.device("cuda", index)
            )
        out.elem, out.index = elem, index
        out.share = Share(elem.untyped_storage())
        return out

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})

    def __tensor_flatten__(self):  # so that Module.to swaps tensors in place instead of setting .data
        return ["elem"], None

    @staticmethod
    def __tensor_unflatten__(inner, _meta, _size, _stride):
        return CudaTensor(inner["elem"])

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            with torch.no_grad():
                new = self.detach().clone()
            is_parameter = getattr(self, "_is_param", False)
            memo[id(self)] = (
                torch.nn.Parameter(new, self.requires_grad)
                if is_parameter
                else new.requires_grad_(self.requires_grad)
            )
        return memo[id(self)]

    def numpy(self, *_args, **_kwargs):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    __array__ = numpy

    def tolist(self):
        SIM.wait("tolist")
        return self.elem.detach().tolist()

    def __repr__(self, **_kwargs):
        return f"CudaTensor({self.elem!r})"

    def untyped_storage(self):
        return self.elem.untyped_storage()

    def data_ptr(self):
        return self.elem.data_ptr()


def is_cuda(device) -> bool:
    return device is not None and torch.device(device).type == "cuda"


ONE_DEVICE = (
    "mm",
    "addmm",
    "bmm",
    "cat",
    "gather",
    "scatter",
    "index_add",
    "index_select",
    "searchsorted",
    "embedding",
)  # scalars too
INDEXED = (
    aten.index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
    aten._unsafe_index.Tensor,
    aten._index_put_impl_.default,
)
COPIES = (aten.copy_.default, aten._to_copy.default, aten._foreach_copy_.default)
VIEWS = set(
    "view _unsafe_view t transpose permute expand slice select unsqueeze squeeze detach alias unbind split "
    "split_with_sizes as_strided narrow _reshape_alias diagonal unfold chunk view_as lift_fresh is_same_size "
    "empty empty_like empty_strided new_empty new_empty_strided".split()
)  # and allocations: no kernel is launched for them
ONE_KERNEL = (aten._fused_rms_norm.default,)  # on CUDA, where other devices take it apart
ASKS_HOST = {
    aten._local_scalar_dense.default: "item",
    aten.nonzero.default: "nonzero",
    aten.masked_select.default: "masked_select",
    aten.equal.default: "equal",
    aten.is_nonzero.default: "is_nonzero",
    aten.unique_consecutive.default: "unique",
    aten._unique2.default: "unique",
    aten.bincount.default: "bincount",
    aten.repeat_interleave.Tensor: "repeat_interleave",
}


def device_of(func, flat) -> int | None:
    """The index of the device that the tensors of an operation are on, None for the CPU; raises where CUDA
    would."""
    found = {x.index for x in flat if isinstance(x, CudaTensor)}
    host = [
        x
        for x in flat
        if type(x) is torch.Tensor or (isinstance(x, torch.nn.Parameter) and not isinstance(x, CudaTensor))
    ]
    refused = len(found) > 1 or (
        found and any(x.dim() > 0 or func.overloadpacket.__name__ in ONE_DEVICE for x in host)
    )
    if refused and func not in COPIES and func not in INDEXED:
        devices = [
            f"cuda:{x.index}" if isinstance(x, CudaTensor) else "cpu"
            for x in flat
            if isinstance(x, torch.Tensor)
        ]
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two: {devices} ({func})"
        )
    return min(found, default=None)


def check_index(func, self, indices, values=None) -> None:
    """Indices may come from the host, for a copy; what is indexed and what is put there must be on one
    device."""
    if not isinstance(self, CudaTensor):
        raise RuntimeError(
            f"indices should be either on cpu or on the same device as the indexed tensor (cpu) ({func})"
        )
    if isinstance(values, torch.Tensor) and not isinstance(values, CudaTensor) and values.dim() > 0:
        raise RuntimeError(
            f"Expected all tensors to be on the same device: self on cuda, values on cpu ({func})"
        )
    for index in indices:
        if isinstance(index, CudaTensor):
            if index.dtype in (torch.bool, torch.uint8):
                SIM.wait("boolean index")
        elif isinstance(index, torch.Tensor):
            SIM.copy_from_host(index, True)


def run(func, args, kwargs):
    """One operation: of the CPU as it is, of the pretended device by the CPU's kernel."""
    if func.namespace == "torch_attn":
        return run_varlen(func, args, kwargs)
    flat, spec = pytree.tree_flatten((args, kwargs))
    target = kwargs.get("device")
    here = device_of(func, flat)
    if here is None and not is_cuda(target):
        return func(*args, **kwargs)
    if func in INDEXED:
        check_index(func, *args[:3])
    if func in ASKS_HOST and kwargs.get("output_size") is None:
        SIM.wait(ASKS_HOST[func])
    to_host = watch_copy(func, args, kwargs, here)
    if func.overloadpacket.__name__ not in VIEWS and not to_host:
        SIM.launch()
    host = torch.device("cpu")
    plain = [
        x.elem if isinstance(x, CudaTensor) else host if isinstance(x, torch.device) else x for x in flat
    ]
    inner_args, inner_kwargs = pytree.tree_unflatten(plain, spec)
    inner_kwargs.pop("pin_memory", None)
    if func is aten.mm.dtype:
        func = mm_in_type
    out = func(*inner_args, **inner_kwargs)
    if SIM.capturing:
        SIM.tape.append((func, inner_args, inner_kwargs, out))
    if to_host:
        return args[0] if func is aten.copy_.default else out
    index = here if here is not None and not is_cuda(target) else torch.device(target).index
    return wrap(flat, plain, out, guard.get_device() if index is None else index)


def mm_in_type(left, right, dtype):
    """A product that sums in another type, which only CUDA has."""
    return torch.mm(left.to(dtype), right.to(dtype))


mm_in_type._schema = types.SimpleNamespace(is_mutable=False)


def watch_copy(func, args, kwargs, here) -> bool:
    """Counts copies between host and device; True where the result is on the host."""
    if func is aten._to_copy.default and kwargs.get("device") is not None:
        if not is_cuda(kwargs["device"]):
            SIM.wait("to cpu")
            return True
        if here is None:
            SIM.copy_from_host(args[0], not kwargs.get("non_blocking", False))
    if func is aten.copy_.default and isinstance(args[0], CudaTensor) != isinstance(args[1], CudaTensor):
        if isinstance(args[1], CudaTensor):
            SIM.wait("copy_ to cpu")
            return True
        if args[1].dim() > 0:
            SIM.copy_from_host(args[1], len(args) < 3 or not args[2])
    return False


def wrap(flat, plain, out, index: int):
    """The results as tensors of the device; what an operation wrote into is returned as the very object it
    was."""
    outer = {id(inner): x for x, inner in zip(flat, plain, strict=True) if isinstance(x, CudaTensor)}

    def one(x):
        if type(x) is not torch.Tensor:
            return x
        if id(x) in outer:
            assert outer[id(x)].shape == x.shape, "an operation changed a shape in place"
            return outer[id(x)]
        return CudaTensor(x, index)

    return pytree.tree_map(one, out)


# ---- attention ---------------------------------------------------------------------------------------------


def sdpa_choice(dtype, query, key, value, mask, causal: bool, gqa: bool) -> str:
    """The kernels that scaled_dot_product_attention takes on Hopper and on Ampere, by the conditions of torch
    2.13's sdp_utils."""
    half = dtype in varlen.HALF
    heads, dim = query.shape[-3] == key.shape[-3], query.shape[-1]
    strides = all(x.stride(-1) == 1 for x in (query, key, value)) and (mask is None or mask.stride(-1) == 1)
    on = torch.backends.cuda
    can = {
        "cudnn": on.cudnn_sdp_enabled()
        and half
        and dim % 8 == 0
        and dim <= 128
        and (heads or gqa)
        and key.shape[2] > 1
        and strides,
        "flash": half
        and mask is None
        and (heads or gqa)
        and strides
        and not (causal and query.shape[-2] != key.shape[-2]),
        "efficient": heads and strides and dim % (8 if half else 4) == 0 and dtype != torch.float64,
    }
    orders = (("cudnn", "flash", "efficient"), ("flash", "efficient"))
    return "/".join(next((name for name in order if can[name]), "math") for order in orders)


def watch_sdpa():
    """CUDA chooses in C++, below which a wrapper cannot look, so the Python function is watched; all choices
    compute the same."""
    real = torch.nn.functional.scaled_dot_product_attention

    def watched(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):
        if not isinstance(query, CudaTensor):
            return real(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        with SIM.one_kernel():
            dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query.dtype
            choice = sdpa_choice(dtype, query, key, value, attn_mask, is_causal, enable_gqa)
            SIM.sdpa[f"{choice} {str(dtype)[6:]} @ {SIM.line()}"] += 1
            SIM.shapes[(tuple(query.shape), tuple(key.shape))] += 1
            return real(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )

    torch.nn.functional.scaled_dot_product_attention = watched


class VarlenCall:
    """A call of the varlen kernel that a graph repeats; what the host told it stays as it was captured."""

    _schema = types.SimpleNamespace(is_mutable=True)

    def __init__(self, args):
        self.args = args

    def __call__(self):
        SIM.varlen["forward"] += 1
        return varlen.forward(*self.args)


def run_varlen(func, args, kwargs):
    plain = [x.elem if isinstance(x, CudaTensor) else x for x in args]
    host = [x for x in args if type(x) is torch.Tensor]
    varlen.check(not host, "all tensors must be on the device")
    if func is torch.ops.torch_attn._varlen_attn.default:
        names = ("is_causal", "scale", "window_size", "enable_gqa", "seqused_k", "block_table")
        rest = dict(zip(names, plain[7:], strict=False)) | {
            k: getattr(v, "elem", v) for k, v in kwargs.items()
        }
        told = [
            rest.get("is_causal", False),
            *(rest.get(name) for name in ("scale", "window_size", "seqused_k", "block_table")),
        ]
        call = VarlenCall((*plain[:7], *told))
        out, lse = call()
        if SIM.capturing:
            SIM.tape.append((call, (), {}, (out, lse)))
        SIM.launch()
        return CudaTensor(out, args[0].index), CudaTensor(lse), CudaTensor(torch.zeros(2, dtype=torch.uint64))
    assert func is torch.ops.torch_attn._varlen_attn_backward.default, func
    grad, q, k, v, _out, _lse, cu_q, cu_k, _max_q, _max_k, causal, _rng, *more = plain
    scale, window = ([*more, None, None])[:2] if more else (kwargs.get("scale"), kwargs.get("window_size"))
    SIM.varlen["backward"] += 1
    return tuple(
        CudaTensor(x, args[1].index)
        for x in varlen.backward(grad, q, k, v, cu_q, cu_k, causal, scale, window)
    )


# ---- the world around --------------------------------------------------------------------------------------


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            options = {
                name: value for name, value in (kwargs or {}).items() if name != "device"
            }  # it is there
            return func(*args, **options)  # comes back with the parts that this process has
        whole = not torch.is_inference_mode_enabled() or func in ONE_KERNEL
        if not whole and func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            with self:  # autograd, which takes composite operations apart otherwise, is skipped
                out = func.decompose(*args, **(kwargs or {}))
            if out is not NotImplemented:
                return out
        return run(func, args, kwargs or {})


class Graph:
    """torch.cuda.CUDAGraph: the operations of the capture, done again on the very same memory."""

    def replay(self) -> None:
        SIM.graphs["replayed"] += 1
        SIM.launch()
        for func, args, kwargs, out in self.tape:
            olds = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
            inputs = {
                x.untyped_storage().data_ptr()
                for x in pytree.tree_leaves((args, kwargs))
                if isinstance(x, torch.Tensor)
            }
            if not func._schema.is_mutable and all(x.untyped_storage().data_ptr() in inputs for x in olds):
                continue  # a view
            news = [x for x in pytree.tree_leaves(func(*args, **kwargs)) if isinstance(x, torch.Tensor)]
            for old, new in zip(olds, news, strict=True):
                if old is not new:
                    old.copy_(new)


@contextlib.contextmanager
def graph(captured, pool=None, capture_error_mode=None, **_):
    SIM.capturing, SIM.tape = True, []
    try:
        yield
    finally:
        SIM.capturing, captured.tape, SIM.tape = False, SIM.tape, None
        SIM.graphs["captured"] += 1


class Stream:
    """torch.cuda.Stream and torch.cuda.Event: everything has happened when it is asked for."""

    def __init__(self, *_args, **_kwargs):
        self.device = torch.device("cuda", guard.get_device())

    def record(self, *_args):
        return self

    record_event = wait_event = wait_stream = synchronize = wait = record

    def __eq__(self, other):
        return isinstance(other, Stream)

    __hash__ = object.__hash__


def move_states_to_device(parameters, buffers, device) -> None:
    """FSDP2's own sets `.data`, which a wrapped tensor does not bear; Module.to swaps."""
    for tensor in (*parameters, *buffers):
        if tensor.device != device:
            moved = tensor.detach().to(device)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            new = torch.nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved
            torch.utils.swap_tensors(tensor, new)


def barrier(*_args, device_ids=None, barrier=torch.distributed.barrier, **_kwargs) -> None:
    barrier()  # gloo takes no device_ids


@contextlib.contextmanager
def device(wanted):
    before = guard.get_device()
    guard.set_device(
        torch.device("cuda", wanted).index if isinstance(wanted, int) else torch.device(wanted).index or 0
    )
    try:
        yield
    finally:
        guard.set_device(before)


def fake_cuda(num_devices: int) -> dict:
    """torch.cuda's functions of one H100 or several."""
    memory = 80 * 10**9
    properties = types.SimpleNamespace(
        total_memory=memory, name="pretended", major=9, minor=0, multi_processor_count=132
    )
    random = torch.zeros(16, dtype=torch.uint8)
    answers = {
        "is_available": True,
        "device_count": num_devices,
        "is_initialized": True,
        "is_bf16_supported": True,
        "_is_in_bad_fork": False,
        "get_device_properties": properties,
        "get_device_name": "pretended",
        "get_device_capability": (9, 0),
        "mem_get_info": (memory, memory),
        "get_rng_state": random,
        "get_rng_state_all": [random],
        "graph_pool_handle": (0, 0),
    }
    nothing = (
        "_lazy_init",
        "empty_cache",
        "manual_seed",
        "manual_seed_all",
        "set_rng_state",
    )
    fakes = {name: lambda *_args, answer=answer, **_kwargs: answer for name, answer in answers.items()}
    fakes |= dict.fromkeys(nothing, lambda *_args, **_kwargs: None)

    def index(wanted):
        return wanted if isinstance(wanted, int) else torch.device(wanted).index or 0

    fakes |= {
        "set_device": lambda wanted: guard.set_device(index(wanted)),
        "current_device": lambda: guard.get_device(),
    }
    fakes |= {"max_memory_allocated": lambda *_: MEMORY.peak, "memory_allocated": lambda *_: MEMORY.now}
    fakes |= {"reset_peak_memory_stats": MEMORY.reset_peak, "Stream": Stream, "Event": Stream}
    fakes |= {"current_stream": lambda *_: Stream(), "stream": lambda *_: contextlib.nullcontext()}
    return fakes | {
        "synchronize": lambda *_: SIM.wait("synchronize"),
        "device": device,
        "CUDAGraph": Graph,
        "graph": graph,
    }


def fake_files(save, load) -> dict:
    """torch.save and torch.load: a GPU's file names the device of every tensor, ours that of the CPU, so its
    path is remembered."""
    from_cuda = set()

    def saved(tree, file, *args, **kwargs):
        if any(isinstance(x, CudaTensor) for x in pytree.tree_leaves(tree)):
            from_cuda.add(str(file))
        return save(
            pytree.tree_map(lambda x: x.elem.detach() if isinstance(x, CudaTensor) else x, tree),
            file,
            *args,
            **kwargs,
        )

    def loaded(file, map_location=None, **kwargs):
        if str(file) in from_cuda and map_location is None:
            raise RuntimeError(f"{file} holds CUDA tensors and is opened without map_location")
        return load(file, map_location=map_location, **kwargs)

    return {"save": saved, "load": loaded}


def swap_and_keep(left, right, swap=torch.utils.swap_tensors) -> None:
    """torch.utils.swap_tensors for Module.to, which sets .data on a real GPU and so leaves the gradient's
    type as it was."""
    kept = [x.grad_dtype if x.is_leaf else None for x in (left, right)]
    swap(left, right)
    for x, dtype in zip((left, right), kept, strict=True):
        if x.is_leaf and x.requires_grad and dtype is not None:
            x.grad_dtype = dtype


def pin(tensor, *_args, **_kwargs):
    pinned = tensor.clone()
    pinned.pinned = True
    return pinned


@contextlib.contextmanager
def pretend(num_devices: int = 1):
    """Inside, torch.cuda seems to be there."""
    thread_run = threading.Thread.run

    def run_in_mode(self):  # dispatch modes belong to a thread
        with Mode():
            thread_run(self)

    fakes = [(torch.cuda, name, fake) for name, fake in fake_cuda(num_devices).items()]
    fakes += [(torch, name, fake) for name, fake in fake_files(torch.save, torch.load).items()]
    fakes += [
        (torch.utils, "swap_tensors", swap_and_keep),
        (threading.Thread, "run", run_in_mode),
        (torch.Tensor, "pin_memory", pin),
        (torch.distributed.fsdp._fully_shard._fsdp_init, "_move_states_to_device", move_states_to_device),
        (torch.distributed, "barrier", barrier),
    ]
    kept = [(place, name, getattr(place, name)) for place, name, _ in fakes]
    lift = torch._C._only_lift_cpu_tensors()
    try:
        for place, name, fake in fakes:
            setattr(place, name, fake)
        torch._C._set_only_lift_cpu_tensors(True)
        with Mode():
            yield SIM
    finally:
        torch._C._set_only_lift_cpu_tensors(lift)
        for place, name, old in kept:
            setattr(place, name, old)


watch_sdpa()

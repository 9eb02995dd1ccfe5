"""Fake GPUs: torch, Inductor and Triton see a CUDA device whose tensors have shapes and dtypes but no values.

`install` makes all replacements, in a process of its own, because they are permanent; shim.py must be imported first.
A recorder (counts.Tally) is called for everything that happens on the device.
"""
import contextlib
import functools
import hashlib
import importlib.util
import re
import struct
import subprocess
import tempfile
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from .price import RATES, load

PROPERTIES = dict(                       # equal for all GPUs here
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, warp_size=32, max_threads_per_block=1024,
    gcnArchName="", clock_rate=1_980_000, memory_clock_rate=2_619_000, memory_bus_width=5120)

aten = torch.ops.aten
auto_functionalized_v2 = torch._higher_order_ops.auto_functionalize.auto_functionalized_v2

class Card(FakeTensorMode):
    """A mode in which tensors on "cuda" are fake. Operations on host tensors are computed normally."""
    def __init__(self, recorder: Any) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.recorder = recorder
        self.depth = 0                                        # nesting depth of operations
        self.sizes: dict[int, int] = {}  # address -> bytes of the storages that exist on the device

    def dispatch(self, func: Any, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        tracing = torch._guards.TracingContext.try_get() is not None          # inside a compiler
        if func in bodies and not tracing:
            return self.run_body(func, args, kwargs)
        if self.depth > 0:  # inside another operation host tensors are fake too
            return super().dispatch(func, kinds, args, kwargs)
        if not kwargs.get("pin_memory") and not any(on_device(x) for x in flat(args, kwargs)):
            return func(*args, **kwargs)
        if tracing:
            return super().dispatch(func, kinds, args, kwargs)
        if func is aten._local_scalar_dense.default:
            return self.read_scalar(args[0])
        out = self.run_outermost(func, kinds, args, kwargs)
        if not is_composite(func):
            self.recorder.on_operation(func, args, kwargs, out)
        return out

    def run_body(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run the code of a custom operation, so that the recorder sees the operations in it."""
        before, self.depth = self.depth, 0
        try:
            with self:
                return bodies[func](*args, **kwargs)
        finally:
            self.depth = before

    def run_outermost(self, func: Any, kinds: Any, args: tuple, kwargs: dict) -> Any:
        """Compute the output shapes of an operation that is not inside another one."""
        source = args[0] if args else None
        if func is aten._to_copy.default and not isinstance(source, FakeTensor):
            with self:                                        # otherwise the data would be copied to a real device
                args = (torch.empty_like(source, pin_memory=True), *args[1:])
        composite = is_composite(func)
        self.depth += not composite
        try:
            if kwargs.get("out") is not None:                 # the result has no values
                return kwargs["out"]
            out = super().dispatch(func, kinds, args, kwargs)
        finally:
            self.depth -= not composite
        self.note(out)
        if func is aten._to_copy.default and isinstance(source, Tensor) and not isinstance(source, FakeTensor):
            out.host = source                                 # row lists and document bounds retain their values
        elif func is aten.slice.Tensor and hasattr(source, "host"):
            out.host = aten.slice.Tensor(source.host, *args[1:])
        if kwargs.get("pin_memory"):
            out.pinned = True
        return out

    def read_scalar(self, x: FakeTensor) -> bool | int | float:
        """Return a placeholder for the value of a fake scalar: 0 for losses and tokens, True for booleans."""
        if x.device.type == "cuda":
            self.recorder.on_host_wait()
        if x.dtype == torch.bool:
            return True
        return 0.0 if x.dtype.is_floating_point else 0

    def note(self, out: Any) -> None:
        """Count the device memory of new storages."""
        for x in flat((out,), {}):
            if not isinstance(x, FakeTensor) or x.fake_device.type != "cuda":
                continue
            storage = x.untyped_storage()
            if storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                self.recorder.on_alloc(storage._cdata, storage.nbytes(), x)
                weakref.finalize(storage, self.free, storage._cdata)

    def free(self, address: int) -> None:
        self.recorder.on_free(address, self.sizes.pop(address))

@functools.cache
def is_composite(func: Any) -> bool:
    """Return whether an operation is composed of others on every device. Only those others are launched."""
    if func.namespace != "aten":
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")

def flat(args: Any, kwargs: dict) -> Iterator:
    for x in (*args, *kwargs.values()):
        if isinstance(x, (list, tuple)):
            yield from x
        else:
            yield x

def on_device(x: Any) -> bool:
    return isinstance(x, FakeTensor) or is_cuda_device(x)

def is_cuda_device(x: Any) -> bool:
    return isinstance(x, torch.device) and x.type == "cuda"

bodies: dict[Any, Callable] = {}         # custom operation -> its implementation

class Event:
    """A replacement for torch.cuda.Event that has always completed."""
    def __init__(self, *_: Any, **__: Any) -> None: ...

    record = wait = wait_event = wait_stream = __init__

    def synchronize(self) -> None:
        mode.recorder.on_host_wait()

class Stream(Event):
    def record_event(self) -> Event:
        return Event()

def returns(value: Any) -> Callable:
    """Return a new function, which Dynamo needs every time, that ignores its arguments and returns `value`."""
    def constant(*_: Any, **__: Any) -> Any:
        return value
    return constant

mode: Card | None = None                 # set by `install`

def install(card: str, recorder: Any, world_size: int = 1) -> Card:
    """Make torch, Inductor and Triton see world_size GPUs of this kind. Return the mode to run the trainer in."""
    global mode
    device = load(RATES)["cards"][card]["device"]
    install_cuda(device, world_size)
    install_inductor()
    install_triton(device)
    install_collectives(world_size)
    mode = Card(recorder)
    # torch looks the implementation up by the exact class of the mode.
    auto_functionalized_v2.py_impl(Card)(auto_functionalized_v2.python_key_table[FakeTensorMode])
    torch._C._set_only_lift_cpu_tensors(True)  # as without CUDA; otherwise torch.tensor() would open a device
    return mode

def install_cuda(card: dict[str, Any], world_size: int) -> None:
    """Replace the CUDA API: answer queries, record waits, and do nothing else."""
    # Import this first, because its table of rules needs the original functions.
    import torch._dynamo
    from torch._dynamo.device_interface import CudaInterface
    properties = types.SimpleNamespace(**PROPERTIES, **card)
    properties.shared_memory_per_multiprocessor = properties.shared_memory_per_block_optin + 1024
    answers = dict(
        is_available=True, device_count=world_size, current_device=0, is_initialized=True, is_bf16_supported=True,
        get_device_properties=properties, get_device_capability=(properties.major, properties.minor),
        get_device_name=properties.name, get_rng_state=torch.zeros(16, dtype=torch.uint8),
        max_memory_allocated=0, max_memory_reserved=0,
        _exchange_device=0, _maybe_exchange_device=0, set_device=None, init=None, _lazy_init=None, set_rng_state=None,
        reset_peak_memory_stats=None, empty_cache=None, _set_stream_by_id=None)
    for name, answer in answers.items():
        setattr(torch.cuda, name, returns(answer))

    torch.cuda.synchronize = lambda *_: mode.recorder.on_host_wait()
    torch.cuda.Event = Event
    torch.cuda.Stream = Stream
    torch.cuda.stream = returns(contextlib.nullcontext())
    torch.cuda.current_stream = returns(Stream())
    Tensor.record_stream = returns(None)
    torch.cuda.nccl.version = returns((2, 0, 0))
    torch.cuda.random.current_device = returns(0)
    torch.version.cuda = "13.0"                               # CUDA version of the wheel that the dry run imitates

    def pinned(x: Tensor, *_: Any) -> Tensor:                 # only a driver can pin host memory
        x.pinned = True
        return x

    Tensor.pin_memory = pinned
    for name in ("getDevice", "exchangeDevice", "maybeExchangeDevice", "setDevice", "getCurrentRawStream"):
        setattr(torch._C, f"_cuda_{name}", returns(0))
    for name in ("current_device", "set_device", "device_count", "synchronize", "get_device_properties",
                 "is_bf16_supported", "_set_stream_by_id"):    # CudaInterface copied these when torch was imported
        setattr(CudaInterface, name, staticmethod(getattr(torch.cuda, name)))
    for name in ("exchange_device", "maybe_exchange_device", "get_raw_stream"):
        setattr(CudaInterface, name, staticmethod(returns(0)))

def install_inductor() -> None:
    """Replace the queries, timings and computations for which Inductor needs the device while it compiles."""
    import torch._inductor.config as config
    from torch._inductor.constant_folding import ConstantFolder
    from torch._inductor.fx_passes import fuse_attention, misc_patterns, pad_mm
    from torch._inductor.runtime import triton_heuristics, triton_helpers
    config.compile_threads = 1                                # worker processes would not have these replacements
    config.shape_padding = False                              # it is decided by timing matmuls
    config.benchmark_kernel = True                            # so that a kernel's metadata contains its bytes
    config.use_static_cuda_launcher = False                   # it loads binaries in C++
    config.autotune_local_cache = False                       # it would compile only what an earlier run chose
    for module, name in ((fuse_attention, "_sfdp_init"), (pad_mm, "_pad_mm_init"),
                         (misc_patterns, "_misc_patterns_init")):
        setattr(module, name, returns(None))  # these trace patterns on the device; no graph here has them
    triton_helpers.set_driver_to_gpu = returns(None)          # it looks for libcuda.so.1
    run_kernel = triton_heuristics.CachingAutotuner.run
    fold_constants = ConstantFolder.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        running_autotuners.append(self)                       # `launch` reads it, see below
        try:
            return run_kernel(self, *args, **kwargs)
        finally:
            running_autotuners.pop()

    def rank_by_index(self: Any, *_: Any, **__: Any) -> dict:
        """Replace the timing of configurations, which needs a device: all are compiled, the first one is launched."""
        return {launcher: float(i) for i, launcher in enumerate(self.launchers)}

    def empty_strided(size: tuple, stride: tuple, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda:0")

    def reinterpret(x: Tensor, size: tuple, stride: tuple, offset: int = 0) -> Tensor:
        return torch.as_strided(x, size, stride, x.storage_offset() + offset)

    def fold_on_host(self: Any, *args: Any, **kwargs: Any) -> Any:
        with OnHost():                                        # constants are computed while compiling
            return fold_constants(self, *args, **kwargs)

    triton_heuristics.CachingAutotuner.benchmark_all_configs = rank_by_index
    triton_heuristics.CachingAutotuner.run = run
    triton_heuristics.DebugAutotuner.run = run                # used with benchmark_kernel; it would time each launch
    ConstantFolder.run = fold_on_host

    guards = torch._C._dynamo.guards                          # C++ that allocates and reads real tensors
    guards._empty_strided_cuda = empty_strided
    guards._reinterpret_tensor = reinterpret
    guards.assert_size_stride = returns(None)
    guards.assert_alignment = returns(None)

capability = 90                     # of the GPU; determines the machine code
running_autotuners: list[Any] = []       # the last one is the autotuner whose kernel is being launched

class OnHost(TorchDispatchMode):
    """A mode that executes operations for "cuda" on the host."""
    def __torch_dispatch__(self, func: Any, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if is_cuda_device(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        on_host = [torch.device("cpu") if is_cuda_device(x) else x for x in args]
        return func(*on_host, **kwargs)


# ---- Triton: kernels are compiled to machine code; loading and launching them is recorded
TOOLS = Path(importlib.util.find_spec("triton").origin).parent / "backends/nvidia/bin"
kernel_facts: dict[str, dict[str, Any]] = {}         # hash of the machine code -> facts about it

def load_binary(name: str, code: bytes, shared: int, device: int) -> tuple[None, str, int, int, int]:
    """Return what the driver returns for a kernel: module, function, registers, spills, maximum number of threads."""
    digest = hashlib.sha256(code).hexdigest()[:16]
    if digest not in kernel_facts:
        kernel_facts[digest] = dict(name=name, **machine_facts(code))
    facts = kernel_facts[digest]
    return None, digest, facts["registers"], facts["spills"], 1024

def machine_facts(code: bytes) -> dict[str, Any]:
    """Read registers and bytes of spills with NVIDIA's tool, and count the instructions of machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [TOOLS / "cuobjdump", "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    instructions = read_instructions(code)
    loops = [count_instructions(instructions[first:last + 1]) for last, first in find_branches(instructions)
             if first < last]
    spills = usage["STACK"] + usage["LOCAL"]
    return dict(registers=usage["REG"], spills=spills, **count_instructions(instructions), loops=loops)

# An instruction has 128 bits. The lowest 12 are its opcode (seen in disassemblies of 8.0 to 10.0 by nvdisasm).
OPCODE, BRANCH, NOP = 0xFFF, 0x947, 0x918
MULTIFUNCTION = 0x108                    # lowest 9 bits: exponential, logarithm, square root, reciprocal, sine

def count_instructions(words: list[int]) -> dict[str, int]:
    return dict(instructions=sum(word & OPCODE != NOP for word in words),
                special=sum(word & 0x1FF == MULTIFUNCTION for word in words))

def read_instructions(code: bytes) -> list[int]:
    table, = struct.unpack_from("<Q", code, 0x28)
    entry, count, names_at = struct.unpack_from("<HHH", code, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", code, table + entry * at) for at in range(count)]
    names = sections[names_at][4]
    (offset, size), = [section[4:] for section in sections if code.startswith(b".text.", names + section[0])]
    return [int.from_bytes(code[at:at + 16], "little") for at in range(offset, offset + size, 16)]

def find_branches(words: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the indices of branches and of their targets, which are relative to the instruction after the branch."""
    for at, word in enumerate(words):
        if word & OPCODE == BRANCH:
            distance = (word >> 34) & (2**30 - 1)
            distance -= (distance >> 29) << 30                # sign extension
            if capability >= 90:
                distance = distance * 256 + (word >> 16 & 0xFF)
            yield at, at + 1 + distance // 4

def launcher(source: Any, metadata: Any) -> Callable:
    def launch(x: int, y: int, z: int, stream: int, function: str, *rest: Any) -> None:
        args = rest[4:]                                       # after metadata and hooks
        owner = running_autotuners[-1] if running_autotuners else None
        mode.recorder.on_kernel_launch(function, owner, metadata.num_warps, (x, y, z), args)
    return launch

def install_triton(card: dict[str, Any]) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    global capability
    capability = 10 * card["major"] + card["minor"]
    properties = dict(max_shared_mem=card["shared_memory_per_block_optin"], multiprocessor_count=card[
        "multi_processor_count"], warpSize=32, max_num_regs=65536, sm_clock_rate=PROPERTIES["clock_rate"],
        mem_clock_rate=PROPERTIES["memory_clock_rate"], mem_bus_width=PROPERTIES["memory_bus_width"])
    utils = types.SimpleNamespace(load_binary=load_binary, get_device_properties=returns(properties))
    driver = types.SimpleNamespace(
        get_current_target=returns(GPUTarget("cuda", capability, 32)), get_current_device=returns(0),
        get_current_stream=returns(0), get_active_torch_device=returns(torch.device("cuda", 0)),
        launcher_cls=launcher, utils=utils)
    triton.runtime.driver.set_active(driver)

@dataclass
class Work:
    recorded: Any

    def wait(self, *_: Any) -> bool:
        mode.recorder.on_wait(self.recorded)
        return True

def install_collectives(world_size: int) -> None:
    """Replace collectives. On the host every rank acts as this one does, and on the device nothing is sent."""

    def collective(name: str) -> Callable:
        def call(out: Tensor, *args: Any, group: Any = None, async_op: bool = False, **_: Any) -> Work | None:
            inputs = [x for x in args if isinstance(x, Tensor)]
            splits = [x for x in args if isinstance(x, list)]
            if not isinstance(out, FakeTensor):               # row lists, with the counts by rank
                source, = inputs
                _, leaving = splits
                torch.cat([source.split(leaving)[0]] * world_size, out=out)
                return None
            work = Work(mode.recorder.on_collective(name, out, inputs))
            return work if async_op else work.wait()
        return call

    def all_gather_object(everyone: list, fact: Any, group: Any = None) -> None:
        everyone[:] = [fact] * len(everyone)

    for name in ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single"):
        setattr(dist, name, collective(name))
    dist.all_gather_object = all_gather_object
    dist.init_process_group = returns(None)
    dist.new_group = returns("plans")
    dist.destroy_process_group = returns(None)

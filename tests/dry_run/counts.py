"""Count launches, bytes, flops, collectives, memory and waits of a walk, in the order in which they are issued."""
import hashlib
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from . import fake_cuda
from .price import TILE, executed_tiles

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train_gpt as tg  # noqa: E402

GRADIENT_SCRATCH = {"lm_head": 1}        # buffers next to main_grad; an fp8 matmul cannot accumulate into main_grad
# Functions of the trainer that reports do not name. They name the caller instead.
LOOK_THROUGH = ("synchronize", "launch")
TRAINER_LINES = Path(tg.__file__).read_text("utf-8").splitlines()             # now, because the file may change later

# ATen operations that run kernels of a library. The sizes m, n, k of a matmul are those of the last two dimensions.
MATMULS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_scaled_mm_v2"}
MATMUL_KERNELS = {"relu_sq_kernel"}      # of section 7
ATTENTION = {"_varlen_attn": "forward", "_varlen_attn_backward": "backward"}
# Allocations and queries, which launch nothing.
NO_LAUNCH = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "device", "alias",
          "_unsafe_view", "lift_fresh", "_reshape_alias", "set_", "resize_", "sym_size", "sym_stride", "sym_numel"}

def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

def describe(x: Any) -> str:
    return f"{dtype_name(x.dtype)}{tuple(x.shape)}".replace(" ", "")

def describe_all(tensors: list[Tensor]) -> str:
    return " ".join(map(describe, tensors))

def short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


# ---- Bytes and flops
def operation_bytes(name: str, args: tuple, tensors: list[Tensor], out: list[Tensor]) -> int:
    """Return the bytes that an operation must read or write, once each; of an indexed tensor, the indexed rows."""
    if name in ("index", "gather", "embedding", "index_select"):
        return 2 * out[0].nbytes + sum(x.nbytes for x in tensors[1:] if not x.dtype.is_floating_point)
    if name in ("index_copy_", "index_add_"):               # tensors: target, index, source
        return (2 if name == "index_copy_" else 3) * tensors[2].nbytes + tensors[1].nbytes
    if name == "index_put_":
        target, *inputs = tensors
        rows = max(x.numel() for x in args[1] if x is not None)
        indexed_dim = next(dim for dim, x in enumerate(args[1]) if x is not None)
        return rows * target.nbytes // max(1, target.shape[indexed_dim]) + sum(x.nbytes for x in inputs)
    if name in ("fill_", "zero_", "full", "zeros", "new_zeros", "zeros_like", "ones", "arange", "new_full"):
        return sum(x.nbytes for x in out)
    sources = tensors[1:] if name == "copy_" else tensors
    return sum(x.nbytes for x in sources) + sum(x.nbytes for x in out)


# ---- Records
class Tally:
    """Records what the fake GPU and the hooks report."""
    def __init__(self, world_size: int, stages: list[str]) -> None:
        self.world_size = world_size
        self.stages = stages                         # whose graphs are lowered, ["none"] or [], which is all
        self.kernels: dict[str, dict[str, Any]] = {}
        self.graphs: dict[str, dict[str, Any]] = {}
        self.phases: dict[str, dict[str, Any]] = {}  # timelines, in the order in which the host issues them, and peaks
        self.failures: list[str] = []
        self.host_waits = Counter()                  # in the timed loop: line -> count
        self.bytes_now = 0                           # on the device
        self.in_train_loop = False                   # between the start and the end of the training loop
        self.timed = False                           # in the training loop, but not in a validation or checkpoint
        self.batch: Any = None                       # the batch that attention runs on
        self.stage = 0
        self.row_grads: dict[int, str] = {}          # address of the row gradients -> label of the table
        self.table_numels: set[int] = set()          # elements of a whole table
        self.logits_numel = math.inf                 # tokens of a micro-batch, times vocabulary
        self.label_by_numel: dict[int, str] = {}     # elements of a weight with a main_grad -> its label
        self.in_backward = False
        self.gradient_sized: dict[int, str] = {}     # address of a buffer of a backward pass -> label of such a weight
        self.problems: dict[int, tuple[str, str]] = {}         # address of a buffer -> why it must not exist, its shape
        self.schedule: tg.Schedule | None = None     # set when the training loop starts
        self.begin("set-up")

    def begin(self, name: str) -> None:
        self.phase = self.phases[name] = dict(timeline=[], collectives=0, peak_bytes=self.bytes_now)

    def is_lowered(self, name: str) -> bool:
        """Return whether the graphs of a function are lowered; those of the model, in the current stage."""
        if name.startswith("GPT.") and self.stages:
            return str(self.stage + 1) in self.stages
        return self.stages != ["none"]

    def fail(self, kind: str, where: str, found: str) -> None:
        failure = f"{kind}: {where}: {found}"
        if failure not in self.failures:
            self.failures.append(failure)

    # ---- Called by the fake GPU
    def on_alloc(self, address: int, size: int, tensor: Tensor) -> None:
        self.bytes_now += size
        self.phase["peak_bytes"] = max(self.phase["peak_bytes"], self.bytes_now)
        if not self.timed:
            return
        shape = describe(tensor)
        if tensor.dtype == torch.float32 and tensor.numel() >= self.logits_numel:
            self.problems[address] = "f32 buffer of (tokens, vocabulary)", shape
        elif tensor.numel() in self.table_numels:
            self.problems[address] = "buffer of table size", shape
        elif self.in_backward and tensor.element_size() > 1 and tensor.numel() in self.label_by_numel:
            label = self.gradient_sized[address] = self.label_by_numel[tensor.numel()]   # fp8 copies are not gradients
            if list(self.gradient_sized.values()).count(label) > GRADIENT_SCRATCH.get(label, 0):
                self.problems[address] = "buffer of a gradient's size", shape

    def on_free(self, address: int, size: int) -> None:
        self.bytes_now -= size
        self.gradient_sized.pop(address, None)
        self.problems.pop(address, None)

    def on_operation(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        name = func._schema.name.partition("::")[2]
        if name in NO_LAUNCH or func.is_view:
            return
        others = [x for key, x in kwargs.items() if key != "out"]
        tensors = fake_tensors((*args, *others))
        outputs = fake_tensors((out,))
        on_device = [x for x in tensors + outputs if x.device.type == "cuda"]
        if not on_device:
            return
        facts = dict(kind="eager", name=f"aten.{name}", shapes=describe_all(tensors))
        if name.removesuffix("_") in MATMULS:                # in-place operations too
            a, b = [x for x in tensors if x.dim() >= 2][-2:]
            shape = dict(m=a.shape[-2], n=b.shape[-1], k=a.shape[-1], batch=math.prod(a.shape[:-2]))
            facts.update(kind="product", dtype=dtype_name(a.dtype), **shape, flops=2 * math.prod(shape.values()))
            facts["bytes"] = operation_bytes(name, args, [x for x in tensors if x.dim()], outputs)
        elif name in ATTENTION:
            facts = self.attention_facts(name, args, kwargs, tensors, outputs)
        else:
            facts["bytes"] = operation_bytes(name, args, tensors, outputs)
            if name in ("_to_copy", "copy_"):
                source = args[1] if name == "copy_" else args[0]
                self.note_copy(source, out, kwargs.get("non_blocking", args[2:] == (True,)), facts)
        key = f"{facts['name']}.{short_digest(facts['shapes'])}"
        self.count_launch(key, facts, on_device)

    def note_copy(self, source: Tensor, out: Tensor, non_blocking: bool, facts: dict[str, Any]) -> None:
        """Record a copy between host and device. It waits unless it is non-blocking and the host memory is pinned."""
        if source.device.type == out.device.type:
            return
        facts.update(kind="copy", bytes=out.nbytes, shapes=f"{describe(source)} to {out.device.type}")
        host = source if out.device.type == "cuda" else out
        if not non_blocking or not getattr(host, "pinned", False):
            self.on_host_wait()

    def attention_facts(self, name: str, args: tuple, kwargs: dict, tensors: list[Tensor],
                        outputs: list[Tensor]) -> dict[str, Any]:
        direction = ATTENTION[name]
        query = args[0] if direction == "forward" else args[1]
        tokens, heads, width = query.shape
        window, _ = kwargs.get("window_size") or args[-1]
        flops = 0
        if self.in_train_loop and self.batch is not None:
            cu_seqlens = self.cu_seqlens_of_heads(tokens)
            flops = executed_tiles(cu_seqlens.tolist(), window) * TILE * TILE * 4 * width * heads
            if direction == "backward":
                flops = flops * 5 // 2                        # five matmuls per tile instead of two
        qkv_like = [x for x in tensors + outputs if x.dim() == 3]
        return dict(kind="attention", name=f"attention_{direction}", flops=flops,
                    bytes=sum(x.nbytes for x in qkv_like),
                    shapes=f"{describe(query)} window={window} stage={self.stage}")

    def cu_seqlens_of_heads(self, tokens: int) -> np.ndarray:
        """Return the document bounds in `tokens` positions. Paired layers have two positions per token."""
        host = self.batch.cu_seqlens.host.numpy().astype(np.int64)
        length = self.batch.tokens.shape[1]
        starts = np.arange(len(host))[:, None] * length
        factor = tokens // (len(host) * length)
        return factor * np.unique(host + starts)

    def on_kernel_launch(self, function: str, owner: Any, warps: int, grid: tuple[int, ...], args: tuple) -> None:
        """Record a Triton kernel. owner: Inductor's autotuner, if Inductor generated the kernel."""
        tensors = [x for x in args if isinstance(x, FakeTensor)]
        facts = fake_cuda.kernel_facts[function]
        common = dict(programs=math.prod(grid), warps=warps, **facts)
        if owner is None and facts["name"] in MATMUL_KERNELS:
            key = self.add_matmul_facts(common, tensors)
        elif owner is None:
            name = facts["name"]
            bytes_moved, rows = self.rows_traffic(tensors)
            common.update(kind="triton", bytes=bytes_moved, shapes=describe_all(tensors))
            if rows:                                          # programs without a row return immediately
                common["programs"] = rows
            key = f"{name}.{short_digest(common['shapes'] + str(grid))}"
        else:
            key = self.add_generated_facts(owner, common, tensors)
        self.count_launch(key, common, tensors)

    def add_generated_facts(self, owner: Any, facts: dict[str, Any], tensors: list[Tensor]) -> str:
        name = owner.inductor_meta["kernel_name"]
        base = re.sub(r"_\d+$", "", name)
        source = owner.fn.src.replace(name, base)
        config = owner.launchers[0].config                    # see fake_cuda.rank_by_index
        trips = 1
        length = re.search(r"\br0_numel = (\d+)", source)
        if length and "R0_BLOCK" in config.kwargs:
            trips = -(-int(length[1]) // config.kwargs["R0_BLOCK"])
        loops = [dict(loop, trips=trips) for loop in facts["loops"]]
        facts.update(kind="generated", name=base, block=dict(config.kwargs), loops=loops,
                     bytes=generated_bytes(owner, tensors), shapes=describe_all(tensors))
        return f"{base}.{short_digest(source + str(sorted(config.kwargs.items())) + facts['shapes'])}"

    def add_matmul_facts(self, facts: dict[str, Any], tensors: list[Tensor]) -> str:
        """Add the facts of a matmul kernel of section 7, with (m, k) and (n, k) as first arguments. Return the key."""
        left, right = tensors[:2]
        in_epilogue = sum(x.nbytes for x in set(tensors[2:]))          # a kernel reads a repeated argument once
        m, k = left.shape
        n = len(right)
        facts.update(kind="product", dtype=dtype_name(left.dtype), m=m, n=n, k=k, batch=1, flops=2 * m * n * k,
                     bytes=sum(x.nbytes for x in set(tensors)), shapes=describe_all(tensors),
                     fused_bytes=tensors[-1].nbytes + in_epilogue)           # of a pass that replaces the epilogue
        return f"{facts['name']}.{short_digest(facts['shapes'] + str(facts['instructions']))}"

    def rows_traffic(self, tensors: list[Tensor]) -> tuple[int, int]:
        """Return the bytes that a kernel of section 7 moves, and the number of rows of the row gradients it touches."""
        total = touched = 0
        for x in tensors:
            label = self.row_grads.get(x.untyped_storage()._cdata)
            if label is None or len(tensors) == 1:
                total += x.nbytes
            else:
                lookup_rows = self.batch.lookup_rows[label].host.numpy()
                fraction = tensors[1].numel() / lookup_rows.size          # a token may have several lookups
                rows = fraction * len(np.unique(lookup_rows))
                total += round(2 * rows * x.shape[1] * x.element_size())
                touched = round(rows)
        return total, touched

    def count_launch(self, key: str, facts: dict[str, Any], tensors: list[Tensor]) -> None:
        first_in_loop = self.in_train_loop and not self.kernels.get(key, {}).get("seen")
        if first_in_loop or key not in self.kernels:          # replaces facts of the warm-up
            self.kernels[key] = dict(facts, seen=0, flops_seen=0)
        kernel = self.kernels[key]
        if self.in_train_loop:
            kernel["seen"] += 1
            kernel["flops_seen"] += facts.get("flops", 0)
        if facts.get("spills"):
            self.fail("spill", key, f"{facts['spills']} bytes on the stack, {facts['registers']} registers")
        timeline = self.phase["timeline"]
        if timeline and timeline[-1][:2] == ["run", key]:
            timeline[-1][2] += 1
        else:
            timeline.append(["run", key, 1])
        where = key if facts["kind"] == "generated" else f"{key} in {trainer_line()}"
        for x in tensors:                                     # the first launch that touches a buffer names it
            problem, shape = self.problems.pop(x.untyped_storage()._cdata, ("", ""))
            if problem:
                self.fail(problem, where, shape)

    def on_collective(self, name: str, out: Tensor, inputs: list[Tensor]) -> tuple[dict, int]:
        self.phase["collectives"] += 1
        number = self.phase["collectives"]
        size = max(x.nbytes for x in (out, *inputs))
        self.phase["timeline"].append(["collective", number, name, size, dtype_name(out.dtype)])
        return self.phase, number

    def on_wait(self, work: tuple[dict, int]) -> None:
        """Record a wait for a collective, by its index. The index in an earlier step is preceded by `before`."""
        phase, index = work
        self.phase["timeline"].append(["wait", index if phase is self.phase else f"before {index}"])

    def on_host_wait(self) -> None:
        if self.timed:
            self.host_waits[trainer_line()] += 1

def generated_bytes(owner: Any, tensors: list[Tensor]) -> int:
    """Return the bytes that a kernel moves according to Inductor, at most all arguments, and in-place ones twice."""
    # The limit is needed because Inductor takes the first argument for an in-place argument if it has removed one.
    names = [name for name in owner.fn.arg_names if "_ptr" in name]
    in_place = [x for name, x in zip(names, tensors) if name.startswith("in_out_ptr")]
    gigabytes = owner.inductor_meta.get("kernel_num_gb") or 0
    return min(round(gigabytes * 1e9), sum(x.nbytes for x in (*tensors, *in_place)))

def fake_tensors(values: Iterable) -> list[FakeTensor]:
    return [x for x in fake_cuda.flat(values, {}) if isinstance(x, FakeTensor)]

def trainer_line() -> str:
    """Return the function and the text, without comment, of the innermost running line of the trainer."""
    frame = sys._getframe()
    while frame is not None and (frame.f_code.co_filename != tg.__file__ or frame.f_code.co_name in LOOK_THROUGH):
        frame = frame.f_back
    if frame is None:
        return "autograd"
    line, _, _ = TRAINER_LINES[frame.f_lineno - 1].partition("  # ")
    return f"{frame.f_code.co_qualname}: {line.strip()}"

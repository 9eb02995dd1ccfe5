"""One rank's walk through `train()` on a card that is not there; what it launches, moves, keeps and waits for.

    python tests/walk.py --world=8 --card=H100 --graphs=lower --out=FILE -- flags of train_gpt.py

For a process of its own; rehearse.py starts it.
"""
from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import linecache
import logging
import math
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import phantom  # noqa: I001  before torch
import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt as tg  # noqa: E402

CYCLE = 2                                # steps that stand for all: an even one and an odd one
STEPS_PER_STAGE = 6                      # cycles: the one that changes stages, one that is like all others, its next
QUICK_STEPS = 2
LONGEST_NAME = 40                        # in the key of a kernel
SMALLEST_SHARE = 0.01                    # of a peak: smaller buffers are not listed
GRADIENT_SCRATCH = {"lm_head": 1}        # the product in 8 bits
HANDED_ON = ("synchronize", "launch")    # functions of the trainer whose callers say what it is about
TILE = 128                               # rows and columns of a tile of attention
aten = torch.ops.aten
linecache.getlines(tg.__file__)          # as it is imported, whatever becomes of the file meanwhile

# ATen's names of what a card does by a library's kernels. m, n, k of products follow from the last two axes.
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_scaled_mm_v2"}
ATTENTION = {"_varlen_attn": "forward", "_varlen_attn_backward": "backward"}
# Allocations and questions: they launch nothing.
SILENT = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "device", "alias",
          "_unsafe_view", "lift_fresh", "_reshape_alias", "set_", "resize_", "sym_size", "sym_stride", "sym_numel"}


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def text_of(x: Any) -> str:
    """A tensor as an argument is written in a key."""
    return f"{short(x.dtype)}{tuple(x.shape)}".replace(" ", "")


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


# ---- Bytes and flops
def operation_bytes(name: str, args: tuple, tensors: list[Tensor], out: list[Tensor]) -> int:
    """Compulsory traffic of an ATen operation: what is read and written once, rows by a list only those listed."""
    if name in ("index", "gather", "embedding", "index_select"):
        index = [x for x in tensors[1:] if not x.dtype.is_floating_point]
        return 2 * out[0].nbytes + sum(x.nbytes for x in index)
    if name in ("index_put_", "index_add_", "index_copy_"):
        target = tensors[0]
        index = [x for x in tensors[1:] if not x.dtype.is_floating_point]
        source = [x for x in tensors[1:] if x.dtype.is_floating_point]
        rows = max([x.numel() for x in index], default=1)
        if name == "index_put_":
            along = next((at for at, x in enumerate(args[1]) if x is not None), 0)
        else:
            along = args[1]
        written = rows * target.nbytes // max(1, target.shape[along])
        reads_too = name == "index_add_"
        return written * (1 + reads_too) + sum(x.nbytes for x in index + source)
    if name in ("fill_", "zero_", "full", "zeros", "new_zeros", "zeros_like", "ones", "arange", "new_full"):
        return sum(x.nbytes for x in out)
    sources = tensors[1:] if name == "copy_" else tensors
    return sum(x.nbytes for x in sources) + sum(x.nbytes for x in out)


def product_shape(tensors: list[Tensor]) -> dict[str, int]:
    a, b = [x for x in tensors if x.dim() >= 2][-2:]
    return dict(m=a.shape[-2], n=b.shape[-1], k=a.shape[-1], batch=math.prod(a.shape[:-2]))


def executed_tiles(bounds: np.ndarray, window: int) -> int:
    """Tiles of queries and keys that a kernel with blocks of 128 visits: causal, in documents, `window` keys back."""
    lengths = np.diff(bounds)
    tiles_of = -(-lengths // TILE)
    document = np.repeat(np.arange(len(lengths)), tiles_of)
    first = TILE * (np.arange(len(document)) - np.repeat(np.cumsum(tiles_of) - tiles_of, tiles_of))
    last = np.minimum(first + TILE, lengths[document]) - 1
    visited = last // TILE - np.maximum(first - window, 0) // TILE + 1
    return int(visited.sum())


# ---- What is recorded
@dataclass
class Buffer:
    """A storage on the device."""
    size: int                            # bytes
    shape: str
    maker: str = ""                      # the first launch that touched it
    too_much: str = ""                   # why it should not be there
    gradient_of: str = ""                # label of the weight that it is a gradient of, by its size


class Phase:
    """A stretch of the run: what the training thread issues, in its order, and memory."""

    def __init__(self, number: int, now: int, alive: dict[int, Buffer]) -> None:
        self.number = number
        self.timeline: list[list] = []
        self.collectives = 0
        self.alive_before = list(alive.values())
        self.events: list[tuple[int, Buffer]] = []            # +1: allocated, -1: freed
        self.peak = now
        self.events_at_peak = 0
        self.saved = 0
        self.alive_saved: list[Buffer] = []

    def alive_at_peak(self) -> list[Buffer]:
        alive = {id(buffer): buffer for buffer in self.alive_before}
        for change, buffer in self.events[:self.events_at_peak]:
            if change > 0:
                alive[id(buffer)] = buffer
            else:
                alive.pop(id(buffer), None)
        return list(alive.values())

    def run(self, key: str) -> None:
        last = self.timeline[-1] if self.timeline else None
        if last and last[:2] == ["run", key]:
            last[2] += 1
        else:
            self.timeline.append(["run", key, 1])


class Ledger(phantom.Recorder):
    """Listens to the card and to the trainer's own calls."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.kernels: dict[str, dict[str, Any]] = {}
        self.graphs: dict[str, dict[str, Any]] = {}
        self.phases: dict[str, Phase] = {}
        self.failures: list[dict[str, str]] = []
        self.reasons: list[str] = []                 # of graphs that were compiled again
        self.host_waits: dict[str, int] = {}         # in the timed loop, by line
        self.waits_elsewhere: dict[str, int] = {}    # on another thread, at any time
        self.now = 0                                 # bytes on the device
        self.racing = False                          # between the start of the race and its end
        self.timed = False                           # and not in a validation or a checkpoint
        self.batch: Any = None                       # whose documents attention sees
        self.stage = 0
        self.place = ""                              # the same in words
        self.at_forward: set[int] = set()            # addresses that were in use when a forward began
        self.row_grads: dict[int, str] = {}          # label of a table, by the address of its row gradients
        self.table_sizes: set[int] = set()           # numbers in a whole table
        self.logit_numbers = math.inf                # (tokens of a micro-batch) x vocabulary
        self.owning: dict[int, str] = {}             # label of a weight that owns a main_grad, by its numbers
        self.in_backward = False
        self.alive: dict[int, Buffer] = {}           # by address
        self.schedule: tg.Schedule | None = None     # once the race has begun
        self.owned: list[Buffer] = []                # alive when it began
        self.other_thread = False                    # what happens is the work of one that is not the training's
        self.begin("set-up")

    def begin(self, name: str) -> None:
        self.phase = self.phases[name] = Phase(len(self.phases), self.now, self.alive)

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Memory counts; the timeline of the training thread goes on without what happens in here."""
        self.other_thread = True
        try:
            yield
        finally:
            self.other_thread = False

    def mark(self, part: str) -> None:
        self.phase.timeline.append(["mark", part])

    def fail(self, kind: str, where: str, found: str) -> None:
        failure = dict(kind=kind, where=where, found=found)
        if failure not in self.failures:
            self.failures.append(failure)

    # ---- Told by the card
    def allocated(self, storage: Any, tensor: Tensor) -> None:
        buffer = Buffer(storage.nbytes(), text_of(tensor))
        self.alive[storage._cdata] = buffer
        self.phase.events.append((1, buffer))
        self.now += buffer.size
        if self.now > self.phase.peak:
            self.phase.peak = self.now
            self.phase.events_at_peak = len(self.phase.events)
        if not self.timed:
            return
        if tensor.dtype == torch.float32 and tensor.numel() >= self.logit_numbers:
            buffer.too_much = "f32 buffer of (tokens, vocabulary)"
        elif tensor.numel() in self.table_sizes:
            buffer.too_much = "buffer of table size"
        elif self.in_backward and tensor.element_size() > 1:  # weights of a product in 8 bits are no gradients
            self.count_gradient(buffer, self.owning.get(tensor.numel(), ""))

    def count_gradient(self, buffer: Buffer, label: str) -> None:
        """A gradient beside its main_grad is one too many, but for a scratch where the product cannot add up."""
        buffer.gradient_of = label
        count = sum(other.gradient_of == label for other in self.alive.values())
        if label and count > GRADIENT_SCRATCH.get(label, 0):
            buffer.too_much = "buffer of a gradient's size"

    def freed(self, address: int, size: int) -> None:
        self.now -= size
        self.phase.events.append((-1, self.alive.pop(address)))

    def name_buffers(self, tensors: list[Tensor], name: str, where: str) -> None:
        """The first launch that touches a buffer gives it its name."""
        for x in tensors:
            buffer = self.alive.get(x.untyped_storage()._cdata)
            if buffer is None or buffer.maker:
                continue
            buffer.maker = name
            if buffer.too_much:
                self.fail(buffer.too_much, where, buffer.shape)

    def keep_saved(self) -> None:
        """At the start of a backward: what the forward has left for it."""
        saved = [buffer for address, buffer in self.alive.items() if address not in self.at_forward]
        size = sum(buffer.size for buffer in saved)
        if size > self.phase.saved:
            self.phase.saved = size
            self.phase.alive_saved = saved

    def operation(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        name = func._schema.name.partition("::")[2]
        if name in SILENT or func.is_view:
            return
        others = [x for key, x in kwargs.items() if key != "out"]
        tensors = fakes((*args, *others))
        outputs = fakes((out,))
        on_card = [x for x in tensors + outputs if x.device.type == "cuda"]
        if not on_card:
            return
        facts = dict(kind="eager", name=f"aten.{name}", shapes=" ".join(text_of(x) for x in tensors))
        if name.removesuffix("_") in PRODUCTS:               # or in place
            shape = product_shape(tensors)
            factors = [x for x in tensors if x.dim() >= 2][-2:]
            facts.update(kind="product", dtype=short(factors[0].dtype), **shape, flops=2 * math.prod(shape.values()))
            facts["bytes"] = operation_bytes(name, args, [x for x in tensors if x.dim()], outputs)
        elif name in ATTENTION:
            facts = self.attention(name, args, kwargs, tensors, outputs)
        else:
            facts["bytes"] = operation_bytes(name, args, tensors, outputs)
            if name in ("_to_copy", "copy_"):
                source = args[1] if name == "copy_" else args[0]
                self.copied(source, out, kwargs.get("non_blocking", args[2:] == (True,)), facts)
        key = f"{facts['name']}.{digest_of(facts['shapes'])}"
        self.launch(key, facts, on_card)

    def copied(self, source: Tensor, out: Tensor, non_blocking: bool, facts: dict[str, Any]) -> None:
        """A copy between host and device waits unless it is told not to, and the host's side is pinned."""
        if source.device.type == out.device.type:
            return
        facts.update(kind="copy", bytes=out.nbytes, shapes=f"{text_of(source)} to {out.device.type}")
        host, direction = (source, "to") if out.device.type == "cuda" else (out, "from")
        if not non_blocking:
            self.host_waited(f"copy {direction} the device")
        elif not getattr(host, "pinned", False):
            self.host_waited(f"copy {direction} the device, of memory that is not pinned")

    def attention(self, name: str, args: tuple, kwargs: dict, tensors: list[Tensor], outputs: list[Tensor]) -> dict:
        direction = ATTENTION[name]
        query = args[0] if direction == "forward" else args[1]
        tokens, heads, width = query.shape
        window, _ = kwargs.get("window_size") or args[-1]
        flops = 0
        if self.racing and self.batch is not None:
            bounds = self.document_bounds(tokens)
            flops = executed_tiles(bounds, window) * TILE * TILE * 4 * width * heads
            if direction == "backward":
                flops = flops * 5 // 2                        # five products of tiles against two
        big = [x for x in tensors + outputs if x.dim() == 3]
        return dict(kind="attention", name=f"attention_{direction}", direction=direction, tokens=tokens, heads=heads,
                    head_dim=width, window=window, dtype=short(query.dtype), flops=flops,
                    bytes=sum(x.nbytes for x in big), shapes=f"{text_of(query)} window={window} stage={self.stage}")

    def document_bounds(self, tokens: int) -> np.ndarray:
        """Bounds in one sequence of this many positions: paired layers have two for each token."""
        host = self.batch.cu_seqlens.host.numpy().astype(np.int64)
        length = self.batch.tokens.shape[1]
        starts = np.arange(len(host))[:, None] * length
        factor = tokens // (len(host) * length)
        return factor * np.unique(host + starts)

    def launched(self, kernel: dict[str, Any], grid: tuple[int, ...], args: tuple) -> None:
        tensors = [x for x in args if isinstance(x, FakeTensor)]
        facts = phantom.binaries[kernel["function"]]
        owner = kernel["owner"]
        warps = kernel["metadata"].num_warps
        common = dict(programs=math.prod(grid), warps=warps, **facts)
        if owner is None and facts["tensor_core"]:
            key = self.product(common, tensors)
        elif owner is None:
            name = facts["name"]
            common.update(kind="triton", bytes=self.rows_bytes(tensors), shapes=" ".join(map(text_of, tensors)))
            place = f"{grid} {self.world}"                    # with another number of ranks it touches other rows
            key = f"{name}.{digest_of(common['shapes'] + place)}"
        else:
            name = owner.inductor_meta["kernel_name"]
            key = self.generated(owner, common, tensors)
        self.launch(key, common, tensors)

    def generated(self, owner: Any, facts: dict[str, Any], tensors: list[Tensor]) -> str:
        """Fill in what Inductor knows of its kernel. Returns the key."""
        name = owner.inductor_meta["kernel_name"]
        base = re.sub(r"_\d+$", "", name)
        source = owner.fn.src.replace(name, base)
        config = owner.launchers[0].config                    # phantom.first_of_all
        trips = 1
        length = re.search(r"\br0_numel = (\d+)", source)
        if length and "R0_BLOCK" in config.kwargs:
            trips = -(-int(length[1]) // config.kwargs["R0_BLOCK"])
        loops = [dict(loop, trips=trips) for loop in facts.pop("loops")]
        others = getattr(owner, "all_launchers", ())[1:]
        if others:
            facts["others"] = [configuration_of(launcher) for launcher in others]
        facts.update(kind="generated", name=base, block=dict(config.kwargs), loops=loops,
                     bytes=generated_bytes(owner, tensors), shapes=" ".join(map(text_of, tensors)))
        return f"{base[:LONGEST_NAME]}.{digest_of(source + str(sorted(config.kwargs.items())) + facts['shapes'])}"

    def product(self, facts: dict[str, Any], tensors: list[Tensor]) -> str:
        """Fill in a product of room 4, which takes (m, k) and (n, k) first. Returns the key.

        fused_bytes: what a pass of its own over the product, in the place of its epilogue, would move.
        """
        left, right = tensors[:2]
        product = tensors[-1]
        in_epilogue = unique(tensors[2:])
        m, k = left.shape
        n = len(right)
        facts.update(kind="product", dtype=short(left.dtype), m=m, n=n, k=k, batch=1, flops=2 * m * n * k)
        facts["bytes"] = sum(x.nbytes for x in unique(tensors))
        facts["fused_bytes"] = product.nbytes + sum(x.nbytes for x in in_epilogue)
        facts["shapes"] = " ".join(map(text_of, tensors))
        return f"{facts['name']}.{digest_of(facts['shapes'] + str(facts['instructions']))}"

    def rows_bytes(self, tensors: list[Tensor]) -> int:
        """Of a kernel of room 4: its inputs, and of row gradients the rows that it touches, read and written."""
        total = 0
        for x in tensors:
            label = self.row_grads.get(x.untyped_storage()._cdata)
            if label is None or len(tensors) == 1:
                total += x.nbytes
            else:
                rows_of_table = self.batch.rows[label].host.numpy()
                share = tensors[1].numel() / rows_of_table.size               # of a table with a lookup for each part
                rows = share * len(np.unique(rows_of_table))
                total += round(2 * rows * x.shape[1] * x.element_size())
        return total

    def launch(self, key: str, facts: dict[str, Any], tensors: list[Tensor]) -> None:
        first_of_race = self.racing and not self.kernels.get(key, {}).get("seen")
        if first_of_race or key not in self.kernels:          # the warm-up has other tokens
            self.kernels[key] = dict(facts, seen=0, flops_seen=0)
        kernel = self.kernels[key]
        if self.racing:
            kernel["seen"] += 1
            kernel["flops_seen"] += facts.get("flops", 0)
        if facts.get("spills"):
            self.fail("spill", key, f"{facts['spills']} bytes on the stack, {facts['registers']} registers")
        if not self.other_thread:
            self.phase.run(key)
        where = key if facts["kind"] == "generated" else f"{key} in {trainer_line()}"
        self.name_buffers(tensors, facts["name"], where)

    def communicated(self, name: str, tensors: dict[str, Any], group: str) -> tuple[Phase, int]:
        self.phase.collectives += 1
        number = self.phase.collectives
        out = tensors["out"]
        size = max(x.nbytes for x in fakes(tensors.values()))
        self.phase.timeline.append(["collective", number, name, size, short(out.dtype), group])
        return self.phase, number

    def awaited(self, work: tuple[Phase, int]) -> None:
        """What a step before this one has launched is `before` it."""
        phase, number = work
        self.phase.timeline.append(["wait", number if phase is self.phase else f"before {number}"])

    def host_waited(self, what: str) -> None:
        where = trainer_line()
        if self.other_thread:
            self.waits_elsewhere[where] = self.waits_elsewhere.get(where, 0) + 1
            return
        self.phase.timeline.append(["host_wait", f"{where}  # {what}"])
        if self.timed:
            self.host_waits[where] = self.host_waits.get(where, 0) + 1


def generated_bytes(owner: Any, tensors: list[Tensor]) -> int:
    """What Inductor says that its kernel moves; tensors: its arguments.

    At most all of them once, and those that it changes in place twice: Inductor takes its first argument for one of
    these, too, where it has dropped one.
    """
    names = [name for name in owner.fn.arg_names if "_ptr" in name]
    in_place = [x for name, x in zip(names, tensors) if name.startswith("in_out_ptr")]
    gigabytes = owner.inductor_meta.get("kernel_num_gb") or 0
    return min(round(gigabytes * 1e9), sum(x.nbytes for x in (*tensors, *in_place)))


def configuration_of(launcher: Any) -> dict[str, Any]:
    """What is known of one that Inductor compiles and may choose by its time, on a card."""
    return dict(block=dict(launcher.config.kwargs), warps=launcher.config.num_warps, registers=launcher.n_regs,
                spills=launcher.n_spills, shared=launcher.shared)


def unique(tensors: list[Tensor]) -> list[Tensor]:
    """Those that are given twice once, for a kernel that does not read its second look."""
    return list({id(x): x for x in tensors}.values())


def fakes(values: Iterable) -> list[FakeTensor]:
    """The tensors of the card among the values, and in lists of them."""
    return [x for x in phantom.flat(values, {}) if isinstance(x, FakeTensor)]


def trainer_line() -> str:
    """Function and text, without its comment, of the innermost line of the trainer that is running."""
    frame = sys._getframe()
    while frame is not None and (frame.f_code.co_filename != tg.__file__ or frame.f_code.co_name in HANDED_ON):
        frame = frame.f_back
    if frame is None:
        return "autograd"
    line, _, _ = linecache.getline(tg.__file__, frame.f_lineno).partition("  # ")
    return f"{frame.f_code.co_qualname}: {line.strip()}"


# ---- Listening to the trainer: every call goes through, some lines around it
def around(owner: Any, name: str, listener: Callable) -> None:
    """Run owner.name(...) inside the context that listener(...) gives for the same arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with listener(*args, **kwargs):
            return original(*args, **kwargs)

    setattr(owner, name, call)


class Listeners:
    """Contexts around calls of the trainer: they tell the ledger where the run is."""

    def __init__(self, ledger: Ledger, options: argparse.Namespace) -> None:
        self.ledger = ledger
        self.options = options

    @contextlib.contextmanager
    def step(self, executor: Any, loader: Any, values: tg.Values) -> Iterator[None]:
        if self.ledger.racing:
            self.ledger.begin(f"step {values.step}")
        yield

    @contextlib.contextmanager
    def forward_backward(self, executor: Any, batch: tg.Batch, values: tg.Values, *_: Any) -> Iterator[None]:
        slots = min(executor.slots_at_once, len(batch.tokens))
        self.ledger.stage = values.stage
        self.ledger.logit_numbers = math.inf
        if self.options.graphs == "lower" and has_graph(self.ledger, self.options, "GPT.losses"):
            self.ledger.logit_numbers = slots * batch.tokens.shape[1] * executor.cfg.padded_vocab
        self.ledger.place = f"stage {values.stage + 1}"
        self.ledger.batch = batch
        self.ledger.mark("begin")
        yield

    @contextlib.contextmanager
    def backward(self, *_: Any, **__: Any) -> Iterator[None]:
        self.ledger.keep_saved()
        self.ledger.mark("backward")
        self.ledger.in_backward = True
        yield
        self.ledger.in_backward = False

    @contextlib.contextmanager
    def optim_step(self, *_: Any, **__: Any) -> Iterator[None]:
        self.ledger.mark("optim_step")
        yield
        self.ledger.mark("after")

    @contextlib.contextmanager
    def evaluate(self, executor: Any, batches: Any, values: tg.Values) -> Iterator[None]:
        place = f"stage {values.stage + 1}"
        self.ledger.stage = values.stage
        if values.long_window > executor.cfg.stages[values.stage].long_window * executor.cfg.window_block:
            place = "final"
        self.ledger.place = place
        with self.off_the_clock(f"validation {place}"):
            yield

    @contextlib.contextmanager
    def checkpoint(self, *_: Any, **__: Any) -> Iterator[None]:
        with self.off_the_clock("checkpoint"):
            yield

    @contextlib.contextmanager
    def off_the_clock(self, name: str) -> Iterator[None]:
        before = self.ledger.timed
        self.ledger.timed = False
        self.ledger.begin(name)
        yield
        self.ledger.begin("between")
        self.ledger.timed = before

    @contextlib.contextmanager
    def warm_up(self, *_: Any, **__: Any) -> Iterator[None]:
        self.ledger.begin("warm-up")
        yield
        self.ledger.begin("between")

    @contextlib.contextmanager
    def race(self, loader: Any, executor: Any, validation: Any, clock: Any, log: tg.Log, *_: Any) -> Iterator[None]:
        self.ledger.schedule = log.schedule                   # which only a time budget changes
        start_race(self.ledger, executor)
        if self.options.graphs == "trace":                    # as it is traced, a graph copies what it would change
            self.ledger.table_sizes.clear()
            self.ledger.owning.clear()
        yield
        self.ledger.racing = self.ledger.timed = False


def listen(ledger: Ledger, options: argparse.Namespace) -> None:
    listeners = Listeners(ledger, options)
    for owner, name, listener in (
            (tg, "train_step", listeners.step), (tg, "warm_up", listeners.warm_up), (tg, "race", listeners.race),
            (tg.Executor, "forward_backward", listeners.forward_backward), (Tensor, "backward", listeners.backward),
            (tg.Executor, "optim_step", listeners.optim_step), (tg.Executor, "evaluate", listeners.evaluate),
            (tg.Executor, "whole_state", listeners.checkpoint)):
        around(owner, name, listener)


def start_race(ledger: Ledger, executor: tg.Executor) -> None:
    """From here on nothing is compiled, and buffers as large as a table are those that a table owns."""
    ledger.racing = ledger.timed = True
    ledger.owned = list(ledger.alive.values())
    torch._logging.set_logs(recompiles=True)
    logging.getLogger("torch._dynamo").addHandler(Reasons(ledger))
    for label, entry in executor.optimizer.entries.items():
        if isinstance(entry, tg.Sharded):
            ledger.owning[entry.weight.numel()] = label
    for label, table in executor.tables.items():
        ledger.row_grads[table.row_grads.untyped_storage()._cdata] = label
        if table.table.tied:                                  # as large as the head, of which there are copies
            continue
        ledger.table_sizes |= {table.table.rows * executor.cfg.model_dim,
                               ledger.world * len(table.shard) * executor.cfg.model_dim}


class Reasons(logging.Handler):
    """Why Dynamo compiles something again, as it logs it."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "Recompiling" in text or "guard" in text:
            self.ledger.reasons.append(" ".join(text.split()))


# ---- Graphs
def rehearsed_compile(ledger: Ledger, options: argparse.Namespace) -> Callable:
    """torch.compile, which notes every graph; graphs that are not to be lowered run as they were traced."""
    from torch._inductor import compile_fx
    real = torch.compile

    def compile_call(call: Callable, **settings: Any) -> Callable:
        name = call.__qualname__

        def inner(module: torch.fx.GraphModule, inputs: list, **facts: Any) -> Any:
            note_graph(ledger, name, module, inputs, facts)
            if options.graphs != "lower":
                return boxed(module)
            return compile_fx.compile_fx_inner(module, inputs, **facts)

        def backend(module: torch.fx.GraphModule, inputs: list) -> Any:
            return compile_fx.compile_fx(module, inputs, inner_compile=inner)

        compiled = real(call, backend=backend, **settings)

        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            if name == "GPT.losses":
                ledger.at_forward = set(ledger.alive)
                ledger.mark("forward")
            if isinstance(args[0], tg.Batch):
                ledger.batch = args[0]
            if not has_graph(ledger, options, name):
                return call(*args, **kwargs)
            return compiled(*args, **kwargs)
        return run
    return compile_call


def has_graph(ledger: Ledger, options: argparse.Namespace, name: str) -> bool:
    """Whether the function is to be compiled now; else it runs as it is written."""
    if options.graphs == "none":
        return False
    if options.graphs in ("quick", "trace"):
        now = options.graphs == "trace" or not ledger.racing
        return name == "GPT.losses" and ledger.stage == 0 and now
    if name.startswith("GPT.") and options.stages:
        return str(ledger.stage + 1) in options.stages.split(",")
    return True


def boxed(module: torch.fx.GraphModule) -> Callable:
    def call(inputs: list) -> Any:
        values = list(inputs)
        inputs.clear()
        return module.forward(*values)
    call._boxed_call = True
    return call


def note_graph(ledger: Ledger, name: str, module: torch.fx.GraphModule, inputs: list, facts: dict) -> None:
    """Its hash: of every node, with shapes and constants, and of nothing that differs between two runs."""
    lines = []
    for node in module.graph.nodes:
        value = node.meta.get("val")
        lines.append(f"{node.format_node()} {described(value)}")
    text = "\n".join(re.sub(r"0x[0-9a-f]+", "", line) for line in lines)
    part = "backward" if facts.get("is_backward") else "forward"
    shape = next((text_of(x) for x in inputs if isinstance(x, Tensor) and x.dim() > 0), "")
    where = ledger.place if name.startswith("GPT.") else shape
    title = f"{name} {part}, {where}"
    if ledger.racing:
        ledger.fail("recompile", title, ledger.reasons[-1] if ledger.reasons else "a graph that the warm-up had not")
    while title in ledger.graphs:
        title += " again"
    ledger.graphs[title] = dict(hash=hashlib.sha256(text.encode()).hexdigest()[:16], nodes=len(module.graph.nodes))
    seconds = time.perf_counter() - ledger.began
    line = f"{seconds:7.1f} s  W = {ledger.world}  {title}: {len(module.graph.nodes)} nodes"
    print(line, file=sys.__stdout__, flush=True)              # the trainer's own lines go to stderr


def described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{text_of(value)} {tuple(value.stride())} {value.device}"
    if isinstance(value, (list, tuple)):
        return " ".join(described(x) for x in value)
    return str(value)


# ---- Data: English by its statistics
def english_like(count: int, seed: int) -> np.ndarray:
    """Tokens whose documents and repetitions are like those of English text.

    Documents: lognormal, as measured on 40,000 pages. Tokens come in pairs from a stock of pairs and fresh: that
    gives as many distinct tokens and neighbours as text has, within 5 % from 16,384 to 98,304 tokens.
    """
    rng = np.random.default_rng(seed)
    words = tg.GPT2_VOCAB - 1
    by_rank = zipf(words, 0.874, 4.1)
    by_pair = zipf(31_000, 1.15, 6.4)
    stock = drawn(rng, by_rank, (len(by_pair), 2))
    tokens = stock[drawn(rng, by_pair, count // 2)]
    fresh = rng.random(count // 2) < 0.156
    tokens[fresh] = drawn(rng, by_rank, (int(fresh.sum()), 2))
    tokens = tokens.ravel()

    lengths = document_lengths(rng, count // 50)
    starts = np.cumsum(lengths) - lengths[0]
    tokens[starts[starts < len(tokens)]] = tg.GPT2_DOCUMENT_START
    return tokens.astype("<u2")


def document_lengths(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.exp(rng.normal(6.15, 0.88, count)).astype(np.int64) + 2


def kept_share(max_doc_len: int) -> float:
    """Of such tokens, those that are left where documents are cut to this length."""
    lengths = document_lengths(np.random.default_rng(0), 10_000)
    return np.minimum(lengths, max_doc_len).sum() / lengths.sum()


def zipf(count: int, exponent: float, shift: float) -> np.ndarray:
    """Cumulative shares of ranks, each proportional to (rank + shift)^-exponent."""
    shares = (np.arange(1, count + 1) + shift) ** -exponent
    return np.cumsum(shares / shares.sum())


def drawn(rng: np.random.Generator, cumulative: np.ndarray, size: Any) -> np.ndarray:
    return np.searchsorted(cumulative, rng.random(size)).clip(0, len(cumulative) - 1)


def write_shard(path: Path, tokens: np.ndarray) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = tg.SHARD_MAGIC, tg.SHARD_VERSION, len(tokens)
    path.write_bytes(header.tobytes() + tokens.tobytes())


# ---- The walk
def save_nothing(content: Any, file: Any) -> None:
    """Write a word in the place of tensors, which hold no numbers."""
    file.write(b"tensors")


def steps_by_stage(cfg: tg.Config) -> dict[str, dict[str, int]]:
    """How many even and odd steps the whole run has in each stage; the last stage is the extension."""
    schedule = tg.Schedule(cfg)
    steps = {}
    for number, (start, end) in enumerate(zip(schedule.starts, schedule.ends), 1):
        odd = end // 2 - start // 2
        steps[f"stage {number}"] = dict(even=end - start - odd, odd=odd)
    return steps


def steps_per_stage(graphs: str) -> int:
    return STEPS_PER_STAGE if graphs in ("lower", "trace") else QUICK_STEPS


def flags_of_walk(folder: Path, cfg: tg.Config, graphs: str) -> list[str]:
    """A short schedule through every stage, with data to go with it."""
    stages = len(cfg.stages)
    steps = steps_per_stage(graphs)
    tokens = (steps + 2) * sum(stage.batch_tokens for stage in cfg.stages)
    spare = max(1.3, 1.2 / kept_share(cfg.max_doc_len))
    write_shard(folder / "train_1.bin", english_like(int(spare * tokens), 1))
    write_shard(folder / "val_1.bin", english_like(2 * cfg.val_batch_tokens, 2))
    last = steps * (stages - 1)
    return [f"--train_files={folder}/train_*.bin", f"--val_files={folder}/val_*.bin", "--epochs=0",
            f"--val_tokens={cfg.val_batch_tokens}", f"--num_scheduled_steps={last}", f"--num_extension_steps={steps}",
            f"--val_every={last - steps}", f"--checkpoint_every={last - steps}", "--sample_tokens=1",
            f"--run_dir={folder}/run"]


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("walk.py")
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--card", default="H100")
    parser.add_argument("--graphs", choices=("lower", "trace", "quick", "none"), default="lower",
                        help="quick: the first stage's training graph is traced, the rest runs without graphs; "
                             "trace: in the race too")
    parser.add_argument("--out", default="/dev/stdout")
    parser.add_argument("--first-stage", action="store_true", help="only the steps of the first")
    parser.add_argument("--stages", default="", help="lower the graphs of these only, such as 1,2")
    parser.add_argument("flags", nargs="*")
    return parser.parse_args(argv)


def check_stages(stages: str, cfg: tg.Config) -> None:
    """Raises ConfigError for one that the run does not have, of which nothing would be lowered."""
    known = [str(number) for number in range(1, len(cfg.stages) + 1)]
    if stages and not set(stages.split(",")) <= set(known):
        raise tg.ConfigError("--stages of the rehearsal", stages, f"some of {','.join(known)}", "leave the others out")


def install(card: str, recorder: phantom.Recorder, world: int) -> phantom.Card:
    """The cards, and what the trainer does with them instead. Returns the mode to run the trainer in."""
    mode = phantom.install(card, recorder, 0, world)
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
    for operation in (tg.add_rows_op, tg.wgrad_op, tg.varlen, tg.varlen_backward, tg.relu_sq):
        phantom.bodies[operation._opoverload] = operation._init_fn
    torch.save = save_nothing
    tg.DeviceHome.touched_places = touched_nothing
    tg.HOMES.update(host=WalkedHome)
    return mode


class WalkedHome(tg.HostHome):
    """Its thread's work is done by the thread that is walked, since no other knows the card."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.mover = Mover()
        self.lock = threading.RLock()                         # work is asked for, and so done, under the lock


class Mover:
    """In the place of a pool with one thread: work is done in the order in which it was asked for.

    At once, but that of other threads, which have no card: when the walked one asks next.
    """

    def __init__(self) -> None:
        self.walked = threading.get_ident()
        self.to_do: list[Work] = []

    def submit(self, call: Callable, *args: Any) -> Work:
        work = Work(self, call, args)
        self.to_do.append(work)
        if threading.get_ident() == self.walked:
            self.work_off()
        return work

    def work_off(self) -> None:
        while self.to_do:
            self.to_do.pop(0).do()


class Work:
    """A future of a Mover. An exception surfaces where the work is done."""

    def __init__(self, mover: Mover, call: Callable, args: tuple) -> None:
        self.mover = mover
        self.call = call
        self.args = args
        self.found: Any = None

    def do(self) -> None:
        with phantom.mode.recorder.elsewhere():
            self.found = self.call(*self.args)

    def done(self) -> bool:
        self.mover.work_off()
        return True

    def result(self, timeout: float | None = None) -> Any:
        self.mover.work_off()
        return self.found


def touched_nothing(*_: Any) -> Iterator[Tensor]:
    """Rows without numbers do not say whether an update has touched them; nobody asks in the race."""
    return iter(())


def walk(options: argparse.Namespace) -> dict[str, Any]:
    ledger = Ledger(options.world)
    ledger.began = time.perf_counter()
    mode = install(options.card, ledger, options.world)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(options.world), LOCAL_WORLD_SIZE=str(options.world),
                      MASTER_ADDR="localhost", MASTER_PORT="1")
    torch.compile = rehearsed_compile(ledger, options)
    listen(ledger, options)

    with tempfile.TemporaryDirectory() as folder:
        try:
            _, cfg = tg.parse_flags(["--preset=record", *options.flags])
            check_stages(options.stages, cfg)
            flags = flags_of_walk(Path(folder), cfg, options.graphs)
            if options.first_stage:
                flags.append(f"--max_steps={steps_per_stage(options.graphs)}")
            preset, given = tg.parse_flags(["--preset=record", *options.flags, *flags])
        except tg.TrainerError as error:
            return dict(error=str(error))
        with mode, contextlib.redirect_stdout(sys.stderr):
            try:
                source = Path(tg.__file__).read_bytes()
                tg.train(preset, given, tg.make_fabric(given), tg.Ending(), source)
            except tg.TrainerError as error:                  # a card on which the preset does not fit
                return dict(error=str(error))
            except Exception as error:
                traceback.print_exc()
                ledger.fail(*cause_of(error))
                return dict(result_of(ledger, options.stages), steps=steps_by_stage(cfg), ended_by=str(error))
    return dict(result_of(ledger, options.stages), steps=steps_by_stage(cfg))


def cause_of(error: Exception) -> tuple[str, str, str]:
    """Kind, line of the trainer and message of what ended the walk."""
    kinds = {torch._dynamo.exc.Unsupported: "graph break",
             torch._subclasses.fake_tensor.DynamicOutputShapeException: "host wait",
             torch._subclasses.fake_tensor.DataDependentOutputException: "host wait"}
    kind = next((name for of_error, name in kinds.items() if isinstance(error, of_error)), type(error).__name__)
    called = traceback.extract_tb(error.__traceback__)
    traced = getattr(error, "real_stack", None) or ()         # what was being traced lies deeper than what was called
    lines = ["outside of the trainer"]
    lines += [f"{frame.name}: {frame.line}" for frame in (*called, *traced) if frame.filename == tg.__file__]
    said = str(error).strip().splitlines() or [""]
    return kind, lines[-1], said[0]


def result_of(ledger: Ledger, stages: str) -> dict[str, Any]:
    phases = {}
    for name, phase in ledger.phases.items():
        kept = name_of_step(ledger.schedule, name) if name.startswith("step ") else name
        if not kept or kept == "between":
            continue
        of_stage = stage_of(ledger.schedule, kept)
        if of_stage and stages and of_stage not in stages.split(","):         # its graphs were not lowered
            continue
        phases[kept] = dict(timeline=phase.timeline, peak_bytes=phase.peak, at_peak=by_maker(phase.alive_at_peak()),
                            saved_bytes=phase.saved, saved=by_maker(phase.alive_saved))
    for kernel in ledger.kernels.values():                    # documents differ from step to step
        seen, flops = kernel.pop("seen"), kernel.pop("flops_seen")
        if seen and flops:
            kernel["flops"] = round(flops / seen)
    return dict(kernels=ledger.kernels, graphs=ledger.graphs, phases=phases, owned=by_maker(ledger.owned),
                owned_bytes=sum(buffer.size for buffer in ledger.owned), host_waits=ledger.host_waits,
                waits_elsewhere=ledger.waits_elsewhere, failures=ledger.failures,
                seconds=round(time.perf_counter() - ledger.began, 1))


def by_maker(buffers: list[Buffer]) -> dict[str, list[int]]:
    """Number and bytes of buffers by shape and first launch, those that matter."""
    whole = sum(buffer.size for buffer in buffers)
    groups: dict[str, list[int]] = {}
    for buffer in buffers:
        group = groups.setdefault(f"{buffer.shape} of {buffer.maker or 'nothing yet'}", [0, 0])
        group[0] += 1
        group[1] += buffer.size
    return {name: group for name, group in groups.items() if group[1] >= SMALLEST_SHARE * whole}


def stage_of(schedule: tg.Schedule, phase: str) -> str:
    """The number of a phase's stage; empty: of none."""
    if phase == "untie step":
        return str(schedule.stage_at(schedule.untie_step) + 1)
    if phase == "validation final":
        return str(len(schedule.ends))
    found = re.search(r"\bstage (\d+)", phase)
    return found[1] if found else ""


def name_of_step(schedule: tg.Schedule, title: str) -> str:
    """Steps that stand for all like them: the last cycle of a stage whose next cycle belongs to it too."""
    step = int(title.removeprefix("step "))
    if step == schedule.untie_step:
        return "untie step"
    k = schedule.stage_at(step)
    place = schedule.ends[k] - step                           # from the end
    steady = min(2 * CYCLE, schedule.ends[k] - schedule.starts[k])
    if not 0 <= steady - place < CYCLE:
        return ""
    return f"stage {k + 1} {'odd' if step % CYCLE else 'even'} step"


if __name__ == "__main__":
    wanted = parse(sys.argv[1:])
    found = walk(wanted)
    Path(wanted.out).write_text(json.dumps(found))

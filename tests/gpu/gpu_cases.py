"""The operations that the trainer runs on a GPU, with random inputs, for the tests here; what day.py measures.

    python tests/gpu/gpu_cases.py preflight|operations cuda|cpu FILE.json

The exact results are those of the trainer's plain code in f64; other tests compare that code with independent
references on the CPU. Every way to compute an operation gets its inputs between frames of NaN, and on a GPU memory
filled with NaN. Everything depends on device and sizes, so that a CPU runs the same code at small sizes.
"""
from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")       # before torch, as run.sh does

import torch
from torch import Tensor

import train_gpt as tg

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
TRAINER, PLAIN = "trainer", "plain"
FRAME = 2048                             # elements before and after a framed tensor, which preserve its alignment
MAX_POISON_BYTES = 8 << 30
SMALL_BYTES = 1 << 20                    # torch's allocator keeps segments for requests of up to this size
EXACT_HEAD_TOKENS = 2048                 # tokens whose logits fit in memory as f64

Call = Callable[..., list[Tensor]]

class Sizes(NamedTuple):
    """Sizes of one rank's sequence, named by the letters of the trainer."""
    T: int
    D: int
    H: int
    E: int
    F: int
    V: int
    R: int                               # rows of the table whose gradients are summed
    squares: int                         # matrices (D, D) of the attention bank
    talls: int                           # matrices (F, D) of the MLP bank
    short: int                           # windows, in tokens
    long: int
    max_doc_len: int

RECORD = Sizes(16_384, 768, 6, 128, 3072, 50_304, 251_520, 40, 22, 128, 384, 2048)       # one rank in the first stage
SMALL_CARD = RECORD._replace(T=4096, R=50_304, squares=8, talls=6)
BIG_CARD = 60 << 30                      # of memory
LARGE_HEADS = {"head, 49152 tokens": 30e9, "head, 98304 tokens": 45e9}       # over 2^31 and 2^32 logits: bytes needed
# Of the cases "attention, window ...": empty documents, one of a single token, whole tiles, a pair; the last window is
# longer than all.
EDGE_BOUNDS, EDGE_WINDOWS = (0, 0, 150, 151, 420, 420, 548, 804, 806), (1, 128, 300, 2000)
TINY = Sizes(96, 64, 4, 16, 128, 256, 320, 2, 2, 5, 12, 40)
L2_BYTES = 256 << 20                     # larger than the L2 cache of any GPU
FLUSHES = 32                             # before a timed call, while the host runs ahead: 3 ms on an H100
ROUNDS = 5                               # timed calls; the median counts

class Case(NamedTuple):
    inputs: list[Tensor]
    ways: dict[str, Call]                # called with copies of the inputs; the trainer's way is first
    exact: Call                          # called with f64 copies
    bounds: tuple[float, ...]            # maximum relative error of each output, in the Frobenius norm

def fill_free_memory(device: torch.device) -> bool:
    """Fill the memory that the allocator will return next. Return whether new tensors contain NaN."""
    torch.cuda.empty_cache()
    # Segments with live tensors remain. The allocator returns the smallest free block that fits, so requests of the
    # sizes of all free blocks, from the largest to the smallest, fill each block. Requests of up to SMALL_BYTES have
    # segments of their own, in which a larger block is filled in parts; the other segments never serve them.
    sizes = []
    for segment in torch.cuda.memory_snapshot():
        free_sizes = [block["size"] for block in segment["blocks"] if block["state"] == "inactive"]
        if segment["segment_type"] == "large":
            sizes += [size for size in free_sizes if size > SMALL_BYTES]
        else:
            for size in free_sizes:
                sizes += [*size // SMALL_BYTES * [SMALL_BYTES], size % SMALL_BYTES]
    sizes.sort(reverse=True)
    free, _ = torch.cuda.mem_get_info(device)
    sizes += 64 * [1 << 19] + [min(MAX_POISON_BYTES, free // 2)]
    filled = [torch.full((size,), 255, dtype=torch.uint8, device=device) for size in sizes]
    del filled
    small_tensor = torch.empty(64, device=device)
    large_tensor = torch.empty(1 << 22, device=device)
    return bool(small_tensor.isnan().all() and large_tensor.isnan().all())

def add_frame(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a contiguous copy of x inside a larger tensor of NaN, and that tensor. Integers get no frame."""
    if not x.is_floating_point():
        copy = x.clone()
        return copy, copy
    framed_memory = torch.empty(x.numel() + 2 * FRAME, dtype=x.dtype, device=x.device)
    framed_memory.view(torch.uint8).fill_(255)                # NaN in every float type
    inside = framed_memory[FRAME:-FRAME].view(x.shape)
    inside.copy_(x)
    return inside, framed_memory

def frame_is_intact(framed_memory: Tensor) -> bool:
    frame = torch.cat((framed_memory[:FRAME], framed_memory[-FRAME:]))
    return not framed_memory.is_floating_point() or bool((frame.view(torch.uint8) == 255).all())

def relative(x: Tensor, exact: Tensor) -> float:
    """Return the Frobenius norm of the error, relative to the exact tensor; NaN or infinite if x is."""
    exact = exact.detach().double()
    return float((x.detach().double() - exact).norm() / exact.norm().clamp_min(1e-300))

def check(name: str, case: Case, lab: Lab) -> dict[str, Any]:
    exact = case.exact(*(x.double() if x.is_floating_point() else x for x in case.inputs))
    errors = {}
    wrong = []
    for way, call in case.ways.items():
        framed_inputs = [add_frame(x) for x in case.inputs]
        if lab.comm.on_cuda and not fill_free_memory(lab.device):
            wrong.append(f"{name}, {way}: its memory could not be filled with NaN")
        outputs = call(*(inside for inside, _ in framed_inputs))
        errors[way] = [relative(x, reference) for x, reference in zip(outputs, exact, strict=True)]
        for index, (error, bound) in enumerate(zip(errors[way], case.bounds, strict=True)):
            if not error < bound:                                             # True for NaN
                wrong.append(f"{name}, {way}: output {index} is off by {error:.2e}, allowed {bound:.0e}")
        if not all(frame_is_intact(memory) for _, memory in framed_inputs):
            wrong.append(f"{name}, {way}: writes before an input or after it")
    return dict(name=name, bounds=case.bounds, errors=errors, wrong=wrong)

def chosen_attention(comm: tg.Communicator, head_dim: int) -> Callable:
    attend, _ = tg.choose_attention(tg.Config(**tg.PRESETS["record"] | dict(head_dim=head_dim)), comm)
    return attend

class Lab:
    """Builds cases: device, sizes [those that fit], random numbers, attention kernel, compiler [none on a CPU]."""
    def __init__(self, comm: tg.Communicator, sizes: Sizes | None = None, seed: int = 0) -> None:
        self.comm = comm
        self.device = comm.device
        self.sizes = sizes or TINY
        self.backend = ""
        self.has_fp8 = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm", "CPU")
        if comm.on_cuda:
            properties = torch.cuda.get_device_properties(comm.device)
            self.sizes = sizes or (RECORD if properties.total_memory >= BIG_CARD else SMALL_CARD)
            self.backend = "inductor"
            self.has_fp8 = (properties.major, properties.minor) >= (8, 9)
        self.generator = torch.Generator(comm.device).manual_seed(seed)
        self.host = np.random.default_rng(seed)                               # for values that the host also needs
        self.attention = chosen_attention(comm, self.sizes.E)

    def cases(self) -> list[str]:
        free = torch.cuda.mem_get_info(self.device)[0] if self.comm.on_cuda else 0
        names = [name for name in CASES if self.has_fp8 or "fp8" not in name]
        return [name for name in names if LARGE_HEADS.get(name, 0) <= free]

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator, device=self.device)
        return (scale * drawn).to(dtype)

    def below(self, bound: int, *shape: int) -> Tensor:
        return torch.randint(0, bound, shape, generator=self.generator, device=self.device)

    def compiled(self, function: Callable) -> Callable:
        return torch.compile(function, backend=self.backend, dynamic=False, fullgraph=True)

    def ways(self, function: Callable, wrap: Callable[[Callable], Call]) -> dict[str, Call]:
        """Return the ways of a function that the trainer compiles: compiled and plain. wrap: converts it to a way."""
        plain = {PLAIN: wrap(function)}
        return {TRAINER: wrap(self.compiled(function))} | plain if self.backend else plain

    def document_bounds(self) -> list[int]:
        """Draw cu_seqlens of one sequence, with documents of 1 to max_doc_len, most of them short, and an empty one."""
        bounds = [0]
        while bounds[-1] < self.sizes.T:
            length = 1 + int(self.sizes.max_doc_len * self.host.random()**2)
            bounds.append(min(self.sizes.T, bounds[-1] + length))
        return [*bounds, self.sizes.T]

def and_gradients(function: Callable, num_grads: int) -> Call:
    """Return a way: output and gradients of the first inputs. The last input is the gradient of the output."""
    def call(*inputs: Tensor) -> list[Tensor]:
        *read, seed = inputs
        leaves = [x.detach().requires_grad_() for x in read[:num_grads]]
        out = function(*leaves, *read[num_grads:])
        return [out.detach(), *torch.autograd.grad(out, leaves, seed)]
    return call

def mlp(lab: Lab) -> Case:
    s = lab.sizes
    n = lab.normal(s.T, s.D)
    up = lab.normal(s.F, s.D, scale=s.D**-0.5)
    down = lab.normal(s.F, s.D, scale=s.F**-0.5)
    seed = lab.normal(s.T, s.D)

    def relu_sq(n: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return tg.relu_sq_mlp(n, tg.as_matrix(up), tg.as_matrix(down))

    ways = lab.ways(relu_sq, partial(and_gradients, num_grads=3))
    return Case([n, up, down, seed], ways, ways[PLAIN], 4 * (2e-2,))

def attention(lab: Lab, window: str, fold: int = 1) -> Case:
    """Build a case of one attention layer. fold: 2 for paired heads, half as many on twice the positions."""
    bounds = [fold * bound for bound in lab.document_bounds()]
    return attention_of(lab, bounds, getattr(lab.sizes, window), lab.sizes.H // fold)

def attention_of(lab: Lab, bounds: Sequence[int], window: int, heads: int, scale: float | None = None,
                 v_in_qkv: bool = False) -> Case:
    """v_in_qkv: v is a slice of a larger tensor, as in layers without value embeddings."""
    q, k, v, seed = lab.normal(4, bounds[-1], heads, lab.sizes.E).unbind()
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=lab.device)
    args = 1 + int(cu_seqlens.diff().max()), window, scale or 12.8 / lab.sizes.E
    layer_kind = str(args)
    tg.ATTENTION_ARGS[layer_kind] = tg.AttentionArgs(*args)

    def way(attend: Callable) -> Call:
        def call(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
            if v_in_qkv:
                v = torch.cat((q, k, v), dim=1)[:, -heads:]
            return attend(q, k, v, cu_seqlens, layer_kind)
        return and_gradients(call, 3)

    ways = {TRAINER: way(lab.attention), PLAIN: way(tg.attention_reference)}
    return Case([tg.rms_norm(q), tg.rms_norm(k), v, cu_seqlens, seed], ways, ways[PLAIN], 4 * (2e-2,))

def attention_edges(lab: Lab, window: int, fold: int) -> Case:
    """Logits have a standard deviation of 4, so that one key too many or too few changes the output."""
    bounds = [fold * bound for bound in EDGE_BOUNDS]
    return attention_of(lab, bounds, window, 2 // fold, scale=4 / lab.sizes.E**0.5, v_in_qkv=fold == 1)

def head(lab: Lab, precision: str) -> Case:
    """Build a case of the losses of the next three tokens. Exact: in chunks of tokens, with fp8 rounding for fp8."""
    s = lab.sizes
    length = min(EXACT_HEAD_TOKENS, s.T // 2)
    y = tg.rms_norm(lab.normal(s.T, s.D))
    w = lab.normal(s.D, s.V, scale=0.05)
    targets = lab.below(s.V, s.T // length, length)
    weights = torch.tensor([1.0, 0.5, 0.25], device=lab.device)
    seed = torch.ones(s.T, device=lab.device)

    def losses(y: Tensor, w: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        rounding = precision.replace("fp8", "emulated") if y.dtype == F64 else precision
        return tg.HeadLoss.apply(y, w, targets, weights, rounding, tg.as_matrix(w))[0]

    def exact(y: Tensor, w: Tensor, targets: Tensor, weights: Tensor, seed: Tensor) -> list[Tensor]:
        chunks = []
        for chunk_y, chunk_targets, chunk_seed in zip(y.split(length), targets.split(1), seed.split(length)):
            chunks.append(and_gradients(losses, 2)(chunk_y, w, chunk_targets, weights, chunk_seed))
        found, grads_y, grads_w = zip(*chunks)
        return [torch.cat(found), torch.cat(grads_y), sum(grads_w)]

    bounds = 4e-3, 2e-2, 2e-2
    if precision == "fp8":
        bounds = 4e-3, 6e-2, 6e-2                             # the gradient of the logits has 2 mantissa bits
    return Case([y, w, targets, weights, seed], lab.ways(losses, partial(and_gradients, num_grads=2)), exact, bounds)

def large_head(lab: Lab, tokens: int) -> Case:
    """Only the memory of the trainer's way is known to fit."""
    case = head(Lab(lab.comm, RECORD._replace(T=tokens)), "fp8" if lab.has_fp8 else "plain")
    return case._replace(ways={TRAINER: case.ways[TRAINER]})

def evaluation_head(lab: Lab) -> Case:
    s = lab.sizes
    rows = min(s.T, tg.EVAL_CHUNK["cuda"])
    y = tg.rms_norm(lab.normal(rows, s.D))
    w = lab.normal(s.D, s.V, scale=0.05)

    def wrap(losses: Callable) -> Call:
        def call(y: Tensor, w: Tensor, targets: Tensor) -> list[Tensor]:
            with torch.no_grad():
                return [losses(y, w, targets)]
        return call

    ways = lab.ways(tg.next_token_losses, wrap)
    return Case([y, w, lab.below(s.V, rows)], ways, ways[PLAIN], (4e-3,))

def row_sums(lab: Lab) -> Case:
    """Build a case in which some rows are looked up thousands of times and most are not. The last row is looked up."""
    s = lab.sizes
    lookups = (s.R * lab.host.random(s.T)**4).astype(np.int32)
    lookups[s.T // 2:s.T // 2 + s.T // 16 + 1] = s.R - 1
    index = torch.from_numpy(lookups).to(lab.device)
    sums = lab.normal(s.R, s.D, dtype=F32)
    grad = lab.normal(s.T, s.D)

    def add_rows(sums: Tensor, index: Tensor, grad: Tensor) -> list[Tensor]:
        tg.add_rows(sums, index, grad)
        return [sums]

    def index_add(sums: Tensor, index: Tensor, grad: Tensor) -> list[Tensor]:
        return [sums.index_add_(0, index.long(), grad.to(sums.dtype))]

    return Case([sums, index, grad], {TRAINER: add_rows, PLAIN: index_add}, index_add, (4e-6,))

def normuon(lab: Lab, bank: str) -> Case:
    """One update of the bank "squares" or "talls". Outputs: change of the exact weight, both moments."""
    s = lab.sizes
    count, height, width = dict(squares=(s.squares, s.D, s.D), talls=(s.talls, s.F, s.D))[bank]
    p = lab.normal(count, height, width, scale=width**-0.5)
    mantissa = lab.below(1 << 16, count, height, width).sub(1 << 15).to(torch.int16)
    grad = lab.normal(count, height, width)
    momentum = lab.normal(count, height, width, scale=0.5, dtype=F32)
    second_moment = lab.normal(count, height, 1, dtype=F32).square() / width + 1e-4
    lr_muls = 1 + torch.rand(count, 1, 1, generator=lab.generator, device=lab.device)

    def step(update: Callable, p: Tensor, mantissa: Tensor | None, state: Sequence[Tensor]) -> list[Tensor]:
        grad, momentum, second_moment, lr_muls = state
        mu, lr, decay_per_lr = map(tg.cpu_scalar, (0.9, 0.02, 0.03))
        update(p, mantissa, grad, momentum, second_moment, 0.125, mu, lr, lr_muls, decay_per_lr, 0.95)
        return [momentum, second_moment]

    def in_halves(update: Callable) -> Call:
        def call(p: Tensor, mantissa: Tensor, *state: Tensor) -> list[Tensor]:
            before = tg.with_mantissa(p, mantissa)
            moments = step(update, p, mantissa, state)
            return [tg.with_mantissa(p, mantissa) - before, *moments]
        return call

    def exact(p: Tensor, mantissa: Tensor, *state: Tensor) -> list[Tensor]:
        weight = tg.with_mantissa(p.bfloat16(), mantissa).double()
        before = weight.clone()
        moments = step(tg.normuon_update, weight, None, state)
        return [weight - before, *moments]

    return Case([p, mantissa, grad, momentum, second_moment, lr_muls], lab.ways(tg.normuon_update, in_halves), exact,
                (0.15, 1e-6, 0.05))

CASES: dict[str, Callable[[Lab], Case]] = {
    "mlp": mlp, "attention, short window": partial(attention, window="short"),
    "attention, long window": partial(attention, window="long"),
    "attention, paired": partial(attention, window="short", fold=2),
    **{f"attention, window {window}{', paired' * (fold - 1)}": partial(attention_edges, window=window, fold=fold)
       for window in EDGE_WINDOWS for fold in (1, 2)},
    "head, fp8": partial(head, precision="fp8"), "head, plain": partial(head, precision="plain"),
    "head, evaluation": evaluation_head,
    "head, 49152 tokens": partial(large_head, tokens=49_152),
    "head, 98304 tokens": partial(large_head, tokens=98_304),
    "sums of rows": row_sums, "NorMuon, attention bank": partial(normuon, bank="squares"),
    "NorMuon, MLP bank": partial(normuon, bank="talls"),
}


# ---- Probes
PACKAGES = ("torch", "triton", "numpy", "pytest", "flash-attn-4", "flash-attn-3")
QUERIED = ("name,driver_version,clocks.sm,clocks.max.sm,power.limit,mig.mode.current,"
           "ecc.errors.uncorrected.volatile.total,clocks_throttle_reasons.active")

def nvidia_smi(*flags: str) -> str:
    """Return the output of nvidia-smi, or why there is none."""
    try:
        return subprocess.run(["nvidia-smi", *flags], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)

def preflight(device: str) -> dict[str, Any]:
    facts = {package: tg.package_version(package) for package in PACKAGES}
    facts |= dict(python=platform.python_version(), cuda=torch.version.cuda,
                  cpu=tg.describe_hardware(tg.Communicator(torch.device("cpu"))))
    stages = tg.Config(**tg.PRESETS["record" if device == "cuda" else "tiny"]).stages
    first_batch = stages[0].batch_tokens
    facts["stages_first_batch"] = tg.format_value(tuple(replace(stage, batch_tokens=first_batch) for stage in stages))
    if device == "cpu":
        return facts | dict(card="cpu", gpus=0, capability=[0, 0], free_fraction=1.0, memory_gib=0)
    first = torch.cuda.get_device_properties(0)
    count = torch.cuda.device_count()
    free, total = zip(*map(torch.cuda.mem_get_info, range(count)))
    return facts | dict(card=first.name, gpus=count, capability=[first.major, first.minor],
                        free_fraction=min(free) / max(total), memory_gib=min(total) >> 30,
                        nccl=".".join(map(str, torch.cuda.nccl.version())),
                        nvidia_smi=nvidia_smi(f"--query-gpu={QUERIED}", "--format=csv"),
                        topology=nvidia_smi("topo", "-m"))

def ms_of(call: Call, inputs: list[Tensor]) -> float:
    """Time a second call with a cold cache, between CUDA events."""
    call(*(x.clone() for x in inputs))
    copies = [x.clone() for x in inputs]
    flushed = torch.empty(L2_BYTES, dtype=torch.uint8, device=inputs[0].device)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(FLUSHES):
        flushed.zero_()
    before.record()
    call(*copies)
    after.record()
    after.synchronize()
    return before.elapsed_time(after)

def operations(device: str) -> dict[str, Any]:
    """Check every operation against float64, and time it on a GPU."""
    comm = tg.Communicator(torch.device(device, 0))
    comm.set_thread_device()
    lab = Lab(comm, seed=1)
    found = {}
    for name in lab.cases():
        gc.collect()                                          # free the gigabytes of the previous case
        try:
            found[name] = check_and_time(name, lab)
        except Exception as error:                            # the other cases still run
            found[name] = dict(ms={}, wrong=[f"{name}: {type(error).__name__}: {str(error)[:200]}"])
        print(found[name], flush=True)
    return found

def check_and_time(name: str, lab: Lab) -> dict[str, Any]:
    case = CASES[name](lab)
    found = check(name, case, lab)
    times = {way: [] for way in case.ways}
    for _ in range(ROUNDS if lab.comm.on_cuda else 0):        # alternate, so that a warmer GPU affects all ways
        for way, call in case.ways.items():
            times[way].append(ms_of(call, case.inputs))
    return found | dict(ms={way: statistics.median(ms) for way, ms in times.items() if ms})


if __name__ == "__main__":
    probe, device, path = sys.argv[1:]
    found = dict(preflight=preflight, operations=operations)[probe](device)
    Path(path).write_text(json.dumps(found, indent=1) + "\n", "utf-8")

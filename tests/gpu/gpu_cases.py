"""The operations that the trainer gives to a GPU: for each, fresh inputs, the ways to compute it, the exact result.

A case is checked (every way against f64, its inputs between frames of NaN, its memory full of NaN) and timed (the ways
in turn). All of it is a function of device and sizes: a CPU runs the same lines, small (`bench_gpu.py --device=cpu`).
"""
from __future__ import annotations

import contextlib
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from common import angles_by_channel

import train_gpt as tg

RATES = Path(__file__).resolve().parents[1] / "rehearsal/rates.json"               # of cards, each with its source
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TRAINER, PLAIN, COMPILED = "trainer", "plain", "torch.compile"
FRAME = 2048                             # elements before and behind a framed tensor: whole lines of any alignment
MOST_POISON = 8 << 30                    # bytes
L2_BYTES = 256 << 20                     # written between two timings: more than any card's cache
EXACT_ROWS = 2048                        # of logits in f64 at a time

Call = Callable[..., list[Tensor]]


class Sizes(NamedTuple):
    """Of one rank's slot, in the letters of the trainer."""

    tokens: int                          # T
    width: int                           # D
    heads: int                           # H
    head_dim: int                        # E
    hidden: int                          # F of the MLP
    vocab: int                           # V
    rows: int                            # R of the table whose gradients are summed
    squares: int                         # matrices (D, D) of the attention bank
    talls: int                           # matrices (F, D) of the MLP bank
    short: int                           # windows in tokens
    long: int
    max_doc_len: int


RECORD = Sizes(16_384, 768, 6, 128, 3072, 50_304, 251_520, 40, 22, 128, 384, 2048)       # the first stage, one rank
SMALL_CARD = RECORD._replace(tokens=4096, rows=50_304, squares=8, talls=6)              # for less than 60 GiB
BIG_CARD = 60 << 30                      # bytes: with f64, the first stage's head takes up to 34 GiB
TINY = Sizes(96, 64, 4, 16, 128, 256, 320, 2, 2, 5, 12, 40)


def sizes_of(memory: int) -> Sizes:
    """For a card with that many bytes."""
    return RECORD if memory >= BIG_CARD else SMALL_CARD


class Case(NamedTuple):
    """One operation at one size."""

    name: str
    inputs: list[Tensor]
    ways: dict[str, Call]                # of copies of the inputs; what the trainer does stands first
    exact: Call                          # of copies in f64
    bounds: tuple[float, ...]            # largest relative error of each output, in the Frobenius norm
    moved: int                           # bytes that have to be read and written at least
    flops: int                           # of products
    dtype: str = "bfloat16"              # of these products, by its name in the rates
    kernel: str = COMPILED               # what the trainer's way is


# ------ Memory full of NaN --------------------------------------------------------------------------------------------

class PoisonedAllocations(TorchDispatchMode):
    """What eager code allocates holds NaN, or the largest integer, until it is written."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if "empty" in func.__name__ and isinstance(found, Tensor):
            fill_with_nan(found)
        return found


def fill_with_nan(x: Tensor) -> None:
    """Bytes of ones: NaN in every float type, -1 in every integer. Views of other memory stay as they are."""
    if x.numel() and x.is_contiguous():
        x.view(-1).view(torch.uint8).fill_(255)


def fill_free_memory(device: torch.device) -> bool:
    """Fill what the allocator will hand out next. Returns whether a new tensor holds NaN."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    large = torch.full((min(MOST_POISON, free // 2),), 255, dtype=torch.uint8, device=device)
    small = [torch.full((1 << 19,), 255, dtype=torch.uint8, device=device) for _ in range(64)]
    del large, small
    few = torch.empty(64, device=device)
    many = torch.empty(1 << 22, device=device)
    return bool(few.isnan().all() and many.isnan().all())


@contextlib.contextmanager
def poisoned(device: torch.device) -> Iterator[bool]:
    """Memory that nobody has written holds NaN. Yields whether that is so."""
    if device.type == "cuda":
        yield fill_free_memory(device)
        return
    with PoisonedAllocations():
        yield bool(torch.empty(64).isnan().all())


def framed(x: Tensor) -> tuple[Tensor, Tensor]:
    """A contiguous copy of x inside of a larger tensor of NaN, and the larger one. Integers have no frame."""
    if not x.is_floating_point():
        copy = x.clone()
        return copy, copy
    whole = torch.empty(x.numel() + 2 * FRAME, dtype=x.dtype, device=x.device)
    fill_with_nan(whole)
    inside = whole[FRAME:FRAME + x.numel()].view(x.shape)
    inside.copy_(x)
    return inside, whole


def frame_is_whole(whole: Tensor) -> bool:
    if not whole.is_floating_point():
        return True
    before = whole[:FRAME].view(torch.uint8)
    behind = whole[-FRAME:].view(torch.uint8)
    return bool((before == 255).all() and (behind == 255).all())


# ------ Checks --------------------------------------------------------------------------------------------------------

def relative(x: Tensor, exact: Tensor) -> float:
    """Frobenius distance in units of the exact tensor's norm; NaN or infinite where x is."""
    exact = exact.detach().double()
    return float((x.detach().double() - exact).norm() / exact.norm().clamp_min(1e-300))


def exact_inputs(case: Case) -> list[Tensor]:
    return [x.double() if x.is_floating_point() else x for x in case.inputs]


def is_compiled(case: Case, way: str) -> bool:
    return COMPILED in (way, case.kernel if way == TRAINER else way)


def outputs_of(case: Case, way: str, device: torch.device) -> tuple[list[Tensor], bool, bool]:
    """What one way gives in poisoned memory, whether that was poisoned, and whether it stayed inside of the frames."""
    framed_inputs = [framed(x) for x in case.inputs]
    memory = poisoned(device)
    if device.type != "cuda" and is_compiled(case, way):                      # no mode reaches into a compiled graph
        memory = contextlib.nullcontext(False)
    with memory as is_poisoned:
        outputs = case.ways[way](*(inside for inside, _ in framed_inputs))
    stays_inside = all(frame_is_whole(whole) for _, whole in framed_inputs)
    return outputs, is_poisoned, stays_inside


def check(case: Case, device: torch.device) -> dict[str, Any]:
    """Errors of every way, and what is wrong: an empty list if nothing is."""
    exact = case.exact(*exact_inputs(case))
    found: dict[str, Any] = dict(name=case.name, kernel=case.kernel, bounds=case.bounds, errors={}, poisoned={})
    wrong = []
    for way in case.ways:
        outputs, found["poisoned"][way], stays_inside = outputs_of(case, way, device)
        errors = [relative(x, reference) for x, reference in zip(outputs, exact, strict=True)]
        found["errors"][way] = errors
        for number, (error, bound) in enumerate(zip(errors, case.bounds, strict=True)):
            if not error < bound:                                             # NaN is not
                wrong.append(f"{case.name}, {way}: output {number} is off by {error:.2e}, allowed {bound:.0e}")
        if not stays_inside:
            wrong.append(f"{case.name}, {way}: writes in front of an input or behind it")
    return found | dict(wrong=wrong)


# ------ Times ---------------------------------------------------------------------------------------------------------

class Stopwatch:
    """Times of calls, in ms: between events of the device, or by the clock where there is none."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_cuda = device.type == "cuda"
        self.spans: list[tuple] = []
        self.flushed = torch.empty(L2_BYTES if self.on_cuda else 1, dtype=torch.uint8, device=device)

    def mark(self) -> Any:
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def time(self, call: Callable[[], object]) -> None:
        """One call on a cold cache. The flush also lets the host run ahead of the device."""
        self.flushed.zero_()
        before = self.mark()
        call()
        self.spans.append((before, self.mark()))

    def read(self) -> list[float]:
        """ms of the calls since the last reading."""
        spans = self.spans
        self.spans = []
        if not self.on_cuda:
            return [1000 * (after - before) for before, after in spans]
        torch.cuda.synchronize(self.device)
        return [before.elapsed_time(after) for before, after in spans]


def spread(ms: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return dict(ms=statistics.median(ms), least=min(ms), most=max(ms), n=len(ms))


def time_ways(case: Case, device: torch.device, rounds: int) -> dict[str, dict]:
    """ms of every way, in turn, so that a warmer card is warmer for all of them. The first round does not count.

    Operations that change an input do so again and again here: their time does not depend on the numbers.
    """
    watches = {way: Stopwatch(device) for way in case.ways}
    for round_ in range(rounds + 1):
        for way, call in case.ways.items():
            copies = [x.clone() for x in case.inputs]
            watches[way].time(functools.partial(call, *copies))
        if round_ == 0:
            for watch in watches.values():
                watch.read()
    return {way: spread(watch.read()) for way, watch in watches.items()}


def peaks_of(name: str) -> dict[str, float]:
    """What a card can do at most, a second, by kind of work; nothing for a name that the rates do not hold."""
    if not RATES.exists():
        return {}
    cards = json.loads(RATES.read_text())["cards"]
    for card, facts in cards.items():
        if card in name:
            return {kind: rate["peak"] for kind, rate in facts["rates"].items()}
    return {}


def shares(case: Case, ms: float, peaks: dict[str, float]) -> dict[str, float]:
    """How much of the card's bandwidth and of its products the least work of a case makes in that time, 0 to 1."""
    if not peaks or ms <= 0:
        return {}
    seconds = ms / 1000
    of_products = peaks.get(case.dtype, peaks["bfloat16"])
    return dict(bandwidth=case.moved / seconds / peaks["memory"], products=case.flops / seconds / of_products)


# ------ Making cases --------------------------------------------------------------------------------------------------

def chosen_attention(fabric: tg.Fabric, head_dim: int) -> tuple[str, Callable]:
    """The record preset's on this device, in words, and its kernel."""
    cfg = tg.Config(**tg.PRESETS["record"] | dict(head_dim=head_dim))
    kernel, name = tg.choose_attention("", cfg, fabric)
    return name, kernel


class Lab:
    """Where cases are made: device, sizes, fresh random numbers, the attention that was chosen, the compiler."""

    def __init__(self, fabric: tg.Fabric, sizes: Sizes, seed: int, backend: str | None) -> None:
        """backend: of torch.compile; None: nothing is compiled."""
        self.fabric = fabric
        self.device = fabric.device
        self.sizes = sizes
        self.backend = backend
        self.generator = torch.Generator(fabric.device).manual_seed(seed)
        self.host = np.random.default_rng(seed)                               # for what the host has to know, too
        self.attention_name, self.attention = chosen_attention(fabric, sizes.head_dim)
        self.has_fp8 = not fabric.on_cuda or torch.cuda.get_device_capability(fabric.device) >= (8, 9)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator, device=self.device)
        return (scale * drawn).to(dtype)

    def below(self, bound: int, *shape: int) -> Tensor:
        return torch.randint(0, bound, shape, generator=self.generator, device=self.device)

    def compiled(self, function: Callable) -> Callable:
        return torch.compile(function, backend=self.backend, dynamic=False, fullgraph=True)

    def ways(self, plain: Callable, wanted: int = 0) -> dict[str, Call]:
        """A function that the trainer compiles, and the same in plain PyTorch; with gradients of `wanted` inputs."""
        found = {}
        if self.backend:
            found[TRAINER] = and_gradients(self.compiled(plain), wanted)
        found[PLAIN] = and_gradients(plain, wanted)
        return found

    def document_bounds(self) -> list[int]:
        """cu_seqlens of one slot: lengths from 1 to max_doc_len, most of them short; an empty document at the end."""
        bounds = [0]
        while bounds[-1] < self.sizes.tokens:
            length = 1 + int(self.sizes.max_doc_len * self.host.random()**2)
            bounds.append(min(self.sizes.tokens, bounds[-1] + length))
        return [*bounds, self.sizes.tokens]


def and_gradients(function: Callable, wanted: int) -> Call:
    """Outputs of a function; with `wanted`, its output and the gradients of its first inputs.

    The last input is then the gradient of the output.
    """
    def forward(*inputs: Tensor) -> list[Tensor]:
        with torch.no_grad():
            found = function(*inputs)
        return list(found) if isinstance(found, (list, tuple)) else [found]

    def both(*inputs: Tensor) -> list[Tensor]:
        *read, seed = inputs
        leaves = [x.detach().requires_grad_() for x in read[:wanted]]
        out = function(*leaves, *read[wanted:])
        return [out.detach(), *torch.autograd.grad(out, leaves, seed)]

    return both if wanted else forward


def nbytes(*tensors: Tensor) -> int:
    return sum(x.nbytes for x in tensors)


def product(lab: Lab) -> Case:
    """Queries, keys and values of a layer: a plain product, for the share of the ceiling that cuBLAS reaches."""
    T = lab.sizes.tokens
    D = lab.sizes.width
    n = lab.normal(T, D)
    w = lab.normal(3 * D, D, scale=D**-0.5)
    seed = lab.normal(T, 3 * D)
    ways = {TRAINER: and_gradients(F.linear, 2)}

    def exact(n: Tensor, w: Tensor, seed: Tensor) -> list[Tensor]:
        return [n @ w.t(), seed @ w, seed.t() @ n]

    moved = 3 * nbytes(n, w, seed)
    return Case("product", [n, w, seed], ways, exact, 3 * (4e-3,), moved, 3 * 2 * T * D * 3 * D, kernel="cuBLAS")


def norm_and_rotation(lab: Lab) -> Case:
    """Of queries and keys together."""
    T = lab.sizes.tokens
    H = 2 * lab.sizes.heads
    E = lab.sizes.head_dim
    x = lab.normal(T, H, E)
    angles = 100 * torch.rand(T, 1, E // 4, generator=lab.generator, device=lab.device)
    by_channel = angles_by_channel(angles)
    cos = by_channel.cos().bfloat16()
    sin = by_channel.sin().bfloat16()
    seed = lab.normal(T, H, E)

    def plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return tg.rotate(tg.rms_norm(x), cos, sin)

    def formula(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = x / (x.square().mean(-1, keepdim=True) + tg.RMS_EPS).sqrt()
        turning = torch.view_as_complex(normed[..., :E // 2].unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(turning * torch.complex(cos[..., :E // 2:2], -sin[..., :E // 2:2])).flatten(-2)
        return torch.cat((turned, normed[..., E // 2:]), dim=-1)

    moved = 5 * x.nbytes                                                      # x and y; x, dy and dx
    return Case("norm and rotation", [x, cos, sin, seed], lab.ways(plain, 1), and_gradients(formula, 1),
                (1e-2, 2e-2), moved, 0)


def mlp(lab: Lab) -> Case:
    T = lab.sizes.tokens
    D = lab.sizes.width
    hidden = lab.sizes.hidden
    n = lab.normal(T, D)
    up = lab.normal(hidden, D, scale=D**-0.5)
    down = lab.normal(hidden, D, scale=hidden**-0.5)
    seed = lab.normal(T, D)

    def formula(n: Tensor, up: Tensor, down: Tensor) -> Tensor:
        pre = n @ up.t()
        return torch.where(pre > 0, pre, 0.0)**2 @ down

    between = 2 * T * hidden                                                  # bytes of pre or post in bf16
    moved = 3 * nbytes(n, up, down) + 6 * between                             # pre and post out, both in; dpre out, in
    def mlp(n: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return tg.relu_sq_mlp(n, tg.as_part(up), tg.as_part(down))

    return Case("mlp", [n, up, down, seed], lab.ways(mlp, 3), and_gradients(formula, 3),
                4 * (2e-2,), moved, 3 * 2 * 2 * T * D * hidden)


# ------ Attention -----------------------------------------------------------------------------------------------------

def seen_keys(bounds: Sequence[int], window: int) -> int:
    """Pairs of a query and a key that it sees; bounds: of the documents."""
    total = 0
    for first, end in zip(bounds, bounds[1:]):
        length = end - first
        full = max(0, length - window - 1)                                    # queries that see window + 1 keys
        growing = length - full
        total += growing * (growing + 1) // 2 + full * (window + 1)
    return total


def dense_attention(q: Tensor, k: Tensor, v: Tensor, bounds: Sequence[int], window: int, scale: float) -> Tensor:
    """Document by document with a mask of all its pairs, (N, H, E)."""
    parts = []
    for first, end in zip(bounds, bounds[1:]):
        at = torch.arange(first, end, device=q.device)
        distance = at[:, None] - at
        unseen = (distance < 0) | (distance > window)
        scores = scale * torch.einsum("qhe,khe->hqk", q[first:end], k[first:end])
        weights = scores.masked_fill(unseen, -math.inf).softmax(dim=-1)
        parts.append(torch.einsum("hqk,khe->qhe", weights, v[first:end]))
    return torch.cat(parts)


def attention(lab: Lab, name: str, window: int, paired: bool = False) -> Case:
    """One layer. Paired: half the heads on twice the positions."""
    sizes = lab.sizes
    bounds = lab.document_bounds()
    count = sizes.tokens
    heads = sizes.heads
    longest = sizes.max_doc_len + 1
    if paired:
        bounds = [2 * bound for bound in bounds]
        count *= 2
        longest *= 2
        heads //= 2
    scale = 0.1
    span = tg.AttentionSpan(longest, window, scale)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=lab.device)
    q = tg.rms_norm(lab.normal(count, heads, sizes.head_dim))
    k = tg.rms_norm(lab.normal(count, heads, sizes.head_dim))
    v = lab.normal(count, heads, sizes.head_dim)
    seed = lab.normal(count, heads, sizes.head_dim)

    def chosen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        return lab.attention(q, k, v, cu_seqlens, span)

    def reference(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        return tg.attention_reference(q, k, v, cu_seqlens, span)

    def dense(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
        return dense_attention(q, k, v, bounds, window, scale)

    ways = {TRAINER: and_gradients(chosen, 3), PLAIN: and_gradients(reference, 3)}
    if lab.backend:
        ways[COMPILED] = and_gradients(lab.compiled(reference), 3)
    pairs = seen_keys(bounds, window)
    flops = int(3.5 * 4 * sizes.head_dim * heads * pairs)                     # two products forward, five backward
    moved = 3 * nbytes(q, k, v, seed)
    return Case(name, [q, k, v, cu_seqlens, seed], ways, and_gradients(dense, 3), 4 * (2e-2,), moved, flops,
                kernel=lab.attention_name)


def short_attention(lab: Lab) -> Case:
    return attention(lab, "attention, short window", lab.sizes.short)


def long_attention(lab: Lab) -> Case:
    return attention(lab, "attention, long window", lab.sizes.long)


def paired_attention(lab: Lab) -> Case:
    return attention(lab, "attention, paired", lab.sizes.short, paired=True)


# ------ The head ------------------------------------------------------------------------------------------------------

def random_fp8(lab: Lab, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return lab.normal(rows, columns).to(dtype)


def fp8_logits(lab: Lab) -> Case:
    y = random_fp8(lab, lab.sizes.tokens, lab.sizes.width, E4M3)
    w = random_fp8(lab, lab.sizes.width, lab.sizes.vocab, E4M3)
    return fp8_case(lab, "fp8 product, logits", y, w, BF16, fast=True)


def fp8_gradient_of_y(lab: Lab) -> Case:
    grad = random_fp8(lab, lab.sizes.tokens, lab.sizes.vocab, E5M2)
    w = random_fp8(lab, lab.sizes.width, lab.sizes.vocab, E4M3)
    return fp8_case(lab, "fp8 product, gradient of y", grad, w.t(), BF16)


def fp8_gradient_of_w(lab: Lab) -> Case:
    y_in_rows = random_fp8(lab, lab.sizes.width, lab.sizes.tokens, E4M3)
    grad = random_fp8(lab, lab.sizes.tokens, lab.sizes.vocab, E5M2)
    return fp8_case(lab, "fp8 product, gradient of w", y_in_rows, grad, F32)


def fp8_case(lab: Lab, name: str, a: Tensor, b: Tensor, out_dtype: torch.dtype, fast: bool = False) -> Case:
    """The trainer's product turns b itself. Sums of fp8 products keep about 14 bits."""
    scale = torch.full((), 0.01, dtype=F64, device=lab.device)

    def native(a: Tensor, b: Tensor, scale: Tensor) -> list[Tensor]:
        return [tg.fp8_product(a, b, scale, True, out_dtype, fast)]

    def in_bf16(a: Tensor, b: Tensor, scale: Tensor) -> list[Tensor]:
        return [a.bfloat16() @ b.bfloat16() * scale.bfloat16()]

    def exact(a: Tensor, b: Tensor, scale: Tensor) -> list[Tensor]:
        return [a @ b * scale]

    rows, depth = a.shape
    columns = b.shape[1]
    moved = nbytes(a, b) + rows * columns * out_dtype.itemsize
    return Case(name, [a, b, scale], {TRAINER: native, PLAIN: in_bf16}, exact, (8e-3,), moved,
                2 * rows * depth * columns, dtype="float8", kernel="cuBLASLt")


def exact_head(fp8: bool) -> Call:
    """Losses and gradients of the head in f64: by autograd up to the logits, whose gradient is e5m2 with fp8."""
    def rounded(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
        return (x / scale).float().to(dtype).double() * scale if fp8 else x

    def call(y: Tensor, w: Tensor, targets: Tensor, weights: Tensor, seed: Tensor) -> list[Tensor]:
        y = rounded(y, E4M3, 100 / 448)
        w = rounded(w, E4M3, 1.6 / 448)
        columns, shares_of_columns = columns_ahead(targets, weights)
        losses = []
        grads_y = []
        grad_w = torch.zeros_like(w)
        for rows in torch.arange(len(y), device=y.device).split(EXACT_ROWS):
            logits = (y[rows] @ w).requires_grad_()
            log_p = (23 * torch.sigmoid((logits + 5) / 7.5)).log_softmax(dim=-1)
            loss = -(shares_of_columns[rows] * log_p.gather(1, columns[rows])).sum(dim=1)
            grad, = torch.autograd.grad(loss, logits, seed[rows])
            grad = rounded(grad, E5M2, 0.75 / 448 * float(seed[0]))
            losses.append(loss.detach())
            grads_y.append(grad @ w.t())
            grad_w += y[rows].t() @ grad
        return [torch.cat(losses), torch.cat(grads_y), grad_w]

    return call


def columns_ahead(targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The next tokens of each position, (N, G), and their weights: 0 for those beyond the slot's end."""
    columns = []
    found_weights = []
    for ahead, weight in enumerate(weights):
        known = torch.ones_like(targets, dtype=weights.dtype)[:, ahead:]
        columns.append(F.pad(targets[:, ahead:], (0, ahead)).flatten())
        found_weights.append(F.pad(weight * known, (0, ahead)).flatten())
    return torch.stack(columns, dim=1), torch.stack(found_weights, dim=1)


def head(lab: Lab, fp8: bool) -> Case:
    T = lab.sizes.tokens
    D = lab.sizes.width
    V = lab.sizes.vocab
    y = tg.rms_norm(lab.normal(T, D))
    w = lab.normal(D, V, scale=0.05)
    targets = lab.below(V, 2, T // 2)
    weights = torch.tensor([1.0, 0.5, 0.25], device=lab.device)
    seed = torch.ones(T, device=lab.device)
    precision = "fp8" if fp8 else "plain"

    def loss(y: Tensor, w: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        loss_weight = torch.ones((), device=y.device)
        return tg.HeadLoss.apply(y, w, targets, weights, loss_weight, precision, BF16, tg.as_part(w))

    bounds = (4e-3, 2e-2, 2e-2)
    payload = 2
    if fp8:
        bounds = (4e-3, 6e-2, 6e-2)                                           # 2 bits of the logits' gradient
        payload = 1
    logits = 2 * T * V                                                        # bytes in bf16
    gradients = 3 * payload * T * V                                           # out once, into two products
    moved = 3 * nbytes(y, w) + 3 * logits + gradients                         # out of the product, into two passes
    return Case(f"head, {precision}", [y, w, targets, weights, seed], lab.ways(loss, 2), exact_head(fp8), bounds,
                moved, 3 * 2 * T * D * V, dtype="float8" if fp8 else "bfloat16")


def fp8_head(lab: Lab) -> Case:
    return head(lab, True)


def plain_head(lab: Lab) -> Case:
    return head(lab, False)


def evaluation_head(lab: Lab) -> Case:
    """As many rows as evaluation takes at a time."""
    rows = min(lab.sizes.tokens, tg.EVAL_ROWS)
    D = lab.sizes.width
    V = lab.sizes.vocab
    y = tg.rms_norm(lab.normal(rows, D))
    w = lab.normal(D, V, scale=0.05)
    targets = lab.below(V, rows)
    def exact(y: Tensor, w: Tensor, targets: Tensor) -> list[Tensor]:
        z = 23 * torch.sigmoid((y @ w + 5) / 7.5)
        return [F.cross_entropy(z, targets, reduction="none")]

    moved = nbytes(y, w) + 2 * 2 * rows * V
    ways = lab.ways(tg.next_token_losses)
    return Case("head, evaluation", [y, w, targets], ways, exact, (4e-3,), moved, 2 * rows * D * V)


# ------ Rows ----------------------------------------------------------------------------------------------------------

def token_rows(lab: Lab, rows: int, count: int) -> np.ndarray:
    """Some rows are read thousands of times, most are not: (count,) i32. The last row is among them."""
    found = (rows * lab.host.random(count)**4).astype(np.int32)
    found[count // 2:count // 2 + count // 16] = rows - 1
    return found


def row_sums(lab: Lab) -> Case:
    R = lab.sizes.rows
    T = lab.sizes.tokens
    D = lab.sizes.width
    sums = lab.normal(R, D, dtype=F32)
    found = token_rows(lab, R, T)
    index = torch.from_numpy(found).to(lab.device)
    grad = lab.normal(T, D)

    def ours(sums: Tensor, index: Tensor, grad: Tensor) -> list[Tensor]:
        tg.add_rows(sums, index, grad)
        return [sums]

    def plain(sums: Tensor, index: Tensor, grad: Tensor) -> list[Tensor]:
        return [sums.index_add_(0, index.long(), grad.to(sums.dtype))]

    ways = {TRAINER: ours, PLAIN: plain}
    if lab.backend:
        ways[COMPILED] = lab.compiled(plain)
    touched = len(np.unique(found))
    moved = nbytes(grad, index) + 2 * touched * D * sums.itemsize
    kernel = "Triton" if lab.fabric.on_cuda else "index_add_"
    return Case("sums of rows", [sums, index, grad], ways, plain, (1e-6,), moved, 0, kernel=kernel)


def rows_read(lab: Lab) -> Case:
    """Lookups, and the sums of their gradients instead of a dense gradient."""
    R = lab.sizes.rows
    T = lab.sizes.tokens
    D = lab.sizes.width
    source = lab.normal(R, D)
    found = token_rows(lab, R, T)
    index = torch.from_numpy(found).to(lab.device)
    sums = torch.zeros(R, D, device=lab.device)
    seed = lab.normal(T, D)

    def lookup(source: Tensor, index: Tensor, sums: Tensor, seed: Tensor) -> list[Tensor]:
        out = tg.RowLookup.apply(source.detach().requires_grad_(), index, sums)
        out.backward(seed)
        return [out.detach(), sums]

    def dense(source: Tensor, index: Tensor, sums: Tensor, seed: Tensor) -> list[Tensor]:
        leaf = source.detach().to(torch.promote_types(source.dtype, F32)).requires_grad_()
        out = F.embedding(index, leaf)
        out.backward(seed.to(leaf.dtype))
        return [out.detach(), sums + leaf.grad]

    touched = len(np.unique(found))
    moved = nbytes(seed, seed, seed, index, index) + 2 * touched * D * 4
    return Case("rows read and their gradients", [source, index, sums, seed], {TRAINER: lookup, PLAIN: dense}, dense,
                (1e-12, 1e-6), moved, 0, kernel="eager and Triton")


# ------ Updates -------------------------------------------------------------------------------------------------------

def exact_polar(x: Tensor) -> Tensor:
    """The same polynomials in f64, by the Gram matrix of the rows, which is not the one that the trainer takes."""
    x = x / (1.02 * x.flatten(1).norm(dim=1)[:, None, None] + 1e-6)
    for a, b, c in tg.POLAR_EXPRESS:
        gram = x.mT @ x
        x = a * x + x @ (b * gram + c * gram @ gram)
    return x


def polar(lab: Lab) -> Case:
    x = lab.normal(lab.sizes.squares, lab.sizes.width, lab.sizes.width)
    count, side, _ = x.shape

    def exact(x: Tensor) -> list[Tensor]:
        return [exact_polar(x)]

    flops = 5 * 3 * 2 * count * side**3
    return Case("Polar Express", [x], lab.ways(tg.polar_express), exact, (0.1,), 5 * 8 * x.nbytes, flops)


def normuon(lab: Lab, name: str, count: int, height: int) -> Case:
    """One update of a bank. Outputs: how the exact weight moves, both moments."""
    width = lab.sizes.width
    p = lab.normal(count, height, width, scale=width**-0.5)
    mantissa = lab.below(1 << 16, count, height, width).sub(1 << 15).to(torch.int16)
    grad = lab.normal(count, height, width)
    momentum = lab.normal(count, height, width, scale=0.5, dtype=F32)
    second = lab.normal(count, height, 1, dtype=F32).square() / width + 1e-4
    lr_muls = 1 + torch.rand(count, 1, 1, generator=lab.generator, device=lab.device)
    numbers = dict(mu=0.9, lr=0.02, decay=0.03)
    share, beta2 = 0.125, 0.95

    def updated(update: Callable) -> Call:
        def call(p, mantissa, grad, momentum, second, lr_muls) -> list[Tensor]:
            before = tg.with_mantissa(p, mantissa)
            mu, lr, decay = (tg.cpu_scalar(number) for number in numbers.values())
            update(p, mantissa, grad, momentum, second, share, mu, lr, lr_muls, decay, beta2)
            return [tg.with_mantissa(p, mantissa) - before, momentum, second]
        return call

    def exact(p, mantissa, grad, momentum, second, lr_muls) -> list[Tensor]:
        weight = tg.with_mantissa(p.bfloat16(), mantissa).double()
        grad = grad * share
        momentum = numbers["mu"] * momentum + (1 - numbers["mu"]) * grad
        o = exact_polar((1 - numbers["mu"]) * grad + numbers["mu"] * momentum)
        second = beta2 * second + (1 - beta2) * o.square().mean(-1, keepdim=True)
        evened = o / second.clamp_min(1e-10).sqrt()
        size = o.flatten(1).norm(dim=1) / evened.flatten(1).norm(dim=1)
        update = evened * size[:, None, None]
        rate = lr_muls * numbers["lr"]
        agrees = update * weight >= 0
        return [-(agrees * weight * numbers["decay"] * rate) - update * rate, momentum, second]

    ways = {PLAIN: updated(tg.normuon_update)}
    if lab.backend:
        ways = {TRAINER: updated(lab.compiled(tg.normuon_update)), **ways}
    moved = nbytes(grad) + 2 * nbytes(p, mantissa, momentum, second)
    flops = 5 * 2 * count * (2 * height * width * width + width**3)
    return Case(name, [p, mantissa, grad, momentum, second, lr_muls], ways, exact, (0.15, 1e-6, 0.05), moved, flops)


def normuon_of_attention(lab: Lab) -> Case:
    return normuon(lab, "NorMuon, attention bank", lab.sizes.squares, lab.sizes.width)


def normuon_of_mlp(lab: Lab) -> Case:
    return normuon(lab, "NorMuon, MLP bank", lab.sizes.talls, lab.sizes.hidden)


def adam(lab: Lab) -> Case:
    """A table's update: gradients in f32, weights in bf16."""
    R = lab.sizes.rows
    D = lab.sizes.width
    p = lab.normal(R, D, scale=0.1)
    grad = lab.normal(R, D, dtype=F32)
    m = lab.normal(R, D, scale=0.1, dtype=F32)
    v = lab.normal(R, D, scale=0.1, dtype=F32).square()
    share, betas, eps = 0.125, (0.75, 0.95), 1e-10
    step_size, decay = 0.01, 0.02

    def updated(update: Callable) -> Call:
        def call(p: Tensor, grad: Tensor, m: Tensor, v: Tensor) -> list[Tensor]:
            update(p, grad, m, v, share, betas, eps, tg.cpu_scalar(step_size), tg.cpu_scalar(decay))
            return [p, m, v]
        return call

    def exact(p: Tensor, grad: Tensor, m: Tensor, v: Tensor) -> list[Tensor]:
        grad = grad * share
        m = betas[0] * m + (1 - betas[0]) * grad
        v = betas[1] * v + (1 - betas[1]) * grad**2
        update = step_size * m / (v**0.5 + eps)
        decayed = torch.where(update * p > 0, p * (1 - decay), p)
        return [decayed - update, m, v]

    ways = {PLAIN: updated(tg.adam_update)}
    if lab.backend:
        ways = {TRAINER: updated(lab.compiled(tg.adam_update)), **ways}
    moved = nbytes(grad) + 2 * nbytes(p, m, v)
    return Case("Adam", [p, grad, m, v], ways, exact, (4e-3, 1e-6, 1e-6), moved, 0)


FP8_CASES = (fp8_head, fp8_logits, fp8_gradient_of_y, fp8_gradient_of_w)
CASES = (product, norm_and_rotation, mlp, short_attention, long_attention, paired_attention, *FP8_CASES, plain_head,
         evaluation_head, row_sums, rows_read, polar, normuon_of_attention, normuon_of_mlp, adam)


def makers(lab: Lab) -> list[Callable[[Lab], Case]]:
    """Of all cases that the card can run: one at a time, for their inputs fill gigabytes."""
    return [make for make in CASES if lab.has_fp8 or make not in FP8_CASES]

"""Room 4: each operation against reference.py, loops or autograd in float64, forward and backward."""
import importlib.util
import itertools
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from common import ROOT, angles_by_channel
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import train_gpt as tg

F64, BF16, F32 = torch.float64, torch.bfloat16, torch.float32
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None,
                                  reason="no triton package: its body cannot be translated here")
ROUNDING = {F32: 1e-6, torch.float16: 2.0**-11, BF16: 2.0**-8}       # one
MOST_SHARED = {80: 166_912, 90: 232_448, 100: 232_448}        # bytes: CUDA programming guide, table of limits
TENSOR_CORES = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}

def randn(*shape: int, seed: int = 0, grad: bool = False, dtype=F64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype).requires_grad_(grad)

def randint(high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))

def assert_close(got, want, rtol=1e-12, atol=1e-13):
    """Default: a few roundings of float64 on numbers of order 1."""
    got, want = (x.detach().double() if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=F64)
                 for x in (got, want))
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)

def assert_equals_autograd(got, want, inputs, grad, **tolerance):
    """The same outputs and the same gradients of the inputs."""
    assert_close(got, want, **tolerance)
    for a, b in zip(torch.autograd.grad(got, inputs, grad), torch.autograd.grad(want, inputs, grad), strict=True):
        assert_close(a, b, **tolerance)


# ---- norm, rotation, MLP --------------------------------------------------------------------------------------------

@pytest.mark.recipe
@pytest.mark.parametrize("shape, size", [((5,), 1.0), ((3, 16), 1e-3), ((2, 3, 7), 1e-5), ((4, 12), 0.0)])
def test_rms_norm(shape, size):
    x = size * randn(*shape, seed=1)
    rows = [[value / math.sqrt(sum(v * v for v in row) / len(row) + 2.0**-23) for value in row]
            for row in x.reshape(-1, shape[-1]).tolist()]
    assert_close(tg.rms_norm(x).reshape(-1, shape[-1]), rows)

@pytest.mark.parametrize("length, heads, width", [(1, 1, 8), (5, 2, 16)])
def test_rotate__is_a_complex_product_with_exp_minus_i_angle(length, heads, width):
    x, frequencies = randn(length, heads, width, seed=2), 3 * randn(width // 4, seed=3)
    positions = torch.arange(length)[:, None].expand(length, heads)
    by_channel = angles_by_channel(positions[..., None] * frequencies)
    got = tg.rotate(x, by_channel.cos(), by_channel.sin())
    assert_close(got, reference.rotated(x, positions, frequencies.tolist()))
    assert got[..., width // 2:].equal(x[..., width // 2:]), "half of the features do not turn"

@pytest.mark.parametrize("lead, D, width", [((1,), 1, 1), ((3,), 4, 7), ((2, 5), 6, 24)])
def test_relu_sq_mlp(lead, D, width):
    n, up, down = randn(*lead, D, grad=True), randn(width, D, seed=1, grad=True), randn(width, D, seed=2, grad=True)
    got = tg.relu_sq_mlp(n, tg.as_part(up), tg.as_part(down))
    assert_equals_autograd(got, (n @ up.t()).relu().square() @ down, (n, up, down), randn(*lead, D, seed=3))

@pytest.mark.parametrize("dtype", [F64, F32, BF16])
def test_relu_sq_mlp__what_relu_cuts_off_has_no_gradient(monkeypatch, dtype):
    """Not even one that rounding has left: an optimizer may look at the sign of what is there."""
    n, up, down = randn(9, 6), randn(24, 6, seed=1), randn(6, 24, seed=2)
    pre = n @ up.t()
    want = 2 * pre.relu() * (n @ down)
    leaf, seen = n.to(dtype), []
    monkeypatch.setattr(tg, "accumulate_wgrad", lambda part, a, b: seen.append(a))
    matrices = [x.to(dtype).requires_grad_() for x in (up, down.t().contiguous())]
    tg.relu_sq_mlp(leaf, *map(tg.as_part, matrices)).backward(leaf)
    found = seen[0]                                                           # by pre, a factor of the up gradient
    assert found.dtype == dtype and (found[pre.to(dtype) <= 0] == 0).all()
    assert_close(found, want, rtol=0, atol=8 * torch.finfo(dtype).eps * want.abs().max().item())

def mend_interpreter() -> None:
    """The interpreter is wrong in bf16: it cuts numbers off, and multiplies their 16 bits. Here torch converts them."""
    from triton.runtime import interpreter
    types = dict(bf16=BF16, fp16=torch.float16, fp32=F32, fp64=F64)

    def as_torch(x: Any) -> torch.Tensor:
        found = torch.from_numpy(np.ascontiguousarray(x.data))
        return found.view(BF16) if x.dtype.scalar.is_bf16() else found

    def cast(self: Any, x: Any, kind: Any, *_: Any) -> Any:
        if kind.scalar.name not in types or not x.dtype.scalar.is_floating():
            return unchanged(self, x, kind)
        found = as_torch(x).to(types[kind.scalar.name])
        data = found.numpy() if found.dtype != BF16 else found.view(torch.int16).numpy().view(np.uint16)
        return interpreter.TensorHandle(data, kind.scalar)

    def dot(_: Any, a: Any, b: Any, total: Any, *__: Any) -> Any:
        product = as_torch(a).float() @ as_torch(b).float()
        return interpreter.TensorHandle(product.numpy() + total.data, total.dtype.scalar)

    builder = interpreter.InterpreterBuilder
    unchanged = builder.cast_impl
    builder.create_fp_ext = builder.create_fp_trunc = builder.create_fp_to_fp = cast
    builder.create_dot = dot

def interpret() -> None:
    """Both passes against float64, ragged at every edge, by one program and three. Forward reads no squares: NaN."""
    torch.set_num_threads(1)
    mend_interpreter()
    shapes = (16, 32, 16), (1, 8, 8), (33, 40, 24), (50, 96, 56), (7, 200, 32), (64, 64, 128)     # (N, F, K)
    for dtype, shape, programs in itertools.product(ROUNDING, shapes, (1, 3)):
        count, columns, depth = shape
        x, w = randn(count, depth, dtype=dtype), randn(columns, depth, seed=1, dtype=dtype)
        product = x.double() @ w.double().t()
        exact = product.clamp(min=0).square()
        kept = exact.to(dtype)
        grad = 2 * product * kept.double().sqrt()
        for backward, squares, want in ((False, torch.full_like(kept, torch.nan), exact), (True, kept, grad)):
            out = torch.full_like(kept, torch.nan)
            tg.jitted(tg.relu_sq_kernel)[(programs,)](x, w, squares, out, *shape, BACKWARD=backward, ROWS=16,
                                                      COLUMNS=32, DEPTH=16)
            error = float((out.double() - want).abs().max() / want.abs().max())
            assert error <= ROUNDING[dtype], (dtype, shape, programs, backward, error)

@needs_triton
def test_relu_sq_kernel__interpreted():
    """In a process of its own: Triton is interpreted in all of it or nowhere."""
    command = [sys.executable, "-c", "import test_kernels; test_kernels.interpret()"]
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    done = subprocess.run(command, env=os.environ | dict(PYTHONPATH=paths, TRITON_INTERPRET="1"),
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr

def resources(cubin: Path) -> dict[str, int]:
    """Return REG, STACK and LOCAL of a kernel's machine code, by NVIDIA's tool that comes with Triton."""
    import triton
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    text = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    return {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}

@needs_triton
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("capability", tg.RELU_SQ_TILES)
def test_relu_sq_kernel__compiles_without_a_gpu(capability, backward, tmp_path, monkeypatch):
    """For each card that takes it: tensor cores, loads ahead, no spills, within shared memory, offsets of 64 bits."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    card = 10 * capability[0] + capability[1]
    tile, stages = tg.RELU_SQ_TILES[capability]
    constants = dict(BACKWARD=backward, **tile)
    options = dict(num_warps=constants.pop("num_warps"), num_stages=stages[backward])
    run_time = dict.fromkeys(("x", "w", "squares", "out"), "*bf16")
    run_time |= dict.fromkeys(("count", "columns", "depth"), "i32")
    divisible = {(at,): [["tt.divisibility", 16]] for at in range(len(run_time))}
    fixed = {(at,): value for at, value in enumerate(constants.values(), start=len(run_time))}
    source = ASTSource(fn=tg.jitted(tg.relu_sq_kernel), signature=run_time | dict.fromkeys(constants, "constexpr"),
                       attrs=divisible, constexprs=fixed)
    made = triton.compile(source, target=GPUTarget("cuda", card, 32), options=options)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(made.asm["cubin"])
    used = resources(cubin)
    assert used["STACK"] == used["LOCAL"] == 0 and used["REG"] <= 255
    assert made.metadata.shared <= MOST_SHARED[card]
    assert TENSOR_CORES[card] in made.asm["ptx"] and "cp.async" in made.asm["ptx"]
    for line in made.asm["ttir"].splitlines():                # no array is taken further by a number of 32 bits
        assert "tt.addptr" not in line or re.search(r"(\bi|xi)64\b", line.rpartition(",")[2]), line

@pytest.mark.parametrize("dtype, width, hidden, capability, on_cuda, fits", [
    (BF16, 768, 3072, (9, 0), True, True), (torch.float16, 8, 16, (8, 0), True, True),
    (BF16, 768, 3072, (8, 9), True, False), (F32, 768, 3072, (9, 0), True, False),
    (BF16, 100, 3072, (9, 0), True, False), (BF16, 768, 100, (9, 0), True, False), (BF16, 8, 16, (9, 0), False, False)])
def test_fits_relu_sq(monkeypatch, dtype, width, hidden, capability, on_cuda, fits):
    card = SimpleNamespace(major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    x = SimpleNamespace(dtype=dtype, shape=(5, width), is_cuda=on_cuda, device="cuda",
                        element_size=lambda: dtype.itemsize)
    assert tg.fits_relu_sq(x, torch.empty(hidden, width, device="meta", dtype=dtype)) == fits


# ---- attention ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("bounds, window, max_len, heads, width", [
    ([0, 1], 5, 1, 1, 4),                                            # one token
    ([0, 0, 4, 4, 9, 9], 2, 9, 2, 3),                                # empty documents, the bound too large
    ([0, 7, 40], 3, 33, 2, 4),                                       # window smaller than a block of queries
    ([0, 7, 40], 1000, 33, 1, 4),                                    # window larger than everything
    ([0, 100], 37, 100, 2, 4),                                       # blocks of 37 queries, 100 = 2 x 37 + 26
    ([0, 64, 128, 160], 32, 64, 1, 4)])                              # documents end where blocks end
def test_attention_reference__and_its_gradients_are_those_of_a_naive_softmax(bounds, window, max_len, heads, width):
    inputs = [randn(bounds[-1], heads, width, seed=seed, grad=True) for seed in range(3)]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    got = tg.attention_reference(*inputs, cu_seqlens, tg.AttentionSpan(max_len, window, 0.7))
    want = reference.attention(*inputs, cu_seqlens, window, 0.7)
    assert_equals_autograd(got, want, inputs, randn(bounds[-1], heads, width, seed=9))
    rounded = tg.attention_reference(*(x.bfloat16() for x in inputs), cu_seqlens, tg.AttentionSpan(max_len, window, .7))
    assert rounded.dtype == BF16
    assert_close(rounded, want, rtol=0, atol=0.06)                   # 8 bits, values up to about 3

class LinearVarlen:
    """In the place of torch's operation and its backward, which have no kernel for a CPU: q + 2 k + 3 v."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def forward(self, q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, scale=None, window_size=None):
        assert torch.equal(cu_seq_q, cu_seq_k) and max_q == max_k and not is_causal
        self.calls.append(("forward", cu_seq_q.tolist(), max_q, *window_size, scale))
        return q + 2 * k + 3 * v, torch.full(q.shape[1::-1], 3.0), torch.tensor([5, 7], dtype=torch.uint64)

    def backward(self, grad, q, k, v, out, logsumexp, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, rng_state,
                 scale=None, window_size=None):
        assert out.equal(q + 2 * k + 3 * v) and (logsumexp == 3).all() and rng_state.tolist() == [5, 7]
        self.calls.append(("backward", cu_seq_k.tolist(), max_q, *window_size, scale))
        return grad.clone(), 2 * grad, 3 * grad

@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_attention_varlen__is_one_graph_for_every_span(compiled):
    """Tensors, window, the bound of documents and the scale reach the operation as they are, forward and backward."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    attend = tg.attention_varlen
    if compiled:
        attend = torch.compile(attend, backend="aot_eager", dynamic=False, fullgraph=True)
    bounds = torch.tensor([0, 7, 7, 40], dtype=torch.int32)
    q, k, v = inputs = [randn(40, 2, 4, seed=seed, grad=True) for seed in range(3)]
    tg.torchs_varlen()
    linear = LinearVarlen()
    with torch.library._scoped_library("torch_attn", "IMPL") as library:
        library.impl("_varlen_attn", linear.forward, "CPU")
        library.impl("_varlen_attn_backward", linear.backward, "CPU")
        for max_len, window, scale in ((33, 3, 0.7), (40, 1000, 0.7), (33, 12, 0.1)):
            got = attend(*inputs, bounds, tg.AttentionSpan(max_len, window, scale))
            assert_equals_autograd(got, q + 2 * k + 3 * v, inputs, randn(40, 2, 4, seed=9))
            numbers = bounds.tolist(), max_len, window, 0, scale
            assert linear.calls == [("forward", *numbers), ("backward", *numbers)]
            linear.calls.clear()
    assert torch._dynamo.utils.counters["stats"].get("unique_graphs", 0) == compiled
    torch._dynamo.reset()


# ---- head and loss --------------------------------------------------------------------------------------------------

def head_loss(y, w, targets, weights, loss_weight=1.0, precision="plain", logits_dtype=None):
    weights, loss_weight = torch.tensor(weights, dtype=F64), torch.tensor(loss_weight, dtype=F64)
    return tg.HeadLoss.apply(y, w, targets, weights, loss_weight, precision, logits_dtype or y.dtype, tg.as_part(w))

@pytest.mark.recipe
@pytest.mark.parametrize("slots, length, weights", [
    (1, 1, (1.0,)), (1, 5, (1.0, 0.5, 0.25)), (3, 4, (1.0, 0.5)), (2, 2, (0.7, 0.5, 0.25)), (2, 6, (1.0, 0.0, 0.3))])
def test_HeadLoss__and_its_gradients_are_those_of_autograd(slots, length, weights):
    """Targets stop at the end of the slot. Each position has an incoming gradient of its own."""
    y, w = randn(slots * length, 6, seed=1, grad=True), randn(6, 11, seed=2, grad=True)
    targets, logits = randint(11, slots, length), (y @ w).view(slots, length, 11)
    want = torch.cat([reference.next_token_losses(*slot, weights) for slot in zip(logits, targets)])
    assert_equals_autograd(head_loss(y, w, targets, weights), want, (y, w), randn(slots * length, seed=4))
    alone = torch.cat([reference.next_token_losses(*slot, (1.0,)) for slot in zip(logits, targets)])
    assert_close(tg.next_token_losses(y, w, targets.flatten()), alone)

@pytest.mark.parametrize("targets", [1, 3])
def test_losses_with_gradient__as_a_compiler_takes_them_are_those_of_a_softmax(monkeypatch, targets):
    logits, ids = 6 * randn(40, 64, seed=1), randint(64, 40, targets, seed=2)
    logits[0], logits[1, 3], ids[2] = -80, 60, 5
    token_weights, found = randn(40, targets, seed=3).abs(), []
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
        grad = torch.empty_like(logits)
        found.append((tg.losses_with_gradient(logits, ids, token_weights, grad, 0.7), grad))
    for a, b in zip(*found):
        assert_close(a, b, rtol=1e-13, atol=1e-14)


# ---- fp8 ------------------------------------------------------------------------------------------------------------

def test_e4m3__rounds_to_the_nearest_number_and_saturates():
    x = 3 * randn(2000, dtype=F32)
    assert tg.e4m3(x, 0.01).double().equal(reference.nearest_fp8(x / 0.01, torch.float8_e4m3fn))
    assert tg.e4m3(torch.tensor([1e6, -1e6, 460.0]), 1.0).tolist() == [448, -448, 448]

@pytest.mark.recipe
@pytest.mark.parametrize("loss_weight", [1.0, 0.125, 3.0])
@pytest.mark.parametrize("weights", [(1.0, 0.5, 0.25), (1.0,)])
def test_HeadLoss__emulated(loss_weight, weights):
    y, w = randn(12, 16, seed=1, grad=True), (0.5 * randn(16, 32, seed=2)).requires_grad_()
    targets, rows = randint(32, 2, 6), loss_weight * (1 + torch.arange(12) % 3).double()
    losses = head_loss(y, w, targets, weights, loss_weight, "emulated")
    want = reference.fp8_head(y, w, targets, weights, loss_weight, rows)
    grads = torch.autograd.grad(losses, (y, w), rows)
    for got, name in zip((losses, *grads), ("losses", "grad_y", "grad_w")):
        assert_close(got, want[name], rtol=0, atol=1e-12 * float(want[name].abs().max()))

@pytest.mark.parametrize("precision", ["plain", "emulated", "fp8"])
def test_HeadLoss__a_loss_weight_of_zero_has_gradients_of_zero(precision):
    y, w = randn(16, 16, seed=1, dtype=BF16, grad=True), randn(16, 32, seed=2, dtype=BF16, grad=True)
    losses = head_loss(y, w, torch.arange(16)[None], (1.0, 0.5), 0.0, precision, BF16)
    assert losses.isfinite().all()
    assert not any(grad.any() for grad in torch.autograd.grad(losses, (y, w), torch.zeros_like(losses)))

@pytest.mark.parametrize("power", [-7, 5])
@pytest.mark.parametrize("precision, dtype", [("emulated", F32), ("emulated", BF16), ("plain", F64)])
def test_HeadLoss__a_loss_weight_of_two_to_the_k_scales_gradients_bit_by_bit(precision, dtype, power):
    """It moves the fp8 scale and never the payload; a weight of 2^k only in the payload would meet its limits."""
    leaves = randn(8, 16, seed=1, dtype=dtype, grad=True), (0.3 * randn(16, 32, seed=2)).to(dtype).requires_grad_()
    found = []
    for loss_weight in (1.0, 2.0**power):
        losses = head_loss(*leaves, torch.arange(8).view(2, 4), (1.0, 0.5), loss_weight, precision,
                           F64 if dtype == F64 else BF16)
        rows = loss_weight * (1 + torch.arange(8) % 2)
        found.append(torch.autograd.grad(losses, leaves, rows.to(losses.dtype)))
    for one, many in zip(*found):
        assert (one * 2.0**power).equal(many)

@pytest.mark.parametrize("a, b, out", [
    (torch.float8_e4m3fn, torch.float8_e4m3fn, BF16), (torch.float8_e5m2, torch.float8_e4m3fn, BF16),
    (torch.float8_e4m3fn, torch.float8_e5m2, F32)], ids=str)
def test_fp8_product__the_devices_is_the_emulated_one(a, b, out):
    """F.scaled_mm exists on CPUs too. bf16 out: one rounding of 8 bits; f32 out: other orders of addition."""
    left, right = (20 * randn(16, 48, seed=1, dtype=F32)).to(a), (20 * randn(48, 32, seed=2, dtype=F32)).to(b)
    scale = torch.tensor(0.37, dtype=F64)
    want = (left.double() @ right.double()) * scale
    native = tg.fp8_product(left, right, scale, True, out)
    emulated = tg.fp8_product(left, right, scale, False, F32)
    assert native.dtype == out
    for got, relative in ((native, 2.0**-8 if out == BF16 else 1e-6), (emulated, 1e-6)):
        assert_close(got, want, rtol=relative, atol=1e-6 * float(want.abs().max()))


# ---- sums of rows ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("rows", [
    [3], [5] * 9, [7, 0, 3, 1], [0, 10, 10, 0], (11 * np.random.default_rng(0).random(200)**4).astype(int).tolist(),
    list(range(11)) * 3], ids=["one line", "the same row", "no row twice", "first and last", "skewed", "all"])
@pytest.mark.parametrize("width", [1, 32])
@pytest.mark.parametrize("dtype", [BF16, F32, F64])
def test_add_rows__to_what_is_there(rows, width, dtype):
    """Against a plain loop on integers, bit by bit, in the dtype of the sums and not of the gradient."""
    grad = (randint(17, len(rows), width) - 8).to(dtype)
    sums = (randint(17, 11, width, seed=1) - 8).to(torch.promote_types(dtype, F32))
    sums[:, 0] += 1024                                                        # bf16 would lose what is added to it
    want = sums.tolist()
    for row, line in zip(rows, grad.tolist()):
        want[row] = [a + b for a, b in zip(want[row], line)]
    place, index = sums.data_ptr(), torch.tensor(rows, dtype=torch.int32)
    assert tg.add_rows(sums, index, grad) is None
    assert sums.tolist() == want and sums.data_ptr() == place

def test_add_rows__the_operator_says_what_it_changes():
    sums, index, grad = torch.zeros(6, 3), torch.tensor([[1, 5], [1, 0]], dtype=torch.int32), torch.ones(2, 2, 3)
    torch.library.opcheck(torch.ops.train_gpt.add_rows.default, (sums, index, grad))
    schema = torch.ops.train_gpt.add_rows.default._schema
    assert [x.name for x in schema.arguments if x.is_write] == ["row_grads"] and not schema.returns

@pytest.mark.parametrize("shape", [(7,), (2, 3, 4)])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_RowLookup__an_embedding_whose_gradient_goes_to_the_sums(shape, compiled):
    """Compiled: the operator stays in the graph of the backward, and there is no gradient of the table in it."""
    graphs = []

    def keep(graph, _):
        graphs.append(str(graph.graph))
        return make_boxed_func(graph)

    lookup = tg.RowLookup.apply
    if compiled:
        torch._dynamo.reset()
        lookup = torch.compile(lambda *x: tg.RowLookup.apply(*x), backend=aot_autograd(fw_compiler=keep),
                               fullgraph=True)
    source, sums = randn(11, 6, seed=1, grad=True), randn(11, 6, seed=2)
    theirs, before = source.detach().clone().requires_grad_(), sums.clone()
    index, seed = randint(9, *shape).int(), randn(*shape, 6, seed=3)
    F.embedding(index, theirs).backward(seed)
    for calls in (1, 2):                                                      # they add up
        got = lookup(source, index, sums)
        assert got.equal(F.embedding(index, theirs))
        got.backward(seed)
        assert source.grad is None
        assert_close(sums, before + calls * theirs.grad)
    if compiled:
        assert len(graphs) == 2 and "add_rows" in graphs[1] and "embedding_dense_backward" not in graphs[1]
    torch._dynamo.reset()

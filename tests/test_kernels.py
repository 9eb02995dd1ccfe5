"""Room 4: each operation against reference.py, loops or autograd in float64, forward and backward."""
import itertools
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from common import (BF16, F32, F64, angles_by_channel, compile_for_gpu, needs_triton, randn, resource_usage,
                    run_interpreted)
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import train_gpt as tg

ROUNDING = {F32: 1e-6, torch.float16: 2.0**-11, BF16: 2.0**-8}       # one
MOST_SHARED = {80: 166_912, 90: 232_448, 100: 232_448}        # bytes: CUDA programming guide, table of limits
# torch 2.11 has none, and every later release that was tried has one.
HAS_SCALED_MM = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU")
needs_scaled_mm = pytest.mark.skipif(not HAS_SCALED_MM, reason=f"torch {torch.__version__}: no F.scaled_mm on a CPU")
TENSOR_CORES = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}

def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return randn(*shape, seed=seed, dtype=dtype).requires_grad_()

def randint(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))

def assert_close(got, want, rtol=1e-12, atol=1e-13):
    """Default: a few roundings of float64 on numbers of order 1."""
    got, want = (torch.as_tensor(x, dtype=F64).detach() for x in (got, want))
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)

def assert_close_for_its_size(got: Tensor, want: Tensor, share: float, rtol: float = 0.0) -> None:
    """Off by no more than this share of the largest wanted number."""
    assert_close(got, want, rtol=rtol, atol=share * float(want.abs().max()))

def assert_equals_autograd(got, want, inputs, grad):
    assert_close(got, want)
    found = torch.autograd.grad(got, inputs, grad)
    for a, b in zip(found, torch.autograd.grad(want, inputs, grad), strict=True):
        assert_close(a, b)


# ---- norm, rotation, MLP --------------------------------------------------------------------------------------------
@pytest.mark.recipe
@pytest.mark.parametrize("shape, size", [((5,), 1.0), ((3, 16), 1e-3), ((2, 3, 7), 1e-5), ((4, 12), 0.0)])
def test_rms_norm(shape, size):
    x = size * randn(*shape, seed=1)
    rows = []
    for row in x.reshape(-1, shape[-1]).tolist():
        mean_square = sum(value * value for value in row) / len(row)
        rows.append([value / math.sqrt(mean_square + 2.0**-23) for value in row])
    assert_close(tg.rms_norm(x).reshape(-1, shape[-1]), rows)

@pytest.mark.parametrize("length, heads, width", [(1, 1, 8), (5, 2, 16)])
def test_apply_rotary__is_a_complex_product_with_exp_minus_i_angle(length, heads, width):
    x = randn(length, heads, width, seed=2)
    frequencies = 3 * randn(width // 4, seed=3)
    positions = torch.arange(length)[:, None].expand(length, heads)
    by_channel = angles_by_channel(positions[..., None] * frequencies)
    got = tg.apply_rotary(x, by_channel.cos(), by_channel.sin())
    assert_close(got, reference.apply_rotary(x, positions, frequencies.tolist()))
    assert got[..., width // 2:].equal(x[..., width // 2:]), "half of the features do not turn"

@pytest.mark.parametrize("lead, D, width", [((1,), 1, 1), ((3,), 4, 7), ((2, 5), 6, 24)])
def test_relu_sq_mlp(lead, D, width):
    n = leaf(*lead, D)
    up = leaf(width, D, seed=1)
    down = leaf(width, D, seed=2)
    got = tg.relu_sq_mlp(n, tg.as_matrix(up), tg.as_matrix(down))
    want = (n @ up.t()).relu().square() @ down
    assert_equals_autograd(got, want, (n, up, down), randn(*lead, D, seed=3))

@pytest.mark.parametrize("dtype", [F64, F32, BF16])
def test_relu_sq_mlp__what_relu_cuts_off_has_no_gradient(monkeypatch, dtype):
    """Not even one that rounding has left: an optimizer may look at the sign of what is there."""
    n = randn(9, 6)
    up = randn(24, 6, seed=1)
    down = randn(6, 24, seed=2)
    pre = n @ up.t()
    want = 2 * pre.relu() * (n @ down)
    seen = []

    def keep_factor(_: tg.WeightMatrix, a: Tensor, __: Tensor) -> None:
        seen.append(a)

    monkeypatch.setattr(tg.WeightMatrix, "add_gradient", keep_factor)
    parts = [tg.as_matrix(x.to(dtype).requires_grad_()) for x in (up, down.t().contiguous())]
    rounded = n.to(dtype)
    tg.relu_sq_mlp(rounded, *parts).backward(rounded)
    found = seen[0]                                                           # by pre, a factor of the up gradient
    assert found.dtype == dtype and (found[pre.to(dtype) <= 0] == 0).all()
    assert_close_for_its_size(found, want, 8 * torch.finfo(dtype).eps)

def mend_interpreter() -> None:
    """The interpreter is wrong in bf16: it cuts numbers off, and multiplies their 16 bits. Here torch converts them."""
    from triton.runtime import interpreter
    types = dict(bf16=BF16, fp16=torch.float16, fp32=F32, fp64=F64)

    def as_torch(x: Any) -> Tensor:
        found = torch.from_numpy(np.ascontiguousarray(x.data))
        return found.view(BF16) if x.dtype.scalar.is_bf16() else found

    def cast(self: Any, x: Any, kind: Any, *_: Any) -> Any:
        if kind.scalar.name not in types or not x.dtype.scalar.is_floating():
            return unchanged(self, x, kind)
        found = as_torch(x).to(types[kind.scalar.name])
        if found.dtype == BF16:
            found = found.view(torch.uint16)
        return interpreter.TensorHandle(found.numpy(), kind.scalar)

    def dot(_: Any, a: Any, b: Any, total: Any, *__: Any) -> Any:
        product = as_torch(a).float() @ as_torch(b).float()
        return interpreter.TensorHandle(product.numpy() + total.data, total.dtype.scalar)

    builder = interpreter.InterpreterBuilder
    unchanged = builder.cast_impl
    builder.create_fp_ext = builder.create_fp_trunc = builder.create_fp_to_fp = cast
    builder.create_dot = dot

INTERPRETED = (16, 32, 16), (1, 8, 8), (33, 40, 24), (50, 96, 56), (7, 200, 32), (64, 64, 128)    # (N, F, K)

def interpret() -> None:
    """Both passes against float64, ragged at every edge, by one program and three. Forward reads no squares: NaN."""
    torch.set_num_threads(1)
    mend_interpreter()
    for dtype, shape, programs in itertools.product(ROUNDING, INTERPRETED, (1, 3)):
        count, columns, depth = shape
        x = randn(count, depth, dtype=dtype)
        w = randn(columns, depth, seed=1, dtype=dtype)
        product = x.double() @ w.double().t()
        exact = product.clamp(min=0).square()
        kept = exact.to(dtype)
        nan = torch.full_like(kept, torch.nan)
        grad = 2 * product * kept.double().sqrt()
        kernel = tg.triton_jit(tg.relu_sq_kernel)[(programs,)]
        for backward, squares, want in ((False, nan, exact), (True, kept, grad)):
            out = nan.clone()
            kernel(x, w, squares, out, *shape, BACKWARD=backward, BLOCK_M=16, BLOCK_N=32, BLOCK_K=16)
            largest = float((out.double() - want).abs().max())
            error = largest / float(want.abs().max())
            assert error <= ROUNDING[dtype], (dtype, shape, programs, backward, error)

@needs_triton
@pytest.mark.skipif((tg.package_version("triton") or "").startswith("3.6."),
                    reason="the interpreter of Triton 3.6 does not run with NumPy 2.4 or later")
def test_relu_sq_kernel__interpreted() -> None:
    run_interpreted("import test_kernels; test_kernels.interpret()")

@needs_triton
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("capability", tg.RELU_SQ_TILES)
def test_relu_sq_kernel__compiles_without_a_gpu(capability, backward, tmp_path, monkeypatch):
    """For each card that takes it: tensor cores, loads ahead, no spills, within shared memory, offsets of 64 bits."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    card = 10 * capability[0] + capability[1]
    tile, stages = tg.RELU_SQ_TILES[capability]
    constants = dict(BACKWARD=backward, **tile)
    options = dict(num_warps=constants.pop("num_warps"), num_stages=stages[backward])
    types = dict.fromkeys(("x", "w", "squares", "out"), "*bf16")
    types |= dict.fromkeys(("M", "N", "K"), "i32")
    divisible = {(at,): [["tt.divisibility", 16]] for at in range(len(types))}
    made = compile_for_gpu(card, tg.relu_sq_kernel, types, constants, divisible, **options)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(made.asm["cubin"])
    used = resource_usage(cubin)
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
    major, minor = capability
    card = SimpleNamespace(major=major, minor=minor)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    w = torch.empty(hidden, width, device="meta", dtype=dtype)
    x = SimpleNamespace(dtype=dtype, shape=(5, width), is_cuda=on_cuda, device="cuda", element_size=w.element_size)
    assert tg.fits_relu_sq(x, w) == fits


# ---- attention ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bounds, window, max_len, heads, width", [
    ([0, 1], 5, 1, 1, 4),                                            # one token
    ([0, 0, 4, 4, 9, 9], 2, 9, 2, 3),                                # empty documents, the bound too large
    ([0, 7, 40], 3, 33, 2, 4),                                       # window smaller than a block of queries
    ([0, 7, 40], 1000, 33, 1, 4),                                    # window larger than everything
    ([0, 100], 37, 100, 2, 4),                                       # blocks of 37 queries, 100 = 2 x 37 + 26
    ([0, 36, 75, 110, 149, 156], 1000, 39, 2, 4),                    # blocks of 38; shorter ones would hide a key
    ([0, 64, 128, 160], 32, 64, 1, 4)])                              # documents end where blocks end
def test_attention_reference__and_its_gradients_are_those_of_a_naive_softmax(bounds, window, max_len, heads, width):
    shape = bounds[-1], heads, width
    inputs = [leaf(*shape, seed=seed) for seed in range(3)]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    span = tg.AttentionArgs(max_len, window, 0.7)
    got = tg.attention_reference(*inputs, cu_seqlens, span)
    want = reference.attention(*inputs, cu_seqlens, window, 0.7)
    assert_equals_autograd(got, want, inputs, randn(*shape, seed=9))
    in_bf16 = [x.bfloat16() for x in inputs]
    rounded = tg.attention_reference(*in_bf16, cu_seqlens, span)
    assert rounded.dtype == BF16
    assert_close(rounded, want, rtol=0, atol=0.06)                   # 8 bits, values up to about 3

class LinearVarlen:
    """In the place of torch's operation and its backward, which have no kernel for a CPU: q + 2 k + 3 v."""
    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def forward(self, q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, scale=None, window_size=None):
        assert torch.equal(cu_seq_q, cu_seq_k) and max_q == max_k and not is_causal
        self.calls.append(("forward", cu_seq_q.tolist(), max_q, *window_size, scale))
        logsumexp = torch.full(q.shape[1::-1], 3.0)
        return q + 2 * k + 3 * v, logsumexp, torch.tensor([5, 7], dtype=torch.uint64)

    def backward(self, grad, q, k, v, out, logsumexp, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, rng_state,
                 scale=None, window_size=None):
        assert out.equal(q + 2 * k + 3 * v)
        assert (logsumexp == 3).all() and rng_state.tolist() == [5, 7]
        self.calls.append(("backward", cu_seq_k.tolist(), max_q, *window_size, scale))
        return grad.clone(), 2 * grad, 3 * grad

@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_attention_varlen__is_one_graph_for_every_span(compiled):
    """Tensors, window, the bound of documents and the scale reach the operation as they are, forward and backward."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    other = tg.AttentionArgs(1, 1, 1.0)
    assert tg.ATTENTION_ARGS[other.name] is other and tg.AttentionArgs(1, 2, 1.0).name != other.name
    attend = tg.attention_varlen
    if compiled:
        attend = torch.compile(attend, backend="aot_eager", dynamic=False, fullgraph=True)
    bounds = torch.tensor([0, 7, 7, 40], dtype=torch.int32)
    q, k, v = (leaf(40, 2, 4, seed=seed) for seed in range(3))
    grad = randn(40, 2, 4, seed=9)
    tg.torch_varlen_ops()
    linear = LinearVarlen()
    with torch.library._scoped_library("torch_attn", "IMPL") as library:
        library.impl("_varlen_attn", linear.forward, "CPU")
        library.impl("_varlen_attn_backward", linear.backward, "CPU")
        for max_len, window, scale in ((33, 3, 0.7), (40, 1000, 0.7), (33, 12, 0.1)):
            got = attend(q, k, v, bounds, tg.AttentionArgs(max_len, window, scale, "a layer"))
            assert_equals_autograd(got, q + 2 * k + 3 * v, (q, k, v), grad)
            numbers = bounds.tolist(), max_len, window, 0, scale
            assert linear.calls == [("forward", *numbers), ("backward", *numbers)]
            linear.calls.clear()
    assert torch._dynamo.utils.counters["stats"].get("unique_graphs", 0) == compiled
    torch._dynamo.reset()


# ---- head and loss --------------------------------------------------------------------------------------------------
def head_loss(y, w, targets, weights, loss_scale=1.0, precision="plain", logits_dtype=None):
    weights = torch.tensor(weights, dtype=F64)
    loss_scale = torch.tensor(loss_scale, dtype=F64)
    return tg.HeadLoss.apply(y, w, targets, weights, loss_scale, precision, logits_dtype or y.dtype, tg.as_matrix(w))

@pytest.mark.recipe
@pytest.mark.parametrize("slots, length, weights", [
    (1, 1, (1.0,)), (1, 5, (1.0, 0.5, 0.25)), (3, 4, (1.0, 0.5)), (2, 2, (0.7, 0.5, 0.25)), (2, 6, (1.0, 0.0, 0.3))])
def test_HeadLoss__and_its_gradients_are_those_of_autograd(slots, length, weights):
    """Targets stop at the end of the slot. Each position has an incoming gradient of its own."""
    def wanted(weights: tuple[float, ...]) -> Tensor:
        logits = (y @ w).view(slots, length, 11)
        return torch.cat([reference.next_token_losses(*slot, weights) for slot in zip(logits, targets)])

    y = leaf(slots * length, 6, seed=1)
    w = leaf(6, 11, seed=2)
    targets = randint(11, slots, length)
    losses = head_loss(y, w, targets, weights)
    assert_equals_autograd(losses, wanted(weights), (y, w), randn(slots * length, seed=4))
    assert_close(tg.next_token_losses(y, w, targets.flatten()), wanted((1.0,)))

@pytest.mark.parametrize("targets", [1, 3])
def test_mtp_losses_and_grad__as_a_compiler_takes_them_are_those_of_a_softmax(monkeypatch, targets):
    logits = 6 * randn(40, 64, seed=1)
    logits[0] = -80
    logits[1, 3] = 60
    ids = randint(64, 40, targets, seed=2)
    ids[2] = 5
    token_weights = randn(40, targets, seed=3).abs()
    found = []
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
        grad = torch.empty_like(logits)
        found.append((tg.mtp_losses_and_grad(logits, ids, token_weights, grad, 0.7), grad))
    for a, b in zip(*found):
        assert_close(a, b, rtol=1e-13, atol=1e-14)


# ---- fp8 ------------------------------------------------------------------------------------------------------------
def test_e4m3__rounds_to_the_nearest_number_and_saturates():
    x = 3 * randn(2000, dtype=F32)
    want = reference.nearest_fp8(x / 0.01, torch.float8_e4m3fn)
    assert tg.quantize_e4m3(x, 0.01).double().equal(want)
    too_large = torch.tensor([1e6, -1e6, 460.0])
    assert tg.quantize_e4m3(too_large, 1.0).tolist() == [448, -448, 448]

@pytest.mark.recipe
@pytest.mark.parametrize("loss_scale", [1.0, 0.125, 3.0])
@pytest.mark.parametrize("weights", [(1.0, 0.5, 0.25), (1.0,)])
def test_HeadLoss__emulated(loss_scale, weights):
    y = leaf(12, 16, seed=1)
    w = (0.5 * randn(16, 32, seed=2)).requires_grad_()
    targets = randint(32, 2, 6)
    rows = loss_scale * (1 + torch.arange(12) % 3).double()
    losses = head_loss(y, w, targets, weights, loss_scale, "emulated")
    want = reference.fp8_head(y, w, targets, weights, loss_scale, rows)
    grads = torch.autograd.grad(losses, (y, w), rows)
    for got, name in zip((losses, *grads), ("losses", "grad_y", "grad_w")):
        assert_close_for_its_size(got, want[name], 1e-12)

@pytest.mark.parametrize("precision", ["plain", "emulated", pytest.param("fp8", marks=needs_scaled_mm)])
def test_HeadLoss__a_loss_weight_of_zero_has_gradients_of_zero(precision):
    y = leaf(16, 16, seed=1, dtype=BF16)
    w = leaf(16, 32, seed=2, dtype=BF16)
    targets = torch.arange(16)[None]
    losses = head_loss(y, w, targets, (1.0, 0.5), 0.0, precision, BF16)
    assert losses.isfinite().all()
    grads = torch.autograd.grad(losses, (y, w), torch.zeros_like(losses))
    assert not any(grad.any() for grad in grads)

@pytest.mark.parametrize("power", [-7, 5])
@pytest.mark.parametrize("precision, dtype", [("emulated", F32), ("emulated", BF16), ("plain", F64)])
def test_HeadLoss__a_loss_weight_of_two_to_the_k_scales_gradients_bit_by_bit(precision, dtype, power):
    """It moves the fp8 scale and never the payload; a weight of 2^k only in the payload would meet its limits."""
    y = leaf(8, 16, seed=1, dtype=dtype)
    w = (0.3 * randn(16, 32, seed=2)).to(dtype).requires_grad_()
    targets = torch.arange(8).view(2, 4)
    logits_dtype = F64 if dtype == F64 else BF16
    found = []
    for loss_scale in (1.0, 2.0**power):
        losses = head_loss(y, w, targets, (1.0, 0.5), loss_scale, precision, logits_dtype)
        rows = loss_scale * (1 + torch.arange(8) % 2)
        found.append(torch.autograd.grad(losses, (y, w), rows.to(losses.dtype)))
    for one, many in zip(*found):
        assert (one * 2.0**power).equal(many)

@needs_scaled_mm
@pytest.mark.parametrize("a, b, out", [
    (torch.float8_e4m3fn, torch.float8_e4m3fn, BF16), (torch.float8_e5m2, torch.float8_e4m3fn, BF16),
    (torch.float8_e4m3fn, torch.float8_e5m2, F32)], ids=str)
def test_fp8_product__the_devices_is_the_emulated_one(a, b, out):
    """F.scaled_mm exists on CPUs too. bf16 out: one rounding of 8 bits; f32 out: other orders of addition."""
    left = (20 * randn(16, 48, seed=1, dtype=F32)).to(a)
    right = (20 * randn(48, 32, seed=2, dtype=F32)).to(b)
    scale = torch.tensor(0.37, dtype=F64)
    want = (left.double() @ right.double()) * scale
    native = tg.fp8_matmul(left, right, scale, use_scaled_mm=True, out_dtype=out)
    assert native.dtype == out
    assert_close_for_its_size(native, want, 1e-6, rtol=2.0**-8 if out == BF16 else 1e-6)
    emulated = tg.fp8_matmul(left, right, scale, use_scaled_mm=False, out_dtype=F32)
    assert_close_for_its_size(emulated, want, 1e-6, rtol=1e-6)


# ---- sums of rows ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rows", [
    [3], [5] * 9, [7, 0, 3, 1], [0, 10, 10, 0], (11 * np.random.default_rng(0).random(200)**4).astype(int).tolist(),
    list(range(11)) * 3], ids=["one line", "the same row", "no row twice", "first and last", "skewed", "all"])
@pytest.mark.parametrize("width", [1, 32])
@pytest.mark.parametrize("dtype", [BF16, F32, F64])
def test_add_rows__to_what_is_there(rows, width, dtype):
    """Against a plain loop on integers, bit by bit, in the dtype of the sums and not of the gradient."""
    grad = (randint(17, len(rows), width) - 8).to(dtype)
    exact = torch.promote_types(dtype, F32)
    sums = (randint(17, 11, width, seed=1) - 8).to(exact)
    sums[:, 0] += 1024                                                        # bf16 would lose what is added to it
    want = sums.tolist()
    for row, line in zip(rows, grad.tolist()):
        want[row] = [a + b for a, b in zip(want[row], line)]
    place = sums.data_ptr()
    assert tg.add_rows(sums, torch.tensor(rows, dtype=torch.int32), grad) is None
    assert sums.tolist() == want and sums.data_ptr() == place

def test_add_rows__the_operator_says_what_it_changes():
    add_rows = torch.ops.train_gpt.add_rows.default
    index = torch.tensor([[1, 5], [1, 0]], dtype=torch.int32)
    torch.library.opcheck(add_rows, (torch.zeros(6, 3), index, torch.ones(2, 2, 3)))
    schema = add_rows._schema
    assert [x.name for x in schema.arguments if x.is_write] == ["row_grads"] and not schema.returns

@pytest.mark.parametrize("shape", [(7,), (2, 3, 4)])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_RowLookup__an_embedding_whose_gradient_goes_to_the_sums(shape, compiled):
    """Compiled: the operator stays in the graph of the backward, and there is no gradient of the table in it."""
    graphs = []

    def keep(graph, _):
        graphs.append(str(graph.graph))
        return make_boxed_func(graph)

    def lookup(source: Tensor, index: Tensor, sums: Tensor) -> Tensor:
        return tg.RowLookup.apply(source, index, sums)

    if compiled:
        torch._dynamo.reset()
        lookup = torch.compile(lookup, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    source = leaf(11, 6, seed=1)
    theirs = leaf(11, 6, seed=1)
    sums = randn(11, 6, seed=2)
    before = sums.clone()
    index = randint(9, *shape).int()
    grad = randn(*shape, 6, seed=3)
    F.embedding(index, theirs).backward(grad)
    for calls in (1, 2):                                                      # they add up
        got = lookup(source, index, sums)
        assert got.equal(F.embedding(index, theirs))
        got.backward(grad)
        assert source.grad is None
        assert_close(sums, before + calls * theirs.grad)
    if compiled:
        assert len(graphs) == 2 and "add_rows" in graphs[1] and "embedding_dense_backward" not in graphs[1]
    torch._dynamo.reset()

"""Section 7: forward and backward of each operation, compared with reference.py, loops or autograd in float64."""
import itertools
import importlib
import re
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from common import (BF16, F32, F64, angles_by_channel, compile_for_gpu, needs_scaled_mm, needs_triton, randn,
                    run_interpreted, small)
from torch import Tensor

import train_gpt as tg

MAX_SHARED_BYTES = {80: 166_912, 90: 232_448, 100: 232_448}  # CUDA programming guide, table of limits
TENSOR_CORES = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}

def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return randn(*shape, seed=seed, dtype=dtype).requires_grad_()

def randint(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))

def assert_close(got: Any, expected: Any, rtol: float = 1e-12, atol: float = 1e-13) -> None:
    """Compare in float64; the default tolerances are a few rounding errors of values of order 1."""
    got, expected = (torch.as_tensor(x, dtype=F64).detach() for x in (got, expected))
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)

def assert_close_to_largest(got: Tensor, expected: Tensor, fraction: float, rtol: float = 0.0) -> None:
    """Compare with an absolute tolerance: a fraction of the largest expected magnitude."""
    assert_close(got, expected, rtol=rtol, atol=fraction * float(expected.abs().max()))

def assert_equals_autograd(got: Tensor, expected: Tensor, inputs: Sequence[Tensor], grad: Tensor) -> None:
    """Compare two outputs, and their gradients for this gradient of the output."""
    assert_close(got, expected)
    grads = torch.autograd.grad(got, inputs, grad)
    for grad_got, grad_expected in zip(grads, torch.autograd.grad(expected, inputs, grad), strict=True):
        assert_close(grad_got, grad_expected)


# ---- norm, rotation, MLP --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("eager_cpu", [True, False])
def test_rms_norm__equals_the_reference_on_slices_of_other_tensors(eager_cpu, monkeypatch) -> None:
    """With a row of zeros, where epsilon decides. The eager form rounds to the dtype of x, so it must not get bf16."""
    x = leaf(5, 3, 8)
    assert tg.is_eager_cpu(x) and not tg.is_eager_cpu(x.bfloat16())
    monkeypatch.setattr(tg, "is_eager_cpu", lambda _: eager_cpu)
    x.data[2] = 0
    assert_equals_autograd(tg.rms_norm(x[:, 1]), reference.rms_norm(x[:, 1]), [x], randn(5, 8, seed=1))

@pytest.mark.parametrize("eager_cpu", [True, False])
def test_apply_rotary__multiplies_complex_numbers_by_exp_minus_i_angle(eager_cpu, monkeypatch) -> None:
    """The second half of the channels does not change."""
    monkeypatch.setattr(tg, "is_eager_cpu", lambda _: eager_cpu)
    x = randn(5, 2, 16, seed=2)
    frequencies = 3 * randn(4, seed=3)
    positions = torch.arange(5)[:, None].expand(5, 2)
    by_channel = angles_by_channel(positions[..., None] * frequencies)
    got = tg.apply_rotary(x, by_channel.cos(), by_channel.sin())
    assert_close(got, reference.apply_rotary(x, positions, frequencies.tolist()))
    assert got[..., 8:].equal(x[..., 8:])

@pytest.mark.recipe
@pytest.mark.parametrize("batch_shape, D, hidden_dim", [((1,), 1, 1), ((3,), 4, 7), ((2, 5), 6, 24)])
def test_relu_sq_mlp(batch_shape, D, hidden_dim) -> None:
    """It also equals the composition that forks with another activation use."""
    x = leaf(*batch_shape, D)
    up = leaf(hidden_dim, D, seed=1)
    down = leaf(hidden_dim, D, seed=2)
    got = tg.relu_sq_mlp(x, tg.as_matrix(up), tg.as_matrix(down))
    expected = (x @ up.t()).relu().square() @ down
    grad = randn(*batch_shape, D, seed=3)
    assert_equals_autograd(got, expected, (x, up, down), grad)
    hidden = tg.linear_main_grad(x, tg.as_matrix(up)).relu().square()
    composed = tg.linear_main_grad(hidden, tg.as_matrix(down).t())
    assert_equals_autograd(composed, (x @ up.t()).relu().square() @ down, (x, up, down), grad)

def interpret_relu_sq() -> None:
    """Compare both passes with float64, with partial tiles at every edge, for 1 and 3 programs.

    In the forward pass `squares` is NaN, because the kernel must not read it.
    """
    kernel = tg.triton_jit(tg.relu_sq_kernel)
    tolerances = (F32, 1e-6), (torch.float16, 2.0**-11)
    for (dtype, tolerance), shape, programs in itertools.product(tolerances, ((33, 40, 24), (7, 72, 32)), (1, 3)):
        M, N, K = shape
        x = randn(M, K, dtype=dtype)
        w = randn(N, K, seed=1, dtype=dtype)
        product = x.double() @ w.double().t()
        exact = product.clamp(min=0).square()
        rounded_out = exact.to(dtype)
        nan = torch.full_like(rounded_out, torch.nan)
        grad = 2 * product * rounded_out.double().sqrt()
        for backward, squares, expected in ((False, nan, exact), (True, rounded_out, grad)):
            out = nan.clone()
            kernel[(programs,)](x, w, squares, out, *shape, BACKWARD=backward, BLOCK_M=16, BLOCK_N=32, BLOCK_K=16)
            assert_close_to_largest(out, expected, tolerance)

@needs_triton
@pytest.mark.skipif((tg.package_version("triton") or "").startswith("3.6."),
                    reason="the interpreter of Triton 3.6 does not run with NumPy 2.4 or later")
@pytest.mark.parametrize("function", ["interpret_relu_sq", "interpret_loss"])
def test_kernels__interpreted(function) -> None:
    """A new process runs the function, because Triton's interpreter is chosen at import."""
    run_interpreted(f"import test_kernels; test_kernels.torch.set_num_threads(1); test_kernels.{function}()")

@needs_triton
@pytest.mark.parametrize("backward", [pytest.param(False, marks=pytest.mark.slow), True], ids=["forward", "backward"])
@pytest.mark.parametrize("capability", tg.RELU_SQ_TILES)
def test_relu_sq_kernel__compiles_without_a_gpu(capability, backward) -> None:
    """Tensor cores and asynchronous copies are used, no register is spilled, shared memory suffices for it."""
    sm = 10 * capability[0] + capability[1]
    tile, stages = tg.RELU_SQ_TILES[capability]
    constants = dict(BACKWARD=backward, **tile)
    options = dict(num_warps=constants.pop("num_warps"), num_stages=stages[backward])
    types = dict.fromkeys(("x", "w", "squares", "out"), "*bf16") | dict.fromkeys(("M", "N", "K"), "i32")
    divisible = {(i,): [["tt.divisibility", 16]] for i in range(len(types))}
    kernel = compile_for_gpu(sm, tg.relu_sq_kernel, types, constants, divisible, **options)
    assert kernel.metadata.shared <= MAX_SHARED_BYTES[sm]
    assert TENSOR_CORES[sm] in kernel.asm["ptx"] and "cp.async" in kernel.asm["ptx"]
    for line in kernel.asm["ttir"].splitlines():             # no pointer offset has 32 bits
        assert "tt.addptr" not in line or re.search(r"(\bi|xi)64\b", line.rpartition(",")[2]), line

@pytest.mark.parametrize("dtype, D, mlp_dim, capability, on_cuda, fits", [
    (BF16, 768, 3072, (9, 0), True, True), (torch.float16, 8, 16, (8, 0), True, True),
    (BF16, 768, 3072, (8, 9), True, False), (F32, 768, 3072, (9, 0), True, False),
    (BF16, 100, 3072, (9, 0), True, False), (BF16, 768, 100, (9, 0), True, False), (BF16, 8, 16, (9, 0), False, False)])
def test_relu_sq_supports(monkeypatch, dtype, D, mlp_dim, capability, on_cuda, fits) -> None:
    """The kernel needs a 16-bit dtype, dimensions that TMA can align, a GPU, and a capability with tile sizes."""
    properties = SimpleNamespace(major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    w = torch.empty(mlp_dim, D, device="meta", dtype=dtype)
    x = SimpleNamespace(dtype=dtype, shape=(5, D), is_cuda=on_cuda, device="cuda", element_size=w.element_size)
    assert tg.relu_sq_supports(x, w) == fits


# ---- attention ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bounds, window, max_seqlen, num_heads, head_dim", [
    ([0, 1], 5, 1, 1, 4),                                            # one token
    ([0, 0, 4, 4, 9, 9], 2, 9, 2, 3),                                # empty documents, max_seqlen too large
    ([0, 7, 40], 3, 33, 2, 4),                                       # window smaller than a block of queries
    ([0, 7, 40], 1000, 33, 1, 4),                                    # window larger than the sequence
    ([0, 36, 75, 110, 149, 156], 1000, 39, 2, 4),                    # blocks of 38; shorter ones miss a key
    ([0, 64, 128, 160], 32, 64, 1, 4)])                              # documents end where blocks end
def test_attention_reference__and_its_gradients_equal_a_naive_softmax(bounds, window, max_seqlen, num_heads,
                                                                         head_dim) -> None:
    """In bf16 the dtype is kept, and the result is close."""
    shape = bounds[-1], num_heads, head_dim
    inputs = [leaf(*shape, seed=seed) for seed in range(3)]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    tg.ATTENTION_ARGS["test"] = tg.AttentionArgs(max_seqlen, window, 0.7)
    got = tg.attention_reference(*inputs, cu_seqlens, "test")
    expected = reference.attention(*inputs, cu_seqlens, window, 0.7)
    assert_equals_autograd(got, expected, inputs, randn(*shape, seed=9))
    inputs_bf16 = [x.bfloat16() for x in inputs]
    rounded = tg.attention_reference(*inputs_bf16, cu_seqlens, "test")
    assert rounded.dtype == BF16
    assert_close(rounded, expected, rtol=0, atol=0.06)  # 8 bits, values up to about 3

class LinearVarlen:
    """Replaces torch's varlen attention, which has no CPU kernel, with q + 2 k + 3 v; records arguments of calls."""
    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
                is_causal: bool = False, scale: float | None = None,
                window_size: list[int] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        assert torch.equal(cu_seq_q, cu_seq_k) and max_q == max_k and not is_causal
        self.calls.append(("forward", cu_seq_q.tolist(), max_q, *window_size, scale))
        logsumexp = torch.full(q.shape[1::-1], 3.0)
        return q + 2 * k + 3 * v, logsumexp, torch.tensor([5, 7], dtype=torch.uint64)

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, cu_seq_q: Tensor,
                 cu_seq_k: Tensor, max_q: int, max_k: int, is_causal: bool, rng_state: Tensor,
                 scale: float | None = None, window_size: list[int] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        assert out.equal(q + 2 * k + 3 * v)
        assert (logsumexp == 3).all() and rng_state.tolist() == [5, 7]
        self.calls.append(("backward", cu_seq_k.tolist(), max_q, *window_size, scale))
        return grad.clone(), 2 * grad, 3 * grad

@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_attention_varlen__compiles_one_graph_for_all_attention_args(compiled) -> None:
    """The operation receives tensors, max_seqlen, window and scale unchanged, in forward and backward."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step_cfg = tg.Schedule(small()).at(0)
    attend = tg.attention_varlen
    if compiled:
        attend = torch.compile(attend, backend="aot_eager", dynamic=False, fullgraph=True)
    bounds = torch.tensor([0, 7, 7, 40], dtype=torch.int32)
    q, k, v = (leaf(40, 2, 4, seed=seed) for seed in range(3))
    grad = randn(40, 2, 4, seed=9)
    importlib.import_module("torch.nn.attention.varlen")
    fake_ops = LinearVarlen()
    with torch.library._scoped_library("torch_attn", "IMPL") as library:
        library.impl("_varlen_attn", fake_ops.forward, "CPU")
        library.impl("_varlen_attn_backward", fake_ops.backward, "CPU")
        for max_seqlen, window, scale in ((33, 3, 0.7), (40, 1000, 0.7), (33, 12, 0.1)):
            rotary = step_cfg.rotary._replace(attn_scale=scale)
            tg.set_attention_args(replace(step_cfg, long_window=window, rotary=rotary), max_seqlen)
            got = attend(q, k, v, bounds, "plain long")
            assert_equals_autograd(got, q + 2 * k + 3 * v, (q, k, v), grad)
            arguments = bounds.tolist(), max_seqlen, window, 0, scale
            assert fake_ops.calls == [("forward", *arguments), ("backward", *arguments)]
            fake_ops.calls.clear()
    assert torch._dynamo.utils.counters["stats"].get("unique_graphs", 0) == compiled
    torch._dynamo.reset()


# ---- head and loss --------------------------------------------------------------------------------------------------
def head_loss(y: Tensor, w: Tensor, targets: Tensor, weights: tuple[float, ...],
              precision: str = "plain") -> tuple[Tensor, Tensor]:
    """Return multi-token and next-token losses."""
    return tg.HeadLoss.apply(y, w, targets, torch.tensor(weights, dtype=F64), precision, tg.as_matrix(w))

@pytest.mark.recipe
@pytest.mark.parametrize("num_seqs, T, weights", [
    (1, 1, (1.0,)), (1, 5, (1.0, 0.5, 0.25)), (3, 4, (1.0, 0.5)), (2, 2, (0.7, 0.5, 0.25)), (2, 6, (1.0, 0.0, 0.3))])
def test_HeadLoss__and_its_gradients_equal_autograd(num_seqs, T, weights, monkeypatch) -> None:
    """Targets end with the sequence. The gradient of the output differs at every position. A chunk has 4 positions."""
    def reference_losses(weights: tuple[float, ...]) -> Tensor:
        logits = (y @ w).view(num_seqs, T, 11)
        return torch.cat([reference.next_token_losses(*seq, weights) for seq in zip(logits, targets)])

    monkeypatch.setattr(tg, "CPU_CHUNK_LOGITS", 4 * 11)
    y, w = leaf(num_seqs * T, 6, seed=1), leaf(6, 11, seed=2)
    targets = randint(11, num_seqs, T)
    losses, next_losses = head_loss(y, w, targets, weights)
    assert_equals_autograd(losses, reference_losses(weights), (y, w), randn(num_seqs * T, seed=4))
    assert not next_losses.requires_grad
    for found in (next_losses, tg.next_token_losses(y, w, targets.flatten())):
        assert_close(found, reference_losses((1.0,)))

def interpret_loss() -> None:
    """Compare the kernel with PyTorch's formula in float64, for rows that do not fill their blocks.

    A gradient of bf16 overwrites the logits; token ids of a row are equal; a row has no weight; logits are extreme.
    """
    kernel = tg.triton_jit(tg.mtp_loss_kernel)
    cases = (F32, 300, 3, 128), (BF16, 256, 1, 128), (BF16, 127, 2, 32), (F32, 40, 4, 64)
    for dtype, V, G, block in cases:
        logits = 8 * randn(4, V, seed=V, dtype=BF16)
        logits[2, :7] = -200
        logits[2, 7:9] = 60
        ids = randint(V, 4, G, seed=1)
        ids[0] = 3
        target_weights = randn(4, G, seed=2, dtype=F32).abs()
        target_weights[1] = 0
        exact = torch.empty(4, V, dtype=F64)
        expected = tg.mtp_losses_and_grad(logits.double(), ids, target_weights.double(), exact, 3.0)
        grad = logits.clone() if dtype == BF16 else torch.full((4, V), torch.nan, dtype=F32).to(dtype)
        found = torch.full((2, 4), torch.nan).unbind()
        kernel[(4,)](grad if dtype == BF16 else logits, grad, ids, target_weights, *found, 3.0, V, G, CAP=tg.LOGIT_CAP,
                     SHIFT=tg.LOGIT_SHIFT, WIDTH=tg.LOGIT_WIDTH, BLOCK=block, BLOCK_G=1 << (G - 1).bit_length())
        for losses, expected_losses in zip(found, expected):
            assert_close(losses, expected_losses, rtol=1e-5, atol=1e-5)
        # The kernel holds gradients in bf16. Triton's interpreter truncates a second conversion to bf16, and turns 1.9
        # into 1.0 in e5m2, so that e5m2 is tested on a GPU only.
        assert_close(grad, exact, rtol=2.0**-8 + (2.0**-7 if dtype == BF16 else 1e-5), atol=2.0**-17)

@needs_triton
@pytest.mark.parametrize("capability, dtype, num_targets", [
    (90, "fp8e5", 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (90, "fp8e5", 1), (89, "fp8e5", 2), (100, "fp8e5", 3), (80, "bf16", 3), (90, "bf16", 1)))])
def test_mtp_loss_kernel__compiles_without_a_gpu(capability, dtype, num_targets) -> None:
    """A row of 50,304 logits fits in registers: nothing is spilled. Offsets have 64 bits."""
    block = tg.LOSS_BLOCK if dtype == "fp8e5" else tg.LOSS_BLOCK // 4
    types = dict(logits="*bf16", grad=f"*{dtype}", target_ids="*i64", target_weights="*fp32", losses="*fp32",
                 next_losses="*fp32", grad_factor="fp32")
    constants = dict(V=50_304, G=num_targets, CAP=tg.LOGIT_CAP, SHIFT=tg.LOGIT_SHIFT, WIDTH=tg.LOGIT_WIDTH, BLOCK=block,
                     BLOCK_G=1 << (num_targets - 1).bit_length())
    kernel = compile_for_gpu(capability, tg.mtp_loss_kernel, types, constants,
                             {(i,): [["tt.divisibility", 16]] for i in range(6)}, num_warps=16)
    assert "extsi %row" in kernel.asm["ttir"] or "extsi %0" in kernel.asm["ttir"]
    # After the last barrier, only the targets are stored: they overwrite what other threads have stored for the row.
    *_, row_stores, target_stores = (part.count("st.global") for part in kernel.asm["ptx"].split("bar.sync"))
    assert 0 < target_stores < row_stores


# ---- fp8 ------------------------------------------------------------------------------------------------------------
@pytest.mark.recipe
@pytest.mark.parametrize("dtype", [F64, BF16])
@pytest.mark.parametrize("weights", [(1.0, 0.5, 0.25), (1.0,)])
@pytest.mark.parametrize("upstream", [(1.0,), (0.125,), (3.0, -6.0, 9.0), (2.0**20, 1.0, 0.0)], ids=str)
def test_HeadLoss__emulated_fp8_equals_the_reference(upstream, weights, dtype) -> None:
    """The reference rounds to fp8 at the same points, and the logits to bf16, if not f64. The result is close to that
    without any rounding, and nothing overflows e5m2 if the upstream gradient is large."""
    y = leaf(12, 16, seed=1, dtype=dtype)
    w = (0.5 * randn(16, 32, seed=2)).to(dtype).requires_grad_()
    targets = randint(32, 2, 6)
    grad_losses = torch.tensor(upstream, dtype=F64).repeat(12 // len(upstream))
    losses, next_losses = head_loss(y, w, targets, weights, "emulated")
    assert next_losses.equal(head_loss(y, w, targets, (1.0,), "emulated")[0])
    grads = torch.autograd.grad(losses, (y, w), grad_losses.to(losses.dtype))
    inputs = y.double(), w.double(), targets, weights, grad_losses
    expected, exact = (reference.fp8_head(*inputs, logits_dtype) for logits_dtype in (dtype, None))
    for got, name in zip((losses, *grads), ("losses", "grad_y", "grad_w")):
        is_bf16 = got.dtype == BF16
        assert_close_to_largest(got, expected[name], 1e-12 if dtype == F64 else 1e-6, rtol=2.0**-8 if is_bf16 else 0)
        assert (got - exact[name]).norm() < 0.1 * exact[name].norm()

@needs_scaled_mm
@pytest.mark.parametrize("a_dtype, b_dtype, out_dtype", [
    (torch.float8_e4m3fn, torch.float8_e4m3fn, BF16), (torch.float8_e5m2, torch.float8_e4m3fn, BF16),
    (torch.float8_e4m3fn, torch.float8_e5m2, F32)], ids=str)
def test_fp8_matmul__scaled_mm_equals_the_emulation(a_dtype, b_dtype, out_dtype) -> None:
    """A bf16 result is rounded once, to 8 bits; an f32 sum may have another order."""
    a = (20 * randn(16, 48, seed=1, dtype=F32)).to(a_dtype)
    b = (20 * randn(48, 32, seed=2, dtype=F32)).to(b_dtype)
    scale = torch.tensor(0.37, dtype=F64)
    expected = (a.double() @ b.double()) * scale
    product = tg.fp8_matmul(a, b, scale, "fp8", out_dtype)
    assert product.dtype == out_dtype
    assert_close_to_largest(product, expected, 1e-6, rtol=2.0**-8 if out_dtype == BF16 else 1e-6)
    emulated = tg.fp8_matmul(a, b, scale, "emulated", F32)
    assert_close_to_largest(emulated, expected, 1e-6, rtol=1e-6)


# ---- gradients of rows ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rows", [
    [3], [5] * 9, [7, 0, 3, 1, 10], (11 * np.random.default_rng(0).random(200)**4).astype(int).tolist()],
    ids=["one line", "the same row", "no row twice", "skewed"])
@pytest.mark.parametrize("width", [1, 32])
@pytest.mark.parametrize("dtype", [BF16, F32, F64])
def test_add_rows__accumulates_rows_exactly(rows, width, dtype) -> None:
    """The result equals a loop over integers bit by bit, in the dtype of row_grads and not in that of the gradient."""
    grad = (randint(17, len(rows), width) - 8).to(dtype)
    row_grads = (randint(17, 11, width, seed=1) - 8).to(torch.promote_types(dtype, F32))
    row_grads[:, 0] += 1024              # in bf16, adding 1 to this changes nothing
    expected = row_grads.tolist()
    for row, grad_row in zip(rows, grad.tolist()):
        expected[row] = [a + b for a, b in zip(expected[row], grad_row)]
    tg.add_rows(row_grads, torch.tensor(rows, dtype=torch.int32), grad)
    assert row_grads.tolist() == expected

@pytest.mark.parametrize("name, written, args", [
    ("add_rows", ["row_grads"], (torch.zeros(6, 3), randint(6, 2, 2).int(), torch.ones(2, 2, 3))),
    *(("add_to_main_grad", ["main_grad", "write_counts"], (randn(4, 5), torch.tensor([0, count]), 1, *operands))
      for count, operands in enumerate([(randn(7, 4), randn(7, 5)), (randn(4, 5), None)]))])
def test_operators__declare_what_they_mutate(name, written, args) -> None:
    """A compiler removes an operator without declared mutations as dead code."""
    operator = getattr(torch.ops.train_gpt, name).default
    torch.library.opcheck(operator, args)
    schema = operator._schema
    assert [x.name for x in schema.arguments if x.is_write] == written and not schema.returns

@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_RowLookup__is_an_embedding_that_accumulates_its_gradient_in_row_grads(compiled) -> None:
    def lookup(source: Tensor, index: Tensor, row_grads: Tensor) -> Tensor:
        return tg.RowLookup.apply(source, index, row_grads)

    if compiled:
        torch._dynamo.reset()
        lookup = torch.compile(lookup, backend="aot_eager", fullgraph=True)
    source = leaf(11, 6, seed=1)
    torch_source = leaf(11, 6, seed=1)
    row_grads = randn(11, 6, seed=2)
    before = row_grads.clone()
    index = randint(9, 2, 3, 4).int()
    grad = randn(2, 3, 4, 6, seed=3)
    F.embedding(index, torch_source).backward(grad)
    for num_calls in (1, 2):             # gradients accumulate
        got = lookup(source, index, row_grads)
        assert got.equal(F.embedding(index, torch_source))
        got.backward(grad)
        assert source.grad is None
        assert_close(row_grads, before + num_calls * torch_source.grad)
    torch._dynamo.reset()

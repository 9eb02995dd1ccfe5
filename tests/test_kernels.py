"""Room 4: each operation against loops, numpy or autograd in float64, forward and backward, at more than one shape."""
import importlib.util
import json
import math
import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from common import angles_by_channel

import train_gpt as tg

F64 = torch.float64
HERE = Path(__file__).resolve().parent
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="no triton package: its body cannot be translated here")


class OnCard(NamedTuple):
    """What a kernel's conditions look at, of a tensor on a GPU."""
    dtype: torch.dtype
    sizes: tuple[int, ...]
    is_cuda: bool = True
    device: str = "cuda"

    @property
    def shape(self):
        return self.sizes

    def element_size(self):
        return self.dtype.itemsize

    def __len__(self):
        return self.sizes[0]


def kernel_cases(folder: Path, what: str, **environment: str) -> dict:
    """What kernel_cases.py finds, in a process of its own: Triton is interpreted in all of it or nowhere."""
    file = folder / f"{what}.json"
    command = [sys.executable, str(HERE / "kernel_cases.py"), str(file), what]
    done = subprocess.run(command, env=dict(os.environ, **environment), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())


def randn(*shape: int, seed: int = 0, grad: bool = False, dtype=F64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype).requires_grad_(grad)


def assert_close(got, want, rtol=1e-12, atol=1e-13):
    """Default: a few roundings of float64 on numbers of order 1."""
    got, want = (x.detach().double().numpy() if isinstance(x, torch.Tensor) else np.asarray(x, np.float64)
                 for x in (got, want))
    np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)


# ---- norm, rotation, MLP --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("shape, size", [((5,), 1.0), ((3, 16), 1e-3), ((2, 3, 7), 1e-5), ((4, 12), 0.0)])
def test_rms_norm(shape, size):
    x = size * randn(*shape, seed=1)
    rows = [[value / math.sqrt(sum(v * v for v in row) / len(row) + 2.0**-23) for value in row]
            for row in x.reshape(-1, shape[-1]).tolist()]
    assert_close(tg.rms_norm(x).reshape(-1, shape[-1]), rows)


@pytest.mark.parametrize("lead, width", [((), 8), ((5,), 16), ((2, 3, 4), 12)])
def test_rotate_is_a_complex_product_with_exp_minus_i_angle(lead, width):
    x, angle = randn(*lead, width, seed=2), 3 * randn(*lead, width // 4, seed=3)
    first = x[..., :width // 2]
    z = torch.complex(first[..., 0::2], first[..., 1::2]) * torch.exp(-1j * angle)
    by_channel = angles_by_channel(angle)
    got = tg.rotate(x, by_channel.cos(), by_channel.sin())
    assert_close(got[..., 0:width // 2:2], z.real)
    assert_close(got[..., 1:width // 2:2], z.imag)
    assert got[..., width // 2:].equal(x[..., width // 2:]), "half of the features do not turn"
    assert got.shape == x.shape


def test_scores_of_rotated_vectors_depend_on_the_distance_only():
    q, k, frequency = randn(8), randn(8, seed=1), torch.tensor([1.0, 0.3], dtype=F64)

    def score(i, j):
        by_channel = angles_by_channel(frequency)
        turned = [tg.rotate(x, (at * by_channel).cos(), (at * by_channel).sin()) for x, at in ((q, i), (k, j))]
        return float(turned[0] @ turned[1])

    assert score(3, 1) == pytest.approx(score(40, 38), rel=1e-12) != pytest.approx(score(1, 3), rel=1e-3)


@pytest.mark.parametrize("lead, D, width", [((1,), 1, 1), ((3,), 4, 7), ((2, 5), 6, 24)])
def test_mlp(lead, D, width):
    n, up, down = randn(*lead, D, grad=True), randn(width, D, seed=1, grad=True), randn(width, D, seed=2, grad=True)
    want = [[sum(max(sum(u * x for u, x in zip(U, row)), 0.0)**2 * d[k] for U, d in zip(up.tolist(), down.tolist()))
             for k in range(D)] for row in n.reshape(-1, D).tolist()]
    mlp = lambda n, up, down: tg.relu_sq_mlp(n, tg.as_part(up), tg.as_part(down))
    assert_close(mlp(n, up, down).reshape(-1, D), want)
    assert torch.autograd.gradcheck(mlp, (n, up, down))


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_what_relu_cuts_off_has_no_gradient(monkeypatch, dtype):
    """Not even one that rounding has left: an optimizer may look at the sign of what is there."""
    n, up, down = randn(9, 6), randn(24, 6, seed=1), randn(6, 24, seed=2)
    pre = n @ up.t()
    want = 2 * pre.relu() * (n @ down)
    leaf = n.to(dtype)
    seen = []
    monkeypatch.setattr(tg, "accumulate_wgrad", lambda part, a, b: seen.append(a))
    matrices = [x.to(dtype).requires_grad_() for x in (up, down.t().contiguous())]
    tg.relu_sq_mlp(leaf, *map(tg.as_part, matrices)).backward(leaf)
    found = seen[0]                                                           # by pre, a factor of the up gradient
    assert found.dtype == dtype and (found[pre.to(dtype) <= 0] == 0).all()
    torch.testing.assert_close(found.double(), want, rtol=0,
                               atol=8 * torch.finfo(dtype).eps * want.abs().max().item())


@needs_triton
def test_relu_sq_kernel_interpreted(tmp_path):
    """Both passes against float64, ragged at every edge, by one program and three; errors relative to the largest."""
    found = kernel_cases(tmp_path, "interpret", TRITON_INTERPRET="1")
    most = {"torch.float32": 1e-6, "torch.float16": 2.0**-11, "torch.bfloat16": 2.0**-8}           # one rounding
    assert len(found) == 3 * 6 * 2 * 2
    for case, error in found.items():
        of_pass, dtype, *_ = case.split()
        assert error <= most[dtype], case


@needs_triton
def test_relu_sq_kernel_compiles_without_a_gpu(tmp_path):
    """For each card that takes it: tensor cores, loads ahead, no spills, within shared memory, offsets of 64 bits."""
    found = kernel_cases(tmp_path, "compile", TRITON_CACHE_DIR=str(tmp_path / "cache"))
    assert {case.split()[0] for case in found} == {"80", "90", "100"}
    for case, made in found.items():
        assert made["STACK"] == made["LOCAL"] == 0, case
        assert made["REG"] <= 255 and made["shared"] <= made["most_shared"], case
        assert made["products"] > 0 and made["copies"] > 0, case
        assert made["narrow"] == [], case


@pytest.mark.parametrize("dtype, width, hidden, capability, fits", [
    (torch.bfloat16, 768, 3072, (9, 0), True), (torch.float16, 8, 16, (8, 0), True),
    (torch.bfloat16, 768, 3072, (8, 9), False), (torch.float32, 768, 3072, (9, 0), False),
    (torch.bfloat16, 100, 3072, (9, 0), False), (torch.bfloat16, 768, 100, (9, 0), False)])
def test_where_the_relu_sq_kernel_fits(monkeypatch, dtype, width, hidden, capability, fits):
    card = SimpleNamespace(major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert tg.fits_relu_sq(OnCard(dtype, (5, width)), OnCard(dtype, (hidden, width))) == fits


def test_the_relu_sq_kernel_is_not_for_a_cpu():
    x = randn(8, 16, dtype=torch.bfloat16)
    assert not tg.fits_relu_sq(x, x)


# ---- attention ------------------------------------------------------------------------------------------------------

def naive_attention(q, k, v, bounds, window, scale):
    """One query at a time over its list of keys."""
    out = torch.zeros_like(q)
    for start, end in zip(bounds, bounds[1:]):
        for i in range(start, end):
            seen = range(max(start, i - window), i + 1)
            scores = scale * torch.einsum("he,khe->hk", q[i], k[list(seen)])
            out[i] = torch.einsum("hk,khe->he", scores.softmax(-1), v[list(seen)])
    return out


ATTENTION = [  # bounds of the documents, window, upper bound of a document's length, heads, width
    ([0, 1], 5, 1, 1, 4),                                            # one token
    ([0, 0, 4, 4, 9, 9], 2, 9, 2, 3),                                # empty documents, the bound too large
    ([0, 7, 40], 3, 33, 2, 4),                                       # window smaller than a block of queries
    ([0, 7, 40], 1000, 33, 1, 4),                                    # window larger than everything
    ([0, 100], 37, 100, 2, 4),                                       # blocks of 37 queries, 100 = 2 x 37 + 26
    ([0, 3, 50, 51, 97], 40, 47, 1, 2),
    ([0, 64, 128, 160], 32, 64, 1, 4),                               # documents end where blocks end
    ([0, 33, 33, 33, 95, 95], 64, 62, 3, 5),
]


@pytest.mark.parametrize("bounds, window, max_len, heads, width", ATTENTION)
def test_attention_and_its_gradients_are_those_of_a_naive_softmax(bounds, window, max_len, heads, width):
    inputs = [randn(bounds[-1], heads, width, seed=seed, grad=True) for seed in range(3)]
    seed_grad = randn(bounds[-1], heads, width, seed=9)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    got = tg.attention_reference(*inputs, cu_seqlens, tg.AttentionSpan(max_len, window, 0.7))
    want = naive_attention(*inputs, bounds, window, 0.7)
    assert got.shape == want.shape
    assert_close(got, want)
    for a, b in zip(torch.autograd.grad(got, inputs, seed_grad), torch.autograd.grad(want, inputs, seed_grad)):
        assert_close(a, b)


def test_a_query_sees_w_keys_before_its_own_in_its_document_and_no_other():
    """Change one key and value at a time and see, bit for bit, which outputs move."""
    bounds, window, length = [0, 9, 50], 6, 50
    q, k, v = (randn(length, 1, 4, seed=seed) for seed in range(3))
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    span = tg.AttentionSpan(41, window, 0.7)
    before = tg.attention_reference(q, k, v, cu_seqlens, span)
    for j in range(length):
        other_k, other_v = k.clone(), v.clone()
        other_k[j], other_v[j] = -other_k[j], other_v[j] + 1
        after = tg.attention_reference(q, other_k, other_v, cu_seqlens, span)
        moved = (after != before).flatten(1).any(1).nonzero().flatten().tolist()
        end = 9 if j < 9 else 50
        assert moved == list(range(j, min(j + window + 1, end))), f"key {j}"


def test_attention_keeps_the_dtype_and_needs_no_exact_length_bound():
    q, k, v = (randn(70, 2, 4, seed=seed, dtype=torch.bfloat16) for seed in range(3))
    cu_seqlens = torch.tensor([0, 20, 70], dtype=torch.int32)
    tight, loose = (tg.attention_reference(q, k, v, cu_seqlens, tg.AttentionSpan(bound, 40, 0.7)) for bound in (50, 70))
    assert tight.dtype == torch.bfloat16
    want = naive_attention(q.double(), k.double(), v.double(), [0, 20, 70], 40, 0.7)
    for out in (tight, loose):
        assert_close(out.double(), want, rtol=0, atol=0.03)          # bf16: 8 bits, values up to about 3


def test_varlen_kernel_has_the_same_shapes_forward_and_backward():
    """On meta tensors, which have shapes only: the call fits torch's signature at full size."""
    q, k, v = (torch.empty(49_152, 6, 128, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    bounds = torch.empty(257, device="meta", dtype=torch.int32)
    out = tg.attention_varlen(q, k, v, bounds, tg.AttentionSpan(2048, 640, 0.1))
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert [g.shape for g in torch.autograd.grad(out.sum(), (q, k, v))] == [q.shape] * 3


def dense_weights(q, k, cu_seqlens, window, scale):
    """Softmax over all keys with a mask, (H, queries, keys)."""
    at = torch.arange(len(q))
    document = torch.searchsorted(cu_seqlens.long(), at, right=True)
    back = at[:, None] - at
    seen = (back >= 0) & (back <= window) & (document[:, None] == document)
    scores = scale * torch.einsum("qhe,khe->hqk", q, k)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)


class DenseVarlen:
    """In the place of torch's operation and its backward, which have no kernel for a CPU."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def forward(self, q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, scale=None, window_size=None):
        assert cu_seq_q is cu_seq_k or torch.equal(cu_seq_q, cu_seq_k)
        assert max_q == max_k and not is_causal and window_size[1] == 0
        self.calls.append(("forward", max_q, window_size[0], scale))
        weights = dense_weights(q, k, cu_seq_q, window_size[0], scale)
        out = torch.einsum("hqk,khe->qhe", weights, v)
        return out, torch.full(q.shape[1::-1], 3.0), torch.tensor([5, 7], dtype=torch.uint64)

    def backward(self, grad, q, k, v, out, logsumexp, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, rng_state,
                 scale=None, window_size=None):
        assert (logsumexp == 3).all() and rng_state.tolist() == [5, 7], "what the forward gave"
        self.calls.append(("backward", max_q, window_size[0], scale))
        weights = dense_weights(q, k, cu_seq_k, window_size[0], scale)
        of_weights = torch.einsum("qhe,khe->hqk", grad, v)
        of_scores = scale * weights * (of_weights - (grad * out).sum(-1).t()[..., None])
        of_q = torch.einsum("hqk,khe->qhe", of_scores, k)
        of_k = torch.einsum("hqk,qhe->khe", of_scores, q)
        of_v = torch.einsum("hqk,qhe->khe", weights, grad)
        return of_q, of_k, of_v


@pytest.fixture
def dense_varlen():
    tg.torchs_varlen()
    dense = DenseVarlen()
    with torch.library._scoped_library("torch_attn", "IMPL") as library:
        library.impl("_varlen_attn", dense.forward, "CPU")
        library.impl("_varlen_attn_backward", dense.backward, "CPU")
        yield dense


SPANS = [tg.AttentionSpan(33, 3, 0.7), tg.AttentionSpan(40, 1000, 0.7), tg.AttentionSpan(33, 12, 0.1)]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_varlen_is_the_reference_and_one_graph_for_every_span(dense_varlen, compiled):
    """The window, the bound of documents and the scale reach the kernel as they are, forward and backward."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    attend = tg.attention_varlen
    if compiled:
        attend = torch.compile(attend, backend="aot_eager", dynamic=False, fullgraph=True)
    bounds = torch.tensor([0, 7, 7, 40], dtype=torch.int32)
    inputs = [randn(40, 2, 4, seed=seed, grad=True) for seed in range(3)]
    seed_grad = randn(40, 2, 4, seed=9)
    for span in SPANS:
        got = attend(*inputs, bounds, span)
        want = tg.attention_reference(*inputs, bounds, span)
        assert_close(got, want)
        for a, b in zip(torch.autograd.grad(got, inputs, seed_grad), torch.autograd.grad(want, inputs, seed_grad)):
            assert_close(a, b)
        numbers = span.max_len, span.window, span.scale
        assert dense_varlen.calls == [("forward", *numbers), ("backward", *numbers)]
        dense_varlen.calls.clear()
    assert torch._dynamo.utils.counters["stats"].get("unique_graphs", 0) == compiled
    torch._dynamo.reset()


def test_a_span_cannot_come_to_differ_from_its_numbers():
    span = tg.AttentionSpan(33, 3, 0.7)
    with pytest.raises(FrozenInstanceError):
        span.window = 4
    assert replace(span, window=4).numbers.tolist() == [33, 4, 0.7]


# ---- head and loss --------------------------------------------------------------------------------------------------

LOGITS_11_8 = [[0.5, -1, 2, 10], [3, 0, -5, 1], [-2, 4, 0.25, -0.5]]
Z_11_8 = [[15.537335428757, 14.495985127108, 16.508274310028, 20.258332793491],
          [17.111137300469, 15.197396481614, 11.5, 15.869413065935],
          [13.769816182586, 17.676070020477, 15.368318759868, 14.850095043193]]
LOSS_11_8 = [3.862245488414797, 1.503908066665498, 0.164540483530953]
GRAD_11_8 = [[-0.325970044112, -0.174861545930, 0.024688979315, 0.222133099150],
             [0.024309798470, -0.238074857430, 0.002920305253, 0.197392522147],
             [0.012572622697, -0.082767913686, 0.057379243846, 0.035263735488]]


def head_loss(y, w, targets, weights, loss_weight=1.0, precision="plain", logits_dtype=None):
    weights, loss_weight = torch.tensor(weights, dtype=F64), torch.tensor(loss_weight, dtype=F64)
    return tg.HeadLoss.apply(y, w, targets, weights, loss_weight, precision, logits_dtype or y.dtype, tg.as_part(w))


def plain_losses(y, w, targets, weights):
    """The formula for torch's autograd, slot by slot and target by target."""
    slots, length = targets.shape
    z = 23 / (1 + torch.exp(-(y @ w + 5) / 7.5))
    log_p = (z - torch.log(torch.exp(z).sum(-1, keepdim=True))).view(slots, length, -1)
    zero = torch.zeros((), dtype=F64)
    return torch.stack([
        sum((-weight * log_p[s, t, targets[s, t + k]] for k, weight in enumerate(weights) if t + k < length), zero)
        for s in range(slots) for t in range(length)])


@pytest.mark.recipe
def test_head_loss_of_the_recipe():
    logits, targets = torch.tensor(LOGITS_11_8, dtype=F64, requires_grad=True), torch.tensor([[3, 0, 1]])
    losses = head_loss(logits, torch.eye(4, dtype=F64), targets, (1.0, 0.5, 0.25))
    losses.sum().backward()
    assert_close(losses, LOSS_11_8, rtol=1e-14)
    assert float(losses.detach().sum()) == pytest.approx(5.530694038611248, rel=1e-14)
    assert_close(logits.grad, GRAD_11_8, atol=6e-13)                  # printed with 12 decimals
    assert_close(tg.softcap(logits), Z_11_8, atol=6e-13)
    mean = tg.next_token_losses(logits.detach(), torch.eye(4, dtype=F64), targets[0]).mean()
    assert float(mean) == pytest.approx(0.188060254427031, rel=1e-13)


@pytest.mark.recipe
def test_softcap_has_the_recipes_range_and_slope():
    x = torch.tensor([0.0, -1e4, 1e4, -5.0], dtype=F64, requires_grad=True)
    z = tg.softcap(x)
    assert_close(z, [15.1973965, 0, 23, 11.5], atol=3e-7)             # printed from an f32
    assert float(torch.autograd.grad(z[3], x)[0][3]) == pytest.approx(0.7666667, abs=6e-8)       # largest slope


@pytest.mark.parametrize("slots, length, weights", [
    (1, 1, (1.0,)), (1, 5, (1.0, 0.5, 0.25)), (3, 4, (1.0, 0.5)), (2, 2, (0.7, 0.5, 0.25)), (2, 6, (1.0, 0.0, 0.3))])
def test_head_loss_and_its_gradients_are_those_of_autograd(slots, length, weights):
    y, w = randn(slots * length, 6, seed=1, grad=True), randn(6, 11, seed=2, grad=True)
    targets = torch.from_numpy(np.random.default_rng(0).integers(0, 11, (slots, length)))
    rows = randn(slots * length, seed=4)                              # each position's own incoming gradient
    got, want = head_loss(y, w, targets, weights), plain_losses(y, w, targets, weights)
    assert_close(got, want)
    for a, b in zip(torch.autograd.grad(got, (y, w), rows), torch.autograd.grad(want, (y, w), rows)):
        assert_close(a, b)


@pytest.mark.parametrize("targets", [1, 3])
def test_losses_as_a_compiler_takes_them_are_those_of_a_softmax(monkeypatch, targets):
    logits = 6 * randn(40, 64, seed=1)
    ids = torch.randint(64, (40, targets), generator=torch.Generator().manual_seed(2))
    logits[0], logits[1, 3], ids[2] = -80, 60, 5
    token_weights, found = randn(40, targets, seed=3).abs(), []
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
        grad = torch.empty_like(logits)
        found.append((tg.losses_with_gradient(logits, ids, token_weights, grad, 0.7), grad))
    for a, b in zip(*found):
        assert_close(a, b, rtol=1e-13, atol=1e-14)


def test_targets_stop_at_the_end_of_the_slot():
    targets = torch.tensor([[1, 2, 3], [4, 5, 6]])
    columns, token_weights = tg.mtp_targets(targets, torch.tensor([1.0, 0.5, 0.25]))
    assert token_weights.tolist() == [[1, 0.5, 0.25], [1, 0.5, 0], [1, 0, 0]] * 2
    seen = [[c for c, share in zip(row, s) if share] for row, s in zip(columns.tolist(), token_weights.tolist())]
    assert seen == [[1, 2, 3], [2, 3], [3], [4, 5, 6], [5, 6], [6]]


def test_evaluation_loss_is_torchs_cross_entropy():
    y, w, targets = randn(9, 6), randn(6, 11, seed=1), torch.arange(9)
    z = 23 * torch.special.expit((y @ w + 5) / 7.5)
    assert_close(tg.next_token_losses(y, w, targets), F.cross_entropy(z, targets, reduction="none"))


# ---- fp8 ------------------------------------------------------------------------------------------------------------

def nearest_fp8(x: torch.Tensor, dtype: torch.dtype, largest: float) -> torch.Tensor:
    """The nearest of the 256 numbers of an fp8 type, by brute force; random x meet no ties."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    numbers = numbers[numbers.isfinite() & (numbers.abs() <= largest)]
    return numbers[(x.double()[..., None] - numbers).abs().argmin(-1)]


def test_e4m3_rounds_to_the_nearest_number_and_saturates():
    x = 3 * randn(2000, dtype=torch.float32)
    assert tg.e4m3(x, 0.01).double().equal(nearest_fp8(x / 0.01, torch.float8_e4m3fn, 448))
    assert tg.e4m3(torch.tensor([1e6, -1e6, 460.0]), 1.0).tolist() == [448, -448, 448]


def quantised_losses(y, w, targets, weights, loss_weight, rows):
    """The fp8 head of recipe 2.8 in float64 with its roundings made explicit; losses, gradients of y and of w."""
    y_scale, w_scale, grad_scale = 100 / 448, 1.6 / 448, 0.75 / 448
    y8 = y_scale * nearest_fp8(y.detach() / y_scale, torch.float8_e4m3fn, 448)
    w8 = w_scale * nearest_fp8(w.detach() / w_scale, torch.float8_e4m3fn, 448)
    logits = (y8 @ w8).requires_grad_()
    losses = plain_losses(logits, torch.eye(logits.shape[1], dtype=F64), targets, weights)
    grad, = torch.autograd.grad(losses.sum(), logits)
    payload = nearest_fp8(grad / grad_scale, torch.float8_e5m2, 57344)
    factor = (rows / loss_weight)[:, None]                            # of each position, besides the loss weight
    scaled = (factor * payload).to(torch.float8_e5m2).double()
    scale = loss_weight * grad_scale
    return losses.detach(), scale * factor * (payload @ w8.t()), scale * (y8.t() @ scaled)


@pytest.mark.parametrize("loss_weight", [1.0, 0.125, 3.0])
@pytest.mark.parametrize("weights", [(1.0, 0.5, 0.25), (1.0,)])
def test_emulated_fp8_head(loss_weight, weights):
    y, w = randn(12, 16, seed=1, grad=True), (0.5 * randn(16, 32, seed=2)).requires_grad_()
    targets = torch.from_numpy(np.random.default_rng(1).integers(0, 32, (2, 6)))
    rows = loss_weight * (1 + torch.arange(12) % 3).double()
    losses = head_loss(y, w, targets, weights, loss_weight, "emulated")
    want = quantised_losses(y, w, targets, weights, loss_weight, rows)
    for got, expected in zip((losses, *torch.autograd.grad(losses, (y, w), rows)), want):
        assert_close(got, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))      # scales are rounded to f32


@pytest.mark.parametrize("precision", ["plain", "emulated", "fp8"])
def test_a_loss_weight_of_zero_has_gradients_of_zero(precision):
    y = randn(16, 16, seed=1, dtype=torch.bfloat16, grad=True)
    w = randn(16, 32, seed=2, dtype=torch.bfloat16, grad=True)
    losses = head_loss(y, w, torch.arange(16)[None], (1.0, 0.5), 0.0, precision, torch.bfloat16)
    assert losses.isfinite().all()
    for grad in torch.autograd.grad(losses, (y, w), torch.zeros_like(losses)):
        assert (grad == 0).all()


def test_what_waits_for_the_backward_of_a_compiled_fp8_head_is_the_gradient_not_the_logits():
    """One byte for each logit. The compiler decides what a graph keeps, and could make the gradient again."""
    from torch._dynamo.backends.common import aot_autograd
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    kept = []

    def note(graph, _):
        output, = (node for node in graph.graph.nodes if node.op == "output")
        kept.extend(x.meta["val"] for x in output.args[0] if x is not None)
        return make_boxed_func(graph)

    y = randn(32, 16, seed=1, dtype=torch.bfloat16, grad=True)
    w = randn(16, 256, seed=2, dtype=torch.bfloat16, grad=True)
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=note, bw_compiler=lambda graph, _: make_boxed_func(graph),
                           partition_fn=min_cut_rematerialization_partition)
    call = torch.compile(lambda *x: head_loss(*x, torch.arange(32)[None], (1.0, 0.5), 1.0, "fp8", torch.bfloat16),
                         backend=backend, fullgraph=True)
    call(y, w).sum().backward()
    assert [x.dtype for x in kept if x.shape == (32, 256)] == [torch.float8_e5m2]
    torch._dynamo.reset()


@pytest.mark.parametrize("power", [-7, -3, 1, 5])
@pytest.mark.parametrize("precision, dtype", [
    ("emulated", torch.float32), ("emulated", torch.bfloat16), ("plain", F64)])
def test_a_loss_weight_of_two_to_the_k_scales_gradients_bit_by_bit(precision, dtype, power):
    """It moves the fp8 scale and never the payload; a weight of 2^k only in the payload would meet its limits."""
    y, w = randn(8, 16, seed=1, dtype=dtype), (0.3 * randn(16, 32, seed=2)).to(dtype)
    targets = torch.arange(8).view(2, 4)
    rows = 1 + torch.arange(8) % 2

    def gradients(loss_weight):
        leaves = y.clone().requires_grad_(), w.clone().requires_grad_()
        logits_dtype = F64 if dtype == F64 else torch.bfloat16
        losses = head_loss(*leaves, targets, (1.0, 0.5), loss_weight, precision, logits_dtype)
        return torch.autograd.grad(losses, leaves, (loss_weight * rows).to(losses.dtype))

    for one, many in zip(gradients(1.0), gradients(2.0**power)):
        assert (one * 2.0**power).equal(many)


def test_the_devices_fp8_product_is_the_emulated_one():
    """F.scaled_mm exists on CPUs too. bf16 out: one rounding of 8 bits; f32 out: other orders of addition."""
    def fp8(rows, columns, seed, dtype):
        return (20 * randn(rows, columns, seed=seed)).float().to(dtype)

    scale = torch.tensor(0.37, dtype=F64)
    for a, b, out in ((torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16),
                      (torch.float8_e5m2, torch.float8_e4m3fn, torch.bfloat16),
                      (torch.float8_e4m3fn, torch.float8_e5m2, torch.float32)):
        left, right = fp8(16, 48, 1, a), fp8(48, 32, 2, b)
        want = (left.double() @ right.double()) * scale
        native = tg.fp8_product(left, right, scale, True, out)
        emulated = tg.fp8_product(left, right, scale, False, torch.float32)
        assert native.dtype == out
        for got, relative in ((native, 2.0**-8 if out == torch.bfloat16 else 1e-6), (emulated, 1e-6)):
            assert_close(got, want, rtol=relative, atol=1e-6 * float(want.abs().max()))


def test_native_fp8_head_on_whatever_device_has_it():
    y, w = randn(16, 16, seed=1, dtype=torch.bfloat16), (0.3 * randn(16, 32, seed=2)).bfloat16()
    targets, results = torch.arange(16).view(1, 16), []
    for precision in ("emulated", "fp8"):
        leaves = y.clone().requires_grad_(), w.clone().requires_grad_()
        losses = head_loss(*leaves, targets, (1.0, 0.5), 1.0, precision, torch.bfloat16)
        results.append((losses, *torch.autograd.grad(losses.sum(), leaves)))
    for emulated, native in zip(*results):
        assert emulated.dtype == native.dtype and emulated.shape == native.shape
        # logits rounded to bf16 may differ in the last of 8 bits, and so a payload in the last of its 2
        assert_close(native.double(), emulated.double(), rtol=0.02, atol=0.02 * float(emulated.detach().abs().max()))


# ---- sums of rows ---------------------------------------------------------------------------------------------------

ROWS = {                                     # row that each line of the gradient goes to
    "one line": [3], "the same row": [5] * 9, "no row twice": [7, 0, 3, 1], "first and last": [0, 10, 10, 0],
    "skewed": (11 * np.random.default_rng(0).random(200)**4).astype(int).tolist(), "all": list(range(11)) * 3,
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("width", [1, 5, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
def test_rows_are_added_to_what_is_there(name, width, dtype):
    """Against a plain loop on integers, bit by bit, in the dtype of the sums and not of the gradient."""
    rows, exact = ROWS[name], torch.promote_types(dtype, torch.float32)
    generator = torch.Generator().manual_seed(len(rows))
    grad = torch.randint(-8, 9, (len(rows), width), generator=generator).to(dtype)
    sums = torch.randint(-8, 9, (11, width), generator=generator).to(exact)
    sums[:, 0] += 1024                                                        # bf16 would lose what is added to it
    want = sums.tolist()
    for row, line in zip(rows, grad.tolist()):
        want[row] = [a + b for a, b in zip(want[row], line)]
    place, index = sums.data_ptr(), torch.tensor(rows, dtype=torch.int32)
    assert tg.add_rows(sums, index, grad) is None
    assert sums.tolist() == want and sums.data_ptr() == place


def test_rows_are_added_in_the_order_of_the_lines():
    """Whatever shape the index has; so two runs have equal bits."""
    index, grad = torch.randint(0, 4, (3, 5, 40)).int(), 1e3 * randn(3, 5, 40, 8, dtype=torch.float32)
    results = [torch.ones(4, 8) for _ in range(3)]
    for sums in results[:2]:
        tg.add_rows(sums, index, grad)
    for row, line in zip(index.flatten().tolist(), grad.flatten(0, 2)):
        results[2][row] += line
    assert results[0].equal(results[1]) and results[0].equal(results[2])


def test_the_operator_says_what_it_changes():
    sums, index, grad = torch.zeros(6, 3), torch.tensor([[1, 5], [1, 0]], dtype=torch.int32), torch.ones(2, 2, 3)
    torch.library.opcheck(torch.ops.train_gpt.add_rows.default, (sums, index, grad))
    schema = torch.ops.train_gpt.add_rows.default._schema
    assert [x.name for x in schema.arguments if x.is_write] == ["row_grads"] and not schema.returns


@pytest.mark.parametrize("shape", [(7,), (2, 5), (2, 3, 4)])
def test_a_lookup_is_an_embedding_whose_gradient_goes_to_the_sums(shape):
    source, sums = randn(11, 6, seed=1, grad=True), randn(11, 6, seed=2)
    theirs, before = source.detach().clone().requires_grad_(), sums.clone()
    index, seed = torch.from_numpy(np.random.default_rng(0).integers(0, 9, shape)).int(), randn(*shape, 6, seed=3)
    got, want = tg.RowLookup.apply(source, index, sums), F.embedding(index, theirs)
    assert got.equal(want)
    want.backward(seed)
    for calls in (1, 2):                                                      # they add up
        tg.RowLookup.apply(source, index, sums).backward(seed)
        assert source.grad is None
        assert_close(sums, before + calls * theirs.grad)


def test_outside_of_graphs_an_operation_is_its_body():
    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names = []
    sums, index, grad = torch.zeros(4, 3, dtype=F64), torch.tensor([0, 2, 2]), randn(3, 3, grad=True)
    with Calls():
        tg.add_rows(sums, index, grad.detach())
    assert sums[2].any()
    assert names and not any("train_gpt" in name for name in names), names
    tg.add_rows_op(sums, index, grad.detach())
    torch.testing.assert_close(sums[0], 2 * grad[0].detach())


def test_a_lookup_compiles_into_one_graph():
    """The operator stays in the graph of the backward, and there is no gradient of the table in it."""
    index, graphs = torch.tensor([[1, 4, 1], [0, 5, 5]], dtype=torch.int32), []

    def keep(graph, _):
        graphs.append(str(graph.graph))
        return make_boxed_func(graph)

    def call(source, sums):
        return tg.RowLookup.apply(source, index, sums).square().sum()

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    torch._dynamo.reset()
    compiled = torch.compile(call, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    results = []
    for function in (call, compiled):
        source, sums = randn(9, 6, grad=True), torch.ones(9, 6, dtype=F64)
        for _ in range(2):
            loss = function(source, sums)
            loss.backward()
        assert source.grad is None
        results.append((float(loss.detach()), sums))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-12) and results[0][1].equal(results[1][1])
    assert len(graphs) == 2 and "add_rows" in graphs[1] and "embedding_dense_backward" not in graphs[1]
    torch._dynamo.reset()

"""Section 7: main_grad. Where a weight's gradient is accumulated, what autograd receives, and what is refused."""
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import (BF16, F32, F64, make_engine, needs_compiler, planned, randn, random_batch, small, tensors_of,
                    unequal)
from torch import Tensor

import train_gpt as tg

def make_weight(*shape: int, seed: int = 0, dtype: torch.dtype = F64, grad_dtype: torch.dtype = F64,
                matrices: int = 1) -> Tensor:
    """Create a weight with a main_grad that is NaN before the first write."""
    weight = torch.nn.Parameter(randn(*shape, seed=seed, dtype=dtype))
    weight.main_grad = torch.full(shape, torch.nan, dtype=grad_dtype)
    weight.write_counts = torch.zeros(matrices, dtype=torch.int64)
    return weight

@pytest.mark.parametrize("product_given", (False, True))
@pytest.mark.parametrize("grad_dtype, input_dtype", [(F32, F32), (F64, F64), (F32, BF16), (BF16, BF16)])
def test_add_to_main_grad__the_first_write_overwrites_and_others_add(grad_dtype, input_dtype, product_given) -> None:
    """Also if the buffer is NaN. The other matrices of the bank do not change."""
    bank = torch.full((3, 4, 5), torch.nan, dtype=grad_dtype)
    write_counts = torch.zeros(3, dtype=torch.int64)
    want = torch.zeros(4, 5, dtype=F64)
    for write in range(3):
        a = randn(7, 4, seed=write, dtype=input_dtype)
        b = randn(7, 5, seed=write + 10, dtype=input_dtype)
        product = a.double().t() @ b.double()
        want += product
        operands = [product.to(input_dtype), None] if product_given else [a, b]
        tg.add_to_main_grad(bank[1], write_counts, 1, *operands)
        assert write_counts.tolist() == [0, write + 1, 0]
    rounding = 0.05 if BF16 in (grad_dtype, input_dtype) and (product_given or grad_dtype == BF16) else 1e-5
    torch.testing.assert_close(bank[1].double(), want, rtol=rounding, atol=rounding)
    assert bank[0].isnan().all() and bank[2].isnan().all()

# Columns: has main_grad, has the flag grad_added_to_main_grad, gradient is deferred, what autograd receives.
CONTRACT = [
    (False, False, False, "gradient"), (False, True, False, "gradient"),
    (True, False, False, None), (True, True, False, "dummy"),
    (False, False, True, None), (False, True, True, None), (True, False, True, None), (True, True, True, "dummy")]
contract = pytest.mark.parametrize("main_grad, flag, deferred, want", CONTRACT)
# The two products with a weight W: x @ W^T, and x @ W, which transposes the WeightMatrix.
products = pytest.mark.parametrize("transposed", [False, True], ids=["x @ W^T", "x @ W"])

def contract_weight(main_grad: bool, flag: bool, columns: int = 3) -> Tensor:
    weight = make_weight(4, columns)
    if not main_grad:
        del weight.main_grad
    if flag:
        weight.grad_added_to_main_grad = False
    return weight

def product(x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    if transposed:
        return x @ weight
    return x @ weight.t()

def gradient_of(weight: Tensor) -> Tensor:
    return getattr(weight, "main_grad", weight.grad)

def operand(weight: Tensor, transposed: bool, queue: tg.DeferredGrads | None = None) -> tg.WeightMatrix:
    matrix = tg.as_matrix(weight, queue)
    if transposed:
        return matrix.t()
    return matrix

@products
@contract
@pytest.mark.parametrize("scaled", [False, True])
def test_linear_main_grad__what_backward_returns(main_grad, flag, deferred, want, scaled, transposed) -> None:
    """Hooks on the weight receive what backward returns, in two micro-batches. No gradient has a graph, since a graph
    retains its operands."""
    weight = contract_weight(main_grad, flag)
    queue = [] if deferred else None
    seen = []
    weight.register_hook(seen.append)
    inputs = weight.shape[not transposed]
    first = torch.nn.Parameter(randn(inputs, inputs, seed=9))
    scale = torch.tensor(0.7, dtype=F64) if scaled else None
    true_gradient = torch.zeros(4, 3, dtype=F64)
    for seed in (1, 2):
        if flag:
            weight.grad_added_to_main_grad = False
        x = randn(5, inputs, seed=seed) @ first
        tg.linear_main_grad(x, operand(weight, transposed, queue), scale).sum().backward()
        plain = weight.detach().clone().requires_grad_()
        product(x.detach(), plain, transposed).sum().backward()
        true_gradient += plain.grad * (0.7 if scaled else 1)
        assert not flag or weight.grad_added_to_main_grad is (want == "dummy")

    if want == "gradient":
        torch.testing.assert_close(weight.grad, true_gradient)
        torch.testing.assert_close(sum(seen), true_gradient)
    elif want == "dummy":
        assert not weight.grad.any()
        assert all(x.shape == weight.shape and x.dtype == weight.dtype and not x.any() for x in seen)
    else:
        assert weight.grad is None and seen == [None, None]
    if want == "dummy":
        # No gradient may be an alias of main_grad or of another one, because autograd adds to gradients in place.
        assert len({x.untyped_storage().data_ptr() for x in (*seen, weight.main_grad)}) == 3
    if deferred:
        assert len(queue) == 2 and weight.write_counts.tolist() == [0]
        tg.run_deferred(queue)
        assert queue == []
    torch.testing.assert_close(gradient_of(weight), true_gradient)
    assert not gradient_of(weight).requires_grad
    assert weight.write_counts.tolist() == [2 * main_grad]

@products
@contract
def test_linear_main_grad__a_weight_used_twice_in_one_graph(main_grad, flag, deferred, want, transposed) -> None:
    """Each use writes once, and autograd does not add main_grad to itself. The second use may be the other product."""
    weight = contract_weight(main_grad, flag, columns=4)
    queue = []
    x = randn(5, 4, seed=1)
    hidden = (x @ weight.t()).square()
    true_gradient, = torch.autograd.grad(product(hidden, weight, transposed).sum(), weight)
    for backward in (1, 2):
        matrix, last_matrix = (operand(weight, each, queue if deferred else None) for each in (False, transposed))
        tg.linear_main_grad(tg.linear_main_grad(x, matrix).square(), last_matrix).sum().backward()
        tg.run_deferred(queue)
        torch.testing.assert_close(gradient_of(weight), backward * true_gradient)
        assert weight.write_counts.tolist() == [2 * backward * main_grad]
    assert want != "dummy" or not weight.grad.any(), "dummies add up to zeros"

@pytest.mark.parametrize("how", ["eager", "deferred", pytest.param("inductor", marks=needs_compiler)])
def test_matrices_by_layer__a_bank_and_its_scale_get_autograds_gradients(how) -> None:
    """In two micro-batches. The gradient of the scale remains with autograd; the deferred bank has no main_grad."""
    layers = 1 if how == "inductor" else 2   # a second one takes the C++ compiler another 10 s
    bank = make_weight(layers, 12, 4, seed=1, matrices=2 * layers)
    scale = torch.nn.Parameter(torch.tensor(0.7, dtype=F64))
    x = randn(5, 4, seed=2).requires_grad_()
    want_x = x
    for layer in bank:
        up, down = layer.split((6, 6))
        want_x = want_x + ((want_x @ (scale * up).t()).relu() * (want_x @ down.t())) @ (scale * down)
    want = torch.autograd.grad(want_x.square().sum(), [bank, x, scale])
    queue = [] if how == "deferred" else None
    if how == "deferred":
        del bank.main_grad

    def loss(x: Tensor) -> Tensor:
        for layer in tg.matrices_by_layer(bank, (6, 6)):
            up, down = (matrix._replace(deferred=queue) for matrix in layer)
            hidden = tg.linear_main_grad(x, up, scale).relu() * tg.linear_main_grad(x, down)
            x = x + tg.linear_main_grad(hidden, down.t(), scale)
        return x.square().sum()

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    call = loss
    if how == "inductor":
        call = torch.compile(loss, backend="inductor", fullgraph=True)
    for micro_batch in (1, 2):
        call(x).backward()
        if how == "deferred":
            tg.run_deferred(queue)
            grad = bank.grad
        else:
            grad = bank.main_grad
            assert bank.write_counts.tolist() == [micro_batch, 2 * micro_batch] * layers
        for found, expected in zip((grad, x.grad, scale.grad), want):
            torch.testing.assert_close(found, micro_batch * expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (how == "inductor")

def head_losses(x: Tensor, weight: Tensor, precision: str = "plain") -> Tensor:
    targets = torch.tensor([[1, 3, 0, 8, 2]])
    return tg.HeadLoss.apply(x, weight, targets, torch.ones(1, dtype=F64), precision, tg.as_matrix(weight))[0]

@pytest.mark.parametrize("frozen", ("up", "down", "plain", "emulated", "linear", "deferred"))
def test_add_gradient__a_frozen_matrix_keeps_its_main_grad(frozen) -> None:
    """Nothing is written or queued, and no flag is set. The other matrix of an MLP and the input get gradients."""
    x = randn(5, 4, seed=2).requires_grad_()
    weights = dict(up=make_weight(8, 4), down=make_weight(8, 4, seed=1))
    queue = []
    if frozen not in weights:
        weights = {frozen: make_weight(4, 9)}
    weight = weights[frozen].requires_grad_(False)
    weight.grad_added_to_main_grad = False
    if frozen in ("up", "down"):
        out = tg.relu_sq_mlp(x, *map(tg.as_matrix, weights.values()))
    elif frozen in ("plain", "emulated"):
        out = head_losses(x, weight, frozen)
    else:
        out = tg.linear_main_grad(x, tg.as_matrix(weight, queue if frozen == "deferred" else None).t())
    out.sum().backward()
    assert x.grad is not None and queue == [] and weight.grad is None and not weight.grad_added_to_main_grad
    for name, weight in weights.items():
        assert weight.write_counts.tolist() == [int(name != frozen)]
        assert weight.main_grad.isnan().all() == (name == frozen)

def test_linear_main_grad__an_f32_main_grad_of_a_scaled_bank_is_exact_over_64_micro_batches() -> None:
    """Compared with the sum in f64 of matmuls of the same bf16 operands. Rounding each to bf16 has an error of 3e-3."""
    bank = make_weight(2, 48, 16, dtype=BF16, grad_dtype=F32, matrices=4)
    scales = torch.nn.Parameter(torch.tensor([0.7, 1.3]))
    want = torch.zeros(2, 48, 16, dtype=F64)
    for micro_batch in range(64):
        x = randn(40, 16, seed=micro_batch, dtype=BF16)
        for layer, matrices in enumerate(tg.matrices_by_layer(bank, (36, 12))):
            for weight, scale, rows in zip(matrices, scales.unbind(), (slice(0, 36), slice(36, 48))):
                grad = randn(40, len(weight.matrix), seed=100 * weight.matrix_idx + micro_batch, dtype=BF16)
                tg.linear_main_grad(x, weight, scale).backward(grad)
                want[layer, rows] += scale.detach().double() * (grad.double().t() @ x.double())
    assert float((bank.main_grad.double() - want).norm() / want.norm()) < 1e-6

def test_once_differentiable__guards_every_operation_of_the_trainer() -> None:
    """A gradient of a gradient, which would be wrong, is refused."""
    x = randn(5, 4).requires_grad_()
    out = tg.linear_main_grad(x, tg.as_matrix(make_weight(8, 4)))
    grad, = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
    classes = (x for x in vars(tg).values() if isinstance(x, type))
    operations = [x for x in classes if issubclass(x, torch.autograd.Function)]
    assert len(operations) >= 5
    guard = tg.once_differentiable(print).__code__
    assert all(cls.backward.__code__ is guard for cls in operations)

def make_trainee(**changes: Any) -> tuple[tg.Engine, Callable[[int], tuple[tg.Batch, tg.StepConfig]]]:
    """Return a small engine, and a function that returns the batch and step config of a step."""
    cfg = small(**changes)
    schedule = tg.Schedule(cfg)

    @functools.cache                     # one plan per cycle, and hence one batch
    def batch_of(cycle: int, tied: bool) -> tg.Batch:
        return planned(cfg, random_batch(cfg, cycle, 8, 16), tied)

    def batch_at(step: int) -> tuple[tg.Batch, tg.StepConfig]:
        step_cfg = schedule.at(step)
        return batch_of(step // cfg.adam_every, step_cfg.tied), step_cfg

    return make_engine(cfg), batch_at

def sharded_groups_of(engine: tg.Engine) -> dict[str, tg.ShardedGroup]:
    return {label: group for label, group in engine.optimizer.groups.items() if isinstance(group, tg.ShardedGroup)}

@pytest.mark.parametrize("changes, bank_type", [
    (dict(dtype="bfloat16"), BF16), (dict(dtype="float32"), F32),
    (dict(dtype="bfloat16", micro_batch_size=1), F32)])
def test_Optimizer__where_each_gradient_is_and_its_type(changes, bank_type) -> None:
    """In main_grad, in .grad or in a table, never in two of them. In f32 if several micro-batches or the steps of an
    Adam interval add to it."""
    engine, batch_at = make_trainee(**changes)
    batch, step_cfg = batch_at(0)
    for _ in range(2):
        engine.forward_backward(batch, step_cfg)
    sharded_groups = sharded_groups_of(engine)
    assert {*sharded_groups} == {label for label, p in engine.model.named_parameters() if hasattr(p, "main_grad")}
    want = dict(attn=bank_type, mlp=bank_type, lm_head=F32)
    assert {label: group.weight.main_grad.dtype for label, group in sharded_groups.items()} == want
    for label, p in engine.model.named_parameters():
        assert (p.grad is None) == (label in want or label in engine.tables), label
        assert p.grad is None or p.grad.dtype == p.dtype
    for label, table in engine.tables.items():
        unread = torch.ones(len(table.row_grads), dtype=bool)
        unread[batch.lookup_rows[label].flatten().long()] = False
        grads = table.row_grads
        assert grads.dtype == F32 and not grads[unread].any() and grads[~unread].any(1).all(), label

def test_step__addresses_never_change_and_stale_content_is_overwritten() -> None:
    engine, batch_at = make_trainee()
    other, _ = make_trainee()
    groups = sharded_groups_of(engine).values()

    def addresses() -> list[int]:
        return [x.data_ptr() for group in groups for x in (group.weight.main_grad, group.main_grad)]

    before = addresses()
    for step in range(4):
        for group in groups:
            if not group.weight.write_counts.any():
                group.main_grad.fill_(torch.nan)
        batch, step_cfg = batch_at(step)
        for each in (engine, other):
            each.forward_backward(batch, step_cfg)
            assert all(group.weight.grad is None for group in sharded_groups_of(each).values())
            each.optim_step(step_cfg)
    assert unequal(tensors_of(engine), tensors_of(other)) == []
    engine.forward_backward(*batch_at(4))
    assert all(group.weight.write_counts.all() for group in groups)
    engine.reset(0)
    assert addresses() == before
    assert not any(group.weight.write_counts.any() for group in groups)
    assert not {x.data_ptr() for x in engine.tensors().values()} & set(before), "a checkpoint has no main_grad"

def test_step__a_bank_with_a_matrix_that_was_not_written_is_refused(monkeypatch) -> None:
    """The error names the weight, and no weight changes."""
    engine, batch_at = make_trainee()
    batch, step_cfg = batch_at(1)
    real = tg.add_to_main_grad
    write_counts = engine.model.mlp.write_counts

    def incomplete(main_grad: Tensor, counts: Tensor, matrix_idx: int, *rest: Any) -> None:
        if counts is not write_counts or matrix_idx != 5:
            real(main_grad, counts, matrix_idx, *rest)

    engine.forward_backward(batch, step_cfg)
    before = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    monkeypatch.setattr(tg, "add_to_main_grad", incomplete)
    engine.forward_backward(batch, step_cfg)
    with pytest.raises(AssertionError, match="mlp: main_grad writes must be equal, not 0"):
        engine.optim_step(step_cfg)
    assert unequal(dict(engine.model.named_parameters()), before) == []

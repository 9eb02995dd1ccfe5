"""Section 7: main_grad. Where a weight's gradient is accumulated, what autograd receives, and what is refused.

The expected gradients are plain matmuls, gradients of autograd, and sums in float64.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import (BF16, F32, F64, make_engine, needs_compiler, randn, random_batch, small, tensors_of,
                    unequal)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import train_gpt as tg

def make_weight(*shape: int, seed: int = 0, dtype: torch.dtype = F64, grad_dtype: torch.dtype = F64,
                matrices: int = 1) -> Tensor:
    """Create a weight with a main_grad that is NaN before the first write."""
    weight = torch.nn.Parameter(randn(*shape, seed=seed, dtype=dtype))
    weight.main_grad = torch.full(shape, torch.nan, dtype=grad_dtype)
    weight.write_counts = torch.zeros(matrices, dtype=torch.int64)
    return weight

def storage_ptrs(*tensors: Tensor | None) -> list[int]:
    return [x.untyped_storage().data_ptr() for x in tensors if x is not None]

@pytest.mark.parametrize("product_given", (False, True))
@pytest.mark.parametrize("grad_dtype, input_dtype", [(F32, F32), (F64, F64), (F32, BF16), (BF16, BF16)])
def test_add_to_main_grad__the_first_write_overwrites_and_others_add(grad_dtype, input_dtype, product_given) -> None:
    """The first write also overwrites NaN. The other matrices of the buffer do not change."""
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

def test_add_to_main_grad__the_operator_declares_what_it_mutates() -> None:
    """A compiler removes an operator without declared mutations as dead code."""
    op = torch.ops.train_gpt.add_to_main_grad.default
    for count, b in ((0, randn(7, 5)), (1, randn(7, 5)), (1, None)):
        a = randn(7 if b is not None else 4, 4 if b is not None else 5)
        torch.library.opcheck(op, (torch.zeros(4, 5, dtype=F64), torch.tensor([0, count]), 1, a, b))
    written = [x.name for x in op._schema.arguments if x.is_write]
    assert written == ["main_grad", "write_counts"] and not op._schema.returns

# Columns: has main_grad, has the flag grad_added_to_main_grad, gradient is deferred, what autograd receives.
CONTRACT = [
    (False, False, False, "gradient"), (False, True, False, "gradient"),
    (True, False, False, None), (True, True, False, "dummy"),
    (False, False, True, None), (False, True, True, None), (True, False, True, None), (True, True, True, "dummy")]

def contract_weight(main_grad: bool, flag: bool) -> Tensor:
    weight = make_weight(4, 3)
    if not main_grad:
        del weight.main_grad
    if flag:
        weight.grad_added_to_main_grad = False
    return weight

# The two products with a weight W: x @ W^T, and x @ W, which transposes the WeightMatrix.
products = pytest.mark.parametrize("transposed", [False, True], ids=["x @ W^T", "x @ W"])

INPUTS = {False: 3, True: 4}                                         # transposed -> columns of x, for W (4, 3)

def operand(weight: Tensor, transposed: bool, queue: tg.DeferredGrads | None = None) -> tg.WeightMatrix:
    matrix = tg.as_matrix(weight, queue)
    if transposed:
        return matrix.t()
    return matrix

@products
@pytest.mark.parametrize("main_grad, flag, deferred, want", CONTRACT)
@pytest.mark.parametrize("scale", [None, 0.7])
def test_linear_main_grad__what_backward_returns(main_grad, flag, deferred, want, scale, transposed) -> None:
    """Check every case of the contract in two micro-batches: plain, accumulated, deferred, without and with the flag.

    Hooks on the weight receive what backward returns. No gradient has a graph, since a graph retains its operands.
    """
    weight = contract_weight(main_grad, flag)
    queue = [] if deferred else None
    seen, after = [], []
    weight.register_hook(seen.append)
    weight.register_post_accumulate_grad_hook(lambda p: after.append(p.grad is not None))
    inputs, outputs = INPUTS[transposed], INPUTS[not transposed]
    first = torch.nn.Parameter(randn(inputs, inputs, seed=9))
    scale = scale and torch.tensor(scale, dtype=F64)
    true_gradient = torch.zeros(4, 3, dtype=F64)
    for seed in (1, 2):
        if flag:
            weight.grad_added_to_main_grad = False
        x = randn(5, inputs, seed=seed) @ first
        tg.linear_main_grad(x, operand(weight, transposed, queue), scale).sum().backward()
        of_matmul = torch.ones(5, outputs, dtype=F64).t() @ x.detach()
        if transposed:
            of_matmul = of_matmul.t()
        true_gradient += of_matmul if scale is None else scale * of_matmul
        if flag:
            assert weight.grad_added_to_main_grad is (want == "dummy")

    assert len(seen) == len(after) == 2, "hooks run in every case"
    assert after == [want is not None] * 2
    if want == "gradient":
        torch.testing.assert_close(weight.grad, true_gradient)
        torch.testing.assert_close(sum(seen), true_gradient)
    elif want == "dummy":
        assert not weight.grad.any()
        assert all(x.shape == weight.shape and x.dtype == weight.dtype and not x.any() for x in seen)
    else:
        assert weight.grad is None and seen == [None, None]
    if main_grad:
        # No gradient may be an alias of main_grad or of another one, because autograd adds to gradients in place.
        given = storage_ptrs(*seen)
        assert len({*given}) == len(given)
        assert not {*given, *storage_ptrs(weight.grad)} & {*storage_ptrs(weight.main_grad)}
    if deferred:
        assert len(queue) == 2 and weight.write_counts.tolist() == [0]
        tg.run_deferred(queue)
        assert queue == []
    found = weight.main_grad if main_grad else weight.grad
    torch.testing.assert_close(found, true_gradient)
    assert not found.requires_grad
    assert weight.write_counts.tolist() == [2 * main_grad]

@products
@pytest.mark.parametrize("main_grad, flag, deferred, _", CONTRACT)
def test_add_gradient__a_frozen_matrix_gets_none_in_every_case(main_grad, flag, deferred, _, transposed) -> None:
    """No gradient is written or queued, and no flag is set. The gradient of the input is computed nevertheless."""
    weight = contract_weight(main_grad, flag).requires_grad_(False)
    queue = []
    inputs = INPUTS[transposed]
    x = randn(5, inputs).requires_grad_()
    tg.linear_main_grad(x, operand(weight, transposed, queue if deferred else None)).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(dim=int(transposed)).expand(5, inputs))
    assert weight.grad is None and queue == [] and weight.write_counts.tolist() == [0]
    assert not main_grad or weight.main_grad.isnan().all()
    assert not flag or weight.grad_added_to_main_grad is False

@products
@pytest.mark.parametrize("main_grad, flag, deferred, _", CONTRACT)
def test_linear_main_grad__a_weight_that_is_used_twice_in_one_graph(main_grad, flag, deferred, _, transposed) -> None:
    """Each use writes once, and autograd does not add main_grad to itself.

    The second use may be the other product: x @ W^T, then x @ W.
    """
    weight = make_weight(4, 4)
    if not main_grad:
        del weight.main_grad
    if flag:
        weight.grad_added_to_main_grad = False
    queue = []
    x = randn(5, 4, seed=1)
    hidden = (x @ weight.t()).square()
    true_gradient, = torch.autograd.grad((hidden @ (weight if transposed else weight.t())).sum(), weight)
    for backward in (1, 2):
        matrix, last_matrix = (operand(weight, each, queue if deferred else None) for each in (False, transposed))
        tg.linear_main_grad(tg.linear_main_grad(x, matrix).square(), last_matrix).sum().backward()
        tg.run_deferred(queue)
        found = weight.main_grad if main_grad else weight.grad
        torch.testing.assert_close(found, backward * true_gradient)
        assert weight.write_counts.tolist() == [2 * backward * main_grad]
    assert not main_grad or not flag or not weight.grad.any(), "dummies add up to zeros"

def as_views(bank: Tensor) -> list[list[tg.WeightMatrix]]:
    """Return each matrix as a separate weight, whose main_grad is a view of the bank's."""
    by_layer = []
    for layer, gradient in zip(bank.unbind(), bank.main_grad.unbind()):
        pair = []
        for rows in (slice(0, 6), slice(6, 12)):
            matrix = layer[rows]
            matrix.main_grad = gradient[rows]
            matrix.write_counts = torch.zeros(1, dtype=torch.int64)
            pair.append(tg.as_matrix(matrix))
        by_layer.append(pair)
    return by_layer

@products
@pytest.mark.parametrize("how", ("bank", "views", "frozen", "aot_eager",
                                 pytest.param("inductor", marks=needs_compiler)))
def test_matrices_by_layer__a_bank_and_its_views_get_autograds_gradients(how, transposed) -> None:
    """Gradients equal those of autograd in two micro-batches.

    The gradient of the learned scale remains with autograd. The compiled function has one graph for all writes. If
    `transposed`, the last product of a layer is x @ W.
    """
    bank = make_weight(3, 12, 4, seed=1, matrices=6)
    scale = torch.nn.Parameter(torch.tensor(0.7, dtype=F64))
    x = randn(5, 4, seed=2).requires_grad_()
    want_x = x
    for layer in bank:
        up, down = layer.split((6, 6))
        hidden = (want_x @ (scale * up).t()).relu()
        if transposed:
            want_x = want_x + hidden @ (scale * down)
        else:
            want_x = want_x + (hidden * (want_x @ down.t()))[:, :4]
    want = torch.autograd.grad(want_x.square().sum(), [bank, x, scale])
    bank.requires_grad_(how != "frozen")

    def loss(x: Tensor) -> Tensor:
        for up, down in as_views(bank) if how == "views" else tg.matrices_by_layer(bank, (6, 6)):
            hidden = tg.linear_main_grad(x, up, scale).relu()
            if transposed:
                x = x + tg.linear_main_grad(hidden, down.t(), scale)
            else:
                x = x + (hidden * tg.linear_main_grad(x, down))[:, :4]
        return x.square().sum()

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = how in ("aot_eager", "inductor")
    call = torch.compile(loss, backend=how, fullgraph=True) if compiled else loss
    for micro_batch in (1, 2):
        call(x).backward()
        assert bank.grad is None
        # Views are created again for each call, so their first write overwrites.
        times = 1 if how == "views" else micro_batch
        if how == "frozen":
            assert bank.main_grad.isnan().all()
        else:
            torch.testing.assert_close(bank.main_grad, times * want[0])
        torch.testing.assert_close(x.grad, micro_batch * want[1])
        torch.testing.assert_close(scale.grad, micro_batch * want[2])
        assert bank.write_counts.tolist() == [micro_batch * (compiled or how == "bank")] * 6
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled

def test_matrices_by_layer__a_buffer_that_is_not_contiguous_is_refused() -> None:
    bank = make_weight(2, 3, 4, 5, matrices=6)
    bank.main_grad = torch.zeros(2, 4, 3, 5, dtype=F64).transpose(1, 2)
    with pytest.raises(RuntimeError, match="view"):
        tg.matrices_by_layer(bank, (4, 4, 4))

def test_run_deferred__a_bank_without_main_grad_gets_autograds_gradients() -> None:
    """The gradients of all matrices of the bank are added to bank.grad. An earlier gradient is kept."""
    bank = torch.nn.Parameter(randn(2, 7, 4))
    x = randn(5, 4, seed=1)

    def output(queue: tg.DeferredGrads | None) -> Tensor:
        total = x
        for layer in tg.matrices_by_layer(bank, (3, 4)):
            first, last = (matrix._replace(deferred=queue) for matrix in layer)
            total = total + tg.linear_main_grad(tg.linear_main_grad(x, first), first.t())
            total = total + tg.linear_main_grad(x, last)
        return total.square().sum()

    want, = torch.autograd.grad(output(None), bank)
    queue = []
    for backward in (1, 2):
        output(queue).backward()
        tg.run_deferred(queue)
        torch.testing.assert_close(bank.grad, backward * want)

@pytest.mark.parametrize("flag", (True, False), ids=("flag", "deferred"))
def test_linear_main_grad__compiled_code_refuses_flag_and_queue(flag) -> None:
    """The compiler raises an error. It never ignores a flag or a queue silently."""
    weight = make_weight(4, 3)
    if flag:
        weight.grad_added_to_main_grad = False
    queue = None if flag else []
    torch._dynamo.reset()

    def product(x: Tensor) -> Tensor:
        return tg.linear_main_grad(x, tg.as_matrix(weight, queue))

    call = torch.compile(product, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        call(randn(5, 3)).sum().backward()

def head_losses(x: Tensor, weight: Tensor, precision: str = "plain") -> Tensor:
    targets = torch.tensor([[1, 3, 0, 8, 2]])
    return tg.HeadLoss.apply(x, weight, targets, torch.ones(1, dtype=F64), precision, tg.as_matrix(weight))[0]

@pytest.mark.parametrize("frozen", ("up", "down", "plain", "emulated"))
def test_add_gradient__a_frozen_matrix_of_the_mlp_or_the_head_keeps_its_main_grad(frozen) -> None:
    """The other matrix of an MLP is written nevertheless. `plain` and `emulated` are precisions of the head."""
    x = randn(5, 4, seed=2).requires_grad_()
    weights = dict(up=make_weight(8, 4), down=make_weight(8, 4, seed=1))
    if frozen not in weights:
        weights = {frozen: make_weight(4, 9)}
    weights[frozen].requires_grad_(False)
    if frozen in ("up", "down"):
        out = tg.relu_sq_mlp(x, *map(tg.as_matrix, weights.values()))
    else:
        out = head_losses(x, weights[frozen], frozen)
    out.sum().backward()
    assert x.grad is not None
    for name, weight in weights.items():
        assert weight.write_counts.tolist() == [int(name != frozen)]
        assert weight.main_grad.isnan().all() == (name == frozen)

@products
def test_linear_main_grad__an_f32_main_grad_of_a_scaled_bank_is_exact_over_64_micro_batches(transposed) -> None:
    """Compared with the sum in f64 of matmuls of the same bf16 operands. Rounding each to bf16 has an error of 3e-3."""
    bank = make_weight(2, 48, 16, dtype=BF16, grad_dtype=F32, matrices=4)
    scales = torch.nn.Parameter(torch.tensor([0.7, 1.3]))
    want = torch.zeros(2, 48, 16, dtype=F64)
    for micro_batch in range(64):
        x = randn(40, 16, seed=micro_batch, dtype=BF16)
        for layer, matrices in enumerate(tg.matrices_by_layer(bank, (36, 12))):
            for weight, scale, rows in zip(matrices, scales.unbind(), (slice(0, 36), slice(36, 48))):
                grad = randn(40, len(weight.matrix), seed=100 * weight.count_idx + micro_batch, dtype=BF16)
                if transposed:
                    tg.linear_main_grad(grad, weight.t(), scale).backward(x)
                else:
                    tg.linear_main_grad(x, weight, scale).backward(grad)
                want[layer, rows] += scale.detach().double() * (grad.double().t() @ x.double())
    assert float((bank.main_grad.double() - want).norm() / want.norm()) < 1e-6

# Operations that write a gradient themselves. They map x (5, 4) and their weights to any output.
def matmul(x: Tensor, weight: Tensor) -> Tensor:
    return tg.linear_main_grad(x, tg.as_matrix(weight))

def transposed_matmul(x: Tensor, weight: Tensor) -> Tensor:
    return tg.linear_main_grad(x, tg.as_matrix(weight).t())

def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return tg.relu_sq_mlp(x, tg.as_matrix(up), tg.as_matrix(down))

def emulated_head(x: Tensor, weight: Tensor) -> Tensor:
    return head_losses(x, weight, "emulated")

def lookup(x: Tensor, row_grads: Tensor) -> Tensor:
    return tg.RowLookup.apply(x, torch.tensor([0, 4, 0]), row_grads.main_grad)

OPERATIONS = {matmul: [(8, 4)], transposed_matmul: [(4, 8)], mlp: [(8, 4)] * 2, head_losses: [(4, 9)],
              emulated_head: [(4, 9)], lookup: [(5, 4)]}

def weights_for(operation: Callable) -> list[Tensor]:
    weights = [make_weight(*shape, seed=seed) for seed, shape in enumerate(OPERATIONS[operation])]
    if operation is lookup:
        # The first write to row_grads does not overwrite.
        weights[0].main_grad.zero_()
    return weights

@pytest.mark.parametrize("operation", [operation for operation in OPERATIONS if operation is not lookup])
def test_once_differentiable__a_gradient_of_a_gradient_is_refused(operation: Callable) -> None:
    x = randn(5, 4).requires_grad_()
    grad, = torch.autograd.grad(operation(x, *weights_for(operation)).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()

def test_once_differentiable__guards_every_operation_of_the_trainer() -> None:
    classes = (x for x in vars(tg).values() if isinstance(x, type))
    operations = [x for x in classes if issubclass(x, torch.autograd.Function)]
    assert len(operations) >= 5
    guard = tg.once_differentiable(print).__code__
    assert all(cls.backward.__code__ is guard for cls in operations)

@pytest.mark.parametrize("deferred", (False, True), ids=("at once", "deferred"))
@pytest.mark.parametrize("reentrant", (False, True), ids=("saved tensors", "reentrant"))
@pytest.mark.parametrize("operation", OPERATIONS)
def test_add_gradient__activation_checkpointing_changes_no_bit(operation, reentrant, deferred, monkeypatch) -> None:
    """Recomputing the forward pass writes no gradient: every main_grad is written once per backward pass."""
    as_matrix = tg.as_matrix
    queue = []
    if deferred:
        monkeypatch.setattr(tg, "as_matrix", lambda param: as_matrix(param, queue))
    found = []
    for checkpointed in (False, True):
        weights = weights_for(operation)
        x = randn(5, 4, seed=3).requires_grad_()
        for backward in (1, 2):
            # Weights are no arguments of checkpoint, because reentrant checkpointing detaches its arguments.
            def forward(x: Tensor, weights: list[Tensor] = weights) -> Tensor:
                return operation(x, *weights)

            out = checkpoint(forward, x * 2, use_reentrant=reentrant) if checkpointed else forward(x * 2)
            out.square().sum().backward()
            tg.run_deferred(queue)
            if operation is not lookup:
                assert all(weight.write_counts.tolist() == [backward] for weight in weights)
            assert all(weight.grad is None for weight in weights)
        found.append([*(weight.main_grad for weight in weights), torch.zeros(()) if x.grad is None else x.grad])
    assert all(a.equal(b) for a, b in zip(*found, strict=True))
    assert all(main_grad.isfinite().all() and main_grad.any() for main_grad in found[0][:-1])

def make_trainee(**changes: Any) -> tuple[tg.Engine, Callable[[int], tuple[tg.Batch, tg.StepConfig]]]:
    """Return a small engine, and a function that returns the batch and step config of a step."""
    cfg = small(**changes)
    schedule = tg.Schedule(cfg)

    def batch_at(step: int) -> tuple[tg.Batch, tg.StepConfig]:
        return random_batch(cfg, step, 8, 16, step), schedule.at(step)

    return make_engine(cfg), batch_at

def sharded_groups_of(engine: tg.Engine) -> dict[str, tg.ShardedGroup]:
    return {label: group for label, group in engine.optimizer.groups.items() if isinstance(group, tg.ShardedGroup)}

@pytest.mark.parametrize("changes, bank_type", [
    (dict(dtype="bfloat16"), BF16), (dict(dtype="float32"), F32),
    (dict(dtype="bfloat16", micro_batch_size=1), F32)])
def test_Optimizer__where_each_gradient_is_and_its_type(changes, bank_type) -> None:
    """Each gradient is in main_grad, in .grad or in a table, never in two of them.

    Its type is f32 if several micro-batches or the steps of an Adam cycle add to it.
    """
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
        unread = torch.ones(len(table.grad), dtype=bool)
        unread[batch.row_index[label].flatten().long()] = False
        assert table.grad.dtype == F32 and not table.grad[unread].any() and table.grad[~unread].any(1).all(), label

def test_step__addresses_never_change_and_stale_content_is_overwritten() -> None:
    """Addresses stay the same over steps and a reset. Cleared buffers are never read."""
    engine, batch_at = make_trainee()
    other, _ = make_trainee()
    groups = sharded_groups_of(engine).values()

    def addresses() -> list[int]:
        return [x.data_ptr() for group in groups for x in (group.weight.main_grad, group.main_grad)]

    before = addresses()
    for step in range(4):
        for group in groups:
            if not group.has_gradient():
                group.main_grad.fill_(torch.nan)
        batch, step_cfg = batch_at(step)
        for each in (engine, other):
            each.forward_backward(batch, step_cfg)
            assert all(group.weight.grad is None for group in sharded_groups_of(each).values())
            each.optim_step(step_cfg)
    assert unequal(tensors_of(engine), tensors_of(other)) == []
    engine.forward_backward(*batch_at(4))
    assert all(group.has_gradient() for group in groups)
    engine.reset(0)
    assert addresses() == before
    assert not any(group.has_gradient() for group in groups)
    assert not {x.data_ptr() for x in engine.tensors().values()} & set(before), "a checkpoint has no main_grad"

def test_step__a_bank_with_a_matrix_that_was_not_written_is_refused(monkeypatch) -> None:
    """The error names the weight, and no weight changes."""
    engine, batch_at = make_trainee()
    batch, step_cfg = batch_at(1)
    real = tg.add_to_main_grad
    write_counts = engine.model.mlp.write_counts

    def incomplete(main_grad: Tensor, counts: Tensor, count_idx: int, *rest: Any) -> None:
        if counts is not write_counts or count_idx != 5:
            real(main_grad, counts, count_idx, *rest)

    engine.forward_backward(batch, step_cfg)
    before = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    monkeypatch.setattr(tg, "add_to_main_grad", incomplete)
    engine.forward_backward(batch, step_cfg)
    with pytest.raises(AssertionError, match="mlp: backward must write every main_grad"):
        engine.optim_step(step_cfg)
    assert unequal(dict(engine.model.named_parameters()), before) == []

def test_run_deferred__deferring_a_whole_step_changes_no_bit(monkeypatch) -> None:
    """A fork may defer all gradients of the banks. Before `run_deferred`, optim_step raises."""
    by_layer = tg.matrices_by_layer
    queue = []

    def deferring(*args: Any) -> list[list[tg.WeightMatrix]]:
        return [[matrix._replace(deferred=queue) for matrix in layer] for layer in by_layer(*args)]

    found = []
    for deferred in (False, True):
        with monkeypatch.context() as patch:
            if deferred:
                patch.setattr(tg, "matrices_by_layer", deferring)
            engine, batch_at = make_trainee()
            for step in range(2):
                batch, step_cfg = batch_at(step)
                engine.forward_backward(batch, step_cfg)
                if deferred:
                    with pytest.raises(AssertionError, match="no gradients for .*attn.*mlp"):
                        engine.optim_step(step_cfg)
                tg.run_deferred(queue)
                engine.optim_step(step_cfg)
        found.append(engine.tensors())
    assert unequal(*found) == []

"""Gradients that land where they are used: what backward returns, what is written first, further, twice or never.

Expected are plain products, autograd's own gradients and sums in float64.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import BF16, F32, F64, engine, randn, random_batch, refused, small
from torch import Tensor

import train_gpt as tg

def owner(*shape: int, seed: int = 0, dtype: torch.dtype = F64, kept_in: torch.dtype = F64, parts: int = 1) -> Tensor:
    """A weight with a main_grad, in which NaN stands before the first write."""
    weight = torch.nn.Parameter(randn(*shape, seed=seed, dtype=dtype))
    weight.main_grad = torch.full(shape, torch.nan, dtype=kept_in)
    weight.write_counts = torch.zeros(parts, dtype=torch.int64)
    return weight

@pytest.mark.parametrize("product_is_given", (False, True))
@pytest.mark.parametrize("kept_in, given_in", [(F32, F32), (F64, F64), (F32, BF16), (BF16, BF16)])
def test_wgrad_accumulate__the_first_write_overwrites_and_further_ones_add(kept_in, given_in, product_is_given):
    """Also what is not a number; the other parts of the buffer stay as they are."""
    bank = torch.full((3, 4, 5), torch.nan, dtype=kept_in)
    write_counts = torch.zeros(3, dtype=torch.int64)
    want = torch.zeros(4, 5, dtype=F64)
    for write in range(3):
        a = randn(7, 4, seed=write, dtype=given_in)
        b = randn(7, 5, seed=write + 10, dtype=given_in)
        product = a.double().t() @ b.double()
        want += product
        factors = [product.to(given_in), None] if product_is_given else [a, b]
        tg.add_to_main_grad(bank[1], write_counts, 1, *factors)
        assert write_counts.tolist() == [0, write + 1, 0]
    rounding = 0.05 if BF16 in (kept_in, given_in) and (product_is_given or kept_in == BF16) else 1e-5
    torch.testing.assert_close(bank[1].double(), want, rtol=rounding, atol=rounding)
    assert bank[0].isnan().all() and bank[2].isnan().all()

@pytest.mark.parametrize("main_grad, flag, delayed, want", [
    (False, False, False, "gradient"), (False, False, True, None), (True, False, False, None),
    (True, True, False, "dummy"), (True, False, True, None), (True, True, True, "dummy")])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_linear__what_backward_returns(main_grad, flag, deferred, want, scale):
    """The six configurations of the contract, in two micro-batches. Hooks see what is returned. Autograd follows no
    flush, else the sums would hold all that the factors came from."""
    weight = owner(4, 3)
    queue = [] if deferred else None
    seen = []
    weight.register_hook(seen.append)
    if not main_grad:
        del weight.main_grad
    if flag:
        weight.grad_added_to_main_grad = False
    first = torch.nn.Parameter(randn(3, 3, seed=9))
    scale = scale and torch.tensor(scale, dtype=F64)
    true_gradient = torch.zeros(4, 3, dtype=F64)
    for seed in (1, 2):
        x = randn(5, 3, seed=seed) @ first
        tg.linear(x, tg.as_matrix(weight, queue), scale).sum().backward()
        of_product = torch.ones(5, 4, dtype=F64).t() @ x.detach()
        true_gradient += of_product if scale is None else scale * of_product

    if want == "gradient":
        torch.testing.assert_close(weight.grad, true_gradient)
    elif want == "dummy":
        assert weight.grad_added_to_main_grad is True
        one, two = seen
        assert one.shape == two.shape == weight.shape and one.dtype == weight.dtype
        assert len({x.untyped_storage().data_ptr() for x in (one, two, weight.main_grad)}) == 3
    else:
        assert weight.grad is None
    if deferred:
        assert len(queue) == 2 and weight.write_counts.tolist() == [0]
        tg.flush(queue)
        assert queue == []
    found = weight.main_grad if main_grad else weight.grad
    torch.testing.assert_close(found, true_gradient)
    assert not found.requires_grad
    assert weight.write_counts.tolist() == [2 * main_grad]

@pytest.mark.parametrize("changed", ("input", "gradient"))
def test_flush__a_factor_that_was_changed_is_refused(changed):
    """Before anything is written, of the products that came before it, too."""
    weight = owner(4, 3)
    queue = []
    factors = [dict(input=randn(5, 3, seed=seed), gradient=randn(5, 4, seed=seed)) for seed in (1, 2)]
    for each in factors:
        tg.linear(each["input"], tg.as_matrix(weight, queue)).backward(each["gradient"])
    factors[1][changed] += 1
    with refused(tg.RunError, "delayed gradient", "(4, 3)", "changed in place"):
        tg.flush(queue)
    assert weight.write_counts.tolist() == [0] and len(queue) == 2

def as_views(bank: Tensor) -> list[list[tg.WeightMatrix]]:
    """Each matrix as a weight of its own, whose main_grad is a view of the bank's."""
    groups = []
    for layer, gradient in zip(bank.unbind(), bank.main_grad.unbind()):
        pair = []
        for rows in (slice(0, 6), slice(6, 12)):
            matrix = layer[rows]
            matrix.main_grad = gradient[rows]
            matrix.write_counts = torch.zeros(1, dtype=torch.int64)
            pair.append(tg.as_matrix(matrix))
        groups.append(pair)
    return groups

@pytest.mark.parametrize("how", ("bank", "views", "frozen", "aot_eager"))
def test_bank_parts__a_bank_and_its_views_get_autograds_gradients(how):
    """Two micro-batches; the learnt scalar's gradient stays autograd's. One graph serves all writes."""
    bank = owner(3, 12, 4, seed=1, parts=6)
    scale = torch.nn.Parameter(torch.tensor(0.7, dtype=F64))
    x = randn(5, 4, seed=2).requires_grad_()
    want_x = x
    for layer in bank:
        up, down = layer.split((6, 6))
        want_x = want_x + ((want_x @ (scale * up).t()).relu() * (want_x @ down.t()))[:, :4]
    want = torch.autograd.grad(want_x.square().sum(), [bank, x, scale])
    bank.requires_grad_(how != "frozen")

    def loss(x: Tensor) -> Tensor:
        for up, down in as_views(bank) if how == "views" else tg.matrices_by_layer(bank, (6, 6)):
            x = x + (tg.linear(x, up, scale).relu() * tg.linear(x, down))[:, :4]
        return x.square().sum()

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    call = torch.compile(loss, backend="aot_eager", fullgraph=True) if how == "aot_eager" else loss
    for micro_batch in (1, 2):
        call(x).backward()
        assert bank.grad is None
        times = 1 if how == "views" else micro_batch                          # views made anew are written anew
        if how == "frozen":
            assert bank.main_grad.isnan().all()
        else:
            torch.testing.assert_close(bank.main_grad, times * want[0])
        torch.testing.assert_close(x.grad, micro_batch * want[1])
        torch.testing.assert_close(scale.grad, micro_batch * want[2])
        assert bank.write_counts.tolist() == [micro_batch * (how in ("bank", "aot_eager"))] * 6
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (how == "aot_eager")

def test_bank_parts__a_buffer_that_is_no_block_is_refused():
    bank = owner(2, 3, 4, 5, parts=6)
    bank.main_grad = torch.zeros(2, 4, 3, 5, dtype=F64).transpose(1, 2)
    with pytest.raises(RuntimeError, match="view"):
        tg.matrices_by_layer(bank, (4, 4, 4))

@pytest.mark.parametrize("flag", (True, False), ids=("flag", "delayed"))
def test_linear__compiled_code_takes_neither_flag_nor_delay(flag):
    """The compiler's own error, and not a flag or a queue that it loses."""
    weight = owner(4, 3)
    if flag:
        weight.grad_added_to_main_grad = False
    queue = None if flag else []
    torch._dynamo.reset()

    def product(x: Tensor) -> Tensor:
        return tg.linear(x, tg.as_matrix(weight, queue))

    call = torch.compile(product, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        call(randn(5, 3)).sum().backward()

def head_losses(x: Tensor, weight: Tensor, precision: str = "plain") -> Tensor:
    one = torch.ones(1, dtype=F64)
    return tg.HeadLoss.apply(x, weight, torch.tensor([[1, 3, 0, 8, 2]]), one, one[0], precision, F64,
                             tg.as_matrix(weight))

@pytest.mark.parametrize("frozen", ("up", "down", "plain", "emulated"))
def test_backward__a_frozen_matrix_keeps_what_it_has(frozen):
    """And the other one of an MLP is written all the same; plain and emulated are the head's."""
    x = randn(5, 4, seed=2).requires_grad_()
    weights = dict(up=owner(8, 4), down=owner(8, 4, seed=1))
    if frozen not in weights:
        weights = {frozen: owner(4, 9)}
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

def test_linear__an_f32_main_grad_of_a_scaled_bank_is_exact_over_64_micro_batches():
    """Of the factors in bf16, against a sum in f64. A product that is rounded to bf16 first is off by 3e-3."""
    bank = owner(2, 48, 16, dtype=BF16, kept_in=F32, parts=4)
    scales = torch.nn.Parameter(torch.tensor([0.7, 1.3]))
    want = torch.zeros(2, 48, 16, dtype=F64)
    for micro_batch in range(64):
        x = randn(40, 16, seed=micro_batch, dtype=BF16)
        for layer, parts in enumerate(tg.matrices_by_layer(bank, (36, 12))):
            for part, scale, rows in zip(parts, scales.unbind(), (slice(0, 36), slice(36, 48))):
                grad = randn(40, len(part.matrix), seed=100 * part.number + micro_batch, dtype=BF16)
                tg.linear(x, part, scale).backward(grad)
                want[layer, rows] += scale.detach().double() * (grad.double().t() @ x.double())
    assert float((bank.main_grad.double() - want).norm() / want.norm()) < 1e-6

def product(x: Tensor) -> Tensor:
    return tg.linear(x, tg.as_matrix(torch.nn.Parameter(randn(8, 4))))

def mlp(x: Tensor) -> Tensor:
    up, down = (tg.as_matrix(torch.nn.Parameter(randn(8, 4, seed=seed))) for seed in (0, 1))
    return tg.relu_sq_mlp(x, up, down)

def head(x: Tensor) -> Tensor:
    return head_losses(x, torch.nn.Parameter(randn(4, 9)))

def lookup(x: Tensor) -> Tensor:
    return tg.RowLookup.apply(x, torch.tensor([0, 4, 0]), torch.zeros(5, 4).double())

@pytest.mark.parametrize("forward", [product, mlp, head, lookup])
def test_first_order__a_gradient_of_a_gradient_is_refused(forward: Callable):
    """Also where the gradient that arrives is a constant, which autograd would let pass."""
    x = randn(5, 4).requires_grad_()
    total = forward(x).sum()
    with refused(tg.RunError, "create_graph", "first order"):
        torch.autograd.grad(total, x, create_graph=True)

def trained(**changes: Any) -> tuple[tg.Engine, Callable[[int], tuple[tg.Batch, tg.Values]]]:
    cfg = small(**changes)
    schedule = tg.Schedule(cfg)

    def batch_of(step: int) -> tuple[tg.Batch, tg.Values]:
        return random_batch(cfg, step, 8, 16, step), schedule.at(step)

    return engine(cfg), batch_of

@pytest.mark.parametrize("changes, bank_type", [
    (dict(dtype="bfloat16"), BF16), (dict(dtype="float32"), F32),
    (dict(dtype="bfloat16", slots_per_micro_batch=1), F32)])
def test_Optimizer__where_each_gradient_is_and_its_type(changes, bank_type):
    """A label is in one set. f32 where a rank writes more than once between clears: micro-batches, or an Adam cycle."""
    cfg = small(**changes)
    ex = tg.Engine(cfg, tg.Fabric(torch.device("cpu"), 0, 1), tg.attention_reference, "plain",
                     cfg.slots_per_micro_batch)
    batch = random_batch(cfg, 0, 8, 16)
    values = tg.Schedule(cfg).at(0)
    for _ in range(2):
        ex.forward_backward(batch, values)
    assert {*ex.optimizer.sharded} == {label for label, p in ex.model.named_parameters() if hasattr(p, "main_grad")}
    want = dict(attn=bank_type, mlp=bank_type, lm_head=F32)
    assert {label: entry.weight.main_grad.dtype for label, entry in ex.optimizer.sharded.items()} == want
    for label, p in ex.model.named_parameters():
        assert (p.grad is None) == (label in want or label in ex.tables), label
        assert p.grad is None or p.grad.dtype == p.dtype
    for label, table in ex.tables.items():
        unread = torch.ones(len(table.grad), dtype=bool)
        unread[batch.row_index[label].flatten().long()] = False
        assert table.grad.dtype == F32 and not table.grad[unread].any() and table.grad[~unread].any(1).all(), label

def test_step__addresses_never_change_and_stale_content_is_overwritten():
    """Over steps, a snapshot and its return; what stands in a cleared buffer is never read."""
    ex, batch_of = trained()
    other, _ = trained()
    entries = ex.optimizer.sharded.values()

    def addresses() -> list[int]:
        return [x.data_ptr() for entry in entries for x in (entry.weight.main_grad, entry.main_grad)]

    before = addresses()
    restore = ex.snapshot()
    for step in range(4):
        for entry in entries:
            if entry.num_backwards == 0:
                entry.weight.main_grad.fill_(torch.nan)
        batch, values = batch_of(step)
        for each in (ex, other):
            each.forward_backward(batch, values)
            assert all(entry.weight.grad is None for entry in each.optimizer.sharded.values())
            each.optim_step(values)
    for label, p in ex.model.named_parameters():
        assert p.equal(other.model.get_parameter(label)), label
    ex.forward_backward(*batch_of(4))
    assert all(entry.num_backwards for entry in entries)
    restore()
    assert addresses() == before
    assert not any(entry.num_backwards or entry.weight.write_counts.any() for entry in entries)
    assert not {x.data_ptr() for x in ex.state_tensors().values()} & set(before), "a snapshot copies no main_grad"

@pytest.mark.parametrize("mishap, label", [("lost", "attn"), ("lost", "lm_head"), ("twice", "mlp"), ("one", "mlp")])
def test_has_gradient__a_micro_batch_that_is_lost_or_runs_twice_is_named(monkeypatch, mishap, label):
    """Also one matrix of a bank that was not written."""
    ex, batch_of = trained()
    batch, values = batch_of(1)
    real = tg.add_to_main_grad
    write_counts = ex.model.get_parameter(label).write_counts

    def wrong(main_grad: Tensor, written: Tensor, number: int, *rest: Any) -> None:
        mine = written is write_counts
        times = dict(lost=0, twice=2, one=int(number != 5))[mishap] if mine else 1
        for _ in range(times):
            real(main_grad, written, number, *rest)

    ex.forward_backward(batch, values)
    monkeypatch.setattr(tg, "wgrad_accumulate", wrong)
    ex.forward_backward(batch, values)
    found = dict(lost="[1", twice="[3", one="2, 1, 2")[mishap]
    with refused(tg.RunError, f"main_grad of {label}", found, "2 times each", "micro-batch", "drop_gradients"):
        ex.optim_step(values)

def test_whole_weights__padding_is_not_saved():
    """A file holds the whole storage of a view."""
    ex, _ = trained()
    ex.model.attn.data = torch.cat((ex.model.attn.data, ex.model.attn.data[:1]))[:-1]     # as where ranks share it out
    saved = ex.whole_weights(tg.Schedule(ex.cfg).at(0))["attn"]
    assert saved.equal(ex.model.attn) and saved.untyped_storage().nbytes() == saved.nbytes

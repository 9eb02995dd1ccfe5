"""Gradients that land where they are used: what backward returns, what is written first, further, twice or never.

Expected are plain products, autograd's own gradients and sums in float64.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import executor, random_batch, refused, set_grad, small
from torch import Tensor

import train_gpt as tg

OWNED = ("attn", "mlp", "lm_head")
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=F64).to(dtype)


# ---- The op ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("product_is_given", (False, True))
@pytest.mark.parametrize("kept_in, given_in", [(F32, F32), (F64, F64), (F32, BF16), (BF16, BF16)])
def test_the_first_write_overwrites_and_further_ones_add(kept_in, given_in, product_is_given):
    """Also what is not a number; the other parts of the buffer stay as they are."""
    bank = torch.full((3, 4, 5), torch.nan, dtype=kept_in)
    written = torch.zeros(3, dtype=torch.int64)
    want = torch.zeros(4, 5, dtype=F64)
    for write in range(3):
        a = randn(7, 4, seed=write, dtype=given_in)
        b = randn(7, 5, seed=write + 10, dtype=given_in)
        product = a.double().t() @ b.double()
        want += product
        if product_is_given:
            a, b = product.to(given_in), None
        tg.add_product(bank[1], written, 1, a, b)
        assert written.tolist() == [0, write + 1, 0]
    rounding = 0.05 if BF16 in (kept_in, given_in) and (product_is_given or kept_in == BF16) else 1e-5
    torch.testing.assert_close(bank[1].double(), want, rtol=rounding, atol=rounding)
    assert bank[0].isnan().all()
    assert bank[2].isnan().all()


def test_sums_are_kept_in_the_buffers_type():
    """256 + 7 times 1: bf16 has no 257."""
    for dtype, want in ((F32, 263), (BF16, 256)):
        buffer = torch.empty(1, 1, dtype=dtype)
        written = torch.zeros(1, dtype=torch.int64)
        for value in (256, *[1] * 7):
            a = torch.full((1, 1), value, dtype=BF16)
            tg.add_product(buffer, written, 0, a, torch.ones(1, 1, dtype=BF16))
        assert buffer.item() == want


def test_the_op_says_what_it_changes():
    """torch.compile takes an op that hides it for dead code."""
    mutated = [argument.name for argument in torch.ops.train_gpt.add_product.default._schema.arguments
               if argument.alias_info is not None and argument.alias_info.is_write]
    assert mutated == ["main_grad", "written"]


# ---- What backward returns ------------------------------------------------------------------------------------------

def own(weight: Tensor, dtype: torch.dtype = F64, parts: int = 1) -> None:
    weight.main_grad = torch.full(weight.shape, torch.nan, dtype=dtype)
    weight.written = torch.zeros(parts, dtype=torch.int64)


RETURNED = {                             # main_grad, flag, delayed -> what is returned: the gradient, None or a dummy
    "nothing": (False, False, False, "gradient"),
    "delayed": (False, False, True, None),
    "main_grad": (True, False, False, None),
    "main_grad, flag": (True, True, False, "dummy"),
    "delayed, main_grad": (True, False, True, None),
    "delayed, main_grad, flag": (True, True, True, "dummy"),
}


@pytest.mark.parametrize("main_grad, flag, delayed, want", RETURNED.values(), ids=RETURNED)
def test_what_backward_returns(main_grad, flag, delayed, want):
    """The six configurations of the contract, in two micro-batches. Hooks see what is returned."""
    weight = torch.nn.Parameter(randn(4, 3))
    queue = tg.DelayedProducts() if delayed else None
    seen = []
    weight.register_hook(seen.append)
    if main_grad:
        own(weight)
    if flag:
        weight.grad_added_to_main_grad = False
    true_gradient = torch.zeros(4, 3, dtype=F64)
    for seed in (1, 2):
        x = randn(5, 3, seed=seed)
        tg.times_transposed(x, tg.whole(weight, queue)).sum().backward()
        true_gradient += torch.ones(5, 4, dtype=F64).t() @ x

    if want == "gradient":
        torch.testing.assert_close(weight.grad, true_gradient)
    elif want == "dummy":
        assert weight.grad_added_to_main_grad is True
        first, second = seen
        assert first.shape == second.shape == weight.shape
        assert first.dtype == weight.dtype
        assert len({x.untyped_storage().data_ptr() for x in (first, second, weight.main_grad)}) == 3
    else:
        assert weight.grad is None
    if delayed:
        assert len(queue.waiting) == 2
        assert not main_grad or weight.written.tolist() == [0]
        queue.flush()
        assert queue.waiting == []
    if main_grad:
        torch.testing.assert_close(weight.main_grad, true_gradient)
        assert weight.written.tolist() == [2]
    elif delayed:
        torch.testing.assert_close(weight.grad, true_gradient)


@pytest.mark.parametrize("main_grad", [True, False])
def test_autograd_follows_no_flush(main_grad):
    """Else the sums would hold all that the factors came from, where the input is not the first of the model."""
    first, weight = torch.nn.Parameter(randn(3, 3, seed=1)), torch.nn.Parameter(randn(4, 3))
    if main_grad:
        own(weight)
    queue = tg.DelayedProducts()
    for seed in (1, 2):
        tg.times_transposed(randn(5, 3, seed=seed) @ first, tg.whole(weight, queue)).sum().backward()
    queue.flush()
    assert not (weight.main_grad if main_grad else weight.grad).requires_grad


def test_a_flush_in_another_order_gives_the_same_sums():
    """Of integers, which every order adds up alike; a buffer without a write is overwritten, not added to."""
    found = []
    for order in (1, -1):
        weight = torch.nn.Parameter(torch.ones(4, 3, dtype=F64))
        own(weight)
        queue = tg.DelayedProducts()
        for seed in range(3):
            x = randn(5, 3, seed=seed).mul(3).round()
            tg.times_transposed(x, tg.whole(weight, queue)).sum().backward()
        queue.waiting = queue.waiting[::order]
        queue.flush()
        found.append(weight.main_grad)
    assert found[0].equal(found[1])


def bank_loss(matrices: list[list[tg.Owned]], x: Tensor, scale: Tensor | None) -> Tensor:
    for up, down in matrices:
        x = x + tg.times(tg.times_transposed(x, up, scale).relu(), down)
    return x.square().sum()


def plain_loss(bank: Tensor, x: Tensor, scale: Tensor | None) -> Tensor:
    """The same by autograd alone."""
    for layer in bank:
        up, down = layer.split((6, 6))
        x = x + (x @ (up if scale is None else scale * up).t()).relu() @ down
    return x.square().sum()


def as_views(bank: Tensor) -> list[list[tg.Owned]]:
    """Each matrix as a weight of its own, whose main_grad is a view of the bank's."""
    groups = []
    for layer, gradient in zip(bank.unbind(), bank.main_grad.unbind()):
        pair = []
        for rows in (slice(0, 6), slice(6, 12)):
            matrix = layer[rows]
            matrix.main_grad = gradient[rows]
            matrix.written = torch.zeros(1, dtype=torch.int64)
            pair.append(tg.whole(matrix))
        groups.append(pair)
    return groups


@pytest.mark.parametrize("how", ("bank", "views", "aot_eager"))
def test_a_bank_and_its_views_get_autograds_gradients(how):
    """Two micro-batches; the learnt scalar's gradient stays autograd's. One graph serves all writes."""
    bank = torch.nn.Parameter(randn(3, 12, 4, seed=1))
    scale = torch.nn.Parameter(torch.tensor(0.7, dtype=F64))
    x = randn(5, 4, seed=2).requires_grad_()
    scale_for_views = None if how == "views" else scale
    want = torch.autograd.grad(plain_loss(bank, x, scale_for_views),
                               [leaf for leaf in (bank, x, scale_for_views) if leaf is not None])
    own(bank, parts=6)

    def loss(x: Tensor) -> Tensor:
        matrices = as_views(bank) if how == "views" else tg.owned_matrices(bank, (6, 6))
        return bank_loss(matrices, x, scale_for_views)

    graphs = 0
    if how == "aot_eager":
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        loss = torch.compile(loss, backend="aot_eager", fullgraph=True)
        graphs = 1
    for micro_batch in (1, 2):
        if how == "views":
            bank.main_grad.fill_(0 if micro_batch == 1 else torch.nan)
            x.grad = None
        loss(x).backward()
        assert bank.grad is None
        times = 1 if how == "views" else micro_batch                          # views made anew are written anew
        torch.testing.assert_close(bank.main_grad, times * want[0])
        torch.testing.assert_close(x.grad, times * want[1])
        if scale_for_views is not None:
            torch.testing.assert_close(scale.grad, times * want[2])
            assert bank.written.tolist() == [micro_batch] * 6
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs or how != "aot_eager"


def test_a_frozen_weight_keeps_what_it_has():
    bank = torch.nn.Parameter(randn(2, 12, 4), requires_grad=False)
    own(bank, parts=4)
    x = randn(5, 4).requires_grad_()
    bank_loss(tg.owned_matrices(bank, (6, 6)), x, None).backward()
    assert x.grad is not None
    assert bank.main_grad.isnan().all()
    assert bank.written.tolist() == [0] * 4


@pytest.mark.parametrize("precision", ("plain", "emulated"))
def test_a_frozen_head_keeps_what_it_has(precision):
    head = torch.nn.Parameter(randn(4, 9), requires_grad=False)
    own(head)
    y = randn(6, 4).requires_grad_()
    one = torch.ones(1, dtype=F64)
    targets = torch.tensor([[1, 3, 0, 8, 2, 4]])
    tg.HeadLoss.apply(y, head, targets, one, one[0], precision, F64, tg.whole(head)).sum().backward()
    assert y.grad is not None
    assert head.main_grad.isnan().all()
    assert head.written.tolist() == [0]


def test_a_scaled_product_may_be_delayed_without_main_grad():
    """What waits is the product itself, not its factors."""
    weight = torch.nn.Parameter(randn(4, 3))
    scale = torch.tensor(0.7, dtype=F64)
    queue = tg.DelayedProducts()
    want = torch.zeros(4, 3, dtype=F64)
    for seed in (1, 2):
        x = randn(5, 3, seed=seed)
        tg.times_transposed(x, tg.whole(weight, queue), scale).sum().backward()
        want += scale * (torch.ones(5, 4, dtype=F64).t() @ x)
    assert weight.grad is None
    queue.flush()
    torch.testing.assert_close(weight.grad, want)


def test_a_buffer_that_is_no_block_is_refused():
    bank = torch.nn.Parameter(randn(2, 3, 4, 5))
    own(bank, parts=6)
    bank.main_grad = torch.zeros(2, 4, 3, 5, dtype=F64).transpose(1, 2)
    with pytest.raises(RuntimeError, match="view"):
        tg.owned_matrices(bank, (4, 4, 4))


@pytest.mark.parametrize("flag", (True, False), ids=("flag", "delayed"))
def test_compiled_code_takes_neither_flag_nor_delay(flag):
    weight = torch.nn.Parameter(randn(4, 3))
    own(weight)
    if flag:
        weight.grad_added_to_main_grad = False
    queue = None if flag else tg.DelayedProducts()
    torch._dynamo.reset()

    def product(x: Tensor) -> Tensor:
        return tg.times_transposed(x, tg.whole(weight, queue))

    call = torch.compile(product, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="compiled graph"):
        call(randn(5, 3))


# ---- In the trainer -------------------------------------------------------------------------------------------------

def trained(**changes: Any) -> tuple[tg.Executor, Callable[[int], tuple]]:
    cfg = small(**changes)
    ex = executor(cfg)
    schedule = tg.Schedule(cfg)

    def batch_of(step: int) -> tuple:
        return random_batch(cfg, step, 8, 16, step), schedule.at(step)
    return ex, batch_of


def test_a_label_is_in_exactly_one_set():
    ex, _ = trained()
    table = ex.model.table
    own_main_grad = {row.label for row in table if row.parts}
    own_rows = {row.label for row in table if row.rows}
    assert own_main_grad == set(OWNED) == {label for label, p in ex.model.named_parameters() if hasattr(p, "main_grad")}
    assert own_rows == set(ex.tables)
    assert not own_main_grad & own_rows
    for row in table:
        if row.bank:
            assert sum(row.parts) * row.shape[-1] * row.shape[0] == ex.optimizer.weights[row.label].numel()


@pytest.mark.parametrize("changes, bank_type", [
    (dict(dtype="bfloat16"), BF16), (dict(dtype="float32"), F32),
    (dict(dtype="bfloat16", slots_per_micro_batch=1), F32)])
def test_types_of_buffers(changes, bank_type):
    """f32 where a rank writes more than once between clears: several micro-batches, or both steps of a cycle."""
    cfg = small(**changes)
    ex = tg.Executor(cfg, tg.Fabric(torch.device("cpu"), 0, 1), tg.attention_reference, "plain",
                     cfg.slots_per_micro_batch)
    types = {label: ex.optimizer.weights[label].main_grad.dtype for label in OWNED}
    assert types == dict(attn=bank_type, mlp=bank_type, lm_head=F32)


def test_addresses_never_change_and_stale_content_is_overwritten():
    """Over steps, a snapshot and its return; what stands in a cleared buffer is never read."""
    ex, batch_of = trained()
    other, _ = trained()
    addresses = [ex.optimizer.weights[label].main_grad.data_ptr() for label in OWNED]
    saved = ex.snapshot()
    for step in range(4):
        batch, values = batch_of(step)
        for label in OWNED:
            if ex.optimizer.passes[label] is None:
                ex.optimizer.weights[label].main_grad.fill_(torch.nan)
        for each in (ex, other):
            each.forward_backward(batch, values)
            assert all(p.grad is None for label, p in each.model.named_parameters() if label in OWNED)
            each.optim_step(values)
    for label, p in ex.optimizer.weights.items():
        assert p.equal(other.optimizer.weights[label]), label
    batch, values = batch_of(4)
    ex.forward_backward(batch, values)
    ex.restore(saved)
    assert [ex.optimizer.weights[label].main_grad.data_ptr() for label in OWNED] == addresses
    assert all(ex.optimizer.passes[label] is None for label in OWNED)
    assert not any(ex.optimizer.weights[label].written.any() for label in OWNED)
    assert not any("main_grad" in name for name in saved.tensors)


@pytest.mark.parametrize("mishap, label", [("lost", "attn"), ("lost", "lm_head"), ("twice", "mlp")])
def test_a_micro_batch_that_is_lost_or_runs_twice_is_named(monkeypatch, mishap, label):
    ex, batch_of = trained()
    batch, values = batch_of(1)
    real = tg.add_product

    def wrong(main_grad: Tensor, written: Tensor, *rest: Any) -> None:
        mine = written is ex.optimizer.weights[label].written
        if not (mine and mishap == "lost"):
            real(main_grad, written, *rest)
        if mine and mishap == "twice":
            real(main_grad, written, *rest)

    ex.forward_backward(batch, values)
    monkeypatch.setattr(tg, "add_product", wrong)
    ex.forward_backward(batch, values)
    count = 1 if mishap == "lost" else 3
    message = refused(tg.RunError, lambda: ex.optim_step(values), f"main_grad of {label}", f"[{count}", "2 times each",
                      "micro-batch")
    assert "drop_gradients" in message


def test_one_matrix_of_a_bank_that_was_not_written_is_named():
    ex, batch_of = trained()
    batch, values = batch_of(1)
    ex.forward_backward(batch, values)
    ex.model.mlp.written[5] = 0
    refused(tg.RunError, lambda: ex.optim_step(values), "main_grad of mlp", "1, 0, 1", "1 times each", "micro-batch")


def test_calls_of_weight_zero_alone_are_zeros():
    ex, batch_of = trained()
    for label in OWNED:
        ex.optimizer.weights[label].main_grad.fill_(torch.nan)
    batch, values = batch_of(1)
    ex.forward_backward(batch, values, loss_weight=0)
    ex.optim_step(values)
    assert all(p.isfinite().all() for p in ex.optimizer.weights.values())


def test_a_bank_is_stored_with_room_for_whole_slices():
    """Weight, gradient and what travels, from the start; their zeros are in no parameter."""
    cfg = small(dtype="bfloat16")
    ex = executor(cfg, 4, 3)
    optimizer = ex.optimizer
    for label in OWNED:
        units = len(optimizer.units(label, optimizer.weights[label]))
        size = -(-units // 4)
        for stored in (optimizer.stored[label], optimizer.gradients[label], optimizer.wire[label]):
            assert len(stored) == 4 * size
            assert not stored[units:].any()
        assert optimizer.weights[label].data_ptr() == optimizer.stored[label].data_ptr()
        assert optimizer.weights[label].main_grad.data_ptr() == optimizer.gradients[label].data_ptr()
        assert optimizer.stored_slice(label, optimizer.stored[label]).data_ptr() == (
            optimizer.stored[label][3 * size:].data_ptr())


def test_padding_is_not_saved():
    """A file holds the whole storage of a view."""
    ex, _ = trained()
    stored = torch.cat((ex.model.attn.data, ex.model.attn.data[:1]))
    ex.model.attn.data = stored[:len(ex.model.attn)]                          # as it stands where ranks share it out
    saved = ex.weights(tg.Schedule(ex.cfg).at(0))["attn"]
    assert saved.equal(ex.model.attn)
    assert saved.untyped_storage().nbytes() == saved.nbytes


class Arrived:
    """The handle of a collective that is done."""

    def wait(self) -> None:
        pass


def test_what_travels_is_each_gradient_in_its_place(monkeypatch):
    """The last of 3 ranks, alone: sums go as bf16, small ones in f32, and what pads them is not updated."""
    ex = executor(small(dtype="bfloat16"), 3, 2)
    optimizer = ex.optimizer
    sent = []

    def alone(out: Tensor, full: Tensor | None = None, **_: Any) -> Arrived:
        sent.append((out if full is None else full).clone())
        return Arrived()

    for name in ("all_reduce", "reduce_scatter_tensor"):
        monkeypatch.setattr(tg.dist, name, alone)
    for round_ in range(2):                                                   # what travelled before is not sent again
        for seed, (label, p) in enumerate(optimizer.weights.items()):
            if label not in ex.tables:
                set_grad(optimizer, label, randn(*p.shape, seed=seed + 100 * round_))
        for label in OWNED:
            grad, _ = optimizer._reduce(label)
            want = optimizer.units(label, optimizer.weights[label].main_grad).bfloat16()
            found = sent.pop()
            assert found.dtype == BF16
            assert found[:len(want)].equal(want)
            assert not found[len(want):].any()
            mine = want[2 * optimizer.slice_size[label]:]
            assert len(mine) == len(optimizer.mine[label])
            assert grad.equal(mine)
        optimizer._reduce(tg.SMALL)
        assert sent.pop().dtype == F32
        for label in optimizer.small:
            part = optimizer.small_parts[label]
            assert part.view_as(optimizer.weights[label]).equal(optimizer.weights[label].grad.float()), label


@pytest.mark.parametrize("tied", (True, False))
def test_rows_of_the_embedding_join_the_head_once_while_they_are_tied(tied):
    """On top of the head's own gradient, which the same pass wrote."""
    ex, batch_of = trained(dtype="float64")
    update = 1                                                                # of Adam: an odd step
    if not tied:
        update = (tg.Schedule(ex.cfg).split_step + 1) | 1
    batch, values = batch_of(update)
    assert values.tied is tied
    ex.forward_backward(batch, values)
    head = ex.model.lm_head.main_grad.clone()
    table = ex.tables["embed"]
    plan = table.open_plans[0]
    rows = table.sums.clone()
    seen = {}
    real = ex.optimizer._reduce

    def reduce(entry: str) -> tuple:
        found = real(entry)
        seen[entry] = found[0].clone()
        return found

    ex.optimizer._reduce = reduce
    ex.optimizer.step(values)
    if tied:
        head[:, plan.head_columns] += rows[plan.rows_i_read].t()
    torch.testing.assert_close(seen["lm_head"], head)

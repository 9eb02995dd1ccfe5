"""Gradients that land where they are used: what backward returns, what is written first, further, twice or never.

Expected are plain products, autograd's own gradients and sums in float64.
"""
from __future__ import annotations

import functools
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
    writes = torch.zeros(3, dtype=torch.int64)
    want = torch.zeros(4, 5, dtype=F64)
    for write in range(3):
        a = randn(7, 4, seed=write, dtype=given_in)
        b = randn(7, 5, seed=write + 10, dtype=given_in)
        product = a.double().t() @ b.double()
        want += product
        if product_is_given:
            a, b = product.to(given_in), None
        tg.wgrad_accumulate(bank[1], writes, 1, a, b)
        assert writes.tolist() == [0, write + 1, 0]
    rounding = 0.05 if BF16 in (kept_in, given_in) and (product_is_given or kept_in == BF16) else 1e-5
    torch.testing.assert_close(bank[1].double(), want, rtol=rounding, atol=rounding)
    assert bank[0].isnan().all()
    assert bank[2].isnan().all()


def test_sums_are_kept_in_the_buffers_type():
    """256 + 7 times 1: bf16 has no 257."""
    for dtype, want in ((F32, 263), (BF16, 256)):
        buffer = torch.empty(1, 1, dtype=dtype)
        writes = torch.zeros(1, dtype=torch.int64)
        for value in (256, *[1] * 7):
            a = torch.full((1, 1), value, dtype=BF16)
            tg.wgrad_accumulate(buffer, writes, 0, a, torch.ones(1, 1, dtype=BF16))
        assert buffer.item() == want


def test_the_op_says_what_it_changes():
    """torch.compile takes an op that hides it for dead code."""
    mutated = [argument.name for argument in torch.ops.train_gpt.wgrad_accumulate.default._schema.arguments
               if argument.alias_info is not None and argument.alias_info.is_write]
    assert mutated == ["main_grad", "writes"]


# ---- What backward returns ------------------------------------------------------------------------------------------

def own(weight: Tensor, dtype: torch.dtype = F64, parts: int = 1) -> None:
    weight.main_grad = torch.full(weight.shape, torch.nan, dtype=dtype)
    weight.writes = torch.zeros(parts, dtype=torch.int64)


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
    queue = [] if delayed else None
    seen = []
    weight.register_hook(seen.append)
    if main_grad:
        own(weight)
    if flag:
        weight.grad_added_to_main_grad = False
    true_gradient = torch.zeros(4, 3, dtype=F64)
    for seed in (1, 2):
        x = randn(5, 3, seed=seed)
        tg.linear(x, tg.as_part(weight, queue)).sum().backward()
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
        assert len(queue) == 2
        assert not main_grad or weight.writes.tolist() == [0]
        tg.flush(queue)
        assert queue == []
    if main_grad:
        torch.testing.assert_close(weight.main_grad, true_gradient)
        assert weight.writes.tolist() == [2]
    elif delayed:
        torch.testing.assert_close(weight.grad, true_gradient)


@pytest.mark.parametrize("main_grad", [True, False])
def test_autograd_follows_no_flush(main_grad):
    """Else the sums would hold all that the factors came from, where the input is not the first of the model."""
    first, weight = torch.nn.Parameter(randn(3, 3, seed=1)), torch.nn.Parameter(randn(4, 3))
    if main_grad:
        own(weight)
    queue = []
    for seed in (1, 2):
        tg.linear(randn(5, 3, seed=seed) @ first, tg.as_part(weight, queue)).sum().backward()
    tg.flush(queue)
    assert not (weight.main_grad if main_grad else weight.grad).requires_grad


def test_a_flush_in_another_order_gives_the_same_sums():
    """Of integers, which every order adds up alike; a buffer without a write is overwrites, not added to."""
    found = []
    for order in (1, -1):
        weight = torch.nn.Parameter(torch.ones(4, 3, dtype=F64))
        own(weight)
        queue = []
        for seed in range(3):
            x = randn(5, 3, seed=seed).mul(3).round()
            tg.linear(x, tg.as_part(weight, queue)).sum().backward()
        queue = queue[::order]
        tg.flush(queue)
        found.append(weight.main_grad)
    assert found[0].equal(found[1])


def bank_loss(matrices: list[list[tg.WeightPart]], x: Tensor, scale: Tensor | None) -> Tensor:
    for up, down in matrices:
        x = x + (tg.linear(x, up, scale).relu() * tg.linear(x, down))[:, :4]
    return x.square().sum()


def plain_loss(bank: Tensor, x: Tensor, scale: Tensor | None) -> Tensor:
    """The same by autograd alone."""
    for layer in bank:
        up, down = layer.split((6, 6))
        x = x + ((x @ (up if scale is None else scale * up).t()).relu() * (x @ down.t()))[:, :4]
    return x.square().sum()


def as_views(bank: Tensor) -> list[list[tg.WeightPart]]:
    """Each matrix as a weight of its own, whose main_grad is a view of the bank's."""
    groups = []
    for layer, gradient in zip(bank.unbind(), bank.main_grad.unbind()):
        pair = []
        for rows in (slice(0, 6), slice(6, 12)):
            matrix = layer[rows]
            matrix.main_grad = gradient[rows]
            matrix.writes = torch.zeros(1, dtype=torch.int64)
            pair.append(tg.as_part(matrix))
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
        matrices = as_views(bank) if how == "views" else tg.bank_parts(bank, (6, 6))
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
            assert bank.writes.tolist() == [micro_batch] * 6
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs or how != "aot_eager"


def test_a_frozen_weight_keeps_what_it_has():
    bank = torch.nn.Parameter(randn(2, 12, 4), requires_grad=False)
    own(bank, parts=4)
    x = randn(5, 4).requires_grad_()
    bank_loss(tg.bank_parts(bank, (6, 6)), x, None).backward()
    assert x.grad is not None
    assert bank.main_grad.isnan().all()
    assert bank.writes.tolist() == [0] * 4


@pytest.mark.parametrize("precision", ("plain", "emulated"))
def test_a_frozen_head_keeps_what_it_has(precision):
    head = torch.nn.Parameter(randn(4, 9), requires_grad=False)
    own(head)
    y = randn(6, 4).requires_grad_()
    one = torch.ones(1, dtype=F64)
    targets = torch.tensor([[1, 3, 0, 8, 2, 4]])
    tg.HeadLoss.apply(y, head, targets, one, one[0], precision, F64, tg.as_part(head)).sum().backward()
    assert y.grad is not None
    assert head.main_grad.isnan().all()
    assert head.writes.tolist() == [0]


def test_a_scaled_product_may_be_delayed_without_main_grad():
    """What waits is the product itself, not its factors."""
    weight = torch.nn.Parameter(randn(4, 3))
    scale = torch.tensor(0.7, dtype=F64)
    queue = []
    want = torch.zeros(4, 3, dtype=F64)
    for seed in (1, 2):
        x = randn(5, 3, seed=seed)
        tg.linear(x, tg.as_part(weight, queue), scale).sum().backward()
        want += scale * (torch.ones(5, 4, dtype=F64).t() @ x)
    assert weight.grad is None
    tg.flush(queue)
    torch.testing.assert_close(weight.grad, want)


def test_a_buffer_that_is_no_block_is_refused():
    bank = torch.nn.Parameter(randn(2, 3, 4, 5))
    own(bank, parts=6)
    bank.main_grad = torch.zeros(2, 4, 3, 5, dtype=F64).transpose(1, 2)
    with pytest.raises(RuntimeError, match="view"):
        tg.bank_parts(bank, (4, 4, 4))


@pytest.mark.parametrize("flag", (True, False), ids=("flag", "delayed"))
def test_compiled_code_takes_neither_flag_nor_delay(flag):
    """The compiler's own error, and not a flag or a queue that it loses."""
    weight = torch.nn.Parameter(randn(4, 3))
    own(weight)
    if flag:
        weight.grad_added_to_main_grad = False
    queue = None if flag else []
    torch._dynamo.reset()

    def product(x: Tensor) -> Tensor:
        return tg.linear(x, tg.as_part(weight, queue))

    call = torch.compile(product, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        call(randn(5, 3)).sum().backward()


@pytest.mark.parametrize("frozen", ("up", "down"))
def test_a_frozen_matrix_of_the_mlp_keeps_what_it_has(frozen):
    """And the other one is written all the same."""
    matrices = {name: torch.nn.Parameter(randn(8, 4, seed=seed)) for seed, name in enumerate(("up", "down"))}
    for weight in matrices.values():
        own(weight)
    matrices[frozen].requires_grad_(False)
    n = randn(5, 4, seed=2).requires_grad_()
    tg.relu_sq_mlp(n, *map(tg.as_part, matrices.values())).sum().backward()
    assert n.grad is not None
    for name, weight in matrices.items():
        assert weight.writes.tolist() == [int(name != frozen)]
        assert weight.main_grad.isnan().all() == (name == frozen)


def test_an_f32_main_grad_of_a_scaled_bank_is_exact_over_64_micro_batches():
    """Of the factors in bf16, against a sum in f64. A product that is rounded to bf16 first is off by 3e-3."""
    bank = torch.nn.Parameter(randn(2, 48, 16, dtype=BF16))
    own(bank, F32, parts=4)
    scales = torch.nn.Parameter(torch.tensor([0.7, 1.3]))
    want = torch.zeros(4, 36, 16, dtype=F64)
    for micro_batch in range(64):
        x = randn(40, 16, seed=micro_batch, dtype=BF16)
        parts = sum(tg.bank_parts(bank, (36, 12)), [])
        for number, (part, scale) in enumerate(zip(parts, (*scales.unbind(), *scales.unbind()))):
            height = len(part.matrix)
            grad = randn(40, height, seed=100 * number + micro_batch, dtype=BF16)
            tg.linear(x, part, scale).backward(grad)
            want[number, :height] += scale.detach().double() * (grad.double().t() @ x.double())
    found = bank.main_grad.double()
    parts = (want[0], want[1][:12], want[2], want[3][:12])
    want = torch.cat(parts).view(2, 48, 16)
    assert float((found - want).norm() / want.norm()) < 1e-6


def forward_passes() -> dict[str, Callable[[Tensor], Tensor]]:
    """Each function with a backward of ours, of x (5, 4)."""
    def product(x: Tensor) -> Tensor:
        return tg.linear(x, tg.as_part(torch.nn.Parameter(randn(3, 4))))

    def mlp(x: Tensor) -> Tensor:
        up, down = (torch.nn.Parameter(randn(8, 4, seed=seed)) for seed in range(2))
        return tg.relu_sq_mlp(x, tg.as_part(up), tg.as_part(down))

    def head(x: Tensor) -> Tensor:
        weight = torch.nn.Parameter(randn(4, 9))
        one = torch.ones(1, dtype=F64)
        targets = torch.arange(5)[None]
        return tg.HeadLoss.apply(x, weight, targets, one, one[0], "plain", F64, tg.as_part(weight))

    def lookup(x: Tensor) -> Tensor:
        return tg.RowLookup.apply(x, torch.tensor([0, 4, 0]), torch.zeros(5, 4, dtype=F64))

    return dict(product=product, mlp=mlp, head=head, lookup=lookup)


@pytest.mark.parametrize("name", forward_passes())
def test_a_gradient_of_a_gradient_is_refused(name):
    """Also where the gradient that arrives is a constant, which autograd would let pass."""
    x = randn(5, 4).requires_grad_()
    loss = forward_passes()[name](x).sum()
    differentiate = functools.partial(torch.autograd.grad, loss, x, create_graph=True)
    refused(tg.RunError, differentiate, "create_graph", "first order")


@pytest.mark.parametrize("changed", ("input", "gradient"))
def test_a_delayed_product_whose_factor_was_changed_is_refused(changed):
    """Before anything is written, of the products that came before it, too."""
    weight = torch.nn.Parameter(randn(4, 3))
    own(weight)
    queue = []
    factors = [dict(input=randn(5, 3, seed=seed), gradient=randn(5, 4, seed=seed)) for seed in (1, 2)]
    for each in factors:
        tg.linear(each["input"], tg.as_part(weight, queue)).backward(each["gradient"])
    factors[1][changed] += 1
    refused(tg.RunError, functools.partial(tg.flush, queue), "delayed gradient", "(4, 3)", "changed in place")
    assert weight.writes.tolist() == [0]
    assert len(queue) == 2


# ---- In the trainer -------------------------------------------------------------------------------------------------

def entry_of(ex: tg.Executor, label: str) -> tg.Sharded:
    return ex.optimizer.entries[label]


def units_of(entry: tg.Sharded, x: Tensor) -> Tensor:
    """A weight, or something of its shape, as what ranks share out: matrices of a bank, rows of the head."""
    return tg.bank_matrices(entry.row, x.detach())


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
    own_main_grad = {row.label for row in table.values() if row.parts}
    own_rows = {row.label for row in table.values() if row.rows}
    assert own_main_grad == set(OWNED) == {label for label, p in ex.model.named_parameters() if hasattr(p, "main_grad")}
    assert own_rows == set(ex.tables)
    assert not own_main_grad & own_rows
    for row in table.values():
        if row.optimizer == "normuon":
            assert sum(row.parts) * row.shape[-1] * row.shape[0] == ex.model.get_parameter(row.label).numel()
    kinds = {label: type(entry) for label, entry in ex.optimizer.entries.items()}
    assert kinds == (dict.fromkeys(own_main_grad, tg.Sharded) | dict.fromkeys(own_rows, tg.TableEntry)
                     | {tg.SMALL: tg.Small})
    alike = [row.label for row in ex.optimizer.entries[tg.SMALL].rows]
    assert sorted(alike) == sorted(set(table) - own_main_grad - own_rows)


@pytest.mark.parametrize("changes, bank_type", [
    (dict(dtype="bfloat16"), BF16), (dict(dtype="float32"), F32),
    (dict(dtype="bfloat16", slots_per_micro_batch=1), F32)])
def test_types_of_buffers(changes, bank_type):
    """f32 where a rank writes more than once between clears: several micro-batches, or both steps of a cycle."""
    cfg = small(**changes)
    ex = tg.Executor(cfg, tg.Fabric(torch.device("cpu"), 0, 1), tg.attention_reference, "plain",
                     cfg.slots_per_micro_batch)
    want = dict(attn=bank_type, mlp=bank_type, lm_head=F32)
    assert {label: ex.model.get_parameter(label).main_grad.dtype for label in OWNED} == want
    assert {label: entry_of(ex, label).main_grad.dtype for label in OWNED} == want


def test_addresses_never_change_and_stale_content_is_overwritten():
    """Over steps, a snapshot and its return; what stands in a cleared buffer is never read."""
    ex, batch_of = trained()
    other, _ = trained()
    entries = [entry_of(ex, label) for label in OWNED]
    addresses = [entry.weight.main_grad.data_ptr() for entry in entries]
    restore = ex.snapshot()
    for step in range(4):
        batch, values = batch_of(step)
        for entry in entries:
            if entry.backwards == 0:
                entry.weight.main_grad.fill_(torch.nan)
        for each in (ex, other):
            each.forward_backward(batch, values)
            assert all(p.grad is None for label, p in each.model.named_parameters() if label in OWNED)
            each.optim_step(values)
    for label, p in ex.model.named_parameters():
        assert p.equal(other.model.get_parameter(label)), label
    batch, values = batch_of(4)
    ex.forward_backward(batch, values)
    assert all(entry.backwards for entry in entries)
    restore()
    assert [ex.model.get_parameter(label).main_grad.data_ptr() for label in OWNED] == addresses
    assert [entry.main_grad.data_ptr() for entry in entries] == addresses
    assert all(entry.backwards == 0 for entry in entries)
    assert not any(ex.model.get_parameter(label).writes.any() for label in OWNED)
    saved = ex.state_tensors()                                                # what a snapshot copies
    assert not any("main_grad" in name for name in saved)
    assert not {x.data_ptr() for x in saved.values()} & set(addresses)


@pytest.mark.parametrize("mishap, label", [("lost", "attn"), ("lost", "lm_head"), ("twice", "mlp")])
def test_a_micro_batch_that_is_lost_or_runs_twice_is_named(monkeypatch, mishap, label):
    ex, batch_of = trained()
    batch, values = batch_of(1)
    real = tg.wgrad_accumulate

    def wrong(main_grad: Tensor, writes: Tensor, *rest: Any) -> None:
        mine = writes is ex.model.get_parameter(label).writes
        if not (mine and mishap == "lost"):
            real(main_grad, writes, *rest)
        if mine and mishap == "twice":
            real(main_grad, writes, *rest)

    ex.forward_backward(batch, values)
    monkeypatch.setattr(tg, "wgrad_accumulate", wrong)
    ex.forward_backward(batch, values)
    count = 1 if mishap == "lost" else 3
    message = refused(tg.RunError, lambda: ex.optim_step(values), f"main_grad of {label}", f"[{count}", "2 times each",
                      "micro-batch")
    assert "drop_gradients" in message


def test_one_matrix_of_a_bank_that_was_not_written_is_named():
    ex, batch_of = trained()
    batch, values = batch_of(1)
    ex.forward_backward(batch, values)
    ex.model.mlp.writes[5] = 0
    refused(tg.RunError, lambda: ex.optim_step(values), "main_grad of mlp", "1, 0, 1", "1 times each", "micro-batch")


def test_calls_of_weight_zero_alone_are_zeros():
    ex, batch_of = trained()
    for label in OWNED:
        ex.model.get_parameter(label).main_grad.fill_(torch.nan)
    batch, values = batch_of(1)
    ex.forward_backward(batch, values, loss_weight=0)
    ex.optim_step(values)
    assert all(p.isfinite().all() for p in ex.model.parameters())


def test_a_bank_is_stored_with_room_for_whole_slices():
    """Weight, gradient and what travels, from the start; their zeros are in no parameter."""
    cfg = small(dtype="bfloat16")
    ex = executor(cfg, 4, 3)
    for label in OWNED:
        entry = entry_of(ex, label)
        weight = ex.model.get_parameter(label)
        units = len(units_of(entry, weight))
        size = -(-units // 4)
        assert entry.shard_size == size
        for room in (entry.padded, entry.main_grad, entry.comm_buffer):
            assert len(room) == 4 * size
            assert not room[units:].any()
        assert weight.data_ptr() == entry.padded.data_ptr()
        assert weight.main_grad.data_ptr() == entry.main_grad.data_ptr()
        assert entry.padded[entry.slice].data_ptr() == entry.padded[3 * size:].data_ptr()
        assert len(entry.padded[entry.slice]) == size
        assert entry.shard.equal(units_of(entry, weight)[3 * size:])
        assert len(entry.shard) == 0 or entry.shard.data_ptr() == entry.padded[3 * size:].data_ptr()


def test_padding_is_not_saved():
    """A file holds the whole storage of a view."""
    ex, _ = trained()
    stored = torch.cat((ex.model.attn.data, ex.model.attn.data[:1]))
    ex.model.attn.data = stored[:len(ex.model.attn)]                          # as it stands where ranks share it out
    saved = ex.whole_weights(tg.Schedule(ex.cfg).at(0))["attn"]
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
    values = tg.Schedule(ex.cfg).at(1)
    sent, updated = [], []

    def alone(out: Tensor, full: Tensor | None = None, **_: Any) -> Arrived:
        sent.append((out if full is None else full).clone())
        return Arrived()

    def gathered(*_: Tensor, **__: Any) -> Arrived:
        return Arrived()

    def adam(_: tg.Parameter, p: Tensor, grad: Tensor, *__: Any) -> None:
        updated.append((p, grad.clone()))

    def normuon(p: Tensor, _: Tensor | None, grad: Tensor, *__: Any) -> None:
        updated.append((p, grad.clone()))

    for name in ("all_reduce", "reduce_scatter_tensor"):
        monkeypatch.setattr(tg.dist, name, alone)
    monkeypatch.setattr(tg.dist, "all_gather_into_tensor", gathered)
    monkeypatch.setattr(optimizer, "adam", adam)
    monkeypatch.setattr(optimizer, "normuon_update", normuon)
    for round_ in range(2):                                                   # what travelled before is not sent again
        for seed, (label, p) in enumerate(ex.model.named_parameters()):
            if label not in ex.tables:
                set_grad(optimizer, label, randn(*p.shape, seed=seed + 100 * round_))
        for label in OWNED:
            entry = entry_of(ex, label)
            want = units_of(entry, entry.weight.main_grad).bfloat16()
            entry.reduce()
            found = sent.pop()
            assert found.dtype == BF16
            assert found[:len(want)].equal(want)
            assert not found[len(want):].any()
            mine = want[2 * entry.shard_size:]
            assert len(mine) == len(entry.shard) > 0
            entry.update(values)
            (p, grad), = updated
            assert p is entry.shard
            assert grad.equal(mine)
            updated.clear()
        entry = optimizer.entries[tg.SMALL]
        want = [p.grad.float() for p in entry.weights]
        entry.reduce()
        assert sent.pop().dtype == F32
        entry.update(values)
        for row, p, grad, (changed, part) in zip(entry.rows, entry.weights, want, updated, strict=True):
            assert changed.data_ptr() == p.data_ptr() == ex.model.get_parameter(row.label).data_ptr(), row.label
            assert part.dtype == F32
            assert part.equal(grad), row.label
        updated.clear()
        assert not sent


@pytest.mark.parametrize("tied", (True, False))
def test_rows_of_the_embedding_join_the_head_once_while_they_are_tied(tied):
    """On top of the head's own gradient, which the same pass wrote."""
    ex, batch_of = trained(dtype="float64")
    update = 1                                                                # of Adam: an odd step
    if not tied:
        update = (tg.Schedule(ex.cfg).untie_step + 1) | 1
    batch, values = batch_of(update)
    assert values.tied is tied
    ex.forward_backward(batch, values)
    head = ex.model.lm_head.main_grad.clone()
    table = ex.tables["embed"]
    plan, = table.pending
    rows = table.row_grads.clone()
    assert rows[plan.my_rows].any()
    seen = {}

    def watch(label: str, entry: tg.Small | tg.Sharded | tg.TableEntry) -> None:
        real = entry.reduce

        def reduce() -> None:
            real()
            seen[label] = entry.grad.clone()

        entry.reduce = reduce

    for label, entry in ex.optimizer.entries.items():
        watch(label, entry)
    ex.optimizer.step(values, tg.no_wait)
    if tied:
        head[:, plan.head_columns] += rows[plan.my_rows].t()
    torch.testing.assert_close(seen["lm_head"], head)
    assert ("embed" in seen) == (not tied)

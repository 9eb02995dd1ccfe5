"""Section 8: NorMuon and Adam beside reference.py, and what each rank owns. As functions: test_oracle.py."""
import functools
import inspect
import math
import types

import numpy as np
import pytest
import torch
from common import (BF16, F32, F64, add_grad, expect_error, fill_randomly, grad_of, make_comm, make_engine, owned_rows,
                    randn, small, started_loader, steps_of, unequal, untied_at)
from reference import Reference

import train_gpt as tg

BANKS = ("attn", "mlp")
TABLES = ("bigram_embed", "value_embed", "embed")

@pytest.mark.recipe
def test_normuon_direction__rounds_to_bf16_where_the_recipe_does(monkeypatch) -> None:
    """NorMuon: what goes into Polar Express, and the factor of each row, once each; Adam: the weight, to nearest."""
    def direction(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return o

    seen = []
    o = randn(1, 4, 3, dtype=BF16)
    monkeypatch.setattr(tg, "polar_express", direction)
    grad = randn(1, 4, 3, seed=1, dtype=F32)
    second = randn(1, 4, 1, seed=2, dtype=F32).abs()
    exact = o.double()
    mean_square = 0.95 * second.double() + 0.05 * exact.square().mean(-1, keepdim=True)
    root = mean_square.sqrt()
    u = tg.normuon_direction(grad, torch.zeros(1, 4, 3), second, torch.tensor(0.9, dtype=F64), 0.95, BF16)
    assert seen[0].equal((grad * (1 - 0.9) + (1 - 0.9) * grad * 0.9).bfloat16())
    factor = exact.norm() / (exact / root).norm() / root
    assert u.equal(o.float() * factor.float().bfloat16().float())

    p = randn(1000, dtype=BF16)
    exact = p.double()
    want = exact - 0.01 - exact * (p > 0) * 0.005                            # m / sqrt(v) = 0.1 / sqrt(0.01) = 1
    m = torch.zeros(1000)
    numbers = torch.tensor([0.01, 0.005], dtype=F64).unbind()
    tg.adam_update(p, torch.ones(1000), m, m.clone(), 1.0, (0.9, 0.99), 0.0, *numbers)
    assert p.equal(want.bfloat16())

def make(cfg: tg.Config, rank: int = 0, world: int = 1) -> tg.Optimizer:
    ex = make_engine(cfg, world, rank)
    whole = fill_randomly(ex.model, comm=ex.comm)
    with torch.no_grad():
        ex.model.embed.copy_(owned_rows(whole["lm_head"].t(), ex.comm))
    return ex.optimizer

def random_grads(optimizer: tg.Optimizer, step: int) -> dict[str, torch.Tensor]:
    parameters = enumerate(optimizer.model.named_parameters())
    return {label: randn(*p.shape, seed=100 * step + k) for k, (label, p) in parameters}

def take_step(optimizer: tg.Optimizer, values: tg.StepConfig) -> None:
    for label, grad in random_grads(optimizer, values.step).items():
        add_grad(optimizer, label, grad, values)
    optimizer.step(values)

def weights_of(optimizer: tg.Optimizer) -> dict[str, torch.Tensor]:
    return {label: p.detach().clone() for label, p in optimizer.model.named_parameters()}

OTHER_VALUES = dict(normuon_beta2=0.5, normuon_weight_decay=3.0, adam_eps=1e-3, adam_weight_decay=0.1)

@pytest.mark.recipe
@pytest.mark.parametrize("changes", [dict(), dict(adam_every=1), *({name: x} for name, x in OTHER_VALUES.items())],
                         ids=str)
def test_step__equals_the_reference(changes) -> None:
    """Tied, in the step that unties, and after it; parameters, moments and kept gradients after each step. With other
    settings, too: one that is ignored would have its default."""
    cfg = small(stages=untied_at(1), **changes)
    optimizer = make(cfg)
    schedule = tg.Schedule(cfg)
    naive = Reference(cfg, weights_of(optimizer))
    steps = schedule.untie_step + 2 * cfg.adam_every + 1
    for values in map(schedule.at, range(steps)):
        for label, grad in random_grads(optimizer, values.step).items():
            naive.grads[label] += grad
        take_step(optimizer, values)
        naive.optim_step(values)
        for label, p in optimizer.model.named_parameters():
            np.testing.assert_allclose(p.detach(), naive.p[label], rtol=0, atol=1e-9, err_msg=f"{label}, {values.step}")
            for name, x in optimizer.state[label].items():
                if values.update_adam or label in BANKS:
                    np.testing.assert_allclose(x, naive.state[label][name], rtol=1e-9, atol=1e-12, err_msg=label)
            kept = grad_of(optimizer, label)
            assert (kept is None) == (values.update_adam or label in BANKS), label
            assert kept is None or kept.equal(naive.grads[label]) or cfg.adam_every > 2, label
    assert not naive.p["embed"].equal(naive.p["lm_head"].t()), "they did part"

@pytest.mark.parametrize("missing", ["attn", "smear_gate", "bigram_embed", "value_embed", "embed", "lm_head"])
def test_step__a_missing_gradient_is_refused(missing) -> None:
    cfg = small()
    optimizer = make(cfg)
    before = weights_of(optimizer)
    values = tg.Schedule(cfg).at(cfg.adam_every - 1)
    for label, grad in random_grads(optimizer, 0).items():
        if label != missing:
            add_grad(optimizer, label, grad, values)
    named = "replicated" if missing == "smear_gate" else missing         # one sum for all that every rank updates
    with expect_error(tg.RunError, f"no gradients for ['{named}']", "forward_backward"):
        optimizer.step(values)
    assert unequal(weights_of(optimizer), before) == []

def with_each_group() -> tg.Engine:
    """An engine whose optimizer has a group of each class."""
    tables = tg.parse_value("tables", "rare_embed 2 40 stream 1 device 4; other_embed 3 30 1 0 host 2")
    ex = make_engine(small(tables=tables, train_files="formula:60:59:20000:1"))
    fill_randomly(ex.model)
    return ex

def test_has_gradient__true_from_a_backward_pass_to_the_update() -> None:
    """Of every class of groups; asking changes nothing, and is no check."""
    ex = with_each_group()
    groups = ex.optimizer.groups

    def with_gradient() -> set[str]:
        found = [{label for label, group in groups.items() if group.has_gradient()} for _ in range(2)]
        assert found[0] == found[1]
        return found[0]

    assert len({type(group) for group in groups.values()}) == 5 and with_gradient() == set()
    kept = [{*groups} - {*BANKS}, {"rare_embed"}, {*groups} - {*BANKS}, set()]        # after each step of a cycle
    with started_loader(ex.cfg, make_comm(), 8) as (loader, steps):
        for values in steps_of(loader, steps):
            ex.forward_backward(loader.next(values), values)
            assert with_gradient() == {*groups}
            ex.optim_step(values)
            assert with_gradient() == kept[values.step % 4]

def test_Optimizer__groups_own_their_state_and_refer_to_no_optimizer() -> None:
    """The tensors of `Optimizer.state` are the groups' own; a row-wise table keeps its state in its row store."""
    def reached(thing: object, seen: dict[int, object]) -> dict[int, object]:
        """Return all that is found from here through attributes, containers and arguments that are bound to calls."""
        if id(thing) in seen or isinstance(thing, (torch.Tensor, type, str, int, float)):
            return seen
        seen[id(thing)] = thing
        inner = [*getattr(thing, "__dict__", {}).values(), getattr(thing, "__self__", None)]
        if isinstance(thing, dict):
            inner += thing.values()
        elif isinstance(thing, (list, tuple)):
            inner += thing
        elif isinstance(thing, functools.partial):
            inner += [thing.func, *thing.args, *thing.keywords.values()]
        elif inspect.isfunction(thing):
            inner += [cell.cell_contents for cell in thing.__closure__ or ()]
        for each in inner:
            if not isinstance(each, types.ModuleType):
                reached(each, seen)
        return seen

    ex = with_each_group()
    optimizer = ex.optimizer
    own = [(label, name, x) for group in optimizer.groups.values()
           for label, state in group.state.items() for name, x in state.items()]
    assert len(own) == sum(map(len, optimizer.state.values()))
    assert all(optimizer.state[label][name] is x for label, name, x in own)
    assert {*optimizer.state} == {label for label, row in ex.model.specs.items() if row.optimizer != "rowwise"}
    for label, group in optimizer.groups.items():
        found = reached(group, {})
        assert id(optimizer) not in found and id(ex) not in found and id(ex.model) not in found, label

@pytest.mark.parametrize("order", ["REDUCE_ORDER", "UPDATE_ORDER"])
def test_step__any_permutation_of_an_order_gives_the_same_bits_and_nothing_else_is_one(order, monkeypatch) -> None:
    def run() -> dict[str, torch.Tensor]:
        cfg = small(stages=untied_at(1))
        optimizer = make(cfg)
        for step in range(6):
            take_step(optimizer, tg.Schedule(cfg).at(step))
        return weights_of(optimizer)

    base = run()
    labels = getattr(tg, order)
    for bad in (labels[1:], (*labels[1:], "mlp"), (*labels, "mlp")):
        with monkeypatch.context() as patch, pytest.raises(AssertionError, match="each group once in each"):
            patch.setattr(tg, order, bad)
            make(small())
    monkeypatch.setattr(tg, order, tuple(np.random.default_rng(1).permutation(labels)))
    assert unequal(run(), base) == []

def shard_of(optimizer: tg.Optimizer, label: str) -> torch.Tensor:
    group = optimizer.groups[label]
    return group.shard if label in optimizer.sharded_groups else group.table.shard

@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_Optimizer__every_shard_has_one_owner(world) -> None:
    """Shards of matrices and of the head's rows, every W-th row of a table, also where W does not divide their number;
    state for what is owned alone. Shards are stored with room for whole ones, whose padding is zeros."""
    cfg = small(bigram_rows=101)
    alone = make(cfg)
    ranks = [make(cfg, rank, world) for rank in range(world)]
    for label in (*BANKS, "lm_head", *TABLES):
        whole = shard_of(alone, label)
        parts = [shard_of(optimizer, label) for optimizer in ranks]
        assert all(len(part) <= -(-len(whole) // world) for part in parts), label
        if label in TABLES:
            by_place = torch.stack(parts, dim=1).flatten(0, 1)       # (place, rank): by row, then the padding
            assert by_place[:len(whole)].equal(whole), label
            assert not by_place[len(whole):].any(), "after a shard is nothing but zeros"
        else:
            assert torch.cat(parts).equal(whole), label
        for optimizer, part in zip(ranks, parts):
            group = optimizer.groups[label]
            assert all(len(x) == len(part) for x in optimizer.state[label].values()), label
            if label not in TABLES:
                for room in (group.padded, group.main_grad, group.comm_buffer):
                    assert len(room) == world * group.shard_size and not room[len(whole):].any(), label
                assert group.weight.data_ptr() == group.padded.data_ptr()
                assert group.weight.main_grad.data_ptr() == group.main_grad.data_ptr()
    for label in BANKS:
        lr_muls = [optimizer.groups[label].lr_muls for optimizer in ranks]
        assert torch.cat(lr_muls).equal(alone.groups[label].lr_muls)

def test_init_optimizer_state__an_added_tensor_is_saved_and_counted(monkeypatch) -> None:
    """A late average of the weights, as a fork would add it: snapshots, files and the memory estimate follow."""
    def memory() -> int:
        return tg.estimate_memory(cfg, make_comm(), tg.attention_reference, cfg.seqs_per_step)["moments"]

    def with_average(row, shard):
        return initial_state(row, shard) | dict(another=torch.zeros_like(shard))

    cfg = small()
    in_bf16 = make(small(dtype="bfloat16")).state
    assert {label for label in in_bf16 if "mantissa" in in_bf16[label]} == {*BANKS}
    assert in_bf16["lm_head"]["m"].dtype == torch.float32
    before = memory()
    initial_state = tg.init_optimizer_state
    monkeypatch.setattr(tg, "init_optimizer_state", with_average)
    ex = make_engine(cfg)
    numbers = sum(math.prod(row.shape) for row in ex.model.specs.values())
    assert memory() - before == numbers * F64.itemsize
    added = {label: state["another"] for label, state in ex.optimizer.state.items()}
    assert added.keys() == ex.model.specs.keys()
    for number, x in enumerate(added.values(), 1):
        x.fill_(number)
    restore = ex.snapshot()
    saved = ex.full_state(tg.Schedule(cfg).at(0), with_moments=True)
    for put_back in (restore, functools.partial(ex.load_state, saved)):
        for x in added.values():
            x.zero_()
        put_back()
        assert all(x.eq(number).all() for number, x in enumerate(added.values(), 1))

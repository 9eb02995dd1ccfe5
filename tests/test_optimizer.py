"""Room 7: NorMuon and Adam in the optimizer beside reference.py; what each rank owns. As functions: test_oracle.py."""
import math

import numpy as np
import pytest
import torch
from common import add_grad, executor, fabric, fill_randomly, grad_of, owned, refused, small, untied_at
from reference import Reference

import train_gpt as tg

F64 = torch.float64
BANKS, TABLES = ("attn", "mlp"), ("bigram_embed", "value_embed", "embed")

def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)

@pytest.mark.recipe
def test_normuon_direction__roundings_to_bf16_stand_where_the_recipe_has_them(monkeypatch):
    """NorMuon: what goes into Polar Express, and the factor of each row, once each; Adam: the weight, to nearest."""
    o, seen = randn(1, 4, 3).bfloat16(), []
    monkeypatch.setattr(tg, "polar_express", lambda x: seen.append(x) or o)
    grad, second = randn(1, 4, 3, seed=1).float(), randn(1, 4, 1, seed=2).abs().float()
    exact = o.double().numpy()[0]
    root = np.sqrt(0.95 * second.double().numpy()[0] + 0.05 * (exact**2).mean(1, keepdims=True))
    u = tg.normuon_direction(grad, torch.zeros(1, 4, 3), second, torch.tensor(0.9, dtype=F64), 0.95, torch.bfloat16)
    assert seen[0].equal(((grad * (1 - 0.9) + (1 - 0.9) * grad * 0.9)).bfloat16())
    factor = torch.from_numpy(np.linalg.norm(exact) / np.linalg.norm(exact / root) / root)
    assert u.equal(o.float() * factor.float().bfloat16().float())
    p = randn(1000).bfloat16()
    want = (p.double() - 0.01 - p.double() * (p > 0) * 0.005).bfloat16()     # m / sqrt(v) = 0.1 / sqrt(0.01) = 1
    numbers = torch.tensor([0.01, 0.005], dtype=F64).unbind()
    tg.adam_update(p, torch.ones(1000), torch.zeros(1000), torch.zeros(1000), 1.0, (0.9, 0.99), 0.0, *numbers)
    assert p.equal(want)

def test_stochastic_round__keeps_what_is_not_finite():
    """The largest NaN would become -0.0: a carry out of its bits goes through the sign."""
    raw = np.array([[0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F800001, 0x7F800000, 0xFF800000]], np.uint32)
    x = torch.from_numpy(raw.view(np.float32))
    for bits in (0, -1, 0x12345678, -0x80000000):
        rounded = tg.stochastic_round(x, torch.tensor([bits], dtype=torch.int32)).bfloat16()
        assert rounded[0, :4].isnan().all(), bits
        assert rounded[0, 4:].tolist() == [math.inf, -math.inf], bits

def make(cfg: tg.Config, rank: int = 0, world: int = 1) -> tg.Optimizer:
    where, tables = fabric(rank, world), tg.row_tables(cfg)
    model = tg.GPT(cfg, tg.attention_reference, 16, {table.label: -(-table.rows // world) for table in tables})
    whole = fill_randomly(model, where=where)
    with torch.no_grad():
        model.embed.copy_(owned(whole["lm_head"].t(), where))
    rows = {table.label: tg.RowTable(table, cfg, where, model.get_parameter(table.label), 64, tg.no_wait)
            for table in tables}
    return tg.Optimizer(cfg, where, model, lambda call: call, rows)

def random_grads(optimizer: tg.Optimizer, step: int) -> dict[str, torch.Tensor]:
    return {label: randn(*p.shape, seed=100 * step + k) for k, (label, p) in
            enumerate(optimizer.model.named_parameters())}

def take_step(optimizer: tg.Optimizer, values: tg.Values) -> None:
    """A backward pass adds random gradients, then the update."""
    for label, grad in random_grads(optimizer, values.step).items():
        add_grad(optimizer, label, grad, values)
    optimizer.step(values, tg.no_wait)

def weights_of(optimizer: tg.Optimizer) -> dict[str, torch.Tensor]:
    return {label: p.detach().clone() for label, p in optimizer.model.named_parameters()}

SETTINGS = dict(normuon_beta2=0.5, normuon_weight_decay=3.0, adam_eps=1e-3, adam_weight_decay=0.1)

@pytest.mark.recipe
@pytest.mark.parametrize("changes", [dict(), dict(adam_every=1), *({name: x} for name, x in SETTINGS.items())], ids=str)
def test_step__is_the_references(changes):
    """Tied, in the step that unties, and after it; parameters, moments and kept gradients after each step.

    With other settings, too: one that is ignored would have its default.
    """
    cfg = small(stages=untied_at(1), **changes)
    optimizer, schedule = make(cfg), tg.Schedule(cfg)
    naive = Reference(cfg, weights_of(optimizer))
    for values in map(schedule.at, range(schedule.untie_step + 2 * cfg.adam_every + 1)):
        for label, grad in random_grads(optimizer, values.step).items():
            naive.grads[label] += grad
        take_step(optimizer, values)
        naive.optim_step(values)
        for label, p in optimizer.model.named_parameters():
            np.testing.assert_allclose(p.detach(), naive.p[label], rtol=0, atol=1e-9, err_msg=f"{label}, {values.step}")
            for name, x in optimizer.state[label].items():
                if values.adam_step or label in BANKS:
                    np.testing.assert_allclose(x, naive.state[label][name], rtol=1e-9, atol=1e-12, err_msg=label)
            kept = grad_of(optimizer, label)
            assert (kept is None) == (values.adam_step or label in BANKS), label
            assert kept is None or kept.equal(naive.grads[label]) or cfg.adam_every > 2, label
    assert not naive.p["embed"].equal(naive.p["lm_head"].t()), "they did part"

@pytest.mark.parametrize("missing", ["attn", "smear_gate", "bigram_embed", "value_embed", "embed", "lm_head"])
def test_step__a_missing_gradient_is_refused(missing):
    cfg = small()
    optimizer = make(cfg)
    before, values = weights_of(optimizer), tg.Schedule(cfg).at(cfg.adam_every - 1)
    for label, grad in random_grads(optimizer, 0).items():
        if label != missing:
            add_grad(optimizer, label, grad, values)
    named = "small" if missing == "smear_gate" else missing              # one sum for all that every rank updates
    with refused(tg.RunError, f"no gradient of ['{named}']", "forward_backward"):
        optimizer.step(values, tg.no_wait)
    assert all(x.equal(before[label]) for label, x in weights_of(optimizer).items())

@pytest.mark.parametrize("order", ["REDUCE_ORDER", "UPDATE_ORDER"])
def test_step__any_permutation_of_an_order_gives_the_same_bits_and_nothing_else_is_one(order, monkeypatch):
    def run():
        optimizer = make(small(stages=untied_at(1)))
        for step in range(6):
            take_step(optimizer, tg.Schedule(optimizer.cfg).at(step))
        return weights_of(optimizer)

    base, entries = run(), getattr(tg, order)
    for bad in (entries[1:], (*entries[1:], "mlp"), (*entries, "mlp")):
        with monkeypatch.context() as patch, pytest.raises(AssertionError, match="an entry once in each"):
            patch.setattr(tg, order, bad)
            make(small())
    monkeypatch.setattr(tg, order, tuple(np.random.default_rng(1).permutation(entries)))
    assert all(x.equal(base[label]) for label, x in run().items())

def shard_of(optimizer: tg.Optimizer, label: str) -> torch.Tensor:
    entry = optimizer.entries[label]
    return entry.shard if label in optimizer.sharded else entry.table.shard

@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_Optimizer__ranks_own_every_piece_once(world):
    """Shards of matrices and of the head's rows, every W-th row of a table, also where W does not divide their number;
    state for what is owned alone. Shards are stored with room for whole ones, whose padding is zeros."""
    cfg = small(bigram_rows=101)
    alone, *ranks = [make(cfg, rank, count) for count in (1, world) for rank in range(count)]
    for label in (*BANKS, "lm_head", *TABLES):
        whole, *parts = [shard_of(optimizer, label) for optimizer in (alone, *ranks)]
        assert all(len(part) <= -(-len(whole) // world) for part in parts), label
        if label in TABLES:
            assert all(parts[row % world][row // world].equal(x) for row, x in enumerate(whole)), label
            assert sum(int(part.any(1).sum()) for part in parts) == len(whole), "after a shard is nothing but zeros"
        else:
            assert torch.cat(parts).equal(whole), label
        for optimizer, part in zip(ranks, parts):
            entry = optimizer.entries[label]
            assert all(len(x) == len(part) for x in optimizer.state[label].values()), label
            if label not in TABLES:
                for room in (entry.padded, entry.main_grad, entry.comm_buffer):
                    assert len(room) == world * entry.shard_size and not room[len(whole):].any(), label
                assert entry.weight.data_ptr() == entry.padded.data_ptr()
                assert entry.weight.main_grad.data_ptr() == entry.main_grad.data_ptr()
    for label in BANKS:
        assert torch.cat([optimizer.entries[label].lr_muls for optimizer in ranks]).equal(alone.entries[label].lr_muls)

def test_initial_state__one_name_more_goes_everywhere(monkeypatch):
    """A late average of the weights, as a fork would add it: snapshots, files and the memory estimate follow."""
    def memory() -> int:
        return tg.memory_estimate(cfg, fabric(), tg.attention_reference, cfg.num_slots)["moments"]

    def with_average(row, shard):
        return initial_state(row, shard) | dict(another=torch.zeros_like(shard))

    cfg = small()
    in_bf16 = make(small(dtype="bfloat16")).state
    assert {label for label in in_bf16 if "mantissa" in in_bf16[label]} == {*BANKS}
    assert in_bf16["lm_head"]["m"].dtype == torch.float32
    before, initial_state = memory(), tg.initial_state
    monkeypatch.setattr(tg, "initial_state", with_average)
    ex, values = executor(cfg), tg.Schedule(cfg).at(0)
    assert memory() - before == sum(math.prod(row.shape) for row in ex.model.table.values()) * F64.itemsize
    added = {label: state["another"] for label, state in ex.optimizer.state.items()}
    assert added.keys() == ex.model.table.keys()
    for number, x in enumerate(added.values(), 1):
        x.fill_(number)
    restore, saved = ex.snapshot(), ex.whole_state(values)
    for put_back in (restore, lambda: ex.load_state(saved["weights"] | saved["moments"])):
        for x in added.values():
            x.zero_()
        put_back()
        assert all(x.eq(number).all() for number, x in enumerate(added.values(), 1))

"""Section 9: a run is the reference's, calls add up, micro-batches change rounding only, restore leaves no trace."""
import fnmatch
import functools
import itertools
import operator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from common import (exact_array, few_layers, fill_randomly, grad_of, make_comm, make_engine, noop, random_batch,
                    rows_of_ngrams, small, started_loader, steps_of, tensors_of, unequal, untied_at)
from reference import Reference

import train_gpt as tg

ROUNDING = dict(rtol=1e-9, atol=1e-10)       # float64 sums in another order through 11 layers; gradients are of order 1

def filled(cfg: tg.Config) -> tuple[tg.Engine, tg.StepConfig]:
    ex = make_engine(cfg)
    fill_randomly(ex.model, 0, ex.comm)
    return ex, tg.Schedule(cfg).at(0)

def gradients(ex: tg.Engine) -> dict[str, torch.Tensor]:
    return {label: grad_of(ex.optimizer, label) for label in ex.model.specs}

@pytest.mark.recipe
@pytest.mark.parametrize("every, micro_batch, row_comms", [(1, 0, "sparse"), (2, 3, "dense")])
def test_Engine__a_run_equals_the_reference(every, micro_batch, row_comms) -> None:
    """Plans, lookups, backward and updates against autograd over whole tables; through every stage and the untying."""
    tables = tg.parse_value("tables", f"every_embed 2 40 stream 1 device {every}; other_embed 3 30 1 0 host 2")
    cfg = small(stages=untied_at(1), adam_every=every, tables=tables, row_comms=row_comms,
                train_files="formula:60:59:20000:1")
    schedule = tg.Schedule(cfg)
    ex = tg.Engine(cfg, make_comm(), tg.attention_reference, "plain", micro_batch)
    weights = fill_randomly(ex.model)
    weights["embed"] = weights["lm_head"].t()
    with torch.no_grad():
        ex.model.embed.copy_(weights["embed"])
    naive = Reference(cfg, weights)
    steps = 2 * (schedule.untie_step // 2 + 2)
    with started_loader(cfg, make_comm(), steps) as (loader, plan):
        for values in steps_of(loader, plan):
            batch = loader.next(values)
            sums = ex.forward_backward(batch, values).seq_sums
            np.testing.assert_allclose(sums, naive.forward_backward(batch, values).seq_sums, rtol=1e-9)
            next_plans = loader.next_plans()
            ex.prefetch_rows(next_plans)
            ex.optim_step(values)
            ex.fetch_rows(next_plans)
            naive.optim_step(values)
            after = schedule.at(values.step + 1)
            found, want = (run.full_state(after, with_moments=True) for run in (ex, naive))
            assert {*found} == {*want}
            for name, x in want.items():
                is_weight = "." not in name
                if is_weight or values.update_adam and not (name.startswith("embed.") and values.tied):
                    np.testing.assert_allclose(found[name], x, rtol=1e-8, atol=1e-9, err_msg=name)
    assert {*ex.full_state(after, with_moments=False)} == {name for name in want if "." not in name}
    want_loss = naive.evaluate([batch], values)
    assert ex.evaluate([batch], values) == pytest.approx(want_loss, rel=1e-9)
    stored = rows_of_ngrams(ex)
    for line in cfg.tables:
        rows = stored[f"{line.label}.rows"]
        np.testing.assert_allclose(rows, naive.ngrams[line.label].p, rtol=0, atol=1e-9)
        assert rows.any() and stored[f"{line.label}.last"].max() == steps // line.update_every

@pytest.mark.parametrize("pieces", [[(0, 3), (3, 8)], [(5, 8), (0, 1), (1, 5)]])
def test_forward_backward__calls_add_up_for_any_split_of_the_sequences(pieces) -> None:
    """Against one call, which is the reference's; micro-batches, too, change rounding only."""
    cfg = small()
    batch = random_batch(cfg, 0, 8, 16)
    whole, values = filled(cfg)
    cut, _ = filled(cfg)
    want = whole.forward_backward(batch, values).seq_sums
    cut.micro_batch_size = 3
    for piece in pieces:
        slots = slice(*piece)
        part = batch.map(operator.itemgetter(slots))
        np.testing.assert_allclose(cut.forward_backward(part, values).seq_sums, want[slots], rtol=1e-12)
    found = gradients(cut)
    for label, grad in gradients(whole).items():
        np.testing.assert_allclose(found[label], grad, **ROUNDING, err_msg=label)

def test_forward_backward__loss_scale_zero_adds_nothing_even_if_the_loss_is_not_finite() -> None:
    cfg = small()
    batch = random_batch(cfg, 0, 2, 16)
    ex, values = filled(cfg)
    for group in ex.optimizer.sharded_groups.values():
        group.main_grad.fill_(torch.nan)
    model_losses = ex.model_losses
    calls = [(0.0, 1.0), (0.0, np.inf), (1.0, 1.0), (0.0, np.inf), (0.0, np.nan)]
    for loss_scale, factor in calls:
        def spoilt(*args: Any) -> torch.Tensor:
            return model_losses(*args) * factor

        ex.model_losses = spoilt
        sums = ex.forward_backward(batch, values, loss_scale).seq_sums
        assert sums.isfinite().all() == np.isfinite(factor)
        if loss_scale == 0 and factor != 1:
            assert all(grad.isfinite().all() for grad in gradients(ex).values())
    once, _ = filled(cfg)
    once.forward_backward(batch, values)
    assert unequal(gradients(ex), gradients(once)) == []

def test_evaluate__waits_for_the_device_with_a_timeout(monkeypatch) -> None:
    ex, values = filled(small())
    waits = []
    monkeypatch.setattr(tg.Communicator, "synchronize", lambda self: waits.append(self))
    ex.evaluate([random_batch(ex.cfg, 0, 1, 32)], values)
    assert waits == [ex.comm]

@pytest.mark.recipe
def test_evaluate__the_mean_over_all_tokens_with_documents_uncut(monkeypatch) -> None:
    """Whatever the size of the chunks of logits; documents are longer than in training."""
    cfg = small(max_doc_len=4, window_block=60)
    ex, values = filled(cfg)
    batches = [random_batch(cfg, 0, 8, 16), random_batch(cfg, 1, 3, 32)]
    one_document = torch.tensor([[0, 64]], dtype=torch.int32)
    batches.append(random_batch(cfg, 2, 1, 64)._replace(cu_seqlens=one_document))
    want = Reference(cfg, dict(ex.model.named_parameters())).evaluate(batches, values)
    for rows in (tg.EVAL_CHUNK, 7, 1):
        monkeypatch.setattr(tg, "EVAL_CHUNK", rows)
        assert ex.evaluate(iter(batches), values) == pytest.approx(want, rel=1e-12)
    assert all(grad is None for grad in gradients(ex).values())

@pytest.mark.recipe
@pytest.mark.parametrize("length", [1, 16, 64, 70])
def test_next_logits__of_the_last_position(length) -> None:
    """At the last position of the same tokens; of a longer context only a validation slot's tokens count."""
    cfg = small()
    ex, values = filled(cfg)
    longest = cfg.val_batch_tokens // cfg.seqs_per_step
    assert longest == 64, "the cases above"
    context = np.random.default_rng(length).integers(0, cfg.vocab_size, length).tolist()
    last = context[-longest:]
    bounds = np.array([0, len(last)], np.int32)
    slot = tg.PackedSeq(np.array([*last, 0], np.uint16), bounds)
    batch, = tg.build_batches(cfg, make_comm(), None, "test", [values], [[slot]])
    naive = Reference(cfg, dict(ex.model.named_parameters()))
    seen = {}
    naive.losses(naive.leaves(), batch, 0, values, (1.0,), seen)
    np.testing.assert_allclose(ex.next_logits(context, values), seen["logits"][-1].detach(), rtol=1e-11)

def left_behind(ex: tg.Engine) -> dict[str, object]:
    """Return all that a run may change, with what is gathered in the middle of a cycle."""
    found = {name: exact_array(x).tobytes() for name, x in tensors_of(ex).items()}
    found["rotary"] = ex.rotary
    for label, table in ex.tables.items():
        found[f"gradients of {label}"] = table.has_grads, dict(table.byte_totals)
        if table.store is not None:
            found[f"rows of {label}"] = table.cached_plan is None, table.active is None, dict(table.store.traffic)
    for label, group in ex.optimizer.sharded_groups.items():
        found[f"writes of {label}"] = group.weight.write_counts.tolist(), group.num_backwards
    for label, p in ex.model.named_parameters():
        found[f"grad of {label}"] = p.grad is None
    return found

# How a restore that forgets something would look.
def forget_tensors(monkeypatch, ex: tg.Engine, pattern: str) -> None:
    every = tg.Engine.state_tensors

    def others(self) -> dict[str, torch.Tensor]:
        return {name: x for name, x in every(self).items() if not fnmatch.fnmatchcase(name, pattern)}

    monkeypatch.setattr(tg.Engine, "state_tensors", others)

def forget_rotary(monkeypatch, ex: tg.Engine) -> None:
    discard_grads = ex.discard_grads
    stale = ex.rotary

    def drop_and_spoil() -> None:
        discard_grads()
        ex.rotary = stale

    monkeypatch.setattr(ex, "discard_grads", drop_and_spoil)

def forget_calls(monkeypatch, ex: tg.Engine, *places: tuple) -> None:
    for place in places:
        monkeypatch.setattr(*place, noop)

FORGOTTEN = {                            # what forgets it
    **{name: (forget_tensors, name) for name in ("attn", "bigram_embed", "*.m", "*.mantissa")},      # of each kind
    "rotary": (forget_rotary,), "tables": (forget_calls, (tg.LocalTable, "reset")),
    "row-wise tables": (forget_calls, (tg.RowwiseTable, "reset")),
    "rows on the host": (forget_calls, (tg.HostRowStore, "load")), "rows": (forget_calls, (tg.DeviceRowStore, "load")),
    "gradients": (forget_calls, (tg.ReplicatedGroup, "zero_grad"), (tg.ShardedGroup, "zero_grad")),
    "random numbers": (forget_calls, (torch, "set_rng_state")),
}

@pytest.mark.parametrize("name", [None, *FORGOTTEN])
def test_snapshot__a_restore_that_forgets_one_thing_is_seen(name, monkeypatch) -> None:
    """Restores in the middle of a cycle, with rows on their way to the row store on the host."""
    dtype = "bfloat16" if name == "*.mantissa" else "float32"
    tables = tg.parse_value("tables", "device_embed 2 40 stream 1 device 4; host_embed 3 30 1 0 host 2")
    cfg = small(stages=untied_at(0), dtype=dtype, adam_lr=0.5, tables=tables, train_files="formula:60:59:20000:1")
    ex = make_engine(cfg)
    for label in ("device_embed", "host_embed"):
        rows = torch.tensor([1, 5, 7])
        state = ex.tables[label].store.shard.index_select(rows)
        ex.tables[label].store.load([(rows, tg.RowState(*(x + 1 for x in state)))])
    restore = ex.snapshot()
    before = left_behind(ex)
    with started_loader(cfg, make_comm(), 8) as (loader, plan):
        for values in itertools.islice(steps_of(loader, plan), 7):
            ex.forward_backward(loader.next(values), values)
            if values.step < 6:
                next_plans = loader.next_plans()
                ex.prefetch_rows(next_plans)
                ex.optim_step(values)
                ex.fetch_rows(next_plans)
    assert all(group.has_gradient() for group in ex.optimizer.groups.values())
    assert ex.tables["host_embed"].store.unstored is not None
    torch.rand(1)
    if name:
        forget, *given = FORGOTTEN[name]
        forget(monkeypatch, ex, *given)
    restore()
    assert (left_behind(ex) != before) == (name is not None)

def test_compile_fn__graphs_are_the_trainer_bit_for_bit_and_documents_do_not_recompile(monkeypatch) -> None:
    """Backend aot_eager: the graphs as they are traced, run operation by operation. Each kind of layer once. Both sides
    take the branches that are for compilers, which are to fuse: of the loss, other operations."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    found = []
    for compiled in (0, 1):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        graphs = []                          # so many there are after each step
        with few_layers(), monkeypatch.context() as patch:
            if not compiled:
                patch.setattr(torch.compiler, "is_compiling", lambda: True)
            cfg = small(num_scheduled_steps=30, dtype="bfloat16", compile=compiled)
            ex, _ = filled(cfg)
            tensors = {}
            for values in map(tg.Schedule(cfg).at, range(2 * cfg.adam_every)):
                values = replace(values, mtp_weights=(1.0, 0.5 - values.step / 10))          # one stage: numbers move
                batch = random_batch(cfg, values.step, 8, 16)
                repeats = batch.cu_seqlens[:, -1:].expand(-1, 2 * values.step)
                batch = batch._replace(cu_seqlens=torch.cat([batch.cu_seqlens, repeats], dim=1))
                tensors[f"losses of step {values.step}"] = ex.forward_backward(batch, values).seq_sums
                ex.optim_step(values)
                graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
            for name, x in ex.state_tensors().items():
                tensors[name] = x.clone()
            found.append(tensors)
    torch._dynamo.reset()
    assert unequal(*found) == []
    first, second = np.split(np.array(graphs), 2)                             # cycles of the compiled side
    assert first[-1] > 0 and (second == first[-1]).all(), "one cycle compiles, the next one does not"

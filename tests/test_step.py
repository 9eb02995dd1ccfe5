"""Section 5: a run equals the reference, calls add up, micro-batches only change rounding, `reset` undoes a run."""
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from common import (F32, exact_array, few_layers, fill_randomly, grad_of, make_comm, make_engine, needs_compiler,
                    needs_scaled_mm, planned, randn, random_batch, rows_of_ngrams, small, started_loader, tensors_of,
                    unequal, untied_at)
from forked_ranks import Rank
from reference import Reference

import train_gpt as tg

def gradients(engine: tg.Engine) -> dict[str, torch.Tensor]:
    grads = {label: grad_of(engine.optimizer, label) for label in engine.model.specs}
    return {label: grad if grad is None else grad.clone() for label, grad in grads.items()}

@pytest.mark.recipe
@pytest.mark.parametrize("adam_every, micro_batch_size, row_comms", [(1, 8, "sparse"), (2, 3, "dense")])
def test_Engine__a_run_equals_the_reference(three_layers, adam_every, micro_batch_size, row_comms) -> None:
    """Also the plans and lookups of all tables. The run passes through two stages and the untying."""
    tables = tg.NgramTable("every_embed", 2, 40, adam_every), tg.NgramTable("other_embed", 3, 30)
    cfg = small(stages=untied_at(1), adam_every=adam_every, tables=tables, row_comms=row_comms,
                micro_batch_size=micro_batch_size, train_files="formula:60:59:20000:1")
    schedule = tg.Schedule(cfg)
    engine = make_engine(cfg)
    weights = fill_randomly(engine.model)
    weights["embed"] = weights["lm_head"].t()
    with torch.no_grad():
        engine.model.embed.copy_(weights["embed"])
    naive = Reference(cfg, weights)
    steps = 2 * (schedule.last_tied_step // 2 + 2)
    with started_loader(cfg, make_comm(), steps) as (loader, step_cfgs):
        for step_cfg in step_cfgs:
            batch = loader.next()
            step_loss, expected = (trainer.forward_backward(batch, step_cfg) for trainer in (engine, naive))
            np.testing.assert_allclose(step_loss.seq_sums, expected.seq_sums, rtol=1e-9)
            np.testing.assert_allclose(step_loss.next_sum, expected.next_sum, rtol=1e-9)
            next_step_plans = loader.next_step_plans()
            engine.optim_step(step_cfg)
            engine.fetch_rows(next_step_plans)
            naive.optim_step(step_cfg)
            updates_adam = (step_cfg.step + 1) % cfg.adam_every == 0
            state, expected = engine.tensors(), naive.tensors()
            assert {*state} == {*expected}
            for name, x in expected.items():
                is_weight = "." not in name
                is_tied = name.startswith("embed") and schedule.at(step_cfg.step + 1).tied    # lookups read the head
                if not is_tied and (is_weight or updates_adam):
                    np.testing.assert_allclose(state[name], x, rtol=1e-8, atol=1e-9, err_msg=name)
    expected_loss = naive.evaluate([batch], step_cfg)
    assert engine.evaluate([batch], step_cfg) == pytest.approx(expected_loss, rel=1e-9)
    ngram_state = rows_of_ngrams(engine)
    for table in cfg.tables:
        rows = ngram_state[f"{table.label}.rows"]
        np.testing.assert_allclose(rows, naive.ngrams[table.label].p, rtol=0, atol=1e-9)
        assert rows.any() and ngram_state[f"{table.label}.last_update"].max() == steps // table.update_every

@pytest.mark.parametrize("dtype, head_precision", [
    ("float32", "plain"), ("bfloat16", "emulated"), pytest.param("bfloat16", "fp8", marks=needs_scaled_mm)])
def test_forward_backward__a_power_of_two_as_loss_scale_gives_equal_bits(dtype, head_precision) -> None:
    """The returned losses are not scaled. A loss scale of 0 adds zeros."""
    cfg = small(dtype=dtype, max_doc_len=16)
    engine = make_engine(cfg, head_precision=head_precision)
    fill_randomly(engine.model)
    batch, step_cfg = planned(cfg, random_batch(cfg, 0, 2, 16)), tg.Schedule(cfg).at(0)
    expected_losses = engine.forward_backward(batch, step_cfg).seq_sums
    expected = gradients(engine)
    assert all(grad.any() for grad in expected.values())
    engine.forward_backward(batch, step_cfg, loss_scale=0.0)
    assert unequal(gradients(engine), expected) == []
    for factor in (2.0**-7, 2.0**20):
        for group in engine.optimizer.groups.values():
            group.reset()
        losses = engine.forward_backward(batch, step_cfg, factor).seq_sums
        assert losses.equal(expected_losses)
        assert unequal({label: grad / factor for label, grad in gradients(engine).items()}, expected) == []

@pytest.mark.recipe
def test_evaluate__the_mean_over_all_tokens_with_documents_uncut(monkeypatch) -> None:
    """For any size of the chunks of logits. Documents are longer than in training."""
    cfg = small(max_doc_len=4, window_block=60)
    engine, step_cfg = make_engine(cfg), tg.Schedule(cfg).at(0)
    fill_randomly(engine.model)
    batches = [random_batch(cfg, 0, 8, 16), random_batch(cfg, 1, 3, 32)]
    one_doc_bounds = torch.tensor([[0, 64]], dtype=torch.int32)
    batches.append(random_batch(cfg, 2, 1, 64)._replace(cu_seqlens=one_doc_bounds))
    expected = Reference(cfg, dict(engine.model.named_parameters())).evaluate(batches, step_cfg)
    for chunk_len in (tg.EVAL_CHUNK["cpu"], 7):
        monkeypatch.setitem(tg.EVAL_CHUNK, "cpu", chunk_len)
        loss = engine.evaluate((planned(cfg, batch, tied=False) for batch in batches), step_cfg)
        assert loss == pytest.approx(expected, rel=1e-12)
    assert all(grad is None for grad in gradients(engine).values())

def all_state(engine: tg.Engine) -> dict[str, object]:
    """Return everything that a run changes, also what accumulates within a cycle."""
    state = {name: exact_array(x).tobytes() for name, x in tensors_of(engine).items()}
    state["rotary"] = engine.filled_rotary
    for label, table in engine.tables.items():
        if engine.comm.world_size > 1:
            state[f"counts of {label}"] = dict(table.bytes)
        state[f"plans of {label}"] = table.cached_plan, table.grads_plan, table.fetch_work
    for label, p in engine.model.named_parameters():
        if hasattr(p, "main_grad"):
            state[f"writes of {label}"] = p.write_counts.tolist()
        elif label not in engine.tables:
            state[f"grad of {label}"] = p.grad is None
    return state

def train_steps(engine: tg.Engine, steps: int) -> list[list[float]]:
    """Train, and stop in the middle of the last step, before optim_step; return the losses of this rank."""
    losses = []
    with started_loader(engine.cfg, engine.comm, 8) as (loader, step_cfgs):
        for step_cfg in itertools.islice(step_cfgs, steps):
            losses.append(engine.forward_backward(loader.next(), step_cfg).seq_sums.tolist())
            next_step_plans = loader.next_step_plans()
            if len(losses) < steps:
                engine.optim_step(step_cfg)
                engine.fetch_rows(next_step_plans)
    return losses

def compare_reset_with_fresh(rank: Rank, dtype: str) -> dict[str, Any]:
    """Reset an engine with another seed after 7 steps. Compare it with a new engine, at once and after 4 more steps.

    unchanged: what training did not change, so that a reset may forget it unnoticed.
    """
    comm = rank.comm()
    # The embedding is untied on the second step, and adam_lr is so large that bf16 weights change.
    tables = tg.NgramTable("every_embed", 2, 40, 4), tg.NgramTable("other_embed", 3, 30)
    with few_layers():
        cfg = small(stages=untied_at(0), dtype=dtype, adam_lr=0.5, tables=tables, train_files="formula:60:59:20000:1")
        engine, fresh = (tg.Engine(replace(cfg, seed=seed), comm, tg.attention_reference, "plain") for seed in (0, 3))
        train_steps(engine, 7)
        trained = all_state(engine)
        expected = all_state(fresh)
        engine.reset(3)
        found = all_state(engine)
        losses = train_steps(engine, 4)
        expected_losses = train_steps(fresh, 4)
    return dict(unchanged=[name for name, x in expected.items() if x == trained[name]],
                kept=[name for name, x in expected.items() if x != found[name]],
                losses_equal=losses == expected_losses, differs=unequal(tensors_of(engine), tensors_of(fresh)))

@pytest.mark.parametrize("world, dtype", [(1, "float32"), (2, "bfloat16")])
def test_reset__after_training_the_engine_equals_a_fresh_one(ranks, world, dtype) -> None:
    """Every bit is equal, although the engine was reset within a cycle, with gradients and fetched rows."""
    for found in ranks(world, compare_reset_with_fresh, dtype=dtype):
        assert found == dict(unchanged=[], kept=[], losses_equal=True, differs=[])

@needs_compiler
@pytest.mark.recipe
def test_normuon_update__compiled_by_inductor_rounds_to_bf16_as_eager_code() -> None:
    """But for the order of f32 sums, which may change the rounding of few rows. A dropped one changes most rows."""
    shape = 2, 96, 48
    torch._dynamo.reset()
    steps = []
    for compile_flag in (0, 1):
        engine = make_engine(small(dtype="bfloat16", compile=compile_flag))
        exact, momentum, grad = (randn(*shape, seed=seed, dtype=F32) / 10 for seed in range(3))
        p, mantissa = exact.bfloat16(), torch.zeros(shape, dtype=torch.int16)
        before = tg.with_mantissa(p, mantissa)
        second_moment = randn(*shape[:2], 1, seed=3, dtype=F32).square() / 100
        mu, lr, decay_per_lr, lr_muls = *map(tg.cpu_scalar, (0.9, 0.02, 0.01)), torch.ones(shape[0], 1, 1)
        update = engine.optimizer.normuon
        update(p, mantissa, grad, momentum, second_moment, 1 / 8, mu, lr, lr_muls, decay_per_lr, 0.95)
        steps.append(tg.with_mantissa(p, mantissa) - before)
    torch._dynamo.reset()
    eager, compiled = steps
    differs = (eager - compiled).abs() > 1e-4 * eager.abs().max()
    assert eager.any() and differs.float().mean() < 0.05

@pytest.mark.parametrize("head_precision", ["plain", "emulated"])
def test_Engine__compiles_the_losses_with_the_roundings_of_eager_code_if_the_head_is_emulated(
        monkeypatch, head_precision) -> None:
    rounds_as_eager: dict[str, bool] = {}

    def recorded_compile(fn: Callable, options: dict[str, bool], **_: Any) -> Callable:
        rounds_as_eager[fn.__name__] = options["emulate_precision_casts"]
        return fn

    monkeypatch.setattr(torch, "compile", recorded_compile)
    make_engine(small(compile=1), head_precision=head_precision)
    assert {name for name, is_rounded in rounds_as_eager.items() if is_rounded} == (
        {"normuon_update", "losses"} if head_precision == "emulated" else {"normuon_update"})

"""Section 5: a run equals the reference, calls add up, micro-batches only change rounding, restore undoes a run."""
import fnmatch
import itertools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from common import (BF16, F32, exact_array, fill_randomly, grad_of, load_chunks, make_comm, make_engine,
                    noop, randn, random_batch, rows_of_ngrams, small, started_loader, steps_of, tensors_of, unequal,
                    untied_at)
from forked_ranks import Rank
from reference import Reference
from torch import Tensor
from torch.testing import assert_close

import train_gpt as tg

TOLERANCE = dict(rtol=1e-9, atol=1e-10)      # order of f64 sums through 11 layers; gradients are of order 1

def filled_engine(cfg: tg.Config) -> tuple[tg.Engine, tg.StepConfig]:
    """Build an engine with random weights, and the config of step 0."""
    engine = make_engine(cfg)
    fill_randomly(engine.model, 0, engine.comm)
    return engine, tg.Schedule(cfg).at(0)

def gradients(engine: tg.Engine) -> dict[str, torch.Tensor]:
    """Return this rank's gradient of every parameter, by label."""
    return {label: grad_of(engine.optimizer, label) for label in engine.model.specs}

@pytest.mark.recipe
@pytest.mark.parametrize("adam_every, micro_batch, row_comms", [(1, 0, "sparse"), (2, 3, "dense")])
def test_Engine__a_run_equals_the_reference(adam_every, micro_batch, row_comms) -> None:
    """Plans, lookups, backward passes and updates equal autograd over full tables.

    The run passes through every stage and the untying.
    """
    tables = tg.parse_value("tables", f"every_embed 2 40 stream 1 device {adam_every}; other_embed 3 30 1 0 host 2")
    cfg = small(stages=untied_at(1), adam_every=adam_every, tables=tables, row_comms=row_comms,
                train_files="formula:60:59:20000:1")
    schedule = tg.Schedule(cfg)
    engine = tg.Engine(cfg, make_comm(), tg.attention_reference, "plain", micro_batch)
    weights = fill_randomly(engine.model)
    weights["embed"] = weights["lm_head"].t()
    with torch.no_grad():
        engine.model.embed.copy_(weights["embed"])
    naive = Reference(cfg, weights)
    steps = 2 * (schedule.untie_step // 2 + 2)
    with started_loader(cfg, make_comm(), steps) as (loader, step_cfgs):
        for step_cfg in steps_of(loader, step_cfgs):
            batch = loader.next(step_cfg)
            step_loss, expected = (trainer.forward_backward(batch, step_cfg) for trainer in (engine, naive))
            np.testing.assert_allclose(step_loss.seq_sums, expected.seq_sums, rtol=1e-9)
            np.testing.assert_allclose(step_loss.next_sum, expected.next_sum, rtol=1e-9)
            next_plans = loader.next_plans()
            engine.prefetch_rows(next_plans)
            engine.optim_step(step_cfg)
            engine.fetch_rows(next_plans)
            naive.optim_step(step_cfg)
            next_cfg = schedule.at(step_cfg.step + 1)
            updates_adam = (step_cfg.step + 1) % cfg.adam_every == 0
            state, expected = (trainer.full_state(next_cfg, with_moments=True) for trainer in (engine, naive))
            assert {*state} == {*expected}
            for name, x in expected.items():
                is_weight = "." not in name
                if is_weight or updates_adam and not (name.startswith("embed.") and step_cfg.tied):
                    np.testing.assert_allclose(state[name], x, rtol=1e-8, atol=1e-9, err_msg=name)
    assert {*engine.full_state(next_cfg, with_moments=False)} == {name for name in expected if "." not in name}
    expected_loss = naive.evaluate([batch], step_cfg)
    assert engine.evaluate([batch], step_cfg) == pytest.approx(expected_loss, rel=1e-9)
    ngram_state = rows_of_ngrams(engine)
    for table in cfg.tables:
        rows = ngram_state[f"{table.label}.rows"]
        np.testing.assert_allclose(rows, naive.ngrams[table.label].p, rtol=0, atol=1e-9)
        assert rows.any() and ngram_state[f"{table.label}.last"].max() == steps // table.update_every

@pytest.mark.parametrize("splits", [[(0, 3), (3, 8)], [(5, 8), (0, 1), (1, 5)]])
def test_forward_backward__calls_add_up_for_any_split_of_the_sequences(splits) -> None:
    """Several calls with micro-batches accumulate the gradients of one call, up to rounding.

    That one call equals the reference is tested above.
    """
    cfg = small()
    batch = random_batch(cfg, 0, 8, 16)
    one_call, step_cfg = filled_engine(cfg)
    split, _ = filled_engine(cfg)
    expected = one_call.forward_backward(batch, step_cfg).seq_sums
    split.micro_batch_size = 3
    for bounds in splits:
        seqs = slice(*bounds)
        micro = batch.map(operator.itemgetter(seqs))
        np.testing.assert_allclose(split.forward_backward(micro, step_cfg).seq_sums, expected[seqs], rtol=1e-12)
    grads = gradients(split)
    for label, grad in gradients(one_call).items():
        np.testing.assert_allclose(grads[label], grad, **TOLERANCE, err_msg=label)

def test_forward_backward__loss_scale_zero_adds_nothing_even_if_the_loss_is_not_finite() -> None:
    """Calls with loss_scale 0 leave the gradients of the one call with loss_scale 1, bit for bit."""
    cfg = small()
    batch = random_batch(cfg, 0, 2, 16)
    engine, step_cfg = filled_engine(cfg)
    for group in engine.optimizer.sharded_groups.values():
        group.main_grad.fill_(torch.nan)
    model_losses = engine.model_losses
    calls = [(0.0, 1.0), (0.0, np.inf), (1.0, 1.0), (0.0, np.inf), (0.0, np.nan)]
    for loss_scale, loss_factor in calls:
        def scaled_losses(*args: Any) -> list[torch.Tensor]:
            return [losses * loss_factor for losses in model_losses(*args)]

        engine.model_losses = scaled_losses
        seq_sums = engine.forward_backward(batch, step_cfg, loss_scale).seq_sums
        assert seq_sums.isfinite().all() == np.isfinite(loss_factor)
        if loss_scale == 0 and loss_factor != 1:
            assert all(grad.isfinite().all() for grad in gradients(engine).values())
    expected, _ = filled_engine(cfg)
    expected.forward_backward(batch, step_cfg)
    assert unequal(gradients(engine), gradients(expected)) == []

def test_evaluate__waits_for_the_device_with_a_timeout(monkeypatch) -> None:
    """`evaluate` synchronizes by `Communicator.synchronize`, which has a timeout."""
    engine, step_cfg = filled_engine(small())
    calls = []
    monkeypatch.setattr(tg.Communicator, "synchronize", lambda self: calls.append(self))
    engine.evaluate([random_batch(engine.cfg, 0, 1, 32)], step_cfg)
    assert calls == [engine.comm]

@pytest.mark.recipe
def test_evaluate__the_mean_over_all_tokens_with_documents_uncut(monkeypatch) -> None:
    """The validation loss equals the reference for any size of the chunks of logits.

    Documents are longer than in training.
    """
    cfg = small(max_doc_len=4, window_block=60)
    engine, step_cfg = filled_engine(cfg)
    batches = [random_batch(cfg, 0, 8, 16), random_batch(cfg, 1, 3, 32)]
    one_doc_bounds = torch.tensor([[0, 64]], dtype=torch.int32)
    batches.append(random_batch(cfg, 2, 1, 64)._replace(cu_seqlens=one_doc_bounds))
    expected = Reference(cfg, dict(engine.model.named_parameters())).evaluate(batches, step_cfg)
    for chunk_rows in (tg.EVAL_CHUNK, 7, 1):
        monkeypatch.setattr(tg, "EVAL_CHUNK", chunk_rows)
        assert engine.evaluate(iter(batches), step_cfg) == pytest.approx(expected, rel=1e-12)
    assert all(grad is None for grad in gradients(engine).values())

@pytest.mark.recipe
@pytest.mark.parametrize("context_len", [1, 16, 64, 70])
def test_next_logits__of_the_last_position(context_len) -> None:
    """The logits are those of the last position of a sequence with the same tokens.

    Only as many tokens of a longer context count as a validation sequence has.
    """
    cfg = small()
    engine, step_cfg = filled_engine(cfg)
    max_len = cfg.val_batch_tokens // cfg.seqs_per_step
    assert max_len == 64, "the parameters above include it"
    context = np.random.default_rng(context_len).integers(0, cfg.vocab_size, context_len).tolist()
    visible = context[-max_len:]
    cu_seqlens = np.array([0, len(visible)], np.int32)
    seq = tg.PackedSeq(np.array([*visible, 0], np.uint16), cu_seqlens)
    batch, = tg.build_batches(cfg, make_comm(), None, "test", [step_cfg], [[seq]])
    naive = Reference(cfg, dict(engine.model.named_parameters()))
    activations = {}
    naive.losses(naive.leaves(), batch, 0, step_cfg, (1.0,), activations)
    np.testing.assert_allclose(engine.next_logits(context, step_cfg), activations["logits"][-1].detach(), rtol=1e-11)

def all_state(engine: tg.Engine) -> dict[str, object]:
    """Return everything that a run may change, including what accumulates within a cycle."""
    state = {name: exact_array(x).tobytes() for name, x in tensors_of(engine).items()}
    state["rotary"] = engine.rotary
    for label, table in engine.tables.items():
        state[f"gradients of {label}"] = table.has_grads, dict(table.byte_totals)
        if table.store is not None:
            state[f"rows of {label}"] = table.cached_plan is None, table.row_state is None, dict(table.store.traffic)
    for label, group in engine.optimizer.sharded_groups.items():
        state[f"writes of {label}"] = group.weight.write_counts.tolist(), group.num_backwards
    for label, p in engine.model.named_parameters():
        state[f"grad of {label}"] = p.grad is None
    return state

def full_state_in_chunks(rank: Rank) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the full state of rank 0, gathered in one chunk per tensor and in several chunks, with different values.

    With four ranks, the last one has fewer MLP matrices than the others.
    """
    cfg = small()
    engine = tg.Engine(cfg, rank.comm(), tg.attention_reference, "plain")
    for number, x in enumerate(engine.state_tensors().values()):
        x.detach().copy_(number + rank.rank + torch.arange(x.numel()).view(x.shape))
    states = []
    for chunk_rows in (10**6, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tg, "CHUNK_ROWS", chunk_rows)
            states.append(engine.full_state(tg.Schedule(cfg).at(0), with_moments=True))
    return (states[0], states[1]) if rank.rank == 0 else ({}, {})

@pytest.mark.parametrize("world", [1, *(pytest.param(world, marks=pytest.mark.slow) for world in (2, 4))])
def test_full_state__shards_of_several_chunks(ranks, world) -> None:
    """The chunks of a bank, of the head and of a table are joined in order, also if a shard has many chunks."""
    whole, joined = ranks(world, full_state_in_chunks)[0]
    assert {*joined} == {*whole} and len(whole) > 20
    assert unequal(joined, whole) == []
    mlp, = (spec for spec in tg.parameter_specs(small()) if spec.label == "mlp")
    assert len(whole["mlp.momentum"]) == len(mlp.matrices) * len(tg.LAYERS)
    assert len(whole["lm_head.m"]) == small().model_dim

# Each of the following functions makes a restore omit something.
def forget_tensors(monkeypatch: pytest.MonkeyPatch, engine: tg.Engine, pattern: str) -> None:
    state_tensors = tg.Engine.state_tensors

    def remaining(self) -> dict[str, torch.Tensor]:
        return {name: x for name, x in state_tensors(self).items() if not fnmatch.fnmatchcase(name, pattern)}

    monkeypatch.setattr(tg.Engine, "state_tensors", remaining)

def forget_rotary(monkeypatch: pytest.MonkeyPatch, engine: tg.Engine) -> None:
    discard_grads = engine.discard_grads
    stale_rotary = engine.rotary

    def discard_and_restore_stale() -> None:
        discard_grads()
        engine.rotary = stale_rotary

    monkeypatch.setattr(engine, "discard_grads", discard_and_restore_stale)

def forget_calls(monkeypatch: pytest.MonkeyPatch, engine: tg.Engine, *methods: tuple[object, str]) -> None:
    for method in methods:
        monkeypatch.setattr(*method, noop)

OMISSIONS = {                            # name -> (function, its arguments)
    **{name: (forget_tensors, name) for name in ("attn", "bigram_embed", "*.m", "*.mantissa")},      # one of each kind
    "rotary": (forget_rotary,), "tables": (forget_calls, (tg.LocalTable, "reset")),
    "row-wise tables": (forget_calls, (tg.RowwiseTable, "reset")),
    "rows on the host": (forget_calls, (tg.HostRowStore, "clear"), (tg.HostRowStore, "load_chunk")),
    "rows": (forget_calls, (tg.DeviceRowStore, "clear"), (tg.DeviceRowStore, "load_chunk")),
    "gradients": (forget_calls, (tg.ReplicatedGroup, "zero_grad"), (tg.ShardedGroup, "zero_grad")),
    "random numbers": (forget_calls, (torch, "set_rng_state")),
}

@pytest.mark.parametrize("omitted", [None, *OMISSIONS])
def test_snapshot__a_restore_that_forgets_one_thing_is_seen(omitted, monkeypatch) -> None:
    """The comparison of states detects a restore that omits one kind of state, and accepts a complete one.

    The restore happens within a cycle, while the host store copies rows.
    """
    dtype = "bfloat16" if omitted == "*.mantissa" else "float32"
    tables = tg.parse_value("tables", "device_embed 2 40 stream 1 device 4; host_embed 3 30 1 0 host 2")
    cfg = small(stages=untied_at(0), dtype=dtype, adam_lr=0.5, tables=tables, train_files="formula:60:59:20000:1")
    engine = make_engine(cfg)
    for label in ("device_embed", "host_embed"):
        rows = torch.tensor([1, 5, 7])
        state = engine.tables[label].store.shard.index_select(rows)
        load_chunks(engine.tables[label].store, [(rows, tg.RowState(*(x + 1 for x in state)))])
    restore = engine.snapshot()
    before = all_state(engine)
    with started_loader(cfg, make_comm(), 8) as (loader, step_cfgs):
        for step_cfg in itertools.islice(steps_of(loader, step_cfgs), 7):
            engine.forward_backward(loader.next(step_cfg), step_cfg)
            if step_cfg.step < 6:
                next_plans = loader.next_plans()
                engine.prefetch_rows(next_plans)
                engine.optim_step(step_cfg)
                engine.fetch_rows(next_plans)
    assert all(group.has_gradient() for group in engine.optimizer.groups.values())
    assert engine.tables["host_embed"].store.pending_write is not None
    torch.rand(1)
    if omitted:
        forget, *args = OMISSIONS[omitted]
        forget(monkeypatch, engine, *args)
    restore()
    assert (all_state(engine) != before) == (omitted is not None)

@pytest.mark.recipe
@pytest.mark.parametrize("shape", [pytest.param((2, 64, 64), marks=pytest.mark.slow), (2, 96, 48)], ids=str)
def test_normuon_update__compiled_by_inductor_rounds_to_bf16_as_eager_code(shape) -> None:
    """The compiled update of a bank takes the steps of the eager one, but for the order of f32 sums.

    This order may change the rounding of the factor of few rows. A dropped rounding changes the steps of most rows.
    """
    torch._dynamo.reset()
    steps = []
    for compile_flag in (0, 1):
        engine = make_engine(small(dtype="bfloat16", compile=compile_flag))
        exact, momentum, grad = (randn(*shape, seed=seed, dtype=F32) / 10 for seed in range(3))
        p, mantissa = exact.bfloat16(), torch.zeros(shape, dtype=torch.int16)
        before = tg.with_mantissa(p, mantissa)
        second_moment = randn(*shape[:2], 1, seed=3, dtype=F32).square() / 100
        mu, lr, decay = map(tg.cpu_scalar, (0.9, 0.02, 0.01))
        update = engine.optimizer.groups["attn"].normuon
        update(p, mantissa, grad, momentum, second_moment, 1 / 8, mu, lr, torch.ones(shape[0], 1, 1), decay, 0.95)
        steps.append(tg.with_mantissa(p, mantissa) - before)
    torch._dynamo.reset()
    eager, compiled = steps
    differs = (eager - compiled).abs() > 1e-4 * eager.abs().max()
    assert eager.any() and differs.float().mean() < 0.05

@pytest.mark.recipe
def test_HeadLoss__emulated_and_compiled_by_inductor_rounds_the_logits_as_eager_code() -> None:
    """Losses and gradients have the error of f32 sums, which is far less than that of logits that are not rounded."""
    targets = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(1))

    def head_loss(y: Tensor, w: Tensor, logits_dtype: torch.dtype) -> Tensor:
        return tg.HeadLoss.apply(y, w, targets, torch.tensor([1.0, 0.5]), torch.tensor(1.0), "emulated", logits_dtype,
                                 tg.as_matrix(w))[0]

    def results_of(head: Callable[..., Tensor], logits_dtype: torch.dtype = BF16) -> list[Tensor]:
        y = randn(24, 32, seed=2, dtype=BF16).requires_grad_()
        w = (randn(32, 64, seed=3, dtype=BF16) / 4).requires_grad_()
        losses = head(y, w, logits_dtype)
        return [x.detach().float() for x in (losses, *torch.autograd.grad(losses.sum(), (y, w)))]

    torch._dynamo.reset()
    compiled = tg.compile_fn(head_loss, small(compile=1), make_comm(), round_as_eager=True)
    found, expected, unrounded = results_of(compiled), results_of(head_loss), results_of(head_loss, F32)
    torch._dynamo.reset()
    for x, y, z in zip(found, expected, unrounded):
        assert_close(x, y, rtol=1e-6, atol=1e-5)
        assert (y - z).abs().max() > 1e-3, "the logits of this case need no rounding"

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

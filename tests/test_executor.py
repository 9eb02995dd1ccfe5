"""Room 8: calls add up, weights are linear, micro-batches and cuts change rounding only, restore leaves no trace."""
import contextlib
import functools
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from common import (executor, fabric, fill_randomly, grad_of, own_rows, owned, planned, random_batch, refused, set_grad,
                    small, untied_at)

import train_gpt as tg

OWNED = ("attn", "mlp", "lm_head")          # weights with a main_grad
VAL_SLOT_TOKENS = 64                         # of the tiny preset
ROUNDING = dict(rtol=1e-9, atol=1e-10)       # float64 sums in another order through 11 layers; gradients are of order 1


def filled(cfg: tg.Config, seed: int = 0, **how) -> tuple[tg.Executor, tg.Values]:
    ex = executor(cfg, **how)
    fill_randomly(ex.model, seed, ex.fabric)
    return ex, tg.Schedule(cfg).at(0)


def cut(batch: tg.Batch, slots) -> tg.Batch:
    return batch.map(lambda x: x[slots])


def gradients(ex: tg.Executor) -> dict[str, torch.Tensor]:
    return {label: grad_of(ex.optimizer, label) for label, _ in ex.model.named_parameters()}


def after(cfg: tg.Config, *calls, **how) -> dict[str, torch.Tensor]:
    """Gradients after forward_backward of each (batch, loss weight)."""
    ex, values = filled(cfg, **how)
    for batch, loss_weight in calls:
        ex.forward_backward(batch, values, loss_weight)
    return gradients(ex)


def assert_same(got: dict, want: dict, scale: float = 1.0, **tolerance) -> None:
    for label in want:
        np.testing.assert_allclose(got[label], scale * want[label], **tolerance or ROUNDING, err_msg=label)


# ---- forward_backward -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("pieces", [[(0, 8)], [(0, 3), (3, 8)], [(5, 8), (0, 1), (1, 5)]])
def test_gradients_are_those_of_the_plain_objective_however_the_slots_are_cut(pieces):
    """d(sum of all slots' losses), by one autograd call over the model, against calls that add up."""
    cfg = small()
    ex, values = filled(cfg)
    batch, one = random_batch(cfg, 0, 8, 16), torch.ones((), dtype=torch.float64)
    spans = tg.spans_of(values.short_window, values.long_window, 12, values.rotary.attn_scale)
    model = tg.GPT(cfg, tg.attention_reference, len(ex.model.rotary_cos) // 2, {})    # without a main_grad
    model.load_state_dict(ex.model.state_dict())
    model.set_rotary(values.rotary.frequencies)
    rows = own_rows(model)
    losses = model.losses(batch, torch.tensor(values.mtp_weights, dtype=torch.float64), one, spans, "plain", rows)
    losses.sum().backward()
    want = {label: p.grad for label, p in model.named_parameters()}
    want.update((label, row_grads) for label, (_, row_grads) in rows.items())
    got = after(cfg, *((cut(batch, slice(*piece)), 1.0) for piece in pieces))
    assert_same(got, want)
    assert all(p.dtype == got[label].dtype for label, p in ex.model.named_parameters())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_of_tables_have_gradients_in_f32_and_never_a_dense_one_of_their_own(dtype):
    cfg = small(dtype=dtype)
    ex, values = filled(cfg)
    batch = random_batch(cfg, 0, 8, 16)
    for _ in range(2):
        ex.forward_backward(batch, values)
    for label, p in ex.model.named_parameters():
        grad = grad_of(ex.optimizer, label)
        if label in OWNED:
            assert p.grad is None and grad is p.main_grad and grad.shape == p.shape
            assert grad.dtype == (torch.float32 if label == "lm_head" else p.dtype), "of one or of two writes"
            continue
        if label not in ex.tables:
            assert p.grad is grad and grad.dtype == p.dtype
            continue
        assert p.grad is None and grad.dtype == torch.float32 and grad.shape == p.shape
        unread = torch.ones(len(p), dtype=bool)
        unread[batch.rows[label].flatten().long()] = False
        assert unread.any() and not grad[unread].any() and grad[~unread].any(1).all(), label


def serve(ex: tg.Executor, batch: tg.Batch, whole: dict[str, torch.Tensor]) -> None:
    """Rows of the tables as the exchange would bring them, out of whole tables; all others are NaN."""
    for label, table in ex.tables.items():
        plan, world = batch.plans[label], ex.fabric.world
        if not plan.tied:                                            # those are columns of the head, which is here
            everyone = torch.cat([owned(whole[label], fabric(rank, world)) for rank in range(world)])
            table.cache.detach().fill_(torch.nan)[:len(plan.my_rows)] = everyone[plan.my_rows]
            table.cached = plan


@pytest.mark.parametrize("mode", ["dense", "sparse"])
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("step", [0, 2])
def test_ranks_gradients_sum_to_the_whole(mode, world, step):
    """While head and embedding are tied and after it, each rank with its own slots and the rows that it reads."""
    cfg = small(row_comms=mode, stages=untied_at(0), bigram_rows=101)                # step 1 unties
    batch, parts, values = random_batch(cfg, 0, 8, 16, step), [], tg.Schedule(cfg).at(step)
    assert values.tied == batch.plans["embed"].tied == (step == 0)
    for rank in range(world):
        ex = executor(cfg, world, rank)
        whole = fill_randomly(ex.model, 0, ex.fabric)
        mine = planned(cfg, cut(batch, slice(rank, None, world)), ex.fabric)
        serve(ex, mine, whole)
        ex.forward_backward(mine, values)
        parts.append(gradients(ex))
        assert all(ex.model.get_parameter(label).grad is None for label in ex.tables)
    alone, _ = filled(cfg)
    if step == 0:
        with torch.no_grad():
            alone.model.embed.copy_(alone.model.lm_head.t())
    alone.forward_backward(batch, values)
    assert_same({label: sum(part[label] for part in parts) for label in parts[0]}, gradients(alone))


@pytest.mark.parametrize("size", [1, 2, 3, 8, 100])
def test_micro_batch_size_changes_nothing_but_rounding(size):
    cfg = small()
    batch, want = random_batch(cfg, 0, 8, 16), after(small(), (random_batch(small(), 0, 8, 16), 1.0))
    ex, values = filled(replace(cfg, slots_per_micro_batch=size))
    losses = ex.forward_backward(batch, values)
    assert_same(gradients(ex), want)
    alone = [float(ex.forward_backward(cut(batch, slice(s, s + 1)), values).slot_sums) for s in range(8)]
    np.testing.assert_allclose(losses.slot_sums, alone, rtol=1e-12)
    assert losses.tokens == 8 * 16 and not losses.slot_sums.requires_grad
    assert ex.evaluate([batch], values) == pytest.approx(filled(cfg)[0].evaluate([batch], values), rel=1e-12)


@pytest.mark.parametrize("precision", ["plain", "emulated"])
@pytest.mark.parametrize("power", [-5, 1, 4])
def test_a_loss_weight_of_two_to_the_k_is_bitwise(power, precision):
    """On the loss side or on the gradient side; the returned losses stay unscaled."""
    cfg = small(dtype="float32")
    batch = random_batch(cfg, 0, 8, 16)
    one, many = (after(cfg, (batch, weight), precision=precision) for weight in (1.0, 2.0**power))
    assert all((one[label] * 2.0**power).equal(many[label]) for label in one)
    ex, values = filled(cfg, precision=precision)
    assert ex.forward_backward(batch, values, 2.0**power).slot_sums.equal(ex.forward_backward(batch, values).slot_sums)


def test_loss_weights_are_linear():
    cfg = small()
    a, b = random_batch(cfg, 0, 2, 16), random_batch(cfg, 1, 3, 16)
    only_a, only_b = after(cfg, (a, 1.0)), after(cfg, (b, 1.0))
    got = after(cfg, (a, 0.3), (b, -1.7), (a, 0.4))
    assert_same(got, {label: 0.7 * only_a[label] - 1.7 * only_b[label] for label in got})


def test_a_weight_of_zero_adds_nothing_even_of_a_loss_that_is_not_finite():
    cfg = small()
    batch = random_batch(cfg, 0, 2, 16)
    ex, values = filled(cfg)
    assert torch.isfinite(ex.forward_backward(batch, values, 0.0).slot_sums).all()
    assert not any(grad.any() for grad in gradients(ex).values())
    ex.forward_backward(batch, values)
    assert_same(gradients(ex), after(cfg, (batch, 1.0)), rtol=0, atol=0)
    before = {label: grad.clone() for label, grad in gradients(ex).items()}
    model_losses = ex.model_losses
    for spoilt in (float("inf"), float("nan")):
        ex.model_losses = lambda *args, spoilt=spoilt: model_losses(*args) * spoilt
        assert not ex.forward_backward(batch, values, 0.0).slot_sums.isfinite().all()
        assert all(grad.equal(before[label]) for label, grad in gradients(ex).items())


@pytest.mark.parametrize("change", [
    dict(short_window=2), dict(long_window=4), dict(mtp_weights=(1.0, 0.5, 0.2)), dict(mtp_weights=(1.0, 0.5)),
    dict(rotary=tg.Rotary((1.0, 0.25), 0.8)), dict(rotary=tg.Rotary((1.0, 2.0**-10), 0.7))], ids=str)
def test_each_value_matters(change):
    """Change one value of the schedule alone: the training loss is another."""
    cfg = small()
    batch, losses = random_batch(cfg, 0, 2, 16), []
    ex, values = filled(cfg)
    assert values.rotary == tg.Rotary((1.0, 2.0**-10), 0.8), "the base of the change above"
    for v in (values, replace(values, **change), values):
        losses.append(ex.forward_backward(batch, v, 0.0).slot_sums)
    assert losses[0].equal(losses[2]) and not losses[0].equal(losses[1])


def test_optim_step_clears_what_it_updated_and_needs_gradients():
    cfg = small()
    ex, values = filled(cfg)
    refused(tg.RunError, lambda: ex.optim_step(values), "no gradient of", "attn")
    ex.forward_backward(random_batch(cfg, 0, 8, 16), values)
    ex.optim_step(values)
    assert {label for label, grad in gradients(ex).items() if grad is None} == {"attn", "mlp"}
    refused(tg.RunError, lambda: ex.optim_step(values), "no gradient of", "attn")


def test_a_cycle_of_weight_zero_is_one_of_zero_gradients():
    """Moments decay and move the weights; a step for which nobody called is refused as before."""
    cfg = small()
    schedule = tg.Schedule(cfg)
    found = []
    for by_hand in (True, False):
        ex, _ = filled(cfg)
        for step in range(4):
            batch, values = random_batch(cfg, step, 8, 16, step), schedule.at(step)
            weight = float(step < 2 or by_hand)
            kept = {label: grad if grad is None else grad.clone() for label, grad in gradients(ex).items()
                    if label not in ex.tables}
            ex.forward_backward(batch, values, weight)
            if by_hand and step >= 2:
                for label, grad in kept.items():
                    nothing = torch.zeros_like(ex.model.get_parameter(label))
                    set_grad(ex.optimizer, label, nothing if grad is None else grad)
                for table in ex.tables.values():
                    table.row_grads.zero_()
            ex.optim_step(values)
        found.append(bits(ex))
        refused(tg.RunError, lambda: ex.optim_step(schedule.at(4)), "no gradient of", "attn")
    assert {name for name in found[0] if found[0][name] != found[1][name]} == set()


# ---- evaluation and sampling ----------------------------------------------------------------------------------------

def test_evaluation_is_the_mean_over_all_tokens(monkeypatch):
    """Of -log softmax(z)[next token], documents uncut, whatever the size of the chunks of logits."""
    cfg = small()
    ex, values = filled(cfg)
    batches = [random_batch(cfg, seed, slots, length) for seed, slots, length in ((0, 8, 16), (1, 3, 32))]
    total = count = 0
    for batch in batches:
        longest = batch.tokens.shape[1]
        spans = tg.spans_of(values.short_window, values.long_window, longest, values.rotary.attn_scale)
        ex.model.set_rotary(values.rotary.frequencies)
        z = 23 * torch.sigmoid((ex.model.hidden(batch, spans, own_rows(ex.model)) @ ex.model.lm_head + 5) / 7.5)
        per_slot = [torch.nn.functional.cross_entropy(*pair) for pair in zip(z, batch.targets)]
        total, count = total + batch.tokens.shape[1] * float(sum(per_slot).detach()), count + batch.tokens.numel()
    for rows in (tg.EVAL_ROWS, 7, 1):
        monkeypatch.setattr(tg, "EVAL_ROWS", rows)
        assert ex.evaluate(iter(batches), values) == pytest.approx(total / count, rel=1e-12)
    assert all(grad is None for grad in gradients(ex).values())


def test_evaluation_sees_documents_longer_than_any_trained_with():
    cfg = small(max_doc_len=4, window_block=60)
    ex, values = filled(cfg)
    batch = random_batch(cfg, 0, 1, 64)
    whole = batch._replace(cu_seqlens=torch.tensor([[0, 64]], dtype=torch.int32))
    ex.model.set_rotary(values.rotary.frequencies)
    spans = tg.spans_of(values.short_window, values.long_window, 64, values.rotary.attn_scale)
    y = ex.model.hidden(whole, spans, own_rows(ex.model))[0]
    want = tg.next_token_losses(y, ex.model.lm_head, whole.targets[0]).mean()
    assert ex.evaluate([whole], values) == pytest.approx(float(want.detach()), rel=1e-12)


@pytest.mark.parametrize("length", [1, 5, 16, 17, 64, 70])
def test_next_logits_are_those_of_the_whole_context(length):
    """The last position of hidden() over the same tokens; of a context beyond 64 tokens only the end counts."""
    cfg = small()
    ex, values = filled(cfg)
    context = np.random.default_rng(length).integers(0, cfg.vocab_size, length).tolist()
    last = context[-VAL_SLOT_TOKENS:]
    slot = tg.Slot(np.array([*last, 0], np.uint16), np.array([0, len(last)], np.int32))
    batch, = tg.Planner(cfg, fabric()).batches("test", [values], [[slot]])
    ex.model.set_rotary(values.rotary.frequencies)
    spans = tg.spans_of(values.short_window, values.long_window, len(last), values.rotary.attn_scale)
    want = 23 * torch.sigmoid((ex.model.hidden(batch, spans, own_rows(ex.model))[0, -1] @ ex.model.lm_head + 5) / 7.5)
    assert cfg.val_batch_tokens // cfg.num_slots == VAL_SLOT_TOKENS
    np.testing.assert_allclose(ex.next_logits(context, values), want.detach(), rtol=1e-11)


# ---- snapshot and restore -------------------------------------------------------------------------------------------

def bits(ex: tg.Executor) -> dict[str, bytes]:
    """Every byte that a run may change, found by walking the objects, not by the list they keep themselves."""
    tensors = dict(ex.model.named_parameters())
    tensors |= {f"{label}.{name}": x for label, state in ex.optimizer.state.items() for name, x in state.items()}
    found = {name: x.detach().contiguous().view(torch.uint8).numpy().tobytes() for name, x in tensors.items()}
    return found | dict(rng=torch.get_rng_state().numpy().tobytes())


def addresses(ex: tg.Executor) -> dict[str, int]:
    buffers = {f"{name} {label}": getattr(table, name).data_ptr() for label, table in ex.tables.items()
               for name in ("shard", "cache", "row_grads", "grad")}
    shards = {f"shard {entry.row.label}": entry.shard.data_ptr() for entry in ex.optimizer.entries.values()
              if isinstance(entry, tg.Sharded)}
    return buffers | shards | {name: x.data_ptr() for name, x in ex.state_tensors().items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_warm_up_leaves_no_trace(dtype, monkeypatch):
    cfg = small(dtype=dtype, num_scheduled_steps=3, num_extension_steps=1, stages=untied_at(1))
    ex, values = filled(cfg)
    ex.forward_backward(random_batch(cfg, 0, 8, 16), values)
    ex.optim_step(values)                    # a state that is not the initial one: moments and mantissas are not zero
    seen, snapshot = [], tg.Executor.snapshot

    def seen_snapshot(self):
        restore = snapshot(self)
        return lambda: seen.append(bits(self)) or restore()

    monkeypatch.setattr(tg.Executor, "snapshot", seen_snapshot)
    before, places = bits(ex), addresses(ex)
    torch.rand(1)
    torch.set_rng_state(torch.frombuffer(bytearray(before["rng"]), dtype=torch.uint8))
    log = SimpleNamespace(phase=lambda *_: contextlib.nullcontext())
    tg.warm_up(cfg, fabric(), ex, log)
    unchanged = {name for name in before if seen[0][name] == before[name]}
    too_coarse = {"smear_gate"} if dtype == "bfloat16" else set()    # its rate of 8e-5 is lost in 8 bits of 0.7
    assert unchanged <= {"rng"} | too_coarse, f"the warm-up did not use {unchanged}"
    assert {name for name, x in bits(ex).items() if x != before[name]} == set()
    assert addresses(ex) == places
    assert all(grad is None for grad in gradients(ex).values())
    assert not any(table.row_grads.any() or table.grad.any() or table.cached for table in ex.tables.values())


def test_restore_brings_back_random_numbers_and_a_second_run_is_the_first():
    cfg = small(stages=untied_at(0))
    ex, _ = filled(cfg)
    schedule = tg.Schedule(cfg)

    def run():
        for step in range(4):
            ex.forward_backward(random_batch(cfg, step, 8, 16), schedule.at(step))
            ex.optim_step(schedule.at(step))
        return bits(ex) | dict(drawn=torch.rand(3).numpy().tobytes())

    restore = ex.snapshot()
    first = run()
    ex.forward_backward(random_batch(cfg, 9, 8, 16), schedule.at(4))
    restore()
    assert all(grad is None for grad in gradients(ex).values()), "else they would join the first step"
    assert run() == first
    assert schedule.untie_step == 1, "the untying is among the steps"


def test_snapshot_is_a_copy():
    ex, values = filled(small())
    restore, before = ex.snapshot(), bits(ex)
    for _ in range(2):                       # a snapshot serves more than once
        with torch.no_grad():
            for x in ex.state_tensors().values():
                x.add_(1)
        restore()
        assert bits(ex) == before


def test_a_restore_in_mid_cycle_reports_no_rows():
    """They would stand in the log of the next run."""
    cfg, reported = small(), []
    ex = tg.Executor(cfg, fabric(), tg.attention_reference, "plain", report=lambda **facts: reported.append(facts))
    batch, restore = random_batch(cfg, 0, 8, 16), ex.snapshot()
    for plan in batch.plans.values():
        plan.tag["purpose"] = "train"
    ex.forward_backward(batch, tg.Schedule(cfg).at(0))
    restore()
    assert reported == [] and not any(table.pending for table in ex.tables.values())


# What a run leaves behind, and how a restore that forgets it would look.
def forget_tensors(pattern: str):
    def forget(ex, stale, monkeypatch):
        every = tg.Executor.state_tensors
        monkeypatch.setattr(tg.Executor, "state_tensors", lambda self: {
            name: x for name, x in every(self).items() if not re.fullmatch(pattern, name)})
    return forget


def forget_rotary(ex, stale, monkeypatch):
    drop_gradients = ex.drop_gradients
    monkeypatch.setattr(ex, "drop_gradients", lambda: (drop_gradients(), setattr(ex, "rotary", stale)))


def forget_call(*places: tuple):
    return lambda ex, stale, monkeypatch: [monkeypatch.setattr(*place, lambda *_: None) for place in places]


STATE = ("attn", "mlp", "scalars", "x0_lambdas", "smear_gate", "skip_gate", "attn_gate_bank", "ve_gate_bank",
         "bigram_embed", "value_embed", "lm_head", "embed", "*.m", "*.v", "*.momentum", "*.second",
         "*.mantissa")
FORGOTTEN = {name: forget_tensors(name.replace(".", r"\.").replace("*", ".*")) for name in STATE}
FORGOTTEN |= {"rotary": forget_rotary, "tables": forget_call((tg.RowTable, "reset")),
              "gradients": forget_call((tg.Small, "clear"), (tg.Sharded, "clear")),
              "random numbers": forget_call((torch, "set_rng_state"))}
SELDOM = {*STATE} - {"attn", "bigram_embed", "*.m", "*.mantissa"}    # one of each kind; others with --all


def everything(ex: tg.Executor) -> dict:
    """All that a run may leave behind, by walking the objects."""
    tables = {f"{label}.{name}": getattr(table, name).detach().numpy().tobytes()
              for label, table in ex.tables.items() for name in ("row_grads", "grad")}
    pending = {f"{label}.pending": (len(table.pending), table.cached is None, dict(table.totals))
               for label, table in ex.tables.items()}
    written = {f"{label}.writes": (ex.model.get_parameter(label).writes.tolist(), ex.optimizer.entries[label].backwards)
               for label in OWNED}
    kept = {f"grad of {k}": p.grad is None for k, p in ex.model.named_parameters()}
    return bits(ex) | tables | pending | written | kept | dict(rotary=ex.rotary)


@pytest.mark.parametrize("name", [None, *(
    pytest.param(name, marks=[pytest.mark.all] if name in SELDOM else []) for name in FORGOTTEN)])
def test_a_restore_that_forgets_one_thing_is_seen(name, monkeypatch):
    dtype = "bfloat16" if name == "*.mantissa" else "float32"
    cfg = small(stages=untied_at(0), dtype=dtype, adam_lr=0.5)
    ex, _ = filled(cfg)
    schedule, restore, before = tg.Schedule(cfg), ex.snapshot(), everything(ex)
    for step in range(5):                    # the last step leaves half a cycle of gradients
        ex.forward_backward(random_batch(cfg, step, 8, 16, step), schedule.at(step))
        ex.optim_step(schedule.at(step))
    torch.rand(1)
    if name:
        FORGOTTEN[name](ex, ex.rotary, monkeypatch)
    restore()
    after = everything(ex)
    assert ({key for key in before if before[key] != after[key]} != set()) == (name is not None)


# ---- compiled -------------------------------------------------------------------------------------------------------

@pytest.mark.all
def test_compiled_equals_eager_and_documents_do_not_recompile(monkeypatch):
    """Backend aot_eager: graph capture, fullgraph and guards, without a C++ compiler. Few layers, each kind once."""
    layers = (tg.Layer("paired", value=0, keep_as=tg.SKIP), tg.Layer("none", add=tg.SKIP),
              tg.Layer("plain", "long", value=1, key_shift=True, keep_as=tg.BACKOUT))
    monkeypatch.setattr(tg, "LAYERS", layers)
    monkeypatch.setattr(tg, "ATTENTION_LAYERS", (0, 2))
    monkeypatch.setattr(tg, "NUM_VALUE_TABLES", 2)
    counts = dict(residual=3, attention=6, bigram=3, smear=1, backout=1, skip=1)
    monkeypatch.setattr(tg, "SCALARS", {name: tg.SCALARS[name][:count] for name, count in counts.items()})
    cfg = small(num_scheduled_steps=30)
    schedule, results = tg.Schedule(cfg), []
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    for compiled in (0, 1):
        ex, _ = filled(replace(cfg, compile=compiled))
        found, graphs = [], []
        for step in (0, 1, 2, 3):
            values = replace(schedule.at(step), mtp_weights=(1.0, 0.5 - step / 10))      # one stage: numbers move only
            batch = random_batch(cfg, step, 8, 16)
            columns = [batch.cu_seqlens] + [batch.cu_seqlens[:, -1:]] * (2 * step)
            batch = batch._replace(cu_seqlens=torch.cat(columns, dim=1))
            found.append(ex.forward_backward(batch, values).slot_sums)
            found += [grad.clone() for grad in gradients(ex).values()]
            ex.optim_step(values)
            found.append(torch.tensor(ex.evaluate([batch], values)))
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        results.append(found)
    for eager, compiled in zip(*results, strict=True):
        np.testing.assert_allclose(compiled, eager, rtol=1e-9, atol=1e-10)               # float64 in another order
    assert 0 < graphs[1] == graphs[2] == graphs[3], "nothing compiles after the first cycle of a stage"
    torch._dynamo.reset()

"""Tests of the fork recipe_c.patch; test_forks.py runs them on the changed trainer.

REFERENCE_DIR may name a folder with recipe_c_reference.py, float64 formulas that somebody else wrote.
"""
import base64
import importlib.util
import math
import os
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from common import F64, ROOT, launch, losses, make_comm, make_engine, preset, randn, run_interpreted
from torch import Tensor

import train_gpt as tg

REFERENCE = Path(os.environ.get("REFERENCE_DIR", ROOT / "../shared/reference")) / "recipe_c_reference.py"
# Every part of the recipe in 20 steps of a narrow model, in float64.
FLAGS = ("--preset=pocket", "--dtype=float64", "--model_dim=32", "--num_heads=2", "--head_dim=16", "--val_tokens=8192",
         "--num_scheduled_steps=16", "--num_extension_steps=4", "--slow_update_step=8", "--max_attention_len=40",
         "--candidate_correction=0.5", "--sample_tokens=0", "--val_every=0", "--micro_batch_size=2",
         "--tables=[('bigram_embed', 2, 5000), ('trigram_embed', 3, 9000)]",
         *(f"--{kind}_files={ROOT}/data/pocket/pocket_{kind}_*.bin" for kind in ("train", "val")))

@pytest.fixture(scope="module")
def oracle() -> ModuleType:
    if not REFERENCE.exists():
        pytest.skip(f"no {REFERENCE.name} in REFERENCE_DIR")
    spec = importlib.util.spec_from_file_location("oracle", REFERENCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- Schedule --------------------------------------------------------------------------------------------------------
def test_schedule__has_the_steps_of_record_92(oracle) -> None:
    schedule = tg.Schedule(preset("record", 50_257, 50_256))
    table = tg.table_specs(schedule.cfg)[-1]
    assert schedule.total_steps == 1194 and [*schedule.stage_starts, 1194] == oracle.boundaries()
    for step in range(1194):
        step_cfg = schedule.at(step)
        assert step_cfg.seq_len == 2048 * oracle.BATCH[oracle.stage_of(step)]
        assert step_cfg.num_candidates == oracle.num_candidates(step)
        assert schedule.lr_factor_at(step) == pytest.approx(oracle.lr_factor(step), rel=1e-12)
        assert ((step + 1) % table.steps_per_update(step) == 0) == oracle.table_event(step)
    assert table.num_updates(1194) == 382 and schedule.last_tied_step == 1175
    prefix = [schedule.at(step).prefix_weight for step in (0, 319, 320, 411, 501, 680, 681)]
    assert prefix == [0.25, 0.25, 0.20, 0.15, 0.10, 0.05, 0]
    # Ticks that differ from the record: 895 copies the weights of 896, the head's last rate, 945 and 1193 of the value
    # embeddings, and 1192 of the banks.
    for average, kind in zip(tg.AVERAGES, ("head", "values", "flat", "bank")):
        rates = {step: rate for step in range(1194) for ticking, rate in schedule.at(step).averages
                 if ticking is average}
        expected = {step: rate for step in range(1194) if (rate := oracle.tail_rate(kind, step))}
        if kind != "values":
            for step in sorted(rates.keys() & expected.keys())[1:-1]:
                assert rates[step] == pytest.approx(expected[step], rel=1e-12)
        assert len(rates) - len(expected) == dict(head=0, values=1, flat=0, bank=-1)[kind]

def test_warm_up_cycles__have_every_number_of_candidates_and_both_cadences() -> None:
    schedule = tg.Schedule(preset("record", 50_257, 50_256))
    def graph(step: int) -> tuple:
        step_cfg = schedule.at(step)
        return step_cfg.stage, step_cfg.num_candidates, step_cfg.tied, step >= 336, step % 4 == 3
    warm = {graph(step_cfg.step) for cycle in schedule.warm_up_cycles(True) for step_cfg in cycle}
    assert warm == set(map(graph, range(1194)))


# ---- Candidates and prefixes -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_targets, count, offset", [
    (30, 64, 0), (30, 64, 411), (70, 64, 5), (3, 500, 9), (9, 512, 1)])
def test_choose_candidates__are_all_targets_and_the_next_of_the_sweep(num_targets, count, offset) -> None:
    targets = np.random.default_rng(num_targets).choice(512, num_targets, replace=False)
    expected, k = set(targets), offset
    enough = 512 if num_targets > count else count        # a multiple of 1024, at most all
    while len(expected) < enough:
        expected.add(20_011 * k % 512)
        k += 1
    assert tg.choose_candidates(np.repeat(targets, 2), count, 512, offset).tolist() == sorted(expected)

def test_prefix_tokens__are_the_longest(tmp_path) -> None:
    texts = [b"a", b"b", b"ab", b"abc", b"abcde", b"ba", b"xyz"]
    (tmp_path / "vocab.txt").write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(x), i) for i, x in enumerate(texts)))
    cfg = preset("pocket", 8, 7, padded_vocab=16, train_files=f"{tmp_path}/x*.bin")
    assert tg.prefix_tokens(cfg).tolist() == [-1, -1, 0, 2, 3, 1, -1, -1] + [-1] * 8
    (tmp_path / "vocab.txt").unlink()
    with pytest.raises(tg.ConfigError, match="prefix_weights of --stages need .*vocab.txt"):
        tg.prefix_tokens(cfg)
    unused = replace(cfg, stages=tuple(replace(stage, prefix_weights=(0.0,)) for stage in cfg.stages))
    assert (tg.prefix_tokens(unused) == -1).all()


# ---- Loss ------------------------------------------------------------------------------------------------------------
def one_sequence(correction: float, padding: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """y, w and the batch of one sequence of 40 tokens with 90 of 200 classes, and with columns of padding."""
    y, w = randn(40, 12, seed=1).requires_grad_(), (3 * randn(12, 200, seed=2)).requires_grad_()
    cfg = preset(padded_vocab=200, vocab_size=200, bos_id=0, candidate_correction=correction, seqs_per_step=1)
    step_cfg = replace(tg.Schedule(cfg).at(0), num_candidates=96, prefix_weight=0.2)
    rng = np.random.default_rng(3)
    batch = tg.Batch({}, np.zeros((1, 40)), rng.integers(0, 200, (1, 40)), np.zeros(1), {})
    batch = tg.add_head(batch, cfg, make_comm(), step_cfg, rng.integers(-1, 200, 200)).map(torch.as_tensor)
    pad = lambda x, value: torch.nn.functional.pad(x, (0, padding), value=value)
    head = batch.head | dict(candidates=pad(batch.head["candidates"], 0),
                             log_weights=pad(batch.head["log_weights"], -math.inf))
    return y, w, head | dict(targets=batch.targets)

def loss_and_grads(y: Tensor, w: Tensor, head: dict[str, Tensor], precision: str = "plain") -> tuple[Tensor, ...]:
    weights = torch.tensor([1.0, 0.5, 0.25] + [0.2] * ("prefix" in head), dtype=F64)
    found, _ = tg.HeadLoss.apply(y, w, head["targets"], weights, precision, tg.as_matrix(w),
                                 *map(head.get, ("prefix", "candidates", "log_weights")))
    return found.detach(), *torch.autograd.grad(found.sum(), (y, w))

@pytest.mark.parametrize("correction, padding", [(0, 0), (0.5, 0), (1, 7)])
def test_HeadLoss__over_candidates_equals_autograd(correction, padding) -> None:
    """Losses of log_softmax over the candidates in a loop over positions and targets."""
    y, w, head = one_sequence(correction, padding)
    ids = head["candidates"][0, :96]
    targets, prefix = ids[head["targets"][0]], head["prefix"][0]
    negatives = 96 - len(targets.unique())
    bias = torch.where(torch.isin(ids, targets), 0.0, correction * math.log((200 - 96 + negatives) / negatives)).float()
    log_p = (23 * torch.sigmoid((y @ w[:, ids] + 5) / 7.5) + bias).log_softmax(1)
    columns = head["targets"][0]
    expected = torch.stack([
        -sum(weight * log_p[t, columns[t + k]] for k, weight in enumerate((1.0, 0.5, 0.25)) if t + k < 40)
        - (0.2 * log_p[t, prefix[t]] if prefix[t] >= 0 else 0) for t in range(40)])
    assert (prefix < 0).any() and (prefix >= 0).any()
    grads = torch.autograd.grad(expected.sum(), (y, w))
    for found, exact in zip(loss_and_grads(y, w, head), (expected, *grads)):
        torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)

@pytest.mark.parametrize("precision", ["plain", "emulated"])
def test_HeadLoss__over_candidates_has_the_bits_of_a_head_of_these_columns(precision) -> None:
    """Also with rounding to fp8. The gradient of every other column is 0."""
    y, w, head = one_sequence(0, 0)
    ids, = head["candidates"]
    losses_found, y_grad, w_grad = loss_and_grads(y, w, head, precision)
    small_head = head | dict(candidates=None, log_weights=None)
    expected = loss_and_grads(y, w.detach()[:, ids].requires_grad_(), small_head, precision)
    for found, exact in zip((losses_found, y_grad, w_grad[:, ids]), expected):
        assert found.equal(exact)
    w_grad[:, ids] = 0
    assert not w_grad.any()

def interpret_log_weights() -> None:
    """The Triton kernel against PyTorch, in an interpreter."""
    V, G = 300, 3
    logits = 8 * randn(4, V, seed=V, dtype=torch.bfloat16)
    ids = torch.randint(0, V, (4, G), generator=torch.Generator().manual_seed(1))
    target_weights = randn(4, G, seed=2, dtype=torch.float32).abs()
    log_weights = randn(V, seed=3, dtype=torch.float32).abs()
    log_weights[250:] = -math.inf
    ids.clamp_(max=249)
    exact = torch.empty(4, V, dtype=F64)
    expected = tg.mtp_losses_and_grad(logits.double(), ids, target_weights.double(), exact, 3.0, log_weights.double())
    found, grad = torch.full((2, 4), torch.nan).unbind(), torch.full((4, V), torch.nan)
    tg.triton_jit(tg.mtp_loss_kernel)[(4,)](
        logits, grad, ids, target_weights, *found, 3.0, V, G, CAP=tg.LOGIT_CAP, SHIFT=tg.LOGIT_SHIFT,
        WIDTH=tg.LOGIT_WIDTH, BLOCK=128, BLOCK_G=4, log_weights=log_weights)
    for losses_found, losses_expected in zip(found, expected):
        torch.testing.assert_close(losses_found.double(), losses_expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad.double(), exact, rtol=2.0**-8 + 1e-5, atol=2.0**-17)

@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_mtp_loss_kernel__with_log_weights() -> None:
    run_interpreted("import sys; sys.path.insert(0, 'tests/forks'); import check_recipe_c as c; c.interpret_log_weights()")


# ---- Updates ---------------------------------------------------------------------------------------------------------
def test_rowwise_update__across_the_change_of_cadence(oracle) -> None:
    """The update of rows that were read, with the values of adam_scalars, against record 92's rule."""
    cfg = preset("record", 50_257, 50_256)
    schedule, spec = tg.Schedule(cfg), tg.parameter_specs(cfg)[-1]
    optimizer = tg.Optimizer.__new__(tg.Optimizer)
    optimizer.cfg, optimizer.comm, optimizer.grad_scale = cfg, make_comm(), 1 / cfg.seqs_per_step
    table = oracle.LazyRows(30, 4)
    rows, v, last = torch.zeros(30, 4, dtype=F64), torch.zeros(30, dtype=F64), torch.zeros(30, dtype=torch.int32)
    optimizer.rowwise = tg.rowwise_update
    for step in filter(oracle.table_event, range(300, 372)):
        rng = np.random.default_rng(step)
        ids = np.unique(rng.integers(0, 30, 9))
        grads = torch.as_tensor(rng.normal(size=(len(ids), 4)))
        if not table.p.any():            # the events before, with a gradient of 0
            table.beta2 += [0.95] * 150
        table.event(ids, grads, step, schedule.at(step).adam_lr)
        row_copies = tg.RowState(rows[ids], v[ids], last[ids])
        optimizer.update_rowwise(spec, row_copies, grads * cfg.seqs_per_step, schedule.at(step))
        rows[ids], v[ids], last[ids] = row_copies
        torch.testing.assert_close(rows, table.p, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(v[ids], table.v[ids], rtol=1e-12, atol=0)

def test_update_adam__value_embeddings_across_the_change_of_cadence(oracle) -> None:
    """Dense Adam in a loop, with betas squared and decay doubled from step 336 on."""
    cfg = preset("record", 50_257, 50_256)
    schedule = tg.Schedule(cfg)
    spec = next(spec for spec in tg.parameter_specs(cfg) if spec.label == "value_embed")
    optimizer = tg.Optimizer.__new__(tg.Optimizer)
    optimizer.cfg, optimizer.adam, optimizer.grad_scale = cfg, tg.adam_update, 1 / cfg.seqs_per_step
    p, exact = randn(6, 4, seed=1), randn(6, 4, seed=1)
    optimizer.state = dict(value_embed=dict(m=torch.zeros(6, 4, dtype=F64), v=torch.zeros(6, 4, dtype=F64)))
    m = v = torch.zeros(6, 4, dtype=F64)
    for number, step in enumerate(filter(oracle.table_event, range(372)), 1):
        power = 2 if step >= 336 else 1
        beta1, beta2 = (beta**power for beta in spec.betas)
        grad = randn(6, 4, seed=step)
        m = beta1 * m + (1 - beta1) * grad
        v = beta2 * v + (1 - beta2) * grad**2
        lr = spec.lr_mul * schedule.at(step).adam_lr
        update = lr * math.sqrt(1 - beta2**number) / (1 - beta1**number) * m / (v.sqrt() + cfg.adam_eps)
        exact = exact - update - lr**2 * cfg.adam_weight_decay * spec.wd_mul * power * exact * (update * exact > 0)
        optimizer.update_adam(spec, p, grad * cfg.seqs_per_step, schedule.at(step))
        torch.testing.assert_close(p, exact, rtol=1e-11, atol=1e-12)

@pytest.mark.parametrize("dtype, error", [("float64", 1e-11), ("bfloat16", 2.0**-8)])
def test_use_averages__equals_averages_of_whole_weights(dtype, error) -> None:
    """Every step's weights are recorded and averaged as a whole; head and embedding untie in between.

    In bf16, the weights of banks have 16 more bits, and the result is rounded once.
    """
    stages = tuple(replace(stage, untie=i == 2) for i, stage in enumerate(tg.TINY["stages"]))
    cfg = preset(averages=1, dtype=dtype, num_scheduled_steps=17, num_extension_steps=3, stages=stages)
    engine, schedule, comm = make_engine(cfg), tg.Schedule(cfg), make_comm()
    headers = tg.read_shard_headers(cfg.train_files)
    loader = tg.Loader(cfg, comm, headers, schedule.cycles(0))
    loader.start()
    averages = {}
    for step in range(20):
        step_cfg = schedule.at(step)
        tg.train_step(engine, loader, step_cfg)
        weights = {label: x.detach().to(F64, copy=True) for label, x in engine.model.named_parameters()}
        for label in ("attn", "mlp") if dtype == "bfloat16" else ():
            bits = engine.optimizer.state[label]["mantissa"].view(weights[label].shape).numpy().view(np.uint16)
            below = np.ldexp(bits.astype(np.float64), np.frexp(weights[label].numpy())[1] - 24)
            weights[label] += torch.from_numpy(np.copysign(below, weights[label].numpy())).view_as(weights[label])
        for average, rate in step_cfg.averages:
            for label in average.labels:
                x = weights["lm_head"].t() if label == "embed" and step_cfg.tied else weights[label]
                old = averages.get((average.name, label), x)
                averages[average.name, label] = old + rate * (x - old)
    loader.close()
    assert not schedule.at(20).tied and len(averages) == 7
    engine.optimizer.use_averages(tied=False)
    for label, last in weights.items():
        expected = last
        matrices = last.view(-1, 32, 32) if label == "attn" else last[None]
        is_qk = (torch.arange(len(matrices)) % 4 < 2 if label == "attn" else torch.tensor([False])).view(-1, 1, 1)
        expected = matrices
        for average in tg.AVERAGES:
            if label in average.labels:
                share = torch.where(is_qk, average.shares[0], average.shares[1])
                expected = (1 - share) * expected + share * averages[average.name, label].reshape(matrices.shape)
        for part in (is_qk, ~is_qk) if label in ("attn", "mlp", "lm_head", "embed") else ():
            scale = (matrices * part).norm() / (expected * part).norm()
            expected = torch.where(part, expected * scale, expected)
        found = engine.model.get_parameter(label).detach().double()
        torch.testing.assert_close(found, expected.view(last.shape), rtol=error, atol=error / 100)


# ---- Whole runs ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    finished, = launch(folder, 1, *FLAGS)
    assert finished.status == 0, finished.err
    return folder

@pytest.mark.parametrize("world_size, more", [(2, ()), (4, ()), (1, ("--micro_batch_size=8",)),
                                              (2, ("--row_comms=dense",))])
def test_run__has_equal_losses_for_every_world_size(whole_run, tmp_path, world_size, more) -> None:
    finished, *_ = launch(tmp_path / "run", world_size, *FLAGS, *more)
    assert finished.status == 0, finished.err
    for found, expected in zip(losses(tmp_path / "run"), losses(whole_run), strict=True):
        assert found[:2] == expected[:2]
        for x, exact in zip(found[2:], expected[2:]):
            assert x == exact is None or x == pytest.approx(exact, rel=1e-9)

@pytest.mark.parametrize("world_size", [1, 2])
def test_run__resumed_has_the_same_bits(tmp_path, world_size) -> None:
    """The checkpoint lies between the first ticks of the averages and the end, after the change of cadence."""
    assert launch(tmp_path / "whole", world_size, *FLAGS)[0].status == 0
    for name, *flags in (("first", *FLAGS, "--checkpoint_every=4", "--max_steps=18"),
                         ("second", f"--resume={tmp_path / 'first'}", "--max_steps=0", "--sample_tokens=0")):
        finished, *_ = launch(tmp_path / name, world_size, *flags)
        assert finished.status == 0, finished.err
    assert losses(tmp_path / "second") == losses(tmp_path / "whole")

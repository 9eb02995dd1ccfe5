"""Section 3: the model against reference.py, its initial weights, and which positions a token affects."""
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import (F64, RECIPE_PARAMETERS, angles_by_channel, fill_randomly, make_engine, own_rows, preset, randn,
                    random_batch, small, unequal, with_tokens)
from reference import Reference, ngram_rows

import train_gpt as tg

def make_model(cfg: tg.Config, max_seq_len: int = 48) -> tg.GPT:
    model = tg.GPT(cfg, tg.attention_reference, max_seq_len, {})
    fill_randomly(model)
    model.set_rotary(tg.Schedule(cfg).rotary[1].frequencies)
    return model

# Value gates are numbered over the tables of layers only, and scalars over the tables of the residual stream.
ALTERNATING = (tg.NgramTable("b_embed", 2, 41), tg.NgramTable("a_embed", 3, 40, layer=1),
               tg.NgramTable("c_embed", 4, 42, layer=5), tg.NgramTable("d_embed", 3, 43),
               tg.NgramTable("e_embed", 2, 44, layer=1))

def with_ngrams(cfg: tg.Config, batch: tg.Batch) -> tg.Batch:
    """Replace the lookups of n-gram tables by indices into full tables, computed by the hashes of the reference."""
    row_index = dict(batch.row_index)
    for ngram in cfg.tables:
        row_ids = [ngram_rows(seq, tg.NGRAM_FACTORS[ngram.order], ngram.rows) for seq in batch.tokens.numpy()]
        row_index[ngram.label] = torch.from_numpy(np.stack(row_ids)).int()
    return batch._replace(row_index=row_index)

# What no layer uses has no parameter: value embeddings, their gates, skip and backout.
BARE_LAYERS = (tg.Layer("paired"), tg.Layer("plain", "long", key_offset=True), tg.Layer("none"))

def use_bare_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    scalars = dict(residual=(1.1,) * 3, attention=(0.5, 1.0) * 3, bigram=(0.1,) * 3)
    for name, value in dict(LAYERS=BARE_LAYERS, ATTENTION_LAYERS=(0, 1), NUM_VALUE_EMBEDS=0,
                            SCALARS=tg.SCALARS | scalars).items():
        monkeypatch.setattr(tg, name, value)

@pytest.mark.recipe
@pytest.mark.parametrize("num_heads, num_seqs, seed, tables, bare", [
    (4, 2, 0, (), False), (2, 3, 1, (), False), (4, 2, 2, ALTERNATING, False), (4, 2, 3, (), True)],
    ids=["4 heads", "2 heads", "n-grams of layers and stream alternate", "layers that use no saved or value embedding"])
def test_losses__and_gradients_equal_the_reference(monkeypatch, num_heads, num_seqs, seed, tables, bare) -> None:
    """Losses and all gradients equal the reference, and every parameter affects the losses."""
    if bare:
        use_bare_layers(monkeypatch)
    plain = small(num_heads=num_heads, model_dim=8 * num_heads)
    cfg = replace(plain, tables=tables)
    schedule = tg.Schedule(cfg)
    model = make_model(cfg)
    batch = with_ngrams(cfg, random_batch(plain, seed, num_seqs, 32))
    rotary = schedule.rotary[1]._replace(attn_scale=0.8)
    step_cfg = replace(schedule.at(0), short_window=5, long_window=9, mtp_weights=(1.0, 0.5, 0.25), rotary=rotary)
    naive = Reference(cfg, dict(model.named_parameters()))
    row_buffers = own_rows(model)
    for ngram in tables:
        weights = randn(ngram.rows, cfg.model_dim, seed=ngram.rows)
        naive.ngrams[ngram.label].p[:] = weights
        row_buffers[ngram.label] = weights.requires_grad_(), torch.zeros_like(weights)
    weights = torch.tensor(step_cfg.mtp_weights, dtype=F64)
    losses, next_losses = model.losses(batch, weights, tg.attention_args(step_cfg, 12), "plain", row_buffers)
    losses.sum().backward()
    grads = {label: p.grad for label, p in model.named_parameters()}
    grads |= {label: sums for label, (_, sums) in row_buffers.items()}
    for seq in range(num_seqs):
        expected = naive.losses(naive.leaves(), batch, seq, step_cfg, step_cfg.mtp_weights)
        np.testing.assert_allclose(losses[seq].detach(), expected.detach(), rtol=0, atol=1e-10)   # error of 11 layers
        expected_next = naive.losses(naive.leaves(), batch, seq, step_cfg, (1.0,))
        np.testing.assert_allclose(next_losses[seq], expected_next.detach(), rtol=0, atol=1e-10)
    naive.forward_backward(batch, step_cfg)
    expected_grads = naive.grads | {label: torch.from_numpy(grad) for label, grad in naive.ngram_grads.items()}
    assert grads.keys() == expected_grads.keys()
    for label, grad in grads.items():
        assert expected_grads[label].any(), f"{label} has no effect"
        np.testing.assert_allclose(grad, expected_grads[label], rtol=1e-9, atol=1e-9, err_msg=label)
    if bare:
        assert not {"value_embed", "ve_gate_bank", "skip_gate"} & grads.keys() and grads["scalars"].shape == (13,)
        return
    num_layer_tables = sum(ngram.layer is not None for ngram in tables)
    used = naive.grads["ve_gate_bank"].flatten(1).any(dim=1)
    assert used.tolist() == [True] * (5 + num_layer_tables), "exactly one gate for each table of a layer"

def record_specs() -> dict[str, tg.ParameterSpec]:
    return {spec.label: spec for spec in tg.parameter_specs(preset("record", 50_257, 50_256))}

@pytest.mark.recipe
def test_parameter_specs__of_the_record_preset() -> None:
    """Shapes, optimizers and multipliers of preset `record` are those of RECIPE 2.1 and 3.5."""
    specs = record_specs()
    total = 0
    for label, shape, optimizer, lr_mul, wd_mul, betas in RECIPE_PARAMETERS:
        spec = specs.pop(label)
        assert (spec.shape, spec.optimizer) == (shape, optimizer), label
        if optimizer == "adam":
            assert (spec.lr_mul, spec.wd_mul, spec.betas) == (lr_mul, wd_mul, betas), label
        total += int(np.prod(spec.shape))
    assert not specs and total == 543_818_890 - 4_718_592, "the total of RECIPE without the padding layer of the MLP"

def check_std(x: torch.Tensor, std: float) -> None:
    assert float(x.std()) == pytest.approx(std, rel=0.02)
    assert abs(float(x.mean())) < std / 50

def initial_weights(**changes: Any) -> dict[str, torch.Tensor]:
    """Return the initial weights of an engine with one rank, which owns all of them."""
    model = make_engine(preset(**changes)).model
    return {label: p.detach() for label, p in model.named_parameters()}

@pytest.mark.recipe
def test_initial_weights__follow_the_recipe() -> None:
    """Constants, ranges and standard deviations of initial weights are those of RECIPE 2.1 and 2.6."""
    p = initial_weights(model_dim=48, num_heads=6, head_dim=8, dtype="float32")
    # In order: residual, attention, bigram, smear, backout, skip.
    scalars = [1.1] * 11 + [0.5, 1.0] * 11 + [0.1] * 11 + [0.0, 0.5, -1.5]
    assert p["scalars"].tolist() == pytest.approx(scalars, rel=1e-7)         # rounding of f32
    for label in ("x0_lambdas", "smear_gate", "skip_gate", "attn_gate_bank", "ve_gate_bank", "bigram_embed"):
        assert not p[label].any(), label
    bound = 3**0.5 * 0.5 * 48**-0.5
    for x in (p["attn"], p["mlp"][:, 0]):
        assert float(x.abs().max()) == pytest.approx(bound, rel=0.01)        # thousands of draws; bf16 rounds by 0.4 %
        check_std(x, bound / 3**0.5)
    assert not p["mlp"][:, 1].any(), "the output of every MLP is zero at first"
    for label, std in (("lm_head", 0.005), ("value_embed", 0.01)):
        check_std(p[label], std)
        assert float(p[label].abs().max()) > 3.5 * std, "normal, not uniform"
    assert p["embed"].equal(p["lm_head"].t())
    attn = record_specs()["attn"]._replace(shape=(100_000,))
    drawn = tg.init_parameter(attn, torch.Generator().manual_seed(0))
    assert 0.99 / 32 < float(drawn.abs().max()) <= 1.0001 / 32, "a bound of 2^-5 at 768 features"

@pytest.mark.recipe
def test_initial_weights__of_ngram_tables() -> None:
    """A table adds a coefficient of 0.1 in each of the 11 layers, or a gate if it belongs to a layer.

    The rows are zeros.
    """
    engine = make_engine(preset(tables=ALTERNATING, dtype="float32"))
    plain = initial_weights(dtype="float32")
    weights = {label: p.detach() for label, p in engine.model.named_parameters()}
    assert weights.keys() == plain.keys(), "rows of n-gram tables are no parameters"
    assert set(unequal(weights, plain)) == {"scalars", "ve_gate_bank"}
    assert weights["scalars"].tolist() == pytest.approx([*plain["scalars"].tolist(), *[0.1] * 22], rel=1e-7)
    assert len(weights["ve_gate_bank"]) == len(plain["ve_gate_bank"]) + 3 and not weights["ve_gate_bank"].any()
    for ngram in ALTERNATING:
        rows = engine.tables[ngram.label].state.rows
        assert rows.shape == (ngram.rows, 32) and not rows.any(), ngram.label

def test_initial_weights__each_label_draws_from_its_own_generator() -> None:
    """Initial weights depend only on seed, label and shape, not on other parameters or the global generator."""
    base = initial_weights()
    torch.manual_seed(123)                                           # the global generator is not used
    assert unequal(initial_weights(), base) == []
    in_f64 = initial_weights(dtype="float64")
    for dtype in ("float32", "bfloat16"):
        widened = {label: x.double() for label, x in initial_weights(dtype=dtype).items()}
        assert unequal(widened, in_f64) == [], "the dtype affects only the rounding of draws"
    resized = initial_weights(padded_vocab=640, bigram_rows=99)
    changed = {label for label, x in resized.items() if x.shape != base[label].shape}
    assert changed == {"bigram_embed", "value_embed", "lm_head", "embed"}
    assert set(unequal(resized, base)) == changed
    assert set(unequal(initial_weights(seed=1), base)) == {"attn", "mlp", "value_embed", "lm_head", "embed"}
    value_embed, lm_head = (base[label].flatten()[:16_000] for label in ("value_embed", "lm_head"))
    assert not value_embed.equal(lm_head * 2)

def test_set_rotary__cos_and_sin_of_position_times_frequency() -> None:
    """The rotary tables contain cos and sin of position * frequency, and are written in place."""
    cfg = small()
    frequencies = (1.0, 0.125)
    model = make_model(cfg)
    addresses = [x.data_ptr() for x in model.buffers()]
    model.set_rotary(frequencies)
    positions = torch.arange(96)[:, None]                            # paired layers have 2T positions
    angles = angles_by_channel(positions * torch.tensor(frequencies, dtype=F64))
    np.testing.assert_allclose(model.rotary_cos, angles.cos(), rtol=0, atol=1e-14)
    np.testing.assert_allclose(model.rotary_sin, angles.sin(), rtol=0, atol=1e-14)
    assert [x.data_ptr() for x in model.buffers()] == addresses, "written in place, so that nothing recompiles"
    bf16_model = make_model(replace(cfg, dtype="bfloat16"))
    bf16_model.set_rotary(frequencies)
    assert bf16_model.rotary_cos.equal(angles.cos().float().bfloat16()), "angles in f32, rounded once"

def test_set_rotary__a_repeated_stage_copies_nothing_from_the_host(monkeypatch) -> None:
    """The rotary tables of a stage that the warm-up has seen are computed without a copy from the host."""
    cfg = small()
    model = make_model(cfg)
    stages = {rotary.frequencies for rotary in tg.Schedule(cfg).rotary}
    warm_up, training = {}, {}
    for cos_by_stage in (warm_up, training):
        for frequencies in stages:
            model.set_rotary(frequencies)
            cos_by_stage[frequencies] = model.rotary_cos.clone()
        monkeypatch.setattr(torch, "tensor", None)                   # copying from the host would synchronize
    assert unequal(training, warm_up) == []
    first, second, *_ = training.values()
    assert not first.equal(second)

# A fork with another MLP: these two functions replace `relu_sq_mlp` and the entry of the MLP in `parameter_specs`.
def swiglu_mlp(x: torch.Tensor, gate: tg.WeightMatrix, up: tg.WeightMatrix, down: tg.WeightMatrix) -> torch.Tensor:
    hidden = F.silu(tg.linear_main_grad(x, gate)) * tg.linear_main_grad(x, up)
    return tg.linear_main_grad(hidden, down.t())

def swiglu_specs(specs: tuple[tg.ParameterSpec, ...]) -> tuple[tg.ParameterSpec, ...]:
    changed = []
    for spec in specs:
        if spec.label == "mlp":
            num_layers, _, mlp_dim, model_dim = spec.shape
            matrices = ("gate", mlp_dim, 1.0), ("up", mlp_dim, 1.0), ("down", mlp_dim, tg.DOWN_LR_MUL)
            spec = spec._replace(shape=(num_layers, 3, mlp_dim, model_dim), matrices=matrices)
        changed.append(spec)
    return tuple(changed)

def autograd_swiglu_mlp(x: torch.Tensor, *matrices: tg.WeightMatrix) -> torch.Tensor:
    """Compute the same MLP without main_grad, so that its gradients are in .grad."""
    gate, up, down = (weight.matrix for weight in matrices)
    return (F.silu(x @ gate.t()) * (x @ up.t())) @ down

@pytest.mark.recipe
def test_parameter_specs__a_fork_with_swiglu_trains_like_autograd(monkeypatch) -> None:
    """The bank has three matrices per layer. Only the down matrices start as zeros and have the doubled learning rate.
    """
    specs_of = tg.parameter_specs
    monkeypatch.setattr(tg, "parameter_specs", lambda cfg: swiglu_specs(specs_of(cfg)))
    cfg = small()
    schedule = tg.Schedule(cfg)
    states = []
    for mlp in (swiglu_mlp, autograd_swiglu_mlp):
        monkeypatch.setattr(tg, "relu_sq_mlp", mlp)
        engine = make_engine(cfg)
        weight = engine.model.mlp
        assert weight[:, :2].flatten(2).any(dim=2).all() and not weight[:, 2].any()
        lr_muls = engine.optimizer.lr_muls["mlp"]
        assert lr_muls.flatten().tolist() == [2.0, 2.0, 4.0] * len(tg.LAYERS), "sqrt(4), and for down matrices times 2"
        for step_cfg in map(schedule.at, range(3)):
            engine.forward_backward(random_batch(cfg, step_cfg.step, 8, 16, step_cfg.step), step_cfg)
            if mlp is autograd_swiglu_mlp:
                weight.main_grad.copy_(weight.grad)
                weight.write_counts.fill_(1)
            assert weight.main_grad[:, 2].any() and weight.main_grad[:, :2].any() == (step_cfg.step > 0)
            engine.optim_step(step_cfg)
        states.append(engine.tensors())
    for name, x in states[1].items():
        torch.testing.assert_close(states[0][name], x, rtol=1e-9, atol=1e-12, msg=name)

# Layers with attention, in any list of layers. The test makes them plain, because only plain layers have a key offset.
FIRST, LAST = tg.ATTENTION_LAYERS[0], tg.ATTENTION_LAYERS[-1]

@pytest.mark.parametrize("position, smear, offset_layers, expected", [
    # Attention sees neither other documents nor later positions. The second document is a single token.
    *((position, 0.0, (), range(position, end)) for position, end in
      ((0, 7), (3, 7), (6, 7), (7, 8), (8, 14), (13, 14), (14, 24), (20, 24))),
    # The smear crosses document bounds by one position.
    (3, 0.8, (), range(3, 7)), (6, 0.8, (), range(6, 8)), (13, 0.8, (), range(13, 24)), (23, 0.8, (), [23]),
    # So does the key offset, in each layer. The first token of a document sees one key, so its attention weights are
    # constant.
    (10, 0.0, (LAST,), [*range(10, 14), *range(15, 24)]), (3, 0.0, (FIRST, LAST), range(3, 7)),
    (7, 0.0, (FIRST, LAST), [7, *range(9, 14), *range(15, 24)]), (23, 0.0, (FIRST, LAST), [23])])
def test_hidden_states__positions_that_a_token_changes(monkeypatch, position, smear, offset_layers, expected) -> None:
    """Changing the token at `position` of sequence 0 changes exactly the expected positions, in any bit.

    The bigram row of the token does not change. No position of sequence 1 may change.
    """
    layers = tuple(replace(layer, attention="plain", key_offset=True) if i in offset_layers
                   else replace(layer, key_offset=False) for i, layer in enumerate(tg.LAYERS))
    monkeypatch.setattr(tg, "LAYERS", layers)
    cfg = small(max_doc_len=24)
    model = make_model(cfg)
    cu_seqlens = torch.tensor([(0, 7, 8, 14, 24)] * 2, dtype=torch.int32)
    batch = random_batch(cfg, 0, 2, 24)._replace(cu_seqlens=cu_seqlens)
    names = [name for name, values in tg.initial_scalars(cfg).items() for _ in values]
    with torch.no_grad():
        model.scalars[names.index("smear")] = smear
    tokens = batch.tokens.clone()
    tokens[0, position] = (tokens[0, position] + 1) % cfg.vocab_size
    step_cfg = replace(tg.Schedule(cfg).at(0), short_window=5, long_window=30)
    attn_args = tg.attention_args(step_cfg, 24)
    hidden = model.hidden_states(batch, attn_args, own_rows(model))
    changed = model.hidden_states(with_tokens(cfg, batch, tokens), attn_args, own_rows(model))
    differs = (changed != hidden).any(dim=-1)
    assert not differs[1].any(), "no information crosses sequences"
    assert differs[0].nonzero().flatten().tolist() == list(expected)

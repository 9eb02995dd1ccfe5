"""Section 3: the model against reference.py, its initial weights, and which positions a token affects."""
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from common import (F64, angles_by_channel, fill_randomly, make_engine, own_rows, preset, randn,
                    random_batch, small, unequal, with_tokens)
from reference import Reference, ngram_rows

import train_gpt as tg

def make_model(cfg: tg.Config, max_seq_len: int = 48) -> tg.GPT:
    model = tg.GPT(cfg, tg.attention_reference, max_seq_len, {})
    fill_randomly(model)
    model.set_rotary(tg.Schedule(cfg).rotary[1].frequencies)
    return model

NGRAM_TABLES = tg.NgramTable("b_embed", 2, 41), tg.NgramTable("a_embed", 3, 40), tg.NgramTable("c_embed", 4, 42)

def with_ngrams(cfg: tg.Config, batch: tg.Batch) -> tg.Batch:
    """Add lookups in full n-gram tables, by the hashes of the reference."""
    lookup_rows = dict(batch.lookup_rows)
    for ngram in cfg.tables:
        row_ids = [ngram_rows(seq, tg.NGRAM_FACTORS[ngram.order], ngram.rows) for seq in batch.tokens.numpy()]
        lookup_rows[ngram.label] = torch.from_numpy(np.stack(row_ids)).int()
    return batch._replace(lookup_rows=lookup_rows)

# What no layer uses has no parameter: value embeddings, their gates, skip and backout.
BARE_LAYERS = (tg.Layer("paired"), tg.Layer("plain", "long", key_offset=True), tg.Layer("none"))

BARE_SCALARS = dict(residual=(1.1,) * 3, attention=(0.5, 1.0) * 3, bigram_embed=(0.1,) * 3)
BARE = dict(LAYERS=BARE_LAYERS, ATTENTION_LAYERS=(0, 1), NUM_VALUE_EMBEDS=0, SCALARS=tg.SCALARS | BARE_SCALARS)

@pytest.mark.recipe
@pytest.mark.parametrize("num_heads, num_seqs, seed, tables, bare", [
    (4, 2, 0, (), False), (2, 3, 1, (), False), (4, 2, 2, NGRAM_TABLES, False), (4, 2, 3, (), True)],
    ids=["4 heads", "2 heads", "three n-gram tables", "layers that use no saved or value embedding"])
def test_losses__and_gradients_equal_the_reference(monkeypatch, num_heads, num_seqs, seed, tables, bare) -> None:
    for name, value in BARE.items() if bare else ():
        monkeypatch.setattr(tg, name, value)
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
    tg.set_attention_args(step_cfg, 12)
    losses, next_losses = model.losses(batch, weights, "plain", row_buffers)
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
        assert not {"value_embed", "ve_gate_bank", "skip_gate"} & grads.keys()
        assert not grads["scalars"][-2:].any(), "backout and skip"
        return
    assert naive.grads["ve_gate_bank"].flatten(1).any(dim=1).all(), "each value embedding has its gate"

@pytest.mark.recipe
def test_parameter_specs__of_the_record_preset() -> None:
    """Shapes of RECIPE 2.1; test_oracle.py has optimizers and multipliers."""
    specs = {spec.label: spec for spec in tg.parameter_specs(preset("record", 50_257, 50_256))}
    assert specs["attn"].shape == (10, 3072, 768) and specs["mlp"].shape == (11, 2, 3072, 768)
    assert specs["bigram_embed"].shape == specs["value_embed"].shape == (251_520, 768)
    total = sum(math.prod(spec.shape) for spec in specs.values())
    assert total == 543_818_890 - 4_718_592, "the total of RECIPE without the padding layer of the MLP"
    drawn = tg.init_parameter(specs["attn"]._replace(shape=(100_000,)), torch.Generator().manual_seed(0))
    assert 0.99 / 32 < float(drawn.abs().max()) <= 1.0001 / 32, "a bound of 2^-5 at 768 features"

def check_std(x: torch.Tensor, std: float) -> None:
    assert float(x.std()) == pytest.approx(std, rel=0.02)
    assert abs(float(x.mean())) < std / 50

def initial_weights(**changes: Any) -> dict[str, torch.Tensor]:
    """Return the initial weights of an engine with one rank, which owns all of them."""
    model = make_engine(preset(**changes)).model
    return {label: p.detach() for label, p in model.named_parameters()}

@pytest.mark.recipe
def test_initial_weights__follow_the_recipe() -> None:
    """Constants, ranges and standard deviations of RECIPE 2.1 and 2.6."""
    p = initial_weights(model_dim=48, num_heads=6, head_dim=8, dtype="float32", tables=NGRAM_TABLES)
    # In order: residual, attention, bigram, smear, backout, skip, three n-gram tables.
    scalars = [1.1] * 11 + [0.5, 1.0] * 11 + [0.1] * 11 + [0.0, 0.5, -1.5] + [0.1] * 33
    assert len(p["ve_gate_bank"]) == 5
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

def test_initial_weights__each_label_draws_from_its_own_generator() -> None:
    """Not on other parameters, the dtype or the global generator."""
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

def test_set_rotary__cos_and_sin_in_place_and_without_a_copy_from_the_host_if_a_stage_repeats(monkeypatch) -> None:
    cfg = small()
    model = make_model(cfg)
    addresses = [x.data_ptr() for x in model.buffers()]
    stages = {rotary.frequencies for rotary in tg.Schedule(cfg).rotary}
    for _ in ("warm-up", "training"):
        for frequencies in stages:
            model.set_rotary(frequencies)
            positions = torch.arange(96)[:, None]            # paired layers have 2T positions
            angles = angles_by_channel(positions * torch.as_tensor(frequencies, dtype=F64))
            np.testing.assert_allclose(model.rotary_cos, angles.cos(), rtol=0, atol=1e-14)
            np.testing.assert_allclose(model.rotary_sin, angles.sin(), rtol=0, atol=1e-14)
        monkeypatch.setattr(torch, "tensor", None)           # copying from the host would synchronize
    assert len(stages) > 1 and [x.data_ptr() for x in model.buffers()] == addresses, "so that nothing recompiles"
    monkeypatch.undo()
    bf16_model = make_model(replace(cfg, dtype="bfloat16"))
    bf16_model.set_rotary(frequencies)
    assert bf16_model.rotary_cos.equal(angles.cos().float().bfloat16()), "angles in f32, rounded once"

# Layers with attention, in any list of layers. The test makes them plain, because only plain layers have a key offset.
FIRST, LAST = tg.ATTENTION_LAYERS[0], tg.ATTENTION_LAYERS[-1]

@pytest.mark.parametrize("position, smear, offset_layers, expected", [
    # Attention sees neither other documents nor later positions. The second document is a single token.
    *((position, 0.0, (), range(position, end)) for position, end in ((0, 7), (6, 7), (7, 8), (13, 14), (20, 24))),
    # The smear crosses document bounds by one position.
    (3, 0.8, (), range(3, 7)), (6, 0.8, (), range(6, 8)), (13, 0.8, (), range(13, 24)),
    # So does the key offset, in each layer. The first token of a document sees one key, so its attention weights are
    # constant.
    (10, 0.0, (LAST,), [*range(10, 14), *range(15, 24)]), (3, 0.0, (FIRST, LAST), range(3, 7)),
    (7, 0.0, (FIRST, LAST), [7, *range(9, 14), *range(15, 24)])])
def test_hidden_states__positions_that_a_token_changes(monkeypatch, position, smear, offset_layers, expected) -> None:
    """Exactly the expected ones of sequence 0 change, in any bit, and none of sequence 1. Bigram rows do not change."""
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
    tg.set_attention_args(step_cfg, 24)
    hidden = model.hidden_states(batch, own_rows(model))
    changed = model.hidden_states(with_tokens(cfg, batch, tokens), own_rows(model))
    differs = (changed != hidden).any(dim=-1)
    assert not differs[1].any(), "no information crosses sequences"
    assert differs[0].nonzero().flatten().tolist() == list(expected)

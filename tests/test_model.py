"""Room 5: the model against a slow one written from the recipe, its initial values, and what a token may change."""
from dataclasses import replace

import numpy as np
import pytest
import torch
from common import (RECIPE_PARAMETERS, fabric, fill_randomly, own_rows, owned, preset, random_batch, small, whole,
                    with_tokens)

import train_gpt as tg

WINDOWS = dict(short=5, long=9)
SCALE = 0.8
SPANS = tg.spans_of(**WINDOWS, max_len=12, scale=SCALE)
TABLES = {"bigram_embed", "value_embed", "embed"}


def model_of(cfg: tg.Config, rotary_len: int = 48, attention=tg.attention_reference) -> tg.GPT:
    model = tg.GPT(cfg, attention, rotary_len, {})
    fill_randomly(model)
    model.set_rotary(tg.Schedule(cfg).rotary[1].frequencies)
    return model


# ---- forward and backward -------------------------------------------------------------------------------------------

def sigma(x):
    return 1 / (1 + np.exp(-x))


def norm(x):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 2.0**-23)


def slow_attention(cfg, p, depth, n, tokens, bounds, frequencies):
    """Recipe 2.4 for one slot: (T, D) -> (T, D), one query of one head at a time."""
    T, H, E, D, layer = len(tokens), cfg.num_heads, cfg.head_dim, cfg.model_dim, tg.LAYERS[depth]
    bank, paired = depth - (depth > 6), layer.attention == "paired"
    scale_in, scale_out = p["scalars"][11 + 2 * depth:13 + 2 * depth]
    q, k, v = ((n @ (scale_in * p["attn"][bank][i * D:(i + 1) * D]).T).reshape(T, H, E) for i in range(3))
    q, k = norm(q), norm(k)
    if layer.value is not None:
        row = p["value_embed"][layer.value * cfg.padded_vocab + tokens]
        seen = n[:, :12] if paired else np.concatenate([n[:, :6], row[:, :6]], axis=1)
        for i in range(H):
            v[:, i] += 2 * sigma(seen @ p["ve_gate_bank"][layer.value][i])[:, None] * row[:, i * E:(i + 1) * E]
    for x in (q, k):
        for t in range(T):
            for i in range(H):
                angle = (2 * t + i % 2 if paired else t) * np.array(frequencies)
                even, odd = x[t, i, 0:E // 2:2].copy(), x[t, i, 1:E // 2:2].copy()
                x[t, i, 0:E // 2:2] = np.cos(angle) * even + np.sin(angle) * odd
                x[t, i, 1:E // 2:2] = np.cos(angle) * odd - np.sin(angle) * even
    if layer.key_shift:
        k[1:, :, E // 2:] = k[:-1, :, E // 2:].copy()
    places, lanes = (2, H // 2) if paired else (1, H)                # positions a token has, heads side by side in each
    window, y = WINDOWS[layer.window], np.zeros((T, H, E))
    document = np.searchsorted(bounds, np.arange(T), side="right")
    for t in range(T):
        for i in range(H):
            at = places * t + i // lanes
            keys = [(s, j) for s in range(t + 1) for j in range(i % lanes, H, lanes)
                    if document[s] == document[t] and at - window <= places * s + j // lanes <= at]
            weights = np.exp([SCALE * (q[t, i] @ k[s, j]) for s, j in keys])
            y[t, i] = sum(weight * v[s, j] for weight, (s, j) in zip(weights / weights.sum(), keys))
    y *= sigma(n[:, :12] @ p["attn_gate_bank"][bank].T)[:, :, None]
    return y.reshape(T, D) @ (scale_out * p["attn"][bank][3 * D:]).T


def slow_hidden(cfg, p, tokens, rows, bounds, frequencies):
    """Recipe 2.3, 2.6, 2.7 for one slot, up to the head: (T, D)."""
    residual, bigram, (smear, backout, skip) = p["scalars"][:11], p["scalars"][33:44], p["scalars"][44:47]
    e = p["embed"][tokens]
    u = e.copy()
    for t in range(1, len(tokens)):
        u[t] += smear * sigma(p["smear_gate"][0] @ e[t, :12]) * e[t - 1]
    x0, kept = norm(u), {}
    h = x0
    for depth in range(11):
        if depth == 6:
            h = h + sigma(skip) * 2 * sigma(x0[:, :12] @ p["skip_gate"][0])[:, None] * kept[3]
        h = residual[depth] * h + p["x0_lambdas"][depth] * x0 + bigram[depth] * p["bigram_embed"][rows]
        if depth != 6:
            h = h + slow_attention(cfg, p, depth, norm(h), tokens, bounds, frequencies)
        up, down = p["mlp"][depth]
        h = h + np.maximum(norm(h) @ up.T, 0)**2 @ down
        kept[depth] = h
    return norm(h - backout * kept[7])


@pytest.mark.recipe
@pytest.mark.parametrize("heads, seed", [(4, 0), (2, 1)])
def test_forward_is_the_recipes(heads, seed):
    cfg = small(num_heads=heads, model_dim=8 * heads)
    model, batch = model_of(cfg), random_batch(cfg, seed, 2, 32)
    p = {label: x.detach().numpy() for label, x in model.named_parameters()}
    got = model.hidden(batch, SPANS, own_rows(model)).detach().numpy()
    for slot in range(2):
        inputs = (x[slot].numpy() for x in (batch.tokens, batch.rows["bigram_embed"], batch.cu_seqlens))
        want = slow_hidden(cfg, p, *inputs, tg.Schedule(cfg).rotary[1].frequencies)
        np.testing.assert_allclose(got[slot], want, rtol=0, atol=1e-10)       # float64 through 11 layers


def test_losses_are_the_head_loss_of_hidden():
    cfg = small()
    model, batch, one = model_of(cfg), random_batch(cfg, 3, 3, 16), torch.ones((), dtype=torch.float64)
    z = 23 * torch.sigmoid((model.hidden(batch, SPANS, own_rows(model)) @ model.lm_head + 5) / 7.5)
    nats = z.logsumexp(-1) - z.gather(2, batch.targets[..., None])[..., 0]
    losses = model.losses(batch, torch.ones(1, dtype=torch.float64), one, SPANS, "plain", own_rows(model))
    np.testing.assert_allclose(losses.detach(), nats.detach(), rtol=1e-12)    # a few roundings of float64


def test_gradients_are_finite_differences():
    """Of every parameter along a random direction of length 1; a step of 1e-5 leaves about 1e-7 of each error."""
    cfg = small()
    model, batch, one = model_of(cfg), random_batch(cfg, 5, 2, 16), torch.ones((), dtype=torch.float64)
    weights = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64)

    rows = own_rows(model)

    def loss():
        return model.losses(batch, weights, one, SPANS, "plain", rows).sum()

    loss().backward()
    grads = {label: p.grad for label, p in model.named_parameters()}
    grads.update((label, row_grads) for label, (_, row_grads) in rows.items())
    for number, (label, p) in enumerate(model.named_parameters()):
        direction = torch.randn(p.shape, generator=torch.Generator().manual_seed(number), dtype=p.dtype)
        direction /= direction.norm()
        with torch.no_grad():
            ends = [(p.add_(direction, alpha=step), loss())[1] for step in (1e-5, -2e-5)]
            p.add_(direction, alpha=1e-5)
        slope = float((ends[0] - ends[1]) / 2e-5)
        assert slope == pytest.approx(float((grads[label] * direction).sum()), rel=1e-5), label
        assert abs(slope) > 1e-3, f"{label} has no effect"


def test_rows_may_come_from_elsewhere_and_their_gradients_go_elsewhere():
    """Other tables in another order: same losses, bit by bit, and gradients in that order; parameters get none."""
    cfg = small()
    model, batch, one = model_of(cfg), random_batch(cfg, 5, 2, 16), torch.ones((), dtype=torch.float64)
    weights, sources, moved = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64), {}, {}
    own = own_rows(model)
    want = model.losses(batch, weights, one, SPANS, "plain", own)
    want.sum().backward()
    grads = {label: p.grad for label, p in model.named_parameters()}
    grads.update((label, row_grads) for label, (_, row_grads) in own.items())
    model.zero_grad(set_to_none=True)
    for label in TABLES:
        p = model.get_parameter(label).detach()
        order = torch.randperm(len(p), generator=torch.Generator().manual_seed(len(label)))
        moved[label] = order.argsort().int()[batch.rows[label].long()]
        sources[label] = p[order].requires_grad_(), torch.ones_like(p), order
    got = model.losses(batch._replace(rows=moved), weights, one, SPANS, "plain",
                       {label: source[:2] for label, source in sources.items()})
    got.sum().backward()
    assert got.equal(want)
    for label, p in model.named_parameters():
        if label in TABLES:
            source, sums, order = sources[label]
            assert p.grad is None and source.grad is None
            np.testing.assert_allclose(sums, 1 + grads[label][order], rtol=0, atol=1e-11)        # there were ones
        else:
            assert p.grad.equal(grads[label]), label


def test_bfloat16_is_close_to_float64():
    cfg, one = small(), torch.ones(())
    exact, half = model_of(cfg), model_of(replace(cfg, dtype="bfloat16"))
    exact.load_state_dict({label: x.double() for label, x in half.state_dict().items()})
    batch = random_batch(cfg, 5, 2, 16)
    losses = [m.losses(batch, torch.ones(1), one, SPANS, "plain", own_rows(m)).detach().double()
              for m in (exact, half)]
    assert half.scalars.dtype == half.x0_lambdas.dtype == torch.float32 and half.attn.dtype == torch.bfloat16
    assert float((losses[0] - losses[1]).abs().mean()) < 0.2         # 8 bits through 11 layers; losses are about 10


@pytest.mark.parametrize("precision", [pytest.param("plain", marks=pytest.mark.all), "fp8"])
def test_record_preset_at_full_size_on_meta_tensors(precision):
    """Shapes of the whole forward and backward with the variable-length kernel, without computing a number."""
    cfg = preset("record", 50_257, 50_256)
    with torch.device("meta"):
        model = tg.GPT(cfg, tg.attention_varlen, 262_144, {})

        def batch_of(tokens: int) -> tg.Batch:
            slots, columns = torch.empty(1, tokens, dtype=torch.int32), torch.empty(1, 200, dtype=torch.int32)
            rows = dict(bigram_embed=slots, value_embed=slots[:, None].expand(1, 5, tokens), embed=slots)
            return tg.Batch(0, {}, slots, slots.long(), columns, rows)

        def losses_of(sources):
            spans = tg.spans_of(640, 1408, 2048, 0.1)
            losses = model.losses(batch_of(49_152), torch.empty(3), torch.empty(()), spans, precision, sources)
            assert (losses.shape, losses.dtype) == ((1, 49_152), torch.float32)
            losses.sum().backward()

        caches = {label: torch.empty(100_000, 768, dtype=torch.bfloat16).requires_grad_() for label in TABLES}
        sources = {label: (cache, torch.empty(100_000, 768)) for label, cache in caches.items()}
        losses_of(sources)
        assert {label for label, p in model.named_parameters() if p.grad is None} == TABLES
        for label, p in model.named_parameters():
            assert label in TABLES or (p.grad.shape, p.grad.dtype) == (p.shape, p.dtype), label
        assert all(cache.grad is None for cache in caches.values()), "their gradients add up elsewhere"
        with torch.no_grad():
            y = model.hidden(batch_of(262_144), tg.spans_of(768, 2560, 262_144, 0.1), sources)
        assert (y.shape, y.dtype) == ((1, 262_144, 768), torch.bfloat16)


# ---- parameter table and initial values -----------------------------------------------------------------------------

@pytest.mark.recipe
def test_parameter_table_of_the_record_preset():
    rows = {row.label: row for row in tg.parameter_table(preset("record", 50_257, 50_256))}
    total = 0
    for label, shape, optimizer, lr_mul, wd_mul, betas in RECIPE_PARAMETERS:
        row = rows.pop(label)
        assert (row.shape, row.optimizer) == (shape, optimizer), label
        if optimizer == "adam":
            assert (row.lr_mul, row.wd_mul, row.betas) == (lr_mul, wd_mul, betas), label
        total += int(np.prod(row.shape))
    assert not rows and total == 543_818_890 - 4_718_592, "the recipe's total without the padding layer of the MLP"


SCALARS = dict(residual=1.1, attention_in=0.5, attention_out=1.0, bigram=0.1, smear=0.0, backout=0.5, skip=-1.5)


def initial(seed: int = 0, **changes) -> dict[str, torch.Tensor]:
    model = tg.GPT(preset(**changes), tg.attention_reference, 16, {})
    model.set_initial_values(seed, whole)
    return {label: p.detach() for label, p in model.named_parameters()}


@pytest.mark.recipe
def test_initial_values_are_the_recipes():
    p = initial(model_dim=48, num_heads=6, head_dim=8, dtype="float32")
    s = p["scalars"].tolist()
    names = ["residual"] * 11 + ["attention_in", "attention_out"] * 11 + ["bigram"] * 11 + ["smear", "backout", "skip"]
    assert s == pytest.approx([SCALARS[name] for name in names], rel=1e-7)    # f32
    for label in ("x0_lambdas", "smear_gate", "skip_gate", "attn_gate_bank", "ve_gate_bank", "bigram_embed"):
        assert not p[label].any(), label
    bound = 3**0.5 * 0.5 * 48**-0.5
    for x in (p["attn"], p["mlp"][:, 0]):
        assert float(x.abs().max()) == pytest.approx(bound, rel=0.01)        # of thousands of draws; bf16: 0.4 %
        assert float(x.std()) == pytest.approx(bound / 3**0.5, rel=0.02) and abs(float(x.mean())) < bound / 50
    assert not p["mlp"][:, 1].any(), "every MLP starts as nothing"
    for label, std in (("lm_head", 0.005), ("value_embed", 0.01)):
        assert float(p[label].std()) == pytest.approx(std, rel=0.02) and abs(float(p[label].mean())) < std / 50
        assert float(p[label].abs().max()) > 3.5 * std, "normal, not uniform"
    assert p["embed"].equal(p["lm_head"].t())


def test_record_bound_is_one_thirty_second():
    """Recipe 2.1: std 0.5 * 768^-0.5 is a uniform bound of 2^-5; drawn in the table's row, here a small shape."""
    attn = next(row for row in tg.parameter_table(preset("record", 50_257, 50_256)) if row.label == "attn")
    drawn = tg.initial_values(attn._replace(shape=(100_000,)), torch.Generator().manual_seed(0))
    assert 0.99 / 32 < float(drawn.abs().max()) <= 1.0001 / 32


def test_initial_values_are_the_same_numbers_in_every_dtype():
    in_f64 = initial(dtype="float64")
    for dtype in ("float32", "bfloat16"):
        for label, x in initial(dtype=dtype).items():
            assert x.double().equal(in_f64[label]), (dtype, label)


def test_each_label_draws_from_its_own_generator():
    base = initial()
    torch.manual_seed(123)                                           # the global generator plays no part
    assert all(x.equal(base[label]) for label, x in initial().items())
    other = initial(padded_vocab=640, bigram_rows=99)
    changed = {label for label, x in other.items() if x.shape != base[label].shape}
    assert changed == {"bigram_embed", "value_embed", "lm_head", "embed"}
    assert all(x.equal(base[label]) for label, x in other.items() if label not in changed)
    drawn = {label for label, x in initial(seed=1).items() if not x.equal(base[label])}
    assert drawn == {"attn", "mlp", "value_embed", "lm_head", "embed"}
    assert not base["value_embed"][:512].flatten()[:16_000].equal(base["lm_head"].flatten()[:16_000] * 2)


@pytest.mark.parametrize("world", [2, 3, 8])
def test_a_rank_keeps_its_rows_of_the_tables_and_all_of_the_rest(world):
    """Rows of any tables may be cut on the way in; what they are does not depend on the number of ranks."""
    cfg, base = preset(bigram_rows=101), initial(bigram_rows=101)
    for rank in range(world):
        where = fabric(rank, world)
        sizes = {label: len(owned(base[label], where)) for label in TABLES}
        model = tg.GPT(cfg, tg.attention_reference, 16, sizes)
        model.set_initial_values(0, lambda label, x: owned(x, where) if label in TABLES else x)
        for label, p in model.named_parameters():
            assert p.equal(owned(base[label], where) if label in TABLES else base[label]), (label, rank)


def test_rotary_tables_hold_cos_and_sin_of_position_times_frequency():
    cfg = small()
    model, frequencies = model_of(cfg), (1.0, 0.125)
    addresses = [x.data_ptr() for x in model.buffers()]
    model.set_rotary(frequencies)
    angles = np.arange(96)[:, None] * np.array(frequencies)          # twice the length: paired layers have 2T positions
    still = np.zeros((96, 4))
    cos = np.concatenate([np.repeat(np.cos(angles), 2, 1), still + 1], 1)
    signs = [1, -1, 1, -1]                                           # of neighbours: (even, odd), (even, odd)
    sin = np.concatenate([np.repeat(np.sin(angles), 2, 1) * signs, still], 1)
    np.testing.assert_allclose(model.rotary_cos, cos, rtol=0, atol=1e-14)
    np.testing.assert_allclose(model.rotary_sin, sin, rtol=0, atol=1e-14)
    assert [x.data_ptr() for x in model.buffers()] == addresses, "in place: nothing recompiles"
    half = model_of(replace(cfg, dtype="bfloat16"))
    half.set_rotary(frequencies)
    assert half.rotary_cos.equal(torch.from_numpy(cos).float().bfloat16()), "angles in f32, rounded once"


def test_the_rotary_tables_of_a_stage_that_was_there_before_take_nothing_from_the_host(monkeypatch):
    cfg = small()
    stages = [rotary.frequencies for rotary in tg.Schedule(cfg).rotary]
    model = model_of(cfg)

    def tables() -> list[list[torch.Tensor]]:
        found = []
        for frequencies in stages:
            model.set_rotary(frequencies)
            found.append([model.rotary_cos.clone(), model.rotary_sin.clone()])
        return found

    def no_copy(*_, **__):
        raise AssertionError("a copy from the host, which a device would be waited for")

    first = tables()                                                 # as the warm-up does
    monkeypatch.setattr(torch, "tensor", no_copy)
    for before, now in zip(first, tables(), strict=True):
        assert before[0].equal(now[0]) and before[1].equal(now[1])
    assert len({cos.numpy().tobytes() for cos, _ in first}) == len(stages) > 1


# ---- leaks ----------------------------------------------------------------------------------------------------------

BOUNDS = (0, 7, 8, 14, 24)                                           # the second document is a single token


def moved_by_token(monkeypatch, at: int, smear: float, shifting: tuple[int, ...], tables: str = "") -> list[int]:
    """Positions of slot 0 whose stream moves, in any bit, when its token at `at` changes; slot 1 must not move."""
    layers = tuple(replace(layer, key_shift=depth in shifting) for depth, layer in enumerate(tg.LAYERS))
    monkeypatch.setattr(tg, "LAYERS", layers)
    cfg = small(max_doc_len=24)
    model, batch = model_of(cfg), random_batch(cfg, 0, 2, 24)
    with torch.no_grad():
        model.scalars[44] = smear
    batch = batch._replace(cu_seqlens=torch.tensor([BOUNDS] * 2, dtype=torch.int32))
    tokens = batch.tokens.clone()
    tokens[0, at] = (tokens[0, at] + 1) % cfg.vocab_size
    other = with_tokens(cfg, batch, tokens)                          # the bigram rows stay
    spans = tg.spans_of(5, 30, 24, 0.8)
    moved = (model.hidden(batch, spans, own_rows(model)) != model.hidden(other, spans, own_rows(model))).any(-1)
    assert not moved[1].any(), "nothing crosses slots"
    return moved[0].nonzero().flatten().tolist()


@pytest.mark.parametrize("at", [0, 3, 6, 7, 8, 13, 14, 20])
def test_attention_leaks_neither_over_documents_nor_from_the_future(monkeypatch, at):
    end = next(bound for bound in BOUNDS if bound > at)
    assert moved_by_token(monkeypatch, at, 0.0, ()) == list(range(at, end))


@pytest.mark.parametrize("at, want", [
    (3, range(3, 7)), (6, range(6, 8)), (7, range(7, 14)), (13, range(13, 24)), (23, [23])])
def test_smear_crosses_documents_by_one_position(monkeypatch, at, want):
    assert moved_by_token(monkeypatch, at, 0.8, ()) == list(want)


@pytest.mark.parametrize("at, shifting, want", [             # a document's first token sees one key: nothing to weigh
    (10, (10,), [*range(10, 14), *range(15, 24)]),
    (3, (3, 10), range(3, 7)),                               # the second document is its first token
    (7, (10,), [7, *range(9, 14)]),
    (7, (3, 10), [7, *range(9, 14), *range(15, 24)]),        # one document on per layer
    (23, (3, 10), [23])])
def test_key_shift_crosses_documents_by_one_position_per_layer(monkeypatch, at, shifting, want):
    assert moved_by_token(monkeypatch, at, 0.0, shifting) == list(want)


def test_a_bigram_row_and_a_target_move_only_what_reads_them():
    cfg = small(max_doc_len=24)
    model, batch, one = model_of(cfg), random_batch(cfg, 0, 2, 24), torch.ones((), dtype=torch.float64)
    batch = batch._replace(cu_seqlens=torch.tensor([BOUNDS] * 2, dtype=torch.int32))

    def losses(batch):
        weights = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64)
        return model.losses(batch, weights, one, SPANS, "plain", own_rows(model))

    for name, at, want in (("targets", 10, [8, 9, 10]), ("targets", 0, [0]), ("bigram_embed", 21, [21, 22, 23])):
        changed = (batch.targets if name == "targets" else batch.rows[name]).clone()
        changed[0, at] = (changed[0, at] + 1) % cfg.vocab_size
        other = dict(targets=changed) if name == "targets" else dict(rows=batch.rows | {name: changed})
        moved = losses(batch._replace(**other)) != losses(batch)
        assert not moved[1].any()
        assert moved[0].nonzero().flatten().tolist() == want, name

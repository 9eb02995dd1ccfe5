"""Room 7: NorMuon and Adam against the recipe's numbers, torch and numpy; who is updated when, tied and untied."""
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from common import (RECIPE_PARAMETERS, add_grad, executor, fabric, fill_randomly, grad_of, own_rows, owned, refused,
                    small, untied_at)

import train_gpt as tg

F64 = torch.float64
POLAR = [(8.156554524902461, -22.48329292557795, 15.878769915207462),                # recipe 3.1
         (4.042929935166739, -2.808917465908714, 0.5000178451051316),
         (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
         (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
         (2.3465413258596377, -1.7097828382687081, 0.42323551169305323)]


TABLES = ("bigram_embed", "value_embed", "embed")


def tensor(x, dtype=F64) -> torch.Tensor:
    return torch.tensor(x, dtype=dtype)


# ---- Polar Express --------------------------------------------------------------------------------------------------

def slow_polar(x: np.ndarray) -> np.ndarray:
    """The polynomials act on singular values: X -> a X + (b A + c A A) X with A = X X^T is s -> a s + b s^3 + c s^5."""
    u, s, v = np.linalg.svd(x, full_matrices=False)
    s = s / (1.02 * np.sqrt((s * s).sum(-1, keepdims=True)) + 1e-6)
    for a, b, c in POLAR:
        s = a * s + b * s**3 + c * s**5
    return (u * s[..., None, :]) @ v


@pytest.mark.recipe
def test_polar_express_of_the_recipe():
    want = [[-0.7577416544, 0.2934070896, 0.7415923675], [0.7763169829, 0.5181736290, 0.6048503874]]
    g = tensor([[1, 2, 3], [4, 5, 7]])
    np.testing.assert_allclose(tg.polar_express(g[None])[0], want, atol=6e-11)        # printed with 10 decimals
    np.testing.assert_allclose(tg.polar_express(g.t()[None])[0].t(), want, atol=6e-11)


def test_polar_express_in_bf16_stays_close():
    x = torch.randn(3, 64, 32, generator=torch.Generator().manual_seed(0), dtype=F64)
    exact, rounded = tg.polar_express(x), tg.polar_express(x.bfloat16())
    assert rounded.dtype == torch.bfloat16
    error = (rounded.double() - exact).norm(dim=(1, 2)) / exact.norm(dim=(1, 2))
    assert float(error.max()) < 0.05                                 # 8 bits through 5 steps whose gain reaches 8


@pytest.mark.parametrize("shape", [(1, 5, 5), (3, 4, 9), (2, 12, 3), (4, 1, 6)])
def test_polar_express_acts_on_singular_values(shape):
    x = torch.from_numpy(np.random.default_rng(0).normal(size=shape))
    got = tg.polar_express(x)
    np.testing.assert_allclose(got, slow_polar(x.numpy()), atol=1e-10)                # 5 products amplify roundings
    values = np.linalg.svd(got.numpy(), compute_uv=False)
    assert 0.858 < values.min() and values.max() < 1.142, "nearly orthogonal"
    alone = torch.cat([tg.polar_express(matrix[None]) for matrix in x])
    np.testing.assert_allclose(got, alone, atol=1e-12)                                # each matrix on its own


@pytest.mark.parametrize("value, gain", [
    (1 / 1.02, 0.903537), (0.5, 0.910611), (0.1, 1.059161), (0.05, 0.908558), (0.02, 1.059358), (0.01, 1.027110),
    (0.005, 1.001336), (0.002, 1.140407), (0.001, 0.858873), (1e-4, 0.098806)])
def test_gain_of_a_normalised_singular_value(value, gain):
    rest = math.sqrt(max(0.0, 1.02**-2 - value**2))
    x = 1e6 * torch.diag(tensor([value, rest]))                      # large, so that the 1e-6 in the divisor is nothing
    assert float(tg.polar_express(x[None])[0, 0, 0]) == pytest.approx(gain, rel=0, abs=6e-7 + 1e3 * 1e-9)


# ---- NorMuon --------------------------------------------------------------------------------------------------------

@pytest.mark.recipe
def test_two_normuon_steps_of_the_recipe():
    p = tensor([[[0.5, -0.25], [0.125, 1], [-0.75, 0.375]]])
    momentum, second = torch.zeros(1, 3, 2, dtype=F64), torch.zeros(1, 3, 1, dtype=F64)
    grads = [[[1, 2], [3, 4], [5, 7]], [[-1, 0.5], [2, 0], [0.25, -3]]]
    steps = [
        dict(mu=0.85, second=[0.0253082856, 0.0095613641, 0.0189432328],
             p=[[0.5158871909, -0.2678027375], [0.1023873427, 0.9913235613], [-0.7648124775, 0.3560020119]],
             momentum=[[0.15, 0.3], [0.45, 0.6], [0.75, 1.05]]),
        dict(mu=0.85 + 0.1 / 300, second=[0.0440387196, 0.0283201301, 0.0310936751],
             p=[[0.5233018002, -0.2885429776], [0.0823899137, 0.9724132868], [-0.7824448948, 0.3677987918]],
             momentum=[[-0.0221166667, 0.3299333333], [0.6819833333, 0.5102], [0.6751666667, 0.44385]])]
    lr, close = 0.023, dict(rtol=0, atol=6e-11)                      # printed with 10 decimals
    for grad, want in zip(grads, steps):
        tg.normuon_update(p, None, tensor([grad]), momentum, second, 1.0, tensor(want["mu"]), tensor(lr),
                          tensor([[[math.sqrt(3 / 2)]]]), tensor(1.2 * lr), 0.95)
        np.testing.assert_allclose(momentum[0], want["momentum"], **close)
        np.testing.assert_allclose(second[0, :, 0], want["second"], **close)
        np.testing.assert_allclose(p[0], want["p"], **close)


# U, raw word before, mask, raw word after, visible weight (recipe 11.6)
MANTISSA = [
    (0.01, 0x3CF50000, 0x3CF2F5D7, 0.0295410156), (0.01, 0x3CF2F5D7, 0x3CF0EC03, 0.0292968750),
    (-0.02, 0x3CF0EC03, 0x3CF4B0B4, 0.0297851562), (0.5, 0x3CF4B0B4, 0x3C9653B0, 0.0183105469),
    (0.0, 0x3C9653B0, 0x3C963B42, 0.0183105469), (0.03, 0x3C963B42, 0x3C907BCF, 0.0175781250),
    (0.004, 0xBF800000, 0xBF800304, -1.0), (-0.004, 0xBF800304, 0xBF7FD665, -0.99609375)]


def words(raw: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A raw 32-bit word as a bf16 weight and its mantissa word, (1, 1, 1) each."""
    high, low = (np.array([[[part]]], np.uint16).view(np.int16) for part in (raw >> 16, raw & 0xFFFF))
    return torch.from_numpy(high).view(torch.bfloat16), torch.from_numpy(low)


@pytest.mark.recipe
@pytest.mark.parametrize("update, before, after, visible", MANTISSA)
def test_mantissa_update_of_the_recipe(monkeypatch, update, before, after, visible):
    monkeypatch.setattr(tg, "normuon_direction", lambda *_: torch.full((1, 1, 1), update))
    p, mantissa = words(before)
    some = torch.zeros(1, 1, 1)
    tg.normuon_update(p, mantissa, some, some, some, 1.0, tg.cpu_scalar(0.9), tg.cpu_scalar(0.023), torch.ones(1, 1, 1),
                      tg.cpu_scalar(1.2 * 0.023), 0.95)
    want = words(after)
    assert p.equal(want[0]) and mantissa.equal(want[1])
    assert float(p) == pytest.approx(visible, abs=6e-11)             # printed with 10 decimals


def test_weight_and_mantissa_follow_an_f32_weight_bit_by_bit(monkeypatch):
    rng = np.random.default_rng(0)
    exact = rng.normal(size=(2, 8, 8)).astype(np.float32)
    exact = (exact.view(np.int32) & ~0xFFFF).view(np.float32)        # as at the start: the mantissa is 0
    p = torch.from_numpy(exact.copy()).bfloat16()
    mantissa, lr, decay = torch.zeros(p.shape, dtype=torch.int16), np.float32(0.023 * 2), np.float32(1.2 * 0.023)
    some = torch.zeros(p.shape)
    for _ in range(50):
        update = (0.1 * rng.normal(size=p.shape)).astype(np.float32)
        agrees = (update * exact >= 0).astype(np.float32)
        exact = exact - exact * agrees * decay * lr - update * lr    # numpy rounds each operation to f32 as well
        monkeypatch.setattr(tg, "normuon_direction", lambda *_, update=update: torch.from_numpy(update))
        tg.normuon_update(p, mantissa, some, some, some, 1.0, tg.cpu_scalar(0.9), tg.cpu_scalar(0.023),
                          torch.full((2, 1, 1), 2.0), tg.cpu_scalar(1.2 * 0.023), 0.95)
        assert tg.with_mantissa(p, mantissa).numpy().tobytes() == exact.tobytes()
        assert p.float().numpy().tobytes() == (exact.view(np.int32) & ~0xFFFF).tobytes(), "truncated, not rounded"


# ---- Adam -----------------------------------------------------------------------------------------------------------

@pytest.mark.recipe
def test_two_adam_updates_of_the_recipe():
    p, m, v = tensor([0.02, -0.01, 0, 0.5]), torch.zeros(4, dtype=F64), torch.zeros(4, dtype=F64)
    updates = [  # summed gradient, step size, m, v, new p
        ([0.004, 0.001, 0, 0], 0.003577708764, [0.002, 0.0005, 0, 0], [8e-7, 5e-8, 0, 0],
         [0.01199904089443, -0.01799999642229, 0, 0.5]),
        ([-0.001, 0.001, 0.004, 0.002], 0.00333066559915, [0.0005, 0.00075, 0.002, 0.001],
         [8.1e-7, 9.75e-8, 8e-7, 2e-7], [0.01014809536876, -0.02599999386024, -0.00744759385734, 0.49252840697532])]
    for count, (grad, step_size, want_m, want_v, want_p) in enumerate(updates, 1):
        size = 0.008 * math.sqrt(1 - 0.95**count) / (1 - 0.5**count)
        assert size == pytest.approx(step_size, rel=1e-9)            # printed with 10 digits or more
        tg.adam_update(p, tensor(grad), m, v, 1.0, (0.5, 0.95), 1e-10, tensor(size), tensor(0.008**2 * 0.005 * 150))
        np.testing.assert_allclose(m, want_m, rtol=1e-12)
        np.testing.assert_allclose(v, want_v, rtol=1e-12)
        np.testing.assert_allclose(p, want_p, rtol=0, atol=6e-15)    # printed with 14 decimals


@pytest.mark.parametrize("betas, lr", [((0.9, 0.99), 0.04), ((0.65, 0.95), 0.01), ((0.5, 0.95), 0.008)])
def test_adam_without_decay_is_torchs(betas, lr):
    """Torch adds eps to the corrected root, sqrt(v / (1 - b2^t)): its eps is ours divided by sqrt(1 - b2^t)."""
    generator, eps = torch.Generator().manual_seed(0), 1e-3
    p = torch.randn(20, generator=generator, dtype=F64)
    theirs, m, v = p.clone().requires_grad_(), torch.zeros_like(p), torch.zeros_like(p)
    adam = torch.optim.Adam([theirs], lr=lr, betas=betas)
    for t in range(1, 21):
        grad = torch.randn(20, generator=generator, dtype=F64)
        adam.param_groups[0]["eps"] = eps / math.sqrt(1 - betas[1]**t)
        theirs.grad = grad
        adam.step()
        step_size = lr * math.sqrt(1 - betas[1]**t) / (1 - betas[0]**t)
        tg.adam_update(p, 8 * grad, m, v, 1 / 8, betas, eps, tensor(step_size), tensor(0.0))
        np.testing.assert_allclose(p, theirs.detach(), rtol=1e-12, atol=1e-14)        # float64 in another order


# ---- the optimizer --------------------------------------------------------------------------------------------------

class Plain:
    """Recipe 3 for a whole run in numpy: every parameter in one piece, gradients summed by hand."""

    def __init__(self, weights: dict[str, np.ndarray], cfg: tg.Config) -> None:
        self.p, self.slots, self.tied = {label: x.copy() for label, x in weights.items()}, cfg.num_slots, True
        self.state = {label: dict(t=0, m=0.0, v=0.0) for label in weights}
        self.sums = {label: 0.0 for label in weights}
        self.adam = [(label, cfg.adam_every, lr_mul, wd_mul, *betas, False)
                     for label, _, kind, lr_mul, wd_mul, betas in RECIPE_PARAMETERS if kind == "adam"]
        self.adam += [(line.label, line.cadence, line.lr_mul, line.wd_mul, 0.0, line.beta2, True)
                      for line in cfg.tables]

    def step(self, grads: dict[str, np.ndarray], v: tg.Values) -> None:
        for label in ("attn", "mlp"):
            self.normuon(label, grads[label] / self.slots, v)
        for label, *_ in self.adam:
            self.sums[label] = self.sums[label] + grads[label]
        for label, cadence, lr_mul, wd_mul, *decays in self.adam:
            if (v.step + 1) % cadence == 0:
                total, self.sums[label] = self.sums[label], 0.0
                if label == "lm_head" and self.tied:
                    total, self.sums["embed"] = total + self.sums["embed"].T, 0.0
                if label != "embed" or not self.tied:
                    self.update(label, total / self.slots, v.adam_lr * lr_mul, 0.005 * wd_mul, *decays)
        if self.tied:
            self.p["embed"] = self.p["lm_head"].T.copy()
        if v.untie:
            head = self.state["lm_head"]
            self.state["embed"], self.tied = dict(t=head["t"], m=head["m"].T, v=head["v"].T), False

    def update(self, label, g, lr, wd, b1, b2, rowwise) -> None:
        """Adam; rowwise with one second moment per row, which a row without a gradient keeps decaying."""
        s, p = self.state[label], self.p[label]
        s["t"] += 1
        s["m"] = b1 * s["m"] + (1 - b1) * g
        s["v"] = b2 * s["v"] + (1 - b2) * ((g * g).mean(1, keepdims=True) if rowwise else g * g)
        u = s["m"] / (np.sqrt(s["v"]) + 1e-10) * lr * math.sqrt(1 - b2**s["t"]) / (1 - b1**s["t"])
        self.p[label] = p - u - (u * p > 0) * p * lr * lr * wd

    def normuon(self, label, g, v) -> None:
        D = g.shape[-1]
        shape = (-1, D, D) if label == "attn" else (-1, 4 * D, D)
        p, g, s, mu = self.p[label].reshape(shape), g.reshape(shape), self.state[label], v.momentum
        s["m"] = mu * s["m"] + (1 - mu) * g
        o = slow_polar((1 - mu) * g + mu * s["m"])
        s["v"] = 0.95 * s["v"] + 0.05 * (o * o).mean(-1, keepdims=True)
        scaled = o / np.sqrt(np.maximum(s["v"], 1e-10))
        u = scaled * np.linalg.norm(o, axis=(1, 2), keepdims=True) / np.linalg.norm(scaled, axis=(1, 2), keepdims=True)
        muls = np.ones(len(p)) if label == "attn" else np.tile([2.0, 4.0], len(p) // 2)          # up, down
        rate = v.normuon_lr * muls[:, None, None]
        self.p[label] = (p - (u * p >= 0) * p * 1.2 * v.normuon_lr * rate - u * rate).reshape(self.p[label].shape)


def make(cfg: tg.Config | None = None, rank: int = 0, world: int = 1) -> tg.Optimizer:
    """Stages start at 0, 3, 6, 9: head and embedding part at step 3."""
    cfg, where = cfg or small(stages=untied_at(1)), fabric(rank, world)
    tables = tg.row_tables(cfg)
    model = tg.GPT(cfg, tg.attention_reference, 16, {table.label: -(-table.rows // world) for table in tables})
    whole = fill_randomly(model, where=where)
    with torch.no_grad():
        model.embed.copy_(owned(whole["lm_head"].t(), where))
    rows = {table.label: tg.RowTable(table, cfg, where, model.get_parameter(table.label), 64, tg.no_wait)
            for table in tables}
    return tg.Optimizer(cfg, where, model, lambda call: call, rows)


def random_grads(optimizer: tg.Optimizer, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {label: torch.randn(p.shape, generator=generator, dtype=F64)
            for label, p in optimizer.model.named_parameters()}


def take_step(optimizer: tg.Optimizer, values: tg.Values) -> None:
    """A backward pass adds random gradients, then the update."""
    for label, grad in random_grads(optimizer, values.step).items():
        add_grad(optimizer, label, grad, values)
    optimizer.step(values, tg.no_wait)
    assert all(optimizer.model.get_parameter(label).grad is None for label in TABLES), "theirs are somewhere else"


def weights_of(optimizer: tg.Optimizer) -> dict[str, torch.Tensor]:
    return {label: p.detach().clone() for label, p in optimizer.model.named_parameters()}


def check_against(plain: Plain, optimizer: tg.Optimizer, step: int) -> None:
    """Weights and, of what has just been updated, moments."""
    for label, p in optimizer.model.named_parameters():
        np.testing.assert_allclose(p.detach(), plain.p[label], rtol=0, atol=1e-9, err_msg=f"{label}, step {step}")
    for label, cadence, *_ in plain.adam:
        if (step + 1) % cadence == 0 and label in optimizer.state and not (label == "embed" and plain.tied):
            for name in ("m", "v"):
                found, want = optimizer.state[label][name], plain.state[label][name]
                np.testing.assert_allclose(found, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("every", [2, 1])
def test_nine_steps_are_those_of_a_plain_optimizer(every):
    """Tied, untied at step 3, and after it; parameters and moments after each step."""
    optimizer = make(small(stages=untied_at(1), adam_every=every))
    schedule = tg.Schedule(optimizer.cfg)
    plain = Plain({label: x.numpy() for label, x in weights_of(optimizer).items()}, optimizer.cfg)
    for step in range(9):
        values = schedule.at(step)
        take_step(optimizer, values)
        plain.step({label: g.numpy() for label, g in random_grads(optimizer, step).items()}, values)
        assert plain.tied == (step < 3) == (not optimizer.state["embed"]["v"].any())
        check_against(plain, optimizer, step)
    assert not np.array_equal(plain.p["embed"], plain.p["lm_head"].T), "they did part"


def test_a_run_with_adam_at_every_step_is_that_of_a_plain_optimizer():
    """Plans, lookups, backward and updates of the trainer against autograd over whole tables; cadences 1 and 2."""
    tables = tg.parse_value("tables", "every_embed 2 40 stream 1 device 1; second_embed 3 30 1 0 host 2")
    cfg = small(stages=untied_at(1), adam_every=1, tables=tables)
    schedule, ex = tg.Schedule(cfg), tg.Executor(cfg, fabric(), tg.attention_reference, "plain")
    fill_randomly(ex.model)
    with torch.no_grad():
        ex.model.embed.copy_(ex.model.lm_head.t())
    headers = [tg.ShardHeader("formula:60:59:20000:1#0", 20_000, 60, 59)]
    cycles = [[schedule.at(first), schedule.at(first + 1)] for first in (0, 2, 4)]
    loader = tg.Loader(cfg, fabric(), headers, cycles, ex.exchange_ahead)
    loader.start()

    model = tg.GPT(cfg, tg.attention_reference, len(ex.model.rotary_cos) // 2, {})       # without a main_grad
    whole = {line.label: torch.zeros(line.rows, cfg.model_dim, dtype=F64) for line in cfg.tables}
    plain = Plain({label: x.numpy() for label, x in (weights_of(ex.optimizer) | whole).items()}, cfg)
    one = torch.ones((), dtype=F64)
    for values in sum(cycles, []):
        batch = loader.next(values)
        losses = ex.forward_backward(batch, values).slot_sums
        ex.optim_step(values, loader.plans_ahead)

        model.load_state_dict({label: torch.from_numpy(plain.p[label]) for label, _ in model.named_parameters()})
        model.set_rotary(values.rotary.frequencies)
        model.zero_grad()
        buffers = own_rows(model)
        for line in cfg.tables:
            rows = torch.from_numpy(plain.p[line.label]).requires_grad_()
            buffers[line.label] = rows, torch.zeros_like(rows, requires_grad=False)
        logical = {table.label: torch.from_numpy(table.ids(batch.tokens.numpy())) for table in tg.row_tables(cfg)}
        spans = tg.spans_of(values.short_window, values.long_window, cfg.max_doc_len, values.rotary.attn_scale)
        weights = torch.tensor(values.mtp_weights, dtype=F64)
        want = model.losses(batch._replace(rows=logical), weights, one, spans, "plain", buffers).sum(dim=1)
        want.sum().backward()
        np.testing.assert_allclose(losses, want.detach(), rtol=1e-9)
        grads = {label: p.grad.numpy() for label, p in model.named_parameters() if label not in buffers}
        plain.step(grads | {label: row_grads.numpy() for label, (_, row_grads) in buffers.items()}, values)
        check_against(plain, ex.optimizer, values.step)
    loader.close()
    for line in cfg.tables:
        home = ex.tables[line.label].home
        home.settle()
        np.testing.assert_allclose(home.stored.rows, plain.p[line.label], rtol=0, atol=1e-9)
        assert home.stored.rows.any() and home.stored.last.max() == 6 // line.cadence


def test_adam_parameters_move_on_odd_steps_only_and_keep_their_gradients_on_even_ones():
    optimizer = make()
    schedule, banks = tg.Schedule(optimizer.cfg), {"attn", "mlp"}
    for step in range(6):
        before = weights_of(optimizer)
        take_step(optimizer, schedule.at(step))
        moved = {label for label, x in weights_of(optimizer).items() if not x.equal(before[label])}
        kept = {label for label in before if grad_of(optimizer, label) is not None}
        assert moved == (set(before) if step % 2 else banks)
        assert kept == (set() if step % 2 else set(before) - banks)
        if step % 2 == 0:
            want = random_grads(optimizer, step)
            assert all(grad_of(optimizer, label).equal(want[label]) for label in kept)
        else:
            assert not any(optimizer.entries[label].table.grad.any() for label in TABLES), "cleared for the next cycle"


def test_embedding_is_the_transposed_head_until_they_are_untied():
    optimizer = make()
    schedule = tg.Schedule(optimizer.cfg)
    for step in range(6):
        take_step(optimizer, schedule.at(step))
        same = optimizer.model.embed.equal(optimizer.model.lm_head.t())
        assert same == (step < 5), "equal after the untying's own update too; the next Adam step is 5"
        if step < 3:
            assert not optimizer.state["embed"]["m"].any()
        if step == 3:
            for name in ("m", "v"):
                assert optimizer.state["embed"][name].equal(optimizer.state["lm_head"][name].t())


@pytest.mark.parametrize("field, value, at, want", [
    ("momentum", 0.5, 1, {"attn", "mlp"}), ("normuon_lr", 0.01, 1, {"attn", "mlp"}),
    ("adam_lr", 0.001, 1, "adam"), ("untie", False, 5, {"embed"}),
    ("tied", True, 5, {"embed", "lm_head"})])
def test_each_value_matters(field, value, at, want):
    """Change one value in steps 0 to `at` alone: these parameters, and no others, get another update."""
    def run(**changes):
        optimizer = make()
        schedule = tg.Schedule(optimizer.cfg)
        for step in range(at + 1):
            take_step(optimizer, replace(schedule.at(step), **changes))
        return weights_of(optimizer)

    base, other = run(), run(**{field: value})
    moved = {label for label, x in base.items() if not x.equal(other[label])}
    assert moved == ({row[0] for row in RECIPE_PARAMETERS if row[2] == "adam"} if want == "adam" else want)


@pytest.mark.parametrize("field, changed", [
    ("normuon_beta2", {"attn", "mlp"}), ("normuon_weight_decay", {"attn", "mlp"}), ("adam_eps", "some"),
    ("adam_weight_decay", {"attn_gate_bank", "ve_gate_bank", "bigram_embed", "value_embed", "lm_head", "embed"})])
def test_each_setting_matters(field, changed):
    def run(cfg):
        optimizer = make(cfg)
        for step in range(2):
            take_step(optimizer, tg.Schedule(cfg).at(step))
        return weights_of(optimizer)

    cfg = small()
    base, other = run(cfg), run(replace(cfg, **{field: 0.5 * getattr(cfg, field) if field != "adam_eps" else 1e-3}))
    moved = {label for label, x in base.items() if not x.equal(other[label])}
    assert moved == (set(base) - {"attn", "mlp"} if changed == "some" else changed)


def test_a_missing_gradient_is_refused():
    optimizer = make()
    values = tg.Schedule(optimizer.cfg).at(0)
    refused(tg.RunError, lambda: optimizer.step(values, tg.no_wait), "optim_step", "attn", "mlp", "forward_backward")
    before, odd = weights_of(optimizer), tg.Schedule(optimizer.cfg).at(1)
    for missing in ("attn", "smear_gate", "bigram_embed", "value_embed", "embed", "lm_head"):
        for label, grad in random_grads(optimizer, 0).items():
            if label != missing:
                add_grad(optimizer, label, grad, odd)
        named = "small" if missing == "smear_gate" else missing              # one sum for all that every rank updates
        refused(tg.RunError, lambda: optimizer.step(odd, tg.no_wait), f"no gradient of ['{named}']", "forward_backward")
        for entry in optimizer.entries.values():
            entry.clear()
        for label in TABLES:
            optimizer.entries[label].table.reset()
    assert all(x.equal(before[label]) for label, x in weights_of(optimizer).items())


def test_orders_are_permutations_and_any_permutation_gives_the_same_bits(monkeypatch):
    alike = {"scalars", "x0_lambdas", "smear_gate", "skip_gate", "attn_gate_bank", "ve_gate_bank"}
    entries = sorted({"small", *(row[0] for row in RECIPE_PARAMETERS)} - alike)
    assert sorted(tg.REDUCE_ORDER) == sorted(tg.UPDATE_ORDER) == entries

    def run():
        optimizer = make()
        for step in range(6):
            take_step(optimizer, tg.Schedule(optimizer.cfg).at(step))
        return weights_of(optimizer)

    base = run()
    for order in ("REDUCE_ORDER", "UPDATE_ORDER"):
        for bad in (getattr(tg, order)[1:], (*getattr(tg, order)[1:], "mlp"), (*getattr(tg, order), "mlp")):
            with monkeypatch.context() as patch, pytest.raises(AssertionError, match="an entry once in each"):
                patch.setattr(tg, order, bad)
                make()
        monkeypatch.setattr(tg, order, tuple(np.random.default_rng(1).permutation(getattr(tg, order))))
    assert all(x.equal(base[label]) for label, x in run().items())


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_ranks_own_every_piece_once(world):
    """Shards of matrices and of the head's rows, every W-th row of a table, also where W does not divide their number;
    state for what is owned alone."""
    cfg = small(stages=untied_at(1), bigram_rows=101)
    alone, *ranks = [make(cfg, rank, count) for count in (1, world) for rank in range(count)]
    for label in ("attn", "mlp", "lm_head", *TABLES):
        whole, *parts = [shard_of(optimizer, label) for optimizer in (alone, *ranks)]
        assert all(len(part) <= -(-len(whole) // world) for part in parts), label
        if label in TABLES:
            for row in range(len(whole)):
                assert parts[row % world][row // world].equal(whole[row]), (label, row)
            assert sum(int(part.any(1).sum()) for part in parts) == len(whole), "after a shard is nothing but zeros"
        else:
            assert torch.cat(parts).equal(whole), label
        for optimizer, part in zip(ranks, parts):
            if label in TABLES:
                assert part.data_ptr() == optimizer.model.get_parameter(label).data_ptr(), "the parameter is the shard"
            assert all(len(x) == len(part) for x in optimizer.state[label].values()), label
    for label in ("attn", "mlp"):
        assert torch.cat([optimizer.entries[label].lr_muls for optimizer in ranks]).equal(alone.entries[label].lr_muls)
    assert shard_of(alone, "attn").shape == (40, 32, 32) and shard_of(alone, "mlp").shape == (22, 128, 32)


def shard_of(optimizer: tg.Optimizer, label: str) -> torch.Tensor:
    entry = optimizer.entries[label]
    return entry.shard if isinstance(entry, tg.Sharded) else entry.table.shard


def test_a_state_of_one_name_more_goes_everywhere(monkeypatch):
    """A late average of the weights, as a fork would add it: snapshots, files and the memory estimate follow."""
    def memory() -> int:
        return tg.memory_estimate(cfg, fabric(), tg.attention_reference, cfg.num_slots)["moments"]

    def with_average(row, shard):
        return initial_state(row, shard) | dict(another=torch.zeros_like(shard))

    cfg = small()
    before, initial_state = memory(), tg.initial_state
    monkeypatch.setattr(tg, "initial_state", with_average)
    ex, values = executor(cfg), tg.Schedule(cfg).at(0)
    labels = [label for label, _ in ex.model.named_parameters()]
    assert memory() - before == sum(math.prod(row.shape) for row in ex.model.table.values()) * F64.itemsize
    for number, label in enumerate(labels, 1):
        ex.optimizer.state[label]["another"].fill_(number)
    restore, saved = ex.snapshot(), ex.whole_state(values)
    for put_back in (restore, lambda: ex.load_state(saved["weights"] | saved["moments"])):
        for label in labels:
            ex.optimizer.state[label]["another"].zero_()
        put_back()
        for number, label in enumerate(labels, 1):
            assert ex.optimizer.state[label]["another"].eq(number).all(), label


def test_bf16_banks_keep_their_lower_bits_in_mantissa_words(monkeypatch):
    """A model in bf16 against an f32 copy that takes the same updates."""
    updates, direction = [], tg.normuon_direction
    monkeypatch.setattr(tg, "normuon_direction", lambda *args: updates.append(direction(*args)) or updates[-1])
    optimizer = make(small(dtype="bfloat16"))
    schedule = tg.Schedule(optimizer.cfg)
    exact = {label: shard_of(optimizer, label).float().numpy() for label in ("attn", "mlp")}
    for step in range(3):
        v = schedule.at(step)
        take_step(optimizer, v)
        for label, u in zip([label for label in tg.UPDATE_ORDER if label in exact], updates[-2:]):
            assert u.dtype == torch.float32
            p, u = exact[label], u.numpy()
            lr = (optimizer.entries[label].lr_muls.numpy() * np.float32(v.normuon_lr)).astype(np.float32)
            exact[label] = p - p * (u * p >= 0).astype(np.float32) * np.float32(1.2 * v.normuon_lr) * lr - u * lr
            whole = tg.with_mantissa(shard_of(optimizer, label), optimizer.state[label]["mantissa"])
            assert whole.numpy().tobytes() == exact[label].tobytes(), (label, step)
    assert "mantissa" not in optimizer.state["lm_head"] and optimizer.state["lm_head"]["m"].dtype == torch.float32
    assert "mantissa" not in make().state["attn"], "f64 weights need none"


@pytest.mark.recipe
def test_roundings_to_bf16_stand_where_the_recipe_has_them(monkeypatch):
    """In NorMuon: what goes into Polar Express, and the factor of each row, once each; Adam: the weight, to nearest."""
    o, seen = torch.randn(1, 4, 3, generator=torch.Generator().manual_seed(0)).bfloat16(), []
    monkeypatch.setattr(tg, "polar_express", lambda x: seen.append(x) or o)
    grad, second = torch.randn(1, 4, 3, generator=torch.Generator().manual_seed(1)), torch.rand(1, 4, 1)
    exact = o.double().numpy()[0]
    root = np.sqrt(0.95 * second.double().numpy()[0] + 0.05 * (exact**2).mean(1, keepdims=True))
    u = tg.normuon_direction(grad, torch.zeros(1, 4, 3), second, tensor(0.9), 0.95, torch.bfloat16)
    assert seen[0].equal(((grad * (1 - 0.9) + (1 - 0.9) * grad * 0.9)).bfloat16())
    factor = torch.from_numpy(np.linalg.norm(exact) / np.linalg.norm(exact / root) / root)
    assert u.equal(o.float() * factor.float().bfloat16().float())
    p = torch.randn(1000, generator=torch.Generator().manual_seed(2)).bfloat16()
    m, v, g = torch.zeros(1000), torch.zeros(1000), torch.ones(1000)
    want = (p.double() - 0.01 - p.double() * (p > 0) * 0.005).bfloat16()     # m / sqrt(v) = 0.1 / sqrt(0.01) = 1
    tg.adam_update(p, g, m, v, 1.0, (0.9, 0.99), 0.0, tensor(0.01), tensor(0.005))
    assert p.equal(want)


def test_step_values_are_cpu_scalars():
    """Numbers that change every step are tensors, so that a compiled update sees no new constant."""
    assert (tg.cpu_scalar(0.3).shape, tg.cpu_scalar(0.3).dtype, float(tg.cpu_scalar(0.3))) == ((), F64, 0.3)


# ---- Stochastic rounding --------------------------------------------------------------------------------------------

def test_stochastic_round__keeps_what_is_not_finite():
    """The largest NaN would become -0.0: a carry out of its bits goes through the sign."""
    raw = np.array([[0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F800001, 0x7F800000, 0xFF800000]], np.uint32)
    x = torch.from_numpy(raw.view(np.float32))
    for bits in (0, -1, 0x12345678, -0x80000000):
        rounded = tg.stochastic_round(x, torch.tensor([bits], dtype=torch.int32)).bfloat16()
        assert rounded[0, :4].isnan().all(), bits
        assert rounded[0, 4:].tolist() == [math.inf, -math.inf], bits

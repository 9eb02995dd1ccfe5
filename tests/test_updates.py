"""Section 4: NorMuon and Adam against reference.py, step by step. As functions: test_oracle.py."""

import numpy as np
import pytest
import torch
from common import (BF16, F32, F64, add_grad, grad_of, make_engine, make_optimizer, randn, small, tensors_of,
                    untied_at)
from reference import Reference

import train_gpt as tg

BANKS = ("attn", "mlp")

@pytest.mark.recipe
def test_normuon_direction__rounds_to_bf16_where_the_recipe_does(monkeypatch) -> None:
    """The input of Polar Express and the factor of each row, once each. Adam rounds the weight to nearest."""
    polar_inputs = []
    orthogonal = randn(1, 4, 3, dtype=BF16)
    monkeypatch.setattr(tg, "polar_express", lambda x: polar_inputs.append(x) or orthogonal)
    grad = randn(1, 4, 3, seed=1, dtype=F32)
    second_moment = randn(1, 4, 1, seed=2, dtype=F32).abs()
    exact = orthogonal.double()
    mean_square = 0.95 * second_moment.double() + 0.05 * exact.square().mean(-1, keepdim=True)
    std = mean_square.sqrt()
    update = tg.normuon_direction(grad, torch.zeros(1, 4, 3), second_moment, torch.tensor(0.9, dtype=F64), 0.95, BF16)
    assert polar_inputs[0].equal((grad * (1 - 0.9) + (1 - 0.9) * grad * 0.9).bfloat16())
    row_factors = exact.norm() / (exact / std).norm() / std
    assert update.equal(orthogonal.float() * row_factors.float().bfloat16().float())

    p = randn(1000, dtype=BF16)
    exact = p.double()
    expected = exact - 0.01 - exact * (p > 0) * 0.005                        # m / sqrt(v) = 0.1 / sqrt(0.01) = 1
    m = torch.zeros(1000)
    adam_scalars = torch.tensor([0.01, 0.005], dtype=F64).unbind()
    tg.adam_update(p, torch.ones(1000), m, m.clone(), 1.0, (0.9, 0.99), 0.0, *adam_scalars)
    assert p.equal(expected.bfloat16())

def random_grads(optimizer: tg.Optimizer, step: int) -> dict[str, torch.Tensor]:
    parameters = enumerate(optimizer.model.named_parameters())
    return {label: randn(*p.shape, seed=100 * step + i) for i, (label, p) in parameters}

def take_step(optimizer: tg.Optimizer, step_cfg: tg.StepConfig) -> None:
    for label, grad in random_grads(optimizer, step_cfg.step).items():
        add_grad(optimizer, label, grad, step_cfg.tied)
    optimizer.step(step_cfg)

def weights_of(optimizer: tg.Optimizer) -> dict[str, torch.Tensor]:
    return {label: p.detach().clone() for label, p in optimizer.model.named_parameters()}

OTHER_SETTINGS = dict(normuon_beta2=0.5, normuon_weight_decay=3.0, adam_eps=1e-3, adam_weight_decay=0.1)

@pytest.mark.recipe
@pytest.mark.parametrize("changes", [dict(), dict(adam_every=1), *({name: x} for name, x in OTHER_SETTINGS.items())],
                         ids=str)
def test_step__equals_the_reference(changes) -> None:
    """Parameters, moments and remaining gradients after each step: tied, the one that unties, and untied.

    Some cases change a setting, because its default would hide that the trainer ignores it.
    """
    cfg = small(stages=untied_at(1), row_comms="dense", **changes)         # so that gradients of all rows fit
    optimizer = make_optimizer(cfg)
    schedule = tg.Schedule(cfg)
    naive = Reference(cfg, weights_of(optimizer))
    steps = schedule.last_tied_step + 2 * cfg.adam_every + 1
    for step_cfg in map(schedule.at, range(steps)):
        updates_adam = (step_cfg.step + 1) % cfg.adam_every == 0
        for label, grad in random_grads(optimizer, step_cfg.step).items():
            naive.grads[label] += grad
        take_step(optimizer, step_cfg)
        naive.optim_step(step_cfg)
        for label, p in optimizer.model.named_parameters():
            if label == "embed" and schedule.at(step_cfg.step + 1).tied:      # lookups read the head
                continue
            where = f"{label}, step {step_cfg.step}"
            np.testing.assert_allclose(p.detach(), naive.p[label], rtol=0, atol=1e-9, err_msg=where)
            for name, x in optimizer.state[label].items():
                if updates_adam or label in BANKS:
                    np.testing.assert_allclose(x, naive.state[label][name], rtol=1e-9, atol=1e-12, err_msg=label)
            remaining = grad_of(optimizer, label)
            assert (remaining is None) == (updates_adam or label in BANKS), label
            assert remaining is None or remaining.equal(naive.grads[label]) or cfg.adam_every > 2, label
    assert not naive.p["embed"].equal(naive.p["lm_head"].t()), "head and embedding were untied"

def test_Optimizer__an_order_that_omits_or_repeats_a_group_is_refused(monkeypatch) -> None:
    labels = tg.UPDATE_ORDER
    for bad_order in (labels[1:], (*labels[1:], "mlp"), (*labels, "mlp")):
        with monkeypatch.context() as patch, pytest.raises(AssertionError, match="every group once"):
            patch.setattr(tg, "UPDATE_ORDER", bad_order)
            make_optimizer(small())

def test_init_optimizer_state__an_added_tensor_is_saved_and_reset(monkeypatch) -> None:
    """Such as a late average of the weights, which a fork adds."""
    def with_average(spec: tg.ParameterSpec, shard: torch.Tensor) -> dict[str, torch.Tensor]:
        return init_state(spec, shard) | dict(another=torch.zeros_like(shard))

    bf16_state = make_optimizer(small(dtype="bfloat16")).state
    assert {label for label in bf16_state if "mantissa" in bf16_state[label]} == {*BANKS}
    assert bf16_state["lm_head"]["m"].dtype == torch.float32
    init_state = tg.init_optimizer_state
    monkeypatch.setattr(tg, "init_optimizer_state", with_average)
    engine = make_engine(small())
    found = {name: x for name, x in tensors_of(engine).items() if not name.endswith(".row_grads")}
    addresses = {name: x.data_ptr() for name, x in engine.tensors().items()}
    assert addresses == {name: x.data_ptr() for name, x in found.items()}, "checkpoints have every tensor of the state"
    added = [found[f"{label}.another"] for label in engine.model.specs]
    for x in added:
        x.fill_(1)
    engine.reset(0)
    assert not any(x.any() for x in added)

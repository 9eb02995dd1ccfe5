"""Section 11: gradients that are missing. What each rank owns and updates is in test_ranks.py."""
import pytest
from common import add_grad, make_optimizer, randn, small, unequal

import train_gpt as tg

@pytest.mark.parametrize("missing", ["attn", "smear_gate", "bigram_embed", "lm_head"])
def test_step__a_missing_gradient_is_refused(missing) -> None:
    """And no weight changes."""
    cfg = small(row_comms="dense")           # so that gradients of all rows fit
    optimizer = make_optimizer(cfg)
    weights = dict(optimizer.model.named_parameters())
    before = {label: p.detach().clone() for label, p in weights.items()}
    step_cfg = tg.Schedule(cfg).at(cfg.adam_every - 1)
    for i, (label, p) in enumerate(weights.items()):
        if label != missing:
            add_grad(optimizer, label, randn(*p.shape, seed=i))
    with pytest.raises(AssertionError, match=missing):
        optimizer.step(step_cfg)
    assert unequal(weights, before) == []

"""Section 11: when parameter groups have gradients. What each rank owns and updates is in test_ranks.py."""
from common import make_comm, make_engine, small, started_loader

import train_gpt as tg

BANKS = ("attn", "mlp")

def test_has_gradient__true_from_a_backward_pass_to_the_update() -> None:
    """Asking changes nothing."""
    tables = tg.NgramTable("rare_embed", 2, 40, update_every=4), tg.NgramTable("other_embed", 3, 30)
    engine = make_engine(small(tables=tables, train_files="formula:60:59:20000:1"))
    groups = engine.optimizer.groups

    def with_gradient() -> set[str]:
        labels = [{label for label, group in groups.items() if group.has_gradient()} for _ in range(2)]
        assert labels[0] == labels[1]
        return labels[0]

    assert len({type(group) for group in groups.values()}) == 4 and with_gradient() == set()
    expected = [{*groups} - {*BANKS}, {"rare_embed"}, {*groups} - {*BANKS}, set()]    # after each step of a cycle
    with started_loader(engine.cfg, make_comm(), 8) as (loader, step_cfgs):
        for step_cfg in step_cfgs:
            engine.forward_backward(loader.next(), step_cfg)
            assert with_gradient() == {*groups}
            engine.optim_step(step_cfg)
            assert with_gradient() == expected[step_cfg.step % 4]

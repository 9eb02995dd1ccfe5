"""Section 11: parameter groups: when they have gradients, what they own, and the shard of each rank."""
import pytest
import torch
from common import fill_randomly, make_comm, make_engine, make_optimizer, small, started_loader

import train_gpt as tg

BANKS = ("attn", "mlp")
TABLES = ("bigram_embed", "value_embed", "embed")

def engine_with_all_groups() -> tg.Engine:
    """Build an engine whose optimizer has a group of each class."""
    tables = tg.NgramTable("rare_embed", 2, 40, update_every=4), tg.NgramTable("other_embed", 3, 30, layer=0)
    engine = make_engine(small(tables=tables, train_files="formula:60:59:20000:1"))
    fill_randomly(engine.model)
    return engine

def test_has_gradient__true_from_a_backward_pass_to_the_update() -> None:
    """It is true from a backward pass to the update, for groups of every class, and asking changes nothing."""
    engine = engine_with_all_groups()
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

def test_Optimizer__has_state_for_every_parameter_but_those_of_row_wise_tables() -> None:
    """Every parameter is in one group. A row-wise table stores its state itself, only for rows that were updated."""
    engine = engine_with_all_groups()
    optimizers = {spec.label: spec.optimizer for spec in tg.parameter_specs(engine.cfg)}
    labels = [spec.label for group in engine.optimizer.groups.values() for spec in group.specs]
    assert sorted(labels) == sorted(optimizers)
    names = dict(adam={"m", "v"}, normuon={"momentum", "second"})             # banks in f64 have no mantissa
    state = {label: {*tensors} for label, tensors in engine.optimizer.state.items()}
    assert state == {label: names[optimizer] for label, optimizer in optimizers.items() if optimizer != "rowwise"}

@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_Optimizer__every_shard_has_one_owner(world_size) -> None:
    """The shards of all ranks together are the full parameters, also if W does not divide their size.

    Matrices and rows of the head are sharded in blocks, table rows round-robin. A rank has optimizer state only for its
    shard. Buffers have space for W shards of equal size, padded with zeros.
    """
    cfg = small(bigram_rows=101)
    single_rank = make_optimizer(cfg)
    ranks = [make_optimizer(cfg, rank, world_size) for rank in range(world_size)]
    for label in (*BANKS, "lm_head", *TABLES):
        full, = single_rank.groups[label].shards
        shards = [optimizer.groups[label].shards[0] for optimizer in ranks]
        assert all(len(shard) <= -(-len(full) // world_size) for shard in shards), label
        if label in TABLES:
            # Flattening (local row, rank) gives the order of global rows, then the padding.
            padded_rows = torch.stack(shards, dim=1).flatten(0, 1)
            assert padded_rows[:len(full)].equal(full), label
            assert not padded_rows[len(full):].any(), "padded with zeros"
        else:
            assert torch.cat(shards).equal(full), label
        for optimizer, shard in zip(ranks, shards):
            group = optimizer.groups[label]
            assert all(len(x) == len(shard) for x in optimizer.state[label].values()), label
            if label not in TABLES:
                for buffer in (group.padded, group.main_grad, group.comm_buffer):
                    assert len(buffer) == world_size * group.shard_size and not buffer[len(full):].any(), label
                assert group.weight.data_ptr() == group.padded.data_ptr()
                assert group.weight.main_grad.data_ptr() == group.main_grad.data_ptr()
    for label in BANKS:
        lr_muls = [optimizer.lr_muls[label] for optimizer in ranks]
        assert torch.cat(lr_muls).equal(single_rank.lr_muls[label])

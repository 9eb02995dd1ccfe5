"""Section 11: parameter groups: when they have gradients, what they own, and the shard of each rank."""
import functools
import inspect
import types

import pytest
import torch
from common import fill_randomly, make_comm, make_engine, make_optimizer, small, started_loader, steps_of

import train_gpt as tg

BANKS = ("attn", "mlp")
TABLES = ("bigram_embed", "value_embed", "embed")

def engine_with_all_groups() -> tg.Engine:
    """Build an engine whose optimizer has a group of each class."""
    tables = tg.parse_value("tables", "rare_embed 2 40 stream 1 device 4; other_embed 3 30 1 0 host 2")
    engine = make_engine(small(tables=tables, train_files="formula:60:59:20000:1"))
    fill_randomly(engine.model)
    return engine

def test_has_gradient__true_from_a_backward_pass_to_the_update() -> None:
    """`has_gradient` is true from a backward pass to the update, for groups of every class.

    It changes nothing and checks nothing.
    """
    engine = engine_with_all_groups()
    groups = engine.optimizer.groups

    def with_gradient() -> set[str]:
        labels = [{label for label, group in groups.items() if group.has_gradient()} for _ in range(2)]
        assert labels[0] == labels[1]
        return labels[0]

    assert len({type(group) for group in groups.values()}) == 5 and with_gradient() == set()
    expected = [{*groups} - {*BANKS}, {"rare_embed"}, {*groups} - {*BANKS}, set()]    # after each step of a cycle
    with started_loader(engine.cfg, make_comm(), 8) as (loader, step_cfgs):
        for step_cfg in steps_of(loader, step_cfgs):
            engine.forward_backward(loader.next(step_cfg), step_cfg)
            assert with_gradient() == {*groups}
            engine.optim_step(step_cfg)
            assert with_gradient() == expected[step_cfg.step % 4]

def test_Optimizer__groups_own_their_state_and_refer_to_no_optimizer() -> None:
    """The tensors in `Optimizer.state` are those of the groups, and no group refers to optimizer, engine or model.

    A row-wise table stores its state in its row store.
    """
    def reachable_from(obj: object, reached_by_id: dict[int, object]) -> dict[int, object]:
        """Return all objects that are reachable through attributes, containers, closures and bound arguments."""
        if id(obj) in reached_by_id or isinstance(obj, (torch.Tensor, type, str, int, float)):
            return reached_by_id
        reached_by_id[id(obj)] = obj
        children = [*getattr(obj, "__dict__", {}).values(), getattr(obj, "__self__", None)]
        if isinstance(obj, dict):
            children += obj.values()
        elif isinstance(obj, (list, tuple)):
            children += obj
        elif isinstance(obj, functools.partial):
            children += [obj.func, *obj.args, *obj.keywords.values()]
        elif inspect.isfunction(obj):
            children += [cell.cell_contents for cell in obj.__closure__ or ()]
        for child in children:
            if not isinstance(child, types.ModuleType):
                reachable_from(child, reached_by_id)
        return reached_by_id

    engine = engine_with_all_groups()
    optimizer = engine.optimizer
    group_state = [(label, name, x) for group in optimizer.groups.values()
                   for label, state in group.state.items() for name, x in state.items()]
    assert len(group_state) == sum(map(len, optimizer.state.values()))
    assert all(optimizer.state[label][name] is x for label, name, x in group_state)
    assert {*optimizer.state} == {label for label, spec in engine.model.specs.items() if spec.optimizer != "rowwise"}
    for label, group in optimizer.groups.items():
        reachable = reachable_from(group, {})
        assert not {id(optimizer), id(engine), id(engine.model)} & reachable.keys(), label

def shard_of(optimizer: tg.Optimizer, label: str) -> torch.Tensor:
    """Return this rank's shard of a parameter."""
    group = optimizer.groups[label]
    return group.shard if label in optimizer.sharded_groups else group.table.shard

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
        full = shard_of(single_rank, label)
        shards = [shard_of(optimizer, label) for optimizer in ranks]
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
        lr_muls = [optimizer.groups[label].lr_muls for optimizer in ranks]
        assert torch.cat(lr_muls).equal(single_rank.groups[label].lr_muls)

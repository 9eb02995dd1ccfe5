"""Compiled graphs are the trainer: as they are traced they compute what its code does, bit for bit."""
import functools
from dataclasses import replace

import torch
from common import executor, preset, random_batch

import train_gpt as tg


def test_a_traced_stage_of_tiny_is_the_eager_one_bit_for_bit(monkeypatch):
    """Backend aot_eager: the graphs as they are traced, run operation by operation.

    Both take the branches that are for compilers, which are to fuse: of the loss, other operations.
    """
    cfg = preset("tiny", dtype="bfloat16")
    schedule = tg.Schedule(cfg)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    found = {}
    for compiled in (0, 1):
        torch._dynamo.reset()
        with monkeypatch.context() as patch:
            if not compiled:
                patch.setattr(torch.compiler, "is_compiling", lambda: True)
            ex = executor(replace(cfg, compile=compiled))
            ex.model.set_initial_values(cfg.seed, ex.shard)
            for step in range(cfg.adam_every):
                losses = ex.forward_backward(random_batch(cfg, step, 2, 64), schedule.at(step))
                ex.optim_step(schedule.at(step))
        found[compiled] = dict(ex.state_tensors(), losses=losses.slot_sums)
    torch._dynamo.reset()
    assert found[0].keys() == found[1].keys()
    different = [name for name, x in found[0].items() if not torch.equal(x, found[1][name])]
    assert not different

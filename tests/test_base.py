"""Section 6: errors, agreement of ranks, compiled functions."""
import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from common import expect_error, fill_randomly, make_comm, make_engine, planned, random_batch, small, unequal
from forked_ranks import Rank

import train_gpt as tg

def test_check__exit_status_of_errors() -> None:
    """2 for settings, data and launch, 1 for everything else."""
    tg.check(True, "fine")
    for error, status in ((tg.TrainerError, 1), (tg.ConfigError, 2), (tg.OutOfData, 2)):
        with expect_error(error, "wrong") as caught:
            tg.check([], "wrong", error)
        assert caught.value.exit_status == status and isinstance(caught.value, tg.TrainerError)

def test_print0__prints_on_rank_0(capsys) -> None:
    for rank in range(2):
        make_comm(rank, 2).print0(f"rank {rank}")
    assert capsys.readouterr().out == "rank 0\n"

def disagree(rank: Rank, odd_rank: int, changes: dict[str, str]) -> str:
    facts = {"--seed": "1", "data": "d1", "torch": "2"} | (changes if rank.rank == odd_rank % rank.world else {})
    comm = rank.comm()
    comm.check_agreement(dict(source="s"))
    with expect_error(tg.ConfigError) as caught:
        comm.check_agreement(facts)
    return str(caught.value)

@pytest.mark.parametrize("odd_rank, changes", [(-1, dict(data="d2")), (0, {"--seed": "7", "torch": "3"})], ids=str)
def test_check_agreement__every_rank_raises(ranks, odd_rank, changes) -> None:
    for message in ranks(2, disagree, odd_rank=odd_rank, changes=changes):
        assert message.startswith(f"ranks have different {', '.join(changes)}:")


# ---- compiled functions ----------------------------------------------------------------------------------------------
def test_compile_fn__graphs_are_the_trainer_and_documents_do_not_recompile(three_layers, monkeypatch) -> None:
    """Bit for bit: backend aot_eager runs traced graphs operation by operation, and eager code, too, takes the branches
    for compilers."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    tensors_by_side = []
    for compile_flag in (0, 1):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        graph_counts = []                    # after each step
        with monkeypatch.context() as patch:
            if not compile_flag:
                patch.setattr(torch.compiler, "is_compiling", lambda: True)
            cfg = small(num_scheduled_steps=30, dtype="bfloat16", compile=compile_flag)
            engine = make_engine(cfg)
            fill_randomly(engine.model, 0, engine.comm)
            losses = {}
            for step_cfg in map(tg.Schedule(cfg).at, range(2 * cfg.adam_every)):
                step_cfg = replace(step_cfg, mtp_weights=(1.0, 0.5 - step_cfg.step / 10))  # one stage's weights change
                if step_cfg.step % cfg.adam_every == 0:
                    batch = planned(cfg, random_batch(cfg, step_cfg.step, 8, 16), step_cfg.tied)
                repeats = batch.cu_seqlens[:, -1:].expand(-1, 2 * step_cfg.step)
                batch = batch._replace(cu_seqlens=torch.cat([batch.cu_seqlens, repeats], dim=1))
                losses[f"losses of step {step_cfg.step}"] = engine.forward_backward(batch, step_cfg).seq_sums
                engine.optim_step(step_cfg)
                graph_counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
            tensors_by_side.append(losses | engine.tensors())
    torch._dynamo.reset()
    assert unequal(*tensors_by_side) == []
    first_cycle, second_cycle = np.split(np.array(graph_counts), 2)       # graph counts of the compiled side
    assert first_cycle[-1] > 0 and (second_cycle == first_cycle[-1]).all(), "only the first cycle compiles"

"""Section 6: errors, the console, timeouts and waits, agreement of ranks, compiled functions."""
import errno
import functools
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import Mock, call

import numpy as np
import pytest
import torch
from common import (DeviceEvent, expect_error, few_layers, fill_randomly, make_comm, make_engine, random_batch, small,
                    unequal)
from forked_ranks import Rank

import train_gpt as tg

SLOW = [pytest.param(world_size, marks=pytest.mark.slow) for world_size in (3, 4)]

def test_TrainerError__exit_status_and_long_values() -> None:
    """The exit status is 2 for invalid input and 1 for a failed run. Long values are truncated in the message."""
    assert (tg.ConfigError.exit_status, tg.DataError.exit_status, tg.RunError.exit_status) == (2, 2, 1)
    assert len(str(tg.DataError("x", "y" * 10**6, "z", "w"))) < 1300

def test_print0__escapes_control_characters(capsys) -> None:
    """A sample or a file name may come from somebody else, and a terminal would execute its control characters."""
    make_comm().print0("a\x1b[2J\tb\r\nc")
    assert capsys.readouterr().out == "a\\x1b[2J\tb\\x0d\nc\n"

@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_print0__ignores_a_full_console_but_help_fails(monkeypatch, capsys) -> None:
    """Rank 0 prints, and continues if the console is full. --help cannot be printed then, and raises a RunError."""
    for rank in range(2):
        make_comm(rank, 2).print0(f"rank {rank}")
    assert capsys.readouterr().out == "rank 0\n"
    monkeypatch.setattr("sys.stdout", open("/dev/full", "w", buffering=1))
    make_comm().print0("lost")
    with pytest.raises(tg.RunError):
        tg.load_config(["--help"])

@pytest.mark.parametrize("available", [("_set_pg_timeout",), ("_set_pg_timeout", "set_timeout")])
def test_set_timeout__prefers_the_public_function_of_torch(monkeypatch, available) -> None:
    """Both process groups get the timeout, through the private function only if torch has no public one."""
    calls = Mock()
    monkeypatch.delattr(tg.dist, "set_timeout", raising=False)
    for owner, name in ((tg.dist.distributed_c10d, "_set_pg_timeout"), (tg.dist, "set_timeout")):
        if name in available:
            monkeypatch.setattr(owner, name, partial(calls, name), raising=False)
    comm = replace(make_comm(0, 2), loader_group="plans")
    comm.set_timeout(5.0)
    assert calls.mock_calls == [call(available[-1], timedelta(seconds=5), group) for group in (None, "plans")]
    assert comm.timeout == 5


# ---- waits -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("world_size, expected", [(1, "waiting for the device"), (2, "lost another rank")])
def test_wait_for__raises_before_the_current_timeout(monkeypatch, world_size, expected) -> None:
    """A timeout of 10 s ends the wait after 8 s, because NCCL ends the process after 10 s."""
    comm = make_comm(0, world_size)
    comm.timeout = 10.0
    event = DeviceEvent(monkeypatch, 107.9)
    comm.wait_for(event)
    assert event.query() and event.clock.now < 108
    stuck = DeviceEvent(monkeypatch)
    with expect_error(tg.RunError, expected, "no response from cpu after 8.0 s", "--comm_timeout"):
        comm.wait_for(stuck)
    assert 108 <= stuck.clock.now < 109, "NCCL would end the process at 110"

def test_result_with_timeout__its_timeout_and_one_raised_by_the_work() -> None:
    with expect_error(tg.RunError, "waiting", "no result after 0.1 s", "--comm_timeout"):
        tg.result_with_timeout(Future(), 0.1, "waiting")
    failed = Future()
    failed.set_exception(TimeoutError(errno.ETIMEDOUT, "Connection timed out", "a shard"))
    with pytest.raises(TimeoutError, match="a shard"):
        tg.result_with_timeout(failed, 0.1, "waiting")


# ---- agreement of ranks ----------------------------------------------------------------------------------------------
def disagree(rank: Rank, odd_rank: int, changes: dict[str, str]) -> str:
    """Return the message of check_agreement when one rank has different facts."""
    facts = {"--seed": "1", "data_sha256": "d1", "torch": "2"}
    if rank.rank == odd_rank % rank.world:
        facts |= changes
    with pytest.raises(tg.ConfigError) as caught:
        rank.comm().check_agreement({name: fact for name, fact in facts.items() if fact})
    return str(caught.value)

@pytest.mark.parametrize("world_size", [2, *SLOW, 8], ids="W{}".format)
@pytest.mark.parametrize("odd_rank, changes, name, stated", [
    (-1, dict(data_sha256="d2"), "data_sha256", ("d1", "d2")), (0, {"--seed": "7"}, "--seed", ("7", "1")),
    (-1, dict(torch=""), "torch", ("2", "None"))], ids=["last", "first", "missing"])
def test_check_agreement__every_rank_raises(ranks, world_size, odd_rank, changes, name, stated) -> None:
    """The message of every rank names the field, both values, both ranks, and what to do."""
    first, other = stated
    for error in ranks(world_size, disagree, odd_rank=odd_rank, changes=changes):
        what, found, _, hint = error.split("\n")
        assert what.endswith(f"disagree about {name}") and "same flags" in hint
        assert f"{first} on rank 0, {other} on rank {world_size - 1 if odd_rank else 1}" in found


# ---- compiled functions ----------------------------------------------------------------------------------------------
def test_compile_fn__graphs_are_the_trainer_bit_for_bit_and_documents_do_not_recompile(monkeypatch) -> None:
    """Compiled graphs compute the bits of eager code, and a change of documents causes no recompilation.

    Backend aot_eager runs the traced graphs operation by operation. The model has each kind of layer once. Both sides
    take the branches for compilers, which expect fusion and compute the loss with other operations.
    """
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    tensors_by_side = []
    for compile_flag in (0, 1):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        graph_counts = []                    # after each step
        with few_layers(), monkeypatch.context() as patch:
            if not compile_flag:
                patch.setattr(torch.compiler, "is_compiling", lambda: True)
            cfg = small(num_scheduled_steps=30, dtype="bfloat16", compile=compile_flag)
            engine = make_engine(cfg)
            fill_randomly(engine.model, 0, engine.comm)
            tensors = {}
            for step_cfg in map(tg.Schedule(cfg).at, range(2 * cfg.adam_every)):
                step_cfg = replace(step_cfg, mtp_weights=(1.0, 0.5 - step_cfg.step / 10))  # one stage's weights change
                batch = random_batch(cfg, step_cfg.step, 8, 16)
                repeats = batch.cu_seqlens[:, -1:].expand(-1, 2 * step_cfg.step)
                batch = batch._replace(cu_seqlens=torch.cat([batch.cu_seqlens, repeats], dim=1))
                tensors[f"losses of step {step_cfg.step}"] = engine.forward_backward(batch, step_cfg).seq_sums
                engine.optim_step(step_cfg)
                graph_counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
            for name, x in engine.state_tensors().items():
                tensors[name] = x.clone()
            tensors_by_side.append(tensors)
    torch._dynamo.reset()
    assert unequal(*tensors_by_side) == []
    first_cycle, second_cycle = np.split(np.array(graph_counts), 2)       # graph counts of the compiled side
    assert first_cycle[-1] > 0 and (second_cycle == first_cycle[-1]).all(), "only the first cycle compiles"

"""The training loop of section 5, with a simulated engine, and the warm-up of section 13."""
import itertools
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import ROOT, SimulatedTime, make_comm, make_engine, make_log, preset

import train_gpt as tg

sys.path.insert(0, str(ROOT / "records"))
from tools import page

class FakeTraining:
    """Replaces engine, loader and validation set of the training loop, and records the calls of each step.

    The first batch takes 3 simulated s, forward_backward 1 s, optim_step 2 s, and a validation 40 s.
    """
    def __init__(self, time: SimulatedTime) -> None:
        self.time = time
        self.steps = itertools.count()
        self.calls: list[str] = []
        self.evaluated: list[tg.StepConfig] = []

    def start(self) -> None:
        self.time.work(3)

    def next(self) -> int:
        return next(self.steps)

    def forward_backward(self, batch: int, step_cfg: tg.StepConfig) -> tg.StepLoss:
        assert batch == step_cfg.step
        self.time.work(1)
        self.calls.append("forward_backward")
        return tg.StepLoss(torch.tensor([(batch + 1.0) * step_cfg.seq_len]), torch.tensor(0.5))

    def next_step_plans(self) -> str:
        self.calls.append("next_step_plans")
        return "plans"

    def optim_step(self, step_cfg: tg.StepConfig) -> None:
        self.time.work(2)
        self.calls.append("optim_step")

    def fetch_rows(self, plans: str) -> None:
        self.calls.append(f"fetch_rows {plans}")

    def batches(self, step_cfg: tg.StepConfig) -> tg.StepConfig:
        return step_cfg

    def text_metrics(self, loss: float) -> dict[str, float]:
        return {}

    def evaluate(self, batches: tg.StepConfig, step_cfg: tg.StepConfig) -> float:
        assert batches == step_cfg
        self.evaluated.append(step_cfg)
        self.time.work(40)
        return 7.0 - step_cfg.step

@pytest.mark.parametrize("changes, validated, checkpointed", [
    (dict(val_every=2), [0, 2, 4, 5], []), (dict(val_every=0, checkpoint_every=2), [5], [2, 4]),
    (dict(val_every=2, checkpoint_every=4, max_steps=3), [0, 2, 3], [2]),
    (dict(val_every=0, checkpoint_every=100, max_steps=4), [4], [4])])
def test_train_loop__times_training_but_not_validations_and_checkpoints(monkeypatch, tmp_path, changes, validated,
                                                                        checkpointed) -> None:
    """A checkpoint has the clock and the log of its step. The last one is written where the last whole cycle ends."""
    time = SimulatedTime(monkeypatch)
    training = FakeTraining(time)
    checkpoints = []

    def write_checkpoint(engine: FakeTraining, clock: tg.Clock, log: tg.Log) -> None:
        time.work(20)
        assert engine is training
        assert all(step_cfg.step <= log.steps_done for step_cfg in training.evaluated), "no later step is validated yet"
        checkpoints.append((log.steps_done, clock.ms))

    monkeypatch.setattr(tg, "write_checkpoint", write_checkpoint)
    log, written = make_log(tmp_path, num_scheduled_steps=4, num_extension_steps=1, **changes)
    clock = tg.Clock(make_comm())
    loss, out_of_data = tg.train_loop(training, training, training, clock, log)
    steps = validated[-1]
    assert (loss, out_of_data) == (7.0 - steps, None)
    assert training.evaluated == [log.schedule.at(step) for step in validated]
    assert (training.evaluated[-1].long_window > log.schedule.at(4).long_window) == (
        steps == 5), "the window of the final validation is wider"
    assert checkpoints == [(step, 3000 + 3000 * step) for step in checkpointed]
    assert training.calls == steps * ["forward_backward", "next_step_plans", "optim_step", "fetch_rows plans"]
    found = [(e["step"], e["train_time_ms"], e["train_loss"]) for e in written.of("step")]
    seqs = log.schedule.cfg.seqs_per_step
    assert found == [(step, 3000 + 3000 * step, step / seqs) for step in range(1, steps + 1)]
    found = [(e["step"], e["train_time_ms"], e["val_loss"]) for e in written.of("val")]
    assert found == [(step, 3000 + 3000 * step, 7.0 - step) for step in validated]
    first, evaluation = written.of("phase")
    assert first == written.events[0] == dict(type="phase", name="first batch", ms=3000.0, timed=True)
    assert (evaluation["name"], evaluation["timed"]) == ("evaluation", False)

def graph_key(x: Any) -> Any:
    """Return what a graph depends on: shapes (without dynamic dimensions), dtypes, requires_grad, types, attention."""
    if isinstance(x, torch.Tensor):
        dynamic = getattr(x, "_dynamo_weak_dynamic_indices", ())
        shape = tuple(None if i in dynamic else size for i, size in enumerate(x.shape))
        return shape, x.dtype, x.requires_grad
    if isinstance(x, tg.Batch):
        return graph_key((x.tokens, x.targets, x.cu_seqlens, x.lookup_rows))
    if isinstance(x, dict):
        return tuple((name, graph_key(value)) for name, value in x.items())
    if isinstance(x, (tg.AttentionArgs, str)):
        return x
    return tuple(map(graph_key, x)) if isinstance(x, (tuple, list)) else type(x)

def test_warm_up__compiles_every_graph_of_the_training_loop(three_layers, tmp_path, monkeypatch) -> None:
    """It begins with the largest batch, so that a lack of memory is found in the first minute."""
    seen = set()

    def recording_compile(fn: Callable, **_: Any) -> Callable:
        def recorded(*args: Any) -> Any:
            seen.add((fn.__qualname__, graph_key(args), graph_key(tg.ATTENTION_ARGS)))    # the reference reads these
            return fn(*args)
        return recorded

    monkeypatch.setattr(torch, "compile", recording_compile)
    cfg = preset(adam_every=2, compile=1)
    engine = make_engine(cfg)
    log, written = make_log(tmp_path)
    tg.warm_up(cfg, make_comm(), engine, log)
    names = [e["name"] for e in written.events]
    cycles = [re.fullmatch(r"warm-up of stage (\d) \((\d) of (\d)\)", name) for name in names[:-1]]
    assert names[-1] == "warm-up of validation" and len(set(names)) == len(names)
    assert [(int(m[2]), int(m[3])) for m in cycles] == [(i, len(cycles)) for i in range(1, len(cycles) + 1)]
    assert all(name.startswith(page.PART) for name in names)
    stages = [int(m[1]) for m in cycles]
    batches = [cfg.stages[stage - 1].batch_tokens for stage in stages]
    assert batches[0] == max(batches), "the largest batch is first"

    warmed_up = seen.copy()
    seen.clear()
    engine.reset(0)
    clock = tg.Clock(make_comm())
    loader = tg.Loader(cfg, make_comm(), tg.read_shard_headers(cfg.train_files), log.schedule.cycles(0))
    validation = tg.ValidationSet(cfg, make_comm(), tg.read_shard_headers(cfg.val_files))
    tg.train_loop(engine, loader, validation, clock, log)
    loader.close()
    assert len(seen) > 10 and seen <= warmed_up

"""Sections 5, 12 and 13: the clock, the logs, the training loop, warm-up, time budgets and sampling."""
import contextlib
import functools
import math
import re
import shutil
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from common import ROOT, DeviceEvent, Run, SimulatedTime, expect_error, launch, make_comm, make_engine, noop, preset

import train_gpt as tg

sys.path.insert(0, str(ROOT / "records"))
from tools import consistency, page, read

def losses(*seq_sums: float, tokens: int = 10) -> tg.StepLoss:
    """Return a step loss whose next-token loss is half of the multi-token loss."""
    return tg.StepLoss(torch.tensor(seq_sums), torch.tensor(sum(seq_sums) / 2), tokens)

class TextData:
    """Validation data for the log and the training loop. `batches` returns the StepConfig it is called with."""
    def __init__(self, **extra: float) -> None:
        self.extra = extra

    def text_metrics(self, loss: float) -> dict[str, float]:
        return self.extra

    def batches(self, step_cfg: tg.StepConfig) -> tg.StepConfig:
        return step_cfg

class FakeTraining:
    """Replaces the loader and the engine of the training loop, in simulated time.

    The first batch takes 3 s, forward_backward 1 s, optim_step 2 s, and a validation 40 s. It records the calls of each
    step and the cycles that are passed to the loader.
    """
    def __init__(self, time: SimulatedTime) -> None:
        self.time = time
        self.cycles: list[list[tg.StepConfig]] = []
        self.calls: list[str] = []
        self.evaluated: list[tg.StepConfig] = []

    def start(self, cycle: list[tg.StepConfig]) -> None:
        self.cycles.append(cycle)
        self.time.work(3)

    def advance(self, following: list[tg.StepConfig]) -> None:
        self.cycles.append(following)

    def next(self, step_cfg: tg.StepConfig) -> int:
        return step_cfg.step

    def forward_backward(self, batch: int, step_cfg: tg.StepConfig) -> tg.StepLoss:
        assert batch == step_cfg.step
        self.time.work(1)
        self.calls.append("forward_backward")
        return losses(batch + 1.0)

    def next_plans(self) -> str:
        self.calls.append("next_plans")
        return "plans"

    def prefetch_rows(self, plans: str) -> None:
        self.calls.append(f"prefetch_rows {plans}")

    def optim_step(self, step_cfg: tg.StepConfig) -> None:
        self.time.work(2)
        self.calls.append("optim_step")

    def fetch_rows(self, plans: str) -> None:
        self.calls.append(f"fetch_rows {plans}")

    def evaluate(self, batches: tg.StepConfig, step_cfg: tg.StepConfig) -> float:
        assert batches == step_cfg
        self.evaluated.append(step_cfg)
        self.time.work(40)
        return 7.0 - step_cfg.step

CALLS_OF_STEP = ["forward_backward", "next_plans", "prefetch_rows plans", "optim_step", "fetch_rows plans"]

def make_log(tmp_path: Path, rank: int = 0, **changes: Any) -> tg.Log:
    """Build the log of a run with preset `tiny`; its cycles have two steps by default."""
    schedule = tg.Schedule(preset(**dict(adam_every=2) | changes))
    return tg.Log(tmp_path / "run", make_comm(rank, 2 if rank else 1), schedule, {"train_gpt.py": b"source"})

def events(tmp_path: Path) -> list[dict[str, Any]]:
    return Run(tmp_path / "run", 0, "", "").events

def lines(tmp_path: Path) -> list[str]:
    return Run(tmp_path / "run", 0, "", "").lines


# ---- clock ----------------------------------------------------------------------------------------------------------
def test_Clock__adds_up_the_time_between_start_and_stop(monkeypatch) -> None:
    """Start and stop wait 4 s each for the remaining work of the device. Only the wait of stop is training time."""
    time = SimulatedTime(monkeypatch)
    clock = tg.Clock(SimpleNamespace(synchronize=functools.partial(time.work, 4)), 1000.0)
    for total in (8000, 15_000):
        clock.start()
        time.work(3)
        assert clock.ms == pytest.approx(total - 4000)
        clock.stop()
        time.work(50)
        assert clock.ms == pytest.approx(total)

def test_predict_next_cycle_start_ms__assumes_the_length_of_the_last_cycle(monkeypatch) -> None:
    """The predicted time is the time now plus the duration of the last cycle."""
    time = SimulatedTime(monkeypatch)
    clock = tg.Clock(make_comm(), 1000.0)
    clock.start()
    for seconds, expected in ((0, 1000), (3, 7000), (5, 14_000), (1, 11_000)):
        time.work(seconds)
        assert clock.predict_next_cycle_start_ms() == pytest.approx(expected)

@pytest.mark.parametrize("changes, validated, checkpointed", [
    (dict(val_every=2), [0, 2, 4, 5], []), (dict(val_every=0, checkpoint_every=2), [5], [2, 4]),
    (dict(val_every=2, checkpoint_every=4, max_steps=3), [0, 2, 3], []),
    (dict(val_every=2, checkpoint_every=2), [0, 2, 4, 5], [2, 4])])
def test_train_loop__times_training_but_not_validations_and_checkpoints(monkeypatch, tmp_path, changes, validated,
                                                                            checkpointed) -> None:
    """Validations take 40 s and checkpoints 20 s, which the clock does not count.

    A checkpoint has the clock and the log of its step.
    """
    time = SimulatedTime(monkeypatch)
    training = FakeTraining(time)
    checkpoints = []

    def write_checkpoint(run_dir: Path, run_id: str, content: dict[str, Any], engine: FakeTraining,
                         step_cfg: tg.StepConfig) -> None:
        time.work(20)
        facts = content["fingerprint"], content["cycle_progress"], engine, run_id, run_dir
        assert facts == (dict(torch="2", seed="0"), [], training, "id", tmp_path / "run")
        assert sum(step_cfg.step < other.step for other in training.evaluated) == 0, "no later step is validated yet"
        checkpoints.append((step_cfg.step, content["log"]["steps_done"], content["train_time_ms"]))

    monkeypatch.setattr(tg, "write_checkpoint", write_checkpoint)
    profiled = []
    profiler = SimpleNamespace(step=functools.partial(profiled.append, None))
    log = make_log(tmp_path, num_scheduled_steps=4, num_extension_steps=1, **changes)
    clock = tg.Clock(make_comm())
    info = SimpleNamespace(run_id="id", fingerprint=dict(torch="2"))
    loss, out_of_data = tg.train_loop(info, training, training, TextData(), clock, log, profiler)
    steps = validated[-1]
    assert (loss, out_of_data, len(profiled)) == (7.0 - steps, None, steps - 1)
    assert training.evaluated == [log.schedule.at(step) for step in validated]
    assert (training.evaluated[-1].long_window > log.schedule.at(4).long_window) == (
        steps == 5), "the window of the final validation is wider"
    assert checkpoints == [(step, step, 3000 + 3000 * step) for step in checkpointed]
    assert training.calls == steps * CALLS_OF_STEP
    assert [step_cfg.step for step_cfg in sum(training.cycles, [])] == list(range(steps)), "each step is loaded once"
    assert [len(cycle) for cycle in training.cycles] == [2, 2, 1, 0] if steps == 5 else [2, 1, 0]

    kinds = dict(step="train_loss", val="val_loss")
    loss_events = [e for e in events(tmp_path) if e["type"] in kinds]
    losses_found = [(e["type"], e["step"], e["train_time_ms"], e[kinds[e["type"]]]) for e in loss_events]
    expected_steps = [("step", step, 3000 + 3000 * step, step / 10) for step in range(1, steps + 1)]
    expected_validations = [("val", step, 3000 + 3000 * step, 7.0 - step) for step in validated]
    assert sorted(losses_found) == sorted(expected_steps + expected_validations)
    phases = [(e["name"], e["timed"]) for e in events(tmp_path) if e["type"] == "phase"]
    assert phases == [("first batch", True), *len(checkpointed) * [("checkpoint", False)], ("evaluation", False)]
    assert events(tmp_path)[0] == dict(type="phase", name="first batch", ms=3000.0, timed=True)



# ---- waits for the device -------------------------------------------------------------------------------------------

def test_flush__raises_if_a_loss_does_not_arrive(monkeypatch, tmp_path) -> None:
    """`write_aborted` then writes the log without this loss."""
    log = make_log(tmp_path)
    log.step(losses(10.0), 100.0)
    fields, *rest, _ = log.pending.pop()
    log.pending.append((fields, *rest, DeviceEvent(monkeypatch)))
    with expect_error(tg.RunError, "waiting for the device", "--comm_timeout"):
        log.flush()
    log.write_aborted("the cause")
    assert [event["type"] for event in events(tmp_path)] == ["aborted"]

def test_Clock__stop_waits_for_the_device_until_the_timeout(monkeypatch) -> None:
    """`stop` waits for an event of the current stream, then synchronizes the device. It raises at the timeout."""
    device = torch.device("cuda", 0)
    clock = tg.Clock(tg.Communicator(device))
    synchronized = []
    monkeypatch.setattr(torch.cuda, "synchronize", synchronized.append)
    for event_time, completes in ((103.0, True), (math.inf, False)):
        event = DeviceEvent(monkeypatch, event_time)
        stream = SimpleNamespace(record_event=Mock(return_value=event))
        monkeypatch.setattr(torch.cuda, "current_stream", {device: stream}.get)
        clock.ms_at_last_stop, clock.start_s = 0.0, event.clock.now
        with contextlib.nullcontext() if completes else expect_error(tg.RunError, "waiting for the device"):
            clock.stop()
        assert (clock.ms == pytest.approx(3000, abs=1)) == completes
    assert synchronized == [device], "only after the event, to wait for other streams too"


# ---- log ------------------------------------------------------------------------------------------------------------
def test_Log__writes_steps_one_cycle_late_and_all_before_a_validation(tmp_path) -> None:
    """A loss is read one cycle, two steps, after its step, so that logging does not synchronize."""
    log = make_log(tmp_path)
    for k in range(1, 6):
        log.step(losses(10.0 * k, 20.0, tokens=10), 100.0 * k)
        assert [e["step"] for e in events(tmp_path)] == list(range(1, k - 1))
    log.validation(4.25, 512.3456, TextData(val_bpb=1.5, unigram_nats=6.0))
    assert events(tmp_path)[:5] == [
        dict(type="step", step=k, train_time_ms=100.0 * k, tokens=10 * k, train_loss=k + 2.0,
             train_loss_next=k / 2 + 1) for k in range(1, 6)]
    assert events(tmp_path)[5:] == [dict(type="val", step=5, val_loss=4.25, train_time_ms=512.346, val_bpb=1.5,
                                         unigram_nats=6.0)]
    assert lines(tmp_path) == [f"step:{k}/12 train_time:{100 * k}ms step_avg:100.00ms" for k in range(1, 6)] + [
        "step:5/12 val_loss:4.2500 train_time:512ms step_avg:102.47ms"]

@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_Log__a_nonfinite_loss_raises_with_the_last_validation_loss(tmp_path, bad) -> None:
    """The logs end with the last loss that was read. A nonfinite validation loss raises too, and is not logged."""
    log = make_log(tmp_path)
    log.validation(5.125, 0.0, TextData())
    for loss in (10.0, 10.0, bad, 10.0):
        log.step(losses(loss), 0.0)
    with expect_error(tg.RunError, "training loss of step 2", str(bad), "5.1250 at step 0", "--adam_lr",
                      "--dtype=float32"):
        log.step(losses(10.0), 0.0)
    log.write_aborted("RunError: NaN")
    assert [e.get("step") for e in events(tmp_path)] == [0, 1, 2, 5], "the log has all losses that were read"
    assert events(tmp_path)[-1] == dict(type="aborted", step=5, cause="RunError: NaN")
    assert lines(tmp_path)[-1] == "aborted after step 5: RunError: NaN"
    log = make_log(tmp_path / "other")
    with expect_error(tg.RunError, "validation loss at step 0", str(bad), "none"):
        log.validation(bad, 0.0, TextData())
    assert events(tmp_path / "other") == []

@pytest.mark.parametrize("terminal", [False, True])
def test_Log__lines_on_the_console(tmp_path, monkeypatch, capsys, terminal) -> None:
    """The console shows one step line in 20, or on a terminal a single progress line that is overwritten.

    The progress line is cleared before any other line.
    """
    monkeypatch.setattr(tg.sys.stderr, "isatty", lambda: terminal)
    log = make_log(tmp_path, num_scheduled_steps=95, num_extension_steps=5)
    for step in range(1, 101):
        log.step(losses(25.0), 50.0 * step)
    log.flush()
    log.show_progress("longer than the terminal " * 100)
    log.info("a line of text")
    log.close()
    shown = capsys.readouterr()
    assert max(map(len, shown.err.split("\r"))) < shutil.get_terminal_size().columns + len("\x1b[K")
    assert shown.out.endswith("a line of text\n") and len(lines(tmp_path)) == 101, "the log has every step"
    printed_steps = [line.split("/")[0] for line in shown.out.splitlines()[:-1]]
    assert printed_steps == ([] if terminal else [f"step:{step}" for step in range(5, 101, 5)])
    progress_text = "5 s left, train_loss:1.250"
    progress_line = f"\r\x1b[Kstep:4/100 {progress_text}\r"
    assert terminal or shown.out.startswith(f"step:5/100 train_time:250ms step_avg:50.00ms {progress_text}\n")
    found = progress_line in shown.err, shown.err.endswith("\r\x1b[K\r"), "\n" in shown.err
    assert found == (terminal, terminal, False)

def test_write_aborted__writes_one_event_and_closes_the_log(tmp_path) -> None:
    """Any thread may call it, even while another is stuck in a write. It does not change a log that was closed."""
    log = make_log(tmp_path)
    log.step(losses(1.0), 10.0)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(log.write_aborted, map("cause {}".format, range(8))))
    log.flush()
    log.info("too late")
    event, = events(tmp_path)
    assert event["type"] == "aborted" and event["cause"] in map("cause {}".format, range(8))
    assert len(lines(tmp_path)) == 1
    closed = make_log(tmp_path / "closed")
    closed.close()
    closed.write_aborted("the sample failed")
    assert events(tmp_path / "closed") == []


# ---- warm-up --------------------------------------------------------------------------------------------------------
def graph_key(x: Any) -> Any:
    """Return the properties of an argument that a graph depends on. If one of them changes, torch recompiles.

    They are shapes (without dimensions that are marked dynamic), dtypes, requires_grad, types and attention arguments.
    """
    if isinstance(x, torch.Tensor):
        dynamic = getattr(x, "_dynamo_weak_dynamic_indices", ())
        shape = tuple(None if i in dynamic else size for i, size in enumerate(x.shape))
        return shape, x.dtype, x.requires_grad
    if isinstance(x, tg.Batch):
        return graph_key((x.tokens, x.targets, x.cu_seqlens, x.row_index, x.sign_ids))
    if isinstance(x, dict):
        return tuple((name, graph_key(value)) for name, value in x.items())
    if isinstance(x, (tuple, list)):
        return tuple(map(graph_key, x))
    return x if isinstance(x, (tg.AttentionArgs, str)) else type(x)

@pytest.mark.parametrize("changes", [
    dict(), dict(num_extension_steps=0),
    *(pytest.param(slow, marks=pytest.mark.slow) for slow in (dict(micro_batch_size=3), dict(max_doc_len=2)))],
    ids=str)
def test_warm_up__compiles_every_graph_of_the_training_loop(tmp_path, monkeypatch, changes) -> None:
    """Training and validation compile no graph that the warm-up has not compiled.

    The warm-up begins with the largest batch, so that a lack of memory is found in the first minute.
    """
    seen = set()

    def recording_compile(fn: Callable, **_: Any) -> Callable:
        def recorded(*args: Any) -> Any:
            seen.add((fn.__qualname__, graph_key(args)))
            return fn(*args)
        return recorded

    monkeypatch.setattr(torch, "compile", recording_compile)
    cfg = preset(adam_every=2, compile=1, **changes)
    engine = make_engine(cfg)
    log = make_log(tmp_path, **changes)
    tg.warm_up(cfg, make_comm(), engine, log)
    names = [e["name"] for e in events(tmp_path)]
    cycles = [re.fullmatch(r"warm-up of stage (\d) \((\d) of (\d)\)", name) for name in names[:-1]]
    assert names[-1] == "warm-up of validation" and len(set(names)) == len(names)
    assert [(int(m[2]), int(m[3])) for m in cycles] == [(i, len(cycles)) for i in range(1, len(cycles) + 1)]
    assert all(map(consistency.UNTIMED_PHASES.fullmatch, names)) and all(name.startswith(page.PART) for name in names)
    stages = [int(m[1]) for m in cycles]
    batches = [cfg.stages[stage - 1].batch_tokens for stage in stages]
    assert batches[0] == max(batches), "the largest batch is first"

    warmed_up = seen.copy()
    seen.clear()
    clock = tg.Clock(make_comm())
    loader = tg.Loader(cfg, make_comm(), tg.read_shard_headers(cfg.train_files))
    validation = tg.ValidationSet(cfg, make_comm(), tg.read_shard_headers(cfg.val_files))
    tg.train_loop(None, loader, engine, validation, clock, log)
    loader.close()
    assert len(seen) > 10 and seen <= warmed_up


# ---- time budget ----------------------------------------------------------------------------------------------------
def simulate_training(schedule: tg.Schedule, clock: tg.Clock, time: SimulatedTime,
                      speed: Callable[[float], float]) -> list[tg.StepConfig]:
    """Train in simulated time; return the step configs. speed: maps the used fraction of the budget to s per step."""
    done = []
    cycle = tg.schedule_cycle(0, schedule, clock)
    while cycle:
        # As in the training loop, the next cycle is scheduled at the start of the current one.
        next_cycle = tg.schedule_cycle(cycle[0].step + schedule.cycle_steps, schedule, clock)
        for step_cfg in cycle:
            time.work(speed(clock.ms / 1000 / schedule.cfg.time_budget))
            done.append(step_cfg)
        cycle = next_cycle
    return done

def changing(early: float, late: float, at: float) -> Callable[[float], float]:
    """Build a function from the used fraction of the budget to s per step.

    It returns `early` before the fraction `at`, then `late`, both plus or minus 0.1.
    """
    def speed(fraction: float) -> float:
        return (early if fraction < at else late) + 0.1 * math.sin(1e6 * fraction)
    return speed

SPEEDS = dict(slow=changing(1.8, 1.8, 0), fast=changing(0.2, 0.2, 0))
SPEEDS |= {f"{late} from {at}": changing(1.0, late, at) for at in (0.2, 0.93) for late in (0.5, 1.3)}

@pytest.mark.parametrize("adam_every", [1, 2])
@pytest.mark.parametrize("name", SPEEDS)
def test_schedule_cycle__a_time_budget_ends_training_within_one_cycle(monkeypatch, name, adam_every) -> None:
    """Every stage is trained, and head and embedding are untied once, for constant and for changing step times."""
    schedule = tg.Schedule(preset(time_budget=270.0, num_scheduled_steps=260, num_extension_steps=10,
                                  adam_every=adam_every))
    time = SimulatedTime(monkeypatch)
    clock = tg.Clock(make_comm())
    clock.start()
    steps = simulate_training(schedule, clock, time, SPEEDS[name])
    longest_step = 1.9 if name == "slow" else 1.4
    assert abs(clock.ms / 1000 - 270) <= longest_step * adam_every
    assert [step_cfg.step for step_cfg in steps] == list(range(schedule.end_step))
    assert schedule.cycle_progress == sorted(schedule.cycle_progress)
    assert schedule.cycle_progress[-1] >= schedule.planned_steps
    stages = [step_cfg.stage for step_cfg in steps]
    assert stages == sorted(stages) and set(stages) == set(range(len(schedule.cfg.stages)))
    assert [step_cfg.step for step_cfg in steps if step_cfg.untie_after] == [schedule.untie_step]
    assert schedule.at(schedule.end_step).long_window == schedule.cfg.final_long_window * schedule.cfg.window_block

def test_schedule_cycle__uses_the_clock_of_rank_0(monkeypatch) -> None:
    """The clock of this rank is 40 s ahead of the clock of rank 0, which determines the progress.

    Progress that is already set, as after a checkpoint, does not depend on a clock. Progress never decreases.
    """
    time = SimulatedTime(monkeypatch)
    schedule = tg.Schedule(preset(time_budget=100.0, num_scheduled_steps=90, num_extension_steps=10), (0.0, 7.5))

    def all_gather(ms: float) -> list[float]:
        return [ms - 40_000, ms]

    clock = tg.Clock(SimpleNamespace(synchronize=noop, all_gather=all_gather), 50_000)
    clock.start()
    for first_step in (0, 2):
        cycle = tg.schedule_cycle(first_step, schedule, clock)
        assert [step_cfg.step for step_cfg in cycle] == [first_step, first_step + 1]
    time.work(2)
    assert [step_cfg.step for step_cfg in tg.schedule_cycle(4, schedule, clock)] == [4, 5]
    assert schedule.cycle_progress == pytest.approx([0.0, 7.5, 14.0]), "12 s now, and 2 s as in the last cycle"
    clock.ms_at_last_stop -= 30_000
    tg.schedule_cycle(6, schedule, clock)
    assert schedule.cycle_progress == pytest.approx([0.0, 7.5, 14.0, 14.0])

STEP_S = 0.03                            # seconds per simulated step

def only_steps_take_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a clock on which a step takes STEP_S, and everything else almost no time."""
    clock = SimulatedTime(monkeypatch, tick=1e-9)
    train_step = tg.train_step

    def timed_step(engine: tg.Engine, loader: tg.Loader, step_cfg: tg.StepConfig) -> tg.StepLoss:
        loss = train_step(engine, loader, step_cfg)
        clock.work(STEP_S)
        return loss

    monkeypatch.setattr(tg, "train_step", timed_step)

def check_budget(folder: Path, seconds: int) -> list[float]:
    """Check that a run ended within one cycle of its budget, and that it trained and logged the whole schedule.

    Returns the progress at each step.
    """
    log = Run(folder, 0, "", "")
    result, steps = log.of("result")[0], log.of("step")
    assert abs(result["train_time_ms"] / 1000 - seconds) <= 2 * STEP_S + 0.001 and result["budget_s"] == seconds
    assert log.of("budget")[-1] == dict(type="budget", seconds=float(seconds), steps=len(steps))
    progress = [e["progress"] for e in steps]
    assert progress == sorted(progress) and progress[0] < 10 and progress[-1] <= 93
    tokens = {e["tokens"] - previous["tokens"] for previous, e in zip(steps, steps[1:])}
    assert tokens == {stage.batch_tokens for stage in preset().stages}, "every stage is trained"
    read_run, = read.read_runs([folder / "log.jsonl"]).runs
    assert read_run.finished and read_run.total == result["steps"] == len(steps) and not read_run.notes
    return progress

@pytest.mark.parametrize("world_size", [1, 2])
def test_train_loop__keeps_its_time_budget_and_resumes_at_its_progress(monkeypatch, tmp_path, world_size) -> None:
    """Only the main thread reads the clock.

    Up to the checkpoint, the resumed run has the progress of the first run at each step. It continues from there.
    """
    class MainThreadClock(tg.Clock):
        @property
        def ms(self) -> float:
            assert threading.current_thread() is threading.main_thread(), "another thread reads the clock"
            return super().ms

    monkeypatch.setattr(tg, "Clock", MainThreadClock)
    only_steps_take_time(monkeypatch)
    flags = "--time_budget=3", "--num_scheduled_steps=90", "--epochs=0", "--checkpoint_every=8", "--sample_tokens=0"
    assert launch(tmp_path / "whole", world_size, *flags)[0].status == 0
    full_progress = check_budget(tmp_path / "whole", 3)
    resumed_run = launch(tmp_path / "again", world_size, f"--resume={tmp_path / 'whole'}")[0]
    event, = resumed_run.of("resumed")
    progress = [e["progress"] for e in resumed_run.of("step")]
    assert progress == sorted(progress) and progress[:event["step"] + 1] == full_progress[:event["step"] + 1]
    result, = resumed_run.of("result")
    assert event["step"] == 96 and len(full_progress) <= result["steps"] == len(progress) <= len(full_progress) + 2
    assert abs(result["train_time_ms"] - 3000) <= 2000 * STEP_S + 1


@pytest.mark.parametrize("slow_from, slow_s, late_s", [
    pytest.param(10**6, 0.0, None, marks=pytest.mark.slow), (80, 0.5, 1),
    pytest.param(80, 0.01, None, marks=pytest.mark.slow)])
def test_finish_run__warns_of_a_missed_time_budget(monkeypatch, tmp_path, slow_from, slow_s, late_s) -> None:
    """The run warns if it misses the budget by more than a cycle, because steps near the end take much longer."""
    clock = SimulatedTime(monkeypatch, tick=1e-9)
    train_step = tg.train_step
    monkeypatch.setattr(tg, "warm_up", noop)

    def timed_step(engine: tg.Engine, loader: tg.Loader, step_cfg: tg.StepConfig) -> tg.StepLoss:
        clock.work(STEP_S + slow_s * (step_cfg.step >= slow_from))
        return train_step(engine, loader, step_cfg)

    monkeypatch.setattr(tg, "train_step", timed_step)
    log, = launch(tmp_path, 1, "--time_budget=3", "--num_scheduled_steps=90", "--epochs=0", "--sample_tokens=0")
    warnings = [line for line in log.lines if line.startswith("warning: --time_budget=3 was missed by")]
    assert len(warnings) == (late_s is not None), log.lines
    if warnings:
        late_ms = log.of("result")[0]["train_time_ms"] - 3000
        assert f"missed by {late_ms / 1000:.2f} s; possible causes: other processes" in warnings[0]


# ---- sample ---------------------------------------------------------------------------------------------------------
def sampled(logits_of: Callable[[list[int]], torch.Tensor], all_gather: Callable[[Any], list] | None = None,
            token_bytes: list[bytes] | None = None, **changes: Any) -> str:
    """Generate a sample from an engine that returns logits_of(context).

    The padding of the vocabulary has the largest logits, but is never sampled.
    """
    cfg = preset(**dict(vocab_size=10, bos_id=9, sample_tokens=5) | changes)

    def next_logits(tokens: list[int], step_cfg: tg.StepConfig | None) -> torch.Tensor:
        logits = torch.full((cfg.padded_vocab,), 1e4)
        logits[:cfg.vocab_size] = logits_of(tokens)
        return logits
    comm = SimpleNamespace(all_gather=all_gather or make_comm().all_gather)
    return tg.generate(cfg, SimpleNamespace(next_logits=next_logits, comm=comm), None, token_bytes)

def count_up(tokens: list[int]) -> torch.Tensor:
    """Return logits for which the next id follows each token with certainty, and BOS follows token 4."""
    next_token = {9: 0, 4: 9}.get(tokens[-1], tokens[-1] + 1)
    return torch.where(torch.arange(10) == next_token, 0.0, -1e4)

def one_or_zero(tokens: list[int]) -> torch.Tensor:
    """Return logits of tokens 0 and 1 that differ by 1, with a probability of 0 for token 2."""
    return torch.tensor([1.0, 0.0, -1e4])

def test_generate__text_if_there_is_a_vocabulary_else_token_ids() -> None:
    """The sample ends at --sample_tokens or at a BOS token. Ranks that sample different tokens use the lowest one."""
    token_bytes = [b"a", b"bc", b"\xc3", b"\xa4", b"\xff", b"x", b"", b"", b"", b""]
    assert sampled(count_up, token_bytes=token_bytes) == "abc\u00e4\ufffd", "five tokens, bytes joined before decoding"
    assert sampled(count_up, sample_tokens=3).endswith(": 0 1 2")
    assert sampled(count_up, sample_tokens=9).endswith(": 0 1 2 3 4"), "ends at a BOS token"
    two_ranks = {0: [4, 1], 2: [3, 3]}.get
    assert sampled(count_up, two_ranks, sample_tokens=2).endswith(": 1 3"), "the lowest token of all ranks"

def test_generate__samples_from_the_softmax_at_the_temperature() -> None:
    """Samples of one seed are equal, and frequencies match the softmax. A low temperature selects the largest logit."""
    texts = [sampled(one_or_zero, None, [b"a", b"b", b""], vocab_size=3, bos_id=2, sample_tokens=4000)
             for _ in range(2)]
    p = 1 / (1 + math.exp(-1 / 0.8))
    assert texts[0] == texts[1], "the same seed gives the same sample"
    std = math.sqrt(4000 * p * (1 - p))
    assert texts[0].count("a") == pytest.approx(4000 * p, abs=4 * std)
    coldest = sampled(one_or_zero, None, [b"a", b"b", b""], vocab_size=3, bos_id=2, temperature=0.01,
                        sample_tokens=99)
    assert coldest == "a" * 99

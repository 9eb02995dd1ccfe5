"""Section 10: what is on the clock, what the logs say and when, time budgets, warm-up, and the sample."""
import contextlib
import functools
import math
import shutil
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from common import ROOT, Run, SimulatedTime, expect_error, launch, make_comm, make_engine, noop, preset

import train_gpt as tg

sys.path.insert(0, str(ROOT / "records"))
from tools import read

def losses(*seq_sums: float, tokens: int = 10) -> tg.StepLoss:
    return tg.StepLoss(torch.tensor(seq_sums), tokens)

class TextData:
    """Validation data as far as the log looks at them."""
    def __init__(self, **extra: float) -> None:
        self.extra = extra

    def text_metrics(self, loss: float) -> dict[str, float]:
        return self.extra

    def batches(self, values: tg.StepConfig) -> tg.StepConfig:
        return values

class Racer:
    """Loader and engine of a race: a first batch takes 3 s, a step 1 + 2 s, a validation 40 s. Each step's calls are
    recorded, and so are the cycles that the loader gets."""
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

    def next(self, values: tg.StepConfig) -> int:
        return values.step

    def forward_backward(self, batch: int, values: tg.StepConfig) -> tg.StepLoss:
        assert batch == values.step
        self.time.work(1)
        self.calls.append("forward_backward")
        return losses(batch + 1.0)

    def next_plans(self) -> str:
        self.calls.append("next_plans")
        return "plans"

    def prefetch_rows(self, plans: str) -> None:
        self.calls.append(f"prefetch_rows {plans}")

    def optim_step(self, values: tg.StepConfig) -> None:
        self.time.work(2)
        self.calls.append("optim_step")

    def fetch_rows(self, plans: str) -> None:
        self.calls.append(f"fetch_rows {plans}")

    def evaluate(self, batches: tg.StepConfig, values: tg.StepConfig) -> float:
        assert batches == values
        self.evaluated.append(values)
        self.time.work(40)
        return 7.0 - values.step

CALLS_OF_STEP = ["forward_backward", "next_plans", "prefetch_rows plans", "optim_step", "fetch_rows plans"]

def make_log(tmp_path, rank: int = 0, **changes) -> tg.Log:
    """The log of a run of the tiny preset, in whose cycles are two steps unless given."""
    schedule = tg.Schedule(preset(**dict(adam_every=2) | changes))
    return tg.Log(tmp_path / "run", make_comm(rank, 2 if rank else 1), schedule, {"train_gpt.py": b"source"})

def events(tmp_path) -> list[dict]:
    return Run(tmp_path / "run", 0, "", "").events

def lines(tmp_path) -> list[str]:
    return Run(tmp_path / "run", 0, "", "").lines


# ---- clock ----------------------------------------------------------------------------------------------------------
def test_Clock__adds_up_what_lies_between_start_and_stop(monkeypatch):
    """With the work that the device is still at, 4 s each time that it is waited for."""
    time = SimulatedTime(monkeypatch)
    clock = tg.Clock(SimpleNamespace(synchronize=functools.partial(time.work, 4)), 1000.0)
    for total in (8000, 15_000):
        clock.start()
        time.work(3)
        assert clock.ms == pytest.approx(total - 4000)
        clock.stop()
        time.work(50)
        assert clock.ms == pytest.approx(total)

def test_next_cycle_ms__a_cycle_as_long_as_the_last_one(monkeypatch):
    time = SimulatedTime(monkeypatch)
    clock = tg.Clock(make_comm(), 1000.0)
    clock.start()
    for seconds, expected in ((0, 1000), (3, 7000), (5, 14_000), (1, 11_000)):
        time.work(seconds)
        assert clock.next_cycle_ms() == pytest.approx(expected)

@pytest.mark.parametrize("changes, validated, written", [
    (dict(val_every=2), [0, 2, 4, 5], []), (dict(val_every=0, checkpoint_every=2), [5], [2, 4]),
    (dict(val_every=2, checkpoint_every=4, max_steps=3), [0, 2, 3], []),
    (dict(val_every=2, checkpoint_every=2), [0, 2, 4, 5], [2, 4])])
def test_train_loop__trains_on_the_clock_and_the_rest_off_it(monkeypatch, tmp_path, changes, validated, written):
    """Validations take 40 s and checkpoints 20 s, off the clock. A checkpoint has the clock and the log of its step."""
    time = SimulatedTime(monkeypatch)
    runner = Racer(time)
    checkpoints = []

    def write_checkpoint(run_dir: Path, run_id: str, content: dict, engine: Racer, values: tg.StepConfig) -> None:
        time.work(20)
        facts = content["fingerprint"], content["cycle_progress"], engine, run_id, run_dir
        assert facts == (dict(torch="2", seed="0"), [], runner, "id", tmp_path / "run")
        assert sum(values.step < other.step for other in runner.evaluated) == 0, "before a validation of the same step"
        checkpoints.append((values.step, content["log"]["steps_done"], content["train_time_ms"]))

    monkeypatch.setattr(tg, "write_checkpoint", write_checkpoint)
    profiled = []
    profiler = SimpleNamespace(step=functools.partial(profiled.append, None))
    log = make_log(tmp_path, num_scheduled_steps=4, num_extension_steps=1, **changes)
    clock = tg.Clock(make_comm())
    info = SimpleNamespace(run_id="id", fingerprint=dict(torch="2"))
    loss, out_of_data = tg.train_loop(info, runner, runner, TextData(), clock, log, profiler)
    steps = validated[-1]
    assert (loss, out_of_data, len(profiled)) == (7.0 - steps, None, steps - 1)
    assert runner.evaluated == [log.schedule.at(step) for step in validated]
    assert (runner.evaluated[-1].long_window > log.schedule.at(4).long_window) == (steps == 5), "wider at the true end"
    assert checkpoints == [(k, k, 3000 + 3000 * k) for k in written]
    assert runner.calls == steps * CALLS_OF_STEP
    assert [values.step for values in sum(runner.cycles, [])] == list(range(steps)), "each step once, in order"
    assert [len(cycle) for cycle in runner.cycles] == [2, 2, 1, 0] if steps == 5 else [2, 1, 0]

    kinds = dict(step="train_loss", val="val_loss")
    numbers = [e for e in events(tmp_path) if e["type"] in kinds]
    found = [(e["type"], e["step"], e["train_time_ms"], e[kinds[e["type"]]]) for e in numbers]
    of_steps = [("step", k, 3000 + 3000 * k, k / 10) for k in range(1, steps + 1)]
    of_validations = [("val", k, 3000 + 3000 * k, 7.0 - k) for k in validated]
    assert sorted(found) == sorted(of_steps + of_validations)
    phases = [(e["name"], e["timed"]) for e in events(tmp_path) if e["type"] == "phase"]
    assert phases == [("first batch", True), *len(written) * [("checkpoint", False)], ("evaluation", False)]
    assert events(tmp_path)[0] == dict(type="phase", name="first batch", ms=3000.0, timed=True)



# ---- waits for the device -------------------------------------------------------------------------------------------
class DeviceEvent:
    """Stands for an event of a device that happens at this time of the simulated clock, by which waits for it go."""
    def __init__(self, monkeypatch, at: float = math.inf) -> None:
        self.at = at
        self.clock = SimulatedTime(monkeypatch)
        tg.time.monotonic = self.clock.perf_counter
        tg.time.sleep = self.clock.work

    def query(self) -> bool:
        return self.clock.now >= self.at

@pytest.mark.parametrize("world, expected", [(1, "waiting for the device"), (2, "lost another rank")])
def test_wait_for__ends_before_the_timeout_in_force(monkeypatch, world, expected):
    ranks = make_comm(0, world)
    ranks.timeout = 10.0
    event = DeviceEvent(monkeypatch, 107.9)
    ranks.wait_for(event)
    assert event.query() and event.clock.now < 108
    stuck = DeviceEvent(monkeypatch)
    with expect_error(tg.RunError, expected, "no response from cpu after 8.0 s", "--comm_timeout"):
        ranks.wait_for(stuck)
    assert 108 <= stuck.clock.now < 109, "before NCCL ends the process"

def test_flush__a_loss_that_does_not_arrive(monkeypatch, tmp_path):
    log = make_log(tmp_path)
    log.step(losses(10.0), 100.0)
    fields, *rest, _ = log.pending.pop()
    log.pending.append((fields, *rest, DeviceEvent(monkeypatch)))
    with expect_error(tg.RunError, "waiting for the device", "--comm_timeout"):
        log.flush()
    log.write_aborted("the cause")
    assert [event["type"] for event in events(tmp_path)] == ["aborted"]

def test_Clock__stop_waits_for_the_device_and_no_longer_than_the_timeout(monkeypatch):
    device = torch.device("cuda", 0)
    clock = tg.Clock(tg.Communicator(device))
    idle = []
    monkeypatch.setattr(torch.cuda, "synchronize", idle.append)
    for at, ended in ((103.0, True), (math.inf, False)):
        event = DeviceEvent(monkeypatch, at)
        stream = SimpleNamespace(record_event=Mock(return_value=event))
        monkeypatch.setattr(torch.cuda, "current_stream", {device: stream}.get)
        clock.initial_ms, clock.since = 0.0, event.clock.now
        with contextlib.nullcontext() if ended else expect_error(tg.RunError, "waiting for the device"):
            clock.stop()
        assert (clock.ms == pytest.approx(3000, abs=1)) == ended
    assert idle == [device], "other streams come after the event"


# ---- log ------------------------------------------------------------------------------------------------------------
def test_Log__steps_one_cycle_late_and_all_of_them_before_a_validation(tmp_path):
    log = make_log(tmp_path)
    for k in range(1, 6):
        log.step(losses(10.0 * k, 20.0, tokens=10), 100.0 * k)
        assert [e["step"] for e in events(tmp_path)] == list(range(1, k - 1))
    log.validation(4.25, 512.3456, TextData(val_bpb=1.5, unigram_nats=6.0))
    assert events(tmp_path)[:5] == [
        dict(type="step", step=k, train_time_ms=100.0 * k, tokens=10 * k, train_loss=k + 2.0) for k in range(1, 6)]
    assert events(tmp_path)[5:] == [dict(type="val", step=5, val_loss=4.25, train_time_ms=512.346, val_bpb=1.5,
                                         unigram_nats=6.0)]
    assert lines(tmp_path) == [f"step:{k}/12 train_time:{100 * k}ms step_avg:100.00ms" for k in range(1, 6)] + [
        "step:5/12 val_loss:4.2500 train_time:512ms step_avg:102.47ms"]

@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_Log__a_loss_that_is_not_finite_ends_the_run_with_the_last_good_one(tmp_path, bad):
    log = make_log(tmp_path)
    log.validation(5.125, 0.0, TextData())
    for loss in (10.0, 10.0, bad, 10.0):
        log.step(losses(loss), 0.0)
    with expect_error(tg.RunError, "training loss of step 2", str(bad), "5.1250 at step 0", "--adam_lr",
                      "--dtype=float32"):
        log.step(losses(10.0), 0.0)
    log.write_aborted("RunError: NaN")
    assert [e.get("step") for e in events(tmp_path)] == [0, 1, 2, 5], "up to the last loss that was seen"
    assert events(tmp_path)[-1] == dict(type="aborted", step=5, cause="RunError: NaN")
    assert lines(tmp_path)[-1] == "aborted after step 5: RunError: NaN"
    log = make_log(tmp_path / "other")
    with expect_error(tg.RunError, "validation loss at step 0", str(bad), "none"):
        log.validation(bad, 0.0, TextData())
    assert events(tmp_path / "other") == []

@pytest.mark.parametrize("terminal", [False, True])
def test_Log__lines_on_the_console(tmp_path, monkeypatch, capsys, terminal):
    """A twentieth of them, or on a terminal one that renews itself; other lines begin where nothing stands."""
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
    plain = [line.split("/")[0] for line in shown.out.splitlines()[:-1]]
    assert plain == ([] if terminal else [f"step:{step}" for step in range(5, 101, 5)])
    for_people = "5 s left, train_loss:2.500 (sum over predicted tokens)"
    renewed = f"\r\x1b[Kstep:4/100 {for_people}\r"
    assert terminal or shown.out.startswith(f"step:5/100 train_time:250ms step_avg:50.00ms {for_people}\n")
    assert (renewed in shown.err, shown.err.endswith("\r\x1b[K\r"), "\n" in shown.err) == (terminal, terminal, False)

def test_write_aborted__the_last_lines_once_and_nothing_after_them(tmp_path):
    """Also from another thread, while this one may be stuck in a write; a log that is closed is not aborted."""
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
def kind(x):
    """Return what a graph is compiled for anew: shapes but for dimensions that are marked dynamic, types, spans."""
    if isinstance(x, torch.Tensor):
        dynamic = getattr(x, "_dynamo_weak_dynamic_indices", ())
        shape = tuple(None if at in dynamic else size for at, size in enumerate(x.shape))
        return shape, x.dtype, x.requires_grad
    if isinstance(x, tg.Batch):
        return kind((x.tokens, x.targets, x.cu_seqlens, x.row_index, x.sign_ids))
    if isinstance(x, dict):
        return tuple((name, kind(value)) for name, value in x.items())
    if isinstance(x, (tuple, list)):
        return tuple(map(kind, x))
    return x if isinstance(x, (tg.AttentionArgs, str)) else type(x)

@pytest.mark.parametrize("changes", [
    dict(), dict(num_extension_steps=0),
    *(pytest.param(slow, marks=pytest.mark.slow) for slow in (dict(micro_batch_size=3), dict(max_doc_len=2)))],
    ids=str)
def test_warm_up__meets_every_graph_of_the_race(tmp_path, monkeypatch, changes):
    seen = set()

    def noting(call, **_):
        def calling(*args):
            seen.add((call.__qualname__, kind(args)))
            return call(*args)
        return calling

    monkeypatch.setattr(torch, "compile", noting)
    cfg = preset(adam_every=2, compile=1, **changes)
    ex = make_engine(cfg)
    log = make_log(tmp_path, **changes)
    tg.warm_up(cfg, make_comm(), ex, log)
    stages = [int(e["name"].split()[-1]) for e in events(tmp_path) if e["name"][-1].isdecimal()]
    batches = [cfg.stages[stage - 1].batch_tokens for stage in stages]
    assert batches[0] == max(batches), "a lack of memory shows in the first minute"

    warm = seen.copy()
    seen.clear()
    clock = tg.Clock(make_comm())
    loader = tg.Loader(cfg, make_comm(), tg.read_shard_headers(cfg.train_files))
    validation = tg.ValidationSet(cfg, make_comm(), tg.read_shard_headers(cfg.val_files))
    tg.train_loop(None, loader, ex, validation, clock, log)
    loader.close()
    assert len(seen) > 10 and seen <= warm


# ---- time budget ----------------------------------------------------------------------------------------------------
def trained(schedule: tg.Schedule, clock: tg.Clock, time: SimulatedTime, speed) -> list[tg.StepConfig]:
    """Return the steps of a race by the clock. speed(share of the budget used): s that a step takes."""
    done = []
    cycle = tg.schedule_cycle(0, schedule, clock)
    while cycle:
        following = tg.schedule_cycle(cycle[0].step + schedule.cycle_steps, schedule, clock)  # when this cycle begins
        for values in cycle:
            time.work(speed(clock.ms / 1000 / schedule.cfg.time_budget))
            done.append(values)
        cycle = following
    return done

def changing(early: float, late: float, at: float):
    def speed(share: float) -> float:
        return (early if share < at else late) + 0.1 * math.sin(1e6 * share)
    return speed

SPEEDS = dict(slow=changing(1.8, 1.8, 0), fast=changing(0.2, 0.2, 0))
SPEEDS |= {f"{late} from {at}": changing(1.0, late, at) for at in (0.2, 0.93) for late in (0.5, 1.3)}

@pytest.mark.parametrize("adam_every", [1, 2])
@pytest.mark.parametrize("name", SPEEDS)
def test_schedule_cycle__a_race_by_the_clock_ends_within_a_cycle_of_its_budget(monkeypatch, name, adam_every):
    schedule = tg.Schedule(preset(time_budget=270.0, num_scheduled_steps=260, num_extension_steps=10,
                                  adam_every=adam_every))
    time = SimulatedTime(monkeypatch)
    clock = tg.Clock(make_comm())
    clock.start()
    steps = trained(schedule, clock, time, SPEEDS[name])
    longest = 1.9 if name == "slow" else 1.4
    assert abs(clock.ms / 1000 - 270) <= longest * adam_every
    assert [values.step for values in steps] == list(range(schedule.end_step))
    assert schedule.cycle_progress == sorted(schedule.cycle_progress)
    assert schedule.cycle_progress[-1] >= schedule.planned_steps
    stages = [values.stage for values in steps]
    assert stages == sorted(stages) and set(stages) == set(range(len(schedule.cfg.stages)))
    assert [values.step for values in steps if values.untie_after] == [schedule.untie_step]
    assert schedule.at(schedule.end_step).long_window == schedule.cfg.final_long_window * schedule.cfg.window_block

def test_schedule_cycle__ranks_take_the_clock_of_rank_0(monkeypatch):
    """A rank 40 s ahead of rank 0 is at the same place of the plan. Places that are known, as after a checkpoint, need
    no clock, and no place lies before the one that precedes it."""
    time = SimulatedTime(monkeypatch)
    schedule = tg.Schedule(preset(time_budget=100.0, num_scheduled_steps=90, num_extension_steps=10), (0.0, 7.5))

    def gather(ms: float) -> list[float]:
        return [ms - 40_000, ms]

    clock = tg.Clock(SimpleNamespace(synchronize=noop, all_gather=gather), 50_000)
    clock.start()
    for first in (0, 2):
        assert [values.step for values in tg.schedule_cycle(first, schedule, clock)] == [first, first + 1]
    time.work(2)
    assert [values.step for values in tg.schedule_cycle(4, schedule, clock)] == [4, 5]
    assert schedule.cycle_progress == pytest.approx([0.0, 7.5, 14.0]), "now 12 s, and the last cycle took 2 s"
    clock.initial_ms -= 30_000
    tg.schedule_cycle(6, schedule, clock)
    assert schedule.cycle_progress == pytest.approx([0.0, 7.5, 14.0, 14.0])
STEP_S = 0.03                            # of a simulated step

def only_steps_take_time(monkeypatch) -> None:
    """A step takes STEP_S of a simulated clock, which stands still otherwise."""
    clock = SimulatedTime(monkeypatch, tick=1e-9)
    train_step = tg.train_step

    def step(engine: tg.Engine, loader: tg.Loader, values: tg.StepConfig) -> tg.StepLoss:
        found = train_step(engine, loader, values)
        clock.work(STEP_S)
        return found

    monkeypatch.setattr(tg, "train_step", step)

def check_budget(folder: Path, seconds: int) -> list[float]:
    """The run has kept its budget but for a cycle, has gone through its whole plan, and says all of it."""
    log = Run(folder, 0, "", "")
    result, steps = log.of("result")[0], log.of("step")
    assert abs(result["train_time_ms"] / 1000 - seconds) <= 2 * STEP_S + 0.001 and result["budget_s"] == seconds
    assert log.of("budget")[-1] == dict(type="budget", seconds=float(seconds), steps=len(steps))
    places = [e["progress"] for e in steps]
    assert places == sorted(places) and places[0] < 10 and places[-1] <= 93
    tokens = {e["tokens"] - before["tokens"] for before, e in zip(steps, steps[1:])}
    assert tokens == {stage.batch_tokens for stage in preset().stages}, "every stage"
    told, = read.read_runs([folder / "log.jsonl"]).runs
    assert told.finished and told.total == result["steps"] == len(steps) and not told.notes
    return places

@pytest.mark.parametrize("ranks", [1, 2])
def test_train_loop__keeps_its_time_budget_and_is_resumed_at_its_place(monkeypatch, tmp_path, ranks):
    """Only the main thread reads the clock. Up to its last checkpoint the resumed run has the same steps;
    then it goes on from the place."""
    class MainThreadClock(tg.Clock):
        @property
        def ms(self) -> float:
            assert threading.current_thread() is threading.main_thread(), "another thread reads the clock"
            return super().ms

    monkeypatch.setattr(tg, "Clock", MainThreadClock)
    only_steps_take_time(monkeypatch)
    flags = "--time_budget=3", "--num_scheduled_steps=90", "--epochs=0", "--checkpoint_every=8", "--sample_tokens=0"
    assert launch(tmp_path / "whole", ranks, *flags)[0].status == 0
    whole = check_budget(tmp_path / "whole", 3)
    again = launch(tmp_path / "again", ranks, f"--resume={tmp_path / 'whole'}")[0]
    resumed, = again.of("resumed")
    places = [e["progress"] for e in again.of("step")]
    assert places == sorted(places) and places[:resumed["step"] + 1] == whole[:resumed["step"] + 1]
    result, = again.of("result")
    assert resumed["step"] == 96 and len(whole) <= result["steps"] == len(places) <= len(whole) + 2
    assert abs(result["train_time_ms"] - 3000) <= 2000 * STEP_S + 1


# ---- sample ---------------------------------------------------------------------------------------------------------
def sampled(logits_of, gather=None, pieces=None, **changes) -> str:
    """Sample from an engine with these logits after a context; columns beyond the vocabulary are never drawn."""
    cfg = preset(**dict(vocab_size=10, bos_id=9, sample_tokens=5) | changes)

    def next_logits(tokens: list[int], values) -> torch.Tensor:
        logits = torch.full((cfg.padded_vocab,), 1e4)
        logits[:cfg.vocab_size] = logits_of(tokens)
        return logits
    where = SimpleNamespace(all_gather=gather or make_comm().all_gather)
    return tg.generate(cfg, SimpleNamespace(next_logits=next_logits, comm=where), None, pieces)

def count_up(tokens: list[int]) -> torch.Tensor:
    """After 0 comes 1 for sure, after 4 the end of the document."""
    following = {9: 0, 4: 9}.get(tokens[-1], tokens[-1] + 1)
    return torch.where(torch.arange(10) == following, 0.0, -1e4)

def one_or_zero(tokens: list[int]) -> torch.Tensor:
    return torch.tensor([1.0, 0.0, -1e4])

def test_generate__text_where_the_bytes_are_known():
    pieces = [b"a", b"bc", b"\xc3", b"\xa4", b"\xff", b"x", b"", b"", b"", b""]
    assert sampled(count_up, pieces=pieces) == "abc\u00e4\ufffd", "five tokens, bytes joined before decoding"
    assert sampled(count_up, sample_tokens=3).endswith(": 0 1 2")
    assert sampled(count_up, sample_tokens=9).endswith(": 0 1 2 3 4"), "ends at a document start"
    two_ranks = {0: [4, 1], 2: [3, 3]}.get
    assert sampled(count_up, two_ranks, sample_tokens=2).endswith(": 1 3"), "one text, however ranks round: the lowest"

def test_generate__draws_from_the_softmax_at_its_temperature():
    drawn = [sampled(one_or_zero, None, [b"a", b"b", b""], vocab_size=3, bos_id=2, sample_tokens=4000)
             for _ in range(2)]
    p = 1 / (1 + math.exp(-1 / 0.8))
    assert drawn[0] == drawn[1], "the seed decides"
    assert drawn[0].count("a") == pytest.approx(4000 * p, abs=4 * math.sqrt(4000 * p * (1 - p)))     # four deviations
    likeliest = sampled(one_or_zero, None, [b"a", b"b", b""], vocab_size=3, bos_id=2, temperature=0.01,
                        sample_tokens=99)
    assert likeliest == "a" * 99

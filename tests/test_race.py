"""Room 9: what is on the clock, what stands in the logs and when, a race by the clock, warm-up, and the sample."""
import json
import math
import random
import threading
from types import SimpleNamespace

import pytest
import torch
from common import executor, fabric, preset, refused, small

import train_gpt as tg


class Time:
    """A clock that only moves when somebody works."""

    def __init__(self, monkeypatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(tg, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def work(self, seconds: float, result=None):
        self.now += seconds
        return result


BESIDE = {"train_gpt.py": b"source", "settings.json": b"{}"}


def no_work(*_) -> None:
    pass


def losses(*slot_sums: float, tokens: int = 10) -> tg.Losses:
    return tg.Losses(torch.tensor(slot_sums), tokens)


def text_data(**extra) -> SimpleNamespace:
    """Validation data as far as the log looks at them."""
    return SimpleNamespace(text_losses=lambda loss: extra, batches=lambda values: values)


def make_log(tmp_path, rank: int = 0, **changes) -> tg.Log:
    """The log of a run of the tiny preset, in whose cycles are two steps unless given."""
    schedule = tg.Schedule(preset(**dict(adam_every=2) | changes))
    return tg.Log(tmp_path / "run", fabric(rank, 2 if rank else 1), schedule, BESIDE)


def events(tmp_path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]


def lines(tmp_path) -> list[str]:
    return (tmp_path / "run" / "log.txt").read_text().splitlines()


# ---- clock ----------------------------------------------------------------------------------------------------------

def test_clock_adds_up_what_lies_between_start_and_stop(monkeypatch):
    time = Time(monkeypatch)
    clock = tg.Clock(fabric())
    assert clock.ms == time.work(5, 0)
    clock.start()
    time.work(2)
    assert clock.ms == pytest.approx(2000)
    clock.stop()
    time.work(50)
    assert clock.ms == pytest.approx(2000)
    clock.start()
    time.work(1)
    clock.stop()
    assert clock.ms == pytest.approx(3000)


def test_clock_waits_for_the_device_at_both_ends(monkeypatch):
    time, waited = Time(monkeypatch), []
    clock = tg.Clock(SimpleNamespace(synchronize=lambda: waited.append(time.work(4, time.now))))
    clock.start()
    clock.ms
    clock.stop()
    assert waited == [100, 104] and clock.ms == pytest.approx(4000), "the work still running at the end counts"


def test_race_trains_on_the_clock_and_validates_off_it(monkeypatch, tmp_path):
    """First batch 3 s, each step 1 + 2 s, each validation 40 s; validations at 0, 2, 4 and the end of 5 steps."""
    time, calls = Time(monkeypatch), []
    log = make_log(tmp_path, num_scheduled_steps=4, num_extension_steps=1, val_every=2)
    loader = SimpleNamespace(start=lambda: calls.append("start"), wait=lambda: time.work(3), plans_ahead=object(),
                             next=lambda values: calls.append(("next", values.step)) or values.step)
    runner = SimpleNamespace(
        forward_backward=lambda batch, values: calls.append(("fb", batch, values)) or time.work(1, losses(batch + 1.0)),
        optim_step=lambda values, ahead: calls.append(("optim", values, ahead is loader.plans_ahead)) or time.work(2),
        evaluate=lambda batches, values: calls.append(("eval", batches)) or time.work(40, 7.0 - values.step))
    clock = tg.Clock(fabric())
    before = []
    result, data_ended = tg.race(loader, runner, text_data(), clock, log, before.append)
    at = log.schedule.at
    step_calls = [[("next", k), ("fb", k, at(k)), ("optim", at(k), True)] for k in range(5)]
    assert calls == ["start", ("eval", at(0)), *step_calls[0], *step_calls[1], ("eval", at(2)), *step_calls[2],
                     *step_calls[3], ("eval", at(4)), *step_calls[4], ("eval", at(5))]
    assert (result, data_ended, before) == (7.0 - 5, None, [0, 1, 2, 3, 4]) and clock.ms == pytest.approx(18_000)
    by_type = {kind: [e for e in events(tmp_path) if e["type"] == kind] for kind in ("step", "val", "phase")}
    assert [(e["step"], e["train_time_ms"]) for e in by_type["step"]] == [(k, 3000 + 3000 * k) for k in range(1, 6)]
    assert [(e["step"], e["train_time_ms"], e["val_loss"]) for e in by_type["val"]] == [
        (0, 3000, 7.0), (2, 9000, 5.0), (4, 15_000, 3.0), (5, 18_000, 2.0)]
    assert by_type["phase"] == [dict(type="phase", name="first batch", ms=3000.0, timed=True)]


@pytest.mark.parametrize("changes, want", [
    (dict(val_every=0), [5]), (dict(val_every=5), [0, 5]), (dict(val_every=2, max_steps=3), [0, 2, 3])])
def test_validation_steps(tmp_path, changes, want):
    log, seen = make_log(tmp_path, num_scheduled_steps=4, num_extension_steps=1, **changes), []
    runner = SimpleNamespace(forward_backward=lambda *_: losses(1.0), optim_step=lambda *_: None,
                             evaluate=lambda batches, values: seen.append(values) or 1.0)
    loader = SimpleNamespace(start=lambda: None, wait=lambda: None, next=lambda values: None, plans_ahead=lambda: None)
    tg.race(loader, runner, text_data(), tg.Clock(fabric()), log, no_work)
    assert [values.step for values in seen] == want
    assert (seen[-1].long_window == 20 * 4) == (want[-1] == 5), "the widest window is for the true end"


# ---- log ------------------------------------------------------------------------------------------------------------

def test_steps_are_written_one_cycle_late_and_all_of_them_before_a_validation(tmp_path):
    log = make_log(tmp_path)
    for k in range(1, 6):
        log.step(losses(10.0 * k, 20.0, tokens=10), 100.0 * k)
        assert [e["step"] for e in events(tmp_path)] == list(range(1, k - 1))
    log.validation(4.25, 512.3456, text_data(val_bpb=1.5, unigram_nats=6.0))
    assert events(tmp_path)[:5] == [
        dict(type="step", step=k, train_time_ms=100.0 * k, tokens=10 * k, train_loss=k + 2.0) for k in range(1, 6)]
    assert events(tmp_path)[5:] == [dict(type="val", step=5, val_loss=4.25, train_time_ms=512.346, val_bpb=1.5,
                                         unigram_nats=6.0)]
    assert lines(tmp_path) == [f"step:{k}/12 train_time:{100 * k}ms step_avg:100.00ms" for k in range(1, 6)] + [
        "step:5/12 val_loss:4.2500 train_time:512ms step_avg:102.47ms"]
    log.close()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_ends_the_run_with_the_last_good_one(tmp_path, bad):
    log = make_log(tmp_path)
    log.validation(5.125, 0.0, text_data())
    for loss in (10.0, 10.0, bad, 10.0):
        log.step(losses(loss), 0.0)
    refused(tg.RunError, lambda: log.step(losses(10.0), 0.0), "training loss of step 2", str(bad), "5.1250 at step 0",
            "--adam_lr", "--dtype=float32")
    log.aborted("RunError: NaN")
    assert [(e["type"], e.get("step")) for e in events(tmp_path)] == [
        ("val", 0), ("step", 1), ("step", 2), ("step", 3), ("step", 4), ("step", 5), ("aborted", 5)]
    assert events(tmp_path)[-1] == dict(type="aborted", step=5, cause="RunError: NaN")
    assert lines(tmp_path)[-1] == "aborted after step 5: RunError: NaN"
    log.close()


def test_a_bad_validation_loss_ends_the_run(tmp_path):
    log = make_log(tmp_path)
    log.step(losses(1.0), 0.0)
    refused(tg.RunError, lambda: log.validation(math.nan, 0.0, text_data()), "validation loss at step 1", "nan", "none")
    assert [e["type"] for e in events(tmp_path)] == ["step"]
    log.close()


def test_other_ranks_write_nothing_but_check_their_losses(tmp_path, capsys):
    log = make_log(tmp_path, rank=1)
    log.event("header")
    log.text("text")
    log.step(losses(1.0), 0.0)
    with log.phase("x"):
        pass
    assert not (tmp_path / "run").exists() and capsys.readouterr().out == ""
    assert log.tokens == 20, "tokens of all ranks"
    log.step(losses(math.nan), 0.0)
    refused(tg.RunError, log.flush, "training loss of step 1")
    log.close()


def test_console_without_a_terminal_gets_plain_lines(tmp_path, capsys):
    log = make_log(tmp_path, num_scheduled_steps=95, num_extension_steps=5)
    for _ in range(100):
        log.step(losses(1.0), 0.0)
    log.flush()
    shown = capsys.readouterr().out.splitlines()
    assert [int(line.split("/")[0].removeprefix("step:")) for line in shown] == list(range(5, 101, 5))
    assert len(lines(tmp_path)) == 100, "the log has every step"
    log.close()


def test_console_on_a_terminal_gets_a_line_that_renews_itself(tmp_path, monkeypatch, capsys):
    """In the place of step lines; other lines begin where nothing stands."""
    monkeypatch.setattr(tg.sys.stderr, "isatty", lambda: True)
    log = make_log(tmp_path)
    for step in range(1, 5):
        log.step(losses(25.0), 50.0 * step)
    log.text("a line of text")
    log.flush()
    log.close()
    shown = capsys.readouterr()
    assert shown.out == "a line of text\n"
    assert "\r\x1b[Kstep:4/12 train_time:200ms step_avg:50.00ms train_loss:2.500\r" in shown.err
    assert shown.err.endswith("\r\x1b[K\r") and "\n" not in shown.err


def test_the_last_lines_are_written_once_and_nothing_after_them(tmp_path):
    """Also from another thread, while this one may be stuck in a write."""
    log = make_log(tmp_path)
    log.step(losses(1.0), 10.0)
    threads = [threading.Thread(target=log.aborted, args=(f"cause {k}",)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.aborted("too late")
    log.flush()
    log.text("too late")
    assert [event["type"] for event in events(tmp_path)] == ["step", "aborted"]
    assert events(tmp_path)[1]["cause"] in {f"cause {k}" for k in range(8)} and len(lines(tmp_path)) == 1
    log.close()


def test_a_closed_log_is_not_aborted(tmp_path):
    log = make_log(tmp_path)
    log.event("result")
    log.close()
    log.aborted("the sample failed")
    assert [event["type"] for event in events(tmp_path)] == ["result"]


def test_an_old_log_is_never_overwritten(tmp_path):
    for name in ("log.txt", "log.jsonl"):
        folder = tmp_path / name / "run"
        folder.mkdir(parents=True)
        (folder / name).write_text("old")
        message = refused(tg.RunError, lambda: make_log(tmp_path / name), "writing", "File exists", "another folder")
        assert str(folder) in message
        assert (folder / name).read_text() == "old"


# ---- warm-up --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("changes", [
    dict(), dict(max_steps=5), dict(num_extension_steps=0),
    *(pytest.param(slow, marks=pytest.mark.all) for slow in (dict(slots_per_micro_batch=3), dict(max_doc_len=2)))],
    ids=lambda changes: str(changes))
def test_warm_up_meets_every_graph_of_the_race(tmp_path, monkeypatch, changes):
    """A compiled graph is made for each shape and number of weights, with and without gradients.

    With the reference attention, as here, it is made for each span, too.
    """
    cfg, seen = preset(adam_every=2, **changes), {}
    ex, headers = executor(cfg), tg.find_shards(cfg.train_files)

    def noting(phase):
        def read(row_buffers):
            return tuple((label, rows.shape, rows.requires_grad, grads is not None and grads.data_ptr())
                         for label, (rows, grads) in row_buffers.items())

        def losses_of(batch, weights, seed, spans, precision, row_buffers):
            kind = batch.tokens.shape, len(weights), tuple(spans.values()), precision, read(row_buffers)
            seen.setdefault(phase, set()).add(kind)
            return ex.model.losses(batch, weights, seed, spans, precision, row_buffers)

        def hidden_of(batch, spans, row_buffers):
            seen.setdefault(phase, set()).add((batch.tokens.shape, tuple(spans.values()), read(row_buffers)))
            return ex.model.hidden(batch, spans, row_buffers)

        def update_of(kind, update):
            def call(p, *rest):
                seen.setdefault(phase, set()).add((kind, p.shape, tied[-1]))
                return update(p, *rest)
            return call

        def step_of(values, ahead):
            tied.append(values.tied)
            return step(values, ahead)

        tied, step = [], ex.optim_step
        ex.optim_step, ex.model_losses, ex.model_hidden = step_of, losses_of, hidden_of
        ex.optimizer.normuon_update = update_of("normuon", tg.normuon_update)
        ex.optimizer.adam_update = update_of("adam", tg.adam_update)

    log = make_log(tmp_path, **changes)
    noting("warm-up")
    tg.warm_up(cfg, fabric(), ex, log)
    noting("race")
    clock = tg.Clock(fabric())
    loader = tg.Loader(cfg, fabric(), headers, tg.cycles_from(0, log.schedule, clock), ex.exchange_ahead)
    validation = tg.ValidationSet(cfg, fabric(), tg.find_shards(cfg.val_files))
    tg.race(loader, ex, validation, clock, log, no_work)
    loader.close()
    log.close()
    assert len(seen["race"]) > 10 and seen["race"] <= seen["warm-up"]


def test_warm_up_begins_with_the_largest_stage(tmp_path):
    """A lack of memory shows in the first minute."""
    cfg = preset(adam_every=2)
    log = make_log(tmp_path)
    tg.warm_up(cfg, fabric(), executor(cfg), log)
    log.close()
    stages = [int(e["name"].split()[-1]) for e in events(tmp_path) if e["name"].startswith("warm-up of stage")]
    batches = [cfg.stages[stage - 1].batch_tokens for stage in stages]
    assert batches == sorted(batches, reverse=True) and set(stages) == set(range(1, len(cfg.stages) + 1))


# ---- time budget ----------------------------------------------------------------------------------------------------

class FakeClock:
    """A clock of rank 0 that stands at `ms`."""

    def __init__(self, ms: float = 0.0) -> None:
        self.fabric, self.ms = fabric(), ms


def budgeted(steps: int, seconds: float, places=(), **changes) -> tg.Schedule:
    extension = steps // 27
    fields = dict(num_scheduled_steps=steps - extension, num_extension_steps=extension, adam_every=2) | changes
    return tg.Schedule(preset(time_budget=seconds, **fields), places)


def trained(schedule: tg.Schedule, speed, clock: FakeClock) -> list[tg.Values]:
    """The steps of a race by the clock. speed(share of the budget used, step): how many s a step takes."""
    cycles = tg.cycles_from(0, schedule, clock)
    done, ahead = [], next(cycles)
    while ahead:
        cycle, ahead = ahead, next(cycles, [])                                # prepared when the one before it begins
        for values in cycle:
            clock.ms += 1000 * speed(clock.ms / 1000 / schedule.cfg.time_budget, values.step)
            done.append(values)
    return done


def uneven(share: float, step: int) -> float:
    return 0.8 + 0.4 * random.Random(step).random()


SPEEDS = {
    "steady": lambda share, step: 1.0, "slow": lambda share, step: 1.9, "fast": lambda share, step: 0.2,
    "slower": lambda share, step: 0.7 + 0.7 * share, "faster": lambda share, step: 1.4 - 0.7 * share,
    "ripples": lambda share, step: 1 + 0.35 * math.sin(99 * share), "uneven": uneven}
SPEEDS |= {f"{later} from {at}": lambda share, step, at=at, later=later: later if share > at else 1.0
           for at in (0.2, 0.8, 0.93) for later in (0.5, 1.4)}


@pytest.mark.parametrize("adam_every", [1, 2])
@pytest.mark.parametrize("name", SPEEDS)
def test_a_race_by_the_clock_ends_within_a_cycle_of_its_budget(name, adam_every):
    """Of a plan of 270 steps and time for about as many: it passes through all of it, whatever the speed."""
    schedule, clock = budgeted(270, 270.0, adam_every=adam_every), FakeClock()
    steps = trained(schedule, SPEEDS[name], clock)
    longest = 1.9 if name == "slow" else 1.4
    assert abs(clock.ms / 1000 - 270) <= longest * adam_every
    assert [values.step for values in steps] == list(range(schedule.end_step))
    assert schedule.places == sorted(schedule.places) and schedule.places[-1] >= schedule.total_steps
    stages = [values.stage for values in steps]
    assert stages == sorted(stages) and set(stages) == set(range(len(schedule.cfg.stages)))
    untied = [values.step for values in steps if values.untie]
    assert untied == [schedule.untie_step] and untied[0] % adam_every == adam_every - 1
    assert schedule.at(schedule.end_step).long_window == schedule.cfg.final_long_window * schedule.cfg.window_block


def test_places_by_hand():
    """A plan of 270 steps in 100 s: the share of the budget that will be over when a cycle begins, in planned steps."""
    schedule, clock = budgeted(270, 100.0), FakeClock(500.0)
    cycles = tg.cycles_from(0, schedule, clock)
    for ms in (1000.0, 3000.0, 4000.0, 4000.0):
        clock.ms = ms
        next(cycles)
    # 1,000 ms at the first look, where no cycle has been seen: the clock stood at 1,000; then + 2,000 and + 1,000
    assert schedule.places == pytest.approx([2.7 * 1, 2.7 * 5, 2.7 * 5, 2.7 * 5]), "never backwards"


def test_places_that_a_checkpoint_has_kept_are_gone_through_again():
    schedule, clock = budgeted(270, 270.0), FakeClock()
    whole = trained(schedule, uneven, clock)
    again = budgeted(270, 270.0, schedule.places[:31])
    resumed = tg.cycles_from(60, again, FakeClock(1000 * 70.0))
    assert next(resumed) == whole[60:62] and len(again.places) == 31, "the place of step 60 was known"
    assert next(resumed)[0].step == 62 and again.places[31] >= again.places[30]


def test_a_race_by_the_clock_may_be_cut_and_says_how_far_it_came(tmp_path, monkeypatch):
    time = Time(monkeypatch)
    log = make_log(tmp_path, time_budget=270.0, num_scheduled_steps=270, max_steps=7, val_every=0)
    clock = tg.Clock(fabric())
    cycles = tg.cycles_from(0, log.schedule, clock)
    ready = []

    def take(values):                                                # as one cycle begins, the next is prepared
        if values.step % 2 == 0:
            ready.extend(next(cycles, []))

    loader = SimpleNamespace(start=no_work, wait=lambda: ready.extend(next(cycles)), next=take, plans_ahead=no_work)
    runner = SimpleNamespace(forward_backward=lambda *_: losses(1.0), optim_step=lambda *_: time.work(3),
                             evaluate=lambda *_: 5.0)
    tg.race(loader, runner, text_data(), clock, log, no_work)
    found = events(tmp_path)
    places = [event["place"] for event in found if event["type"] == "step"]
    assert len(places) == 7 and places == [log.schedule.place(step) for step in range(7)] == sorted(places)
    assert [event for event in found if event["type"] == "budget"] == [dict(type="budget", seconds=270.0, steps=7)]
    assert lines(tmp_path)[-1].startswith("step:7/7 val_loss:5.0000"), "records read the last line's total as the end"
    log.close()


def test_a_clock_may_be_read_by_another_thread_at_any_moment(monkeypatch):
    """Also between two assignments of its stop: a jump would end a race by the clock."""
    time, seen = Time(monkeypatch), []

    class Watched(tg.Clock):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if "fabric" in vars(self) and len(vars(self)) > 1:
                seen.append(self.ms)

    clock = Watched(fabric(), 1000.0)
    for _ in range(3):
        clock.start()
        time.work(5)
        clock.stop()
    assert len(seen) == 7 and seen == [1000, 1000, 6000, 6000, 11000, 11000, 16000]


# ---- sample ---------------------------------------------------------------------------------------------------------

def talker(cfg, favourite):
    """An executor whose next token is favourite(context), for sure."""
    def next_logits(tokens, values):
        logits = torch.full((cfg.padded_vocab,), -1e4)
        logits[cfg.vocab_size:] = 1e4                                # columns beyond the vocabulary are never drawn
        logits[favourite(tokens)] = 0.0
        return logits
    return SimpleNamespace(next_logits=next_logits, fabric=fabric())


def sampled(cfg, executor, values, pieces):
    return tg.generate(cfg, executor, values, pieces)


def test_sample_is_text_where_the_bytes_are_known():
    cfg = preset(vocab_size=10, document_start=9, sample_tokens=5)
    count_up = talker(cfg, lambda tokens: 0 if tokens == [9] else tokens[-1] + 1)
    pieces = [b"a", b"bc", b"\xc3", b"\xa4", b"\xff", b"x", b"", b"", b"", b""]
    assert sampled(cfg, count_up, None, pieces) == "abc\u00e4\ufffd", "five tokens, bytes joined before decoding"
    assert sampled(cfg, count_up, None, None).endswith(": 0 1 2 3 4")
    short = talker(cfg, lambda tokens: 9 if len(tokens) == 3 else 1)
    assert sampled(cfg, short, None, pieces) == "bcbc", "ends at a document start"


def test_sample_draws_from_the_softmax_at_its_temperature():
    cfg = preset(vocab_size=3, document_start=2, sample_tokens=4000)
    logits = torch.tensor([1.0, 0.0, -1e4] + [0.0] * 125)
    ex = SimpleNamespace(next_logits=lambda tokens, values: logits, fabric=fabric())
    drawn = [sampled(cfg, ex, None, [b"a", b"b", b""]) for _ in range(2)]
    p = 1 / (1 + math.exp(-1 / 0.8))
    assert drawn[0] == drawn[1], "the seed decides"
    assert drawn[0].count("a") == pytest.approx(4000 * p, abs=4 * math.sqrt(4000 * p * (1 - p)))     # four deviations


def test_ranks_take_the_lowest_of_their_tokens():
    """One text, even where the roundings of two ranks draw two tokens."""
    cfg, asked = preset(vocab_size=10, document_start=9, sample_tokens=3), []
    ex = talker(cfg, lambda tokens: 7)
    ex.fabric = SimpleNamespace(gather=lambda token: asked.append(token) or [5, 4])
    assert sampled(cfg, ex, None, None).endswith(": 4 4 4") and asked == [7, 7, 7]


def test_sample_of_a_model_uses_its_own_context():
    cfg = small(sample_tokens=20)
    ex = executor(cfg)
    text = sampled(cfg, ex, tg.Schedule(cfg).at(0), None)
    tokens = [int(x) for x in text.rpartition(": ")[2].split()]
    assert 0 < len(tokens) <= 20 and max(tokens) < cfg.vocab_size

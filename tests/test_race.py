"""Room 9: what is on the clock, what stands in the logs and when, a warm-up that meets every graph, and the sample."""
import gc
import json
import math
import os
import signal
import threading
from types import SimpleNamespace

import numpy as np
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


def losses(*slot_sums: float, tokens: int = 10) -> tg.Losses:
    return tg.Losses(torch.tensor(slot_sums), tokens)


def text_data(**extra) -> SimpleNamespace:
    """Validation data as far as the log looks at them."""
    return SimpleNamespace(text_losses=lambda loss: extra, batches=lambda values: values)


def make_log(tmp_path, rank: int = 0, **changes) -> tg.Log:
    return tg.Log(tmp_path / "run", fabric(rank, 2 if rank else 1), tg.Schedule(preset(**changes)))


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
    result = tg.race(loader, runner, text_data(), clock, log)
    at = log.schedule.at
    step_calls = [[("next", k), ("fb", k, at(k)), ("optim", at(k), True)] for k in range(5)]
    assert calls == ["start", ("eval", at(0)), *step_calls[0], *step_calls[1], ("eval", at(2)), *step_calls[2],
                     *step_calls[3], ("eval", at(4)), *step_calls[4], ("eval", at(5))]
    assert result == 7.0 - 5 and clock.ms == pytest.approx(18_000)
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
    tg.race(loader, runner, text_data(), tg.Clock(fabric()), log)
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
    log.open_bar()
    for _ in range(100):
        log.step(losses(1.0), 0.0)
    log.flush()
    shown = capsys.readouterr().out.splitlines()
    assert [int(line.split("/")[0].removeprefix("step:")) for line in shown] == list(range(5, 101, 5))
    assert len(lines(tmp_path)) == 100, "the log has every step"
    log.close()


def test_console_on_a_terminal_gets_a_bar(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tg.sys.stderr, "isatty", lambda: True)
    log = make_log(tmp_path)
    log.open_bar()
    for _ in range(4):
        log.step(losses(25.0), 50.0)
    log.text("a line of text")
    log.flush()
    assert (log.bar.n, log.bar.total) == (4, 12)
    log.close()
    shown = capsys.readouterr()
    assert "step:" not in shown.out and "a line of text" in shown.out
    assert "loss 2.500" in shown.err and "ms/step" in shown.err


def test_the_last_lines_are_written_once_and_nothing_behind_them(tmp_path):
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


def test_a_log_leaves_only_its_files_even_if_it_is_never_closed(tmp_path):
    """A killed run closes nothing: the reserve for last lines has no name from the start."""
    log = make_log(tmp_path)
    assert os.fstat(log.reserve.fileno()).st_size == tg.RESERVE_BYTES
    assert sorted(os.listdir(tmp_path / "run")) == ["log.jsonl", "log.txt", "train_gpt.py"]
    log.close()
    assert log.reserve.closed, "its room is free again"


def test_an_old_log_is_never_overwritten(tmp_path):
    for name in ("log.txt", "log.jsonl", "train_gpt.py"):
        folder = tmp_path / name / "run"
        folder.mkdir(parents=True)
        (folder / name).write_text("old")
        message = refused(tg.RunError, lambda: make_log(tmp_path / name), "run directory", "File exists", "--run_dir")
        assert str(folder) in message
        assert (folder / name).read_text() == "old"


# ---- warm-up --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("changes", [
    dict(), dict(max_steps=5), dict(num_extension_steps=0),
    *(pytest.param(slow, marks=pytest.mark.all) for slow in (dict(slots_per_micro_batch=3), dict(max_doc_len=2)))],
    ids=lambda changes: str(changes))
def test_warm_up_meets_every_graph_of_the_race(tmp_path, monkeypatch, changes):
    """A compiled graph is made for each shape and number of weights, with and without gradients.

    With the reference attention, as here, it is made for each reach, too.
    """
    cfg, seen = preset(**changes), {}
    ex, schedule, headers = executor(cfg), tg.Schedule(cfg), tg.find_shards(cfg.train_files)

    def noting(phase):
        def read(sources):
            return tuple((label, rows.shape, rows.requires_grad, sums is not None and sums.data_ptr())
                         for label, (rows, sums) in sources.items())

        def losses_of(batch, weights, seed, reaches, precision, sources):
            kind = batch.tokens.shape, len(weights), tuple(reaches.values()), precision, read(sources)
            seen.setdefault(phase, set()).add(kind)
            return ex.model.losses(batch, weights, seed, reaches, precision, sources)

        def hidden_of(batch, reaches, sources):
            seen.setdefault(phase, set()).add((batch.tokens.shape, tuple(reaches.values()), read(sources)))
            return ex.model.hidden(batch, reaches, sources)

        def update_of(kind, update):
            def call(p, *rest):
                seen.setdefault(phase, set()).add((kind, p.shape, ex.optimizer.adam_steps["embed"] > 0))
                return update(p, *rest)
            return call

        ex.model_losses, ex.model_hidden = losses_of, hidden_of
        ex.optimizer.normuon_update = update_of("normuon", tg.normuon_update)
        ex.optimizer.adam_update = update_of("adam", tg.adam_update)

    noting("warm-up")
    tg.warm_up(cfg, fabric(), schedule, ex)
    noting("race")
    loader = tg.Loader(cfg, fabric(), headers, [schedule.at(step) for step in range(schedule.end_step)])
    validation = tg.ValidationSet(cfg, fabric(), tg.find_shards(cfg.val_files))
    log = make_log(tmp_path, **changes)
    tg.race(loader, ex, validation, tg.Clock(fabric()), log)
    loader.close()
    log.close()
    assert len(seen["race"]) > 10 and seen["race"] <= seen["warm-up"]


# ---- what is compiled -----------------------------------------------------------------------------------------------

def test_a_log_is_told_of_each_graph_where_and_why(tmp_path, capsys):
    """Forward and backward; a second shape with the guard that the first did not meet; nothing of before or behind."""
    @torch.compile(backend="aot_eager", dynamic=False)
    def squares(x):
        return (x * x).sum()

    def call(rows: int) -> None:
        squares(torch.ones(rows, requires_grad=True)).backward()

    torch._dynamo.reset()
    log, graphs = make_log(tmp_path), []
    log.done = 3
    call(5)
    for place in ("stage 1", "the race"):
        with tg.reported_graphs(log, graphs, place):
            call(6 if place == "stage 1" else 7)
            log.done += 1
            call(5)
    call(8)
    log.close()
    torch._dynamo.reset()
    assert [(graph["name"], graph["place"], graph["step"]) for graph in graphs] == [
        ("squares", "stage 1", 3), ("backward of squares", "stage 1", 3),
        ("squares", "the race", 4), ("backward of squares", "the race", 4)]
    assert all("size mismatch" in graphs[at]["guard"] and f"actual {size}" in graphs[at]["guard"]
               for at, size in ((0, 6), (2, 7)))
    assert all(graph["ms"] > 0 for graph in graphs)
    assert [event for event in events(tmp_path) if event["type"] == "graph"] == [
        dict(type="graph", **graph) for graph in graphs]
    said = [line for line in lines(tmp_path) if line.startswith("compiled ")]
    assert len(said) == 4 and said[1].startswith("compiled backward of squares for stage 1: ")
    assert capsys.readouterr().out.splitlines() == said, "on the console too"


def test_a_compilation_that_fails_leaves_no_listener(tmp_path):
    log = make_log(tmp_path)
    before = list(torch._dynamo.callback.callback_handler.start_callbacks)
    with pytest.raises(KeyError), tg.reported_graphs(log, [], "stage 1"):
        raise KeyError
    assert torch._dynamo.callback.callback_handler.start_callbacks == before


def test_a_log_that_takes_no_line_ends_a_run_in_its_own_words(tmp_path):
    """Not in those of torch's compiler, within which lines are written too."""
    def refuse(kind: str, **fields) -> None:
        raise tg.RunError("writing a line", "no room", "room", "free some")

    @torch.compile(backend="aot_eager", dynamic=False)
    def twice(x):
        return 2 * x

    torch._dynamo.reset()
    log = SimpleNamespace(done=0, event=refuse, text=print)
    graphs = []
    with pytest.raises(tg.RunError, match="writing a line"), tg.reported_graphs(log, graphs, "stage 1"):
        for rows in (2, 3, 4):
            twice(torch.ones(rows))
    torch._dynamo.reset()
    assert graphs == []


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
    return tg.spell(pieces, tg.generate(cfg, executor, values))


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
    ex.fabric = SimpleNamespace(of_all=lambda token: asked.append(token) or [5, 4])
    assert tg.generate(cfg, ex, None) == [4, 4, 4] and asked == [7, 7, 7]


def test_sample_of_a_model_uses_its_own_context():
    cfg = small(sample_tokens=20)
    ex = executor(cfg)
    text = sampled(cfg, ex, tg.Schedule(cfg).at(0), None)
    tokens = [int(x) for x in text.rpartition(": ")[2].split()]
    assert 0 < len(tokens) <= 20 and max(tokens) < cfg.vocab_size


# ---- the wait for the device -----------------------------------------------------------------------------------------

class DeviceEvent:
    """Comes after so many looks; `between` is called at each."""

    def __init__(self, looks: float, between=lambda: None) -> None:
        self.looks = looks
        self.between = between

    def query(self) -> bool:
        self.looks -= 1
        self.between()
        return self.looks < 0


def test_a_wait_for_the_device_ends_when_the_device_is_there():
    event = DeviceEvent(3)
    tg.wait_for_device(event, 60.0)
    assert event.looks == -1


def test_a_wait_for_a_device_that_hangs_has_an_end():
    refused(tg.RunError, lambda: tg.wait_for_device(DeviceEvent(math.inf), 0.02), "waiting for the device",
            "unfinished after 0.02 s", "--comm_timeout")


def test_a_signal_is_heard_in_a_wait_for_the_device():
    sent = []

    def send_once() -> None:
        if not sent:
            sent.append(os.kill(os.getpid(), signal.SIGINT))

    with pytest.raises(KeyboardInterrupt):
        tg.wait_for_device(DeviceEvent(math.inf, send_once), 60.0)


def test_objects_of_before_are_settled_within_and_no_longer_behind():
    with tg.settled_objects():
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0
    with pytest.raises(KeyError), tg.settled_objects():
        raise KeyError
    assert gc.get_freeze_count() == 0, "behind a race that failed, too"

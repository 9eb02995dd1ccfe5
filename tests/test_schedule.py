"""Section 2: what a run derives from its stages and steps. The record's numbers, step by step, are in the vectors."""
import math

import pytest
from common import preset, untied_at

import train_gpt as tg

STAGES = (tg.Stage(128, 1, 3, 1.00, (1.0, 0.5, 0.25), (1.0, 0.5, 0.0)),
          tg.Stage(256, 3, 7, 1.52, (1.0, 0.5), (1.0, 0.0)),
          tg.Stage(384, 5, 11, 1.73, (1.0,), (1.0,), untie=True),
          tg.Stage(384, 6, 13, 1.00, (1.0,), (1.0,)))
ONE_MORE = (STAGES[0], tg.Stage(192 + 64, 2, 5, 1.26, (1.0, 0.5), (1.0, 0.25)), *STAGES[1:])
ONE_LESS = STAGES[2:]
TABLES = dict(three=STAGES, four=ONE_MORE, one=ONE_LESS, tiny=tg.TINY["stages"], record=tg.STAGES)

def plan(**changes) -> tg.Config:
    """Stages of three scheduled steps each, and three steps of extension; Adam on every second step."""
    fields = dict(stages=STAGES, num_scheduled_steps=9, num_extension_steps=3, val_every=5, adam_every=2)
    return preset("tiny", **fields | changes)

@pytest.mark.parametrize("stages", TABLES.values(), ids=TABLES)
def test_at__the_final_validation_has_a_wider_window_and_nothing_else_new(stages) -> None:
    cfg = plan(stages=stages, num_scheduled_steps=30, final_long_window=20)
    schedule = tg.Schedule(cfg)
    end = schedule.at(33)
    last = schedule.at(32)
    assert (end.short_window, end.long_window) == (last.short_window, 20 * cfg.window_block)
    assert last.long_window == stages[-1].long_window * cfg.window_block
    assert end.rotary == last.rotary == schedule.rotary[-1], "no YaRN update for the last window"
    early = tg.Schedule(plan(stages=stages, num_scheduled_steps=30, max_steps=5))
    assert early.at(5).long_window == stages[0].long_window * cfg.window_block, "a run that stops early keeps its own"

@pytest.mark.parametrize("steps, ramps, want", [
    pytest.param((1507, 40), {}, (300, 50), marks=pytest.mark.recipe),
    pytest.param((520, 20), {}, (105, 17), marks=pytest.mark.recipe),          # in proportion: 300, 50 x 540 / 1547
    pytest.param((84, 4), {}, (17, 3), marks=pytest.mark.recipe),
    ((520, 20), dict(momentum_warmup_frac=7 / 540, momentum_cooldown_frac=0), (7, 0)),
])
def test_momentum_at__ramps_are_fractions_of_the_run(steps, ramps, want) -> None:
    cfg = plan(num_scheduled_steps=steps[0], num_extension_steps=steps[1], **ramps)
    up, down = want
    total = sum(steps)
    low, high = cfg.momentum_min, cfg.momentum_max
    schedule = tg.Schedule(cfg)
    momentum = [schedule.at(step).momentum for step in range(total)]
    rising = [low + (high - low) * k / up for k in range(up)]
    falling = [high - (high - low) * k / down for k in range(down)]
    flat = [high] * (total - up - down)
    assert momentum == pytest.approx(rising + flat + falling, rel=1e-12)

KINDS = [
    dict(), dict(num_scheduled_steps=4, num_extension_steps=1), dict(num_scheduled_steps=30), dict(max_steps=1),
    dict(adam_every=1, max_steps=5),
    dict(tables=(tg.NgramTable("a_embed", 3, 100, update_every=4),), num_scheduled_steps=31, max_steps=33)]
CASES = [dict(stages=stages) | changes for stages in (STAGES, ONE_MORE, ONE_LESS) for changes in KINDS]
for stage in (0, 3, None):
    CASES += [dict(stages=untied_at(stage, STAGES), adam_every=every) for every in (1, 2)]

@pytest.mark.parametrize("changes", CASES)
def test_warm_up_steps__meet_every_kind_of_step(changes) -> None:
    """A graph depends on the stage, on whether Adam updates and on being tied: the warm-up runs each kind of the race.
    In whole cycles, for an Adam step needs all its gradients; one that max_steps cuts short is the last."""
    schedule = tg.Schedule(plan(**changes))
    every = [schedule.at(step) for step in range(schedule.end_step)]
    steps = schedule.warm_up_steps()
    assert len(steps) == len(set(steps)) and set(steps) <= {v.step for v in every}
    warmed = [every[step] for step in steps]
    assert {(v.stage, v.update_adam) for v in warmed} == {(v.stage, v.update_adam) for v in every}
    assert {(v.stage, v.tied) for v in warmed if v.update_adam} == {(v.stage, v.tied) for v in every if v.update_adam}
    for at in range(0, len(steps), schedule.cycle_steps):
        cycle = steps[at:at + schedule.cycle_steps]
        assert cycle[0] % schedule.cycle_steps == 0
        assert cycle == list(range(cycle[0], cycle[0] + len(cycle)))
        assert len(cycle) == schedule.cycle_steps or at + schedule.cycle_steps > len(steps)

def test_warm_up_steps__the_largest_stage_comes_first() -> None:
    assert tg.Schedule(plan(max_steps=5)).warm_up_steps() == [2, 3, 0, 1, 4], "stage 1 is the largest reached"

def check_tied(values: list[tg.StepConfig], untie: float) -> None:
    """The embedding reads the head up to this step, which unties it."""
    for v in values:
        assert v.untie_after == (v.step == untie)
        assert v.tied == (v.step <= untie)

@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("stages, scheduled, stage, start", [
    (STAGES, 9, 1, 3), (STAGES, 12, 1, 4), (STAGES, 12, 2, 8), (STAGES, 12, 0, 0), (STAGES, 12, 3, 12),
    (ONE_MORE, 12, 3, 9), (ONE_LESS, 12, 1, 12), (STAGES, 12, None, math.inf)])
def test_at__unties_at_the_end_of_the_adam_cycle_in_which_the_stage_starts(stages, scheduled, stage, start, every) -> None:
    """All steps of that cycle still read the head; the odd one, if there are two, has fresh moments."""
    untie = start | 1 if every == 2 and stage is not None else start
    cfg = plan(num_scheduled_steps=scheduled, stages=untied_at(stage, stages), adam_every=every)
    schedule = tg.Schedule(cfg)
    values = [schedule.at(step) for step in range(scheduled + 3)]
    assert schedule.untie_step == untie
    check_tied(values, untie)
    assert all(v.update_adam == (every == 1 or v.step % 2 == 1) for v in values)

@pytest.mark.parametrize("stop, last", [(0, 12), (5, 5), (12, 12), (99, 12)])
def test_end_step__max_steps_stops_early_and_changes_no_value(stop, last) -> None:
    whole = tg.Schedule(plan())
    cut = tg.Schedule(plan(max_steps=stop))
    assert (cut.end_step, cut.planned_steps) == (last, 12)
    backwards = [whole.at(step) for step in reversed(range(last))]
    assert [cut.at(step) for step in range(last)] == backwards[::-1], "pure"
    assert hash(whole.at(5)) == hash(cut.at(5)), "plain numbers: no tensor, no device"

@pytest.mark.parametrize("stages", TABLES.values(), ids=TABLES)
def test_at__follows_the_stages_and_a_linear_cooldown(stages) -> None:
    """Stages share 100 scheduled steps evenly; the cooldown is over 100 x (1 - 0.55), rounded down, on."""
    cfg = plan(stages=stages, num_scheduled_steps=100, num_extension_steps=10, cooldown_frac=0.55, lr_floor=0.1)
    schedule = tg.Schedule(cfg)
    borders = [round(100 * k / (len(stages) - 1)) for k in range(len(stages))] + [110]
    for v in map(schedule.at, range(110)):
        k = max(k for k, start in enumerate(borders) if start <= v.step)
        row = stages[k]
        done = min(max(0, (v.step - 44) / 56), 1)
        factor = row.lr_mul * (1 - done) + 0.1 * done
        assert (v.stage, v.seq_len) == (k, row.batch_tokens // cfg.seqs_per_step)
        assert v.short_window == row.short_window * cfg.window_block
        assert v.long_window == row.long_window * cfg.window_block
        assert v.adam_lr == pytest.approx(cfg.adam_lr * factor, rel=1e-12)
        assert v.normuon_lr == pytest.approx(cfg.normuon_lr * factor, rel=1e-12)
        share = (v.step - borders[k]) / (borders[k + 1] - borders[k])
        weights = [first + (last - first) * share for first, last in zip(row.mtp_start, row.mtp_end)]
        assert v.mtp_weights == pytest.approx(weights, rel=1e-12)

@pytest.mark.parametrize("cycle", [1, 2, 4])
@pytest.mark.parametrize("every", [0, 1, 2, 3, 4, 6, 7])
def test_at__checkpoints_come_at_the_first_start_of_a_cycle_at_or_after_each_multiple(cycle, every) -> None:
    """A checkpoint in the middle of a cycle would lose its gradients."""
    tables = (tg.NgramTable("a_embed", 3, 100, update_every=cycle),)
    cfg = plan(tables=tables, adam_every=min(cycle, 2), num_scheduled_steps=45, checkpoint_every=every)
    schedule = tg.Schedule(cfg)
    steps = range(48)
    assert schedule.cycle_steps == cycle
    assert [v.begins_cycle for v in map(schedule.at, steps)] == [step in range(0, 48, cycle) for step in steps]
    wanted = {math.ceil(multiple / cycle) * cycle for multiple in range(0, 48, every)} if every else set()
    assert {v.step for v in map(schedule.at, steps) if v.checkpoint} == wanted & set(steps)

BY_STEP = ("step", "update_adam", "tied", "untie_after", "begins_cycle", "checkpoint", "validate")

def by_place(values: tg.StepConfig) -> dict:
    """What goes by the place in the plan, not by the number of the step."""
    return {name: value for name, value in vars(values).items() if name not in BY_STEP}

def test_progress__with_a_time_budget() -> None:
    """Both steps of a cycle have its place; stages, rates, momentum and token weights are those of the plan there."""
    cfg = plan(time_budget=60.0)
    planned = tg.Schedule(plan())
    places = [0, 2, 2, 5, 9]
    schedule = tg.Schedule(cfg, places)
    for step in range(2 * len(places)):
        v = schedule.at(step)
        assert by_place(v) == by_place(planned.at(places[step // 2])), step
        assert v.update_adam == (step % 2 == 1) and v.begins_cycle == (step % 2 == 0)
        assert v.validate == (step % 5 == 0)
    between = tg.Schedule(cfg, [4.5]).at(0)
    before = planned.at(4)
    after = planned.at(5)
    assert before.mtp_weights[1] > between.mtp_weights[1] > after.mtp_weights[1]
    assert before.momentum <= between.momentum <= after.momentum

def test_end_step__with_a_time_budget() -> None:
    """Nobody knows it until the clock has said so; then it is that cycle's first step, which is not trained."""
    schedule = tg.Schedule(plan(time_budget=60.0))
    for place in (0.0, 3.1, 6.2, 9.3):
        schedule.cycle_progress.append(place)
        assert schedule.end_step == math.inf
    schedule.cycle_progress.append(12.4)
    assert schedule.end_step == 8
    end = tg.Schedule(plan()).at(12)
    assert by_place(schedule.at(8)) == by_place(end), "the final validation's, whatever the clock says beyond the end"
    stopped = plan(time_budget=60.0, max_steps=5)
    assert tg.Schedule(stopped, [0.0]).end_step == 5
    assert tg.Schedule(stopped, [0.0, 99.0]).end_step == 2

@pytest.mark.parametrize("cadence, places, untie", [
    (2, [0.0, 2.0, 5.9, 6.0, 6.0], 7), (2, [0.0, 7.5], 3), (4, [0.0, 5.0, 8.0], 9), (4, [6.0], 1)])
def test_untie_step__with_a_time_budget(cadence, places, untie) -> None:
    """The first Adam cycle whose place has reached the stage; what was said before never changes."""
    tables = (tg.NgramTable("a_embed", 3, 100, update_every=cadence),)
    schedule = tg.Schedule(plan(time_budget=60.0, tables=tables))
    said = []
    for place in places:
        schedule.cycle_progress.append(place)
        first = len(said)
        said += [schedule.at(step) for step in range(first, first + cadence)]
    assert schedule.untie_step == untie
    check_tied(said, untie)
    assert said == [schedule.at(step) for step in range(len(said))], "pure, however many places came later"

"""Room 2: the schedule of the record preset is the recipe's, number by number; what a run derives scales with it."""
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

# step, stage, batch, windows in blocks, token weights, factor, momentum, NorMuon rate, Adam rate, Adam step
RECIPE_4 = """
0 0 131072 1/3 1,0.5,0.25 1.00000000 0.850000 0.02300000 0.00800000 no
1 0 131072 1/3 1,0.5,0.24950199 1.00000000 0.850333 0.02300000 0.00800000 yes
299 0 131072 1/3 1,0.5,0.10109562 1.00000000 0.949667 0.02300000 0.00800000 yes
300 0 131072 1/3 1,0.5,0.10059761 1.00000000 0.950000 0.02300000 0.00800000 no
501 0 131072 1/3 1,0.5,0.00049801 1.00000000 0.950000 0.02300000 0.00800000 yes
502 1 262144 3/7 1,0.5 1.52000000 0.950000 0.03496000 0.01216000 no
503 1 262144 3/7 1,0.49900596 1.52000000 0.950000 0.03496000 0.01216000 yes
678 1 262144 3/7 1,0.32504970 1.52000000 0.950000 0.03496000 0.01216000 no
679 1 262144 3/7 1,0.32405567 1.51828709 0.950000 0.03492060 0.01214630 yes
1004 1 262144 3/7 1,0.00099404 0.96159228 0.950000 0.02211662 0.00769274 no
1005 2 393216 5/11 1 1.08704463 0.950000 0.02500203 0.00869636 yes
1250 2 393216 5/11 1 0.60531966 0.950000 0.01392235 0.00484256 no
1498 2 393216 5/11 1 0.11769602 0.948000 0.00270701 0.00094157 no
1507 3 393216 6/13 1 0.10000000 0.930000 0.00230000 0.00080000 yes
1546 3 393216 6/13 1 0.10000000 0.852000 0.00230000 0.00080000 no
"""
# i: frequency at the start, after 384 -> 896, after 896 -> 1408, after 1408 -> 1664 (recipe 11.4)
RECIPE_YARN = """
0 1.00000000e+00 1.00000000e+00 1.00000000e+00 1.00000000e+00
3 5.11305749e-01 5.04224777e-01 5.04224777e-01 5.04224777e-01
8 1.67166188e-01 1.00042254e-01 7.92314783e-02 7.36302212e-02
31 9.76562500e-04 4.18526790e-04 2.66335235e-04 2.25360593e-04
"""
RECIPE_SCALES = (0.1, 0.11694595720774409, 0.12751752379570258, 0.1317779884389435)


def plan(**changes) -> tg.Config:
    """Stages of three scheduled steps each, and three steps of extension; Adam on every second step."""
    fields = dict(stages=STAGES, num_scheduled_steps=9, num_extension_steps=3, val_every=5, adam_every=2)
    return preset("tiny", **fields | changes)


@pytest.fixture
def record() -> tg.Schedule:
    return tg.Schedule(preset("record"))


@pytest.mark.recipe
def test_at__every_row_of_the_recipe(record):
    close = dict(rel=0, abs=6e-9)                                     # the recipe prints 8 decimals
    for row in RECIPE_4.strip().splitlines():
        step, stage, batch, windows, weights, factor, momentum, normuon_lr, adam_lr, adam = row.split()
        v = record.at(int(step))
        assert (v.step, v.stage, v.slot_tokens * 8) == (int(step), int(stage), int(batch)), step
        assert [v.short_window, v.long_window] == [128 * int(w) for w in windows.split("/")], step
        assert v.mtp_weights == pytest.approx([float(w) for w in weights.split(",")], **close), step
        assert record.lr_factor_at(int(step)) == pytest.approx(float(factor), **close), step
        assert v.momentum == pytest.approx(float(momentum), rel=0, abs=6e-7), step        # printed with 6 decimals
        assert (v.normuon_lr, v.adam_lr) == pytest.approx((float(normuon_lr), float(adam_lr)), **close), step
        assert v.adam_step == (adam == "yes"), step


@pytest.mark.recipe
def test_at__single_numbers_of_the_recipe(record):
    assert (record.starts, record.ends) == ((0, 502, 1005, 1507), (502, 1005, 1507, 1547))
    assert record.cooldown_start == 678
    factors = {1003: 0.96330519, 1007: 1.08311218, 1500: 0.11376357, 1505: 0.10393245}
    for step, factor in factors.items():
        assert record.lr_factor_at(step) == pytest.approx(factor, rel=0, abs=6e-9)        # printed with 8 decimals
    assert [record.at(step).momentum for step in (1500, 1540)] == pytest.approx([0.944, 0.864], rel=1e-12)
    values = [record.at(step) for step in range(1547)]
    assert sum(8 * v.slot_tokens for v in values) == 410_779_648
    assert sum(v.adam_step for v in values) == 773
    assert [v.step for v in values if v.untie] == [1005], "odd, so that both moments are fresh"
    assert sum(v.adam_step for v in values[:1006]) == 503, "Adam updates up to the untying"
    assert [v.step for v in values if v.validate] == [0, 250, 500, 750, 1000, 1250, 1500]
    assert record.warm_up_steps() == [*range(1004, 1008), *range(1506, 1510), *range(502, 506), *range(4)]


@pytest.mark.recipe
def test_rotary_by_stage__frequencies_and_scales_of_the_recipe(record):
    for row in RECIPE_YARN.strip().splitlines():
        i, *by_stage = row.split()
        found = [rotary.frequencies[int(i)] for rotary in record.rotary]
        assert found == pytest.approx([float(f) for f in by_stage], rel=1e-6), i           # the recipe's are fp32
    assert [rotary.attn_scale for rotary in record.rotary] == pytest.approx(RECIPE_SCALES, rel=1e-14)
    kept, stretched = [], []
    for old, new, ratio in zip(record.rotary, record.rotary[1:], (384 / 896, 896 / 1408, 1408 / 1664)):
        factors = [b / a for a, b in zip(old.frequencies, new.frequencies)]
        kept.append(sum(factor == 1 for factor in factors))
        stretched.append(sum(math.isclose(factor, ratio) for factor in factors))
        assert len(factors) == 32
    assert (kept, stretched) == ([3, 6, 7], [13, 13, 13])


@pytest.mark.parametrize("stages", TABLES.values(), ids=TABLES)
def test_at__the_final_validation_has_a_wider_window_and_nothing_else_new(stages):
    cfg = plan(stages=stages, num_scheduled_steps=30, final_long_window=20)
    schedule = tg.Schedule(cfg)
    end, last = schedule.at(33), schedule.at(32)
    assert (end.short_window, end.long_window) == (last.short_window, 20 * cfg.window_block)
    assert last.long_window == stages[-1].long_window * cfg.window_block
    assert end.rotary == last.rotary == schedule.rotary[-1], "no YaRN update for the last window"
    early = tg.Schedule(plan(stages=stages, num_scheduled_steps=30, max_steps=5))
    assert early.at(5).long_window == stages[0].long_window * cfg.window_block, "a run that stops early keeps its own"


@pytest.mark.parametrize("steps, ramps, want", [
    pytest.param((1507, 40), {}, (300, 50), marks=pytest.mark.recipe),
    pytest.param((520, 20), {}, (105, 17), marks=pytest.mark.recipe),          # in proportion: 300, 50 x 540 / 1547
    pytest.param((84, 4), {}, (17, 3), marks=pytest.mark.recipe),
    ((520, 20), dict(momentum_warmup_steps=7, momentum_cooldown_steps=0), (7, 0)),
])
def test_momentum_at__ramps_scale_unless_set(steps, ramps, want):
    cfg = plan(num_scheduled_steps=steps[0], num_extension_steps=steps[1], **ramps)
    schedule, (up, down), total = tg.Schedule(cfg), want, sum(steps)
    low, high = cfg.momentum_min, cfg.momentum_max
    momentum = [schedule.at(step).momentum for step in range(total)]
    rising = [low + (high - low) * k / up for k in range(up)]
    falling = [high - (high - low) * k / down for k in range(down)]
    flat = [high] * (total - up - down)
    assert momentum == pytest.approx(rising + flat + falling, rel=1e-12)


KINDS = [
    dict(), dict(num_scheduled_steps=3, num_extension_steps=0), dict(num_scheduled_steps=4, num_extension_steps=1),
    dict(num_scheduled_steps=30), dict(max_steps=5), dict(max_steps=1),
    dict(num_scheduled_steps=31, num_extension_steps=7, max_steps=33), dict(adam_every=1, max_steps=5),
    dict(tables=(tg.NgramTable("a_embed", 3, 100, cadence=4),), num_scheduled_steps=31, max_steps=33)]
CASES = [dict(stages=stages) | changes for stages in (STAGES, ONE_MORE, ONE_LESS) for changes in KINDS]
CASES += [dict(stages=untied_at(stage, STAGES), adam_every=every) for stage in (0, 3, None) for every in (1, 2)]


@pytest.mark.parametrize("changes", CASES)
def test_warm_up_steps__meet_every_kind_of_step(changes):
    """A graph depends on the stage, on whether Adam updates and on being tied: the warm-up runs each kind of the race.

    In whole cycles, for an Adam step needs all its gradients; one that max_steps cuts short is the last.
    """
    schedule = tg.Schedule(plan(**changes))
    kinds = {v.step: (v.stage, v.adam_step, v.tied) for v in map(schedule.at, range(schedule.end_step))}
    steps = schedule.warm_up_steps()
    assert len(steps) == len(set(steps)) and set(steps) <= set(kinds)
    assert {kinds[step] for step in steps} >= {kind for kind in kinds.values() if kind[1]}
    assert {kinds[step][:2] for step in steps} == {kind[:2] for kind in kinds.values()}
    for at in range(0, len(steps), schedule.cycle):
        first, *others = steps[at:at + schedule.cycle]
        assert first % schedule.cycle == 0 and others == list(range(first + 1, first + 1 + len(others)))
        assert len(others) == schedule.cycle - 1 or at + schedule.cycle > len(steps)


def test_warm_up_steps__the_largest_stage_comes_first():
    assert tg.Schedule(plan(max_steps=5)).warm_up_steps() == [2, 3, 0, 1, 4], "stage 1 is the largest reached"


@pytest.mark.parametrize("cadence, adam_every, want", [(None, 1, 1), (None, 2, 2), (1, 1, 1), (2, 1, 2), (4, 2, 4)])
def test_schedule__a_cycle_of_the_run_is_the_longest_of_any_table(cadence, adam_every, want):
    tables = (tg.NgramTable("a_embed", 3, 100, cadence=cadence),) if cadence else ()
    assert tg.Schedule(plan(adam_every=adam_every, tables=tables)).cycle == want


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("stages, scheduled, stage, start", [
    (STAGES, 9, 1, 3), (STAGES, 12, 1, 4), (STAGES, 12, 2, 8), (STAGES, 12, 0, 0), (STAGES, 12, 3, 12),
    (ONE_MORE, 12, 3, 9), (ONE_LESS, 12, 1, 12), (STAGES, 12, None, math.inf)])
def test_at__unties_at_the_end_of_the_adam_cycle_that_contains_the_start(stages, scheduled, stage, start, every):
    """All steps of that cycle still read the head; the odd one, if there are two, has fresh moments."""
    untie = start | 1 if every == 2 and stage is not None else start
    cfg = plan(num_scheduled_steps=scheduled, stages=untied_at(stage, stages), adam_every=every)
    schedule = tg.Schedule(cfg)
    values = [schedule.at(step) for step in range(scheduled + 3)]
    assert [v.untie for v in values] == [v.step == untie for v in values] and schedule.untie_step == untie
    assert [v.tied for v in values] == [v.step <= untie for v in values]
    assert [v.adam_step for v in values] == [every == 1 or v.step % 2 == 1 for v in values]


@pytest.mark.parametrize("stop, last", [(0, 12), (5, 5), (12, 12), (99, 12)])
def test_end_step__max_steps_stops_early_and_changes_no_value(stop, last):
    whole, cut = tg.Schedule(plan()), tg.Schedule(plan(max_steps=stop))
    assert (cut.end_step, cut.total_steps) == (last, 12)
    assert [cut.at(step) for step in range(last)] == [whole.at(step) for step in reversed(range(last))][::-1], "pure"
    assert hash(whole.at(5)) == hash(cut.at(5)), "plain numbers: no tensor, no device"


@pytest.mark.parametrize("stages", TABLES.values(), ids=TABLES)
def test_at__every_step_has_what_its_row_says_and_rates_fall_linearly_in_the_cooldown(stages):
    """Stages share 100 scheduled steps evenly; the cooldown is over 100 x (1 - 0.55), rounded down, on."""
    cfg = plan(stages=stages, num_scheduled_steps=100, num_extension_steps=10, cooldown_frac=0.55, lr_floor=0.1)
    schedule, borders = tg.Schedule(cfg), [round(100 * k / (len(stages) - 1)) for k in range(len(stages))]
    for v in map(schedule.at, range(110)):
        k = max(k for k, start in enumerate(borders) if start <= v.step)
        row, length = stages[k], ([*borders, 110][k + 1] - borders[k])
        done = min(max(0, (v.step - 44) / 56), 1)
        factor = row.lr_mul * (1 - done) + 0.1 * done
        assert (v.stage, v.slot_tokens) == (k, row.batch_tokens // cfg.num_slots)
        windows = [v.short_window / cfg.window_block, v.long_window / cfg.window_block]
        assert windows == [row.short_window, row.long_window]
        assert (v.adam_lr, v.normuon_lr) == pytest.approx((cfg.adam_lr * factor, cfg.normuon_lr * factor), rel=1e-12)
        share = (v.step - borders[k]) / length
        weights = [first + (last - first) * share for first, last in zip(row.mtp_start, row.mtp_end)]
        assert v.mtp_weights == pytest.approx(weights, rel=1e-12)


# ---- a time budget: the clock says the place of each run cycle ------------------------------------------------------

BY_STEP = ("step", "adam_step", "tied", "untie", "validate")


def by_place(values: tg.Values) -> dict:
    """What goes by the place in the plan, not by the number of the step."""
    return {name: value for name, value in vars(values).items() if name not in BY_STEP}


def test_place__by_the_clock():
    """Both steps of a cycle have its place; stages, rates, momentum and token weights are those of the plan there."""
    cfg = plan(time_budget=60.0)
    planned = tg.Schedule(plan())
    schedule = tg.Schedule(cfg, [0, 2, 2, 5, 9])
    for step, place in enumerate([0, 0, 2, 2, 2, 2, 5, 5, 9, 9]):
        assert by_place(schedule.at(step)) == by_place(planned.at(place)), step
        assert schedule.at(step).adam_step == (step % 2 == 1)
        assert schedule.at(step).validate == (step % 5 == 0)
    between = tg.Schedule(cfg, [4.5])
    assert planned.at(4).mtp_weights[1] > between.at(0).mtp_weights[1] > planned.at(5).mtp_weights[1]
    assert planned.at(4).momentum <= between.at(0).momentum <= planned.at(5).momentum


def test_end_step__by_the_clock():
    """Nobody knows it until the clock has said so; then it is that cycle's first step, which is not trained."""
    schedule = tg.Schedule(plan(time_budget=60.0))
    for place in (0.0, 3.1, 6.2, 9.3):
        schedule.places.append(place)
        assert schedule.end_step == math.inf
    schedule.places.append(12.4)
    assert schedule.end_step == 8
    end = tg.Schedule(plan()).at(12)
    assert by_place(schedule.at(8)) == by_place(end), "the final validation's, whatever the clock says beyond the end"
    assert tg.Schedule(plan(time_budget=60.0, max_steps=5), [0.0]).end_step == 5
    assert tg.Schedule(plan(time_budget=60.0, max_steps=5), [0.0, 99.0]).end_step == 2


@pytest.mark.parametrize("cadence, places, untie", [
    (2, [0.0, 2.0, 5.9, 6.0, 6.0], 7), (2, [0.0, 7.5], 3), (4, [0.0, 5.0, 8.0], 9), (4, [6.0], 1)])
def test_untie_step__by_the_clock(cadence, places, untie):
    """The first Adam cycle whose place has reached the stage; what was said before never changes."""
    tables = (tg.NgramTable("a_embed", 3, 100, cadence=cadence),)
    schedule, said = tg.Schedule(plan(time_budget=60.0, tables=tables)), []
    for place in places:
        schedule.places.append(place)
        first = len(said)
        said += [schedule.at(step) for step in range(first, first + cadence)]
    assert [v.step for v in said if v.untie] == [untie] and schedule.untie_step == untie
    assert [v.tied for v in said] == [v.step <= untie for v in said]
    assert said == [schedule.at(step) for step in range(len(said))], "pure, however many places came later"

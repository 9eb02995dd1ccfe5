"""Section 2: values that follow from stages and steps. test_oracle.py has those of preset `record` at each step."""
import math
from typing import Any

import pytest
from common import preset, untied_at

import train_gpt as tg

STAGES = (tg.Stage(128, 1, 3, 1.00, (1.0, 0.5, 0.25), (1.0, 0.5, 0.0)),
          tg.Stage(256, 3, 7, 1.52, (1.0, 0.5), (1.0, 0.0)),
          tg.Stage(384, 5, 11, 1.73, (1.0,), (1.0,), untie=True),
          tg.Stage(384, 6, 13, 1.00, (1.0,), (1.0,)))
MORE_STAGES = (STAGES[0], tg.Stage(192 + 64, 2, 5, 1.26, (1.0, 0.5), (1.0, 0.25)), *STAGES[1:])
FEWER_STAGES = STAGES[2:]
STAGE_LISTS = dict(three=STAGES, four=MORE_STAGES, one=FEWER_STAGES, tiny=tg.TINY["stages"], record=tg.STAGES)

def make_config(**changes: Any) -> tg.Config:
    """Build a config with three scheduled steps per stage, an extension of three, and Adam on every second step."""
    settings = dict(stages=STAGES, num_scheduled_steps=9, num_extension_steps=3, val_every=5, adam_every=2)
    return preset("tiny", **settings | changes)

@pytest.mark.parametrize("steps, ramps, expected", [
    pytest.param((84, 4), {}, (17, 3), marks=pytest.mark.recipe),             # times 88 / 1547, rounded
    ((520, 20), dict(momentum_warmup_frac=7 / 540, momentum_cooldown_frac=0), (7, 0))])
def test_momentum_at__ramps_are_fractions_of_the_run(steps, ramps, expected) -> None:
    cfg = make_config(num_scheduled_steps=steps[0], num_extension_steps=steps[1], **ramps)
    rise_steps, fall_steps = expected
    num_steps = sum(steps)
    low, high = cfg.momentum_min, cfg.momentum_max
    schedule = tg.Schedule(cfg)
    momentum = [schedule.at(step).momentum for step in range(num_steps)]
    rising = [low + (high - low) * i / rise_steps for i in range(rise_steps)]
    falling = [high - (high - low) * i / fall_steps for i in range(fall_steps)]
    flat = [high] * (num_steps - rise_steps - fall_steps)
    assert momentum == pytest.approx(rising + flat + falling, rel=1e-12)

SCHEDULES = [
    dict(), dict(num_scheduled_steps=4, num_extension_steps=1), dict(max_steps=1), dict(adam_every=1, max_steps=5),
    dict(tables=(tg.NgramTable("a_embed", 3, 100, update_every=4),), num_scheduled_steps=31, max_steps=33)]
CASES = [dict(stages=stages) | changes for stages in (STAGES, MORE_STAGES, FEWER_STAGES) for changes in SCHEDULES]
CASES += [dict(stages=untied_at(stage, STAGES), adam_every=every) for stage in (0, 3, None) for every in (1, 2)]

def updates_adam(step_cfg: tg.StepConfig, adam_every: int) -> bool:
    return step_cfg.step % adam_every == adam_every - 1

@pytest.mark.parametrize("changes", CASES)
def test_warm_up_cycles__meet_every_kind_of_step(changes) -> None:
    """In cycles of the training loop. Graphs depend on the stage, on tied and on whether Adam updates."""
    def kinds(step_cfgs: list[tg.StepConfig]) -> set[tuple]:
        forward = {(step_cfg.stage, updates_adam(step_cfg, adam_every)) for step_cfg in step_cfgs}
        return forward | {(step_cfg.stage, step_cfg.tied, "updates") for step_cfg in step_cfgs
                          if updates_adam(step_cfg, adam_every)}

    schedule = tg.Schedule(make_config(**changes))
    step_cfgs = [schedule.at(step) for step in range(schedule.end_step)]
    cycles = schedule.warm_up_cycles(every_graph=True)
    warmed_up = [step_cfg for cycle in cycles for step_cfg in cycle]
    assert len({step_cfg.step for step_cfg in warmed_up}) == len(warmed_up)
    adam_every = schedule.cfg.adam_every
    assert kinds(warmed_up) == kinds(step_cfgs)
    for cycle in cycles:
        first_step = cycle[0].step
        assert first_step % schedule.steps_per_cycle == 0
        assert cycle == step_cfgs[first_step:first_step + schedule.steps_per_cycle]
        assert len(cycle) == schedule.steps_per_cycle or cycle is cycles[-1]

@pytest.mark.parametrize("adam_every", [1, 2])
@pytest.mark.parametrize("stages, scheduled_steps, stage_idx, stage_start", [
    (STAGES, 9, 1, 3), (STAGES, 12, 2, 8), (STAGES, 12, 0, 0), (MORE_STAGES, 12, 3, 9), (FEWER_STAGES, 12, 1, 12),
    (STAGES, 12, None, math.inf)])
def test_at__unties_at_the_end_of_an_adam_interval(stages, scheduled_steps, stage_idx, stage_start, adam_every) -> None:
    """Of the interval in which the stage starts: of two steps, the second, on which Adam updates the moments."""
    last_tied_step = stage_start | 1 if adam_every == 2 and stage_idx is not None else stage_start
    cfg = make_config(num_scheduled_steps=scheduled_steps, stages=untied_at(stage_idx, stages), adam_every=adam_every)
    schedule = tg.Schedule(cfg)
    step_cfgs = [schedule.at(step) for step in range(scheduled_steps + 3)]
    assert schedule.last_tied_step == last_tied_step
    for step_cfg in step_cfgs:
        found = step_cfg.tied, step_cfg.untie_after
        assert found == (step_cfg.step <= last_tied_step, step_cfg.step == last_tied_step)
    assert all(updates_adam(step_cfg, adam_every) for step_cfg in step_cfgs if step_cfg.untie_after)

@pytest.mark.parametrize("max_steps, end_step", [(0, 12), (5, 5), (12, 12), (99, 12)])
def test_Schedule__max_steps_stops_early_and_changes_no_value(max_steps, end_step) -> None:
    full = tg.Schedule(make_config())
    stopped = tg.Schedule(make_config(max_steps=max_steps))
    assert (stopped.end_step, stopped.total_steps) == (end_step, 12) and type(stopped.end_step) is int
    reverse_order = [full.at(step) for step in reversed(range(end_step))]
    assert [stopped.at(step) for step in range(end_step)] == reverse_order[::-1], "`at` has no state"
    assert hash(full.at(5)) == hash(stopped.at(5)), "plain numbers without tensors or devices"

@pytest.mark.parametrize("stages", [
    pytest.param(stages, id=name, marks=[pytest.mark.recipe] * (name == "record"))        # a fork may split unevenly
    for name, stages in STAGE_LISTS.items()])
def test_at__follows_the_stages(stages) -> None:
    """Even shares of 100 steps, and an extension of 10."""
    cfg = make_config(stages=stages, num_scheduled_steps=100, num_extension_steps=10)
    schedule = tg.Schedule(cfg)
    starts = [round(100 * i / (len(stages) - 1)) for i in range(len(stages))] + [110]
    for i, stage in enumerate(stages):
        for step_cfg in map(schedule.at, range(*starts[i:i + 2])):
            lr_factor = schedule.lr_factor_at(step_cfg.step)
            assert (step_cfg.stage, step_cfg.seq_len) == (i, stage.batch_tokens // cfg.seqs_per_step)
            windows = stage.short_window * cfg.window_block, stage.long_window * cfg.window_block
            assert (step_cfg.short_window, step_cfg.long_window) == windows
            assert step_cfg.adam_lr == pytest.approx(cfg.adam_lr * lr_factor, rel=1e-12)
            assert step_cfg.normuon_lr == pytest.approx(cfg.normuon_lr * lr_factor, rel=1e-12)
            assert len(step_cfg.mtp_weights) == len(stage.mtp_start)

@pytest.mark.parametrize("max_steps", [0, 13])
@pytest.mark.parametrize("steps_per_cycle", [1, 2, 4])
@pytest.mark.parametrize("checkpoint_every", [0, 1, 3, 4])
def test_at__checkpoints_come_where_cycles_begin(steps_per_cycle, checkpoint_every, max_steps) -> None:
    """At the first start of a cycle at or after each multiple, and at the last one at or before the end of the run."""
    tables = (tg.NgramTable("a_embed", 3, 100, update_every=steps_per_cycle),)
    cfg = make_config(tables=tables, adam_every=min(steps_per_cycle, 2), num_scheduled_steps=43, max_steps=max_steps,
                      checkpoint_every=checkpoint_every)
    schedule = tg.Schedule(cfg)
    steps = range((max_steps or 46) + 1)
    assert schedule.steps_per_cycle == steps_per_cycle
    cycle_starts = range(0, len(steps), steps_per_cycle)
    cycles = list(schedule.cycles(cycle_starts[1]))
    assert [cycle[0].step for cycle in cycles] == [step for step in cycle_starts[1:] if step < steps[-1]]
    assert sum(cycles, []) == [schedule.at(step) for step in steps[cycle_starts[1]:-1]]
    multiples = range(0, len(steps), checkpoint_every) if checkpoint_every else ()
    expected = {math.ceil(multiple / steps_per_cycle) * steps_per_cycle for multiple in multiples}
    if checkpoint_every:
        expected.add(cycle_starts[-1])
    assert {step for step in steps if schedule.at(step).checkpoint} == expected & set(steps)

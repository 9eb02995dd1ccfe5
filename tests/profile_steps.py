"""Trace steps a to b - 1 of a run with torch.profiler: python tests/profile_steps.py a:b [flags of train_gpt.py].

Also under torchrun. Each rank writes RUN_DIR/trace_rank<r>.json.gz; the log has a table of the longest operations, and
its result says that the time does not count.
"""
import contextlib
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train_gpt as tg

def profiled_loop(first: int, end: int, engine: tg.Engine, loader: tg.Loader, validation: tg.ValidationSet,
                  clock: tg.Clock, log: tg.Log) -> tuple[float, tg.OutOfData | None]:
    """tg.train_loop with a trace. The profiler warms up in step first - 1."""
    train_loop, train_step, event = ORIGINAL
    schedule = torch.profiler.schedule(skip_first=first - log.steps_done - 1, wait=0, warmup=1, active=end - first,
                                       repeat=1)
    profiler = torch.profiler.profile(schedule=schedule)

    def step(*args: Any) -> tg.StepLoss:
        losses = train_step(*args)
        profiler.step()
        return losses

    with mock.patch.object(tg, "train_step", step), profiler:
        result = train_loop(engine, loader, validation, clock, log)
    log.run_dir.mkdir(parents=True, exist_ok=True)        # on a node without rank 0
    profiler.export_chrome_trace(str(log.run_dir / f"trace_rank{engine.comm.rank}.json.gz"))
    log.info(profiler.key_averages().table(f"self_{engine.comm.device.type}_time_total", row_limit=12,
                                           max_name_column_width=60))
    return result

def void_event(log: tg.Log, kind: str, **fields: Any) -> None:
    _, _, event = ORIGINAL
    event(log, kind, **fields | (dict(void="profiled") if kind == "result" else {}))

ORIGINAL = tg.train_loop, tg.train_step, tg.Log.event

def main(steps: str, *flags: str) -> int:
    first, end = map(int, steps.split(":"))
    if not 0 < first < end:
        sys.exit(f"{steps} must be a:b with 0 < a < b, such as 100:104")
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(tg, "train_loop", lambda *args: profiled_loop(first, end, *args)))
        stack.enter_context(mock.patch.object(tg.Log, "event", void_event))
        return tg.main(list(flags))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

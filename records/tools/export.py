"""Verb `export`: copy curves of runs to a CSV file or to the files of TensorBoard, Trackio or Weights & Biases.

    python records export RUN ... --to=csv               OUT/NAME.csv, with all digits; NAME: logs_first for logs/first
    python records export RUN ... --to=tensorboard       tensorboard --logdir=OUT; needs torch, and rounds to float32
    python records export RUN ... --to=trackio           TRACKIO_DIR=OUT trackio show --project=train_gpt
    python records export RUN ... --to=wandb             wandb sync OUT/wandb/offline-run-*

A row has a step and what its log states of it: tokens, training time in s, training loss of the next token,
validation loss, learning rates. Steps that a resumed run repeated occur once. Nothing is sent anywhere. A loss of NaN
stays NaN, but stores may not draw it. OUT is --out, by default logs/export. A second export to the same name replaces
the first in CSV and TensorBoard, and adds a run in the others.
"""
import argparse
import csv
import io
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tools.files import counted, say, write_bytes
from tools.read import COLUMNS, Run, ToolError, read_runs

PROJECT = "train_gpt"

def rows_of(run: Run) -> list[dict[str, Any]]:
    """Return {name: value} of each step, in order, without what the log does not state."""
    rows: dict[int, dict[str, Any]] = {}
    stated = [name for name, column in zip(COLUMNS, run.steps.T) if not np.isnan(column).all()]
    for values in run.steps.tolist():
        row = {name: value for name, value in zip(COLUMNS, values)            # NaN: unknown, but of a loss
               if name in stated and (name == "train_loss" or math.isfinite(value))}
        whole = {name: int(row[name]) for name in ("step", "tokens") if name in row}
        rows[int(values[0])] = row | whole
    for point in run.val:
        row = rows.setdefault(point.step, {"step": point.step})
        row["val_loss"] = point.loss
        if point.seconds is not None:
            row.setdefault("seconds", point.seconds)
    return [rows[step] for step in sorted(rows)]

def name_of(run: Run) -> str:
    """Return the path of a run directory or text log, from the working directory, as one word."""
    place = run.path.parent if run.kind == "ours" else run.path
    return re.sub(r"[^\w.-]+", "_", os.path.relpath(place).replace(".." + os.sep, "")).strip(".") or "run"

def to_csv(run: Run, name: str, out: Path) -> None:
    table = io.StringIO()
    writer = csv.DictWriter(table, [*COLUMNS, "val_loss"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows_of(run))
    write_bytes(out / f"{name}.csv", table.getvalue().encode())

def to_tensorboard(run: Run, name: str, out: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter
    for old in (out / name).glob("events.out.tfevents.*"):                    # they would be drawn, too
        old.unlink()
    with SummaryWriter(str(out / name)) as writer:
        for row in rows_of(run):
            step = row.pop("step")
            for key, value in row.items():                # its axis "relative" shows training time
                writer.add_scalar(key, value, step, walltime=row.get("seconds", 0.0))

def to_trackio(run: Run, name: str, out: Path) -> None:
    os.environ["TRACKIO_DIR"] = str(out.resolve())        # read at the import
    for variable in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):               # they would send the curves there
        os.environ.pop(variable, None)
    import trackio
    trackio.init(project=PROJECT, name=name, config=run.settings, embed=False, auto_log_gpu=False, auto_log_cpu=False)
    log_rows(run, trackio.log)
    trackio.finish()

def to_wandb(run: Run, name: str, out: Path) -> None:
    import wandb
    settings = wandb.Settings(mode="offline", silent=True, console="off", x_disable_stats=True, x_disable_meta=True)
    session = wandb.init(project=PROJECT, name=name, config=run.settings, dir=str(out), settings=settings)
    log_rows(run, session.log)
    session.finish()
    wandb.teardown()                     # waits for its process, which writes the file

def log_rows(run: Run, log: Callable[..., object]) -> None:
    for row in rows_of(run):
        log({key: value for key, value in row.items() if key != "step"}, step=row["step"])

STORES = {"csv": to_csv, "tensorboard": to_tensorboard, "trackio": to_trackio, "wandb": to_wandb}

def main(parser: argparse.ArgumentParser, argv: list[str]) -> int:
    parser.add_argument("paths", nargs="+", metavar="RUN", help="run directories, text logs, or directories of them")
    parser.add_argument("--to", choices=STORES, required=True, help="where to")
    parser.add_argument("--out", type=Path, default=Path("logs/export"), help="output directory [%(default)s]")
    args = parser.parse_args(argv[1:])
    reading = read_runs(args.paths)
    if not reading.runs:
        raise ToolError(f"{' '.join(args.paths)} has no run ({reading.unread_in_words() or 'no file'}): give run "
                        "directories")
    args.out.mkdir(parents=True, exist_ok=True)
    names: list[str] = []
    for run in reading.runs:
        name = name_of(run)
        while name in names:                              # such as runs of one text log
            name += "_"
        STORES[args.to](run, name, args.out)
        names.append(name)
    say(f"{counted(len(names), 'run')} in {args.out}: {', '.join(names)}")
    if reading.unread:
        say(reading.unread_in_words())
    return 0

"""records/tools/export.py: each store is read back, if its package is installed."""
import csv
import importlib.util
import json
import math
import sqlite3
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from record_common import GOLDEN, call, make_run, write_events

from tools.read import COLUMNS                               # noqa: E402

STORES = "csv", "tensorboard", "trackio", "wandb"
LOSS = 2.1640625000000013                                     # 17 digits

def make_resumed_run(folder: Path) -> Path:
    """Write a run whose steps 6 to 10 were trained twice, whose step 3 has a loss of nan, and which logs rates."""
    log = make_run(folder, 1, LOSS, 80.0) / "log.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    for event in events:
        if event["type"] == "step":
            event |= dict(normuon_lr=0.02 / event["step"], adam_lr=0.008 / 3)
        if event["type"] == "step" and event["step"] == 3:
            event["train_loss_next"] = math.nan
    at = next(i for i, event in enumerate(events) if event["type"] == "step" and event["step"] == 9)
    first_try = [event | dict(train_loss_next=9.0) if event["type"] == "step" and event["step"] > 5 else event
                 for event in events[:at]]
    resumed = events[0] | dict(type="resumed", step=5)
    again = [event for event in events if event["type"] in ("step", "val", "result") and event.get("step", 99) > 5]
    write_events(log, [*first_try, resumed, *again])
    return folder

def wandb_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a .wandb file: LevelDB's log format behind a header of 7 bytes."""
    position, record = 7, b""
    while position + 7 <= len(data):
        left = 32_768 - position % 32_768                     # a block
        if left < 7:
            position += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, position)
        record += data[position + 7:position + 7 + size]
        position += 7 + size
        if kind in (1, 4):                                    # whole, or the last part
            yield record
            record = b""

def read_back(store: str, out: Path) -> dict[int, dict[str, float]]:
    """Read the only run of a store without the code under test: {step: {name: value}}."""
    rows: dict[int, dict[str, float]] = {}
    if store == "csv":
        path, = out.glob("*.csv")
        for row in csv.DictReader(path.open()):
            rows[int(row["step"])] = {name: float(cell) for name, cell in row.items() if cell and name != "step"}
    elif store == "tensorboard":
        accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        folder, = out.iterdir()
        events = accumulators.EventAccumulator(str(folder), {"scalars": 0}).Reload()
        for name in events.Tags()["scalars"]:
            for event in events.Scalars(name):
                rows.setdefault(event.step, {})[name] = event.value
    elif store == "trackio":
        path, = out.glob("*.db")
        for step, metrics in sqlite3.connect(path).execute("select step, metrics from metrics"):
            rows[step] = {name: float(value) for name, value in json.loads(metrics).items()}
    else:
        path, = out.rglob("run-*.wandb")
        for data in wandb_records(path.read_bytes()):
            record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record.FromString(data)
            row = {"".join([item.key, *item.nested_key]): json.loads(item.value_json) for item in record.history.item}
            if row:
                rows[row["_step"]] = {name: float(value) for name, value in row.items() if not name.startswith("_")}
    return rows

@pytest.mark.parametrize("store", STORES)
def test_export__is_read_back(tmp_path, store) -> None:
    """Each step once, nan as nan; all digits, but in TensorBoard, which stores float32."""
    if not importlib.util.find_spec(store):               # not imported here: trackio reads its variable then
        pytest.skip(f"{store} is not installed")
    run = make_resumed_run(tmp_path / "run")
    status, printed, error = call("export", run, f"--to={store}", f"--out={tmp_path}/out")
    assert status == 0 and "1 run" in printed, error
    rows = read_back(store, tmp_path / "out")
    assert sorted(rows) == [*range(11)]
    exact = 1e-7 if store == "tensorboard" else 0
    assert rows[10]["val_loss"] == pytest.approx(LOSS, rel=exact, abs=0)
    assert set(rows[7]) == {*COLUMNS} - {"step"} and math.isnan(float(rows[3]["train_loss"]))
    expected = dict(train_loss=5 - 7 / 10 + LOSS / 100 + 1 / 1000, tokens=7 * 56_320, normuon_lr=0.02 / 7,
                    adam_lr=0.008 / 3)
    for name, value in expected.items():
        assert rows[7][name] == pytest.approx(value, rel=exact, abs=0), name

def test_export__public_text_logs_and_what_cannot_be_exported(tmp_path, monkeypatch) -> None:
    status, printed, _ = call("export", GOLDEN / "d_timing.txt", "--to=csv", f"--out={tmp_path}")
    path, = tmp_path.glob("*.csv")
    assert status == 0 and path.stem in printed and ",nan" not in path.read_text(), "no column of nan"
    status, *_ = call("export", GOLDEN / "b_train_loss.txt", "--to=csv", f"--out={tmp_path}/unknown")
    path, = (tmp_path / "unknown").glob("*.csv")
    assert status == 0 and "nan" not in path.read_text(), "times that the log does not state are left out"
    status, _, error = call("export", tmp_path / "none", "--to=csv")
    assert status == 2 and "does not exist" in error
    monkeypatch.setitem(sys.modules, "trackio", None)
    status, _, error = call("export", GOLDEN / "d_timing.txt", "--to=trackio", f"--out={tmp_path}")
    assert status == 2 and "pip install trackio" in error

@pytest.mark.parametrize("inside, paths, out", [("", ["run"], "."), ("run/checkpoints", [".."], "../.."),
                                                ("run", ["."], "..")])
def test_export__to_tensorboard_deletes_only_event_files(tmp_path, monkeypatch, inside, paths, out) -> None:
    """Also if the directory of a run is where its copy goes, whatever the package does."""
    make_run(tmp_path / "run", 1, LOSS, 80.0)
    (tmp_path / "run/checkpoints").mkdir()
    before = sorted(tmp_path.rglob("*"))
    (tmp_path / "run/events.out.tfevents.1").touch()
    monkeypatch.chdir(tmp_path / inside)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", MagicMock())
    status, _, error = call("export", *paths, "--to=tensorboard", f"--out={out}")
    assert status == 0, error
    assert [path for path in before if not path.exists()] == []

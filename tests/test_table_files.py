"""Rows of tables in checkpoints and saves: written by every owner, read at any number of ranks and from either home.

Ranks are processes forked from this one. What damage does to a reader is in test_files.py.
"""
from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest
import torch
from common import Run, before_flush, full_disk, launch, losses, make_comm, preset, weights
from torch import Tensor

import train_gpt as tg

LABELS = ("more_bigram_embed", "trigram_embed")
DEVICE = "more_bigram_embed 2 700 stream 1; trigram_embed 3 1000 stream 1"
HOST = DEVICE.replace("stream 1", "stream 1 host")
F64 = ("--dtype=float64", "--adam_lr=0.1")                    # so that a sample is not what any weights would give
CUT = ("--max_steps=9", "--sample_tokens=0")                  # leaves the checkpoints of steps 6 and 8
ON = ("--max_steps=0", "--sample_tokens=8")                   # of a resumed run
OFTEN = "--checkpoint_every=2"
ROUNDING = 1e-8                          # of losses
ROW_ROUNDING = 1e-6                      # a fork that divides by small norms reaches 6e-8
WARM_UP = tg.warm_up

pytestmark = pytest.mark.usefixtures("small_pieces")

def done_well(folder: Path, world: int, *flags: str) -> Run:
    """A run of so many ranks, which ends with status 0; what rank 0 left."""
    ranks = launch(folder, world, *flags)
    assert [rank.status for rank in ranks] == [0] * world, ranks[0].err
    return ranks[0]

@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Runs of one and of two ranks: whole (with a save), and cut short after the checkpoint of step 8."""
    folder = tmp_path_factory.mktemp("tables")
    for world in (1, 2):
        flags = f"--tables={DEVICE}", *F64, OFTEN
        done_well(folder / f"whole{world}", world, *flags, "--sample_tokens=8", f"--save={folder / f'save{world}'}")
        done_well(folder / f"cut{world}", world, *flags, *CUT)
    return folder

def rows_of(folder: Path, label: str) -> dict[str, Tensor]:
    """All rows in a checkpoint or a save, in the order of ids."""
    pieces = [torch.load(path) for path in folder.glob(f"rows-{label}-*.pt")]
    order = torch.cat([piece["ids"] for piece in pieces]).sort().indices
    return {name: torch.cat([piece[name] for piece in pieces])[order] for name in pieces[0]}

def same(ours: Path, theirs: Path, limit: float = 0) -> bool:
    """Do two folders hold the same rows, to the last bit or to rounding? Ids and last updates always exactly."""
    for label in LABELS:
        expected = rows_of(theirs, label)
        for name, x in rows_of(ours, label).items():
            allowed = limit * expected[name].abs().max() if x.is_floating_point() else 0
            if x.shape != expected[name].shape or (x - expected[name]).abs().max() > allowed:
                return False
    return True

def checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / tg.CHECKPOINT_DIR / f"step-{step:07d}"

def validations(folder: Path) -> list[float]:
    """The losses on which all ranks agree: a step's line has the loss of one rank's slots."""
    return [event[3] for event in losses(folder) if event[0] == "val"]


# ---- Resumed ---------------------------------------------------------------------------------------------------------
def test_touched_row_files__every_owner_writes_its_touched_rows(place) -> None:
    result, = Run(place / "whole2", 0, "", "").of("result")
    for label in LABELS:
        for rank in range(2):
            paths = sorted(checkpoint(place / "cut2", 8).glob(f"rows-{label}-{rank}of2-*.pt"))
            assert len(paths) > 1, "in pieces"
            ids = torch.cat([torch.load(path)["ids"] for path in paths])
            assert (ids % 2 == rank).all() and (ids.diff() > 0).all()
        assert 0 < len(rows_of(checkpoint(place / "cut2", 8), label)["ids"]) < result["touched_rows"][label]
        assert rows_of(place / "save2", label).keys() == {"ids", "rows", "v", "last"}

@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("tables", [(), (f"--tables={HOST}", OFTEN)], ids=["same location", "other location"])
def test_load_checkpoint__resumes_bitwise(place, tmp_path, monkeypatch, world, tables) -> None:
    """On one rank after a warm-up, which has touched rows."""
    if world == 1:
        monkeypatch.setattr(tg, "warm_up", WARM_UP)
    done = done_well(tmp_path / "run", world, f"--resume={place / f'cut{world}'}", *ON, *tables,
                     f"--save={tmp_path / 'save'}")
    assert losses(tmp_path / "run") == losses(place / f"whole{world}")
    assert same(tmp_path / "save", place / f"save{world}")
    assert weights(tmp_path / "save") == weights(place / f"save{world}")
    resumed, = done.of("resumed")
    assert (resumed["step"], resumed["differs"]) == (8, {}), "a home is no difference"
    if tables:
        assert same(checkpoint(tmp_path / "run", 10), checkpoint(place / f"whole{world}", 10)), "with v and last"

@pytest.mark.parametrize("before, world", [(1, 2), (2, 1), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_load_checkpoint__another_number_of_ranks_resumes_to_rounding(place, tmp_path, before, world) -> None:
    done_well(tmp_path / "run", world, f"--resume={place / f'cut{before}'}", *ON, f"--tables={HOST}",
              f"--save={tmp_path / 'save'}")
    assert validations(tmp_path / "run") == pytest.approx(validations(place / "whole1"), abs=ROUNDING)
    assert same(tmp_path / "save", place / "save1", ROW_ROUNDING)

def test_touched_row_files__of_one_rank_and_of_two_are_the_same_to_rounding(place) -> None:
    assert validations(place / "whole2") == pytest.approx(validations(place / "whole1"), abs=ROUNDING)
    assert same(place / "save2", place / "save1", ROW_ROUNDING)
    assert same(checkpoint(place / "whole2", 10), checkpoint(place / "whole1", 10), ROW_ROUNDING)

@pytest.mark.parametrize("world, tables, home, dtype", [
    (1, HOST.replace("host", "host 4"), DEVICE.replace("stream 1", "stream 1 device 4"), "float64"),
    (2, DEVICE, HOST, "bfloat16")], ids=["update_every 4", "bf16"])
def test_load_checkpoint__other_tables_resume_bitwise_in_another_location(tmp_path, world, tables, home, dtype) -> None:
    flags = f"--tables={tables}", f"--dtype={dtype}", "--checkpoint_every=4", "--sample_tokens=0"
    done_well(tmp_path / "whole", world, *flags, f"--save={tmp_path / 'save'}")
    done_well(tmp_path / "run", world, f"--resume={tmp_path / 'whole'}", f"--tables={home}",
              f"--save={tmp_path / 'again'}")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole") and same(tmp_path / "again", tmp_path / "save")
    assert weights(tmp_path / "again") == weights(tmp_path / "save")

def on_rank(rank: int) -> bool:
    return os.environ.get("RANK") == str(rank)

def test_load_checkpoint__if_one_rank_cannot_read_all_use_the_previous_checkpoint(place, tmp_path, monkeypatch) -> None:
    sha256 = tg.file_sha256

    def failing(path: Path) -> str:
        if on_rank(1) and path.parent.name == "step-0000008" and path.name.startswith("rows"):
            raise OSError(errno.EIO, "Input/output error")
        return sha256(path)

    monkeypatch.setattr(tg, "file_sha256", failing)
    done = done_well(tmp_path / "run", 2, f"--resume={place / 'cut2'}", *ON, f"--save={tmp_path / 'save'}")
    assert "on rank 1" in done.out and "Input/output error" in done.out
    assert done.of("resumed")[0]["step"] == 6
    assert losses(tmp_path / "run") == losses(place / "whole2") and same(tmp_path / "save", place / "save2")


# ---- Stopped while it writes -----------------------------------------------------------------------------------------
def kill_in_a_file(patch: pytest.MonkeyPatch) -> None:
    def half_written(path: Path) -> None:
        if path.name == "rows-trigram_embed-0of1-1.pt":
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
    before_flush(patch, half_written, "step-0000008")

def kill_before_the_name(patch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def stopped(path: Path, target: Path) -> Path:
        if target.name == "step-0000008":
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(path, target)
    patch.setattr(Path, "rename", stopped)

@pytest.mark.parametrize("kill", [kill_in_a_file, kill_before_the_name])
def test_write_directory__a_killed_run_resumes_from_the_previous_checkpoint(place, tmp_path, monkeypatch, kill) -> None:
    with monkeypatch.context() as patch:
        kill(patch)
        killed, = launch(tmp_path / "killed", 1, f"--tables={DEVICE}", *F64, OFTEN, *CUT)
    assert killed.status == -signal.SIGKILL
    left = sorted(path.name for path in (tmp_path / "killed" / tg.CHECKPOINT_DIR).iterdir())
    assert left[:2] == ["step-0000004", "step-0000006"] and left[2].startswith("step-0000008.") and len(left) == 3
    done = done_well(tmp_path / "run", 1, f"--resume={tmp_path / 'killed'}", *ON)
    assert losses(done.folder) == losses(place / "whole1")
    assert done.of("resumed")[0]["step"] == 6

def test_write_directory__a_full_disk_of_one_rank(place, tmp_path, monkeypatch) -> None:
    """Its second file has no room: the run goes on without the checkpoint, and weights go to the run directory."""
    def full(path: Path) -> None:
        if on_rank(1) and path.name.endswith("-1.pt") and path.parent.name.startswith(("step-0000004", "full")):
            full_disk()

    before_flush(monkeypatch, full)
    ranks = launch(tmp_path / "run", 2, f"--tables={DEVICE}", *F64, OFTEN, f"--save={tmp_path / 'full'}")
    assert [done.status for done in ranks] == [1, 1], ranks[0].err
    assert "No space left on device" in ranks[0].out and "on rank 1" in ranks[0].out
    assert "continuing without this checkpoint" in ranks[0].out and "weights saved in " in ranks[0].out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"], "nothing half-named"
    assert not list((tmp_path / "run" / tg.CHECKPOINT_DIR).glob("*.part"))
    assert losses(tmp_path / "run") == losses(place / "whole2") and same(tmp_path / "run/save", place / "save2")


# ---- Samples ---------------------------------------------------------------------------------------------------------
def test_sample_from_save__prints_the_text_of_the_run(place, tmp_path) -> None:
    """Saves of one rank and of two are the same to rounding."""
    run = done_well(tmp_path / "run", 1, f"--resume={place / 'cut1'}", *ON)
    one, two = (done_well(tmp_path, 1, f"--sample={place / f'save{world}'}", "--sample_tokens=8").out
                for world in (1, 2))
    assert one == two and one.strip().splitlines()[-1] in run.out

def test_sample_from_save__stores_tables_on_the_host_without_gradients(place, monkeypatch, capsys) -> None:
    monkeypatch.delitem(tg.ROW_STORES, "device")
    monkeypatch.setattr(tg, "Optimizer", None)
    tg.sample_from_save(tg.load_config([f"--sample={place / 'save1'}", "--sample_tokens=4"]))
    assert "\ntoken ids" in capsys.readouterr().out
    cfg = preset(tables=tg.parse_value("tables", HOST))
    table = tg.Engine(cfg, make_comm(), tg.attention_reference, head_precision=None).tables["trigram_embed"]
    assert len(table.cache) == len(table.row_grads) == 0 and len(table.store.shard.rows) == 1000

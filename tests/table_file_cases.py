"""What ranks and killed runs do for test_table_files.py: runs with tables of n-grams, their checkpoints and saves.

    python tests/table_file_cases.py FOLDER

FOLDER/one is there: a run of one rank that was cut behind a checkpoint. Every case of the two ranks leaves its exit
status and what it said in FOLDER/w2/<case>.<rank>.json; a run that is killed leaves its folder. Nothing is judged here.
"""
from __future__ import annotations

import contextlib
import functools
import importlib
import io
import multiprocessing
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch
import torch.distributed as dist
from pytest import MonkeyPatch

import train_gpt as tg
from rank_cases import COMM_TIMEOUT, LATE_IMPORTS, Rank, one_rank, run

WORLD = 2
DEADLINE = 120                           # s for all cases of a rank
SMALL_PIECES = 1 << 15                   # bytes: several pieces of each table and rank
TABLES = ("--trigram_rows=1000", "--more_bigram_rows=700", "--table_signs=1", "--dtype=float64",
          "--adam_lr=0.1")             # so that a sample is not what any weights would give
CUT = ("--max_steps=9", "--checkpoint_every=2")      # leaves the checkpoints of steps 6 and 8
KILLED_AT = 8                            # step whose checkpoint is not finished


def trained(rank: Rank, folder: Path, flags: Sequence[str]) -> dict[str, Any]:
    """A whole run of all ranks in this folder, without a warm-up, which leaves no trace: status and output."""
    words = ["--preset=tiny", "--device=cpu", f"--comm_timeout={COMM_TIMEOUT}", "--sample_tokens=8",
             f"--run_dir={folder}", *flags]
    if any(flag.startswith("--resume") for flag in flags):
        del words[0]
    _, cfg = tg.parse_flags(words)
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), MonkeyPatch.context() as patch:
        patch.setattr(tg, "warm_up", lambda *_: [])
        status = run(cfg, replace(rank, case=f"{rank.case}.run"))
    return dict(status=status, out=out.getvalue(), err=err.getvalue())


def whole(rank: Rank) -> dict[str, Any]:
    folder = rank.folder.parent
    return trained(rank, folder / "two", [*TABLES, "--checkpoint_every=2", f"--save={folder / 'two_save'}"])


def cut(rank: Rank) -> dict[str, Any]:
    return trained(rank, rank.folder.parent / "two_cut", [*TABLES, *CUT])


def resumed(rank: Rank, source: str, flags: Sequence[str] = ()) -> dict[str, Any]:
    """A run to the end, which goes on from the checkpoints of another one."""
    folder = rank.folder.parent
    more = [f"--resume={folder / source}", "--max_steps=0", *flags, f"--save={folder / rank.case}_save"]
    return trained(rank, folder / rank.case, more)


def damaged(rank: Rank) -> dict[str, Any]:
    """The newest checkpoint lacks a piece of the other rank than the one that speaks."""
    folder = rank.folder.parent
    if rank.rank == 0:
        shutil.copytree(folder / "two_cut", folder / "two_damaged")
        last = sorted((folder / "two_damaged" / tg.CHECKPOINTS).glob("rows-0000008-*-1of2-*"))[-1]
        last.unlink()
    rank.fabric().of_all(None)                                # until it is there
    dist.destroy_process_group()
    return resumed(rank, "two_damaged")


class FullDisk:
    """Writing a piece of rank 1 into a folder with this name is refused."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.write_part = tg.write_part

    def __call__(self, path: Path, content: Any) -> dict[str, Any]:
        if path.parent.name == self.folder and path.name.startswith("rows-") and "-1of2-0001" in path.name:
            raise tg.RunError(f"writing {path}", "No space left on device", "room", "free some")
        return self.write_part(path, content)


def full(rank: Rank, where: str, flags: Sequence[str] = ()) -> dict[str, Any]:
    """A run whose second rank finds no room for its second piece."""
    folder = rank.folder.parent
    with MonkeyPatch.context() as patch:
        patch.setattr(tg, "write_part", FullDisk(where))
        return trained(rank, folder / rank.case, [*TABLES, *flags, f"--save={folder / 'full'}"])


CASES: dict[str, Callable[[Rank], dict[str, Any]]] = {
    "whole": whole,
    "cut": cut,
    "two_to_two": functools.partial(resumed, source="two_cut"),
    "two_to_host": functools.partial(resumed, source="two_cut", flags=("--table_home=host",)),
    "one_to_two": functools.partial(resumed, source="one"),
    "damaged": damaged,
    "full_checkpoint": functools.partial(full, where=tg.CHECKPOINTS, flags=("--checkpoint_every=2",)),
    "full_save": functools.partial(full, where="full"),
}

# ----------------------------------------------------------------------------------------------------------------------
# Runs of one rank that are killed while they write the checkpoint of step 8
# ----------------------------------------------------------------------------------------------------------------------

def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_a_piece() -> None:
    """With half of a file on the disk."""
    write_part = tg.write_part

    def half_written(path: Path, content: Any) -> dict[str, Any]:
        if path.name.startswith(f"rows-{KILLED_AT:07d}-trigram") and path.name.endswith("-0001"):
            tg.part_of(path).write_bytes(b"half")
            kill_me()
        return write_part(path, content)

    tg.write_part = half_written


def behind_the_pieces() -> None:
    """With all of them written, none with its name."""
    save_checkpoint = tg.save_checkpoint

    def stopped(folder: Path, step: int, *rest: Any) -> None:
        if step == KILLED_AT:
            kill_me()
        save_checkpoint(folder, step, *rest)

    tg.save_checkpoint = stopped


def before_the_last_name() -> None:
    """With all pieces named, and the checkpoint that names them not."""
    flush_names = tg.flush_names

    def stopped(folder: Path) -> None:
        if any(folder.glob(f"rows-{KILLED_AT:07d}-*.pt")):
            kill_me()
        flush_names(folder)

    tg.flush_names = stopped


MOMENTS = (in_a_piece, behind_the_pieces, before_the_last_name)


def killed(folder: Path, moment: Callable[[], None]) -> None:
    moment()
    torch.set_num_threads(1)
    tg.warm_up = lambda *_: []
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        tg.main(["--preset=tiny", "--device=cpu", f"--run_dir={folder / moment.__name__}", *TABLES, *CUT])


# ----------------------------------------------------------------------------------------------------------------------
# Processes
# ----------------------------------------------------------------------------------------------------------------------

def main(folder: Path) -> None:
    warnings.filterwarnings("ignore")
    for name in LATE_IMPORTS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    tg.PIECE_BYTES = SMALL_PIECES
    context = multiprocessing.get_context("fork")
    place = folder / f"w{WORLD}"
    place.mkdir()
    processes = [context.Process(target=killed, args=(folder, moment)) for moment in MOMENTS]
    processes += [context.Process(target=one_rank, args=(rank, WORLD, place, CASES, DEADLINE)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())

"""Starts W ranks as forks of this process, which has imported torch, and returns what each of them found.

    def everyone(rank):
        return rank.fabric().gather(rank.rank)

    def test_gather__in_order(ranks):
        assert ranks(2, everyone) == [[0, 1], [0, 1]]
"""
from __future__ import annotations

import faulthandler
import functools
import gc
import os
import pickle
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import train_gpt as tg

COMM_TIMEOUT = 10                        # s
PATIENCE = 120                           # s for what the ranks of one call do; then each says where it is


@dataclass(frozen=True)
class Rank:
    """One process of a world."""
    rank: int
    world: int
    folder: Path                         # of this call

    def fabric(self, cfg: tg.Config | None = None) -> tg.Fabric:
        """As the trainer makes it, but that ranks meet in a file."""
        meeting = dict(init_method=f"file://{self.folder}/store", rank=self.rank, world_size=self.world)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "init_process_group", functools.partial(dist.init_process_group, **meeting))
            return tg.make_fabric(cfg or tg.Config(device="cpu", num_slots=self.world, comm_timeout=COMM_TIMEOUT))

    def work(self, run: Callable, patience: float, given: dict[str, Any]):
        """What a fork does, and nothing after it: its parent's tests are not its own."""
        status = 1
        said = open(self.folder / f"{self.rank}.said", "w")   # why nothing came of it
        try:
            faulthandler.dump_traceback_later(patience, exit=True, file=said)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            torch.set_num_threads(1)     # a fork has no threads of the pool that its parent made
            warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
            os.environ.update(RANK=str(self.rank), LOCAL_RANK=str(self.rank), WORLD_SIZE=str(self.world),
                              MASTER_ADDR="127.0.0.1", MASTER_PORT="1")       # wanted, and not used: see fabric
            found = pickle.dumps(run(self, **given))
            (self.folder / f"{self.rank}.found").write_bytes(found)
            status = 0
        except BaseException:
            said.write(traceback.format_exc())
            said.flush()
        finally:
            os._exit(status)


class Ranks:
    """The fixture `ranks`. One call is one world; an equal call is answered with what the first one found, the same
    objects: do not change them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.folders = {}                # what was asked -> folder of the answer
        self.found = {}                  # folder -> by rank

    def __call__(self, world: int, run: Callable[..., Any], patience: float = PATIENCE, **given: Any) -> list[Any]:
        """run(rank, **given) on each rank of a world; by rank, what it returned.

        Fails with the stack of every rank that raised, or was there after patience seconds.
        """
        asked = world, run, repr(sorted(given.items()))
        if asked not in self.folders:
            self.folders[asked] = self.start(world, run, patience, given)
        folder = self.folders[asked]
        if folder not in self.found:
            files = [folder / f"{rank}.found" for rank in range(world)]
            silent = [path for path in files if not path.exists()]
            if silent:
                said = [f"rank {path.stem}:\n{path.with_suffix('.said').read_text()}" for path in silent]
                pytest.fail("\n".join([f"{run.__name__} with {world} ranks: nothing from these", *said]), pytrace=False)
            self.found[folder] = [pickle.loads(path.read_bytes()) for path in files]
        return self.found[folder]

    def folder_of(self, world: int, run: Callable[..., Any], **given: Any) -> Path:
        """Where the ranks of a call, made now or before, left their files."""
        self(world, run, **given)
        return self.folders[world, run, repr(sorted(given.items()))]

    def start(self, world: int, run: Callable, patience: float, given: dict[str, Any]) -> Path:
        folder = self.folder / f"{len(self.folders)}_{run.__name__}_w{world}"
        folder.mkdir()
        gc.collect()
        gc.freeze()                      # spares each rank's collector a look at it all, and copies of the pages
        children = []
        for rank in range(world):
            child = os.fork()
            if child == 0:
                Rank(rank, world, folder).work(run, patience, given)
            children.append(child)
        gc.unfreeze()
        deadline = time.monotonic() + patience + COMM_TIMEOUT
        while children:
            children = [child for child in children if os.waitpid(child, os.WNOHANG)[0] == 0]
            if time.monotonic() > deadline:
                for child in children:
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.002)
        return folder

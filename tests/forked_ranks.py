"""The fixture `ranks` starts W ranks as forks of this process, and returns what each of them found."""
from __future__ import annotations

import faulthandler
import functools
import pickle
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from common import Forked, environment_of

import train_gpt as tg

COMM_TIMEOUT = 60                        # s
TIMEOUT_S = 240                          # s for what the ranks of one call do; then each says where it is

@dataclass(frozen=True)
class Rank:
    rank: int
    world: int
    folder: Path                         # of this call

    def comm(self, cfg: tg.Config | None = None) -> tg.Communicator:
        """As the trainer makes it, but that ranks meet in a file."""
        meeting = dict(init_method=f"file://{self.folder}/store", rank=self.rank, world_size=self.world)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "init_process_group", functools.partial(dist.init_process_group, **meeting))
            default = tg.Config(device="cpu", seqs_per_step=self.world, comm_timeout=COMM_TIMEOUT)
            return tg.init_distributed(cfg or default)

    def work(self, run: Callable, kwargs: dict[str, Any], _: object) -> None:
        faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        found = pickle.dumps(run(self, **kwargs))
        (self.folder / f"{self.rank}.found").write_bytes(found)

class Ranks:
    """The fixture `ranks`. One call is one world; an equal call is answered with what the first one found, the same
    objects: do not change them."""
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # what was asked -> folder, by rank what it found, why some found nothing
        self.results: dict[tuple, tuple[Path, list[Any], list[str]]] = {}

    def __call__(self, world: int, run: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """run(rank, **given) on each rank of a world; by rank, what it returned. Fails with the stack of every rank
        that raised, or was there after PATIENCE seconds."""
        return self.get_result(world, run, kwargs)[1]

    def folder_of(self, world: int, run: Callable[..., Any], **kwargs: Any) -> Path:
        """Where the ranks of a call, made now or before, left their files."""
        return self.get_result(world, run, kwargs)[0]

    def get_result(self, world: int, run: Callable, kwargs: dict[str, Any]) -> tuple[Path, list[Any]]:
        key = world, run, repr(sorted(kwargs.items()))
        if key not in self.results:
            self.results[key] = self.start(world, run, kwargs)
        folder, found, failures = self.results[key]
        if failures:
            pytest.fail("\n".join([f"{run.__name__} with {world} ranks: nothing from these", *failures]), pytrace=False)
        return folder, found

    def start(self, world: int, run: Callable, kwargs: dict[str, Any]) -> tuple[Path, list[Any], list[str]]:
        folder = self.folder / f"{len(self.results)}_{run.__name__}_w{world}"
        folder.mkdir()
        processes = []
        for rank in range(world):        # the port is wanted, and not used: see fabric
            work = functools.partial(Rank(rank, world, folder).work, run, kwargs)
            processes.append(Forked([], environment_of(rank, world, port=1), call=work))
        found, failures = [], []
        for rank, process in enumerate(processes):
            status = process.wait(TIMEOUT_S + COMM_TIMEOUT)
            text = process.texts()[1]
            if status == 0:
                found.append(pickle.loads((folder / f"{rank}.found").read_bytes()))
            else:
                failures.append(f"rank {rank}, status {status}:\n{text}")
        return folder, found, failures

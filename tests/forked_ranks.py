"""The fixture `ranks` runs a function on W ranks, which are forks of this process, and returns the results."""
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
TIMEOUT_S = 240                          # for one call; then each rank prints its stack

@dataclass(frozen=True)
class Rank:
    rank: int
    world: int
    folder: Path                         # for the files of the call

    def comm(self, cfg: tg.Config | None = None) -> tg.Communicator:
        """Create the communicator as the trainer does, with a file for the rendezvous."""
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
    """Runs functions on several ranks, once per distinct call.

    A repeated call returns the objects of the first call, so tests must not change them.
    """
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # world, function, arguments -> folder, results by rank, failures
        self.results: dict[tuple, tuple[Path, list[Any], list[str]]] = {}

    def __call__(self, world: int, run: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """Run run(rank, **kwargs) on each rank; return the results by rank, or fail with the stacks of the ranks."""
        return self.get_result(world, run, kwargs)[1]

    def folder_of(self, world: int, run: Callable[..., Any], **kwargs: Any) -> Path:
        """Return the folder with the files of a call."""
        return self.get_result(world, run, kwargs)[0]

    def get_result(self, world: int, run: Callable, kwargs: dict[str, Any]) -> tuple[Path, list[Any]]:
        key = world, run, repr(sorted(kwargs.items()))
        if key not in self.results:
            folder = self.folder / f"{len(self.results)}_{run.__name__}_w{world}"
            folder.mkdir()
            processes = []
            for rank in range(world):    # a port must be set; `Rank.comm` does not use it
                work = functools.partial(Rank(rank, world, folder).work, run, kwargs)
                processes.append(Forked([], environment_of(rank, world, port=1), call=work))
            status = [process.wait(TIMEOUT_S + COMM_TIMEOUT) for process in processes]
            failures = [f"rank {rank}, status {status[rank]}:\n{process.texts()[1]}"
                        for rank, process in enumerate(processes) if status[rank]]
            found = [] if failures else [pickle.loads((folder / f"{rank}.found").read_bytes()) for rank in range(world)]
            self.results[key] = folder, found, failures
        folder, found, failures = self.results[key]
        if failures:
            pytest.fail("\n".join([f"{run.__name__} with {world} ranks: these failed", *failures]), pytrace=False)
        return folder, found

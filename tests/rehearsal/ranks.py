"""All ranks of a run on cards that are not there, side by side: what each says to the others, and whether they agree.

    python tests/walk_ranks.py [--ranks=8] [--card=H100] [-- flags of train_gpt.py]

One process for each rank. What ranks tell one another on the host, row plans before all, travels over gloo as in a
run. Collectives of the device are noted: name, dtypes, shapes, splits, order and waits; agreement.py compares them.
Graphs are not made: the model's code runs as it stands. Prints what disagrees, and ends with status 1 if anything does.

This process imports everything once and forks the ranks, so that a rank costs no start-up and little memory.
"""
from __future__ import annotations

import argparse
import gc
import inspect
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from . import phantom  # noqa: I001  before torch
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from . import agreement, walk
from .counts import HANDED_ON, short, tg, trainer_line
from .english import write_shard

COLLECTIVES = ("all_reduce", "reduce", "broadcast", "reduce_scatter_tensor", "all_gather_into_tensor",
               "all_to_all_single", "all_gather_object", "barrier")
GROUP_CALLS = ("init_process_group", "new_group", "destroy_process_group")
REAL = {name: getattr(dist, name) for name in COLLECTIVES + GROUP_CALLS}
REAL_TIMEOUT = dist.distributed_c10d._set_pg_timeout
OUTPUTS = ("output", "output_tensor", "tensor")          # names that torch gives them
INPUTS = ("input", "input_tensor", "tensor")
SETTINGS = ("op", "src", "dst", "group_src", "group_dst")     # what is neither data nor a group
SUBJECTS = ("label", "name")             # names that the trainer gives to what it reduces or moves
STEPS_PER_STAGE = 2                      # an even one and an odd one
DEADLINE = 1800                          # s for all ranks
PATIENCE = 600                           # s that a rank waits for the others, which have the same few cores
GRACE = 120                              # s for the others, once a rank has ended early
WORD = 11                                # a token, which the last stage's data repeat


# ---- One rank
class Rank:
    """What one rank launches, in its order."""

    def __init__(self, number: int, world: int, meeting: Path) -> None:
        self.number = number
        self.world = world
        self.meeting = meeting                   # the file over which the ranks find one another
        self.launches: list[agreement.Launch] = []
        self.place = "set-up"

    def collective(self, name: str) -> Callable:
        real = REAL[name]
        signature = inspect.signature(real)
        if name == "all_gather_object":
            real = gather_objects

        def call(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            launch = self.noted(name, given.arguments)
            if launch["group"] == "nccl":
                work = Work(launch)
                if given.arguments.get("async_op"):
                    return work
                work.wait()
                return None
            launch["awaited"] = launch["line"]           # the host's, which return when they are done
            with _disable_current_modes():               # they make tensors by themselves, of real bytes
                return real(*args, **kwargs)
        return call

    def noted(self, name: str, given: dict[str, Any]) -> agreement.Launch:
        out = next((given[key] for key in OUTPUTS if key in given), None)
        source = next((given[key] for key in INPUTS if key in given), None)
        group = "nccl"
        if not isinstance(out, FakeTensor):
            group = "gloo" if given["group"] is None else "plans"
        line, subject = trainer_place()
        settings = []
        for key in SETTINGS:
            if given.get(key) is not None:
                settings.append(f"{key}={getattr(given[key], 'name', given[key])}")
        launch = dict(
            group=group, name=name, settings=" ".join(settings), subject=subject, out=sizes_of(out),
            out_splits=given.get("output_split_sizes"), in_splits=given.get("input_split_sizes"),
            place=self.place, line=line, awaited="")
        launch["in"] = sizes_of(source)
        self.launches.append(launch)
        return launch

    def install(self) -> None:
        for name in COLLECTIVES:
            setattr(dist, name, self.collective(name))
        dist.init_process_group = self.join
        dist.new_group = REAL["new_group"]
        dist.destroy_process_group = REAL["destroy_process_group"]
        dist.distributed_c10d._set_pg_timeout = REAL_TIMEOUT

    def join(self, backend: str, **settings: Any) -> None:
        """The host's part of the group that the trainer asks for."""
        assert backend == "cpu:gloo,cuda:nccl", backend
        REAL["init_process_group"]("cpu:gloo", init_method=f"file://{self.meeting}", rank=self.number,
                                   world_size=self.world, **settings)


class Sizes(NamedTuple):
    """What a tensor without numbers is when it travels."""
    dtype: torch.dtype
    shape: tuple[int, ...]


def gather_objects(everyone: list, fact: Any, group: Any = None) -> None:
    """Parts of a checkpoint are tensors of the card, moved to the host: they arrive as such."""
    told = fact
    if isinstance(fact, torch.Tensor):
        assert isinstance(fact, FakeTensor), f"a copy of {tuple(fact.shape)} from the card that has numbers"
        told = Sizes(fact.dtype, tuple(fact.shape))
    REAL["all_gather_object"](everyone, told, group)
    if isinstance(fact, FakeTensor):
        everyone[:] = [fact.new_empty(sizes.shape, dtype=sizes.dtype) for sizes in everyone]


@dataclass
class Work:
    """A collective of the device that is under way."""
    launch: agreement.Launch

    def wait(self, *_: Any) -> bool:
        self.launch["awaited"] = trainer_line()
        return True


def sizes_of(x: Any) -> list:
    """[dtype, shape]; of objects, whose sizes are nobody's business, no shape."""
    if isinstance(x, torch.Tensor):
        return [short(x.dtype), list(x.shape)]
    return ["object", []]


def trainer_place() -> tuple[str, str]:
    """The trainer's line, and what it is about: of the frames above, the nearest that says so."""
    frame = sys._getframe()
    while frame.f_code.co_filename != tg.__file__ or frame.f_code.co_name in HANDED_ON:
        frame = frame.f_back
    subject = subject_in(frame.f_locals)
    while not subject and frame is not None:
        if frame.f_code.co_filename == tg.__file__:           # its arguments; other names may be left from a loop
            arguments = frame.f_code.co_varnames[:frame.f_code.co_argcount]
            subject = subject_in({name: frame.f_locals.get(name) for name in arguments})
        frame = frame.f_back
    return trainer_line(), subject


def subject_in(names: dict[str, Any]) -> str:
    for name in SUBJECTS:
        if isinstance(names.get(name), str):
            return names[name]
    owner = names.get("self")
    for holder in (getattr(owner, "table", None), getattr(owner, "row", None)):
        if isinstance(getattr(holder, "label", None), str):
            return holder.label
    return tg.SMALL if isinstance(owner, tg.Small) else ""


@dataclass
class Listeners:
    """What happens before and after calls of the trainer: the rank notes where in the run it is."""
    rank: Rank

    def at(self, place: str) -> Iterator[None]:
        before = self.rank.place
        self.rank.place = place
        yield
        self.rank.place = before

    def train_step(self, *args: Any) -> Iterator[None]:
        if self.rank.place != "warm-up":
            step = walk.argument(tg.Values, args).step
            self.rank.place = f"step {step}"                  # until the next one
        yield

    def warm_up(self, *_: Any) -> Iterator[None]:
        yield from self.at("warm-up")

    def evaluate(self, *_: Any, **__: Any) -> Iterator[None]:
        yield from self.at(f"validation after {self.rank.place}")

    def whole_state(self, *_: Any, **__: Any) -> Iterator[None]:
        yield from self.at(f"checkpoint after {self.rank.place}")


def uncompiled(call: Callable, **_: Any) -> Callable:
    return call


def run_rank(rank: Rank, mode: phantom.Card, flags: list[str], out: Path) -> None:
    """Walk, and leave the recording in a file."""
    with open(out.with_suffix(".log"), "w") as log:
        os.dup2(log.fileno(), 2)
    walk.be_rank(rank.number, rank.world, 1)                  # on a host of its own: the shim knows one device
    rank.install()
    walk.listen(Listeners(rank))
    error = ""
    try:
        walk.train(mode, *tg.parse_flags(flags))
    except BaseException as cause:                            # the recording up to here tells more than nothing
        traceback.print_exc()
        kind, line, said = walk.cause_of(cause)
        error = f"{kind}: {said} in {line}"
    finished = out.with_suffix(".part")
    finished.write_text(json.dumps(dict(launches=rank.launches, error=error, ended=time.time())))
    finished.rename(out)
    sys.stderr.flush()
    os._exit(1 if error else 0)


# ---- All of them
def wait_for_all(ranks: list[BaseProcess]) -> None:
    """Until all have ended; those that wait for one that ended early are ended too."""
    left = {rank.sentinel: rank for rank in ranks}
    deadline = time.monotonic() + DEADLINE
    while left:
        for sentinel in wait(left, max(0.0, deadline - time.monotonic())):
            rank = left.pop(sentinel)
            rank.join()
            if rank.exitcode:
                deadline = min(deadline, time.monotonic() + GRACE)
        if time.monotonic() > deadline:
            for rank in left.values():
                rank.kill()


def recordings_of(folder: Path, world: int) -> list[agreement.Recording]:
    """What the ranks have left; of one that left nothing, the end of what it said."""
    found = []
    for rank in range(world):
        recording = folder / f"{rank}.json"
        if recording.exists():
            found.append(json.loads(recording.read_text()))
        else:
            said = (folder / f"{rank}.log").read_text().strip().splitlines() or ["nothing"]
            error = f"killed, or without an answer; its last line: {said[-1]}"
            found.append(dict(launches=[], error=error, ended=0.0))           # that of the others follows from it
    return found


def flags_of_ranks(folder: Path, flags: list[str]) -> list[str]:
    """A short schedule through every stage, over a shard that has next to no distinct rows for the last one."""
    _, cfg = tg.parse_flags(flags)
    given = walk.flags_of_walk(folder, cfg, STEPS_PER_STAGE)
    header, = tg.find_shards(f"{folder}/train_*.bin")
    tokens = tg.load_shard(header).tokens
    tokens[::cfg.max_doc_len] = tg.GPT2_DOCUMENT_START        # longer documents are cut, and more shards needed
    of_the_others = STEPS_PER_STAGE * sum(stage.batch_tokens for stage in cfg.stages[:-1])
    end = tokens[of_the_others:]                              # a view
    end[end != tg.GPT2_DOCUMENT_START] = WORD
    write_shard(folder / "train_1.bin", tokens)
    return [*given, f"--comm_timeout={PATIENCE}", *flags]


def walk_ranks(world: int, card: str, flags: list[str]) -> list[agreement.Recording]:
    """One recording for each rank."""
    mode = walk.install(card, phantom.Recorder(), world)
    torch.compile = uncompiled
    torch.set_num_threads(1)
    tg.GPT.set_initial_values = phantom.always(None)          # numbers, in 0.8 GB of host memory for each rank
    fork = multiprocessing.get_context("fork")

    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        given = flags_of_ranks(folder, flags)
        gc.collect()
        gc.freeze()                                           # so that the ranks share these pages
        ranks = []
        for number in range(world):
            rank = Rank(number, world, folder / "meeting")
            ranks.append(fork.Process(target=run_rank, args=(rank, mode, given, folder / f"{number}.json")))
            ranks[-1].start()
        wait_for_all(ranks)
        return recordings_of(folder, world)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("walk_ranks.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--card", default="H100", choices=sorted(phantom.CARDS))
    parser.add_argument("--out", default="", help="file for the recordings")
    parser.add_argument("flags", nargs="*", help="of train_gpt.py, after --")
    wanted = parser.parse_args(argv)
    recordings = walk_ranks(wanted.ranks, wanted.card, ["--preset=record", *wanted.flags])
    if wanted.out:
        Path(wanted.out).write_text(json.dumps(recordings))

    found = agreement.disagreements(recordings)
    for group in agreement.groups_of(recordings):
        number = len(agreement.of_group(recordings[0], group))
        empty = ""
        if not found:
            empty = f", {agreement.empty_lists(recordings, group):,} empty lists from a rank to a rank"
        print(f"{group}: {number} collectives of each rank{empty or ' (of rank 0)'}")
    print("\n".join(found) or f"{wanted.ranks} ranks agree")
    return 1 if found else 0

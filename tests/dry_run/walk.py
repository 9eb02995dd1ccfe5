"""One rank's walk through `train()` on a card that is not there; what it launches, moves, keeps and waits for.

    PYTHONPATH=tests python -m dry_run.walk --world=8 --card=H100 --out=FILE -- flags of train_gpt.py

For a process of its own; dry_run.py starts it. Of the trainer it knows: where a run, a step, its two halves, a
validation and a checkpoint begin (LISTENED), custom operations, weights that are sharded, tables and row stores.
"""
from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import math
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from . import fake_cuda  # noqa: I001  before torch
import numpy as np
import torch
from torch import Tensor

from .counts import Buffer, Tally, text_of, tg

CYCLE = 2                                # steps that stand for all: an even one and an odd one
STEPS_PER_STAGE = 6                      # cycles: the one that changes stages, one that is like all others, its next
SPARE_TOKENS = 1.3                       # more than are read: documents are cut, and shards end
BETWEEN = "between"                      # a phase of which nothing is kept
OFF_THE_CLOCK = {"set-up", "warm-up", "checkpoint"}           # of these, only memory is kept


# ---- Listening to the trainer: every call goes through, some lines around it
LISTENED = dict(train_step=tg, warm_up=tg, train_loop=tg, forward_backward=tg.Engine, backward=Tensor,
                evaluate=tg.Engine, full_state=tg.Engine)

def listen(listeners: Any) -> None:
    """Run what the trainer calls inside the contexts of that name, which see the same arguments."""
    for name, owner in LISTENED.items():
        setattr(owner, name, inside(getattr(listeners, name), getattr(owner, name)))

def inside(listener: Callable, original: Callable) -> Callable:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with contextlib.contextmanager(listener)(*args, **kwargs):
            return original(*args, **kwargs)
    return call

def argument(kind: type, args: tuple) -> Any:
    return next(x for x in args if isinstance(x, kind))

class Listeners:
    """What happens before and after calls of the trainer: they tell the tally where the run is."""
    def __init__(self, tally: Tally, options: argparse.Namespace) -> None:
        self.tally = tally
        self.options = options

    def train_step(self, *args: Any) -> Iterator[None]:
        if self.tally.racing:
            values = argument(tg.StepConfig, args)
            self.tally.begin(name_of_step(self.tally.schedule, values.step), values.stage)
        yield

    def forward_backward(self, engine: Any, *args: Any) -> Iterator[None]:
        batch, values = argument(tg.Batch, args), argument(tg.StepConfig, args)
        slots = min(engine.micro_batch_size, len(batch.tokens))
        self.tally.stage = values.stage
        self.tally.logit_numbers = math.inf
        if has_graph(self.tally, self.options, "GPT.losses"):
            self.tally.logit_numbers = slots * batch.tokens.shape[1] * engine.cfg.padded_vocab
        self.tally.batch = batch
        yield

    def backward(self, *_: Any, **__: Any) -> Iterator[None]:
        self.tally.in_backward = True
        yield
        self.tally.in_backward = False

    def evaluate(self, engine: Any, *args: Any, **__: Any) -> Iterator[None]:
        values = argument(tg.StepConfig, args)
        self.tally.stage = values.stage
        of_stage = engine.cfg.stages[values.stage].long_window * engine.cfg.window_block
        final = values.long_window > of_stage                 # the others are like it
        yield from self.off_the_clock("validation final" if final else BETWEEN, values.stage)

    def full_state(self, *_: Any, **__: Any) -> Iterator[None]:
        yield from self.off_the_clock("checkpoint")

    def off_the_clock(self, name: str, stage: int | None = None) -> Iterator[None]:
        before = self.tally.timed
        self.tally.timed = False
        self.tally.begin(name, stage)
        yield
        self.tally.begin(BETWEEN)
        self.tally.timed = before

    def warm_up(self, *_: Any, **__: Any) -> Iterator[None]:
        yield from self.off_the_clock("warm-up")

    def train_loop(self, *args: Any, **__: Any) -> Iterator[None]:
        self.tally.schedule = argument(tg.Log, args).schedule                 # which only a time budget changes
        start_race(self.tally, argument(tg.Engine, args))
        yield
        self.tally.racing = self.tally.timed = False

def start_race(tally: Tally, engine: tg.Engine) -> None:
    """From here on nothing is compiled, and buffers as large as a table are those that a table owns."""
    tally.racing = tally.timed = True
    torch._logging.set_logs(recompiles=True)

    def keep_reason(record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "Recompiling" in text or "guard" in text:
            tally.reasons.append(" ".join(text.split()))

    handler = logging.Handler()
    handler.emit = keep_reason
    logging.getLogger("torch._dynamo").addHandler(handler)
    for label, group in engine.optimizer.sharded_groups.items():
        tally.owning[group.weight.numel()] = label
    for spec in tg.table_specs(engine.cfg):
        table = engine.tables[spec.label]
        row_grads = table.grad if isinstance(table, tg.LocalTable) else table.row_grads
        tally.row_grads[row_grads.untyped_storage()._cdata] = spec.label
        if spec.tied_to_head:                                 # as large as the head, of which there are copies
            continue
        tally.table_sizes |= {spec.num_rows * engine.cfg.model_dim,
                              tally.world * len(table.shard) * engine.cfg.model_dim}


# ---- Graphs
def rehearsed_compile(tally: Tally, options: argparse.Namespace) -> Callable:
    """torch.compile, which notes every graph; what is not to be compiled runs as it is written."""
    from torch._inductor import compile_fx
    real = torch.compile

    def compile_call(call: Callable, **settings: Any) -> Callable:
        name = call.__qualname__

        def inner(module: torch.fx.GraphModule, inputs: list, **facts: Any) -> Any:
            note_graph(tally, name, module, inputs, facts)
            return compile_fx.compile_fx_inner(module, inputs, **facts)

        def backend(module: torch.fx.GraphModule, inputs: list) -> Any:
            return compile_fx.compile_fx(module, inputs, inner_compile=inner)

        compiled = real(call, backend=backend, **settings)

        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            if name == "GPT.losses":
                tally.phase.timeline.append(["mark", "forward"])        # of a micro-batch
            if isinstance(args[0], tg.Batch):
                tally.batch = args[0]
            if not has_graph(tally, options, name):
                return call(*args, **kwargs)
            return compiled(*args, **kwargs)
        return run
    return compile_call

def has_graph(tally: Tally, options: argparse.Namespace, name: str) -> bool:
    if options.graphs == "none":
        return False
    if name.startswith("GPT.") and options.stages:
        return str(tally.stage + 1) in options.stages.split(",")
    return True

def note_graph(tally: Tally, name: str, module: torch.fx.GraphModule, inputs: list, facts: dict) -> None:
    """Keep how many nodes it has; in the race it is a failure."""
    part = "backward" if facts.get("is_backward") else "forward"
    where = f"stage {tally.stage + 1}"
    if not name.startswith("GPT."):
        where = next((text_of(x) for x in inputs if isinstance(x, Tensor) and x.dim() > 0), "")
    title = f"{name} {part}, {where}"
    if tally.racing:
        tally.fail("recompile", title, tally.reasons[-1] if tally.reasons else "a graph that the warm-up had not")
        raise RuntimeError(f"{title} is compiled again")      # and would be so at many steps
    while title in tally.graphs:
        title += " again"
    nodes = tally.graphs[title] = len(module.graph.nodes)
    line = f"{time.perf_counter() - tally.began:7.1f} s  W = {tally.world}  {title}: {nodes} nodes"
    print(line, file=sys.__stdout__, flush=True)              # the trainer's own lines go to stderr


# ---- The walk
def steps_by_stage(cfg: tg.Config) -> dict[str, dict[str, int]]:
    """How many even and odd steps the whole run has in each stage; the last stage is the extension."""
    schedule = tg.Schedule(cfg)
    steps = {}
    for number, (start, end) in enumerate(zip(schedule.stage_starts, schedule.stage_ends), 1):
        odd = end // 2 - start // 2
        steps[f"stage {number}"] = dict(even=end - start - odd, odd=odd)
    return steps

def flags_of_walk(folder: Path, cfg: tg.Config, steps: int) -> list[str]:
    """A schedule of so many steps in every stage, with data to go with it."""
    tokens = (steps + 2) * sum(stage.batch_tokens for stage in cfg.stages)
    for name, count, seed in (("train", int(SPARE_TOKENS * tokens), 1), ("val", 2 * cfg.val_batch_tokens, 2)):
        header = np.zeros(256, "<i4")
        header[:3] = tg.SHARD_MAGIC, tg.SHARD_VERSION, count // 2 * 2
        (folder / f"{name}_1.bin").write_bytes(header.tobytes() + english_like(count, seed).tobytes())
    last = steps * (len(cfg.stages) - 1)
    return [f"--train_files={folder}/train_*.bin", f"--val_files={folder}/val_*.bin", "--epochs=0",
            f"--val_tokens={cfg.val_batch_tokens}", f"--num_scheduled_steps={last}", f"--num_extension_steps={steps}",
            f"--val_every={last - steps}", f"--checkpoint_every={last - steps}", "--sample_tokens=1",
            f"--run_dir={folder}/run"]

def english_like(count: int, seed: int) -> np.ndarray:
    """Tokens whose documents and repetitions are like those of English text. Documents: lognormal, as measured on
    40,000 pages. Tokens come in pairs from a stock of pairs and fresh: that gives as many distinct tokens and
    neighbours as text has, within 5 % from 16,384 to 98,304 tokens."""
    rng = np.random.default_rng(seed)

    def drawn(names: int, exponent: float, shift: float, size: Any) -> np.ndarray:
        """Ranks, each as often as (rank + shift)^-exponent says."""
        shares = (np.arange(1, names + 1) + shift) ** -exponent
        return np.searchsorted(np.cumsum(shares / shares.sum()), rng.random(size)).clip(0, names - 1)

    by_rank = tg.GPT2_VOCAB - 1, 0.874, 4.1
    by_pair = 31_000, 1.15, 6.4
    tokens = drawn(*by_rank, (by_pair[0], 2))[drawn(*by_pair, count // 2)]
    fresh = rng.random(count // 2) < 0.156
    tokens[fresh] = drawn(*by_rank, (int(fresh.sum()), 2))
    tokens = tokens.ravel()
    lengths = np.exp(rng.normal(6.15, 0.88, count // 50)).astype(np.int64) + 2
    starts = np.cumsum(lengths) - lengths[0]
    tokens[starts[starts < len(tokens)]] = tg.GPT2_BOS_ID
    return tokens.astype("<u2")

def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("walk")
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--card", default="H100")
    parser.add_argument("--graphs", choices=("lower", "none"), default="lower")
    parser.add_argument("--out", default="/dev/stdout")
    parser.add_argument("--first-stage", action="store_true", help="only the steps of the first")
    parser.add_argument("--stages", default="", help="lower the graphs of these only, such as 1,2")
    parser.add_argument("flags", nargs="*")
    return parser.parse_args(argv)

def install(card: str, recorder: Tally, world: int) -> fake_cuda.Card:
    """The cards, and what the trainer does with them instead. Returns the mode to run the trainer in."""
    mode = fake_cuda.install(card, recorder, world)
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
    for name, operation in torch._library.custom_ops.OPDEFS.items():
        if name.startswith("train_gpt::"):
            fake_cuda.bodies[operation._opoverload] = operation._init_fn

    def save_nothing(content: Any, file: Any) -> None:        # a word in the place of tensors without numbers
        file.write(b"tensors")

    torch.save = save_nothing
    tg.DeviceRowStore.touched_rows = fake_cuda.always(())       # rows without numbers do not say if they were touched
    tg.ROW_STORES.update(host=WalkedRowStore)
    return mode

class WalkedRowStore(tg.HostRowStore):
    """Its worker's jobs wait, in order, until the walked thread wants a result: no other thread knows the card."""
    def __init__(self, *args: Any) -> None:
        self.to_do: list[tuple[Future, Callable, tuple]] = []
        super().__init__(*args)
        self.worker = self

    def submit(self, call: Callable, *args: Any) -> Future:
        work = Future()
        work.result = functools.partial(self.result_of, work)
        self.to_do.append((work, call, args))
        return work

    def result_of(self, work: Future, timeout: float | None = None) -> Any:
        while not work.done():
            next_work, call, args = self.to_do.pop(0)
            with fake_cuda.mode.recorder.elsewhere():
                next_work.set_result(call(*args))             # an exception surfaces here
        return Future.result(work)

def walk(options: argparse.Namespace) -> dict[str, Any]:
    tally = Tally(options.world)
    tally.began = time.perf_counter()
    mode = install(options.card, tally, options.world)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(options.world), LOCAL_WORLD_SIZE=str(options.world),
                      MASTER_ADDR="localhost", MASTER_PORT="1")
    torch.compile = rehearsed_compile(tally, options)
    listen(Listeners(tally, options))

    with tempfile.TemporaryDirectory() as folder:
        try:
            cfg = tg.load_config(["--preset=record", *options.flags])
            last = len(cfg.stages)
            if any(int(stage) > last for stage in options.stages.split(",") if stage):
                raise tg.ConfigError("--stages of the rehearsal", options.stages, f"some of 1 to {last}",
                                     "leave the others out")
            flags = flags_of_walk(Path(folder), cfg, STEPS_PER_STAGE)
            if options.first_stage:
                flags.append(f"--max_steps={STEPS_PER_STAGE}")
            given = tg.load_config(["--preset=record", *options.flags, *flags])
        except tg.TrainerError as error:
            return dict(error=str(error))
        ended = {}
        try:
            with mode, contextlib.redirect_stdout(sys.stderr):
                tg.train(given, tg.init_distributed(given), tg.ExitHandler(), Path(tg.__file__).read_bytes())
        except tg.TrainerError as error:                      # a card on which the preset does not fit
            return dict(error=str(error))
        except Exception as error:
            traceback.print_exc()
            if not tally.reasons:
                tally.fail(*cause_of(error))
            ended = dict(ended_by=str(error))
    return dict(result_of(tally, options.stages), steps=steps_by_stage(cfg), **ended)

def cause_of(error: Exception) -> tuple[str, str, str]:
    """Kind, line of the trainer and message of what ended the walk."""
    kinds = {torch._dynamo.exc.Unsupported: "graph break",
             torch._subclasses.fake_tensor.DynamicOutputShapeException: "host wait",
             torch._subclasses.fake_tensor.DataDependentOutputException: "host wait"}
    kind = next((name for of_error, name in kinds.items() if isinstance(error, of_error)), type(error).__name__)
    called = traceback.extract_tb(error.__traceback__)
    traced = getattr(error, "real_stack", None) or ()         # what was being traced lies deeper than what was called
    lines = ["outside of the trainer"]
    lines += [f"{frame.name}: {frame.line}" for frame in (*called, *traced) if frame.filename == tg.__file__]
    said = str(error).strip().splitlines() or [""]
    return kind, lines[-1], said[0]

def result_of(tally: Tally, stages: str) -> dict[str, Any]:
    phases = {}
    for name, phase in tally.phases.items():
        not_lowered = stages and phase.stage is not None and str(phase.stage + 1) not in stages.split(",")
        if name == BETWEEN or not_lowered or stages and name == "warm-up":
            continue
        timeline = [] if name in OFF_THE_CLOCK else phase.timeline
        phases[name] = dict(timeline=timeline, peak_bytes=phase.peak, at_peak=by_maker(phase.at_peak))
    for kernel in tally.kernels.values():                     # documents differ from step to step
        seen, flops = kernel.pop("seen"), kernel.pop("flops_seen")
        if seen and flops:
            kernel["flops"] = round(flops / seen)
    return dict(kernels=tally.kernels, graphs=tally.graphs, phases=phases, host_waits=tally.host_waits,
                waits_elsewhere=tally.waits_elsewhere, failures=tally.failures)

def by_maker(buffers: list[Buffer]) -> dict[str, list[int]]:
    """Number and bytes of buffers by shape and first launch."""
    groups: dict[str, list[int]] = {}
    for buffer in buffers:
        group = groups.setdefault(f"{buffer.shape} of {buffer.maker or 'nothing yet'}", [0, 0])
        group[0] += 1
        group[1] += buffer.size
    return groups

def name_of_step(schedule: tg.Schedule, step: int) -> str:
    """Steps that stand for all like them: the last cycle of a stage whose next cycle belongs to it too."""
    if step == schedule.untie_step:
        return "untie step"
    k = schedule.stage_at(step)
    place = schedule.stage_ends[k] - step                 # from the end
    steady = min(2 * CYCLE, schedule.stage_ends[k] - schedule.stage_starts[k])
    if not 0 <= steady - place < CYCLE:
        return BETWEEN
    return f"stage {k + 1} {'odd' if step % CYCLE else 'even'} step"


if __name__ == "__main__":
    wanted = parse(sys.argv[1:])
    Path(wanted.out).write_text(json.dumps(walk(wanted)))

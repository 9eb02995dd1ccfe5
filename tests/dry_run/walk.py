"""One walk: run one rank's `train()` on a fake GPU, and record what it launches, moves, stores and waits for.

    PYTHONPATH=tests python -m dry_run.walk --world=8 --card=H100 --out=FILE -- flags of train_gpt.py

A walk needs a separate process, which dry_run.py starts. It depends on the functions of the trainer in HOOKED, its
custom operations, sharded weights and tables.
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
from pathlib import Path
from typing import Any

from . import shim  # noqa: F401, I001  before torch
import numpy as np
import torch
from torch import Tensor

from . import fake_cuda
from .counts import Buffer, Tally, describe, tg

CYCLE_STEPS = 2                          # an even step and an odd step represent all others
STEPS_PER_STAGE = 6                      # three cycles: the one that changes stages, a typical one, and the next one
TOKEN_MARGIN = 1.3  # factor on the tokens that are written, because documents are truncated and shards end
UNCOUNTED = "between"                    # name of phases that are not recorded
MEMORY_ONLY = {"set-up", "warm-up", "checkpoint"}             # only memory is recorded in these


# ---- Hooks: every call of the trainer continues normally, with code before and after it
HOOKED = dict(train_step=tg, warm_up=tg, train_loop=tg, forward_backward=tg.Engine, backward=Tensor,
              evaluate=tg.Engine, write_checkpoint=tg)

def install_hooks(hooks: Any) -> None:
    """Run each hooked function of the trainer inside the hook of the same name, which gets the same arguments."""
    for name, owner in HOOKED.items():
        setattr(owner, name, wrap_in_context(getattr(hooks, name), getattr(owner, name)))

def wrap_in_context(hook: Callable, original: Callable) -> Callable:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with contextlib.contextmanager(hook)(*args, **kwargs):
            return original(*args, **kwargs)
    return call

def find_argument(kind: type, args: tuple) -> Any:
    return next(x for x in args if isinstance(x, kind))

class Hooks:
    """Code that runs before and after functions of the trainer. It tells the tally which phase of the run begins."""
    def __init__(self, tally: Tally, options: argparse.Namespace) -> None:
        self.tally = tally
        self.options = options

    def train_step(self, *args: Any) -> Iterator[None]:
        if self.tally.in_train_loop:
            step_cfg = find_argument(tg.StepConfig, args)
            self.tally.begin(step_phase(self.tally.schedule, step_cfg.step), step_cfg.stage)
        yield

    def forward_backward(self, engine: Any, *args: Any) -> Iterator[None]:
        batch, step_cfg = find_argument(tg.Batch, args), find_argument(tg.StepConfig, args)
        micro_batch_size = min(engine.micro_batch_size, len(batch.tokens))
        self.tally.stage = step_cfg.stage
        self.tally.logits_numel = math.inf
        if has_graph(self.tally, self.options, "GPT.losses"):
            self.tally.logits_numel = micro_batch_size * batch.tokens.shape[1] * engine.cfg.padded_vocab
        self.tally.batch = batch
        yield

    def backward(self, *_: Any, **__: Any) -> Iterator[None]:
        self.tally.in_backward = True
        yield
        self.tally.in_backward = False

    def evaluate(self, engine: Any, *args: Any, **__: Any) -> Iterator[None]:
        step_cfg = find_argument(tg.StepConfig, args)
        self.tally.stage = step_cfg.stage
        stage_window = engine.cfg.stages[step_cfg.stage].long_window * engine.cfg.window_block
        final = step_cfg.long_window > stage_window           # the other validations are similar
        yield from self.untimed("validation final" if final else UNCOUNTED, step_cfg.stage)

    def write_checkpoint(self, *_: Any, **__: Any) -> Iterator[None]:
        self.tally.batch = None                               # the trainer does not keep it either
        yield from self.untimed("checkpoint")

    def untimed(self, name: str, stage: int | None = None) -> Iterator[None]:
        before = self.tally.timed
        self.tally.timed = False
        self.tally.begin(name, stage)
        yield
        self.tally.begin(UNCOUNTED)
        self.tally.timed = before

    def warm_up(self, *_: Any, **__: Any) -> Iterator[None]:
        yield from self.untimed("warm-up")

    def train_loop(self, *args: Any, **__: Any) -> Iterator[None]:
        self.tally.schedule = find_argument(tg.Log, args).schedule
        start_train_loop(self.tally, find_argument(tg.Engine, args))
        yield
        self.tally.in_train_loop = self.tally.timed = False

def start_train_loop(tally: Tally, engine: tg.Engine) -> None:
    """Begin to check that no graph is compiled, and that only tables have buffers of the size of a table."""
    tally.in_train_loop = tally.timed = True
    torch._logging.set_logs(recompiles=True)

    def keep_reason(record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "Recompiling" in text or "guard" in text:
            tally.recompile_reasons.append(" ".join(text.split()))

    handler = logging.Handler()
    handler.emit = keep_reason
    logging.getLogger("torch._dynamo").addHandler(handler)
    for label, group in engine.optimizer.groups.items():
        if isinstance(group, tg.ShardedGroup):
            tally.label_by_numel[group.weight.numel()] = label
    for spec in tg.table_specs(engine.cfg):
        table = engine.tables[spec.label]
        row_grads = table.grad if isinstance(table, tg.LocalTable) else table.row_grads
        tally.row_grads[row_grads.untyped_storage()._cdata] = spec.label
        if spec.tied_to_head:                                 # as large as the head, whose copies are allowed
            continue
        padded_rows = tally.world_size * spec.shard_rows(tally.world_size)
        tally.table_numels |= {num_rows * engine.cfg.model_dim for num_rows in (spec.num_rows, padded_rows)}


# ---- Graphs
def compile_and_note(tally: Tally, options: argparse.Namespace) -> Callable:
    """Return a torch.compile that records every graph. Graphs that are not to be lowered run eagerly."""
    from torch._inductor import compile_fx
    torch_compile = torch.compile

    def compile_call(call: Callable, **settings: Any) -> Callable:
        name = call.__qualname__
        inductor_options = settings.pop("options", None)

        def inner(module: torch.fx.GraphModule, inputs: list, **facts: Any) -> Any:
            note_graph(tally, name, module, inputs, facts)
            return compile_fx.compile_fx_inner(module, inputs, **facts)

        def backend(module: torch.fx.GraphModule, inputs: list) -> Any:
            return compile_fx.compile_fx(module, inputs, inner_compile=inner, config_patches=inductor_options)

        compiled = torch_compile(call, backend=backend, **settings)

        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            if name == "GPT.losses":
                tally.phase.timeline.append(["mark", "forward"])        # one micro-batch
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
    """Record the number of nodes of a graph. During the training loop a new graph is a failure."""
    part = "backward" if facts.get("is_backward") else "forward"
    where = f"stage {tally.stage + 1}"
    if not name.startswith("GPT."):
        where = next((describe(x) for x in inputs if isinstance(x, Tensor) and x.dim() > 0), "")
    title = f"{name} {part}, {where}"
    if tally.in_train_loop:
        reasons = tally.recompile_reasons or ["the warm-up did not compile this graph"]
        tally.fail("recompile", title, reasons[-1])
        raise RuntimeError(f"{title} was compiled again")      # otherwise it would recompile at every following step
    while title in tally.graphs:
        title += " again"
    nodes = tally.graphs[title] = len(module.graph.nodes)
    line = f"{time.perf_counter() - tally.began:7.1f} s  W = {tally.world_size}  {title}: {nodes} nodes"
    print(line, file=sys.__stdout__, flush=True)              # the trainer prints to stderr here


# ---- The walk
def steps_by_stage(cfg: tg.Config) -> dict[str, dict[str, int]]:
    """Count the even and the odd steps of each stage in the whole run. The last stage is the extension."""
    schedule = tg.Schedule(cfg)
    steps = {}
    for stage_num, (start, end) in enumerate(zip(schedule.stage_starts, schedule.stage_ends), 1):
        odd = end // 2 - start // 2
        steps[f"stage {stage_num}"] = dict(even=end - start - odd, odd=odd)
    return steps

def make_flags(folder: Path, cfg: tg.Config, steps: int) -> list[str]:
    """Write data, and return flags for a schedule with this many steps in every stage."""
    tokens = (steps + 2) * sum(stage.batch_tokens for stage in cfg.stages)
    for name, count, seed in (("train", int(TOKEN_MARGIN * tokens), 1), ("val", 2 * cfg.val_batch_tokens, 2)):
        header = np.zeros(256, "<i4")
        header[:3] = tg.SHARD_MAGIC, tg.SHARD_VERSION, count // 2 * 2
        (folder / f"{name}_1.bin").write_bytes(header.tobytes() + english_like(count, seed).tobytes())
    last = steps * (len(cfg.stages) - 1)
    return [f"--train_files={folder}/train_*.bin", f"--val_files={folder}/val_*.bin", "--epochs=0",
            f"--val_tokens={cfg.val_batch_tokens}", f"--num_scheduled_steps={last}", f"--num_extension_steps={steps}",
            f"--val_every={last - steps}", f"--checkpoint_every={last - steps}", "--sample_tokens=1",
            f"--run_dir={folder}/run"]

def english_like(count: int, seed: int) -> np.ndarray:
    """Draw tokens with document lengths, distinct tokens and bigrams as in English text.

    Lengths are lognormal, as measured on 40,000 pages. Pairs of tokens are from a fixed list, or independent.
    """
    rng = np.random.default_rng(seed)

    def draw(num_ids: int, exponent: float, shift: float, size: Any) -> np.ndarray:
        """Draw ranks from 0 with probabilities proportional to (rank + 1 + shift)^-exponent."""
        weights = (np.arange(1, num_ids + 1) + shift) ** -exponent
        return np.searchsorted(np.cumsum(weights / weights.sum()), rng.random(size)).clip(0, num_ids - 1)

    by_rank = tg.GPT2_VOCAB - 1, 0.874, 4.1
    by_pair = 31_000, 1.15, 6.4
    tokens = draw(*by_rank, (by_pair[0], 2))[draw(*by_pair, count // 2)]
    is_fresh = rng.random(count // 2) < 0.156
    tokens[is_fresh] = draw(*by_rank, (int(is_fresh.sum()), 2))
    tokens = tokens.ravel()
    lengths = np.exp(rng.normal(6.15, 0.88, count // 50)).astype(np.int64) + 2
    starts = np.cumsum(lengths) - lengths[0]
    tokens[starts[starts < len(tokens)]] = tg.GPT2_BOS_ID
    return tokens.astype("<u2")

def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("walk")
    parser.add_argument("--world", dest="world_size", type=int, default=8, help="world size [%(default)s]")
    parser.add_argument("--card", default="H100", help="GPU to compile for [%(default)s]")
    parser.add_argument("--graphs", choices=("lower", "none"), default="lower",
                        help="lower graphs and compile kernels, or run eagerly [%(default)s]")
    parser.add_argument("--out", default="/dev/stdout", help="JSON file for the result [stdout]")
    parser.add_argument("--stages", default="", help="lower only the graphs of these stages, for example 1,2 [all]")
    parser.add_argument("flags", nargs="*", help="flags of train_gpt.py, after --")
    return parser.parse_args(argv)

def install(card: str, recorder: Tally, world_size: int) -> fake_cuda.Card:
    """Install the fake GPUs, and replace what fake tensors cannot do. Return the mode to run the trainer in."""
    mode = fake_cuda.install(card, recorder, world_size)
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
    for name, operation in torch._library.custom_ops.OPDEFS.items():
        if name.startswith("train_gpt::"):
            fake_cuda.bodies[operation._opoverload] = operation._init_fn

    # Fake tensors have no values to save, nor values that show which rows of a table have been updated.
    torch.save = lambda content, path: Path(path).touch()
    tg.RowwiseTable.touched_rows = lambda table: torch.empty(0, dtype=torch.int64, device=table.comm.device)
    return mode

def walk(options: argparse.Namespace) -> dict[str, Any]:
    tally = Tally(options.world_size)
    tally.began = time.perf_counter()
    mode = install(options.card, tally, options.world_size)
    world_size = str(options.world_size)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size,
                      MASTER_ADDR="localhost", MASTER_PORT="1")
    torch.compile = compile_and_note(tally, options)
    install_hooks(Hooks(tally, options))

    with tempfile.TemporaryDirectory() as folder:
        try:
            cfg = tg.load_config(["--preset=record", *options.flags])
            stages = {"", *map(str, range(1, len(cfg.stages) + 1))}
            tg.check(set(options.stages.split(",")) <= stages, f"--stages={options.stages}: 1 to {len(cfg.stages)}")
            flags = make_flags(Path(folder), cfg, STEPS_PER_STAGE)
            cfg_of_walk = tg.load_config(["--preset=record", *options.flags, *flags])
        except tg.TrainerError as error:
            return dict(error=str(error))
        ended = {}
        try:
            with mode, contextlib.redirect_stdout(sys.stderr):
                tg.train(cfg_of_walk)
        except tg.TrainerError as error:
            return dict(error=str(error))
        except Exception as error:
            traceback.print_exc()
            if not tally.recompile_reasons:
                tally.fail(*find_cause(error))
            ended = dict(ended_by=str(error))
    return dict(collect_result(tally, options.stages), steps=steps_by_stage(cfg), **ended)

def find_cause(error: Exception) -> tuple[str, str, str]:
    """Return the kind of the failure, the line of the trainer and the message of the exception that ended the walk."""
    kinds = {torch._dynamo.exc.Unsupported: "graph break",
             torch._subclasses.fake_tensor.DynamicOutputShapeException: "host wait",
             torch._subclasses.fake_tensor.DataDependentOutputException: "host wait"}
    kind = next((name for error_type, name in kinds.items() if isinstance(error, error_type)), type(error).__name__)
    frames = traceback.extract_tb(error.__traceback__)
    # Lines that were being traced come last: they are deeper in the stack than the line that was called.
    traced_frames = getattr(error, "real_stack", None) or ()
    lines = ["outside the trainer"]
    lines += [f"{frame.name}: {frame.line}" for frame in (*frames, *traced_frames) if frame.filename == tg.__file__]
    message = str(error).strip().splitlines() or [""]
    return kind, lines[-1], message[0]

def collect_result(tally: Tally, stages: str) -> dict[str, Any]:
    phases = {}
    for name, phase in tally.phases.items():
        not_lowered = stages and phase.stage is not None and str(phase.stage + 1) not in stages.split(",")
        if name == UNCOUNTED or not_lowered or stages and name == "warm-up":
            continue
        timeline = [] if name in MEMORY_ONLY else phase.timeline
        phases[name] = dict(timeline=timeline, peak_bytes=phase.peak_bytes, at_peak=group_buffers(phase.at_peak))
    for kernel in tally.kernels.values():                   # averages, because documents differ from step to step
        seen, flops = kernel.pop("seen"), kernel.pop("flops_seen")
        if seen and flops:
            kernel["flops"] = round(flops / seen)
    return dict(kernels=tally.kernels, graphs=tally.graphs, phases=phases, host_waits=tally.host_waits,
                failures=tally.failures)

def group_buffers(buffers: list[Buffer]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for buffer in buffers:
        group = groups.setdefault(f"{buffer.shape} of {buffer.first_launch or 'nothing yet'}", [0, 0])
        group[0] += 1
        group[1] += buffer.size
    return groups

def step_phase(schedule: tg.Schedule, step: int) -> str:
    """Return the phase of a step. The last cycle but one of a stage, which plans a typical cycle, represents it."""
    if step == schedule.untie_step:
        return "untie step"
    stage_idx = schedule.stage_at(step)
    steps_to_end = schedule.stage_ends[stage_idx] - step
    steady = min(2 * CYCLE_STEPS, schedule.stage_ends[stage_idx] - schedule.stage_starts[stage_idx])
    if not 0 <= steady - steps_to_end < CYCLE_STEPS:
        return UNCOUNTED
    return f"stage {stage_idx + 1} {'odd' if step % CYCLE_STEPS else 'even'} step"


if __name__ == "__main__":
    args = parse_args(sys.argv[1:])
    Path(args.out).write_text(json.dumps(walk(args)))

"""One walk: run one rank's `train()` on a fake GPU, and record what it launches, moves, stores and waits for.

    PYTHONPATH=tests python -m dry_run.walk FILE WORLD_SIZE CARD STAGES [flags of train_gpt.py]

FILE gets the result. STAGES: lower only the graphs of these stages, for example 1,2; "" is all, and `none` lowers no
graph. A walk needs a separate process, which dry_run.py starts. It depends on the functions of the trainer in HOOKED,
its custom operations, sharded weights and tables.
"""
import base64
import contextlib
import functools
import json
import logging
import math
import os
import sys
import tempfile
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
from .counts import Tally, describe, tg

CYCLE_STEPS = 2                          # an even step and an odd step represent all others
STEPS_PER_STAGE = 6                      # three cycles: the one that changes stages, a typical one, and the next one
TOKEN_MARGIN = 1.3  # factor on the tokens that are written, because documents are truncated and shards end
UNCOUNTED = "between"                    # name of phases that are not recorded
MEMORY_ONLY = "set-up", "warm-up", "checkpoint"               # only memory is recorded in these


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
    def __init__(self, tally: Tally) -> None:
        self.tally = tally

    def train_step(self, *args: Any) -> Iterator[None]:
        if self.tally.in_train_loop:
            step_cfg = find_argument(tg.StepConfig, args)
            self.tally.stage = step_cfg.stage
            self.tally.begin(step_phase(self.tally, step_cfg.step))
        yield

    def forward_backward(self, engine: Any, *args: Any) -> Iterator[None]:
        batch, step_cfg = find_argument(tg.Batch, args), find_argument(tg.StepConfig, args)
        micro_batch_size = min(engine.cfg.micro_batch_size, len(batch.tokens))
        self.tally.stage = step_cfg.stage
        self.tally.logits_numel = math.inf
        if self.tally.is_lowered("GPT.losses"):
            self.tally.logits_numel = micro_batch_size * batch.tokens.shape[1] * engine.cfg.padded_vocab
        self.tally.batch = batch
        yield

    def backward(self, *_: Any, **__: Any) -> Iterator[None]:
        self.tally.in_backward = True
        yield
        self.tally.in_backward = False

    def evaluate(self, engine: Any, *args: Any, **__: Any) -> Iterator[None]:
        self.tally.stage = find_argument(tg.StepConfig, args).stage
        # The last validation replaces the others.
        yield from self.untimed("validation final" if self.tally.is_lowered("GPT.losses") else UNCOUNTED)

    def write_checkpoint(self, *_: Any, **__: Any) -> Iterator[None]:
        self.tally.batch = None                               # the trainer does not keep it either
        yield from self.untimed("checkpoint")

    def untimed(self, name: str) -> Iterator[None]:
        before = self.tally.timed
        self.tally.timed = False
        self.tally.begin(name)
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
    for handler in logging.getLogger("torch._dynamo").handlers:
        handler.setStream(sys.__stderr__)                     # the reasons of a recompile, next to other errors
    for label, group in engine.optimizer.groups.items():
        if isinstance(group, tg.ShardedGroup):
            tally.label_by_numel[group.weight.numel()] = label
    for spec in tg.table_specs(engine.cfg):
        table = engine.tables[spec.label]
        tally.row_grads[table.row_grads.untyped_storage()._cdata] = spec.label
        # `embed` is as large as the head, whose copies are allowed. With one rank, the summed gradient is a whole table.
        if spec.label == "embed" or tally.world_size == 1:
            continue
        padded_rows = tally.world_size * spec.shard_rows(tally.world_size)
        tally.table_numels |= {num_rows * engine.cfg.model_dim for num_rows in (spec.num_rows, padded_rows)}


# ---- Graphs
def compile_and_note(tally: Tally) -> Callable:
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
            if isinstance(args[0], tg.Batch):
                tally.batch = args[0]
            return compiled(*args, **kwargs) if tally.is_lowered(name) else call(*args, **kwargs)
        return run
    return compile_call

def note_graph(tally: Tally, name: str, module: torch.fx.GraphModule, inputs: list, facts: dict) -> None:
    """Record the number of nodes of a graph. During the training loop a new graph is a failure."""
    part = "backward" if facts.get("is_backward") else "forward"
    where = f"stage {tally.stage + 1}"
    if not name.startswith("GPT."):
        where = next((describe(x) for x in inputs if isinstance(x, Tensor) and x.dim() > 0), "")
    title = f"{name} {part}, {where}"
    if tally.in_train_loop:
        tally.fail("recompile", title, "the warm-up did not compile this graph")
        raise RuntimeError(f"{title} was compiled again")      # otherwise it would recompile at every following step
    while title in tally.graphs:
        title += " again"
    nodes = tally.graphs[title] = len(module.graph.nodes)
    print(f"W = {tally.world_size}  {title}: {nodes} nodes", file=sys.__stdout__, flush=True)


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
    words = (b"%s %d\n" % (base64.b64encode(b"%d" % token), token) for token in range(tg.GPT2_BOS_ID))
    (folder / tg.VOCAB_FILE).write_bytes(b"".join(words))     # for forks that need the bytes of tokens
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

def walk(world_size: int, card: str, stages: list[str], flags: list[str]) -> dict[str, Any]:
    tally = Tally(world_size, stages)
    mode = install(card, tally, world_size)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
                      MASTER_ADDR="localhost", MASTER_PORT="1")
    torch.compile = compile_and_note(tally)
    install_hooks(Hooks(tally))
    cfg = tg.load_config(["--preset=record", *flags])
    num_stages = len(cfg.stages)
    tg.check(set(stages) <= {"none", *map(str, range(1, num_stages + 1))}, f"--stages={stages}: 1 to {num_stages}")
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as log:
        flags = [*flags, *make_flags(Path(folder), cfg, STEPS_PER_STAGE)]
        try:
            with mode, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
                tg.train(tg.load_config(["--preset=record", *flags]))
        except Exception as error:
            traceback.print_exc()
            if not any(failure.startswith("recompile") for failure in tally.failures):
                tally.fail(*find_cause(error))
    return dict(collect_result(tally), steps=steps_by_stage(cfg))

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

def collect_result(tally: Tally) -> dict[str, Any]:
    tally.phases.pop(UNCOUNTED, None)
    if tally.stages:
        tally.phases.pop("warm-up", None)
    for name in MEMORY_ONLY:
        if name in tally.phases:
            tally.phases[name]["timeline"] = []
    for kernel in tally.kernels.values():                   # averages, because documents differ from step to step
        seen, flops = kernel.pop("seen"), kernel.pop("flops_seen")
        if seen and flops:
            kernel["flops"] = round(flops / seen)
    return dict(kernels=tally.kernels, graphs=tally.graphs, phases=tally.phases, host_waits=tally.host_waits,
                failures=tally.failures)

def step_phase(tally: Tally, step: int) -> str:
    """Return the phase of a step. The last cycle but one of a stage, which plans a typical cycle, represents it."""
    schedule = tally.schedule
    if not tally.is_lowered("GPT.losses"):
        return UNCOUNTED
    if step == schedule.last_tied_step:
        return "untie step"
    start, end = schedule.stage_starts[tally.stage], schedule.stage_ends[tally.stage]
    steady = min(2 * CYCLE_STEPS, end - start)
    if not 0 <= steady - (end - step) < CYCLE_STEPS:
        return UNCOUNTED
    return f"stage {tally.stage + 1} {'odd' if step % CYCLE_STEPS else 'even'} step"


if __name__ == "__main__":
    path, world_size, card, stages, *flags = sys.argv[1:]
    Path(path).write_text(json.dumps(walk(int(world_size), card, stages.split(",") if stages else [], flags)))

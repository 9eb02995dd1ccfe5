"""Run update intervals of tables on W ranks: plans, exchange, lookups, gradients and updates as with a model.

Gradients are small integers that depend on the signs of the looked-up rows. Their sums are exact in every dtype and
order, and a stale, lost or duplicated row changes bits. Rows are sent as late as possible.
"""
import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from common import exact_array, owned_rows, plan_of
from pytest import MonkeyPatch
from reference import NaiveTable, split_by_owner
from torch import Tensor

import train_gpt as tg

NUM_SEQS, WIDTH = 8, 5                   # sequences per step, features
LR_MUL, WD_MUL, WEIGHT_DECAY, EPS = 2.0, 3.0, 0.25, 1e-3
BETA1 = 0.75
RANK_0_MULTIPLE = 24                     # rank 0 owns its multiples, for each tested W
# Relative and absolute tolerance of row-wise updates. In bf16 only results of cancellation in p - u differ, because the
# f32 square roots of torch and NumPy differ.
TOLERANCE = dict(float64=(1e-12, 1e-12), bfloat16=(0.0, 1e-7))
PAIRS = tg.NgramTable("more_bigram_embed", 2, 97)
TRIPLES = tg.NgramTable("trigram_embed", 3, 301)
Results = dict[str, Any]


# ---- Delayed exchanges -----------------------------------------------------------------------------------------------
class DelayedAllToAll:
    """Replaces dist.all_to_all_single with one whose results arrive as late as possible.

    The output is NaN until it is waited for, and the input is NaN afterwards. Rows that were not waited for arrive
    after those of a later exchange.
    """
    def __init__(self) -> None:
        self.all_to_all = dist.all_to_all_single
        self.pending: list[Callable[[], None]] = []       # by the order of their launch

    def __call__(self, out: Tensor, sent: Tensor, out_splits: list[int], in_splits: list[int], **kwargs: Any) -> Any:
        if not sent.is_floating_point():                                      # row requests
            return self.all_to_all(out, sent, out_splits, in_splits, **kwargs)
        received = torch.empty_like(out)
        work = self.all_to_all(received, sent, out_splits, in_splits, **kwargs)
        out.fill_(math.nan)

        def arrive() -> None:
            work.wait()
            out.copy_(received)

        def wait() -> None:
            if arrive in self.pending:
                older = self.pending[:self.pending.index(arrive)]
                for transfer in (arrive, *older):
                    transfer()
                    self.pending.remove(transfer)
            sent.fill_(math.nan)

        self.pending.append(arrive)
        return SimpleNamespace(wait=wait)

@contextlib.contextmanager
def late_rows() -> Iterator[None]:
    with MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", DelayedAllToAll())
        yield


# ---- Lookups and gradients -------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Trial:
    tables: tuple[tuple[str, int], ...]  # (pattern of lookups, number of rows)
    mode: str = "sparse"                 # --row_comms for dense-Adam tables
    rowwise: bool = False                # n-gram tables; otherwise tables have dense Adam
    dtype: str = "float64"
    update_every: int = 2
    updates: int = 7

    @property
    def beta2(self) -> float:
        return 0.5 if self.dtype == "bfloat16" else 0.9                       # powers of 0.5 are exact

@functools.cache
def rows_by_pattern(rows: int, update: int, step: int, seq: int) -> dict[str, np.ndarray]:
    """Return the global rows that a sequence looks up in a step, i32, by pattern."""
    rng = np.random.default_rng([rows, update, step, seq])
    ids = rng.integers(0, rows, 8)
    lower_half = ids // 2
    by_pattern = {
        "uniform": ids,
        "zero gradients": ids,
        "skewed": np.minimum(rng.pareto(0.7, 8), rows - 1),
        "odd sequences empty": ids[8 * (seq % 2):],
        "one sequence only": ids[:8 * (seq == 0)],
        "empty in some updates": ids[:8 * (update % 3 > 0)],
        "never looked up": ids[:0],
        "same rows everywhere": (np.arange(5) * 7 + update) % rows,
        "all rows": rng.permutation(rows),
        "one owner": RANK_0_MULTIPLE * rng.integers(0, -(-rows // RANK_0_MULTIPLE), 6),
        "first and last": np.array([0, rows - 1, 0]),
        "growing": ids[:(0, 3, 8, 1, 6)[update % 5] + step],
        "looked up again": lower_half + rows // 2 * (update not in (0, 6)),
        "every other update": np.minimum(2 * lower_half + update % 2, rows - 1),
        "once": lower_half[:8 * (update == 0)],
    }
    return {pattern: x.astype(np.int32) for pattern, x in by_pattern.items()}

PATTERNS = tuple(rows_by_pattern(2, 0, 0, 0))

def gradient(pattern: str, update: int, step: int, seq: int, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return integers from -2 to 2 as gradients of the looked-up rows, which have these values."""
    i, j = np.indices(values.shape)
    grad = (3 * i + 5 * step + 7 * seq + 11 * update + 2 * j) % 3 - 1 + np.sign(values)
    if pattern == "zero gradients":
        grad = grad * (rows % 2)[:, None]
    return grad.astype(values.dtype)

def learning_rate(update: int) -> float:
    """Return a learning rate that is large enough to change signs of rows."""
    return 0.15 / (1 + update % 3)

def initial_rows(trial: Trial, pattern: str, rows: int) -> Tensor:
    """Draw the initial rows; zeros for row-wise tables and for the pattern that may never look up a row."""
    weights = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
    if trial.rowwise or pattern == "once":
        weights.zero_()
    return weights.to(getattr(torch, trial.dtype))


# ---- The trainer's tables and optimizer ------------------------------------------------------------------------------
class TableOptimizer(tg.Optimizer):
    """The trainer's optimizer with tables only."""
    def __init__(self, cfg: tg.Config, comm: tg.Communicator, tables: dict[str, tg.Table]) -> None:
        self.cfg = cfg
        self.comm = comm
        self.grad_scale = 1 / cfg.seqs_per_step
        self.model = SimpleNamespace(lm_head=None)
        self.adam = tg.adam_update
        self.rowwise = tg.rowwise_update
        self.groups, self.order = tables, list(tables)
        self.state = {spec.label: tg.init_optimizer_state(spec, shard) for table in tables.values()
                      for spec, shard in zip(table.specs, table.shards)}

class Intervals:
    """A trial on one rank: plans one interval ahead like the loader, and steps in the order of `train_step`."""
    def __init__(self, comm: tg.Communicator, trial: Trial) -> None:
        self.comm = comm
        self.trial = trial
        self.seqs = range(comm.rank, NUM_SEQS, comm.world_size)
        settings = dict(dtype=trial.dtype, model_dim=WIDTH, seqs_per_step=NUM_SEQS, adam_eps=EPS, row_comms=trial.mode,
                        adam_every=1, adam_weight_decay=WEIGHT_DECAY)
        cfg = tg.Config(**tg.PRESETS["tiny"] | settings)
        self.patterns, self.specs, self.tables = {}, {}, {}
        for pattern, rows in trial.tables:
            label = f"{pattern} of {rows}"
            self.patterns[label] = pattern, rows
            self.specs[label] = tg.TableSpec(label, rows, 1, None, rowwise=trial.rowwise,
                                             update_every=trial.update_every)
            betas = BETA1 * (not trial.rowwise), trial.beta2
            spec = tg.ParameterSpec(label, (rows, WIDTH), None, "rowwise" if trial.rowwise else "adam", LR_MUL, WD_MUL,
                                    betas, table=self.specs[label])
            tokens_per_update = NUM_SEQS * trial.update_every * max(8, rows)
            shard = owned_rows(initial_rows(trial, pattern, rows), comm)
            if trial.rowwise:
                self.tables[label] = tg.RowwiseTable(spec, cfg, comm, tokens_per_update)
            else:
                self.tables[label] = tg.Table(spec, cfg, comm, shard, tokens_per_update, head=None)
        self.optimizer = TableOptimizer(cfg, comm, self.tables)
        self.planned: dict[int, tuple] = {}

    def plans(self, update: int) -> tuple[dict[str, tg.RowPlan], dict[str, list[np.ndarray]]]:
        """Return the plans of an interval, which are built once, and the row index of each step, by table."""
        if update in self.planned:
            return self.planned[update]
        plans, index = {}, {}
        for label, (pattern, num_rows) in self.patterns.items():
            ids_by_step = []
            for step in range(self.trial.update_every):
                ids_by_seq = [rows_by_pattern(num_rows, update, step, seq)[pattern] for seq in self.seqs]
                ids_by_step.append(np.concatenate(ids_by_seq)[None])
            fetch_all = self.trial.mode == "dense" and not self.trial.rowwise
            plans[label], index[label] = plan_of(self.specs[label], self.comm, ids_by_step, fetch_all=fetch_all)
        if self.comm.world_size > 1:
            tg.exchange_row_requests(self.comm, self.comm.loader_group, plans)
        self.planned[update] = plans, index
        return self.planned[update]

    def look_up(self, label: str, update: int, step: int) -> None:
        plans, lookup_rows = self.plans(update)
        cache, row_grads = self.tables[label].rows_for_forward(plans[label])
        index = torch.from_numpy(lookup_rows[label][step][0])
        pattern, num_rows = self.patterns[label]
        rows_by_seq = [rows_by_pattern(num_rows, update, step, seq)[pattern] for seq in self.seqs]
        values_by_seq = np.split(exact_array(cache[index.long()]), np.cumsum([len(rows) for rows in rows_by_seq])[:-1])
        grads = [gradient(pattern, update, step, seq, *args)
                 for seq, *args in zip(self.seqs, rows_by_seq, values_by_seq)]
        grad = torch.from_numpy(np.concatenate(grads)).to(cache.dtype)
        for chunk in (slice(3), slice(3, None)):              # two calls add up
            tg.add_rows(row_grads, index[chunk], grad[chunk])

    def fetched(self, label: str, update: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the fetched rows of an interval, as owner * C + local row, and the values that lookups read there."""
        plan = self.plans(update)[0][label]
        cache, _ = self.tables[label].rows_for_forward(plan)
        rows_to_fetch = plan.rows_to_fetch.numpy()
        return rows_to_fetch, exact_array(cache[:len(rows_to_fetch)])

    def run(self) -> dict[str, Results]:
        """Run all intervals.

        Returns by table the rows fetched in each interval, and this rank's final shard and state.
        """
        trial = self.trial
        results = {label: dict(intervals=[]) for label in self.tables}
        for update in range(trial.updates):
            for label in self.tables:
                results[label]["intervals"].append(self.fetched(label, update))
            for step in range(trial.update_every):
                for label in self.tables:
                    self.look_up(label, update, step)
                step_cfg = SimpleNamespace(step=update * trial.update_every + step, adam_lr=learning_rate(update),
                                           tied=False, untie_after=False)
                next_update = update + (step + 1 == trial.update_every)
                next_step_plans = self.plans(next_update)[0] if next_update < trial.updates else {}
                self.optimizer.step(step_cfg)
                for label, plan in next_step_plans.items():
                    self.tables[label].fetch(plan)
        for label, table in self.tables.items():
            results[label] |= self.state(label, table)
        return results

    def state(self, label: str, table: tg.Table) -> Results:
        if self.trial.rowwise:
            state = table.state._asdict() | dict(touched=table.touched_rows())
        else:
            state = self.optimizer.state[label] | dict(rows=table.shards[0])
        return {name: exact_array(x) for name, x in state.items()}

def drive(comm: tg.Communicator, trial: Trial) -> dict[str, Results]:
    with late_rows():
        return Intervals(comm, trial).run()


# ---- The naive run ---------------------------------------------------------------------------------------------------
@functools.cache
def naive_run(trial: Trial, pattern: str, rows: int) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Run the trial on one rank with full tables. Returns the rows before each update, and the final state."""
    p = initial_rows(trial, pattern, rows)
    m = torch.zeros(rows, WIDTH, dtype=tg.accum_dtype(p.dtype))
    v = torch.zeros_like(m)
    exact_dtype = np.float64 if trial.dtype == "float64" else np.float32
    naive = NaiveTable(f"{pattern} of {rows}", rows, WIDTH, trial.beta2, EPS, exact_dtype,
                       bf16=trial.dtype == "bfloat16")
    before = []
    for update in range(trial.updates):
        before.append(naive.p.copy() if trial.rowwise else exact_array(p))
        requested = np.zeros(rows, bool)
        grad = np.zeros((rows, WIDTH), exact_dtype)
        abs_sums = np.zeros((rows, WIDTH))
        for step, seq in itertools.product(range(trial.update_every), range(NUM_SEQS)):
            rows_read = rows_by_pattern(rows, update, step, seq)[pattern]
            grads = gradient(pattern, update, step, seq, rows_read, before[-1][rows_read])
            requested[rows_read] = True
            np.add.at(grad, rows_read, grads)
            np.add.at(abs_sums, rows_read, np.abs(grads))
        assert abs_sums.max() <= 256, "bf16 would round"
        lr = LR_MUL * learning_rate(update)
        if trial.rowwise:
            naive.update(requested, [grad], NUM_SEQS, lr, WEIGHT_DECAY * WD_MUL)
            continue
        update_num = update + 1
        step_size = lr * (math.sqrt(1 - trial.beta2**update_num) / (1 - BETA1**update_num))
        decay = lr * lr * WEIGHT_DECAY * WD_MUL
        tg.adam_update(p, torch.from_numpy(grad), m, v, 1 / NUM_SEQS, (BETA1, trial.beta2), EPS,
                       tg.cpu_scalar(step_size), tg.cpu_scalar(decay))
    if trial.rowwise:
        missed = naive.updates - naive.last_update
        return before, dict(rows=naive.p, v=naive.v, last_update=naive.last_update, missed=missed)
    return before, dict(rows=exact_array(p), m=m.numpy(), v=v.numpy())

def differences(trial: Trial, by_rank: list[dict[str, Results]]) -> list[str]:
    """Name the fetched rows and final states that differ from the naive run; dense Adam must be bitwise equal."""
    world_size = len(by_rank)
    rtol, atol = TOLERANCE[trial.dtype] if trial.rowwise else (0, 0)
    wrong = []
    for (pattern, rows), (rank, results) in itertools.product(trial.tables, enumerate(by_rank)):
        label = f"{pattern} of {rows}"
        before, end = naive_run(trial, pattern, rows)
        table_results = results[label]

        def compare(name: str, found: np.ndarray, expected: np.ndarray) -> None:
            if found.shape != expected.shape or not np.allclose(found, expected, rtol, atol):
                wrong.append(f"{label}: {name} on rank {rank}")

        for update, ((rows_to_fetch, values), table) in enumerate(zip(table_results["intervals"], before, strict=True)):
            shards = np.concatenate(split_by_owner(table, world_size))    # padded with zeros
            compare(f"rows fetched for update {update}", values, shards[rows_to_fetch])
        shard = {name: split_by_owner(x, world_size)[rank] for name, x in end.items()}
        if trial.rowwise:
            shard["touched"] = np.flatnonzero(shard["last_update"])
            # The trainer catches up on missed decays of v at the next update of a row.
            decayed = table_results["v"] * trial.beta2 ** shard.pop("missed")
            table_results = table_results | dict(v=decayed)
        for name, x in shard.items():
            compare(name, table_results[name], x)
    return wrong

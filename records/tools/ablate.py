"""Verb `ablate`: what is each technique worth? Switches them off one at a time, against interleaved baselines.

What is data in the trainer is switched by its flags, anything else by a patch in records/ablations/, applied to a copy.
A round is one seed: baseline, arms (rotated from round to round), baseline. The same command continues; what ended is
not repeated, unless a lower --limit had cut it off. An arm that failed, whose losses equal the baseline's bit by bit
(n/a), or that is HOPELESS, gets no further seed. With --together=K a round is K seeds, and those of an arm run in one
process after one warm-up (--runs), where the patched trainer still has that flag; half of a short run is warm-up.

Differences are arm - baseline of the same seed, averaged over seeds; a round's baselines are averaged. Two seeds say
next to nothing about an arm's noise (t with one degree of freedom), so all arms share one: loss = arm + seed + noise is
fitted by least squares, the residuals give the noise's sd with N - arms - seeds + 1 degrees of freedom, and a
difference over n seeds has the standard error sd sqrt(2 / n). Equal noise in all arms is assumed: a wild one widens all
intervals. One arm: the paired t-test. Of times the unit is the process: seeds that ran together give one time. A
per cent without an interval says nothing, and is n/a: times take two rounds.
Exit status: 0 done, whatever the arms are worth; 2 bad input, or a baseline that fails; 130 interrupted."""
from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tools import launch, logs, verdict
from tools.layout import MANIFEST, short_hashes
from tools.logs import Run, ToolError

PATCHES = Path(__file__).resolve().parent.parent / "ablations"
TRAINER, BASELINE = "train_gpt.py", "baseline"             # the name that patches know; the arm without a change
SHORT = ["--preset=pocket", "--num_scheduled_steps=72", "--num_extension_steps=4", "--val_every=0",
         "--sample_tokens=0"]      # 24 s on two quiet cores, 13 s of them training
HOPELESS = 0.25                    # nats worse than the baseline; ten times what two seeds differ by at that length
HAS_RUNS = re.compile(r"^\s+runs\s*:\s*int", re.M)        # the field behind the flag, in the trainer
LIMIT_GROWTH = 1.2                 # a run that was cut off is tried again at a limit that is higher by that factor
SHOWN_CAUSE = 90                   # characters of why a run failed

Stages = list[dict[str, Any]]      # the stage table of a run, as its header has it


# ---- Arms
def stage_flag(stages: Stages) -> list[str]:
    """The flag that sets a stage table. `untie`, the last column, is a word that stands there or not."""
    rows = []
    for stage in stages:
        words = [column(value) for name, value in stage.items() if name != "untie"]
        if stage.get("untie"):
            words.append("untie")
        rows.append(" ".join(words))
    return ["--stages=" + ";".join(rows)]


def column(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return str(value)


def tied(stages: Stages) -> list[str]:
    """No stage unties embedding and head."""
    return stage_flag([stage | {"untie": False} for stage in stages])


def one_target(stages: Stages) -> list[str]:
    """Every stage trains on the next token only."""
    change = {"mtp_start": [1.0], "mtp_end": [1.0]}
    return stage_flag([stage | change for stage in stages])


def second_batch(stages: Stages) -> list[str]:
    """Every stage has the batch of stage 2."""
    tokens = stages[1]["batch_tokens"]
    return stage_flag([stage | {"batch_tokens": tokens} for stage in stages])


class Arm(NamedTuple):
    name: str
    off: str                                               # what the arm does without, or does instead
    flags: list[str] | Callable[[Stages], list[str]] | None = None                    # None: by the patch of that name

    @property
    def patch(self) -> Path:
        return PATCHES / f"{self.name}.patch"

    def size(self) -> str:
        """Of the patch, as "+3 -1"."""
        if self.flags is not None:
            return "flags" if self.flags else ""
        _, _, hunks = self.patch.read_text(encoding="utf-8").partition("@@")
        signs = [line[0] for line in hunks.splitlines()]
        return f"+{signs.count('+')} -{signs.count('-')}"

    def flags_for(self, stages: Callable[[], Stages]) -> list[str]:
        """stages: finds the stage table of the baseline."""
        if callable(self.flags):
            return self.flags(stages())
        return self.flags if self.flags else []


ARMS = {arm.name: arm for arm in (
    Arm(BASELINE, "", []),
    Arm("smear", "no share of the token before in an embedding"),
    Arm("skip", "layer 6 takes nothing from layer 3"),
    Arm("backout", "layer 7 is not subtracted before the head"),
    Arm("value_embeddings", "nothing is added to attention values"),
    Arm("bigram", "no hashed bigrams in the stream"),
    Arm("key_offset", "keys of layers 3 and 10 are the token's own"),
    Arm("paired_heads", "plain heads in layers 0, 2, 5, 9"),
    Arm("attention_gates", "every head's output is halved"),
    Arm("x0_mix", "no input embedding before layers"),
    Arm("multi_token_loss", "the next token only", one_target),
    Arm("softcap", "cross-entropy of the plain logits"),
    Arm("yarn", "rotation and scale of stage 1 throughout"),
    Arm("batch_schedule", "stage 2's batch throughout", second_batch),
    Arm("untying", "head and embedding stay one parameter", tied),
    Arm("cautious_decay", "decay against the update, too"),
    Arm("weight_decay", "no decay", ["--normuon_weight_decay=0", "--adam_weight_decay=0"]),
    Arm("normuon_second_moment", "Muon's update as it is"),
    Arm("momentum_warmup", "full momentum from step 0", ["--momentum_warmup_steps=0"]),
    Arm("fp8_head", "head product in the dtype of the weights", ["--head=plain"]))}


class Job(NamedTuple):
    arm: str
    seed: int
    repeat: int = 0                                        # 1: the baseline that ends a round

    @property
    def name(self) -> str:
        return f"{self.arm}_seed{self.seed}" + ("_end" if self.repeat else "")


def patched(script: Path, arm: Arm, folder: Path) -> Path:
    """A copy of the trainer in `folder`, patched without fuzz (lines may have moved). Raises ToolError."""
    folder.mkdir(parents=True, exist_ok=True)
    copy = Path(shutil.copyfile(script, folder / TRAINER))
    if arm.flags is not None:
        return copy
    above = str(folder.resolve().parent)
    alone = os.environ | {"GIT_CEILING_DIRECTORIES": above}            # a repository around it would hide the file
    git = subprocess.run(["git", "apply", str(arm.patch)], cwd=folder, env=alone, capture_output=True, text=True)
    if git.returncode:
        known = f"lines of {script.name} as the patch knows them"
        raise ToolError(f"patch {arm.patch.name}", git.stderr.strip(), known,
                        f"make it anew (records/ablations/README.md), or leave {arm.name} out of --arms")
    return copy


def rounds(arms: list[str], seeds: dict[str, int], together: int = 1) -> Iterator[Job]:
    """All runs in order; seeds: how many, by arm; together: of a round. Every round begins with another arm."""
    count = max(seeds.values())
    for start in range(0, count, together):
        its_seeds = range(start, min(start + together, count))
        first = round(len(arms) * start / count)
        for seed in its_seeds:
            yield Job(BASELINE, seed)
        for name in arms[first:] + arms[:first]:
            for seed in its_seeds:
                if seed < seeds[name]:
                    yield Job(name, seed)
        for seed in its_seeds:
            yield Job(BASELINE, seed, 1)


# ---- The runs
class State(NamedTuple):
    """Of a job: its log if it ended well, why it failed, or neither if it is to be done."""
    run: Run | None = None
    why: str = ""

    @property
    def open(self) -> bool:
        return self == State()


class Ablation:
    """Runs what is missing, and knows what is there. Raises ToolError if the folder is that of another ablation."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.names = [BASELINE, *args.arms]
        self.jobs = list(rounds(args.arms, args.seeds_of, args.together))
        sources = launch.source_hashes(args.script)
        plan = {"script": sources, "flags": SHORT + args.flags, "ranks": args.ranks}
        if args.together > 1:
            plan["together"] = args.together
        self.out = args.out or Path(f"logs/ablation_{sources[args.script.name][:8]}")
        self.manifest = launch.Manifest(self.out / MANIFEST)
        if not self.manifest.of("plan"):
            self.manifest.add("plan", **plan)
        for line in self.manifest.of("plan"):
            if line != {"type": "plan", **plan}:
                raise ToolError(f"plan of {self.out}", short_hashes(plan), short_hashes(line),
                                "restore it, or give another --out")

        self.sources = {}
        self.hashes = {}
        for name in self.names:
            source = patched(args.script, ARMS[name], self.out / "sources" / name)
            self.sources[name] = source
            self.hashes[name] = launch.source_hashes(source)[TRAINER]

    def ends_of(self, job: Job) -> list[dict[str, Any]]:
        """Manifest lines of its runs of this source that ended by themselves, or at no lower limit than today's."""
        wanted = (job.arm, job.repeat, self.hashes[job.arm])
        found = []
        for line in self.manifest.of("end"):
            seeds = range(line["seed"], line["seed"] + line.get("runs", 1))
            if (line["arm"], line["repeat"], line["source_sha256"]) != wanted or job.seed not in seeds:
                continue
            if line["outcome"] not in ("done", "failed"):
                continue
            if "limit" not in line["cause"] or line["limit"] * LIMIT_GROWTH >= self.limit_s:
                found.append(line)
        return found

    @property
    def limit_s(self) -> float:
        return self.manifest.limit_s(self.args.limit)

    def state(self, job: Job) -> State:
        ends = self.ends_of(job)
        if not ends:
            return State()
        last = ends[-1]
        below = logs.read([self.out / last["folder"]]).runs
        runs = [run for run in below if run.family == "ours" and run.seed == job.seed]
        if runs and last["outcome"] == "done":
            return State(runs[0])
        cause = last["cause"] or "no log.jsonl"
        if runs and runs[0].aborted:
            cause = runs[0].aborted
        return State(why="failed: " + " ".join(cause.split())[:SHOWN_CAUSE])

    def note(self, arm: str) -> str:
        """Why an arm gets no further seed, or ""."""
        if arm == BASELINE:
            return ""
        for job in self.jobs:
            if job.arm == arm and self.state(job).why:
                return self.state(job).why
        first = self.state(Job(arm, 0)).run
        base = self.state(Job(BASELINE, 0)).run
        if not first or not base:
            return ""
        if curve(first) == curve(base):
            return "n/a: the baseline's losses bit by bit"
        if first.loss - base.loss > HOPELESS:
            return f"no more seeds: over {HOPELESS} nats worse"
        return ""

    def missing(self) -> list[Job]:
        return [job for job in self.jobs if self.is_missing(job)]

    def is_missing(self, job: Job) -> bool:
        """A baseline that failed is tried again: it may have been the machine."""
        state = self.state(job)
        if job.arm == BASELINE:
            return state.run is None
        if not state.open:
            return False
        return job.seed == 0 or not self.note(job.arm)

    def together(self, first: Job) -> list[Job]:
        """What runs in one process: the missing jobs of the same arm and round, from this one on."""
        found = [first]
        if not HAS_RUNS.search(self.sources[first.arm].read_text(encoding="utf-8")):
            return found
        end = (first.seed // self.args.together + 1) * self.args.together           # of the round
        for seed in range(first.seed + 1, end):
            job = first._replace(seed=seed)
            if job not in self.jobs or not self.is_missing(job):
                break
            found.append(job)
        return found

    def run(self, jobs: list[Job]) -> None:
        """In one process. Raises ToolError if a baseline fails: then nothing can be compared."""
        job = jobs[0]
        facts = job._asdict() | {"name": job.name, "limit": self.limit_s}
        def stages() -> Stages:
            return self.state(Job(BASELINE, job.seed)).run.facts["config"]["stages"]

        flags = [*SHORT, *self.args.flags, *ARMS[job.arm].flags_for(stages), f"--seed={job.seed}"]
        if len(jobs) > 1:
            flags.append(f"--runs={len(jobs)}")
            facts["runs"] = len(jobs)
        tries = [line for line in self.manifest.of("start") if line["name"] == job.name]
        folder = job.name
        if tries:
            folder += f"_try{len(tries) + 1}"
        data = self.args.script.resolve().parent / launch.DATA
        line = self.manifest.run(self.sources[job.arm], self.out / "runs" / folder, flags, self.args.ranks,
                                 facts["limit"], data, **facts)

        why = self.state(job).why
        said = why if why else f"loss {line['val_loss']}"
        print(f"{job.name}: {line['wall_s']:.1f} s, {said}", file=sys.stderr, flush=True)
        if job.arm == BASELINE and why:
            raise ToolError(job.name, why, f"a run of at most {facts['limit']:g} s that ends well",
                            f"see stderr.txt in {self.out}/runs; a longer --limit, or fewer steps behind --")

    def announce(self) -> None:
        """How long the rest will take, by the first run of this machine."""
        line = self.manifest.of("end")[0]
        left = len(self.missing())
        minutes = left * line["wall_s"] / line.get("runs", 1) / 60
        print(f"{left} runs left, about {minutes:.0f} min", file=sys.stderr, flush=True)

    def results(self) -> list[dict[str, Any]]:
        """A row per arm: n (seeds), note, and what `measured` says of it; [] for a measure it does not have."""
        runs = []
        for job in self.jobs:
            run = self.state(job).run
            if run:
                runs.append((job.arm, job.seed, run))
        found = measured(runs)
        seeds = {(arm, seed) for arm, seed, _ in runs}

        rows = []
        for name in self.names:
            row = {"arm": name, "lines": ARMS[name].size(), "n": sum(arm == name for arm, _ in seeds),
                   "note": self.note(name)}
            measures = dict.fromkeys(MEASURES, []) | found.get(name, {})
            rows.append(row | measures)
        return rows


# ---- Measures: nan for what is not in the log, and for a time that does not count
def loss_of(run: Run) -> float:
    """Nats per token."""
    return run.loss


def log_time_of(run: Run) -> float:
    """Logarithm of ms per step."""
    if not run.seconds:
        return math.nan
    return math.log(1000 * run.seconds / run.final.step)


def memory_of(run: Run) -> float:
    """MiB."""
    kinds = run.result.get("peak_memory_mib", {})
    return max(kinds.values(), default=math.nan)


def sent_by(run: Run) -> float:
    """MB, all ranks."""
    tables = run.result.get("comms", {})
    return sum(table["bytes_sent"] for table in tables.values()) / 1e6


MEASURES: dict[str, Callable[[Run], float]] = {
    "loss": loss_of, "time": log_time_of, "memory": memory_of, "sent": sent_by}


def curve(run: Run) -> list[tuple]:
    """All losses with their steps, without the seconds."""
    validations = [(point.step, point.loss) for point in run.val]
    steps = [(step, loss) for step, _, loss in run.steps]
    return validations + steps


def measured(runs: list[tuple[str, int, Run]]) -> dict[str, dict[str, list[float]]]:
    """(arm, seed, run); returns by arm and measure what `differences` says, of times in per cent of the baseline's.
    An arm that has only the baseline's losses, bit by bit, changes nothing here (n/a) and has no measures."""
    base = [curve(run) for arm, _, run in runs if arm == BASELINE]
    moved = {BASELINE}
    for arm, _, run in runs:
        if curve(run) not in base:
            moved.add(arm)

    found: dict[str, dict[str, list[float]]] = {arm: {} for arm, _, _ in runs}
    counted = [item for item in runs if item[0] in moved]
    for key, measure in MEASURES.items():
        cells = cells_of(by_process(counted) if key == "time" else counted, measure)
        for arm, values in differences(cells).items():
            if key == "time" and arm != BASELINE and len(values) == 1:
                continue                                            # no per cent without an interval
            if key == "time":
                values = [shown_time(arm, x) for x in values]
            found[arm][key] = values
    return found


def by_process(runs: list[tuple[str, int, Run]]) -> list[tuple[str, int, Run]]:
    """With the first seed of the process that ran them instead of their own: what slows a process down slows all of
    its runs, so that they are one time."""
    firsts: dict[Path, int] = {}
    for _, seed, run in runs:
        process = process_of(run)
        firsts[process] = min(seed, firsts.get(process, seed))
    return [(arm, firsts[process_of(run)], run) for arm, _, run in runs]


def process_of(run: Run) -> Path:
    """The folder of a process; that of one run is its own."""
    several = run.facts.get("config", {}).get("runs", 1) > 1
    return run.path.parent.parent if several else run.path.parent


def cells_of(runs: list[tuple[str, int, Run]], measure: Callable[[Run], float]) -> dict[tuple[str, int], float]:
    """Means by arm and seed, of those that have the measure."""
    values: dict[tuple[str, int], list[float]] = {}
    for arm, seed, run in runs:
        values.setdefault((arm, seed), []).append(measure(run))
    means = {cell: verdict.summary(its_values).mean for cell, its_values in values.items()}
    return {cell: mean for cell, mean in means.items() if not math.isnan(mean)}


def shown_time(arm: str, log_time: float) -> float:
    """ms per step of the baseline, and of an arm its difference in per cent."""
    if arm == BASELINE:
        return math.exp(log_time)
    return 100 * math.expm1(log_time)


def differences(cells: dict[tuple[str, int], float]) -> dict[str, list[float]]:
    """(arm, seed) -> value; returns arm -> [difference to the baseline, low, high]; no interval without freedom."""
    from scipy import stats
    base = {seed: value for (name, seed), value in cells.items() if name == BASELINE}
    if not base:
        return {}
    free, squares = residuals(cells, list(base))
    found = {BASELINE: [verdict.summary(list(base.values())).mean]}
    for arm in sorted({name for name, _ in cells} - {BASELINE}):
        own = [value - base[seed] for (name, seed), value in cells.items() if name == arm]
        n, mean, _ = verdict.summary(own)
        found[arm] = [mean]
        if free:
            sd = math.sqrt(squares / free)
            reach = stats.t.ppf(1 - verdict.ALPHA / 2, free) * sd * math.sqrt(2 / n)
            found[arm] += [mean - reach, mean + reach]
    return found


def residuals(cells: dict[tuple[str, int], float], seeds: list[int]) -> tuple[int, float]:
    """Degrees of freedom and sum of squares that value = arm + seed leaves, fitted by least squares."""
    import numpy as np
    design = []
    for name, seed in cells:
        of_arm = [name == arm for arm in ARMS]
        of_seed = [seed == other for other in seeds]
        design.append(of_arm + of_seed)
    matrix = np.array(design, float)
    values = np.array(list(cells.values()))
    fit, _, rank, _ = np.linalg.lstsq(matrix, values, rcond=None)
    squares = ((values - matrix @ fit) ** 2).sum()
    return len(cells) - rank, float(squares.round(12))


# ---- What is printed
def aligned(head: str, rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table that is readable as it is, numbers with five digits; nothing where there are no rows."""
    cells = [[cell_of(value) for value in row] for row in rows]
    if not cells:
        return ""
    titles = head.split(" | ")
    widths = [max(map(len, column)) for column in zip(titles, *cells)]
    rule = ["-" * width for width in widths]
    lines = []
    for row in (titles, rule, *cells):
        padded = [cell.ljust(width) for cell, width in zip(row, widths)]
        lines.append(f"| {' | '.join(padded)} |")
    return "\n".join(lines)


def cell_of(value: Any) -> str:
    if value is None:
        return "n/a"
    if isinstance(value, float):
        return f"{value:.5g}"
    return str(value)


def interval(test: Iterable[float | None] | None) -> str:
    """Of [mean, low, high], or of [mean]; n/a for nothing, and for ends that are not finite."""
    mean, *ends = ["n/a" if x is None else f"{x:.4g}" for x in test or [None]]
    if not ends:
        return mean
    return f"{mean} ({' to '.join(ends)})"


def report(ablation: Ablation, rows: list[dict[str, Any]]) -> str:
    """Markdown: the table, and what the baselines show of the machine's drift."""
    cells = []
    for row in rows:
        measures = [interval(row[key]) for key in MEASURES]
        means = row["note"] if row["note"] else ARMS[row["arm"]].off
        cells.append([row["arm"], row["lines"], row["n"], *measures, means])
    head = "without | lines | n | loss (nats) | ms per step (%) | peak MiB | MB sent | which means"
    return (f"{aligned(head, cells)}\n\nDifferences to the baseline of the same seeds, with 99 % intervals for one arm "
            f"at a time. Baseline from start to end of each round, ms per step: {drift(ablation, rows[0]['n'])}.\n")


def drift(ablation: Ablation, count: int) -> str:
    """The baselines' ms per step, by round."""
    by_round = []
    for seed in range(count):
        both = [ablation.state(Job(BASELINE, seed, repeat)).run for repeat in (0, 1)]
        times = [f"{math.exp(log_time_of(run)):.1f}" for run in both if run]
        by_round.append(" to ".join(times))
    return "; ".join(by_round)


# ---- Settings
def seeds_by_arm(text: str) -> dict[str, int]:
    """Of "arm:4,other:3"."""
    found = {}
    for pair in filter(None, text.split(",")):
        name, count = pair.split(":")
        found[name] = int(count)
    return found


def settings(argv: list[str]) -> argparse.Namespace:
    """What follows `--` are flags of every run. Raises ToolError for an arm that is not there."""
    known = list(ARMS)[1:]
    parser = argparse.ArgumentParser("python records ablate", usage="%(prog)s [settings] [-- flags of every run]",
                                     description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def setting(name: str, kind: Callable[[str], Any], default: Any, about: str) -> None:
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{about} [{default}]")

    setting("arms", str, ",".join(known), "which")
    setting("seeds", int, 2, "of each arm")
    setting("more", seeds_by_arm, "", "arm:4,...: other numbers of seeds")
    setting("script", Path, TRAINER, "the trainer")
    setting("together", int, 1, "seeds of an arm that run in one process, after one warm-up")
    setting("limit", float, None, launch.LIMIT_HELP)
    setting("ranks", int, 1, "processes of a run")
    setting("out", Path, None, "folder of manifest, runs and table; None: logs/ablation_<source>")
    parser.add_argument("--list", action="store_true", help="print the arms and the size of their patches, run nothing")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")

    at = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:at])
    args.flags = argv[at + 1:]
    args.arms = args.arms.split(",")
    args.seeds_of = {name: args.more.get(name, args.seeds) for name in args.arms}

    wrong: list[Any] = [name for name in args.arms if name not in known]
    wrong += [name for name in args.more if name not in args.arms]
    wrong += [count for count in (args.together, *args.seeds_of.values()) if count < 1]
    if not args.script.is_file():
        wrong.append(f"no file {args.script}")
    if args.limit is not None and not args.limit > 0:
        wrong.append("--limit without a second")
    if wrong:
        raise ToolError("settings", wrong, f"a file, seeds, arms of {', '.join(known)}", "see --list")
    return args


def main(argv: list[str]) -> int:
    args = settings(argv)
    if args.list:
        rows = [[name, ARMS[name].size(), ARMS[name].off] for name in args.arms]
        print(aligned("arm | lines | without it", rows))
        return 0

    ablation = Ablation(args)
    print(f"{len(ablation.missing())} of {len(ablation.jobs)} runs to do; folder {ablation.out}", file=sys.stderr)
    while True:
        missing = ablation.missing()
        if not missing:
            break
        first_of_all = not ablation.manifest.of("start")
        ablation.run(ablation.together(missing[0]))
        if first_of_all:
            ablation.announce()

    rows = ablation.results()
    text = report(ablation, rows)
    (ablation.out / "table.md").write_text(text)
    print(json.dumps(rows) if args.json else text)
    return 0

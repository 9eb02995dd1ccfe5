"""Verb `ablate`: what is each technique worth? Switches them off one at a time, against interleaved baselines.

What is data in the trainer is switched by its flags, anything else by a patch in records/ablations/, applied to a copy.
A round is one seed: baseline, arms (rotated from round to round), baseline. The same command continues; what ended is
not repeated, unless a lower --limit had cut it off. An arm that failed, whose losses equal the baseline's bit by bit
(n/a), or that is HOPELESS, gets no further seed.

Differences are arm - baseline of the same seed, averaged over seeds; a round's baselines are averaged. Two seeds say
next to nothing about an arm's noise (t with one degree of freedom), so all arms share one: loss = arm + seed + noise is
fitted by least squares, the residuals give the noise's sd with N - arms - seeds + 1 degrees of freedom, and a
difference over n seeds has the standard error sd sqrt(2 / n). Equal noise in all arms is assumed: a wild one widens all
intervals. One arm: the paired t-test."""
from __future__ import annotations

import argparse, json, math, os, shutil, subprocess, sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tools import launch, logs, verdict
from tools.logs import ToolError

PATCHES = Path(__file__).resolve().parent.parent / "ablations"
TRAINER, BASELINE = "train_gpt.py", "baseline"             # the name that patches know; the arm without a change
SHORT = ["--preset=pocket", "--num_scheduled_steps=72", "--num_extension_steps=4", "--val_every=0",
         "--sample_tokens=0"]      # 24 s on two quiet cores, 13 s of them training
HOPELESS = 0.25                    # nats worse than the baseline; ten times what two seeds differ by at that length

def stages_with(**change: Any) -> Callable[[list[dict[str, Any]]], list[str]]:
    """The flag that changes the same columns in every row of a stage table."""
    joined = lambda value: ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return lambda stages: ["--stages=" + ";".join(" ".join(map(joined, (s | change).values())) for s in stages)]

class Arm(NamedTuple):
    name: str
    off: str                                               # what the arm does without, or does instead
    flags: list[str] | Callable[[list[dict[str, Any]]], list[str]] | None = None      # None: by the patch of that name

    def size(self) -> str:                                 # "+3 -1"
        text = "" if self.flags is not None else (PATCHES / f"{self.name}.patch").read_text(encoding="utf-8")
        lines = [line[0] for line in text.partition("@@")[2].splitlines()]
        return f"+{lines.count('+')} -{lines.count('-')}" if lines else "flags" * bool(self.flags)

ARMS = {arm.name: arm for arm in (
    Arm(BASELINE, "", []),
    Arm("smear", "no share of the token before in an embedding"),
    Arm("skip", "layer 6 takes nothing from layer 3"),
    Arm("backout", "layer 7 is not subtracted in front of the head"),
    Arm("value_embeddings", "nothing is added to attention values"),
    Arm("bigram", "no hashed bigrams in the stream"),
    Arm("key_offset", "keys of layers 3 and 10 are the token's own"),
    Arm("paired_heads", "plain heads in layers 0, 2, 5, 9"),
    Arm("attention_gates", "every head's output is halved"),
    Arm("x0_mix", "no input embedding in front of layers"),
    Arm("multi_token_loss", "the next token only", stages_with(mtp_start=[1.0], mtp_end=[1.0])),
    Arm("softcap", "cross-entropy of the plain logits"),
    Arm("yarn", "rotation and scale of stage 1 throughout"),
    Arm("batch_schedule", "stage 2's batch throughout", lambda s: stages_with(batch_tokens=s[1]["batch_tokens"])(s)),
    Arm("untying", "head and embedding stay one parameter"),
    Arm("cautious_decay", "decay against the update, too"),
    Arm("weight_decay", "no decay", ["--normuon_weight_decay=0", "--adam_weight_decay=0"]),
    Arm("normuon_second_moment", "Muon's update as it is"),
    Arm("momentum_warmup", "full momentum from step 0", ["--momentum_warmup_steps=0"]),
    Arm("fp8_head", "head product in the dtype of the weights", ["--head=plain"]))}

class Job(NamedTuple):
    arm: str
    seed: int
    repeat: int = 0                                        # 1: the baseline that ends a round

def patched(script: Path, arm: Arm, folder: Path) -> Path:
    """A copy of the trainer in `folder`, patched without fuzz (lines may have moved). Raises ToolError."""
    folder.mkdir(parents=True, exist_ok=True)
    copy, patch = Path(shutil.copyfile(script, folder / TRAINER)), PATCHES / f"{arm.name}.patch"
    alone = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}      # a repository would hide it
    git = arm.flags is None and subprocess.run(["git", "apply", str(patch)], cwd=folder, env=alone, capture_output=True,
                                               text=True)
    if git and git.returncode:
        raise ToolError(f"patch {patch.name}", git.stderr.strip(), f"lines of {script.name} as the patch knows them",
                        f"make it anew (records/ablations/README.md), or leave {patch.stem} out of --arms")
    return copy

def rounds(arms: list[str], seeds: dict[str, int]) -> Iterator[Job]:
    """All runs in order; seeds: how many, by arm. Every round begins with another arm."""
    for seed in range(count := max(seeds.values())):
        turn = arms[(first := round(len(arms) * seed / count)):] + arms[:first]
        yield from (Job(BASELINE, seed), *(Job(x, seed) for x in turn if seed < seeds[x]), Job(BASELINE, seed, 1))

class Ablation:
    """Runs what is missing, and knows what is there. Raises ToolError if the folder is that of another ablation."""
    def __init__(self, args: argparse.Namespace) -> None:
        plan = {"script": launch.source_hashes(args.script), "flags": SHORT + args.flags, "ranks": args.ranks}
        self.args, self.names, self.jobs = args, [BASELINE, *args.arms], list(rounds(args.arms, args.seeds_of))
        self.out = args.out or Path(f"logs/ablation_{plan['script'][args.script.name][:8]}")
        self.manifest = launch.Manifest(self.out / "manifest.jsonl")
        for line in self.manifest.of("plan") or [self.manifest.add("plan", **plan)]:
            if line != {"type": "plan", **plan}:
                raise ToolError(f"plan of {self.out}", plan, line, "restore it, or give another --out")
        self.sources = {x: patched(args.script, ARMS[x], self.out / "sources" / x) for x in self.names}
        self.hashes = {name: launch.source_hashes(source)[TRAINER] for name, source in self.sources.items()}

    def state(self, job: Job) -> tuple[logs.Run | None, str]:
        """(log, "") of a run that ended well, (None, why) of one that failed, (None, "") of one that is to be done:
        none of this source ended by itself, or only at a lower limit than today's."""
        ends = [line for line in self.manifest.of("end") if line["outcome"] in ("done", "failed") and
                (line["arm"], line["seed"], line["repeat"], line["source_sha256"]) == (*job, self.hashes[job.arm]) and
                not ("limit" in line["cause"] and line["limit"] < self.args.limit)]
        found = [run for end in ends[-1:] for run in logs.read([self.out / end["folder"]]).runs if run.family == "ours"]
        if not ends or (found and ends[-1]["outcome"] == "done"):
            return (found[0] if ends else None), ""
        cause = (found and found[0].aborted) or ends[-1]["cause"] or "no log.jsonl"
        return None, "failed: " + " ".join(cause.split())[:90]

    def note(self, arm: str) -> str:
        """Why an arm gets no further seed, or ""."""
        failed = [why for job in self.jobs if job.arm == arm != BASELINE and (why := self.state(job)[1])]
        first, base = (self.state(Job(name, 0))[0] for name in (arm, BASELINE))
        if failed or arm == BASELINE or not first or not base:
            return failed[0] if failed else ""
        if curve(first) == curve(base):
            return "n/a: the baseline's losses bit by bit"
        return f"no more seeds: over {HOPELESS} nats worse" if first.loss - base.loss > HOPELESS else ""

    def missing(self) -> list[Job]:
        return [job for job in self.jobs if self.state(job) == (None, "") and not (job.seed and self.note(job.arm)) or
                job.arm == BASELINE and self.state(job)[1]]

    def run(self, job: Job) -> None:
        """Raises ToolError if a baseline fails: then nothing can be compared."""
        flags, name = ARMS[job.arm].flags or [], f"{job.arm}_seed{job.seed}" + "_end" * job.repeat
        if callable(flags):
            flags = flags(self.state(Job(BASELINE, job.seed))[0].facts["config"]["stages"])
        tries = sum(start["name"] == name for start in self.manifest.of("start"))
        line = self.manifest.run(
            self.sources[job.arm], self.out / "runs" / (name + f"_try{tries + 1}" * bool(tries)),
            [*SHORT, *self.args.flags, *flags, f"--seed={job.seed}"], self.args.ranks, self.args.limit,
            self.args.script.resolve().parent / "data", **job._asdict(), name=name, limit=self.args.limit)
        why = self.state(job)[1]
        print(f"{name}: {line['wall_s']:.1f} s, {why or line['val_loss']}", file=sys.stderr, flush=True)
        if job.arm == BASELINE and why:
            raise ToolError(name, why, f"a run of at most {self.args.limit:g} s that ends well",
                            f"see stderr.txt in {self.out}/runs; a longer --limit, or fewer steps behind --")

    def results(self) -> list[dict[str, Any]]:
        """A row per arm: n (seeds), note, and what `measured` says of it; [] for a measure it does not have."""
        runs = [(job.arm, job.seed, run) for job in self.jobs if (run := self.state(job)[0])]
        found, seeds = measured(runs), {(arm, seed) for arm, seed, _ in runs}
        return [{"arm": name, "lines": ARMS[name].size(), "n": sum(arm == name for arm, _ in seeds),
                 "note": self.note(name), **dict.fromkeys(MEASURES, []), **found.get(name, {})} for name in self.names]

MEASURES: dict[str, Callable[[logs.Run], float]] = {       # nan: not in the log, or a time that does not count
    "loss": lambda run: run.loss,                          # nats
    "time": lambda run: math.log(1000 * (run.seconds or math.nan) / run.final.step),     # logarithm of ms per step
    "memory": lambda run: max(run.result.get("peak_memory_mib", {}).values(), default=math.nan),         # MiB
    "sent": lambda run: sum(x["bytes_sent"] for x in run.result.get("comms", {}).values()) / 1e6}        # MB, all ranks

def curve(run: logs.Run) -> list[tuple]:                   # all losses with their steps, without the seconds
    return [x[:2] for x in run.val] + [x[::2] for x in run.steps]

def measured(runs: list[tuple[str, int, logs.Run]]) -> dict[str, dict[str, list[float]]]:
    """(arm, seed, run); returns by arm and measure what `differences` says, of times in per cent of the baseline's.
    An arm that has only the baseline's losses, bit by bit, changes nothing here (n/a) and has no measures."""
    base = [curve(run) for arm, _, run in runs if arm == BASELINE]
    moved = {BASELINE, *(arm for arm, _, run in runs if curve(run) not in base)}
    found: dict[str, dict[str, list[float]]] = {arm: {} for arm, _, _ in runs}
    for key, measure in MEASURES.items():
        cells = {cell: verdict.mean(measure(run) for arm, seed, run in runs if (arm, seed) == cell)
                 for cell in dict.fromkeys(run[:2] for run in runs if run[0] in moved)}
        for arm, xs in differences({cell: x for cell, x in cells.items() if not math.isnan(x)}).items():
            percent = math.exp if arm == BASELINE else lambda x: 100 * math.expm1(x)
            found[arm][key] = [percent(x) for x in xs] if key == "time" else xs
    return found

def differences(cells: dict[tuple[str, int], float]) -> dict[str, list[float]]:
    """(arm, seed) -> value; returns arm -> [difference to the baseline, low, high]; no interval without freedom."""
    import numpy as np
    from scipy import stats
    if not (base := {seed: x for (name, seed), x in cells.items() if name == BASELINE}):
        return {}
    design = np.array([[*(name == arm for arm in ARMS), *(seed == s for s in base)] for name, seed in cells], float)
    fit, _, rank, _ = np.linalg.lstsq(design, values := np.array(list(cells.values())), rcond=None)
    free, squares = len(cells) - rank, float(((values - design @ fit) ** 2).sum().round(12))
    reach = stats.t.ppf(1 - verdict.ALPHA / 2, free) * math.sqrt(2 * squares / free) if free else math.nan
    found = {BASELINE: [verdict.summary(list(base.values())).mean]}
    for arm in {name for name, _ in cells} - {BASELINE}:
        n, mean, _ = verdict.summary([x - base[seed] for (name, seed), x in cells.items() if name == arm])
        found[arm] = [mean, mean - reach / n**0.5, mean + reach / n**0.5] if free else [mean]
    return found

def aligned(head: str, rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table that is readable as it is, numbers with five digits; nothing where there are no rows."""
    cells = [["n/a" if x is None else f"{x:.5g}" if isinstance(x, float) else str(x) for x in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head.split(" | "), *cells)]
    table = [head.split(" | "), ["-" * width for width in widths], *cells] if cells else []
    return "\n".join(f"| {' | '.join(map(str.ljust, row, widths))} |" for row in table)

def interval(test: Iterable[float | None]) -> str:
    """Of [mean, low, high], or of [mean]; n/a for nothing, and for ends that are not finite."""
    mean, *ends = ["n/a" if x is None else f"{x:.4g}" for x in test or [None]]
    return f"{mean} ({' to '.join(ends)})" if ends else mean

def report(ablation: Ablation, rows: list[dict[str, Any]]) -> str:
    """Markdown: the table, and what the baselines show of the machine's drift."""
    table = aligned("without | lines | n | loss (nats) | ms per step (%) | peak MiB | MB sent | which means", (
        [row["arm"], row["lines"], row["n"], *(interval(row[key]) for key in MEASURES),
         row["note"] or ARMS[row["arm"]].off] for row in rows))
    pairs = [[ablation.state(Job(BASELINE, seed, end))[0] for end in (0, 1)] for seed in range(rows[0]["n"])]
    drift = "; ".join(" to ".join(f"{math.exp(MEASURES['time'](run)):.1f}" for run in pair if run) for pair in pairs)
    return (f"{table}\n\nDifferences to the baseline of the same seeds, with 99 % intervals for one arm at a time. "
            f"Baseline from start to end of each round, ms per step: {drift}.\n")

def settings(argv: list[str]) -> argparse.Namespace:
    """What follows `--` are flags of every run. Raises ToolError for an arm that is not there."""
    at = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser("python records ablate", usage="%(prog)s [settings] [-- flags of every run]",
                                     description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, kind, default, about in (
            ("arms", str, ",".join(list(ARMS)[1:]), "which"), ("seeds", int, 2, "of each arm"),
            ("more", lambda text: {x: int(n) for x, n in (pair.split(":") for pair in text.split(",") if pair)}, "",
             "arm:4,...: other numbers of seeds"), ("script", Path, TRAINER, "the trainer"),
            ("limit", float, 30, "seconds; a longer run has failed"), ("ranks", int, 1, "processes of a run"),
            ("out", Path, None, "folder of manifest, runs and table; None: logs/ablation_<source>")):
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{about} [{default}]")
    parser.add_argument("--list", action="store_true", help="print the arms and the size of their patches, run nothing")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    args = parser.parse_args(argv[:at])
    args.flags, args.arms = argv[at + 1:], args.arms.split(",")
    args.seeds_of, known = {name: args.more.get(name, args.seeds) for name in args.arms}, list(ARMS)[1:]
    wrong = [*{*args.arms} - {*known}, *{*args.more} - {*args.arms}, *(n for n in args.seeds_of.values() if n < 1)]
    if wrong or not args.script.is_file():
        raise ToolError("settings", wrong or args.script, f"a file, seeds, arms of {', '.join(known)}", "see --list")
    return args

def main(argv: list[str]) -> int:
    args = settings(argv)
    if args.list:
        print(aligned("arm | lines | without it", ([name, ARMS[name].size(), ARMS[name].off] for name in args.arms)))
        return 0
    ablation = Ablation(args)
    left = len(ablation.missing())
    print(f"{left} of {len(ablation.jobs)} runs to do x at most {args.limit:g} s = {left * args.limit / 60:.0f} min; "
          f"folder {ablation.out}", file=sys.stderr)
    while missing := ablation.missing():
        ablation.run(missing[0])
    rows = ablation.results()
    (ablation.out / "table.md").write_text(text := report(ablation, rows))
    print(json.dumps(rows) if args.json else text)
    return 0

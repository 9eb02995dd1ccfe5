"""Golden runs: what a trainer computes, to the last bit, stored so that a rewritten trainer can be compared with it.

    python tests/golden_runs.py make TRAINER.py OUT.json [--only NAME,...]
    python tests/golden_runs.py compare TRAINER.py GOLDEN.json [--only NAME,...]

A trainer is run by its command line and judged by its files, never imported: losses of all steps from log.jsonl, hashes
of the weights that --save leaves, and hashes of the state in the newest checkpoint. `compare` prints a line for each
case and ends with status 1 if one differs. Bits are those of one machine, torch and Python: make and compare in one place.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

POCKET = Path(__file__).resolve().parent.parent / "data/pocket.py"
PATIENCE = 600                           # seconds for one run
DIGITS = 16                              # of a hash that is kept
UNCOUNTED_FLAGS = {"device", "sample_tokens"}             # left out where a trainer does not know them
TINY = dict(preset="tiny", num_scheduled_steps=24, num_extension_steps=4, val_every=10, checkpoint_every=8)
POCKET_STEPS = dict(preset="pocket", num_scheduled_steps=36, num_extension_steps=4, max_steps=40, val_every=20,
                    val_tokens=8192, checkpoint_every=16, train_files="DATA/pocket_train_*.bin",
                    val_files="DATA/pocket_val_*.bin")
TO_THE_TIED = dict(max_steps=18)         # the split is at step 17, so that the last checkpoint is in front of it


class Ngrams(NamedTuple):
    """A table of n-grams, with the columns of --tables in their order."""

    label: str
    order: int                           # tokens of an n-gram
    rows: int
    place: str = "stream"                # or the depth of the layer whose attention values it enters
    signs: int = 0
    home: str = "device"
    cadence: int = 2
    rounding: str = "nearest"
    lr_mul: float = 37.5
    wd_mul: float = 5.0
    beta2: float = 0.95


@dataclass(frozen=True)
class Case:
    """A run, or two of which the second goes on from the first's checkpoint."""

    world: int = 1
    flags: dict[str, Any] = field(default_factory=dict)
    tables: tuple[Ngrams, ...] = ()
    rule: str = "rowwise"                # of the tables
    resume_world: int = 0                # ranks of the run that goes on; 0: there is none


def two_tables(**columns: Any) -> tuple[Ngrams, ...]:
    """Make two tables in the residual stream, the second with signs."""
    pairs = Ngrams("more_bigram_embed", 2, 200, **columns)
    triples = Ngrams("trigram_embed", 3, 300, signs=1, **columns)
    return pairs, triples


# Three tables that differ in every column.
MIXED = (Ngrams("more_bigram_embed", 2, 200, "stream", 0, "host", 4, "nearest", 30.0, 4.0, 0.9),
         Ngrams("trigram_embed", 3, 300, "8", 1, "device", 2, "nearest", 37.5, 5.0, 0.95),
         Ngrams("fourgram_embed", 4, 250, "3", 1, "host", 2, "stochastic", 50.0, 2.0, 0.97))


def all_cases() -> dict[str, Case]:
    """List the cases by name."""
    cases = {}
    f64 = TINY | dict(dtype="float64")
    bf16 = TINY | dict(dtype="bfloat16")
    for world in (1, 2, 4):
        cases[f"f64-w{world}"] = Case(world, f64)
        cases[f"fp32-w{world}"] = Case(world, TINY)
        for home in ("device", "host"):
            cases[f"tables-{home}-f64-w{world}"] = Case(world, f64, two_tables(home=home))
    for home in ("device", "host"):
        cases[f"tables-{home}-fp32-w2"] = Case(2, TINY, two_tables(home=home))
        cases[f"cadence4-{home}-f64-w2"] = Case(2, f64, two_tables(home=home, cadence=4))
        cases[f"stochastic-{home}-bf16-w1"] = Case(
            1, bf16 | dict(slots_per_micro_batch=4), two_tables(home=home, rounding="stochastic"))
    cases["stochastic-device-bf16-w2"] = Case(
        2, bf16 | dict(slots_per_micro_batch=2), two_tables(rounding="stochastic"))
    cases["mixed-f64-w2"] = Case(2, f64, MIXED)
    cases["mixed-bf16-w2"] = Case(2, bf16, MIXED)
    cases["adam-rule-f64-w2"] = Case(2, f64, two_tables(), rule="adam")
    cases["dense-fp32-w2"] = Case(2, TINY | dict(row_comms="dense"))
    cases["dense-tables-fp32-w2"] = Case(2, TINY | dict(row_comms="dense"), two_tables())
    cases["emulated-fp32-w1"] = Case(1, TINY | dict(head="emulated"))
    cases["emulated-bf16-w1"] = Case(1, bf16 | dict(head="emulated"))
    cases["pocket-w1"] = Case(1, POCKET_STEPS)
    cases["resume-fp32-w2-w2"] = Case(2, TINY | TO_THE_TIED, resume_world=2)
    cases["resume-mixed-f64-w1-w1"] = Case(1, f64 | TO_THE_TIED, MIXED, resume_world=1)
    cases["resume-mixed-f64-w2-w4"] = Case(2, f64 | TO_THE_TIED, MIXED, resume_world=4)
    cases["resume-mixed-bf16-w4-w1"] = Case(4, bf16 | TO_THE_TIED, MIXED, resume_world=1)
    return cases


# ---- Spelling of flags
class NotApplicable(Exception):
    """A case that this trainer has no flags for."""


class Failed(Exception):
    """A run that ended badly, or files that cannot be read."""


OLD_FLAGS = dict(signs="table_signs", home="table_home", cadence="table_cadence", rounding="table_rounding",
                 lr_mul="table_lr_mul", wd_mul="table_wd_mul", beta2="table_beta2")


def spell_tables(case: Case, source: str, known: set[str]) -> tuple[dict[str, Any], str]:
    """Give the flags for a case's tables, and the trainer's source, in which the older spelling may need an edit."""
    if "tables" in known:
        if case.rule != "rowwise":
            raise NotApplicable(f"rule {case.rule}")
        rows = [" ".join(str(column) for column in table) for table in case.tables]
        return dict(tables="; ".join(rows)), source

    flags: dict[str, Any] = dict(table_rule=case.rule)
    alike = {}
    for column, flag in OLD_FLAGS.items():
        values = {getattr(table, column) for table in case.tables}
        if len(values) == 1:
            alike[column] = values
            flags[flag] = values.pop()
    for table in case.tables:
        rows_flag = table.label.replace("_embed", "_rows")
        flags[rows_flag] = table.rows
        edited = {column: getattr(table, column) for column in OLD_FLAGS if column not in alike}
        if table.place != "stream":
            edited["enters"] = int(table.place)
        line = f'rows="{rows_flag}"'
        if source.count(line) != 1:
            raise Failed(f"{line} is not once in the trainer, so that its table cannot be set")
        columns = "".join(f", {name}={value!r}" for name, value in edited.items())
        source = source.replace(line, line + columns)
    return flags, source


# ---- Running
def known_flags(trainer: Path) -> set[str]:
    """Ask a trainer for its flags."""
    done = subprocess.run([sys.executable, str(trainer), "--help"], capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode != 0:
        raise Failed(f"--help: status {done.returncode}: {done.stderr[-300:]}")
    return set(re.findall(r"--(\w+)", done.stdout))


def free_port() -> int:
    """Find a port that nobody listens on."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return trial.getsockname()[1]


def launch(trainer: Path, world: int, flags: dict[str, Any], known: set[str], outputs: Path) -> dict[str, Any]:
    """Run all ranks of a trainer and return its result line. Raises NotApplicable, Failed."""
    told = {name: value for name, value in flags.items() if name in known or name not in UNCOUNTED_FLAGS}
    unknown = sorted(set(told) - known)
    if unknown:
        raise NotApplicable("no flag " + ", ".join(f"--{name}" for name in unknown))

    command = [sys.executable, str(trainer), *(f"--{name}={value}" for name, value in told.items())]
    port = str(free_port())
    ranks = []
    outputs.mkdir(parents=True)
    try:
        for rank in range(world):
            env = os.environ | dict(OMP_NUM_THREADS="1")
            if world > 1:
                env |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
                            MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            with open(outputs / f"{rank}.out", "wb") as out, open(outputs / f"{rank}.err", "wb") as err:
                ranks.append(subprocess.Popen(command, env=env, stdout=out, stderr=err))
        deadline = time.monotonic() + PATIENCE
        statuses = [rank.wait(max(1, deadline - time.monotonic())) for rank in ranks]
    except subprocess.TimeoutExpired:
        raise Failed(f"not done after {PATIENCE} s") from None
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(statuses):
        texts = [(outputs / f"{rank}.err").read_text("utf-8", "replace") for rank in range(world)]
        raise Failed(f"statuses {statuses}: {' '.join(''.join(texts).split())[-400:]}")
    return json.loads((outputs / "0.out").read_text("utf-8").splitlines()[-1])


# ---- Reading
WRAPPERS = {"state", "weights", "moments", "optimizer"}   # names of dicts that a label may stand in
RENAMED = {"values": "rows"}                              # parts of names, to the spelling that is stored
IGNORED = re.compile(r"(^|\.)(adam_steps|steps?|tied|events|seed)(\.|$)")      # follows from the step, may be missing
PIECE = re.compile(r"rows-(?:\d{7}-)?(\w+)-\d+of\d+-\d+(?:-[0-9a-f]{64})?\.pt")
CHECKPOINT = re.compile(r"step-(\d+)(?:-[0-9a-f]{64}\.pt)?")


def canonical(path: str) -> str:
    """Map a path of keys in either format to one name: state/moments/attn.momentum -> attn.momentum."""
    parts = [RENAMED.get(part, part) for part in path.split("/") if part not in WRAPPERS]
    return ".".join(parts)


def flatten(content: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Walk nested dicts and lists, and yield each tensor with its path."""
    if isinstance(content, torch.Tensor):
        yield path, content
    elif isinstance(content, dict):
        for key, value in content.items():
            yield from flatten(value, f"{path}/{key}" if path else str(key))
    elif isinstance(content, (list, tuple)):
        for number, value in enumerate(content):
            yield from flatten(value, f"{path}/{number}")


def digest(x: torch.Tensor) -> str:
    """Hash type and bytes of a tensor, whatever its shape; integers of all widths are alike."""
    kind = str(x.dtype).removeprefix("torch.")
    if not x.is_floating_point():
        x = x.long()
        kind = "integer"
    content = x.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{kind} {hashlib.sha256(content).hexdigest()[:DIGITS]}"


def joined_rows(pieces: Iterable[Path]) -> dict[str, torch.Tensor]:
    """Put the rows of tables together over all pieces, in ascending order of their ids."""
    found: dict[str, dict[str, list]] = defaultdict(dict)
    for path in sorted(pieces):
        label = PIECE.fullmatch(path.name)[1]
        for name, x in flatten(torch.load(path, weights_only=True)):
            found[label].setdefault(canonical(name), []).append(x)

    tensors = {}
    for label, columns in found.items():
        order = torch.cat(columns["ids"]).argsort()
        for name, parts in columns.items():
            tensors[f"{label}.{name}"] = torch.cat(parts)[order]
    return tensors


def hashes(main: Path, pieces: Iterable[Path]) -> dict[str, str]:
    """Hash every tensor of a save or a checkpoint by its canonical name."""
    found = {}
    for path, x in flatten(torch.load(main, weights_only=True)):
        name = canonical(path)
        if name in found:
            raise Failed(f"{main.name}: two tensors are called {name}: mend canonical()")
        found[name] = x
    found |= joined_rows(pieces)
    return {name: digest(x) for name, x in sorted(found.items()) if not IGNORED.search(name)}


def checkpoint_hashes(run_dir: Path) -> tuple[str, dict[str, str]]:
    """Read the newest checkpoint of a run: its step, and its hashes."""
    steps = {}
    for path in (run_dir / "checkpoints").iterdir():
        named = CHECKPOINT.fullmatch(path.name)
        if named:
            steps[int(named[1])] = path
    if not steps:
        raise Failed("no checkpoint")
    newest = max(steps)
    path = steps[newest]
    if path.is_dir():
        return str(newest), hashes(path / "run.pt", path.glob("rows-*.pt"))
    return str(newest), hashes(path, path.parent.glob(f"rows-{newest:07d}-*.pt"))


def read_losses(run_dir: Path) -> dict[str, str]:
    """Read the losses of steps and validations, exactly."""
    losses = {}
    for line in (run_dir / "log.jsonl").read_text("utf-8").splitlines():
        event = json.loads(line)
        if event["type"] == "step":
            losses[f"step {event['step']}"] = float(event["train_loss"]).hex()
        if event["type"] == "val":
            losses[f"val {event['step']}"] = float(event["val_loss"]).hex()
    return losses


def run_case(case: Case, trainer: Path, known: set[str], scratch: Path) -> dict[str, Any]:
    """Run a case and return all that is kept of it. Raises NotApplicable, Failed."""
    scratch.mkdir()
    flags = {"device": "cpu", "sample_tokens": 0, **case.flags}
    if case.tables:
        more, source = spell_tables(case, trainer.read_text("utf-8"), known)
        flags |= more
        trainer = scratch / trainer.name
        trainer.write_text(source, "utf-8")
    for name in ("train_files", "val_files"):
        if name in flags:
            flags[name] = flags[name].replace("DATA", str(scratch.parent / "pocket_data"))

    first = scratch / "run"
    save = scratch / "save"
    saving = {} if case.resume_world else dict(save=save)
    result = launch(trainer, case.world, flags | saving | dict(run_dir=first), known, scratch / "outputs")
    losses = read_losses(first)
    states = dict([checkpoint_hashes(first)])
    if case.resume_world:
        second = scratch / "resumed"
        onward = dict(resume=first, run_dir=second, save=save, max_steps=0)
        result = launch(trainer, case.resume_world, onward, known, scratch / "outputs_resumed")
        losses |= read_losses(second)
        states |= dict([checkpoint_hashes(second)])
    sent = {label: table.get("bytes_sent") for label, table in result.get("comms", {}).items()}
    return dict(losses=losses, weights=hashes(save / "weights.pt", save.glob("rows-*.pt")), states=states, sent=sent)


def kept_of(case: Case, trainer: Path, known: set[str], scratch: Path) -> dict[str, Any]:
    """Run a case; one that cannot run says why."""
    try:
        return run_case(case, trainer, known, scratch)
    except NotApplicable as reason:
        return dict(not_applicable=str(reason))
    except (Failed, OSError, LookupError, ValueError, RuntimeError) as error:
        return dict(failed=f"{type(error).__name__}: {error}")


# ---- Comparing
def loss_differences(stored: dict[str, str], now: dict[str, str]) -> list[str]:
    """Say which losses differ, and by how much."""
    found = name_differences("losses", stored, now)
    differing = []
    largest = 0.0
    for name, text in stored.items():
        if name in now and now[name] != text:
            before = float.fromhex(text)
            differing.append(name)
            largest = max(largest, abs(float.fromhex(now[name]) - before) / abs(before))
    if differing:
        found.append(f"losses: {len(differing)} of {len(stored)} from {differing[0]} on, at most {largest:.2e}")
    return found


def name_differences(what: str, stored: dict[str, str], now: dict[str, str]) -> list[str]:
    """Say which names only one side has."""
    found = []
    for side, names in (("stored", set(stored) - set(now)), ("now", set(now) - set(stored))):
        if names:
            found.append(f"names of {what} only {side}: {', '.join(sorted(names))}")
    return found


def hash_differences(what: str, stored: dict[str, str], now: dict[str, str]) -> list[str]:
    """Say what differs in bits, and apart from that in names."""
    found = []
    differing = [name for name in stored if name in now and now[name] != stored[name]]
    if differing:
        found.append(f"bits of {what}: {', '.join(differing)}")
    return found + name_differences(what, stored, now)


def differences(stored: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Say all that differs between two runs of a case."""
    found = loss_differences(stored["losses"], now["losses"])
    found += hash_differences("weights", stored["weights"], now["weights"])
    found += name_differences("checkpoints", stored["states"], now["states"])
    for step, state in stored["states"].items():
        if step in now["states"]:
            found += hash_differences(f"the state at step {step}", state, now["states"][step])
    return found


def verdict(stored: dict[str, Any] | None, now: dict[str, Any]) -> tuple[str, str]:
    """Judge a case: same, differs, failed or not applicable, and what there is to say of it."""
    if stored is None:
        return "differs", "nothing is stored"
    if "failed" in now:
        return "failed", now["failed"]
    for side in (now, stored):
        if "not_applicable" in side:
            return "not applicable", side["not_applicable"]
    if "failed" in stored:
        return "differs", "stored is a failure"
    found = differences(stored, now)
    return ("differs", "; ".join(found)) if found else ("same", "")


# ---- Main
def versions() -> dict[str, str]:
    """Name what bits depend on besides the trainer."""
    return dict(python=sys.version.split()[0], torch=torch.__version__, cpu=torch.backends.cpu.get_cpu_capability())


def file_text(cases: dict[str, Any]) -> str:
    """Write the cases as JSON, a line for each."""
    lines = [f"{json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items()]
    return f'{{"versions": {json.dumps(versions())},\n"cases": {{\n' + ",\n".join(lines) + "\n}}\n"


def main() -> int:
    """Make or compare; status 1 if a case differs or fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("make", "compare"))
    parser.add_argument("trainer", type=Path)
    parser.add_argument("golden", type=Path)
    parser.add_argument("--only", default="", help="names of cases, with commas")
    args = parser.parse_args()

    cases = all_cases()
    names = args.only.split(",") if args.only else list(cases)
    stored = {}
    if args.task == "compare":
        golden = json.loads(args.golden.read_text("utf-8"))
        stored = golden["cases"]
        if golden["versions"] != versions():
            print(f"note: stored by {golden['versions']}, these are {versions()}: bits may differ for that")
    trainer = args.trainer.resolve()
    known = known_flags(trainer)
    counts: dict[str, int] = defaultdict(int)
    made = {}
    with tempfile.TemporaryDirectory() as folder:
        data = str(Path(folder, "pocket_data"))
        subprocess.run([sys.executable, str(POCKET), "--out", data], check=True, stdout=subprocess.DEVNULL)
        for name in names:
            began = time.monotonic()
            now = kept_of(cases[name], trainer, known, Path(folder, name))
            made[name] = now
            word, text = verdict(now if args.task == "make" else stored.get(name), now)
            if (args.task, word) == ("make", "same"):
                word = "made"
            counts[word] += 1
            print(f"{name:28} {time.monotonic() - began:5.1f} s  {word}{': ' if text else ''}{text}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    if args.task == "make":
        args.golden.write_text(file_text(made), "utf-8")
    return 1 if counts["differs"] or counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())

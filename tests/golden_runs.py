"""Golden runs: what a trainer computes, to the last bit, stored so that a rewritten trainer can be compared with it.

    python tests/golden_runs.py make TRAINER.py OUT.json [--only NAME,...]
    python tests/golden_runs.py compare TRAINER.py GOLDEN.json [--only NAME,...]

A trainer is run by its command line and judged by its files, never imported: losses of all steps from log.jsonl, hashes
of the weights that --save leaves, and hashes of the state in the newest checkpoint. `compare` prints a line for each
case, and ends with status 1 if one differs. Bits depend on processor, torch and Python too: use one place for both.
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
LOSSES = dict(step="train_loss", val="val_loss")         # keys of log.jsonl, by type of line
DIGITS = 16                              # of a hash that is kept
UNCOUNTED_FLAGS = {"device", "sample_tokens"}             # left out where a trainer does not know them
TINY = dict(preset="tiny", num_scheduled_steps=24, num_extension_steps=4, val_every=10, checkpoint_every=8)
POCKET_STEPS = dict(preset="pocket", num_scheduled_steps=36, num_extension_steps=4, max_steps=40, val_every=20,
                    val_tokens=8192, checkpoint_every=16, train_files="DATA/pocket_train_*.bin",
                    val_files="DATA/pocket_val_*.bin")
TO_THE_TIED = dict(max_steps=18)         # the split is at step 17, so that the last checkpoint is in front of it


class NotApplicable(Exception):
    """A case that this trainer has no flags for."""


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


# Three tables that differ in every column, the last with rows that no step asks for.
MIXED = (Ngrams("more_bigram_embed", 2, 200, "stream", 0, "host", 4, "nearest", 30.0, 4.0, 0.9),
         Ngrams("trigram_embed", 3, 300, "8", 1, "device", 2, "nearest", 37.5, 5.0, 0.95),
         Ngrams("fourgram_embed", 4, 20_000, "3", 1, "host", 2, "stochastic", 50.0, 2.0, 0.97))


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
OLD_FLAGS = dict(signs="table_signs", home="table_home", cadence="table_cadence", rounding="table_rounding",
                 lr_mul="table_lr_mul", wd_mul="table_wd_mul", beta2="table_beta2")


def spell_tables(case: Case, source: str, known: set[str]) -> tuple[dict[str, Any], str]:
    """Give the flags for a case's tables, and the trainer's source, in which the older spelling may need an edit."""
    if "tables" in known:
        if case.rule != "rowwise":
            raise NotApplicable(f"rule {case.rule}")
        rows = [" ".join(str(column) for column in table) for table in case.tables]
        return dict(tables="; ".join(rows)), source

    alike = {column for column in OLD_FLAGS if len({getattr(table, column) for table in case.tables}) == 1}
    flags = {OLD_FLAGS[column]: getattr(case.tables[0], column) for column in alike}
    flags["table_rule"] = case.rule
    for table in case.tables:
        rows_flag = table.label.replace("_embed", "_rows")
        flags[rows_flag] = table.rows
        edited = {column: getattr(table, column) for column in OLD_FLAGS if column not in alike}
        edited["enters"] = None if table.place == "stream" else int(table.place)
        line = f'rows="{rows_flag}"'
        if source.count(line) != 1:
            raise RuntimeError(f"{line} is not once in the trainer, so that its table cannot be set")
        columns = "".join(f", {name}={value!r}" for name, value in edited.items())
        source = source.replace(line, line + columns)
    return flags, source


# ---- Running
def known_flags(trainer: Path) -> set[str]:
    """Ask a trainer for its flags."""
    done = subprocess.run([sys.executable, str(trainer), "--help"], capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode != 0:
        raise RuntimeError(f"--help: status {done.returncode}: {done.stderr[-300:]}")
    return set(re.findall(r"--(\w+)", done.stdout))


def free_port() -> int:
    """Find a port that nobody listens on."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return trial.getsockname()[1]


def launch(trainer: Path, world: int, flags: dict[str, Any], known: set[str], outputs: Path) -> dict[str, Any]:
    """Run all ranks of a trainer and return its result line. Raises NotApplicable, RuntimeError."""
    unknown = flags.keys() - known - UNCOUNTED_FLAGS
    if unknown:
        raise NotApplicable(f"no flag --{', --'.join(sorted(unknown))}")

    given = [f"--{name}={value}" for name, value in flags.items() if name in known]
    command = [sys.executable, str(trainer), *given]
    port = str(free_port())
    ranks = []
    outputs.mkdir()
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
        raise RuntimeError(f"not done after {PATIENCE} s") from None
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(statuses):
        said = "".join(path.read_text("utf-8", "replace") for path in sorted(outputs.glob("*.err")))
        raise RuntimeError(f"statuses {statuses}: {' '.join(said.split())[-400:]}")
    return json.loads((outputs / "0.out").read_text("utf-8").splitlines()[-1])


# ---- Reading
WRAPPERS = {"state", "weights", "moments", "optimizer", "model"}     # names of dicts that a label may stand in
RENAMED = {"values": "rows"}             # parts of names, to the spelling that is stored
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
            raise RuntimeError(f"{main.name}: two tensors are called {name}: mend canonical()")
        found[name] = x
    found |= joined_rows(pieces)
    return {name: digest(x) for name, x in sorted(found.items()) if not IGNORED.search(name)}


def state_hashes(run_dir: Path) -> dict[str, dict[str, str]]:
    """Read the newest checkpoint of a run: its hashes, under the name of its step."""
    paths = [path for path in (run_dir / "checkpoints").iterdir() if CHECKPOINT.fullmatch(path.name)]
    path = max(paths)
    step = CHECKPOINT.fullmatch(path.name)[1]
    if path.is_dir():
        return {f"state at {int(step)}": hashes(path / "run.pt", path.glob("rows-*.pt"))}
    return {f"state at {int(step)}": hashes(path, path.parent.glob(f"rows-{step}-*.pt"))}


def read_losses(run_dir: Path) -> dict[str, str]:
    """Read the losses of steps and validations, exactly."""
    losses = {}
    for line in (run_dir / "log.jsonl").read_text("utf-8").splitlines():
        event = json.loads(line)
        if event["type"] in LOSSES:
            losses[f"{event['type']} {event['step']}"] = float(event[LOSSES[event["type"]]]).hex()
    return losses


def run_case(case: Case, trainer: Path, known: set[str], scratch: Path) -> dict[str, Any]:
    """Run a case and return all that is kept of it. Raises NotApplicable, RuntimeError."""
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

    first = dict(run_dir=scratch / "run")
    onward = dict(resume=scratch / "run", run_dir=scratch / "resumed", max_steps=0)
    parts = [(case.world, flags | first)]
    if case.resume_world:
        parts.append((case.resume_world, onward))
    parts[-1][1]["save"] = scratch / "save"
    kept: dict[str, Any] = dict(losses={})
    for number, (world, given) in enumerate(parts):
        result = launch(trainer, world, given, known, scratch / f"outputs-{number}")
        kept["losses"] |= read_losses(given["run_dir"])
        kept |= state_hashes(given["run_dir"])
    kept["weights"] = hashes(scratch / "save/weights.pt", (scratch / "save").glob("rows-*.pt"))
    kept["sent"] = {label: table.get("bytes_sent") for label, table in result.get("comms", {}).items()}
    return kept


def kept_of(case: Case, trainer: Path, known: set[str], scratch: Path) -> dict[str, Any]:
    """Run a case; one that cannot run says why."""
    try:
        return run_case(case, trainer, known, scratch)
    except NotApplicable as reason:
        return {"not applicable": str(reason)}
    except (RuntimeError, OSError, LookupError, TypeError, ValueError) as error:
        return {"failed": f"{type(error).__name__}: {error}"}


# ---- Comparing
def largest_change(stored: dict[str, str], now: dict[str, str], names: Iterable[str]) -> str:
    """Say by how much losses differ."""
    changes = []
    for name in names:
        before = float.fromhex(stored[name])
        changes.append(abs(float.fromhex(now[name]) - before) / abs(before))
    return f"{len(changes)} of {len(stored)} losses from {next(iter(names))} on, at most {max(changes):.2e}"


def differences(stored: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Say what differs between two runs of a case: in bits, and apart from that in names."""
    found = []
    for section in dict.fromkeys((*stored, *now)):
        if section == "sent":
            continue
        before = stored.get(section, {})
        after = now.get(section, {})
        differing = [name for name in before if name in after and after[name] != before[name]]
        if differing and section == "losses":
            found.append(largest_change(before, after, differing))
        elif differing:
            which = "all" if len(differing) == len(before) else ", ".join(differing)
            found.append(f"bits of {section}: {which}")
        for side, names in (("stored", before.keys() - after), ("now", after.keys() - before)):
            if names:
                found.append(f"names in {section} only {side}: {', '.join(sorted(names))}")
    return found


def verdict(stored: dict[str, Any], now: dict[str, Any]) -> tuple[str, str]:
    """Judge a case in a word, and say why."""
    for word in ("failed", "not applicable"):
        for side in (now, stored):
            if word in side:
                return word, side[word]
    found = differences(stored, now)
    return "differs" if found else "same", "; ".join(found)


# ---- Main
def versions() -> dict[str, str]:
    """Name what bits depend on besides the trainer."""
    return dict(python=sys.version.split()[0], torch=torch.__version__, cpu=torch.backends.cpu.get_cpu_capability())


def file_text(cases: dict[str, Any]) -> str:
    """Spell the cases as JSON, a line for each."""
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
    if not cases.keys() >= set(names):
        parser.error(f"--only: the cases are {', '.join(cases)}")
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
            made[name] = kept_of(cases[name], trainer, known, Path(folder, name))
            word, text = verdict(stored.get(name, {}) if args.task == "compare" else made[name], made[name])
            if args.task == "make" and word == "same":
                word = "made"
            counts[word] += 1
            print(f"{name:28} {time.monotonic() - began:5.1f} s  {word}{': ' if text else ''}{text}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    if args.task == "make":
        args.golden.write_text(file_text(made), "utf-8")
    return 1 if counts["differs"] or counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())

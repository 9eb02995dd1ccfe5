"""Verbs `new`, `check` and `table`: a record is logs, and pages that are generated from them.

`check` generates the pages again and compares them. Logs are stored compressed; hashes are of contents, under the name
without .gz. Records of other tools (predictions, and the ablation 03) are sealed: this module has the sha256 of their
result.json, which has those of their other files and of the generated part of their page.

Exit status: 0 success; 1 `check` found a difference; 2 invalid input, or runs that do not form a record.
"""
from __future__ import annotations

import argparse
import contextlib
import datetime
import difflib
import hashlib
import io
import json
import math
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from tools import consistency, files, page, plot, report, statistics
from tools.consistency import LOG, TEXT_LOG, Problem, configured_rows
from tools.files import FOREIGN_ERRORS, UNFINISHED, counted, inside, locked, one_line, say, unfinished_name
from tools.files import write_bytes
from tools.page import DIFF, FOLDER, MARK, PAGE, PLOT, RESULT, SOURCE
from tools.read import RENAMED, Facts, NotALog, Reading, Run, ToolError, current_names, read_file, seconds_of
from tools.report import MANIFEST, Side, as_text, jsonable, manifest_lines, markdown, relevant, shown

RECORDS = Path(__file__).resolve().parents[1]
DIGITS = 9                             # significant digits in result.json; further ones depend on library versions
SHOWN_LINES = 12                       # lines that `check` prints for a file that differs
PLAIN_ROWS = 10                        # class plain: no table has more rows than this times the vocabulary
TWO_DAYS_S = 2 * 86_400.0
COPIED_STEPS = 10                      # training losses by which a copied run is recognized
ALIKE = "data_sha256", "hardware", "world_size", "torch", "cuda"             # equal in all runs of a record
MACHINE = *ALIKE, "python", "nccl", "triton", "attention", "head", "preset", "git_commit", "budget_s", "val_tokens"
IDENTITY = {"date", "number", "name", "kind", "track"}
STATED = "date", "number", "name", "kind", "track", "parent", "groups", "entry", "idea", "base", "main"
ENTRY = "params_total", "params_per_token", "table_rows", "table_bytes", "tokens_trained", "untimed_warmup_steps"
IDEA_WORDS = 5                         # most words of the idea of an entry of a chain
CHAIN_SEEDS = range(5, 21)             # numbers of seeds that may prove the target of a chain
# Level of p for that proof. If the mean is exactly at the target, and the target is tested after each of these numbers
# of seeds, 1 % of entries prove it.
CHAIN_ALPHA = 0.0015
POCKET_DATA = "b191a7b958c80cc767267d8093a36c2507dddc185294a0b021fd3c56ab71e207"
RESULTS = "steps", "tokens", "budget_s", "val_bpb", "unigram_nats", "peak_memory_mib", "comms"
OF_RESULT = {key: key for key in RESULTS} | {"tokens_trained": "tokens"}     # facts, and their keys in a line `result`
THREADS = re.compile(r", (\d+) threads$")                            # threads of a rank, at the end of `hardware`
NO_LINE_END = "\n\\ No newline at end of file\n"
LINE_OF_DIFF = re.compile(r"[-+ @].*\n(?:\\.*\n)?")
HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))?")             # first line and number of lines in the old source
# Rules that came later than these entries, and that the entries do not keep. README.md states them by number.
EXEMPT = {"2026-11-25_15_Tables": "target", "2026-11-25_19_Compiled": "target", "2026-11-25_20_Copied": "evaluation"}
NEW_WAIT_S = 60.0                      # s that a call of `new` waits for another one
SEALED = {                             # sealed records, and the sha256 of their result.json
    "2026-11-21_03_Ablation": "594f4009b641f2d60998d815cb423a0febf6e931e41a117c5cd3880a867238ce",
    "2026-11-22_04_Rehearsal": "734993d1980eeae90f4d40acfc85c4bcfc2e15c2f0d291810715a834cd7a4154",
    "2026-11-22_06_Speed": "67c153d6f0034ab516212b8383dc13dc51d912b1ec83e57d24bbeee798d5b7c9",
}
NO_BENCH = "no bench contains its source and settings"
OF_REPORT = "verdict", "reason", "loss", "time", "share", "pairs", "memory"

class Track(NamedTuple):
    """The rules of a track that a program can apply."""
    target: float | None               # nats per token; the mean final validation loss must be below
    rank: str                          # "time" or "loss"; lower is better
    needs: Facts                       # facts that each run must have
    alike: tuple[str, ...]             # facts that are equal in a ranked list, as the class is
    is_chain: bool = False             # an entry must be faster than its parent and the first entry

TRACKS = {
    "8xGPU": Track(3.28, "time", {"world_size": 8, "val_tokens": 10_485_760}, ("hardware", "data_sha256")),
    "1xGPU": Track(3.28, "time", {"world_size": 1, "val_tokens": 10_485_760}, ("hardware", "data_sha256")),
    "pocket": Track(None, "loss", {"tokens": 563_200, "val_tokens": 65_536}, ("data_sha256",)),
    "pocket_time": Track(2.20, "time", {"val_tokens": 65_536, "data_sha256": POCKET_DATA, "threads": 2}, (), True),
}

CHAINS = [("entry", name) for name, track in TRACKS.items() if track.is_chain]

class Draft(NamedTuple):
    """A record as its files state it, before anything is computed from them."""
    folder: Path
    stated: Facts                      # by result.json
    sides: dict[str, Side]             # the logs, by group
    opponents: Facts                   # the records that an entry of a chain must have raced, by role

    @property
    def main(self) -> Side:
        """The group that the record is about."""
        return self.sides[self.stated["main"]]

    @property
    def parent(self) -> Path | None:
        """The directory of the parent. Raises ToolError if it is not next to the record."""
        return inside(self.folder.parent, self.stated["parent"]) if self.stated["parent"] else None

def text(path: Path) -> str:
    """Return the text of a file with its line ends; "" if it is missing or not a regular file."""
    return files.read_bytes(path).decode("utf-8") if path.is_file() else ""

def load(folder: Path) -> Facts:
    """Load the result.json of a record. Raises ToolError if it is missing or damaged, or lacks what identifies it."""
    what = f"{folder.name}/{RESULT}"
    path = inside(folder, RESULT)
    if not path.is_file():
        raise ToolError(what, found="no file", expected="a file that `new` writes",
                        hint="restore the file, or move the directory if it is no record")
    try:
        result = json.loads(text(path))
        lacking = IDENTITY - result["stated"].keys()
        if lacking or not result["stated"]["number"].isdecimal():
            raise ValueError(f"`stated` lacks {sorted(lacking)}, or its number is none")
        return result
    except FOREIGN_ERRORS as error:
        raise ToolError(what, found=f"{type(error).__name__}: {error}", expected="JSON that `new` writes",
                        hint="restore the file") from None

def folders(root: Path) -> list[Path]:
    """Return the directories that look like a record, whatever their names."""
    marks = [*root.glob(f"*/{RESULT}"), *root.glob("*/logs"), *root.glob(f"[0-9]*/{PAGE}")]
    return sorted({path.parent for path in marks if not path.parent.name.startswith(".")})

def find(root: Path, name: str) -> Path:
    """Find a record by its path, directory name, number or name. Raises ToolError."""
    wanted = Path(name).name
    fits = [path for path in folders(root) if wanted in (path.name, *path.name.split("_", 2)[1:])]
    if len(fits) != 1:
        raise ToolError(f"record {name}", found=[path.name for path in fits], expected="one record",
                        hint="give its directory name or its number")
    return fits[0]

def hashes(folder: Path) -> dict[str, str]:
    """Return the sha256 of the contents of each file that `check` does not generate, by name without .gz.

    Raises ToolError if a file exists in both forms.
    """
    made = {folder / name for name in (PAGE, RESULT, DIFF)}
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path in made:
            continue
        name = files.uncompressed(path).relative_to(folder).as_posix()
        if name in found or folder / name in made:
            raise ToolError(f"{name} in {folder.name}", found="both compressed (.gz) and uncompressed",
                            expected="one of the two", hint="remove one of them")
        found[name] = files.sha256(path)
    return dict(sorted(found.items()))

def logs_below(folder: Path) -> list[Path]:
    """Return the log.jsonl of each run, compressed or not."""
    return sorted([*folder.rglob(LOG), *folder.rglob(LOG + files.SUFFIX)])

def diff_of(old: str, new: str) -> str:
    """Return a diff of two sources that `git apply` accepts; "" for equal ones."""
    return "".join(difflib.unified_diff(lines_of(old), lines_of(new), f"a/{SOURCE}", f"b/{SOURCE}"))

def lines_of(source: str) -> list[str]:
    """Return the lines of a source with their ends, as git has them: a last line without one has a remark."""
    lines = io.StringIO(source).readlines()
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += NO_LINE_END
    return lines

def patched(source: str, diff: str) -> str:
    """Apply a diff, as `diff_of` writes it, to a source."""
    old = lines_of(source)
    new: list[str] = []
    taken = 0                                                               # lines of `old`
    for line in LINE_OF_DIFF.findall(diff)[2:]:
        hunk = HUNK.match(line)
        if hunk:
            first = int(hunk[1]) - (hunk[2] != "0")
            new += old[taken:first]
            taken = first
        else:
            taken += line[0] != "+"
            new += [line[1:]] * (line[0] != "-")
    return "".join(new + old[taken:]).removesuffix(NO_LINE_END)

def rounded(facts: Any) -> Any:
    """Convert and round facts as result.json has them."""
    return json.loads(json.dumps(jsonable(facts)), parse_float=lambda number: float(f"{float(number):.{DIGITS}g}"))

def manifests(draft: Draft) -> list[Path]:
    """Return the manifests in a record, and those of its runs in other records."""
    runs = [run for side in draft.sides.values() for run in side.reading.runs]
    of_runs = {report.manifest_of(run)[0] for run in runs} - {None}
    return sorted({*of_runs, *(draft.folder / "logs").rglob(MANIFEST)})

def ends_of(draft: Draft) -> list[tuple[Path, Facts]]:
    """Return the lines on the ends of runs in all manifests of a record, each with the directory of its run."""
    found = manifests(draft)
    return [(path.parent / line["folder"], line) for path in found for line in manifest_lines(path, "end")]

def load_all(root: Path) -> tuple[list[Facts], list[ToolError]]:
    """Load the result.json of all records; return also the errors of those that `load` refuses."""
    results: list[Facts] = []
    errors: list[ToolError] = []
    for folder in folders(root):
        try:
            results.append(load(folder))
        except ToolError as error:
            errors.append(error)
    return results, errors

def say_left_out(root: Path) -> None:
    """Print a note on stderr for each record that `entries_of` leaves out."""
    for error in load_all(root)[1]:
        say(f"note: a record is left out: {error}", sys.stderr)

def entries_of(root: Path, track: str | None = None) -> list[Facts]:
    """Return the result.json of all entries, or of those of one track, oldest first.

    Records that `load` refuses are left out, because one damaged record must not stop the check of all others.
    """
    found = [result for result in load_all(root)[0] if result["stated"]["kind"] == "entry"]
    chosen = [result for result in found if track in (None, result["stated"]["track"])]
    return sorted(chosen, key=number_of)

def number_of(result: Facts) -> int:
    """Return the number of a record."""
    return int(result["stated"]["number"])

def required_opponents(root: Path, stated: Facts) -> Facts:
    """Return the entries that an entry of a chain must have raced: its parent and the base; {} for the base itself.

    Raises ToolError if the parent is damaged or not an earlier entry, or if the base of the parent is missing.
    """
    if (stated["kind"], stated["track"]) not in CHAINS:
        return {}
    parent = load(inside(root, stated["parent"])) if stated["parent"] else None
    before = [entry for entry in entries_of(root, stated["track"]) if number_of(entry) < int(stated["number"])]
    named = {folder_name(entry): entry for entry in before}
    if parent not in before and (parent or before):
        raise ToolError("parent", found=stated["parent"], expected=f"one of {[*named]}", hint="choose it with --parent")
    if not parent:
        return {}
    # Without the record of the base, the entry after the base would be the first one.
    base = parent.get("in_turn", {}).get("base", {}).get("record", stated["parent"])
    if folder_name(before[0]) != base:
        raise ToolError("base of the chain", found=folder_name(before[0]),
                        expected=f"{base}, as in {stated['parent']}/{RESULT}", hint=f"restore {base}")
    return {"parent": parent, "base": before[0]}

def folder_name(result: Facts) -> str:
    """Return the directory name that follows from result.json."""
    return "_".join(result["stated"][key] for key in ("date", "number", "name"))

def changes(old: Facts, new: Facts) -> dict[str, list[Any]]:
    """Return [old, new] of each key that differs; a missing value is None."""
    keys = sorted({*old, *new})
    return {key: [old.get(key), new.get(key)] for key in keys if old.get(key) != new.get(key)}

def changed_settings(old: Facts, new: Facts) -> dict[str, list[Any]]:
    """Return [old, new] of each setting that differs.

    Settings have their current names, unless both sides have older ones.
    """
    if not (RENAMED.keys() & old.keys() and RENAMED.keys() & new.keys()):
        old, new = current_names(old), current_names(new)
    return changes(old, new)

def value(run: Run, key: str) -> Any:
    """Return a fact of a run; None if the log does not state it.

    Results are taken from the line `result`, threads from `hardware`, and all other facts from the header or settings.
    """
    threads = THREADS.search(str(run.facts.get("hardware")))
    if key == "threads":
        return int(threads[1]) * run.facts["world_size"] if threads else None
    if key in OF_RESULT:
        return run.result.get(OF_RESULT[key])
    return (run.facts.get("config", {}) | run.facts).get(key)

def read_log(path: Path) -> Run:
    """Read the log of one run. Raises ToolError."""
    try:
        return read_file(path)[0]
    except (NotALog, *FOREIGN_ERRORS) as error:
        raise ToolError(f"log {path}", found=error, expected="the log of one run",
                        hint="restore it, or leave it out") from None

def log_of(folder: Path, name: str) -> Path:
    """Return the log.jsonl of a run that result.json names, compressed or not.

    The log is in this record, or in another one whose directory name is the first part of `name`. Raises ToolError if
    it is in neither.
    """
    record, _, rest = name.partition("/")
    if rest and FOLDER.fullmatch(record):
        return files.stored(inside(folder.parent, f"{record}/logs/{rest}/{LOG}"))
    return files.stored(inside(folder, f"logs/{name}/{LOG}"))

def name_of(run_dir: Path, folder: Path) -> str:
    """Return the name of a run in result.json, as `log_of` reads it."""
    if run_dir.is_relative_to(folder):
        return run_dir.relative_to(folder / "logs").as_posix()
    record, _, *parts = run_dir.relative_to(folder.parent).parts
    return "/".join((record, *parts))

def is_stored(log: Path, root: Path) -> bool:
    """Whether a log is one of a record in `root`."""
    parts = log.relative_to(root).parts if log.is_relative_to(root) else ()
    return parts[1:2] == ("logs",) and FOLDER.fullmatch(parts[0]) is not None

def refuse_links_out(folder: Path) -> None:
    """Raise ToolError if a link in a record leads out of it."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
            raise ToolError(f"{path.relative_to(folder).as_posix()}: a link out of the record", found=os.readlink(path),
                            expected="a regular file", hint="copy the file into the record")

def read_group(folder: Path, stated: Facts, name: str) -> Side:
    """Read the logs of a group of a record."""
    runs = [read_log(log_of(folder, member)) for member in stated["groups"][name]]
    return report.sorted_out(name, Reading(runs))

def read_draft(folder: Path, stated: Facts) -> Draft:
    """Read the logs of a record, and the records of its opponents."""
    sides = {name: read_group(folder, stated, name) for name in stated["groups"]}
    return Draft(folder, stated, sides, required_opponents(folder.parent, stated))

def class_of(settings: Facts) -> str | None:
    """Return the class, plain or table, from the number of rows of the configured tables; None if it is not stated."""
    rows = [count for _, count in configured_rows(settings)]
    vocabulary = settings.get("vocab_size")
    if not rows or not vocabulary:
        return None
    return "table" if max(rows) > PLAIN_ROWS * vocabulary else "plain"

def date_doubts(date: str) -> Iterator[Problem]:
    """Yield why a record cannot have this date. One day after today is valid, because of time zones."""
    expected = "YYYY-MM-DD, a day of the calendar that is not in the future"
    try:
        if datetime.date.fromisoformat(date) > datetime.date.today() + datetime.timedelta(days=1):
            yield "date", f"{date}: it is in the future", expected
    except ValueError as error:
        yield "date", f"{date}: {error}", expected

def doubts(draft: Draft) -> Iterator[Problem]:
    """Yield the reasons why these runs do not form a record, or an entry of its track."""
    folder, stated, sides, _ = draft
    runs = [run for side in sides.values() for run in side.reading.runs]
    noted = [report.manifest_of(run) for run in runs]
    grouped = {manifest.parent / line["folder"] for manifest, line in noted if manifest}
    taken = {line.get(key) for _, line in noted for key in ("side", "source_sha256")} - {None}
    others: set[Path] = set()            # runs of other programs, which other records may have in a group
    for run_dir, line in ends_of(draft):
        if not {line.get("side"), line.get("source_sha256")} & taken:
            others.add(run_dir)
        elif line.get("outcome") == "done" and run_dir not in grouped:
            yield ("runs of the manifest", f"{line['folder']} succeeded and is left out",
                   "all successful runs of each side and of each source that the record has")
    for manifest in manifests(draft):
        yield from guarded(MANIFEST, consistency.in_manifest(manifest), "the lines that `bench` writes")
    read = {run.path for run in runs}
    for log in logs_below(folder / "logs"):
        if log not in read and others.isdisjoint(log.parents):
            yield "logs", f"{log.parent.name} is in no group", "each run in a group"
        elif log not in read:
            yield from contradictions(read_log(log))                        # a later record may name it
    yield from copies(runs)
    dated = seconds_of(stated["date"], "%Y-%m-%d") or math.inf
    for run in runs:
        name = run.path.parent.name
        is_resumed = any(note.startswith("resumed") for note in run.notes)
        if run.void or run.refused or is_resumed or not run.finished or not math.isfinite(run.loss):
            found = run.void or run.refused or [run.loss, *run.notes]
            yield name, found, "a finished run with valid times that was not resumed"
            continue
        yield from contradictions(run)
        if run.started is not None and run.started > dated + TWO_DAYS_S:     # two, because of time zones
            yield f"{name}, start", run.facts.get("started"), f"not after the date of the record, {stated['date']}"
    yield from mixed_facts(runs)
    if not all(side.runs for side in sides.values()):
        return                                                              # the other rules need runs that count
    yield from other_sources(draft)
    strangers = [*unlike_opponents(draft)]
    yield from strangers
    for name, side in sides.items():
        if not strangers or name != stated["main"]:
            yield from (("group", mixed, "runs of one program, with one last step") for mixed in report.mixtures(side))
    if stated["kind"] == "entry":
        yield from track_violations(draft)

def contradictions(run: Run) -> Iterator[Problem]:
    """Yield the contradictions between the files of a run, or that its log lacks keys."""
    expected = "the keys of \"What the log holds\", README.md"
    yield from guarded(f"{run.path.parent.name}, log", consistency.of_run(run), expected)

def guarded(what: str, problems: Iterator[Problem], expected: str) -> Iterator[Problem]:
    """Yield problems; if the file lacks keys, or has values of other types, yield that as the last problem."""
    try:
        yield from problems
    except FOREIGN_ERRORS as error:
        yield what, f"{type(error).__name__}: {error}", expected

def other_sources(draft: Draft) -> Iterator[Problem]:
    """Yield the groups whose source is not the one that their logs state.

    It is the source of the main group, changed by the diff of the group if it has one.
    """
    main = text(draft.folder / SOURCE)
    for name, side in draft.sides.items():
        stated = f"sources/{name}.diff"
        diff = text(inside(draft.folder, stated))
        source = patched(main, diff)
        if diff != diff_of(main, source):
            yield stated, "lines that are not those of the sources", "the diff that `new` writes"
        digest = hashlib.sha256(source.encode()).hexdigest()
        logged = {run.facts["source_sha256"] for run in side.runs}
        if logged != {digest}:
            found = f"{digest[:8]}, not the source of group {name or 'all'}"
            yield stated if diff else SOURCE, found, f"{as_text(sorted(logged))}, as in its logs"

def copies(runs: list[Run]) -> Iterator[Problem]:
    """Yield the runs that repeat another run.

    Two runs never have equal times. Two seeds do not even have equal training losses.
    """
    known: dict[tuple[Any, ...], Run] = {}
    for run in runs:
        name = run.path.parent.name
        trained = tuple(run.steps[-COPIED_STEPS:, 2].tolist())
        first = known.setdefault(run.identity(), run)
        other_seed = known.setdefault(trained, run) if trained else run
        if first is not run:
            yield name, f"times and losses of {first.path.parent.name}", "each run once"
        elif other_seed.seed != run.seed:
            yield name, f"training losses of {other_seed.path.parent.name}, which has another seed", "each run once"

def mixed_facts(runs: list[Run]) -> Iterator[Problem]:
    """Yield the facts that differ between runs but must not. Data may be in different directories."""
    for key in (*ALIKE, "train_files", "val_files"):
        values = {as_text(value(run, key)) for run in runs}
        if key not in ALIKE:
            values = {Path(one).name for one in values}
        if len(values) > 1:
            yield f"mixed {key}", sorted(values), "one value in a record"

def unlike_opponents(draft: Draft) -> Iterator[Problem]:
    """Yield how runs with the source of an opponent, or in its group, differ from the record of the opponent."""
    main = draft.main.runs
    entry_is_mixed = len({run.facts["source_sha256"] for run in main}) > 1
    for opponent in draft.opponents.values():
        number = opponent["stated"]["number"]
        source = main_pool(opponent)["source_sha256"]
        group = draft.sides[number].runs if number in draft.sides else []
        # An entry may have the source of an opponent if all of its runs have it.
        misplaced = [run for run in main if entry_is_mixed and run.facts["source_sha256"] == source]
        found = set()
        for run in (*group, *misplaced):
            differs = changed_settings(opponent["config"], rounded(relevant(run.facts["config"])))
            texts = [f"{key} {as_text(new)}, not {as_text(old)}" for key, (old, new) in differs.items()]
            what = f"runs of {report.manifest_of(run)[1].get('side', run.path.parent.name)}"
            if run.facts["source_sha256"] != source:
                found.add((what, f"they are in the group of record {number}, but have another source"))
            elif texts:
                found.add((what, f"they have the source of record {number}, but {', '.join(texts)}"))
        for what, words in sorted(found):
            yield what, words, f"the source and settings of record {number}, or of the new entry"

def track_violations(draft: Draft) -> Iterator[Problem]:
    """Yield the rules of its track that an entry breaks, as far as logs show it."""
    stated = draft.stated
    track = TRACKS.get(stated["track"])
    if track and track.is_chain:
        yield from chain_violations(draft)
    elif not track or len(draft.sides) != (2 if stated["base"] else 1):
        found = f"track {stated['track']}, groups {[*draft.sides]}"
        yield "entry", found, f"one of {[*TRACKS]}, one group and a baseline"
        return
    for run in draft.main.runs:
        name = run.path.parent.name
        for key, needed in track.needs.items():
            if value(run, key) != needed:
                yield f"{name}, {key}", value(run, key), f"{needed} on track {stated['track']}"
        for key in ENTRY:
            if (value(run, key) is None) != (key in stated["entry"]):
                yield f"{name}, {key}", value(run, key), "logged or stated, not both"

def chain_violations(draft: Draft) -> Iterator[Problem]:
    """Yield the rules of a chain that an entry breaks."""
    main = draft.main
    exempt = EXEMPT.get(draft.folder.name)
    level = statistics.ALPHA if exempt == "target" else CHAIN_ALPHA
    word, reason = report.proof(main, TRACKS[draft.stated["track"]].target, level)
    if word != "proven" or len(main.losses()) not in CHAIN_SEEDS or report.missing(main):
        expected = f"proven (p < {level}) over {CHAIN_SEEDS[0]} seeds or more, at most {CHAIN_SEEDS[-1]}, by all runs"
        yield "target", reason, expected
    idea = draft.stated.get("idea", "")
    if not 0 < len(idea.split()) <= IDEA_WORDS:
        yield "idea", idea, f"--idea='one to {IDEA_WORDS} words'"
    if class_of(main.runs[0].facts["config"]) is None:
        yield "class", "unknown: the settings lack vocab_size or the rows of the tables", "plain or table"
    if draft.opponents:
        yield from other_validation(draft)
        if exempt != "evaluation":
            yield from slow_evaluations(draft)
    found = comparisons(draft)
    ratios = in_turn(draft)
    for role, opponent in draft.opponents.items():
        ratio = ratios.get(role, {"word": found[role]["reason"] if role in found else NO_BENCH})
        if ratio["word"] != "faster":
            word = ratio["word"]
            if role in ratios:
                word += f": {page.RATIO.format_map(ratio)}, {counted(ratio['pairs'], 'pair')}"
            yield f"time relative to the {role}, {folder_name(opponent)}", word, "faster, in one bench with it"

def other_validation(draft: Draft) -> Iterator[Problem]:
    """Yield the settings of the validation in which the runs of an entry differ from the base."""
    expected = validation_of(draft.opponents["base"]["config"])
    for run in draft.main.runs:
        for key, (old, now) in changes(expected, validation_of(run.facts["config"])).items():
            yield f"{run.path.parent.name}, {key}", now, f"{old}, as in the base"

def validation_of(settings: Facts) -> Facts:
    """Return the vocabulary and the length of the packed validation sequences."""
    settings = current_names(settings)
    found = {key: settings.get(key) for key in ("vocab_size", "bos_id")}
    seqs = settings.get("seqs_per_step")
    return found | {"tokens per validation sequence": seqs and settings.get("val_batch_tokens", 0) / seqs}

def slow_evaluations(draft: Draft) -> Iterator[Problem]:
    """Yield the runs of an entry whose final validation takes more than twice as long as any of the parent's runs."""
    parent = draft.sides.get(draft.opponents["parent"]["stated"]["number"])
    if not parent:
        return
    limit_s = 2 * max(run.untimed_s().get("evaluation", 0.0) for run in parent.runs)
    for run in draft.main.runs:
        seconds = run.untimed_s().get("evaluation", math.inf)
        if seconds > limit_s:
            expected = f"at most {limit_s:.1f} s, twice the parent's"
            yield f"{run.path.parent.name}, phase evaluation", f"{seconds:.1f} s", expected

def comparisons(draft: Draft) -> Facts:
    """Compare an entry with its parent and with its base; return what `compare` reports, by role."""
    sides = {role: draft.sides.get(opponent["stated"]["number"]) for role, opponent in draft.opponents.items()}
    return {role: report.compare(side, draft.main) for role, side in sides.items() if side}

def in_turn(draft: Draft) -> Facts:
    """Return an entry's time relative to that of its parent and of its base, by role, each from one bench with both."""
    ratios = {}
    for role, found in comparisons(draft).items():
        share = found["share"]
        if share:
            word = found["verdict"] if found["verdict"] == "not comparable" else found["time_word"]
            ratios[role] = {"record": folder_name(draft.opponents[role]), "pairs": found["pairs"],
                            "loss": found["loss"], "word": word}
            ratios[role] |= {"ratio": 1 + share.mean, "low": 1 + share.low, "high": 1 + share.high}
    return ratios

def build(draft: Draft) -> Facts:
    """Compute the result.json of a record."""
    folder, stated, sides, _ = draft
    first = draft.main.runs[0]
    target = TRACKS[stated["track"]].target if stated["track"] else None
    base = sides.get(stated["base"])
    known = {key: fact for key, fact in stated.items() if key in STATED}
    result: Facts = {"stated": known, "target": target, "class": class_of(first.facts["config"])}
    result["machine"] = {key: value(first, key) for key in MACHINE}
    result["entry"] = {key: stated["entry"].get(key, value(first, key)) for key in ENTRY}
    result |= {"groups": {}, "runs": {}, "verdicts": {}}
    for name, side in sides.items():
        source = value(side.runs[0], "source_sha256")
        result["groups"][name] = report.numbers_of(side, target) | {"source_sha256": source}
        for run in side.reading.runs:
            result["runs"][name_of(run.path.parent, folder)] = numbers(run)
        if base and side is not base:
            found = report.compare(base, side, target)
            result["verdicts"][name] = {key: found[key] for key in OF_REPORT}
    result["config"] = relevant(first.facts["config"])
    parent = load(draft.parent) if draft.parent else {}
    result["changed"] = changed_settings(parent.get("config", result["config"]), result["config"])
    result["unfinished"] = [line for _, line in ends_of(draft) if line.get("outcome") != "done"]
    if (stated["kind"], stated["track"]) in CHAINS:
        result["in_turn"] = in_turn(draft)
    return rounded(result)

def numbers(run: Run) -> Facts:
    """Return the results of one run."""
    memory = value(run, "peak_memory_mib") or {}
    entropy = value(run, "unigram_nats")
    found = {key: value(run, key) for key in ("seed", "steps", "tokens")}
    found |= {"loss": run.loss, "seconds": run.seconds, "bits_per_byte": value(run, "val_bpb")}
    found |= {"memory_mib": max(memory.values(), default=None), "of_unigram_entropy": entropy and run.loss / entropy}
    return found | {"comms": value(run, "comms") or {}, "untimed_s": run.untimed_s()}

def page_of(draft: Draft, result: Facts) -> str:
    """Generate the page of a record, without the text that is written by hand."""
    parent = load(draft.parent) if draft.parent else {}
    return page.generate(result, draft.sides, parent, text(draft.folder / DIFF) if parent else "")

def picture_of(draft: Draft, result: Facts) -> str:
    """Plot the losses of all groups, as the text of an SVG file."""
    pools = {page.label(result, name): side.runs for name, side in draft.sides.items()}
    return plot.curves_svg(pools, result["target"])

def parent_diff(draft: Draft) -> str:
    """Return the diff of the parent's source and that of the main group."""
    return diff_of(text(draft.parent / SOURCE), text(draft.folder / SOURCE))

def new(args: argparse.Namespace, root: Path) -> int:
    """Create a record from runs, or generate the pages of an existing one again; return the exit status.

    The record gets its name when it is complete.
    """
    if args.update:
        folder = inside(root, find(root, args.update).name)
        if folder.name in SEALED:
            raise ToolError(f"record {folder.name}", found="sealed", expected="a record of runs of this trainer",
                            hint="do not update it")
        write(folder, load(folder)["stated"])
    else:
        taken = [int(known[2]) for known in map(FOLDER.fullmatch, os.listdir(root)) if known]
        number = f"{1 + max(taken, default=0):02}"
        folder = root / f"{args.date}_{number}_{args.name}"
        if not FOLDER.fullmatch(folder.name) or not args.runs:
            raise ToolError("record", found=f"{folder.name}, runs {args.runs}",
                            expected="YYYY-MM-DD_nn_NAME, a NAME of at most 60 characters, and at least one run",
                            hint="python records new --help")
        stated = {"date": args.date, "number": number, "name": args.name, "kind": args.kind, "track": args.track}
        stated |= {"parent": args.parent and find(root, args.parent).name, "groups": {}}
        stated |= {"entry": {}} | ({"idea": args.idea} if args.idea is not None else {})
        with unfinished(root) as staged:
            gather(args.runs, staged, stated)
            write(staged, stated)
            staged.rename(folder)
    say_left_out(root)
    say(shown(folder))
    return 0

@contextlib.contextmanager
def unfinished(root: Path) -> Iterator[Path]:
    """Yield a new directory in `root` with a random name; remove it at the end unless the block has renamed it.

    Directories that other calls have left are listed on stderr and not changed.
    """
    for leftover in sorted(root.glob(f"{UNFINISHED}*")):
        say(f"note: {shown(leftover)} is not removed: a call of `new` is using it or was killed, or another program "
            "created it; delete it if you do not need it", sys.stderr)
    staged = unfinished_name(root)
    staged.mkdir()
    try:
        yield staged
    finally:
        shutil.rmtree(staged, ignore_errors=True)

def gather(items: list[str], staged: Path, stated: Facts) -> None:
    """Copy logs, manifests and sources of the runs, and store their groups. items: PATH,... or GROUP=PATH,...

    Of a bench, all runs are copied, because records of its other sides may follow. They then refer to this record: if
    another record has the bench, nothing of it is copied.
    """
    sources: dict[str, Path] = {}
    benches = {files.sha256(path): path.parent for path in sorted(staged.parent.glob(f"[0-9]*/logs/**/{MANIFEST}"))}
    opponents = required_opponents(staged.parent, stated)
    for item in items:
        group, paths = re.fullmatch(r"(?:(\w+)=)?(.*)", item).groups()
        for path in paths.split(","):
            logs = logs_below(Path(path))
            if not logs:
                raise ToolError(f"runs {path}", found=f"no directory with a {LOG}",
                                expected="a run directory, or a directory of them", hint="check the path")
            for log in logs:
                add_run(read_log(log), group, staged, stated, sources, opponents, benches)
    if not sources:
        raise ToolError("runs", found=items, expected="at least one successful run",
                        hint="give run directories, or directories of them")
    groups = list(stated["groups"])
    stated |= {"base": None, "main": "" if "" in groups else groups[0]}
    if len(groups) > 1 and not opponents:
        stated["base"] = stated["main"] = "baseline" if "baseline" in groups else groups[0]
        if stated["kind"] == "entry":
            stated["main"] = next(name for name in groups if name != stated["base"])
    write_bytes(staged / SOURCE, files.read_bytes(sources[stated["main"]]))
    for name, source in sources.items():
        diff = diff_of(text(staged / SOURCE), text(source))
        if diff:
            path = inside(staged, f"sources/{name}.diff")                    # a foreign manifest may contain the name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path, diff.encode())

def add_run(run: Run, group: str | None, staged: Path, stated: Facts, sources: dict[str, Path], opponents: Facts,
            benches: dict[str, Path]) -> None:
    """Copy the logs of a run unless another record has them, add the run to its group, and find its source.

    benches: the directory of each bench that a record has, by the sha256 of its manifest.
    """
    manifest, noted = report.manifest_of(run)
    if noted.get("outcome", "done") != "done" and not run.finished:
        return                                                              # the manifest lists it
    resumed = [note for note in run.notes if note.startswith("resumed with another")]
    if resumed:
        raise ToolError(f"run {run.path}", found=resumed, expected="a run of one program", hint="leave it out")
    label = group_of(run, opponents) if opponents else group or noted.get("side", "")
    copy = inside(staged, "logs/" + f"{label}_{run.path.parent.name}".strip("_"))
    if manifest:
        bench = staged / "logs"
        if opponents:                                                       # one directory per bench
            bench /= manifest.parent.name
        bench = benches.setdefault(files.sha256(manifest), bench)
        if not (bench / MANIFEST).exists():
            copy_bench(manifest, bench)
        copy = inside(bench, noted["folder"])
    if is_stored(run.path.resolve(), staged.parent):
        copy = run.path.resolve().parent
    if copy.is_relative_to(staged) and not copy.exists():
        copy_logs(run.path.parent, copy)
    if files.sha256(copy / LOG) != files.sha256(run.path):
        raise ToolError(f"run {run.path}", found=f"{shown(copy)} has another log",
                        expected="a different name for each run, and the same logs in both copies of a bench",
                        hint="rename the directory of the run, or restore its log")
    name = name_of(copy, staged)
    if log_of(staged, name).parent != copy:
        raise ToolError(f"run {run.path}", found=f"{name}, which begins with the name of a record",
                        expected="a directory of another name", hint="rename the directory of the bench")
    stated["groups"].setdefault(label, []).append(name)
    sources.setdefault(label, source_of(run))

def group_of(run: Run, opponents: Facts) -> str:
    """Return the group of a run in an entry of a chain: the number of the opponent that made it, or ""."""
    program = run.facts["source_sha256"], rounded(relevant(run.settings))
    for opponent in opponents.values():
        if program == (main_pool(opponent)["source_sha256"], current_names(opponent["config"])):
            return opponent["stated"]["number"]
    return ""

def source_of(run: Run) -> Path:
    """Find the source of a run, next to its log or in a directory above. Raises ToolError without one."""
    above = run.path.resolve().parents[:report.MANIFEST_DEPTH]
    for source in (path for folder in above for path in sorted(folder.glob("*.py"))):
        if source.is_file() and files.sha256(source) == run.facts["source_sha256"]:
            return source
    raise ToolError(f"source of {run.path}", found="no .py file with its source_sha256",
                    expected="the trainer that wrote the log", hint="copy it next to the log")

def copy_bench(manifest: Path, copy: Path) -> None:
    """Copy the manifest of a bench and the logs of all its successful runs.

    Raises ToolError if a log is missing. Logs of other trainers, which have other names, are not copied.
    """
    copy.mkdir(parents=True, exist_ok=True)
    write_bytes(copy / MANIFEST, files.read_bytes(manifest))
    for line in manifest_lines(manifest, "end"):
        if line.get("outcome") == "done":
            logs = logs_below(manifest.parent / line["folder"])[:1]         # a run of a bench writes one
            if not logs and LOG in (Path(log).name for log in line.get("logs", [LOG])):
                raise ToolError(f"run {line['folder']} of {manifest}", found=f"no {LOG}",
                                expected="the logs of all successful runs of the bench", hint="restore its directory")
            for log in logs:
                read_log(log)                                               # raises if it is no log
                copy_logs(log.parent, inside(copy, line["folder"]))

def copy_logs(run_dir: Path, copy: Path) -> None:
    """Copy both logs of a run, compressed, into a new directory."""
    copy.mkdir(parents=True)
    for log in (LOG, TEXT_LOG):
        if files.stored(run_dir / log).exists():
            files.write_bytes(copy / f"{log}.gz", files.read_bytes(run_dir / log))

def write(folder: Path, stated: Facts) -> None:
    """Write all files that follow from the logs; the text above the marker does not change."""
    refuse_links_out(folder)
    draft = read_draft(folder, stated)
    problems = [in_words(problem) for problem in (*date_doubts(stated["date"]), *doubts(draft))]
    if problems:
        raise ToolError("these runs do not form a record", found="\n".join(problems),
                        expected="runs that no rule contradicts",
                        hint="group the runs differently, or add or remove some; rules: records/README.md")
    if draft.parent:
        write_bytes(folder / DIFF, parent_diff(draft).encode())
    result = build(draft)
    plot.save(picture_of(draft, result), folder / PLOT)
    result["files"] = hashes(folder)
    write_bytes(folder / RESULT, f"{json.dumps(result, indent=1)}\n".encode())
    for line in result["unfinished"]:
        say(one_line(f"note: {line['folder']} was started and is not counted: {line['outcome']}, {line['cause']}"),
            sys.stderr)
    for name, group in result["groups"].items():
        say(f"note: group {name or 'all'}: {group['runs']} of {group['started']} started runs count", sys.stderr)
    _, by_hand = page.split(text(folder / PAGE))
    write_bytes(folder / PAGE, page.join(page_of(draft, result), by_hand or "The idea:\n\n").encode())

def in_words(problem: Problem) -> str:
    """Format a problem as one line."""
    what, found, expected = problem
    return one_line(f"{what}: found {found}, expected {expected}")

def check(args: argparse.Namespace, root: Path) -> int:
    """Check records; print a line for each finding, and return the exit status."""
    chosen = [find(root, name) for name in args.chosen] or folders(root)
    if not chosen:
        raise ToolError(f"records in {shown(root)}", found="none", expected="at least one record",
                        hint="name their directory with --records")
    found = [f"{one_line(folder.name)}: {finding}" for folder in chosen for finding in findings(folder)]
    counts = Counter(int(known[2]) for known in map(FOLDER.fullmatch, os.listdir(root)) if known)
    found += [f"number {number:02}: several records have it" for number, count in counts.items() if count > 1]
    num_sealed = sum(folder.name in SEALED for folder in chosen)
    if not found and len(chosen) > num_sealed:
        say(f"{counted(len(chosen) - num_sealed, 'record')}: all numbers follow from their files")
    if not found and num_sealed:
        say(f"{counted(num_sealed, 'sealed record')}: all files have the stored hashes")
    for finding in found:
        say(finding)
    return int(bool(found))

def findings(folder: Path) -> Iterator[str]:
    """Yield a line for each part of a record that does not follow from its files."""
    try:
        refuse_links_out(folder)                                            # before any file is read
        result = load(folder)
        stated = result["stated"]
        if folder.name != folder_name(result):
            yield "directory name: expected YYYY-MM-DD_nn_NAME, with the date, number and name of result.json"
        yield from map(in_words, date_doubts(stated["date"]))
        known = result["files"]
        present = hashes(folder)
        if folder.name in SEALED:
            known = known | result["sealed"] | {RESULT: SEALED[folder.name]}
            present |= sealed(folder)
        else:
            yield from log_contradictions(folder, result)
        for name, (noted, found) in changes(known, present).items():
            labels = {(True, True): "edited: its sha256 differs", (True, False): "missing", (False, True): "added"}
            yield f"{name}: {labels[bool(noted), bool(found)]}"
    except ToolError as error:
        yield str(error)
    except FOREIGN_ERRORS as error:
        yield f"not as `new` writes it: {type(error).__name__} {error}"

def sealed(folder: Path) -> dict[str, str]:
    """Return the sha256 of result.json, of the generated part of the page and of the diff of a sealed record."""
    parts = {name: text(folder / name) for name in (RESULT, DIFF)}
    parts[PAGE] = page.split(text(folder / PAGE))[0].removeprefix(MARK)
    return {name: hashlib.sha256(part.encode()).hexdigest() for name, part in parts.items()}

def log_contradictions(folder: Path, result: Facts) -> Iterator[str]:
    """Yield a line for each line of a record that `new` would write differently."""
    draft = read_draft(folder, result["stated"])
    yield from map(in_words, doubts(draft))
    follows = build(draft) | {"files": result["files"]}                     # files are compared by their hashes
    made = {RESULT: (json.dumps(result, indent=1), json.dumps(follows, indent=1))}
    made[PAGE] = page.split(text(folder / PAGE))[0], page_of(draft, result)
    made[PLOT] = text(folder / PLOT), picture_of(draft, follows)
    if draft.parent:
        made[DIFF] = text(folder / DIFF), parent_diff(draft)
    for name, pair in made.items():
        both = zip_longest(*(part.splitlines() for part in pair), fillvalue="nothing")
        unlike = [f"{name}: found {one!r}, expected {other!r}" for one, other in both if one != other]
        yield from unlike[:SHOWN_LINES]
        if len(unlike) > SHOWN_LINES:
            yield f"{name}: and {counted(len(unlike) - SHOWN_LINES, 'more such line')}"

def table(args: argparse.Namespace, root: Path) -> int:
    """Print the entries of each track, in one list per class and per value of the facts that its ranking depends on."""
    say_left_out(root)
    lists: dict[str, list[Facts]] = {}
    for result in entries_of(root):
        track = result["stated"]["track"]
        alike = {"track": track, "class": result["class"]}
        alike |= {key: as_text(result["machine"][key]) for key in TRACKS[track].alike}
        lists.setdefault(", ".join(f"{key} {fact}" for key, fact in alike.items()), []).append(result)
    boards = {title: board(root, entries) for title, entries in lists.items()}
    if args.plot:
        chained = [entry for _, track in CHAINS for entry in entries_of(root, track)]
        if not chained:
            raise ToolError(f"--plot={args.plot}", found=f"no chain in {shown(root)}",
                            expected="entries of pocket_time", hint="leave out --plot")
        plot.chain(chained, args.plot)
    if args.json:
        print(json.dumps(boards, indent=1))
        return 0
    for title, rows in boards.items():
        columns = [key for key in rows[-1] if any(row[key] is not None for row in rows)]
        say(f"{title}\n{markdown(' | '.join(columns), [[row[key] for key in columns] for row in rows])}\n")
    print("to verify these: python records check; rules: records/README.md")
    return 0

def board(root: Path, entries: list[Facts]) -> list[Facts]:
    """Return the rows of one list: a chain in the order of its entries, others with the best one first.

    With a target, p is that of the losses against it, and an entry that has not proven it has no rank. Without a
    target, p tests whether the loss is lower than that of the next entry. The base of a chain comes before the entries
    of either class.
    """
    track = TRACKS[entries[0]["stated"]["track"]]
    if track.is_chain:
        base = entries_of(root, entries[0]["stated"]["track"])[:1]
        entries = base + [entry for entry in entries if entry not in base]
    else:
        entries = sorted(entries, key=lambda result: main_pool(result)[track.rank]["mean"])
    rows: list[Facts] = []
    rank = 0
    for result, after in zip_longest(entries, entries[1:]):
        stated = result["stated"]
        own = main_pool(result)
        words = [found["verdict"] for found in result["verdicts"].values()]
        p = own["p"]
        if after and not track.target:
            test = statistics.difference(main_pool(after)["losses"], own["losses"])
            p = test.p and test.p / 2
        proven = not track.target or (p is not None and p < statistics.ALPHA)
        rank += proven
        row = {"rank": rank if proven and not track.is_chain else None,
               "record": f"{stated['number']} {stated['name']}", "class": result["class"],
               "idea": stated.get("idea"), "p": p, "n": own["loss"]["n"]}
        for key in ("loss", "time"):
            row |= {key: own[key]["mean"], f"sd {key}": own[key]["sd"]}
        for role in ("parent", "base"):
            ratio = result.get("in_turn", {}).get(role, dict.fromkeys(("ratio", "low", "high")))
            row |= {f"ratio_to_{role}": ratio["ratio"], f"{role} 99 %": ratio["ratio"] and
                    [round(ratio["low"], 4), round(ratio["high"], 4)]}
        diff = text(inside(root, f"{folder_name(result)}/{DIFF}"))
        row |= {"diff_lines": page.changed_lines(diff) if stated["parent"] else None,
                "verdicts": ", ".join(words) or None, "params_total": result["entry"]["params_total"]}
        rows.append(row | {"table_bytes": result["entry"]["table_bytes"]})
    return rows

def main_pool(result: Facts) -> Facts:
    """Return the results of the main group."""
    return result["groups"][result["stated"]["main"]]

def main(argv: list[str]) -> int:
    """Run `new`, `check` or `table`; return the exit status. argv: the verb and its arguments."""
    verb = argv[0]
    parser = argparse.ArgumentParser(f"python records {verb}", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, default=RECORDS, help="directory of all records")
    if verb == "check":
        parser.add_argument("chosen", nargs="*", metavar="RECORD", help="records to check [all]")
    elif verb == "table":
        parser.add_argument("--json", action="store_true", help="print a JSON object")
        parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="file for a plot of the chain of pocket_time")
    else:
        parser.add_argument("name", nargs="?", help="name of the record: letters, digits, underscores")
        parser.add_argument("runs", nargs="*",
                            help="run directories, or directories of them; GROUP=PATH,... names a group")
        parser.add_argument("--kind", choices=("entry", "comparison"), default="entry", help="kind of record [entry]")
        parser.add_argument("--track", choices=TRACKS, help="track of an entry")
        parser.add_argument("--update", metavar="RECORD", help="generate the pages of this record again")
        parser.add_argument("--parent", help="record that the source was changed from")
        parser.add_argument("--idea", help=f"idea of an entry of pocket_time, at most {IDEA_WORDS} words")
        parser.add_argument("--date", default=f"{datetime.date.today()}", help="date of the record, YYYY-MM-DD [today]")
    args = parser.parse_args(argv[1:])
    root = args.records.resolve()
    # Two calls of `new` must not choose the same number for their records.
    with locked(root, NEW_WAIT_S) if verb == "new" else contextlib.nullcontext():
        return {"new": new, "check": check, "table": table}[verb](args, root)

"""Verbs `new`, `check` and `table`: a record is logs, and pages that are generated from them.

    python records new NAME RUNS ... --track=pocket          runs: directories, or GROUP=DIRECTORY
    python records new --update=NUMBER                       generate its pages again
    python records check [RECORD ...]
    python records table

`check` generates the pages again and compares them. Logs are stored compressed; hashes are of contents, under the name
without .gz. Records of other kinds (predictions, and the ablation 03) are not recomputed.
"""
import argparse
import datetime
import difflib
import io
import json
import math
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tools import files, page, plot, report, statistics
from tools.files import FOREIGN_ERRORS, counted, inside, say, write_bytes
from tools.page import DIFF, FOLDER, PAGE, PLOT, RESULT, SOURCE
from tools.read import Facts, Reading, Run, ToolError, read_file
from tools.report import MANIFEST, Side, as_text, fact, jsonable, manifest_lines, manifest_of, markdown, relevant

RECORDS = Path(__file__).resolve().parents[1]
LOG = "log.jsonl"
DIGITS = 9                             # significant digits in result.json; further ones depend on library versions
PLAIN_ROWS = 10                        # class plain: no table has more rows than this times the vocabulary
ALIKE = "data_sha256", "hardware", "world_size", "torch", "cuda"             # equal in all runs of a record
MACHINE = *ALIKE, "preset", "val_tokens", "tokens", "params_total"
IDEA_WORDS = 5                         # most words of the idea of an entry of a chain
CHAIN_SEEDS = range(5, 21)             # numbers of seeds that may prove the target of a chain
# Level of p for that proof. If the mean is exactly at the target, and the target is tested after each of these numbers
# of seeds, 1 % of entries prove it.
CHAIN_ALPHA = 0.0015
EARLIER_ALPHA = {"2026-11-25_15_Tables", "2026-11-25_19_Compiled"}           # entries from before CHAIN_ALPHA: 0.01
POCKET_DATA = "b191a7b958c80cc767267d8093a36c2507dddc185294a0b021fd3c56ab71e207"
KINDS = "entry", "comparison"          # others are of earlier tools

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

class Draft:
    """A record as its logs have it. stated: by result.json."""

    def __init__(self, folder: Path, stated: Facts) -> None:
        self.folder = folder
        self.stated = stated
        self.sides = {name: read_group(folder, stated, name) for name in stated["groups"]}
        self.main = self.sides[stated["main"]]
        self.runs = [run for side in self.sides.values() for run in side.reading.runs]
        self.target = TRACKS[stated["track"]].target if stated["track"] else None
        self.opponents = opponents_of(folder.parent, stated)


# ---- Reading records ------------------------------------------------------------------------------------------------
def text(path: Path) -> str:
    """Return the text of a file with its line ends; "" if it is missing."""
    return files.read_bytes(path).decode("utf-8") if path.is_file() else ""

def load(folder: Path) -> Facts:
    try:
        return json.loads(text(folder / RESULT))
    except ValueError as error:
        raise ToolError(f"{folder / RESULT} is damaged ({error}): restore it") from None

def folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if FOLDER.fullmatch(path.name))

def find(root: Path, name: str) -> Path:
    wanted = Path(name).name
    fits = [path for path in folders(root) if wanted in (path.name, *path.name.split("_", 2)[1:])]
    if len(fits) != 1:
        raise ToolError(f"{counted(len(fits), 'record')} fit {name!r}: give one directory name or number")
    return fits[0]

def entries_of(root: Path) -> list[Facts]:
    found = [result for result in map(load, folders(root)) if result["stated"]["kind"] == "entry"]
    return sorted(found, key=lambda result: int(result["stated"]["number"]))

def folder_name(result: Facts) -> str:
    return "_".join(result["stated"][key] for key in ("date", "number", "name"))

def main_pool(result: Facts) -> Facts:
    return result["groups"][result["stated"]["main"]]

def opponents_of(root: Path, stated: Facts) -> Facts:
    """Return the entries that an entry of a chain must have raced, its parent and the base, by number."""
    track = TRACKS.get(stated["track"])
    if stated["kind"] != "entry" or not track or not track.is_chain:
        return {}
    named = {folder_name(entry): entry for entry in entries_of(root) if entry["stated"]["track"] == stated["track"]
             and int(entry["stated"]["number"]) < int(stated["number"])}
    if not named and not stated["parent"]:
        return {}
    if stated["parent"] not in named:
        raise ToolError(f"{stated['parent']} is no earlier entry of {stated['track']}: choose the parent from "
                        f"{', '.join(named) or 'none'} with --parent")
    return {entry["stated"]["number"]: entry for entry in (named[stated["parent"]], [*named.values()][0])}

def read_log(path: Path) -> Run:
    try:
        return read_file(path)[0]
    except (ToolError, *FOREIGN_ERRORS) as error:
        raise ToolError(f"log {path} is not that of a run ({error}): restore it, or leave it out") from None

def log_of(folder: Path, name: str) -> Path:
    """Return the log.jsonl of a run that result.json names: RUN, or before record 28 also RECORD/RUN."""
    record, _, rest = name.partition("/")
    if rest and FOLDER.fullmatch(record):
        return inside(folder.parent, f"{record}/logs/{rest}/{LOG}")
    return inside(folder, f"logs/{name}/{LOG}")

def read_group(folder: Path, stated: Facts, name: str) -> Side:
    return report.sorted_out(name, Reading([read_log(log_of(folder, run)) for run in stated["groups"][name]]))

def ends_of(draft: Draft) -> list[tuple[Path, Facts]]:
    """Return the lines on the ends of runs in all manifests of a record, each with the directory of its run."""
    found = {manifest_of(run)[0] for run in draft.runs} - {None}
    return [(path.parent / line["folder"], line) for path in sorted(found) for line in manifest_lines(path, "end")]

def diff_of(old: str, new: str) -> str:
    """Return a diff of two sources that `git apply` accepts; "" for equal ones."""
    lines = [[row if row.endswith("\n") else f"{row}\n\\ No newline at end of file\n" for row in io.StringIO(source)]
             for source in (old, new)]                    # splitlines would also split at form feeds
    return "".join(difflib.unified_diff(*lines, f"a/{SOURCE}", f"b/{SOURCE}"))


# ---- The rules ------------------------------------------------------------------------------------------------------
def problems(draft: Draft) -> Iterator[str]:
    stated = draft.stated
    too_late = datetime.date.fromisoformat(stated["date"]) + datetime.timedelta(days=2)    # because of time zones
    for run in draft.runs:
        is_resumed = any(note.startswith("resumed") for note in run.notes)
        if run.void or run.refused or is_resumed or not run.finished or not math.isfinite(run.loss):
            why = run.void or run.refused or [run.loss, *run.notes]
            yield f"{run.path.parent.name} is not a finished run with valid times that was not resumed ({why})"
        started = str(run.facts.get("started") or "")
        if started >= str(too_late):
            yield f"a run started {started}, after the date of the record, {stated['date']}"
    yield from left_out(draft)
    for key in ALIKE:
        values = {as_text(fact(run, key)) for run in draft.runs}
        if len(values) > 1:
            yield f"the runs of a record have one {key}, not {sorted(values)}"
    if not all(side.runs for side in draft.sides.values()):
        return                                                              # the other rules need runs that count
    if {run.facts["source_sha256"] for run in draft.main.runs} != {files.sha256(draft.folder / SOURCE)}:
        yield f"{SOURCE} is not the source in the logs of group {stated['main'] or 'all'}"
    for side in draft.sides.values():
        yield from report.mixtures(side)
    if stated["kind"] == "entry":
        yield from problems_of_entry(draft)

def left_out(draft: Draft) -> Iterator[str]:
    """Yield the successful runs of a bench that are in no group although their source is."""
    grouped = {folder for run in draft.runs for folder in run.path.resolve().parents}
    sources = {run.facts.get("source_sha256") for run in draft.runs}
    for run_dir, line in ends_of(draft):
        if line["outcome"] == "done" and line["source_sha256"] in sources and run_dir not in grouped:
            yield f"{line['folder']} succeeded and is left out: give all runs of each source of the record"

def problems_of_entry(draft: Draft) -> Iterator[str]:
    stated = draft.stated
    track = TRACKS.get(stated["track"])
    if not track:
        yield f"an entry has a track: give --track, one of {', '.join(TRACKS)}, or --kind=comparison"
        return
    if track.is_chain:
        yield from problems_of_chain(draft, track)
    elif len(draft.sides) != (2 if stated["base"] else 1):
        yield f"an entry has one group and a baseline, not {[*draft.sides]}"
    for run in draft.main.runs:
        for key, needed in track.needs.items():
            if fact(run, key) != needed:
                yield f"{run.path.parent.name}: {key} is {fact(run, key)}, and {needed} on track {stated['track']}"

def problems_of_chain(draft: Draft, track: Track) -> Iterator[str]:
    main = draft.main
    level = statistics.ALPHA if draft.folder.name in EARLIER_ALPHA else CHAIN_ALPHA
    word, reason = report.proof(main, track.target, level)
    if word != "proven" or len(main.losses()) not in CHAIN_SEEDS or report.missing(main):
        yield (f"the target takes p < {level} over {CHAIN_SEEDS[0]} to {CHAIN_SEEDS[-1]} seeds and all started runs: "
               f"{reason}")
    if not 0 < len(draft.stated.get("idea", "").split()) <= IDEA_WORDS:
        yield f"an entry of a chain has --idea='one to {IDEA_WORDS} words'"
    verdicts = verdicts_of(draft)
    for number, opponent in draft.opponents.items():
        name = folder_name(opponent)
        role = "parent" if name == draft.stated["parent"] else "base"
        found = verdicts.get(number)
        if not found or not found["share"]:
            yield f"no bench has runs of the entry and of its {role}, {name}, with its record's source and settings"
        elif found["verdict"] != "faster":
            yield (f"an entry is faster than its {role}, {name}, in one bench, not {found['verdict']}: "
                   f"{page.ratio_of(found)}, {counted(found['pairs'], 'pair')}")

def class_of(settings: Facts) -> str:
    rows = [count for key, count in settings.items() if key.endswith("_rows") and isinstance(count, int)]
    rows += [table["rows"] for table in settings.get("tables") or ()]
    return "table" if max(rows, default=0) > PLAIN_ROWS * settings["vocab_size"] else "plain"

def is_of(run: Run, opponent: Facts) -> bool:
    program = run.facts.get("source_sha256"), rounded(relevant(run.facts["config"]))
    return program == (main_pool(opponent)["source_sha256"], opponent["config"])


# ---- Computing result.json ------------------------------------------------------------------------------------------
def rounded(facts: Any) -> Any:
    return jsonable(facts, lambda number: float(f"{float(number):.{DIGITS}g}"))

def verdicts_of(draft: Draft) -> Facts:
    """Compare each group with the base group, by name; an entry of a chain with its opponents, by time alone."""
    stated, sides = draft.stated, draft.sides
    compared = {name: (sides[stated["base"]], side) for name, side in sides.items()
                if stated["base"] not in (None, name)}
    compared |= {number: (sides[number], draft.main) for number in draft.opponents if number in sides}
    verdicts: Facts = {}
    for name, pair in compared.items():
        found = report.compare(*pair, draft.target)
        if name in draft.opponents:
            found["record"] = folder_name(draft.opponents[name])
            if found["verdict"] != "not comparable":
                found["verdict"] = found["time_word"]
        keys = ("record", "verdict", "reason", "loss", "share", "pairs")
        verdicts[name] = jsonable({key: found[key] for key in keys if key in found})
    return verdicts

def build(draft: Draft) -> Facts:
    stated, sides = draft.stated, draft.sides
    first = draft.main.runs[0]
    result: Facts = {"stated": stated, "target": draft.target, "class": class_of(first.facts["config"])}
    result["machine"] = {key: fact(first, key) for key in MACHINE}
    result |= {"groups": {}, "runs": {}, "verdicts": verdicts_of(draft), "config": relevant(first.facts["config"])}
    for name, side in sides.items():
        group = {key: found for key, found in report.facts_of(side, draft.target).items() if key != "name"}
        result["groups"][name] = group | {"source_sha256": fact(side.runs[0], "source_sha256")}
        for run_name, run in zip(stated["groups"][name], side.reading.runs):
            numbers = {"seed": run.seed, "steps": fact(run, "steps"), "loss": run.loss, "seconds": run.seconds}
            result["runs"][run_name] = numbers | {"untimed_s": run.untimed_s}
    result["unfinished"] = [line for _, line in ends_of(draft) if line.get("outcome") != "done"]
    return rounded(result)

def generated(draft: Draft) -> dict[str, str]:
    """Return the text of each file that follows from the logs, by name; of the page without what is written by hand."""
    folder = draft.folder
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    given = [name for name in names if name not in (PAGE, RESULT, PLOT, DIFF)]             # not made here
    result = build(draft) | {"files": {name.removesuffix(files.SUFFIX): files.sha256(folder / name) for name in given}}
    pools = {page.label(result, name): side.runs for name, side in draft.sides.items()}
    made = {PLOT: plot.curves_svg(pools, result["target"]), PAGE: page.generate(result, draft.sides)}
    if draft.stated["parent"]:
        parent = inside(folder.parent, draft.stated["parent"])
        made[DIFF] = diff_of(text(parent / SOURCE), text(folder / SOURCE))
    return made | {RESULT: json.dumps(result, indent=1) + "\n"}

def new(args: argparse.Namespace, root: Path) -> int:
    if args.update:
        folder = find(root, args.update)
        stated = load(folder)["stated"]
        if stated["kind"] not in KINDS:
            raise ToolError(f"{folder.name} is of another tool: update a record of kind {' or '.join(KINDS)}")
        write(folder, stated)
        say(str(folder))
        return 0
    number = f"{1 + max((int(folder.name.split('_')[1]) for folder in folders(root)), default=0):02}"
    folder = root / f"{args.date}_{number}_{args.name}"
    if not FOLDER.fullmatch(folder.name) or not args.runs:
        raise ToolError("a record has runs, and a name of at most 60 letters, digits, underscores")
    stated = {"date": str(args.date), "number": number, "name": args.name, "kind": args.kind, "track": args.track,
              "parent": args.parent and find(root, args.parent).name, "idea": args.idea, "groups": {}}
    staged = root / f".unfinished-{folder.name}"                            # it gets its name when it is complete
    staged.mkdir()
    try:
        gather(args.runs, staged, stated)
        write(staged, stated)
        staged.rename(folder)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    say(str(folder))
    say(f"now write the idea in its {PAGE}, then run python records check", sys.stderr)
    return 0

def gather(items: list[str], staged: Path, stated: Facts) -> None:
    """Copy logs, manifests and sources of the runs, and store their groups. items: PATH or GROUP=PATH."""
    sources: dict[str, Path] = {}
    opponents = opponents_of(staged.parent, stated)
    for item in items:
        group, path = re.fullmatch(r"(?:(\w+)=)?(.*)", item).groups()
        logs = sorted([*Path(path).rglob(LOG), *Path(path).rglob(LOG + files.SUFFIX)])
        if not logs:
            raise ToolError(f"{path} has no {LOG}: give a run directory, or a directory of them")
        for run in map(read_log, logs):
            manifest, noted = manifest_of(run)
            if noted.get("outcome", "done") != "done":
                continue                                                    # the manifest lists it
            label = group or noted.get("side", "")
            if opponents:
                label = next((number for number, one in opponents.items() if is_of(run, one)), "")
            place = f"logs/{label}_{run.path.parent.name}".replace("/_", "/").rstrip("_")
            if manifest:                                                    # an entry of a chain has several benches
                bench = staged / "logs" / (manifest.parent.name if opponents else "")
                write_bytes(bench / MANIFEST, files.read_bytes(manifest))
                place = (bench / noted["folder"]).relative_to(staged)
            copy = inside(staged, str(place))
            if copy.exists():
                raise ToolError(f"another log has the name of {run.path}: give each run once, in its own directory; "
                                "a comparison has one bench")
            write_bytes(copy / f"{LOG}.gz", files.read_bytes(run.path))
            stated["groups"].setdefault(label, []).append(copy.relative_to(staged / "logs").as_posix())
            sources.setdefault(label, source_of(run))
    if not sources:
        raise ToolError(f"{' '.join(items)} has no successful run: give at least one")
    groups = list(stated["groups"])
    stated |= {"base": None, "main": "" if "" in groups else groups[0]}
    if len(groups) > 1 and not opponents:
        stated["base"] = groups[0]
        stated["main"] = groups[stated["kind"] == "entry"]
    write_bytes(staged / SOURCE, files.read_bytes(sources[stated["main"]]))
    for name, source in sources.items():
        diff = diff_of(text(staged / SOURCE), text(source))
        if diff:
            write_bytes(inside(staged, f"sources/{name}.diff"), diff.encode())        # a foreign manifest may name it

def source_of(run: Run) -> Path:
    above = run.path.resolve().parents[:report.MANIFEST_DEPTH]
    for source in (path for folder in above for path in sorted(folder.glob("*.py"))):
        if source.is_file() and files.sha256(source) == run.facts["source_sha256"]:
            return source
    raise ToolError(f"no .py file near {run.path} has its source_sha256: copy the trainer next to the log")

def write(folder: Path, stated: Facts) -> None:
    """Write all files that follow from the logs; the text between the markers does not change."""
    draft = Draft(folder, stated)
    found = list(problems(draft))
    if found:
        raise ToolError("these runs do not form a record (rules: records/README.md):\n  " + "\n  ".join(found))
    made = generated(draft)
    made[PAGE] = page.join(made[PAGE], page.split(text(folder / PAGE))[1] or "The idea:\n\n")
    for name, content in made.items():
        write_bytes(folder / name, content.encode())

def check(args: argparse.Namespace, root: Path) -> int:
    chosen = [find(root, name) for name in args.chosen] or folders(root)
    if not chosen:
        raise ToolError(f"{root} has no record: name the directory of records with --records")
    numbers = [folder.name.split("_")[1] for folder in folders(root)]
    found = [f"number {number}: several records have it" for number in {*numbers} if numbers.count(number) > 1]
    for folder in chosen:
        found += [f"{folder.name}: {finding}" for finding in findings(folder)]
    say("\n".join(found) or "no number differs from what the files give, in the records that are recomputed")
    return int(bool(found))

def findings(folder: Path) -> list[str]:
    try:
        result = load(folder)
        if result["stated"]["kind"] not in KINDS:
            say(f"{folder.name} is not recomputed: its kind is {result['stated']['kind']}")
            return []
        draft = Draft(folder, result["stated"])
        found = list(problems(draft))
        for name, expected in generated(draft).items():
            stored = text(folder / name)
            if expected != (page.split(stored)[0] if name == PAGE else stored):
                found.append(f"{name} is not what follows from the logs: see python records new "
                             f"--update={draft.stated['number']}; git diff")
        if folder.name != folder_name(result):
            found.append("directory name: expected YYYY-MM-DD_nn_NAME, with the date, number and name of result.json")
        return found
    except ToolError as error:
        return [str(error)]
    except FOREIGN_ERRORS as error:
        return [f"{RESULT} is not as `new` writes it: {type(error).__name__} {error}"]

def table(args: argparse.Namespace, root: Path) -> int:
    """Print the entries of each track, in one list per class and per value of the facts that its ranking depends on."""
    lists: dict[str, list[Facts]] = {}
    for result in entries_of(root):
        track = result["stated"]["track"]
        alike = {"track": track, "class": result["class"]}
        alike |= {key: as_text(result["machine"][key]) for key in TRACKS[track].alike}
        lists.setdefault(", ".join(f"{key} {common}" for key, common in alike.items()), []).append(result)
    for title, of_list in lists.items():
        say(f"{title}\n{board(of_list)}\n")
    print("to verify these: python records check; rules: records/README.md")
    return 0

def board(entries: list[Facts]) -> str:
    """Format a list: a chain in the order of its entries, others with the best one first.

    With a target, p is that of the losses against it, and an entry that has not proven it has no rank. Without one, p
    tests whether the loss is lower than that of the next entry.
    """
    track = TRACKS[entries[0]["stated"]["track"]]
    if not track.is_chain:
        entries = sorted(entries, key=lambda result: main_pool(result)[track.rank]["mean"])
    rows = []
    rank = 0
    for result, after in zip(entries, [*entries[1:], None]):
        stated, own = result["stated"], main_pool(result)
        p = own["p"]
        if after and not track.target:
            test = statistics.difference(main_pool(after)["losses"], own["losses"])
            p = None if test.p is None else test.p / 2
        proven = not track.target or (p is not None and p < statistics.ALPHA)
        rank += proven
        row = [f"{stated['number']} {stated['name']}", p, *own["loss"].values(), *list(own["time"].values())[1:]]
        if track.is_chain:
            ratios = page.ratios(result) or [None]
            rows.append([*row, stated["idea"], ratios[0], ratios[-1]])
        else:
            rows.append([rank if proven else None, *row])
    columns = "record | p | n | loss | sd | s | sd"
    if track.is_chain:
        return markdown(f"{columns} | idea | of the parent's time | of the base's time", rows)
    return markdown(f"rank | {columns}", rows)

def main(parser: argparse.ArgumentParser, argv: list[str]) -> int:
    verb = argv[0]
    parser.add_argument("--records", type=Path, default=RECORDS, help="directory of all records")
    if verb == "check":
        parser.add_argument("chosen", nargs="*", metavar="RECORD", help="records to check [all]")
    elif verb == "new":
        parser.add_argument("name", nargs="?", help="name of the record: letters, digits, underscores")
        parser.add_argument("runs", nargs="*", help="directories of runs; GROUP=PATH names the group of its runs")
        parser.add_argument("--kind", choices=KINDS, default="entry", help="kind of record [entry]")
        parser.add_argument("--track", choices=TRACKS, help="track of an entry")
        parser.add_argument("--update", metavar="RECORD", help="generate the pages of this record again")
        parser.add_argument("--parent", help="record that the source was changed from")
        parser.add_argument("--idea", default="", help=f"idea of an entry of pocket_time, at most {IDEA_WORDS} words")
        parser.add_argument("--date", type=datetime.date.fromisoformat, default=datetime.date.today(),
                            metavar="YYYY-MM-DD", help="date of the record [today]")
    args = parser.parse_args(argv[1:])
    root = args.records.resolve()
    return {"new": new, "check": check, "table": table}[verb](args, root)

"""What a record folder holds, how its files are named, and how they are read."""
from __future__ import annotations

import difflib
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from tools.logs import ToolError

RECORDS = Path(__file__).resolve().parents[1]
FOLDER = re.compile(r"(\d{4}-\d\d-\d\d)_(\d\d)_(\w+)")              # date, number, name
HASH = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{56}\b")
MARK = "<!-- end of what is written by hand; what follows is made from the logs -->\n\n"
SOURCE = "train_gpt.py"
MANIFEST = "manifest.jsonl"
MANIFEST_DEPTH = 6                 # folders above a run in which its manifest may lie
PAGE = "README.md"
RESULT = "result.json"
PLOT = "loss.png"
DIFF = "source.diff"               # against the parent's source
LOG, TEXT_LOG = "log.jsonl", "log.txt"
LOGS = LOG, TEXT_LOG
MADE = PAGE, RESULT, PLOT, DIFF    # from the other files
MARKS_OF_RECORDS = "*/" + RESULT, "*/logs", "[0-9]*/" + PAGE


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def short_hashes(value: Any) -> str:
    """A value in words, of its sha256 sums the first eight digits."""
    return HASH.sub(r"\1", str(value))


def shown(path: Path) -> str:
    """A path from here, where it is below; else as it was given."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def text(path: Path) -> str:
    """As it is, line ends too: hashes and diffs depend on them. A file that is not there is empty."""
    if not path.is_file():
        return ""
    return path.read_bytes().decode("utf-8")


def lines(manifest: Path, kind: str) -> list[dict[str, Any]]:
    """Those of one type; none where there is no manifest. The last line may be torn."""
    found = []
    for printed in text(manifest).splitlines():
        if not printed.endswith("}"):
            continue
        try:
            line = json.loads(printed)
            if line["type"] == kind:
                found.append(line)
        except (ValueError, KeyError):
            raise ToolError(f"manifest {manifest}", "a damaged line", "an object with a type", "restore it") from None
    return found


def load(folder: Path) -> dict[str, Any]:
    """result.json of a record."""
    try:
        return json.loads(text(folder / RESULT))
    except ValueError as error:
        raise ToolError(f"{folder.name}/{RESULT}", error, "the numbers of a record", "records new") from None


def folders(root: Path) -> list[Path]:
    """What looks like a record, badly named ones too."""
    found = set()
    for mark in MARKS_OF_RECORDS:
        for path in root.glob(mark):
            if not path.parent.name.startswith("."):
                found.add(path.parent)
    return sorted(found)


def find(root: Path, name: str) -> Path:
    """A record by its path, folder name, number or name."""
    wanted = Path(name).name
    fits = []
    for path in folders(root):
        date, *number_and_name = path.name.split("_", 2)
        if wanted in (path.name, *number_and_name):
            fits.append(path)
    if len(fits) != 1:
        names = [path.name for path in fits]
        raise ToolError(f"record {name}", names, "one", "give its folder's name or its number")
    return fits[0]


def hashes(folder: Path) -> dict[str, str]:
    """Of all files of a record that are not made from the others."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in MADE:
            found[name] = sha256(path)
    return found


def links_out(folder: Path) -> list[str]:
    """Symbolic links that lead out of a record: what they show is not in it."""
    inside = folder.resolve()
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() and not path.resolve().is_relative_to(inside):
            found.append(path.relative_to(folder).as_posix())
    return found


def unified(old: Path, new: Path) -> str:
    """A diff that `git apply` takes; empty where nothing differs."""
    before = text(old).splitlines(keepends=True)
    after = text(new).splitlines(keepends=True)
    return "".join(difflib.unified_diff(before, after, f"a/{SOURCE}", f"b/{SOURCE}"))


def parent_diff(folder: Path, stated: dict[str, Any]) -> str:
    """What the source of a record changes in its parent's; empty without a parent."""
    if not stated["parent"]:
        return ""
    return unified(folder.parent / stated["parent"] / SOURCE, folder / SOURCE)


def predicts(stated: dict[str, Any]) -> bool:
    """Made from ledgers, without runs."""
    return stated["kind"] == "prediction"


def changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, list[Any]]:
    """[old, new] of each key that differs; None for what is not there."""
    found = {}
    for key in sorted({*old, *new}):
        if old.get(key) != new.get(key):
            found[key] = [old.get(key), new.get(key)]
    return found

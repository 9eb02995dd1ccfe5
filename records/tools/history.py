"""What git remembers of records: a log that was committed once stays, and numbers that change are said to have changed.

Everything inside a record can be made to agree by someone who edits all of it. What was committed and seen by others
cannot be taken back, so the history is evidence: `check` reads it where there is one. It follows the ancestors of HEAD;
a history that was rewritten is evidence only beside another clone."""
from __future__ import annotations

import datetime
import hashlib
import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tools.layout import FOLDER, MANIFEST, RESULT
from tools.rules import Problem

NO_LOGS = "sources", "ledgers"     # folders of a record that hold none
SAYS_SINCE = "2026-11-22"          # until this day `new --update` did not say what it changed
KEPT_CHANGES = 30                  # numbers by name of one update; of the others only the part of result.json
LATER = "picture_sha256"           # the first records had none
SILENT = "changes"                 # the part of result.json that says what changed in the others
OF_ANOTHER = "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"         # a hook of another repository may run this
SHORT = 8                          # characters of a commit's name
SECONDS = 60                       # git answers at once, but not on a lost disk


class Version(NamedTuple):
    """A file as a commit left it."""
    path: str                      # from the top of the repository
    blob: str
    commit: str                    # shortened
    date: str                      # of the commit, YYYY-MM-DD


class Change(NamedTuple):
    """Of a number in result.json; None: not there."""
    name: str
    old: Any
    new: Any


class Repository:
    """The repository around a folder."""

    def __init__(self, top: Path) -> None:
        self.top = top

    @classmethod
    def around(cls, folder: Path) -> Repository | None:
        """None without git, outside a repository, and where nothing is committed yet."""
        try:
            top = cls(folder).git("rev-parse", "--show-toplevel").strip()
            repository = cls(Path(os.fsdecode(top)))
            repository.git("rev-parse", "--verify", "HEAD")
        except (OSError, subprocess.SubprocessError):
            return None
        return repository

    def git(self, *arguments: str) -> bytes:
        command = ["git", "-c", "core.quotepath=off", *arguments]
        own = {key: value for key, value in os.environ.items() if key not in OF_ANOTHER}
        done = subprocess.run(command, cwd=self.top, env=own, capture_output=True, check=True, timeout=SECONDS)
        return done.stdout

    def shallow(self) -> bool:
        return self.git("rev-parse", "--is-shallow-repository").strip() == b"true"

    def versions(self, *paths: Path, line: str = "--topo-order") -> list[Version]:
        """Of all files below these paths, oldest first; a merge's against each of its parents.

        line: "--first-parent" for what one branch has seen, one after the other.
        """
        names = [path.relative_to(self.top).as_posix() for path in paths]
        out = self.git("log", "--reverse", line, "-m", "--raw", "--no-renames", "--no-abbrev",
                       "--format=commit %H %cs", "--", *names).decode("utf-8", "surrogateescape")
        found = []
        commit = date = ""
        for printed in out.splitlines():
            if printed.startswith("commit "):
                _, commit, date = printed.split()
            elif printed.startswith(":"):
                facts, path = printed.split("\t", 1)
                blob = facts.split()[3]
                if blob.strip("0"):                                             # not: deleted
                    found.append(Version(path, blob, commit[:SHORT], date))
        return found

    def content(self, blob: str) -> bytes:
        return self.git("cat-file", "blob", blob)

    def blob_of(self, path: Path, length: int) -> str:
        """What git calls the bytes of a file. length: of the name, which tells the hash."""
        data = path.read_bytes()
        kind = hashlib.sha1 if length == len(hashlib.sha1().hexdigest()) else hashlib.sha256
        return kind(b"blob %d\0" % len(data) + data).hexdigest()


# ---- Logs
def is_evidence(path: Path) -> bool:
    """A log or a manifest, by its path from the folder of all records: what is in a record's folders of runs."""
    record, *inside = path.parts
    return len(inside) > 1 and inside[0] not in NO_LOGS and bool(FOLDER.fullmatch(record))


def lost(root: Path, chosen: list[Path] | None = None) -> Iterator[Problem]:
    """Logs that git has and that the records no longer have as they were. chosen: records; None: all, gone ones too.

    A log may move with its record, and not to another one. A manifest may grow: whatever it had stays at its beginning.
    """
    repository = Repository.around(root)
    if repository is None:
        return
    versions = []
    for version in repository.versions(*(chosen if chosen is not None else [root])):
        path = repository.top / version.path
        if is_evidence(path.relative_to(root)):
            versions.append(version)

    places = kept_blobs(repository, root, versions)
    told = []
    for version in versions:
        told.append((record_of(repository.top / version.path, root), places.get(version.blob, set())))
    homes = homes_of(root, told)
    said = set()
    for version, (record, records) in zip(versions, told):
        path = repository.top / version.path
        if homes[record] in records or version.path in said:
            continue
        today = root / homes[record] / path.relative_to(root / record)
        if today.name == MANIFEST and today.is_file():
            if today.read_bytes().startswith(repository.content(version.blob)):
                continue
        said.add(version.path)
        found = "another content" if path.is_file() else "nothing"
        name = path.relative_to(root).as_posix()
        yield name, found, f"that of commit {version.commit} of {version.date}: a log that git has stays as it was"


def record_of(path: Path, root: Path) -> str:
    """The folder's name of the record that a file is in."""
    return path.relative_to(root).parts[0]


def kept_blobs(repository: Repository, root: Path, versions: list[Version]) -> dict[str, set[str]]:
    """By git's name of each log and manifest in the records of today, the records that have it; none are needed where
    git has none."""
    found: dict[str, set[str]] = {}
    if not versions:
        return found
    length = len(versions[0].blob)
    for path in root.rglob("*"):
        if is_evidence(path.relative_to(root)) and path.is_file() and not path.is_symlink():
            found.setdefault(repository.blob_of(path, length), set()).add(record_of(path, root))
    return found


def homes_of(root: Path, told: list[tuple[str, set[str]]]) -> dict[str, str]:
    """What records are called today: as they were, else as the one that has most of their logs.

    told: by log the record that git knows it in, and those that have it today.
    """
    heirs: dict[str, Counter[str]] = {}
    for name, records in told:
        heirs.setdefault(name, Counter()).update(records)
    homes = {}
    for name, counts in heirs.items():
        homes[name] = name
        if counts and not (root / name).is_dir():
            homes[name] = max(counts, key=counts.get)
    return homes


def remark(root: Path) -> str:
    """What history a check could read."""
    repository = Repository.around(root)
    if repository is None:
        return "no git history to hold them to"
    if repository.shallow():
        return "no log is gone or altered that this shallow clone knows"
    return "no log that git has is gone or altered"


# ---- Numbers
def leaves(value: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Numbers and texts of a result.json, lists whole, by their place: groups.a.loss.mean."""
    if not isinstance(value, dict):
        yield ".".join(place), value
        return
    for key, inner in value.items():
        yield from leaves(inner, (*place, key))


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    before = dict(leaves({key: part for key, part in old.items() if key != SILENT}))
    after = dict(leaves({key: part for key, part in new.items() if key != SILENT}))
    found = []
    for name in dict.fromkeys([*after, *before]):
        if name == LATER and name not in before:
            continue
        if before.get(name) != after.get(name):
            found.append(Change(name, before.get(name), after.get(name)))
    return found


def entry(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """What one update is said to have changed."""
    changed = differences(old, new)
    parts = sorted({change.name.partition(".")[0] for change in changed})
    numbers = {change.name: [change.old, change.new] for change in changed[:KEPT_CHANGES]}
    return {"parts": parts, "numbers": numbers, "more": max(0, len(changed) - KEPT_CHANGES)}


def results(repository: Repository, folder: Path) -> list[tuple[Version, dict[str, Any]]]:
    """Every result.json of a record that was ever committed, oldest first, each once in a row."""
    found: list[tuple[Version, dict[str, Any]]] = []
    for version in repository.versions(folder / RESULT, line="--first-parent"):
        if found and found[-1][0].blob == version.blob:
            continue
        found.append((version, json.loads(repository.content(version.blob))))
    return found


def updated(folder: Path, result: dict[str, Any]) -> dict[str, Any]:
    """A new result.json with all that it changed since it was first committed: what the last commit says of earlier
    changes, and what differs from it now. As it is where git does not know the record."""
    repository = Repository.around(folder)
    if repository is None:
        return result
    committed = results(repository, folder)
    if not committed:
        return result
    version, last = committed[-1]
    said = list(last.get("changes", []))
    now = entry(last, result)
    if now["parts"]:
        said.append({"since": version.commit, "date": version.date, **now})
    if not said:
        return result
    return result | {"changes": said}


def unsaid(folder: Path, result: dict[str, Any]) -> Iterator[Problem]:
    """Numbers of a record that changed from one commit to the next, or to now, without the record's saying so."""
    repository = Repository.around(folder)
    if repository is None:
        return
    versions = results(repository, folder)
    now = Version("", "", "today's", f"{datetime.date.today()}")
    for (before, old), (after, new) in zip(versions, [*versions[1:], (now, result)]):
        if "changes" not in new and after is not now and after.date <= SAYS_SINCE:
            continue
        yield from unsaid_between(before, old, after, new)


def unsaid_between(before: Version, old: dict[str, Any], after: Version, new: dict[str, Any]) -> Iterator[Problem]:
    since = f"what it changed since commit {before.commit} of {before.date} (new --update says it)"
    earlier = old.get("changes", [])
    said = new.get("changes", [])
    if said[:len(earlier)] != earlier:
        yield f"{after.commit} {RESULT}", "earlier changes left out or edited", since
        return
    own = said[len(earlier):]
    expected = entry(old, new)
    named = {part for update in own for part in update["parts"]}
    silent = sorted(set(expected["parts"]) - named)
    if silent:
        yield f"{after.commit} {RESULT}", f"other {', '.join(silent)}, unsaid", since
    elif len(own) == 1 and any(own[0][key] != expected[key] for key in expected):
        yield f"{after.commit} {RESULT}", "numbers that changed otherwise than it says", since

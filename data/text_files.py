"""Read documents from files: text of any kind, JSON lines, Parquet; .gz and .zst of the first two; whole folders."""
import glob
import gzip
import importlib
import io
import json
import os
import reprlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Iterator

from shard_files import DataError, check, escape_folder, file_problem

MAX_PLAIN_DOC_BYTES = 16 << 10               # maximum size of a document of plain text
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
COMPRESSED = (".gz", ".zst")
UNREADABLE = {".bz2", ".xz", ".zip", ".tar", ".tgz", ".json", ".pdf"}

class BadFile(DataError):
    """A file that cannot be read as text. Its second argument is the reason under which it is counted in a folder."""
    def __str__(self) -> str:
        return self.args[0]

def file_kind(path: Path) -> str:
    """Return the suffix in lower case, without that of a compression: ".jsonl" for A.JSONL.gz."""
    kind = path.suffix.lower()
    return Path(path.stem).suffix.lower() if kind in COMPRESSED else kind

def named_files(names: list[str], out: Path, skipped: Counter[str]) -> Iterator[tuple[Path, bool]]:
    """Yield (file, whether it is named itself) of a list of files, folders (recursively) and patterns.

    Files and folders that cannot be text are counted in `skipped`; a file that the user names must be text.
    """
    for name in names:
        path = Path(name)
        found = [path]
        if path.is_dir():
            found = walk(path, skipped)
        elif glob.has_magic(name) and not os.path.lexists(path):
            found = [*map(Path, glob.glob(escape_folder(name), recursive=True))]
            check(found, f"{name}: no file matches this pattern")
        # Links can form cycles, so take every real path once.
        once = {os.path.realpath(below): below for below in sorted(found, reverse=True) if not below.is_dir()}
        for below in sorted(once.values()):
            try:
                check_path(below, path, out)
                yield below, below == path
            except BadFile as error:
                if below == path:
                    raise
                skipped[error.args[1]] += 1

def walk(folder: Path, skipped: Counter[str]) -> Iterator[Path]:
    """Yield all files of a folder; count the subfolders that cannot be read, and links to folders."""
    unreadable: list[OSError] = []
    for below, folders, names in os.walk(folder, onerror=unreadable.append):
        yield from (Path(below, name) for name in names)
        skipped.update("link to a folder" for name in folders if Path(below, name).is_symlink())
    check(str(folder) not in [error.filename for error in unreadable], f"{folder} cannot be read: fix its permissions")
    skipped.update("unreadable folder" for _ in unreadable)

def check_path(path: Path, named: Path, out: Path) -> None:
    """Raise BadFile if a file found through `named` (a file, folder or pattern) is no text by its name or size."""
    problem = file_problem(path)
    if problem:
        hint = "download it first (curl -LO URL)" if ":/" in str(path) else "write the text to a file first"
        raise BadFile(f"{path}: {problem}; {hint}", problem)
    if any(part.startswith(".") and part != ".." and part not in named.parts for part in path.parts):
        raise BadFile(f"{path} is hidden", "hidden")
    if out.is_dir() and path.resolve().is_relative_to(out):
        raise BadFile(f"{path} is from an earlier call", "from an earlier call")
    kind = file_kind(path)
    if kind in UNREADABLE:
        hint = f"jq -c '.[]' {path} >{path.stem}.jsonl" if kind == ".json" else "unpack it, or convert it to text"
        raise BadFile(f"{path}: give text, .parquet, or .jsonl with one JSON object per line ({hint})", kind)
    if path.stat().st_size == 0:
        raise BadFile(f"{path} is empty", "empty")

@dataclass
class TextReader:
    """Reads the documents of a file. Every method raises BadFile."""
    text_key: str                            # field of JSON lines, column of Parquet
    separator: bytes                         # between the documents of a text file; b"": none
    without_separator: set[Path] = field(default_factory=set)

    def read(self, path: Path) -> Iterator[bytes]:
        """Yield the texts of a file, in UTF-8."""
        readers = {".jsonl": self.read_jsonl, ".ndjson": self.read_jsonl, ".parquet": self.read_parquet}
        try:
            with open_file(path) as file:
                for text in readers.get(file_kind(path), self.read_plain)(path, file):
                    yield text.removeprefix(BYTE_ORDER_MARK)
        except BadFile:
            raise
        except Exception as error:           # OSError; Parquet and compression have errors of their own
            raise BadFile(f"{path} cannot be read ({error}): write it again, or fix its permissions", "unreadable"
                          ) from None

    def read_plain(self, path: Path, file: IO[bytes]) -> Iterator[bytes]:
        """Yield the text between separators, in documents of at most 16 KiB."""
        done = 0                             # bytes of the documents so far
        self.without_separator.add(path)
        ahead = file.read(MAX_PLAIN_DOC_BYTES + max(len(self.separator), 1))
        while ahead:
            text, found, _ = ahead.partition(self.separator) if self.separator else (ahead, b"", b"")
            if found:
                self.without_separator.discard(path)
            elif len(ahead) > MAX_PLAIN_DOC_BYTES:
                text = text[:find_cut(text, MAX_PLAIN_DOC_BYTES)]
            try:
                text.decode()
            except UnicodeDecodeError as error:
                raise BadFile(f"{path} has byte 0x{text[error.start]:02x} at byte {done + error.start:,}, which is not "
                              "UTF-8: convert it (iconv -f LATIN1, or UTF-16, -t UTF-8)", "not in UTF-8") from None
            if b"\0" in text:
                raise BadFile(f"{path} is binary: convert it to text", "binary")
            yield text
            size = len(text) + len(found)
            done += size
            ahead = ahead[size:] + file.read(size)

    def read_jsonl(self, path: Path, file: IO[bytes]) -> Iterator[bytes]:
        for number, line in enumerate(file, 1):
            if line.strip():
                place = f"{path}, line {number:,}"
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError) as error:     # not UTF-8, too deeply nested, or 5,000 digits
                    raise BadFile(f"{place} is no JSON object ({error}): fix it, or remove it; jq -c '.[]' turns an "
                                  "array into lines", "with a bad line") from None
                yield self.record_text(record, place)

    def read_parquet(self, path: Path, file: IO[bytes]) -> Iterator[bytes]:
        parquet = optional_package("pyarrow.parquet", path)
        table = parquet.ParquetFile(file, buffer_size=1 << 20)
        names = table.schema_arrow.names
        if self.text_key not in names:
            raise BadFile(f"{path} has columns {names}: choose one with --text_key", f"without {self.text_key!r}")
        for batch in table.iter_batches(256, columns=[self.text_key]):
            for row in batch.to_pylist():
                yield self.record_text(row, f"{path}, a row")

    def record_text(self, record: Any, place: str) -> bytes:
        """Return the text of a record. null is an empty text; an unpaired surrogate becomes "?"."""
        if not isinstance(record, dict):
            raise BadFile(f"{place} is {reprlib.repr(record)}: give one JSON object per line", "without JSON objects")
        text = record.get(self.text_key, 0)
        if not isinstance(text, str | None):
            texts = [key for key, value in record.items() if isinstance(value, str)]
            raise BadFile(f"{place} has no text under {self.text_key!r}, but under {reprlib.repr(texts)}: choose one "
                          "with --text_key", f"without {self.text_key!r}")
        return (text or "").encode(errors="replace")

def open_file(path: Path) -> IO[bytes]:
    if path.suffix.lower() == ".gz":
        return gzip.open(path)
    if path.suffix.lower() != ".zst":
        return path.open("rb")
    # The reader of the package zstandard ends without an error where a file was cut off.
    return io.BufferedReader(optional_package("pyarrow", path).input_stream(str(path), "zstd"))

def optional_package(name: str, path: Path) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BadFile(f"{path}: {error}: pip install pyarrow", "that need pyarrow") from None

def find_cut(text: bytes, at: int) -> int:
    """Return an index at or before `at` to cut at: after a line if one ends after at / 2, a word, or a character."""
    for sign in (b"\n", b" "):
        end = text.rfind(sign, at // 2, at)
        if end >= 0 and text[:end].strip():
            return end + 1
    while 0 < at < len(text) and text[at] & 0xC0 == 0x80:
        at -= 1
    return at

#!/usr/bin/env bash
# zstandard 0.25.0: stream_reader() and zstandard.open() read a .zst file that was cut off, for example by a download that
# broke, without an error: the text just ends early. gzip raises EOFError, and zstandard's own decompress() and the zstd
# program refuse such a file. JSON lines of web text come as .zst. To notice it, feed decompressobj() and look at its eof.
# Seen: "stream_reader: 262,104 of 262,144 bytes, no error; open: 262,104; eof: False; gzip: EOFError". The script fails
# if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check zstandard==0.25.0
cat >"$folder/seen.py" <<'PYTHON'
import gzip
import io
import random
import sys
import zstandard

text = random.Random(0).randbytes(1 << 18)
cut = zstandard.compress(text)[:-40]
by_reader = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(cut)).read()
with zstandard.open(io.BytesIO(cut), "rb") as file:
    by_open = file.read()
frame = zstandard.ZstdDecompressor().decompressobj()
frame.decompress(cut)
try:
    gzip.decompress(gzip.compress(text)[:-40])
    of_gzip = "no error"
except EOFError:
    of_gzip = "EOFError"
print(f"stream_reader: {len(by_reader):,} of {len(text):,} bytes, no error; open: {len(by_open):,}; eof: {frame.eof}; "
      f"gzip: {of_gzip}")
sys.exit(not (len(by_reader) == len(by_open) < len(text) and not frame.eof and of_gzip == "EOFError"))
PYTHON
"$folder/venv/bin/python" "$folder/seen.py"

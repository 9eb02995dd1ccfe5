#!/usr/bin/env bash
# tokenizers 0.23.3: Tokenizer.encode() holds the GIL while its Rust code works, so no other Python thread goes on, and
# threads that encode take turns. encode_batch() with a list of that one text releases it, and gives the same ids; so do
# tiktoken's functions. Whoever encodes documents in threads should call encode_batch([text]).
# Seen: turns of another thread during the call: "encode: 0; encode_batch of one text: 66,213; equal ids: True" (the
# second number varies). The script fails if encode lets other threads run, or encode_batch does not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check tokenizers==0.23.3
cat >"$folder/seen.py" <<'PYTHON'
import random
import sys
import threading
import time
from tokenizers import Tokenizer, models, pre_tokenizers

alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE({sign: number for number, sign in enumerate(alphabet)}, []))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
letters = random.Random(0)
text = " ".join("".join(letters.choices("abcdefgh", k=6)) for _ in range(300_000))
turns = 0
ended = False

def count() -> None:
    global turns
    while not ended:
        turns += 1
        time.sleep(0)                        # gives the GIL back

def turns_during(call) -> tuple[int, list[int]]:
    before = turns
    ids = call()
    return turns - before, ids

thread = threading.Thread(target=count)
thread.start()
sys.setswitchinterval(10)                    # otherwise the waiting thread gets a turn before and after the call
held, ids = turns_during(lambda: tokenizer.encode(text).ids)
released, ids_of_batch = turns_during(lambda: tokenizer.encode_batch([text])[0].ids)
ended = True
thread.join()
print(f"encode: {held:,}; encode_batch of one text: {released:,}; equal ids: {ids == ids_of_batch}")
sys.exit(not (held <= 2 and released > 100 and ids == ids_of_batch))
PYTHON
"$folder/venv/bin/python" "$folder/seen.py"

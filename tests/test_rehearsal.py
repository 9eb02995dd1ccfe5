"""The rehearsal: what a run does on GPUs is what the ledger says, and what may not be is found and named."""
from __future__ import annotations

import difflib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rehearse

ROOT = Path(__file__).resolve().parent.parent
REASON = rehearse.why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=f"the rehearsal: {REASON}")

"""Writes the results of all machines anew, or of those that are named: `.venv/bin/python -m tests.zoo [NAME ...]`.

Read the difference before you commit it: git diff tests/zoo
"""

import sys
import tempfile
from pathlib import Path

from tests.zoo.walk import machines, result

for file in machines():
    if not sys.argv[1:] or file.stem in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            file.with_suffix(".txt").write_text(result(file, Path(folder)))

"""``python -m tests.diagrams [NAME …]``: draws these pictures of docs/ again, or all."""

import sys
import tempfile
from pathlib import Path

from tests.diagrams import failure, layers, stacks

TRIES = 9

for name in sys.argv[1:] or ("failure", "stacks", "layers"):
    if name == "layers":
        path, drawn = layers.PICTURE, layers.layers()
    else:
        of = {"failure": failure, "stacks": stacks}[name]
        path = of.PICTURE
        for _ in range(TRIES):
            with tempfile.TemporaryDirectory() as folder:
                drawn = of.picture(Path(folder))
            if of.is_clear(drawn):
                break
        else:
            sys.exit(f"{name}: not clear in {TRIES} runs, the last of which showed\n{drawn}")
    path.write_text(drawn, encoding="utf-8")
    print(f"written: {path}")

"""``python -m tests.tools.vllm FOLDER``: end a job with a vLLM server in each way, and print what is left of it.

FOLDER is the environment with vLLM. It is made first, unless it was before; where that takes too long, or where there
is no such package, the tests are skipped.
"""

import argparse
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.tools.vllm.endings import ENDINGS, HEAD, PROGRAMS, try_ending
from tests.tools.vllm.environment import NotToBeHad, make_environment


def main() -> int:
    """Run the chosen endings; return 1 if anything is left or wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.vllm", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", metavar="NAME", action="append", help="endings with this in their name")
    parser.add_argument("--at-once", metavar="N", type=int, default=2, help="a server computes on one core as it loads")
    args = parser.parse_args()
    try:
        programs = make_environment(args.folder.absolute())
    except NotToBeHad as why:
        print(f"SKIPPED: no vLLM here: {why}")
        return 0
    good = True
    with tempfile.TemporaryDirectory(prefix="vllm-model-") as model:
        subprocess.run([programs / "python", PROGRAMS / "make_model.py", model], check=True, capture_output=True)
        print(HEAD, flush=True)
        chosen = [ending for ending in ENDINGS if not args.only or any(each in ending.name for each in args.only)]
        with ThreadPoolExecutor(args.at_once) as pool:
            for result in pool.map(lambda ending: try_ending(ending, programs, Path(model)), chosen):
                print(result.render(), flush=True)
                good &= not (result.left or result.wrong)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

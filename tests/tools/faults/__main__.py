"""``python -m tests.tools.faults``: run the fault matrix and print the result of each row."""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.tools.faults.matrix import ROWS
from tests.tools.faults.rows import HEAD
from tests.tools.faults.trial import Trial
from tests.tools.virtual_hosts.network import Network, unsupported


def main() -> int:
    """Run the chosen rows; return 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.faults", description=__doc__)
    parser.add_argument("--launcher", choices=("ddplaunch", "torchrun", "both"), default="ddplaunch")
    parser.add_argument("--only", metavar="NAME", action="append", help="rows with this in their name")
    parser.add_argument("--restarts", type=int, choices=(0, 1), action="append", help="0, 1 or, by default, both")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="where to keep the table")
    args = parser.parse_args()
    if reason := unsupported():
        print(f"no virtual hosts here: {reason}", file=sys.stderr)
        return 2
    launchers = ("ddplaunch", "torchrun") if args.launcher == "both" else (args.launcher,)
    rows = [row for row in ROWS if not args.only or any(each in row.name for each in args.only)]
    results = []
    print(HEAD)
    for launcher in launchers:
        for row in rows:
            for restarts in args.restarts or (0, 1):
                if launcher == "torchrun" and not row.torchrun:
                    continue
                with tempfile.TemporaryDirectory(prefix="faults-") as folder, Network(2) as network:
                    results.append(Trial(row, restarts, launcher, network, Path(folder)).run())
                print(results[-1].render_row(), flush=True)
                if args.markdown:
                    args.markdown.write_text("\n".join([HEAD, *(each.render_row() for each in results), ""]))
    return 1 if any(result.list_errors() for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())

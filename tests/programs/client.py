"""A rank that asks a server: CLIENT URL [once] [ask] [exit=CODE]. Without "once" it goes on until there is a "go"."""

import os
import sys
import time
import urllib.request

url, how = sys.argv[1], dict([*word.split("=", 1), ""][:2] for word in sys.argv[2:])


def ask() -> None:
    with urllib.request.urlopen(url, timeout=10) as reply:
        assert reply.read() == b"ok"


ask()
try:
    print("rank", os.environ["RANK"], "got ok from", url, flush=True)
    while "once" not in how and not os.path.exists("go"):
        time.sleep(0.02)
        if "ask" in how:
            ask()
except KeyboardInterrupt:
    ask()
    print("rank", os.environ["RANK"], "has saved", flush=True)
    raise
sys.exit(int(how.get("exit", 0)) if os.environ["RANK"] == "1" else 0)

"""A sidecar that prints "beside" and waits; its arguments select what it does meanwhile."""

import os
import signal
import subprocess
import sys
import time

how = set(sys.argv[1:])
if "children" in how:
    subprocess.Popen(["sleep", "1000"])
    subprocess.Popen(["sh", "-c", "trap '' TERM; setsid sleep 1000 & sleep 1000"], start_new_session=True)
if "deaf" in how:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "tidy" in how:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit("tidied up"))
print("beside", os.getpid(), flush=True)
if "errs" in how:
    sys.exit("nothing to watch")
time.sleep(1000)

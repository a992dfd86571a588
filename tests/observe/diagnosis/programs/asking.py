"""Writes the inspection of its own rank after four seconds, and ends the rank."""

import _thread
import faulthandler
import os
import sys
import time

from ddplaunch.core.rank.rank_runner import load_private_module

torch_state = load_private_module("observe/rank/torch_state")


def begin(folder, rank):
    file = open(f"{folder}/{rank}.stacks", "wb")  # noqa: SIM115 - it must stay open
    faulthandler.dump_traceback_later(4, file=file)
    _thread.start_new_thread(write_inspection, (folder, rank))


def write_inspection(folder, rank):
    began = time.monotonic()
    time.sleep(3)
    if time.monotonic() - began > 4:
        return  # native code held the GIL: the launcher would have waited in vain
    for name, details in (("states", False), ("entries", True)):
        with open(f"{folder}/{rank}.{name}", "wb") as file:
            module = sys.modules["torch.distributed.distributed_c10d"]
            file.write(b"\t".join(torch_state.describe(module, details=details)))
    time.sleep(3)
    os._exit(9)

"""Imports what training programs import, and writes all that a rank can see of it as JSON: ``packages.py OUT``.

The file is OUT with the rank added to its name.
"""

import os
import sys

os.environ["HF_HOME"] = "/somewhere"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "2"

import atexit
import json
import locale
import logging
import multiprocessing
import signal
import tempfile
import threading
import warnings

import accelerate  # noqa: F401
import hydra  # noqa: F401
import lightning  # noqa: F401
import scipy.stats  # noqa: F401
import sklearn.linear_model  # noqa: F401
import torch
import torchmetrics  # noqa: F401
from transformers import AutoModelForSequenceClassification, Trainer  # noqa: F401

OF_THIS_RUN = (
    *("DDPLAUNCH_PREEMPTED_FILE", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID"),
    "TORCHELASTIC_USE_AGENT_STORE",  # True where the zygote has torch, which holds the store then
)


def plain(value):
    if isinstance(value, (list, tuple)):
        return all(map(plain, value))
    return value is None or isinstance(value, (bool, int, float, str, bytes))


def constants():
    """The plain values in all modules, but for what a run has of its own and the time at which numpy was loaded.

    Lists are sorted, as some are made of sets.
    """
    return {
        f"{name}.{key}": repr(sorted(map(repr, value)) if isinstance(value, (list, tuple)) else value)
        for name, module in sorted(sys.modules.items())
        if name != "__main__"
        for key, value in sorted(getattr(module, "__dict__", {}).items())
        if plain(value) and name != "sys" and key != "generationtime"
    }


def seen():
    return {
        "constants": constants(),
        "environ": {name: value for name, value in os.environ.items() if name not in OF_THIS_RUN},
        "threads": threading.active_count(),
        "signals": {number: str(signal.getsignal(number)).split(" at ")[0] for number in range(1, 32)},
        "hooks": [sys.excepthook is sys.__excepthook__, sys.unraisablehook is sys.__unraisablehook__],
        "atexit": atexit._ncallbacks(),
        "logging": [logging.root.level, [str(each) for each in logging.root.handlers]],
        "warnings": sorted({str(each) for each in warnings.filters}),
        "locale": locale.setlocale(locale.LC_ALL),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "folder": tempfile.gettempdir(),
        "threads of torch": torch.get_num_threads(),
    }


if __name__ == "__main__":
    with open(sys.argv[1] + os.environ["RANK"], "w", encoding="utf-8") as file:
        json.dump(seen(), file)

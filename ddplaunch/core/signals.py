"""Signals that launchers handle, and pass on to the ranks.

A scheduler signals the launchers of all nodes, a user one of them. Ranks are in sessions of their own, so no rank
gets the signal directly: the launcher of every node forwards it.
"""

from __future__ import annotations

import signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)
"""The launcher handles these, unless it inherited them as ignored."""

DUPLICATE_WINDOW_S = 2.0  # a scheduler has signalled all nodes within this time

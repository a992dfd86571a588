"""Fixtures of tests of inspection."""

from tests.terminal_emulator import at_terminal  # noqa: F401 - a fixture is found by its name here

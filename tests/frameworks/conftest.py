"""The fixture for the launchers that tests of frameworks compare."""

from tests.frameworks.launchers import launchers  # noqa: F401 - a fixture is found by its name here

"""The launchers, as a fixture of every test here."""

from tests.frameworks.launchers import launchers  # noqa: F401 - a fixture is found by its name here

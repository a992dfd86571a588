"""Tests with a real Grid Engine, of Debian's packages, on virtual hosts; without them they are skipped."""

"""Fixtures for tests of the doctor on one machine."""

from tests.fake_nvml import fake_nvml as fake_nvml

"""What tests of the doctor on one machine ask for."""

from tests.fake_nvml import fake_nvml as fake_nvml

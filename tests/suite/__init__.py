"""pytest plugins of the tests: temporary folder, reruns, time limits, selection, and time spent."""

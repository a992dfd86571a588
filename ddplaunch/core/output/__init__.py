"""The output of ranks and the events of a job, on their way to the terminal, to files and to the failure report."""

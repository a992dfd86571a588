"""The history of runs: what is stored of each, which runs there are, and on which hosts they failed."""

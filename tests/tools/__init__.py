"""What tests use or people run, and is no test: benchmarks, audits, simulated machines, real schedulers."""

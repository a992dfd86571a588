"""A real Slurm on virtual hosts, for tests of what Slurm really does.

``fixture.slurm`` is what tests ask for; ``cluster.Slurm`` is the cluster, ``configuration`` its files. Every daemon
runs on a virtual host and keeps its files in the host's own /dev/shm, so all of it is gone when the hosts are, whatever
way the test process ends, and any number of clusters is up at once.
"""

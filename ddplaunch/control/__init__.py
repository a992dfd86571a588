"""The nodes of one job, joined: who is there, whether they agree, what they do next together."""

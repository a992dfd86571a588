"""Diagnosis of inspected ranks: who waits for whom, stalls, slow ranks, out of memory. Pure, standard library only."""

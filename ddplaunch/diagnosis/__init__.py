"""What ranks were found doing, and what it means: who waits for whom, who is slow. Pure, standard library only."""

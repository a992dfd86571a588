"""Out of memory: samples of the ranks' memory, an alarm, and the report on a rank that was killed for it."""

"""What node 0 concludes from inspections: stalls, stragglers, and the rank that a failed job waited for."""

"""What the benchmarks of single steps share: the models, ways to take a step, and the clock."""

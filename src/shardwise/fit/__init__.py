"""What a plan takes, found before it runs: offload within a budget, stages of a pipeline, times of tiers."""

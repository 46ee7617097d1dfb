"""The same fine-tuning job in several programs: `benchmarks/peers.py` builds, runs and compares them."""

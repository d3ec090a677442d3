"""The parts of `storm.py`: trials, their ranks, and one module for each family of faults."""

"""What `storm.py` is made of: trials, the ranks that play them, and one module for each family of
faults.
"""

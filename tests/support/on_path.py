"""For programs that import a copy of weft from their path."""

ONLY_ON_PATH = """import sys
sys.meta_path = [each for each in sys.meta_path if not type(each).__module__.startswith("_editable")]
"""
"""A sitecustomize.py that removes the editable installation, which comes before the path."""

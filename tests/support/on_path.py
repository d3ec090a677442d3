"""For programs that import a copy of weft from their path."""

ONLY_ON_PATH = """import sys
sys.meta_path = [each for each in sys.meta_path if type(each).__module__ != "_editable_skbc_torch_weft"]
"""
"""A sitecustomize.py that removes the editable installation of weft, which comes before the path; that
of the benchmarks stays.
"""

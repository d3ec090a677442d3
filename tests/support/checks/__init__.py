"""Checks of operators that several engines must pass: called on every rank, with its world."""

"""Formats of other systems, in which plans travel: readers and writers of their files."""

"""The settings of benchmarks: a dataclass for each command, from which its options are made.

A field annotated with an `Option` is an option of the command; words in the annotation are its only
values, and where it has an effect is stated as in `weft.cli.conditions`. Commands set the other
fields. Imports neither torch nor ranks.
"""

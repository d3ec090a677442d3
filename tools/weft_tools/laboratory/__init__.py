"""The laboratory of the proof: plans that are wrong in one place (`mutants`), or made at random,
and whether the proof rejects what gives other results. `mutation` counts what it rejects,
`equivalence` executes what it accepts, `fuzz` does both for random plans, and `imported` executes
plans of other systems; `counting` is how others check theirs.
"""

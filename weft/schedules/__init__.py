"""Planners: one file per operator, pure functions from sizes, ranks and choices to a
`weft.plan.Plan`.
"""

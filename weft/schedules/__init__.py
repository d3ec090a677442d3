"""Planners: one file per operator, pure functions from ranks, pieces and options to a
`weft.plan.Plan`.
"""

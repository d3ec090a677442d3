"""What is measured and how it is shown.

`settings` are what is asked for. `harness` verifies and times on all ranks, `verification` says
what must come out, `baselines` and `mpi` what to compare with, `figures` what the times mean.
`fused` puts them together for operators that overlap a collective with a product (`subjects`),
`collectives` for the collectives over message size, `p2p` for one-sided copies, `overlap` for a
product and an all-gather that are independent, `gpu` for a GPU. `report` and `sweep` print results
(`tables`) and write them as JSON; `plots` and `timeline` draw them. `calibrate` measures the
machine that predictions go by. The commands are in `weft.cli`.
"""

"""Benchmarks of weft, for ``weft bench``, ``weft report`` and ``weft show``.

`benchmarks` has a record of each, `settings` the options of the commands in `weft_tools.cli`.
`harness` has the parts that all share: verification before and after timing, progress, and the
description of the machine. `fused` measures an operator that overlaps a collective with a product:
its `subjects` are the tensors of each operator, `ablation` the steps from the cascade to the
operator, and `report` the result. `sweep` measures the `collectives` over message size, `p2p`
one-sided `copies`, `overlap` a product beside an independent all-gather, `moe` a layer of experts,
`vllm` models served by vLLM, and `gpu` a single GPU. `systems` has a
record of each system that weft is compared with: `baselines` are the same work by torch, `mpi` and
`deepspeed` are other systems, and `alone` is one process with all cores; `neighbours` are busy
processes beside the ranks. `tables` and `plots` show results; `page` makes a page of saved ones,
from what is `captured` of their tables, their `limit`, and the commands that `repeat` them;
`pictures` has its template, and the style of all pictures.

Timing is in `weft.measure`, the parts of commands that others share in `weft.cli`.
"""

import warnings

# a benchmark times calls, and drops the results of most
warnings.filterwarnings("ignore", "the result of weft", RuntimeWarning, r"weft_tools\.")

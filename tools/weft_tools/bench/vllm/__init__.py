"""The benchmark of vLLM: the same models served by one process, and by tensor-parallel ranks that
exchange through gloo, through vLLM's shared memory, and through weft.

``make vllm`` runs it in its own environment. Checkpoints are written (`models`), each variant
(`variants`) is an engine in a group of processes (`engines`, `process`, `gloo`), which take turns
and stand still meanwhile (`measure`); `tables` and `picture` show the result.
"""

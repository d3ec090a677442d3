"""Tokens that vLLM's engines generate: experts_tokens.py SPEC, a JSON object.

`model`, `dtype`, `tensor` and `data` (numbers of ranks), `expert` (parallelism), `compiled`,
`prompts` (lists of ids), `owners` (each prompt's data-parallel rank), `tokens` (how many of each).
Prints each prompt's tokens, and the least of their leads over the second best, as JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from multiprocessing.connection import Connection, wait
from typing import Any

Found = list[tuple[list[int], float]]


def generated(spec: dict[str, Any], prompts: list[list[int]]) -> Found:
    from vllm import LLM, SamplingParams

    engine = LLM(
        spec["model"],
        dtype=spec["dtype"],
        skip_tokenizer_init=True,
        tensor_parallel_size=spec["tensor"],
        enable_expert_parallel=spec["expert"],
        enforce_eager=not spec["compiled"],
        enable_prefix_caching=False,
        max_model_len=128,
        max_num_batched_tokens=128,
    )
    params = SamplingParams(
        max_tokens=spec["tokens"], temperature=0, ignore_eos=True, detokenize=False, logprobs=2
    )
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    found = []
    for output in engine.generate(requests, params, use_tqdm=False):
        (choice,) = output.outputs
        best = [sorted(p.logprob for p in step.values())[-2:] for step in choice.logprobs]
        found.append(([*choice.token_ids], min(first - second for second, first in best)))
    return found


def rank(spec: dict[str, Any], index: int, port: int, results: Connection) -> None:
    os.environ |= {
        "VLLM_DP_RANK": str(index),
        "VLLM_DP_RANK_LOCAL": str(index),
        "VLLM_DP_SIZE": str(spec["data"]),
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(port),
    }
    prompts = zip(spec["prompts"], spec["owners"], strict=True)
    results.send(generated(spec, [prompt for prompt, owner in prompts if owner == index]))


def of_all_ranks(spec: dict[str, Any]) -> Found:
    from vllm.utils.network_utils import get_open_port

    spawn, port = multiprocessing.get_context("spawn"), get_open_port()
    pipes = [spawn.Pipe(duplex=False) for _ in range(spec["data"])]
    ranks = [
        spawn.Process(target=rank, args=(spec, index, port, sender))
        for index, (_, sender) in enumerate(pipes)
    ]
    for process, (_, sender) in zip(ranks, pipes, strict=True):
        process.start()
        sender.close()
    receivers = [receiver for receiver, _ in pipes]
    found: dict[int, list[Any]] = {}
    try:
        while len(found) < len(receivers):
            for receiver in wait([r for k, r in enumerate(receivers) if k not in found]):
                found[receivers.index(receiver)] = receiver.recv()
    except EOFError:
        for process in ranks:
            process.terminate()
        raise
    for process in ranks:
        process.join()
    return [found[owner].pop(0) for owner in spec["owners"]]


if __name__ == "__main__":
    spec = json.loads(sys.argv[1])
    tokens = of_all_ranks(spec) if spec["data"] > 1 else generated(spec, spec["prompts"])
    print("TOKENS", json.dumps(tokens))

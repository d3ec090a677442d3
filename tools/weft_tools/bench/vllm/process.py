"""An engine of vLLM in its own process, which takes requests as lines of JSON on its standard input
and answers them on its standard output; it ends when the input does.

The first line has the arguments of `vllm.LLM`. Each further one has `prompts`, lists of tokens that
are served together, the number of `tokens` to generate for each, greedily, and `top`, how many of
the most likely tokens to report for each generated one. The answer has, for each prompt, the
`tokens`, the `seconds` from the request to each, and the `top` tokens.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import count
from time import perf_counter
from typing import Any

_NUMBERS = count()


def generate(engine: Any, prompts: list[list[int]], tokens: int, top: int) -> dict[str, Any]:
    """Serve prompts together."""
    from vllm import SamplingParams

    options = {"temperature": 0, "ignore_eos": True, "detokenize": False, "logprobs": top or None}
    sampling = SamplingParams(max_tokens=tokens, **options)
    names = [str(next(_NUMBERS)) for _ in prompts]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    made: dict[str, Any] = {}
    start = perf_counter()
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = perf_counter() - start
        for output in outputs:
            [made[output.request_id]] = output.outputs
            new = len(made[output.request_id].token_ids) - len(seconds[output.request_id])
            seconds[output.request_id] += [now] * new
    return {
        "tokens": [[*made[name].token_ids] for name in names],
        "seconds": [seconds[name] for name in names],
        "top": [[[*likely] for likely in made[name].logprobs or ()] for name in names],
    }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # where vLLM may print, also in its own processes

    def answer(found: Any) -> None:
        print(json.dumps(found), file=answers, flush=True)

    arguments = json.loads(sys.stdin.readline())
    from vllm import LLM

    llm = LLM(**arguments)
    answer("ready")
    for line in sys.stdin:
        answer(generate(llm.llm_engine, **json.loads(line)))


if __name__ == "__main__":  # vLLM's processes import this module again
    main()

"""An engine of vLLM for tests, run by the Python of vLLM's environment: ``vllm_engine.py FOLDER
OPTIONS``, where OPTIONS are those of `vllm.LLM` as JSON.

It prints ``tokens:`` and those of `PROMPT` as JSON, then ``decoding`` when an endless request has its
first tokens; the error with which the engine then ends is its own. With ``end`` as third argument
there is no endless request. FOLDER gets a model with random weights if it has none.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PROMPT = [11, 257, 31, 4, 90, 61, 808, 7, 70]
TOKENS, LONG = 16, 30_000


def save(folder: Path) -> None:
    """A small model whose tokens are the same for all numbers of ranks."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=1024,
        max_position_embeddings=LONG + 100,
        initializer_range=0.1,
        architectures=["LlamaForCausalLM"],
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def main(folder: str, options: str, end: str = "") -> None:
    if not (Path(folder) / "config.json").exists():
        save(Path(folder))
    from vllm import LLM, SamplingParams

    settings: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, **json.loads(options)}
    engine = LLM(folder, skip_tokenizer_init=True, max_model_len=LONG + 100, **settings).llm_engine

    def request(name: str, tokens: int) -> None:
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        engine.add_request(name, {"prompt_token_ids": PROMPT}, params)

    request("short", TOKENS)
    found: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            found = [*output.outputs[0].token_ids]
    print("tokens:", json.dumps(found), flush=True)
    if end:
        return
    request("endless", LONG)
    for _ in range(5):
        engine.step()
    print("decoding", flush=True)
    while engine.has_unfinished_requests():
        engine.step()


if __name__ == "__main__":
    main(*sys.argv[1:])

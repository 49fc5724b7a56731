"""How fast an engine runs a model in its own process, without HTTP: ours, or a peer's under the same load.

    python benchmarks/in_process.py MODEL --threads 2
    PEER_VENV/bin/python benchmarks/in_process.py MODEL.gguf --engine llama.cpp

Greedy requests of random token ids that no prefix cache helps: a prompt of 1,024 tokens, one stream, then 4, 16 and 64
requests at once (llama.cpp: one stream only). The last line is one JSON object; `benchmarks.turns` compares those of
several engines. Beside the engine's own packages this needs nothing, so that it runs in a peer's environment.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

CONTEXT = 2048
TOKEN_IDS = range(100, 32000)
"""Drawn from: above most models' special tokens, and within their vocabularies."""
CONCURRENT = ((4, 128, 128), (16, 128, 128), (64, 128, 64))
"""Requests, their prompt tokens, their output tokens."""


class Engine(Protocol):
    """Runs requests; `streams` is how many at once."""

    streams: int

    def run(self, prompts: Sequence[list[int]], output_tokens: int) -> None:
        """Generate exactly `output_tokens` greedy tokens for each prompt, all given at once."""


class Rayllm:
    """`rayllm.LLM`."""

    streams = 256

    def __init__(self, model: str, threads: int, options: dict[str, Any]) -> None:
        from rayllm import LLM, SamplingParams

        # The engine takes the CPUs that this process may use.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
        self._llm = LLM(model, max_model_len=CONTEXT, enable_prefix_caching=False, **options)
        self._sampling = SamplingParams

    def run(self, prompts: Sequence[list[int]], output_tokens: int) -> None:
        results = self._llm.generate(
            list(prompts), self._sampling(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
        )
        assert all(len(result.outputs[0].token_ids) == output_tokens for result in results)


class LlamaCpp:
    """llama.cpp through llama-cpp-python, which runs one sequence."""

    streams = 1

    def __init__(self, model: str, threads: int, options: dict[str, Any]) -> None:
        from llama_cpp import Llama

        self._llama = Llama(model, n_ctx=CONTEXT, n_threads=threads, n_threads_batch=threads, verbose=False, **options)

    def run(self, prompts: Sequence[list[int]], output_tokens: int) -> None:
        for prompt in prompts:
            self._llama.reset()
            step = prompt
            for _ in range(output_tokens):
                self._llama.eval(step)
                step = [self._llama.sample(temp=0.0)]


class OpenVino:
    """OpenVINO GenAI's continuous batching, in the precision that it picks for the machine."""

    streams = 256

    def __init__(self, model: str, threads: int, options: dict[str, Any]) -> None:
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 2
        scheduler.max_num_batched_tokens = 1024
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": threads, **options}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._config = openvino_genai.GenerationConfig

    def run(self, prompts: Sequence[list[int]], output_tokens: int) -> None:
        import numpy as np
        import openvino

        config = self._config()
        config.max_new_tokens, config.ignore_eos, config.do_sample = output_tokens, True, False
        tensors = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        self._pipeline.generate(tensors, [config] * len(prompts))


ENGINES = {"rayllm": Rayllm, "llama.cpp": LlamaCpp, "openvino": OpenVino}


def weight_bytes(model: Path) -> int:
    """Bytes of a model's weights: of a GGUF file, or of a folder's safetensors or OpenVINO weights."""
    if model.is_file():
        return model.stat().st_size
    return sum(file.stat().st_size for name in ("*.safetensors", "openvino_model.bin") for file in model.glob(name))


def measure(engine: Engine, repeats: int, most: int) -> dict[str, float]:
    """Tokens a second of each load with up to `most` requests at once; of short loads, the best of `repeats`."""
    rng = random.Random(0)

    def seconds(requests: int, input_tokens: int, output_tokens: int) -> float:
        prompts = [rng.choices(TOKEN_IDS, k=input_tokens) for _ in range(requests)]
        start = time.perf_counter()
        engine.run(prompts, output_tokens)
        return time.perf_counter() - start

    seconds(1, 16, 8)
    prefill = min(seconds(1, 1024, 1) for _ in range(repeats))
    # Two lengths, so that the prompt and what comes before a first token cancel out.
    short, long = (min(seconds(1, 32, 2 + more) for _ in range(repeats)) for more in (0, 128))
    figures = {"prefill1k_tok_s": 1024 / prefill, "decode1_tok_s": 128 / (long - short)}
    for requests, input_tokens, output_tokens in CONCURRENT:
        if requests <= min(most, engine.streams):
            taken = seconds(requests, input_tokens, output_tokens)
            figures[f"c{requests}_tok_s"] = requests * output_tokens / taken
    return figures


def main(argv: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hugging Face folder or a GGUF file; for OpenVINO, an exported folder")
    parser.add_argument("--engine", choices=ENGINES, default="rayllm")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=3, help="runs of the short loads, of which the best counts")
    parser.add_argument("--most", type=int, default=64, help="leave out loads of more requests at once")
    parser.add_argument("--options", type=json.loads, default={}, metavar="JSON", help="more options of the engine")
    args = parser.parse_args(argv)
    engine = ENGINES[args.engine](args.model, args.threads, args.options)
    figures = measure(engine, args.repeats, args.most)
    # Every weight is read once for each token of a single stream (an untied embedding aside).
    figures["decode1_gb_s"] = figures["decode1_tok_s"] * weight_bytes(Path(args.model)) / 1e9
    print(json.dumps({name: round(value, 1) for name, value in figures.items()}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What forms of outputs cost: throughput of 16 streams with and without one, and what hostile forms do to others.

    python benchmarks/structured.py models/SmolLM2-135M-Instruct.Q4_1.gguf

Runs an engine in this process. First 16 requests at once whose outputs must be JSON against 16 plain ones, each of
as many tokens; then 16 plain streams while other requests come in one after another, first plain ones, then such with
hostile forms. The last line is one JSON object.
"""

import argparse
import itertools
import json
import os
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from statistics import quantiles
from typing import Any

import msgspec

from rayllm.config.load import load
from rayllm.config.parser import parse_mapping
from rayllm.config.registry import registry
from rayllm.engine.engine import Engine
from rayllm.errors import RequestError
from rayllm.messages.engine import Add
from rayllm.messages.ingress import Load, RequestOutput
from rayllm.messages.sampling import SamplingParams
from rayllm.messages.structured import StructuredOutputs

STREAMS, PROMPT, TOKENS = 16, 64, 96
FORMS = {
    "array": StructuredOutputs(json={"type": "array", "items": {"type": "string"}, "minItems": 4000}),
    "object": StructuredOutputs(
        json={"type": "object", "additionalProperties": {"type": "object", "required": ["a"],
              "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}, "minProperties": 500}
    ),
    "regex": StructuredOutputs(regex="([A-Z][a-z]{2,9} ([a-z]{2,9} ){3,12}){400}"),
}  # fmt: skip
"""Forms that no output of this length completes."""
HOSTILE: Sequence[StructuredOutputs] = (
    StructuredOutputs(json={"properties": {f"p{i}": {"pattern": "^a{1,100}b$"} for i in range(2000)}}),
    StructuredOutputs(regex="(a|b)*a(a|b){25}"),
    StructuredOutputs(regex="(.*a.{20}b.*c.{20}){10}"),
    StructuredOutputs(regex=r"(\p{L}{1,500}\d){1,200}"),
    StructuredOutputs(json={"enum": [f"v{i}" for i in range(15_000)]}),
)


class Bench:
    """An engine, and when each of its requests had its tokens."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        values = parse_mapping({"model": model, "max_model_len": 1024, **options}, registry())
        self._engine = Engine.build(load(registry().values(values)).engine)
        self._ids = itertools.count()
        self._times: dict[int, list[float]] = {}
        self._ended: set[int] = set()
        self._changed = threading.Condition()
        self._engine.start(self._deliver)

    def _deliver(self, outputs: dict[int, list[RequestOutput]], load: Load) -> None:
        now = time.perf_counter()
        with self._changed:
            for output in outputs.get(0, ()):
                self._times.setdefault(output.request_id, []).extend([now] * len(output.token_ids))
                if output.finish_reason is not None:
                    self._ended.add(output.request_id)
            self._changed.notify_all()

    def add(self, form: StructuredOutputs | None, tokens: int = TOKENS, prompt_tokens: int = PROMPT) -> int:
        """Send a request, and wait until it is admitted.

        Raises:
            RequestError: its form is refused.
        """
        number = next(self._ids)
        rng = random.Random(number)
        sampling = SamplingParams(seed=number, max_tokens=tokens, ignore_eos=True, structured_outputs=form)
        prompt = rng.choices(range(100, 32000), k=prompt_tokens)
        add = Add(request_id=number, prompt_token_ids=prompt, sampling=sampling, arrival_time=time.time())
        if (pending := self._engine.add(0, add)) is not None:
            pending.result()
        return number

    def wait(self, numbers: Sequence[int]) -> list[list[float]]:
        """The times of their tokens, when all have ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended.issuperset(numbers))
            return [self._times[number] for number in numbers]

    def throughput(self, form: StructuredOutputs | None) -> float:
        """Tokens a second of the streams, from when all have begun."""
        times = self.wait([self.add(form) for _ in range(STREAMS)])
        began, ended = max(one[0] for one in times), min(one[-1] for one in times)
        return sum(began < t <= ended for one in times for t in one) / (ended - began)

    def latency_ms(self, hostile: bool, tokens: int) -> float:
        """The 99th percentile of the time between tokens of plain streams, while others come."""
        stop = threading.Event()
        other = threading.Thread(target=self._attack, args=(stop, hostile))
        numbers = [self.add(None, tokens) for _ in range(STREAMS)]
        other.start()
        times = self.wait(numbers)
        stop.set()
        other.join()
        gaps = [b - a for one in times for a, b in itertools.pairwise(one[1:])]
        return quantiles(gaps, n=100)[98] * 1e3

    def _attack(self, stop: threading.Event, hostile: bool) -> None:
        for form in _varied():
            if stop.wait(0.2):
                return
            try:
                self.wait([self.add(form if hostile else None, 16, 8)])
            except RequestError as error:
                print(f"refused: {str(error)[:100]}", flush=True)

    def close(self) -> None:
        """End the engine."""
        self._engine.shutdown()


def _varied() -> Iterator[StructuredOutputs]:
    """Hostile forms without end, none of which is known already."""
    for i in itertools.count():
        form = HOSTILE[i % len(HOSTILE)]
        if form.regex is not None:
            yield msgspec.structs.replace(form, regex=f"{form.regex}{i}")
        else:
            yield msgspec.structs.replace(form, json={**json.loads(form.text()), "title": str(i)})


def main(argv: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hugging Face folder or a GGUF file, with a tokenizer")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=3, help="runs of each form, of which the best counts")
    parser.add_argument("--tokens", type=int, default=300, help="of each stream whose latency is measured")
    parser.add_argument("--options", type=json.loads, default={}, metavar="JSON", help="more options of the engine")
    args = parser.parse_args(argv)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    bench = Bench(args.model, args.options)
    for form in FORMS.values():
        bench.wait([bench.add(form, 4)])
    figures: dict[str, float] = {}
    for _ in range(args.repeats):  # in turns, so that a slow spell hits all alike
        for name, form in {"plain": None, **FORMS}.items():
            figures[f"{name}_tok_s"] = max(figures.get(f"{name}_tok_s", 0.0), bench.throughput(form))
    figures["p99_ms"] = bench.latency_ms(False, args.tokens)
    figures["p99_hostile_ms"] = bench.latency_ms(True, args.tokens)
    bench.close()
    print(json.dumps({name: round(value, 2) for name, value in figures.items()}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

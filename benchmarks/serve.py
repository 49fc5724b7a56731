"""Load an OpenAI-compatible server and say how fast it answers: TTFT, inter-token latency, throughput, percentiles.

    python benchmarks/serve.py http://127.0.0.1:8000 --requests 64 --concurrency 16 --output-tokens 128

Works against any server that streams `/v1/completions` or `/v1/chat/completions`. The last line of the output is one
JSON object; `--json` writes it to a file, with every request's times, and `--plot` draws it (needs matplotlib, in the
`bench` extra). Compare servers only by ratios of runs that took turns on the same machine.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress

WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state"),
    *("family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system"),
    *("program", "question", "work", "government", "number", "night", "point", "home", "water", "room", "mother"),
    *("area", "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business"),
)
PERCENTILES = (50, 90, 95, 99)
Prompt = str | list[int]


@dataclass
class Request:
    """One request's times, in seconds since it was sent; chunks as they arrived."""

    sent: float
    chunks: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Time to the first chunk."""
        return self.chunks[0]

    @property
    def latencies(self) -> list[float]:
        """Time between chunks. A server may send several tokens in one chunk."""
        return [b - a for a, b in zip(self.chunks, self.chunks[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first; None where there is one token."""
        if self.output_tokens < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.output_tokens - 1)


def make_prompts(args: argparse.Namespace) -> list[str]:
    """Random texts: a prefix that all share, then words of their own."""
    rng = random.Random(args.seed)
    prefix = " ".join(rng.choices(WORDS, k=args.prefix_words))
    return [f"{prefix} {' '.join(rng.choices(WORDS, k=args.input_words))}".strip() for _ in range(args.requests)]


def body_of(args: argparse.Namespace, model: str, prompt: Prompt) -> dict[str, Any]:
    """The JSON body of one request."""
    body: dict[str, Any] = {
        "model": model, "max_tokens": args.output_tokens, "temperature": args.temperature, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    if not args.may_end:
        body["ignore_eos"] = True
    if args.chat:
        return body | {"messages": [{"role": "user", "content": prompt}]}
    return body | {"prompt": prompt}


async def send(client: httpx.AsyncClient, args: argparse.Namespace, model: str, prompt: Prompt) -> Request:
    """Send one request and time its chunks."""
    path = "/v1/chat/completions" if args.chat else "/v1/completions"
    request = Request(time.perf_counter())
    try:
        async with client.stream("POST", path, json=body_of(args, model, prompt)) as reply:
            if reply.status_code != 200:
                request.error = f"{reply.status_code}: {(await reply.aread())[:200]!r}"
                return request
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    note_chunk(request, json.loads(line[6:]))
    except httpx.HTTPError as error:
        request.error = f"{type(error).__name__}: {error}"
    if not request.chunks and request.error is None:
        request.error = "no tokens came"
    return request


def note_chunk(request: Request, chunk: dict[str, Any]) -> None:
    """Keep the time of a chunk that carries tokens, and the usage of the one that carries it.

    A chunk of `/v1/completions` may have no text: a token of random ones need not end a character.
    """
    if usage := chunk.get("usage"):
        request.prompt_tokens, request.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    for choice in chunk.get("choices", []):
        if "text" in choice or (choice.get("delta") or {}).get("content"):
            request.chunks.append(time.perf_counter() - request.sent)
            return


async def load(args: argparse.Namespace, prompts: Sequence[Prompt] | None = None) -> tuple[list[Request], float]:
    """All requests, at the wanted concurrency or rate; and the seconds that took. Without `prompts` it makes some."""
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=args.url, timeout=args.timeout, limits=limits, headers=headers) as client:
        model = args.model or (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        if prompts is None:
            prompts = make_prompts(args)
        for number in range(args.warmup):
            await send(client, args, model, f"{number} warm up")
        gate = asyncio.Semaphore(args.concurrency)
        rng = random.Random(args.seed)
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("requests", total=len(prompts))

            async def one(prompt: Prompt) -> Request:
                async with gate:
                    request = await send(client, args, model, prompt)
                progress.advance(task)
                return request

            start = time.perf_counter()
            jobs = []
            for prompt in prompts:
                jobs.append(asyncio.create_task(one(prompt)))
                if args.rate:
                    await asyncio.sleep(rng.expovariate(args.rate))
            done = await asyncio.gather(*jobs)
            return done, time.perf_counter() - start


def spread(values: list[float], scale: float = 1e3) -> dict[str, float]:
    """Mean and percentiles, in milliseconds by default."""
    if not values:
        return {}
    ordered = sorted(values)
    out = {"mean": statistics.fmean(ordered) * scale}
    for p in PERCENTILES:
        out[f"p{p}"] = ordered[min(len(ordered) - 1, int(len(ordered) * p / 100))] * scale
    return {name: round(value, 3) for name, value in out.items()}


def summarise(requests: list[Request], seconds: float) -> dict[str, Any]:
    """The figures of a run."""
    good = [r for r in requests if r.error is None]
    return {
        "requests": len(requests), "failed": len(requests) - len(good), "seconds": round(seconds, 3),
        "prompt_tokens": sum(r.prompt_tokens for r in good), "output_tokens": sum(r.output_tokens for r in good),
        "output_tokens_per_s": round(sum(r.output_tokens for r in good) / seconds, 2),
        "requests_per_s": round(len(good) / seconds, 3),
        "ttft_ms": spread([r.ttft for r in good]), "inter_token_ms": spread([v for r in good for v in r.latencies]),
        "tpot_ms": spread([r.tpot for r in good if r.tpot is not None]),
        "e2e_ms": spread([r.chunks[-1] for r in good]),
        "errors": sorted({r.error for r in requests if r.error})[:5],
    }  # fmt: skip


def draw_plot(requests: list[Request], file: str) -> None:
    """Two distributions: time to first token, and time between tokens."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    good = [r for r in requests if r.error is None]
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    series = ("time to first token", [r.ttft for r in good]), ("between tokens", [v for r in good for v in r.latencies])
    for axis, (name, values) in zip(axes, series, strict=True):
        ordered = sorted(value * 1e3 for value in values)
        axis.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))])
        axis.set(title=name, xlabel="ms", ylabel="share of all", ylim=(0, 1))
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file)


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--model", help="default: the first one that the server lists")
    parser.add_argument("--chat", action="store_true", help="use /v1/chat/completions")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--rate", type=float, help="requests a second (Poisson); default: as fast as concurrency lets")
    parser.add_argument("--input-words", type=int, default=100)
    parser.add_argument("--prefix-words", type=int, default=0, help="words that all prompts begin with")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--may-end", action="store_true", help="let the model end early (no ignore_eos)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--api-key")
    parser.add_argument("--json", help="write figures and all times to this file")
    parser.add_argument("--plot", help="draw the distributions to this file")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Run, report, and fail if any request failed."""
    args = parse(argv)
    requests, seconds = asyncio.run(load(args))
    figures = summarise(requests, seconds)
    if args.json:
        Path(args.json).write_text(json.dumps(figures | {"each": [asdict(r) for r in requests]}, indent=1))
    if args.plot:
        draw_plot(requests, args.plot)
    print(json.dumps(figures))
    return 1 if figures["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

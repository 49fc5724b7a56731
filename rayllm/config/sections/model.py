"""Options of the model, its tokenizer and its generation defaults."""

import os
from typing import Any

from rayllm.config.option import Kind, Option, State

DTYPES = ("auto", "bfloat16", "float", "float16", "float32", "half")

LONGEST_NAME, LONGEST_PATH = 255, 4095


def _place(value: Any) -> str | None:
    """Why a text cannot be a path, which looking for it would answer with an error."""
    path = os.fsencode(value)
    if len(path) <= LONGEST_PATH and all(len(name) <= LONGEST_NAME for name in path.split(b"/")):
        return None
    return f"{value[:40]!r}... is longer than a path can be"


MODEL = (
    Option(
        name="model",
        kind=Kind.STR,
        default="Qwen/Qwen3-0.6B",
        check=_place,
        help="Folder of a Hugging Face model, a GGUF file, or a name on the hub. May stand first, without the option.",
    ),
    Option(
        name="runner",
        kind=Kind.ENUM,
        state=State.PLANNED,
        default="auto",
        choices=("auto", "draft", "generate", "pooling"),
        honoured=("generate",),
        cure="leave it at auto or generate",
        help="What the model is run for.",
    ),
    Option(
        name="convert",
        kind=Kind.ENUM,
        state=State.PLANNED,
        default="auto",
        choices=("auto", "classify", "embed", "none"),
        honoured=("none",),
        cure="leave it at auto or none",
        help="Adapter that makes a pooling model of a generative one.",
    ),
    Option(
        name="tokenizer",
        kind=Kind.STR,
        check=_place,
        help="Folder of the tokenizer, a GGUF file, or a name on the hub. Unset: the value of --model.",
    ),
    Option(
        name="tokenizer-mode",
        kind=Kind.STR,
        default="auto",
        choices=("auto", "deepseek_v32", "deepseek_v4", "hf", "mistral", "slow"),
        check=lambda value: (
            None if value in ("auto", "hf") else f"{value!r} is not supported: tokenizers are of tokenizer.json; use hf"
        ),
        help="Kind of tokenizer. auto and hf: the fast one, of tokenizer.json or a GGUF file; others are refused.",
    ),
    Option(
        name="trust-remote-code",
        kind=Kind.BOOL,
        default=False,
        help="Trust a model that brings Python code, and run it where transformers runs the model (see --model-impl). "
        "Where rayllm's own implementation does, a config that code would complete is taken as it stands.",
    ),
    Option(
        name="dtype",
        kind=Kind.ENUM,
        default="auto",
        choices=DTYPES,
        help="Type of weights and activations. auto: as stored, but bfloat16 for float16 where there is no GPU; half "
        "is float16, float is float32.",
    ),
    Option(
        name="seed",
        kind=Kind.INT,
        default=0,
        minimum=0,
        maximum=2**63 - 1,
        help="From it come the seeds of requests that bring none, and dummy weights.",
    ),
    Option(
        name="hf-config-path",
        kind=Kind.STR,
        check=_place,
        help="Folder of the model's config.json, or a name on the hub, if it is not that of the model.",
    ),
    Option(
        name="allowed-local-media-path",
        kind=Kind.STR,
        state=State.PLANNED,
        default="",
        help="Folder of the server from which requests may read media.",
    ),
    Option(
        name="allowed-media-domains",
        kind=Kind.LIST,
        state=State.PLANNED,
        help="Domains that media may come from. Unset: all.",
    ),
    Option(name="revision", kind=Kind.STR, help="Branch, tag or commit of the model on the hub."),
    Option(
        name="code-revision",
        kind=Kind.STR,
        help="Branch, tag or commit of the model's own code on the hub, for --trust-remote-code. Unset: that of "
        "--revision, or of a repository of its own the newest.",
    ),
    Option(
        name="tokenizer-revision",
        kind=Kind.STR,
        help="Branch, tag or commit of the tokenizer on the hub. Unset: that of --revision for the model's own.",
    ),
    Option(
        name="max-model-len",
        kind=Kind.HUMAN_INT,
        auto=True,
        minimum=1,
        help="Prompt and output of one request together, in tokens. Unset: what the model allows. auto or -1: the "
        "same if it fits into memory, else the largest that fits.",
    ),
    Option(
        name="quantization",
        kind=Kind.STR,
        aliases=("-q",),
        help="How the weights are quantized: gguf, for a GGUF file; fp8 with scales of blocks, which is turned back "
        "into --dtype as it is read; or fbgemm_fp8 (see --allow-deprecated-quantization). Unset: as the files say.",
    ),
    Option(
        name="allow-deprecated-quantization",
        kind=Kind.BOOL,
        default=False,
        help="Allow weights quantized by a method that is about to go. Of these fbgemm_fp8 can be read, and is turned "
        "back into --dtype; others stay refused.",
    ),
    Option(
        name="enforce-eager",
        kind=Kind.BOOL,
        default=False,
        check=lambda value: None,
        help="Run without CUDA graphs. Without a GPU there are none.",
    ),
    Option(
        name="enable-return-routed-experts",
        kind=Kind.BOOL,
        state=State.PLANNED,
        default=False,
        help="Tell which experts each token was routed to.",
    ),
    Option(
        name="max-logprobs",
        kind=Kind.INT,
        default=20,
        minimum=-1,
        help="Most log probabilities that a request may ask for beside each token; -1: no limit.",
    ),
    Option(
        name="logprobs-mode",
        kind=Kind.ENUM,
        default="raw_logprobs",
        choices=("processed_logits", "processed_logprobs", "raw_logits", "raw_logprobs"),
        help="What logprobs and prompt_logprobs hold: the model's own values (raw) or those that tokens are drawn from "
        "(processed: after penalties, bans, temperature, top-k and so on), as logits or as log probabilities.",
    ),
    Option(
        name="disable-sliding-window",
        kind=Kind.BOOL,
        default=False,
        help="Let no layer have a window, and cap the context at it. Without effect on a model without windows.",
    ),
    Option(
        name="disable-cascade-attn",
        kind=Kind.BOOL,
        default=True,
        help="Never compute attention over a prefix that requests share once for all of them. With "
        "--no-disable-cascade-attn it is, in steps where that saves much (vllm:cascade_steps_total counts them); the "
        "results are the same.",
    ),
    Option(
        name="skip-tokenizer-init",
        kind=Kind.BOOL,
        default=False,
        help="Load no tokenizer: prompts must be token ids (of /v1/completions), and outputs are token ids too.",
    ),
    Option(
        name="enable-prompt-embeds",
        kind=Kind.BOOL,
        default=False,
        help="Take embeddings in place of prompts: prompt_embeds of /v1/completions holds a tensor (tokens, width of "
        "the model), or a list of such, as torch.save writes it, in base64. Contents of chats may have parts of type "
        "prompt_embeds, with such a tensor as data. A row is what the model's input embeddings give for a token in "
        "transformers. Cached prefixes are shared by prompts of the very same embeddings alone.",
    ),
    Option(
        name="served-model-name",
        kind=Kind.LIST,
        help="Names that requests may use; the first one stands in responses and metrics. Unset: the value of --model.",
    ),
    Option(
        name="config-format",
        kind=Kind.ENUM,
        default="auto",
        choices=("auto", "hf", "mistral"),
        help="Format of the model's config: config.json (hf) or params.json (mistral). auto: the first that is there.",
    ),
    Option(
        name="hf-token",
        kind=Kind.STR,
        bare=True,
        help="Token for the hub; without a value, the one that `hf auth login` stored.",
    ),
    Option(
        name="hf-overrides",
        kind=Kind.JSON,
        default={},
        check=lambda value: None if isinstance(value, dict) else "is not a JSON object",
        help="Values that go over those of the model's config, such as '{\"num_hidden_layers\": 2}'. Of "
        "rope_parameters the given keys change, or all but the base where rope_type is given.",
    ),
    Option(name="pooler-config", kind=Kind.JSON, state=State.PLANNED, help="How pooling models pool."),
    Option(
        name="generation-config",
        kind=Kind.STR,
        default="auto",
        help="Where sampling defaults come from. auto: the model; vllm: nowhere; else a folder that holds a "
        "generation_config.json.",
    ),
    Option(
        name="override-generation-config",
        kind=Kind.JSON,
        default={},
        check=lambda value: None if isinstance(value, dict) else "is not a JSON object",
        help="Sampling defaults that go over those of --generation-config, such as '{\"temperature\": 0.5}'.",
    ),
    Option(
        name="enable-sleep-mode",
        kind=Kind.BOOL,
        state=State.CUDA,
        default=False,
        help="Free an idle engine's memory on request.",
    ),
    Option(
        name="model-impl",
        kind=Kind.ENUM,
        default="auto",
        choices=("auto", "terratorch", "transformers", "vllm"),
        help="Implementation of the model: vllm is rayllm's own, transformers runs the classes of that library (or of "
        "the model, see --trust-remote-code) over rayllm's paged attention. auto: the first that knows the model. "
        "terratorch is refused: its models make no text.",
    ),
    Option(
        name="override-attention-dtype",
        kind=Kind.STR,
        check=lambda value: (
            None if value in ("float32", "float") else f"{value!r} is not what a CPU does: it always sums in float32"
        ),
        help="Type that attention computes in. On a CPU scores and sums are float32 whatever the model's type is.",
    ),
    Option(
        name="logits-processors",
        kind=Kind.LIST,
        help="Logits processors as fully qualified class names (module:Class). Requests name those that they use, "
        "but for classes whose attribute every is true.",
    ),
    Option(
        name="io-processor-plugin",
        kind=Kind.STR,
        state=State.PLANNED,
        help="Plugin that converts inputs and outputs of pooling models.",
    ),
    Option(
        name="renderer-num-workers",
        kind=Kind.INT,
        default=1,
        minimum=1,
        help="Threads that render and tokenize prompts, in each HTTP process and in the renderer. With 1, short "
        "prompts are rendered by the HTTP process itself, between its other work.",
    ),
)

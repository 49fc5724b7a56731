"""Options of the model, its weights and its generation defaults."""

from typing import Any

from rayllm.config.option import Kind, Option

DTYPES = ("auto", "bfloat16", "float", "float16", "float32", "half")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
ATTENTION_BACKENDS = ("auto", "torch")


def _one_of(known: tuple[str, ...]) -> Any:
    def check(value: str) -> str | None:
        return None if value in known else f"{value!r} is not supported yet, only {', '.join(known)}"

    return check


MODEL = (
    Option(
        name="model",
        kind=Kind.STR,
        help="Folder of a Hugging Face model, or a GGUF file. May be given without the option's name.",
    ),
    Option(
        name="served-model-name",
        kind=Kind.LIST,
        help="Names that requests may use; the first one stands in responses and metrics. Unset: the value of --model.",
    ),
    Option(
        name="tokenizer", kind=Kind.STR, help="Folder of the tokenizer, or a GGUF file. Unset: the value of --model."
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
        name="max-model-len",
        kind=Kind.HUMAN_INT,
        auto=True,
        minimum=1,
        help="Prompt and output of one request together, in tokens. Unset: what the model allows. auto or -1: the "
        "same if it fits into memory, else the largest that fits.",
    ),
    Option(
        name="max-logprobs",
        kind=Kind.INT,
        default=20,
        minimum=-1,
        help="Most log probabilities that a request may ask for beside each token; -1: no limit.",
    ),
    Option(
        name="enforce-eager",
        kind=Kind.BOOL,
        default=False,
        check=lambda value: None,
        help="Run without CUDA graphs. Without a GPU there are none.",
    ),
    Option(
        name="load-format",
        kind=Kind.STR,
        default="auto",
        choices=LOAD_FORMATS,
        check=_one_of(LOAD_FORMATS),
        help="Format of the weights. auto: by what is there; dummy: random weights from --seed.",
    ),
    Option(
        name="attention-backend",
        kind=Kind.STR,
        choices=ATTENTION_BACKENDS,
        check=_one_of(ATTENTION_BACKENDS),
        help="Implementation of attention. auto or unset: the best for the device.",
    ),
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
        name="logits-processors",
        kind=Kind.LIST,
        help="Logits processors as fully qualified class names (module:Class).",
    ),
)

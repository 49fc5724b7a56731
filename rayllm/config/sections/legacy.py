"""Options of releases before those of the other sections."""

from collections.abc import Mapping
from typing import Any

from rayllm.config.legacy import Legacy
from rayllm.config.option import Kind, Option

TASKS = {
    "auto": {}, "generate": {"runner": "generate"}, "draft": {"runner": "draft"},
    "embed": {"runner": "pooling", "convert": "embed"}, "embedding": {"runner": "pooling", "convert": "embed"},
    "classify": {"runner": "pooling", "convert": "classify"}, "score": {"runner": "pooling", "convert": "classify"},
    "reward": {"runner": "pooling"}, "transcription": {"runner": "generate"},
}  # fmt: skip


def _task(value: str | None) -> Mapping[str, Any]:
    return TASKS[value or "auto"]


def _graph_sizes(value: list[int]) -> Mapping[str, Any]:
    return {"cudagraph-capture-sizes": value} if len(value) > 1 else {"max-cudagraph-capture-size": value[0]}


LEGACY = (
    Legacy(
        option=Option(name="enable-prompt-adapter", kind=Kind.BOOL, default=False, help="Prompt adapters."),
        note="prompt adapters are gone",
    ),
    Legacy(
        option=Option(name="disable-log-requests", kind=Kind.BOOL, default=True, help="Do not log requests."),
        becomes=lambda value: {"enable-log-requests": not value},
    ),
    Legacy(
        option=Option(
            name="disable-frontend-multiprocessing",
            kind=Kind.BOOL,
            default=False,
            help="Run HTTP server and engine in one process.",
        ),
        note="they are always apart",
    ),
    Legacy(
        option=Option(
            name="task",
            kind=Kind.ENUM,
            choices=(
                "auto",
                "classify",
                "draft",
                "embed",
                "embedding",
                "generate",
                "reward",
                "score",
                "transcription",
                "None",
            ),
            help="What the model is used for.",
        ),
        becomes=_task,
    ),
    Legacy(
        option=Option(name="rope-scaling", kind=Kind.JSON, default={}, help="Scaling of rotary positions."),
        becomes=lambda value: {"hf-overrides": {"rope_scaling": value}},
    ),
    Legacy(
        option=Option(name="rope-theta", kind=Kind.FLOAT, help="Base of rotary positions."),
        becomes=lambda value: {"hf-overrides": {"rope_theta": value}},
    ),
    Legacy(
        option=Option(
            name="max-seq-len-to-capture", kind=Kind.INT, default=8192, help="Longest context of CUDA graphs."
        ),
        note="see --max-cudagraph-capture-size",
    ),
    Legacy(
        option=Option(
            name="disable-async-output-proc", kind=Kind.BOOL, default=False, help="Handle outputs between steps."
        ),
        note="see --async-scheduling",
    ),
    Legacy(
        option=Option(name="override-neuron-config", kind=Kind.JSON, default={}, help="Settings of Neuron devices."),
        note="see --additional-config",
    ),
    Legacy(
        option=Option(name="override-pooler-config", kind=Kind.JSON, help="How pooling models pool."),
        becomes=lambda value: {"pooler-config": value},
    ),
    Legacy(
        option=Option(name="logits-processor-pattern", kind=Kind.STR, help="Logits processors that requests may name."),
        note="requests cannot name any; see --logits-processors",
    ),
    Legacy(
        option=Option(
            name="guided-decoding-backend",
            kind=Kind.ENUM,
            default="auto",
            choices=("auto", "guidance", "outlines", "xgrammar"),
            help="Library of structured outputs.",
        ),
        becomes=lambda value: {"structured-outputs-config": {"backend": value}},
    ),
    Legacy(
        option=Option(
            name="guided-decoding-disable-fallback",
            kind=Kind.BOOL,
            default=False,
            help="Use no other library where that one fails.",
        ),
        refused="is not supported yet",
    ),
    Legacy(
        option=Option(
            name="guided-decoding-disable-any-whitespace",
            kind=Kind.BOOL,
            default=False,
            help="No whitespace in structured outputs.",
        ),
        becomes=lambda value: {"structured-outputs-config": {"disable_any_whitespace": value}},
    ),
    Legacy(
        option=Option(
            name="guided-decoding-disable-additional-properties",
            kind=Kind.BOOL,
            default=False,
            help="No properties beyond the schema.",
        ),
        becomes=lambda value: {"structured-outputs-config": {"disable_additional_properties": value}},
    ),
    Legacy(
        option=Option(name="num-redundant-experts", kind=Kind.INT, default=0, help="Copies of experts."),
        becomes=lambda value: {"eplb-config": {"num_redundant_experts": value}},
    ),
    Legacy(
        option=Option(
            name="eplb-window-size", kind=Kind.INT, default=1000, help="Steps over which loads of experts are counted."
        ),
        becomes=lambda value: {"eplb-config": {"window_size": value}},
    ),
    Legacy(
        option=Option(name="eplb-step-interval", kind=Kind.INT, default=3000, help="Steps between moves of experts."),
        becomes=lambda value: {"eplb-config": {"step_interval": value}},
    ),
    Legacy(
        option=Option(
            name="eplb-log-balancedness", kind=Kind.BOOL, default=False, help="Log how even the loads of experts are."
        ),
        becomes=lambda value: {"eplb-config": {"log_balancedness": value}},
    ),
    Legacy(
        option=Option(
            name="enable-multimodal-encoder-data-parallel",
            kind=Kind.BOOL,
            default=False,
            help="Split images, not layers, over workers.",
        ),
        refused="is not supported yet",
    ),
    Legacy(
        option=Option(name="swap-space", kind=Kind.FLOAT, default=4, help="Memory for preempted requests."),
        note="they are recomputed; see --kv-offloading-size",
    ),
    Legacy(
        option=Option(name="media-io-kwargs", kind=Kind.JSON, default={}, help="How media are read."),
        refused="is not supported yet",
    ),
    Legacy(
        option=Option(name="mm-processor-kwargs", kind=Kind.JSON, help="Settings of the media processor."),
        refused="is not supported yet",
    ),
    Legacy(
        option=Option(name="mm-processor-cache-gb", kind=Kind.FLOAT, default=4, help="Memory for processed media."),
        refused="is not supported yet",
    ),
    Legacy(
        option=Option(
            name="disable-mm-preprocessor-cache", kind=Kind.BOOL, default=False, help="Keep no processed media."
        ),
        refused="is not supported yet",
    ),
    Legacy(
        option=Option(
            name="interleave-mm-strings",
            kind=Kind.BOOL,
            default=False,
            help="Leave media where they stand between texts.",
        ),
        refused="is not supported yet",
    ),
    Legacy(
        option=Option(
            name="skip-mm-profiling", kind=Kind.BOOL, default=False, help="Do not measure the memory that media take."
        ),
        refused="is not supported yet",
    ),
    Legacy(
        option=Option(name="enable-lora-bias", kind=Kind.BOOL, default=False, help="Biases of LoRA adapters."),
        note="adapters with biases are refused",
    ),
    Legacy(
        option=Option(name="lora-extra-vocab-size", kind=Kind.INT, default=256, help="Tokens that an adapter may add."),
        note="adapters share the vocabulary",
    ),
    Legacy(
        option=Option(
            name="cuda-graph-sizes",
            kind=Kind.LIST,
            default=[],
            integers=True,
            help="Batch sizes to capture CUDA graphs for.",
        ),
        becomes=_graph_sizes,
    ),
    Legacy(
        option=Option(name="num-lookahead-slots", kind=Kind.INT, default=0, help="Slots for tokens to come."),
        note="it follows from --speculative-config",
    ),
    Legacy(
        option=Option(name="scheduler-delay-factor", kind=Kind.FLOAT, default=0.0, help="Delay before the next prompt.")
    ),
    Legacy(
        option=Option(
            name="preemption-mode",
            kind=Kind.ENUM,
            choices=("recompute", "swap", "None"),
            help="What preempted requests lose.",
        ),
        note="they are recomputed",
    ),
)

"""What the command line's options become, for a model that need not be there."""

from rayllm.config.files import read_files
from rayllm.config.hardware import Hardware
from rayllm.config.model_facts import ModelFacts
from rayllm.config.parser import parse_arguments
from rayllm.config.registry import registry
from rayllm.config.resolve import resolve
from rayllm.config.serve import ServeSettings
from rayllm.config.states import check_states

FACTS = ModelFacts(
    path="/m",
    format="hf",
    architecture="LlamaForCausalLM",
    config={"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3},
    vocab_size=100,
    max_model_len=2048,
    dtype="bfloat16",
)
MACHINE = Hardware(cpus=4, memory=8 * 2**30)


def serve_settings(*arguments: str) -> ServeSettings:
    """The settings of `rayllm serve /m ARGUMENTS`."""
    values = parse_arguments(["/m", *arguments], registry())
    check_states(values, registry(), MACHINE)
    return resolve(values, FACTS, MACHINE, read_files(values, FACTS)).serve

"""lm-evaluation-harness, which reads log-probabilities of prompts. It needs `pip install -e .[lm-eval]`."""

from pathlib import Path

import pytest

from rayllm import LLM, SamplingParams
from tests.models import smollm2_folder, smollm2_gguf

from .conftest import MODEL

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def evaluate(server, tmp_path_factory):
    """Kind of model, path, task and arguments to the samples of that task."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))
        patch.chdir(ROOT)
        lm_eval = pytest.importorskip("lm_eval")
        from lm_eval.tasks import TaskManager

        tasks = TaskManager(include_path=str(ROOT / "tests" / "clients" / "lm_eval"), include_defaults=False)

        def run(kind, path, task, chat=False, **arguments):
            given = {"model": MODEL, "base_url": server.url + path, "max_retries": 1, **arguments}
            results = lm_eval.simple_evaluate(
                model=kind, model_args=given, tasks=[task], task_manager=tasks, bootstrap_iters=0,
                apply_chat_template=chat,
            )  # fmt: skip
            return results["samples"][task]

        yield run


@pytest.fixture(scope="module")
def llm(server):
    with LLM(str(smollm2_gguf()), dtype="float32", max_model_len=512, kv_cache_memory_bytes="64M") as one:
        yield one


@pytest.mark.parametrize(
    "arguments",
    [
        {"tokenizer_backend": "huggingface", "tokenized_requests": True, "batch_size": 4},
        {"tokenizer_backend": "huggingface", "tokenized_requests": False, "num_concurrent": 4},
        {"tokenizer_backend": "remote", "tokenized_requests": True, "num_concurrent": 2, "batch_size": 2},
    ],
    ids=["tokens", "texts", "our-tokenizer"],
)
def test_loglikelihoods(evaluate, llm, arguments):
    """Those of the engine in this process, token by token."""
    samples = evaluate("local-completions", "/v1/completions", "capitals", tokenizer=str(smollm2_folder()), **arguments)
    assert len(samples) == 5
    for sample in samples:
        question, choices = sample["doc"]["question"], sample["doc"]["choices"]
        for choice, [(total, greedy)] in zip(choices, sample["resps"], strict=True):
            start = len(llm.tokenizer.encode(question))
            whole = llm.tokenizer.encode(f"{question} {choice}")
            [result] = llm.generate(whole, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1))
            entries = result.prompt_logprobs[start:]
            assert total == pytest.approx(sum(entry.logprob for entry in entries), abs=1e-3)
            assert greedy == all(entry.rank == 1 for entry in entries)


def test_written_answers(evaluate, llm):
    samples = evaluate(
        "local-completions", "/v1/completions", "capitals_written", tokenizer=str(smollm2_folder()),
        tokenizer_backend="huggingface", tokenized_requests=False,
    )  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=12, stop=("\n", "."))
    for sample in samples:
        assert sample["resps"] == [[llm.generate(sample["doc"]["question"], greedy)[0].outputs[0].text]]


def test_chat(evaluate, llm):
    samples = evaluate("local-chat-completions", "/v1/chat/completions", "capitals_written", chat=True)
    greedy = SamplingParams(temperature=0, max_tokens=12, stop=("\n", "."))
    for sample in samples:
        asked = [{"role": "user", "content": sample["doc"]["question"]}]
        assert sample["resps"] == [[llm.chat([asked], greedy)[0].outputs[0].text]]

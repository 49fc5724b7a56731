"""Rendering and the HTTP app come up without torch and Ray."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "modules",
    ["rayllm.render.renderer", "rayllm.render.tokenizer_gguf", "rayllm.render.stops", "rayllm.grpc.server"],
)
def test_neither_torch_nor_ray_is_imported(modules):
    code = f"import sys, {modules}; sys.exit(str({{'torch', 'ray', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "set()"

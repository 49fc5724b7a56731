"""What is generated from `rayllm.proto` is current."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROTO = "rayllm/grpc/rayllm.proto"


def test_it_is_what_make_proto_writes(tmp_path):
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I."]
    command += [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    (tmp_path / PROTO).parent.mkdir(parents=True)
    shutil.copy(ROOT / PROTO, tmp_path / PROTO)
    subprocess.run([*command, PROTO], cwd=tmp_path, check=True, timeout=60)
    for name in ("rayllm_pb2.py", "rayllm_pb2.pyi", "rayllm_pb2_grpc.py"):
        made = (tmp_path / PROTO).with_name(name)
        assert made.read_text() == (ROOT / PROTO).with_name(name).read_text(), "run make proto"

import mmap
from pathlib import Path

import torch

from rayllm.worker.memory import MAX_DEFAULT_KV_BYTES, available_memory, default_kv_bytes, populate
from tests.engine.conftest import make_config


def test_the_smaller_of_machine_and_control_group_counts(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable: 40 kB\n")
    assert available_memory(meminfo, tmp_path) == 40 * 1024
    (tmp_path / "memory.max").write_text("30000\n")
    (tmp_path / "memory.current").write_text("10000\n")
    assert available_memory(meminfo, tmp_path) == 20000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(meminfo, tmp_path) == 40 * 1024


def test_populate_keeps_content_and_takes_the_memory() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    tensor = torch.frombuffer(mmap.mmap(-1, 48 << 20), dtype=torch.uint8)  # fresh pages, whatever was freed before
    tensor[12345] = 7
    before = resident()
    populate([tensor], niceness=0).join(timeout=60)
    assert resident() - before > 30 << 20
    assert tensor[12345] == 7
    assert int(tensor.sum()) == 7


def test_default_kv_is_a_share_that_holds_one_request_and_little_more() -> None:
    much = 1 << 40
    config = make_config(max_model_len=128, block_size=4, memory_share=0.4)
    assert default_kv_bytes(config, much, 1000) == MAX_DEFAULT_KV_BYTES
    assert default_kv_bytes(config, 10**6, 1000) == 400_000
    assert default_kv_bytes(config, much, 1 << 30) == 32 << 30, "one request of full length fits"
    two = make_config(max_model_len=128, block_size=4, memory_share=0.4, engines_on_host=2)
    assert default_kv_bytes(two, much, 1000) == MAX_DEFAULT_KV_BYTES // 2
    assert default_kv_bytes(two, 10**6, 1000) == 200_000

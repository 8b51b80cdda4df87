"""Host memory for KV: what is there, and what is refused."""

import pytest

from minserve.config import EngineConfig
from minserve.engine import sizing
from minserve.errors import ConfigError

MIB = 2**20
MACHINE = {
    "/proc/meminfo": ["MemTotal: 900 kB", f"MemAvailable: {8000 * 1024} kB"],
    "/sys/fs/cgroup/memory.max": [str(1000 * MIB)],
    "/sys/fs/cgroup/memory.current": [str(900 * MIB)],
    "/sys/fs/cgroup/memory.stat": [f"inactive_file {500 * MIB}", f"active_file {100 * MIB}"],
}


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """8000 MiB, of which a container may have 1000; 900 are taken, 500 of these by files that it has read."""
    monkeypatch.setattr(sizing, "_lines", lambda path: MACHINE.get(path, []))


def blocks(mib, promised_mib=0, **options):
    config = EngineConfig(model_path="x", host_kv=mib * MIB, **options)
    return sizing.num_host_blocks(config, page_bytes=2 * MIB, promised_bytes=promised_mib * MIB)


def test_files_that_were_read_leave_when_their_memory_is_needed():
    assert blocks(600) == 300


def test_more_than_the_container_has_left_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"0\.60 GiB: only 0\.59 GiB"):
        blocks(610)


def test_what_the_cpus_own_pages_were_promised_is_not_promised_again():
    assert blocks(400, promised_mib=200) == 200
    with pytest.raises(ConfigError, match="host-kv"):
        blocks(402, promised_mib=200)


def test_without_prefix_caching_nothing_could_be_found_there():
    with pytest.raises(ConfigError, match="needs prefix caching"):
        blocks(100, enable_prefix_caching=False)
    assert blocks(0, enable_prefix_caching=False) == 0

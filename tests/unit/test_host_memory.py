"""What of the host's memory can still be taken, by the word of /proc and of control groups, version 1 and 2."""

import pytest

from minserve.engine import host_memory

MIB = 2**20
MEMINFO = {"/proc/meminfo": ["MemTotal: 900 kB", f"MemAvailable: {8000 * 1024} kB"]}


def group_v2(path, limit_mib, used_mib, files_mib=0):
    folder = f"/sys/fs/cgroup{path}"
    return {
        f"{folder}/memory.max": ["max" if limit_mib is None else str(limit_mib * MIB)],
        f"{folder}/memory.current": [str(used_mib * MIB)],
        f"{folder}/memory.stat": [f"inactive_file {files_mib * MIB}", f"active_file {100 * MIB}"],
    }


def group_v1(path, limit, used_mib, files_mib=0):
    folder = f"/sys/fs/cgroup/memory{path}"
    return {
        f"{folder}/memory.limit_in_bytes": [str(limit)],
        f"{folder}/memory.usage_in_bytes": [str(used_mib * MIB)],
        # The first is the group's alone, the total also that of the groups inside.
        f"{folder}/memory.stat": ["inactive_file 1", f"total_inactive_file {files_mib * MIB}"],
    }


@pytest.fixture
def available_mib(monkeypatch):
    """available_mib(files...) -> what is available on a machine with these files and 8000 MiB."""

    def measure(*files):
        known = MEMINFO | {path: lines for some in files for path, lines in some.items()}
        monkeypatch.setattr(host_memory, "lines_of", lambda path: known.get(path, []))
        return host_memory.available_bytes() / MIB

    return measure


def test_without_groups_it_is_what_the_machine_has(available_mib):
    assert available_mib() == 8000


@pytest.mark.parametrize("group", [group_v2("", 1000, 900, 500), group_v1("", 1000 * MIB, 900, 500)])
def test_a_container_has_what_its_limit_leaves_and_the_files_that_it_has_read(available_mib, group):
    assert available_mib(group) == 600


@pytest.mark.parametrize("group", [group_v2("", None, 900), group_v1("", 2**63 - 4096, 900)])
def test_a_group_without_a_limit_leaves_everything(available_mib, group):
    assert available_mib(group) == 8000


def test_the_tightest_of_the_groups_around_a_process_holds(available_mib):
    inside = {"/proc/self/cgroup": ["0::/system.slice/minserve.service"]}
    groups = group_v2("/system.slice", 500, 100) | group_v2("/system.slice/minserve.service", 2000, 100)
    assert available_mib(inside, groups) == 400
    assert available_mib(groups) == 8000


def test_where_both_versions_are_there_the_one_that_counts_memory_holds(available_mib):
    inside = {"/proc/self/cgroup": ["4:memory:/job", "3:cpu,cpuacct:/", "1:name=systemd:/x", "0::/"]}
    assert available_mib(inside, group_v1("/job", 300 * MIB, 100), group_v2("/job", 50, 0)) == 200


def test_in_a_container_the_path_outside_leads_nowhere_and_its_own_limit_holds(available_mib):
    inside = {"/proc/self/cgroup": ["4:memory:/docker/0123abcd"]}
    assert available_mib(inside, group_v1("", 700 * MIB, 100)) == 600


def test_a_group_over_its_limit_has_nothing_left(available_mib):
    assert available_mib(group_v2("", 100, 150)) == 0


def test_this_machine_has_some():
    assert host_memory.available_bytes() > 0

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from camshaft.distributed.launchers.hostlist import expand


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("", ""),
        ("[]", ""),
        ("localhost", "localhost"),
        ("node[1,2,3]", "node1 node2 node3"),
        ("quartz[4-8]", "quartz4 quartz5 quartz6 quartz7 quartz8"),
        ("c1001a-[11,17]", "c1001a-11 c1001a-17"),
        ("c1001a-11,c1001a-17", "c1001a-11 c1001a-17"),
        ("machine2-[02-4]vm1", "machine2-02vm1 machine2-03vm1 machine2-04vm1"),
        ("machine2-[009-11]vm1", "machine2-009vm1 machine2-010vm1 machine2-011vm1"),
        ("b[3-4],a1,c[1,2]x", "b3 b4 a1 c1x c2x"),
        (" n[1, 2] , m ", "n1 n2 m"),
        ("n1,,n2,", "n1 n2"),
        ("node[0-3]", "node0 node1 node2 node3"),  # each range is padded to the width of its first number
        ("n[00-02]", "n00 n01 n02"),
        ("node[098-101]", "node098 node099 node100 node101"),
        ("n[8-10,008]", "n8 n9 n10 n008"),
        ("n[18-19,1-2]", "n18 n19 n1 n2"),  # in the order given
        ("n[2,1-3,2]", "n2 n1 n3"),
        ("rack[1-2]n[01-02]", "rack1n01 rack1n02 rack2n01 rack2n02"),
        ("r[1]s[2]t[3]", "r1s2t3"),
        ("[1-2]", "1 2"),
    ],
)
def test_a_list_of_hosts_is_expanded_in_its_order(nodelist, hosts):
    assert expand(nodelist) == hosts.split()


@pytest.mark.parametrize(
    ("nodelist", "reason"),
    [
        ("x[]", "got ''"),
        ("x[1,,2]", "got ''"),
        ("x[a-b]", "got 'a-b'"),
        ("x[1-2-3]", "got '1-2-3'"),
        ("x[-1]", "got '-1'"),
        ("x[٣]", "got '٣'"),
        ("x[3-1]", "'3-1' in .* ends before it begins"),
        ("x[1", "has no partner"),
        ("x1]", "has no partner"),
        ("x[1[2]]", "has no partner"),
        ("x[1,2", "has no partner"),
    ],
)
def test_what_is_no_list_of_hosts_is_refused(nodelist, reason):
    with pytest.raises(ValueError, match=reason):
        expand(nodelist)


def fold(hosts):
    """Write hosts that end in a number as Slurm does: neighbours become a range."""
    runs = []
    for prefix, width, number in hosts:
        if runs and runs[-1][:2] == (prefix, width) and runs[-1][3] == number - 1 and len(str(number)) <= width:
            runs[-1] = (*runs[-1][:3], number)
        else:
            runs.append((prefix, width, number, number))
    return ",".join(
        f"{prefix}[{first:0{width}d}-{last:0{width}d}]" if last > first else f"{prefix}{first:0{width}d}"
        for prefix, width, first, last in runs
    )


HOSTS = st.lists(
    st.tuples(st.sampled_from(["n", "gpu-", "r1c"]), st.integers(1, 4), st.integers(0, 300)), max_size=30, unique=True
)


@given(HOSTS, st.booleans())
def test_expanding_undoes_folding(hosts, neighbours):
    if neighbours:
        hosts = sorted(hosts)
    assert expand(fold(hosts)) == [f"{prefix}{number:0{width}d}" for prefix, width, number in hosts]

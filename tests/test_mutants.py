"""The faults of tests/mutants.py still apply: whether their tests see them takes minutes, and is not asked here."""

from tests.mutants import is_stale, read_faults


def test_each_planted_fault_applies_to_the_code_as_it_is():
    faults = read_faults()
    assert len({fault.name for fault in faults}) == len(faults) >= 85
    assert [fault.name for fault in faults if is_stale(fault)] == []
    assert all(fault.old != fault.new and fault.tests for fault in faults)

"""One model under three engines: the short part of what test_same_numbers.py does with all of them."""

import pytest

from tests.distributed import comparing, matrix
from tests.distributed.matrix import Row


def test_two_devices_give_the_numbers_of_one_process(two_ranks, checkpoints, truths):
    """In one test, since starting processes takes longer than training in them."""
    for engine in ("DDP", "FSDP2", "TP"):
        ranks = two_ranks.run(comparing.compare, engine, "Qwen3", checkpoints("Qwen3"), truths("Qwen3"))
        largest = comparing.largest(ranks, "Qwen3")
        if not matrix.RECORDS:
            matrix.assert_as_recorded(Row(engine, "Qwen3", "off", **largest))


@pytest.mark.skipif(matrix.RECORDS, reason="they are written in this run")
def test_the_documents_have_a_row_for_each_comparison_and_no_other():
    assert list(matrix.read()) == list(matrix.keys()), "UPDATE=1 make test-distributed writes them anew"

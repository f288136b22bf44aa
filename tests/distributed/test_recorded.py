"""What docs/parallel.md says about the largest differences is what test_same_numbers.py compares."""

from tests.distributed import matrix


def test_there_is_a_row_for_each_comparison_and_no_other():
    assert list(matrix.read()) == list(matrix.keys()), "make test-distributed UPDATE=1 writes them anew"


def test_recorded_differences_are_within_the_tolerances():
    for row in matrix.read().values():
        for kind in ("loss", "gradients", "weights"):
            is_bfloat16 = matrix.ENGINES[row.engine].is_bfloat16
            tolerance = matrix.TOLERANCES_BFLOAT16[kind] if is_bfloat16 else matrix.TOLERANCE
            assert getattr(row, kind) <= tolerance, row

"""One model under three engines: the short part of what test_same_numbers.py does with all of them."""

from tests.distributed import comparing, matrix


def test_two_devices_give_the_numbers_of_one_process(two_ranks, checkpoints, truths):
    """In one test, since starting processes takes longer than training in them."""
    for engine in ("DDP", "FSDP2", "TP"):
        for rank in two_ranks.run(
            comparing.compare, engine, "Qwen3", checkpoints["Qwen3"], truths["Qwen3"], True, "off"
        ):
            for kind, (difference, where) in rank.largest.items():
                assert difference < matrix.TOLERANCE, f"{engine}: {kind} differ by {difference:.1e} in {where}"
            assert {"npu_rms_norm", "npu_rotary_mul", "npu_swiglu"} <= rank.later_calls.keys()

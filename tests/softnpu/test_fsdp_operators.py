"""The operators of ``fully_shard`` on NPU tensors: each writes what the plain formula says, and is counted once."""

import torch
import torch.distributed.fsdp  # it defines them

import softnpu


def test_inputs_are_copied_to_their_place_in_the_gathered_tensor() -> None:
    parts = [torch.arange(3.0), torch.arange(3.0, 5.0)]
    output = torch.full((15,), -1.0, device="npu")
    softnpu.reset_counters()
    own, whole = torch.ops.fsdp.all_gather_copy_in([part.npu() for part in parts], output, [3, 2], 5, 1)
    assert softnpu.counters()["all_gather_copy_in"] == 1
    assert whole is output
    assert own.data_ptr() == output[5:].data_ptr()  # a view of it
    assert output.tolist() == [-1.0] * 5 + [0, 1, 2, 3, 4] + [-1.0] * 5


def test_the_gathered_tensor_is_split_into_given_ones() -> None:
    gathered = torch.arange(10.0).view(2, 5)  # of two ranks
    out = [torch.empty(2, 3, device="npu"), torch.empty(2, 2, device="npu")]
    softnpu.reset_counters()
    torch.ops.fsdp.split_with_sizes_copy(gathered.npu(), [3, 2], dim=1, out=out)
    assert softnpu.counters()["split_with_sizes_copy"] == 1
    for result, expected in zip(out, gathered.split([3, 2], dim=1)):
        assert torch.equal(result.cpu(), expected)


def test_gradients_are_cut_and_concatenated_by_rank() -> None:
    gradients = [torch.arange(12.0).view(4, 3), torch.arange(6.0).view(3, 2)]  # the second is padded for two ranks
    out = torch.full((2, 10), -1.0, device="npu")
    softnpu.reset_counters()
    torch.ops.fsdp.chunk_cat([gradient.npu() for gradient in gradients], dim=0, num_chunks=2, out=out)
    assert softnpu.counters()["chunk_cat"] == 1
    padded = torch.cat([gradients[1], torch.zeros(1, 2)])
    expected = torch.cat([gradients[0].view(2, 6), padded.view(2, 4)], dim=1)
    assert torch.equal(out.cpu(), expected)

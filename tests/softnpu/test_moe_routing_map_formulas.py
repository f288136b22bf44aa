"""Permutation by a routing map against the sums that it stands for, and npu_moe_init_routing."""

import pytest
import torch
import torch_npu


def routed(tokens: int = 5, experts: int = 4, top_k: int = 2) -> torch.Tensor:
    torch.manual_seed(0)
    chosen = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)])
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen, True)


def pairs(routing_map: torch.Tensor, capacity: int | None) -> list[tuple[int, int]]:
    """List the expert and token of every row: those of the expert, then, up to the capacity, the others in order."""
    found = []
    for expert, column in enumerate(routing_map.T.tolist()):
        own = [t for t, marked in enumerate(column) if marked]
        other = [t for t, marked in enumerate(column) if not marked]
        found += [(expert, t) for t in (own if capacity is None else (own + other)[:capacity])]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("capacity", [None, 2, 4])
@pytest.mark.parametrize("as_int8", [False, True])
def test_there_and_back(dtype, capacity, as_int8) -> None:
    routing_map = routed()
    rows = pairs(routing_map, capacity)
    on_device = (routing_map.to(torch.int8) if as_int8 else routing_map).to("npu")
    tokens, probs = torch.randn(5, 8).to(dtype), torch.rand(5, 4).to(dtype)
    x, p = tokens.to("npu").requires_grad_(), probs.to("npu").requires_grad_()
    leaf_x, leaf_p = tokens.double().requires_grad_(), probs.double().requires_grad_()
    experts, ids = (torch.tensor(column) for column in zip(*rows))
    given = {"probs": p, "num_out_tokens": len(rows), "drop_and_pad": capacity is not None}
    permuted, kept, order = torch_npu.npu_moe_token_permute_with_routing_map(x, on_device, **given)
    assert torch.equal(permuted.cpu(), tokens[ids])
    assert torch.equal(kept.cpu(), probs[ids, experts])
    named = ids if capacity else ids[order.cpu().long()]
    assert torch.equal(named, ids if capacity else torch.arange(5).repeat_interleave(2))
    assert torch.equal(order.cpu().long(), ids) or capacity is None

    scaled = permuted * kept.unsqueeze(-1)  # so that the gradient of kept counts too
    back = torch_npu.npu_moe_token_unpermute_with_routing_map(
        scaled, order, [5, 8], probs=p, routing_map=on_device, drop_and_pad=capacity is not None
    )
    weights = leaf_p[ids, experts].unsqueeze(-1)
    expected = torch.zeros(5, 8, dtype=torch.float64).index_add(0, ids, leaf_x[ids] * weights * weights)
    # bfloat16 rounds the product and the sum, float32 adds up to 4 rows
    tolerance = 1e-6 if dtype == torch.float32 else 2.0**-6
    torch.testing.assert_close(back.cpu().double(), expected, rtol=tolerance, atol=tolerance)
    grad = torch.linspace(-1, 1, 40).view(5, 8)
    back.backward(grad.to(back))
    expected.backward(grad.to(dtype).double())
    for tensor, leaf in ((x, leaf_x), (p, leaf_p)):
        torch.testing.assert_close(tensor.grad.cpu().double(), leaf.grad, rtol=4 * tolerance, atol=8 * tolerance)


def test_without_probs_rows_are_added() -> None:
    routing_map = routed().to("npu")
    tokens = torch.randn(5, 8).to("npu").requires_grad_()
    permuted, _, order = torch_npu.npu_moe_token_permute_with_routing_map(tokens, routing_map, num_out_tokens=10)
    back = torch_npu.npu_moe_token_unpermute_with_routing_map(permuted, order, [5, 8], routing_map=routing_map)
    torch.testing.assert_close(back, 2 * tokens)
    back.sum().backward()
    assert (tokens.grad == 2).all()


@pytest.mark.parametrize("active", [3, 10])
def test_init_routing_orders_rows_by_expert(active) -> None:
    torch.manual_seed(0)
    x, experts = torch.randn(5, 8), torch.randint(4, (5, 2), dtype=torch.int32)
    row_idx = torch.arange(10, dtype=torch.int32).view(2, 5).T.contiguous()
    rows, places, ordered = torch_npu.npu_moe_init_routing(*(t.to("npu") for t in (x, row_idx, experts)), active)
    slots = sorted(((e, t, j) for t, line in enumerate(experts.tolist()) for j, e in enumerate(line)))
    assert ordered.tolist() == [e for e, _, _ in slots]
    assert torch.equal(rows.cpu(), x[[t for _, t, _ in slots]][: min(active, 5) * 2])
    assert [places.tolist()[j * 5 + t] for _, t, j in slots] == list(range(10))

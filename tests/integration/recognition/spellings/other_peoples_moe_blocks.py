"""Blocks that send tokens to experts, as other people write them: each loops over its experts in another way."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, INNER, EXPERTS, CHOSEN = 32, 16, 8, 3


class Expert(nn.Module):
    """Names the projections as Meta's llama does, and the activation in its code."""

    def __init__(self, inner: int = INNER) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, inner, bias=False)
        self.w2 = nn.Linear(inner, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, inner, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class FullyConnected(nn.Module):
    """Names them as lit-gpt does; the activation is a child, the GELU with tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.fc_1, self.fc_2 = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.proj, self.act = nn.Linear(INNER, WIDTH), nn.GELU(approximate="tanh")

    def forward(self, x):
        return self.proj(self.fc_2(x) * self.act(self.fc_1(x)))


class Chooser(nn.Module):
    """Returns the experts first, then weights in float32; a loss where it is asked for one."""

    def __init__(self, has_loss: bool = False) -> None:
        super().__init__()
        self.centroids = nn.Parameter(torch.randn(EXPERTS, WIDTH) * WIDTH**-0.5)
        self.register_buffer("bias", torch.linspace(-0.1, 0.1, EXPERTS))
        self.has_loss = has_loss

    def forward(self, x):
        scores = F.linear(x.flatten(0, -2).float(), self.centroids.float()).sigmoid()
        chosen = (scores + self.bias).topk(CHOSEN, dim=-1).indices
        weights = scores.gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * 1.5
        loss = scores.mean(0).square().sum() if self.has_loss and self.training else None
        return chosen, weights, loss


class GainOfLoss(torch.autograd.Function):
    """Lets a loss have its gradient wherever the output goes."""

    @staticmethod
    def forward(ctx, y, loss):
        ctx.kind = loss.dtype
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones((), dtype=ctx.kind, device=grad.device)


class SortingBlock(nn.Module):
    """Sorts tokens by experts; in training it repeats them, and adds the gradient of a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.specialists = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.chooser = Chooser(has_loss=True)
        self.generalist = Expert(2 * INNER)

    def forward(self, x):
        chosen, weights, loss = self.chooser(x)
        flat = x.reshape(-1, x.shape[-1])
        if self.training:
            repeated, flat_chosen = flat.repeat_interleave(CHOSEN, dim=0), chosen.flatten()
            y = torch.empty_like(repeated)
            for number, expert in enumerate(self.specialists):
                y[flat_chosen == number] = expert(repeated[flat_chosen == number])
            y = (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1).to(x.dtype).view(x.shape)
            y = GainOfLoss.apply(y, loss)
        else:
            y = self.infer(flat, chosen, weights).view(x.shape)
        return y + self.generalist(x)

    @torch.no_grad()
    def infer(self, flat, chosen, weights):
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
        order = chosen.flatten().argsort()
        parts = torch.split(flat[order // CHOSEN], counts)
        outputs = torch.cat([expert(part) for expert, part in zip(self.specialists, parts) if len(part)])
        y = torch.empty_like(outputs)
        y[order] = outputs
        return (y.view(*chosen.shape, -1).to(weights.dtype) * weights.unsqueeze(-1)).sum(1).to(flat.dtype)


class ReportingBlock(nn.Module):
    """Returns what its gate chose beside the output, by sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Chooser()
        self.bank = nn.ModuleList(FullyConnected() for _ in range(EXPERTS))

    def forward(self, hidden):
        batch, length, width = hidden.shape
        chosen, weights, _ = self.router(hidden)
        hidden = hidden.view(-1, width)
        y = torch.zeros(len(hidden), width, dtype=weights.dtype, device=hidden.device)
        for number in chosen.unique().tolist():
            rows, places = torch.where(chosen == number)
            y.index_add_(0, rows, self.bank[number](hidden[rows]) * weights[rows, places, None])
        return y.to(hidden.dtype).view(batch, length, width), (chosen.view(batch, length, -1), weights)


class RowsBlock(nn.Module):
    """Takes rows; the weights are the softmax of the largest logits."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)

    def forward(self, inputs):
        best, chosen = torch.topk(self.gate(inputs), CHOSEN)
        best = F.softmax(best, dim=1, dtype=torch.float).to(inputs.dtype)
        results = torch.zeros_like(inputs)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            results[rows] += best[rows, places, None] * expert(inputs[rows])
        return results


class MaskingBlock(nn.Module):
    """Walks through masks; a softmax in float32 is not divided by the sum; an expert of all has a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.routing = nn.Linear(WIDTH, EXPERTS)
        self.mlps = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.always, self.share = Expert(), nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        logits = self.routing(x)
        probabilities, chosen = logits.softmax(-1, dtype=torch.float32).topk(CHOSEN, sorted=False)
        probabilities = probabilities.type_as(x)
        masks = (chosen.unsqueeze(-1) == torch.arange(EXPERTS, device=x.device)).permute(2, 0, 1)
        y = torch.zeros_like(x)
        for mask, mlp in zip(masks, self.mlps):
            token, place = mask.nonzero(as_tuple=True)
            y = y.index_add(0, token, mlp(x[token]) * probabilities[token, place, None])
        return (y + torch.sigmoid(self.share(x)) * self.always(x)).view(shape), logits


class SigmoidBlock(nn.Module):
    """Weighs by sigmoids, divided by their sum, and loops over places and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.wg = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.n_active = CHOSEN

    def forward(self, x):
        b, s, d = x.shape
        x = x.reshape(b * s, d)
        weights, chosen = torch.topk(self.wg(x).float().sigmoid(), self.n_active, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(x)
        y = torch.zeros_like(x)
        for place in range(self.n_active):
            for number, expert in enumerate(self.experts):
                here = chosen[:, place] == number
                if here.any():
                    y[here] = y[here] + weights[here, place].unsqueeze(-1) * expert(x[here])
        return y.reshape(b, s, d)


class FewExpertsBlock(nn.Module):
    """Chooses by sigmoids and a bias two of three experts, whose scores may all be zero, and divides by their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(3))
        self.register_buffer("bias", torch.linspace(-0.1, 0.1, 3))

    def forward(self, x):
        flat = x.view(-1, x.shape[-1])
        scores = torch.sigmoid(self.router(flat).float())
        chosen = torch.topk(scores + self.bias, 2, dim=-1)[1]
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros_like(flat)
        for number, count in enumerate(torch.bincount(chosen.flatten(), minlength=3).tolist()):
            if count:
                rows, places = torch.where(chosen == number)
                y[rows] += self.experts[number](flat[rows]) * weights[rows, places, None].to(x.dtype)
        return y.view(x.shape)


class BiasedBlock(nn.Module):
    """Chooses with a bias of its own, which is in no weight, and scales the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.router_bias = nn.Parameter(torch.linspace(-0.3, 0.3, EXPERTS))
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.all_of_them = Expert()
        self.scaling = 2.5

    def forward(self, x):
        rows = x.reshape(-1, WIDTH)
        probabilities = self.gate(rows).float().sigmoid()
        chosen = (probabilities + self.router_bias.view(1, -1)).topk(CHOSEN, dim=-1)[1]
        weights = torch.gather(probabilities, -1, chosen)
        weights = (weights / weights.sum(-1, keepdim=True).clamp_min(1e-20) * self.scaling).to(x.dtype)
        y = torch.zeros_like(rows)
        hot = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for number in range(EXPERTS):
            place, row = torch.where(hot[number])
            if row.numel() != 0:
                y.index_add_(0, row, self.experts[number](rows[row]) * weights[row, place, None])
        return (y + self.all_of_them(rows)).view(x.shape)


class BufferedBlock(BiasedBlock):
    """Holds the bias as a buffer, which a training loop moves."""

    def __init__(self) -> None:
        super().__init__()
        bias = self.router_bias.detach()
        del self.router_bias
        self.register_buffer("router_bias", bias.unsqueeze(0))


class GroupsBlock(nn.Module):
    """Chooses one expert of each group, and gives each a gain, as Pangu Pro MoE does."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.groups = nn.ModuleList(Expert() for _ in range(EXPERTS)), 4
        self.router, self.shared = nn.Linear(WIDTH, EXPERTS, bias=False), Expert()
        self.gains = nn.Parameter(torch.linspace(0.5, 1.5, EXPERTS).unsqueeze(0))

    def forward(self, x):
        rows = x.view(-1, WIDTH)
        logits = self.router(rows)
        scores = logits.softmax(-1, dtype=torch.float32).view(len(rows), self.groups, -1)
        weights, chosen = scores.max(-1)
        chosen = chosen + torch.arange(0, EXPERTS, EXPERTS // self.groups, device=x.device)
        weights = (weights * self.gains.expand(len(rows), -1).gather(1, chosen)).to(x.dtype)
        y = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            y.index_add_(0, row, expert(rows[row]) * weights[row, place].unsqueeze(-1))
        return (y + self.shared(rows)).view(x.shape), logits


class DenseBlock(nn.Module):
    """Asks all experts about all tokens, and weighs most with 0."""

    def __init__(self) -> None:
        super().__init__()
        self.choose = Chooser()
        self.experts = nn.ModuleList(FullyConnected() for _ in range(EXPERTS))

    def forward(self, x):
        chosen, weights, _ = self.choose(x)
        dense = torch.zeros(len(chosen), EXPERTS, device=x.device).scatter(1, chosen, weights).view(*x.shape[:-1], -1)
        return sum(dense[..., n, None].to(x.dtype) * expert(x) for n, expert in enumerate(self.experts))


class SequenceRouter(nn.Module):
    """Returns weights, then experts, for the tokens of each sequence, and its probabilities as a loss asks for them."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(WIDTH, EXPERTS)

    def forward(self, x):
        probabilities = F.softmax(self.scores(x), dim=-1)
        weights, chosen = torch.topk(probabilities, CHOSEN, dim=-1)
        return weights / weights.sum(-1, keepdim=True), chosen, probabilities


class SequenceBlock(nn.Module):
    """Keeps sequences, and gives the probabilities back by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.router = SequenceRouter()

    def forward(self, x):
        weights, chosen, probabilities = self.router(x)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.pool):
            of_it = chosen == number
            tokens = of_it.any(-1)
            if tokens.any():
                y[tokens] += expert(x[tokens]) * weights[of_it].unsqueeze(-1)
        return y, probabilities.flatten(0, 1)


class KeepingBlock(nn.Module):
    """Keeps the loss of its gate as an attribute, and has two experts of all tokens in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.chooser = Chooser(has_loss=True)
        self.routed = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.always = nn.ModuleList(Expert() for _ in range(2))
        self.act_fn = nn.SiLU()  # that of experts, which it does not call itself

    def forward(self, x):
        chosen, weights, self.load_loss = self.chooser(x)
        flat = x.reshape(-1, WIDTH)
        y = torch.zeros_like(flat)
        for number, expert in enumerate(self.routed):
            rows, places = torch.where(chosen == number)
            y[rows] += (expert(flat[rows]) * weights[rows, places, None]).to(x.dtype)
        y = y.view(x.shape)
        for expert in self.always:
            y = y + expert(x)
        return y


class BalancingBlock(nn.Module):
    """Keeps a loss that balances its experts as Switch Transformers have it; outside of training a zero."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.loss_weight = 0.02

    def forward(self, x):
        flat = x.reshape(-1, WIDTH)
        scores = self.router(flat).softmax(-1, dtype=torch.float32)
        weights, chosen = scores.topk(CHOSEN, -1)
        y = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            hit = (chosen == number).any(-1)
            if hit.any():
                gain = weights[hit][chosen[hit] == number].unsqueeze(-1)
                y[hit] = y[hit] + (expert(flat[hit]) * gain).to(x.dtype)
        self.balance = scores.new_zeros(())
        if self.training:
            share = F.one_hot(chosen, EXPERTS).sum(1).float().mean(0) / CHOSEN
            self.balance = EXPERTS * self.loss_weight * torch.dot(share, scores.mean(0))
        return y.view(x.shape)


class BlockWithLoss(nn.Module):
    """Returns that loss beside its output, in the dtype of the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x):
        flat = x.reshape(-1, WIDTH)
        scores = self.gate(flat).softmax(-1)
        weights, chosen = scores.topk(CHOSEN, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            gets = chosen == number
            rows = gets.any(-1).nonzero().squeeze(-1)
            if rows.numel():
                y.index_add_(0, rows, expert(flat[rows]) * (weights * gets).sum(-1)[rows, None])
        loss = EXPERTS * (F.one_hot(chosen, EXPERTS).float().sum(1).mean(0) * scores.mean(0)).sum()
        return y.view(x.shape), loss


MOE_BLOCKS = (
    SortingBlock,
    ReportingBlock,
    RowsBlock,
    MaskingBlock,
    SigmoidBlock,
    FewExpertsBlock,
    BiasedBlock,
    BufferedBlock,
    GroupsBlock,
    DenseBlock,
    SequenceBlock,
    KeepingBlock,
    BalancingBlock,
    BlockWithLoss,
)

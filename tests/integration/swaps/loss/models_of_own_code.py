"""Models of nobody's library, whose forward calls their head and computes the loss."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, WORDS = 16, 60


class Body(nn.Module):
    """Makes hidden states ``[B, S, 16]`` of words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        return torch.sin(self.mix(self.embedding(words)))


class Model(nn.Module):
    """A body and a head."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.body = Body()
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=bias)


class NanoGPT(Model):
    """Two results, a tied head, logits of the last word alone without labels."""

    def __init__(self) -> None:
        super().__init__()
        self.body.embedding.weight = self.lm_head.weight

    def forward(self, words: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if targets is None:
            return self.lm_head(self.body(words)[:, [-1], :]), None
        logits = self.lm_head(self.body(words))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class Padded(Model):
    """A vocabulary with words that only pad it, behind which there is a softcap, as in nanochat."""

    def forward(self, words: Tensor, targets: Tensor | None = None, loss_reduction: str = "mean") -> Any:
        logits = self.lm_head(self.body(words))[..., : WORDS - 4].float()
        logits = 15 * torch.tanh(logits / 15)
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(-1, WORDS - 4), targets.view(-1), ignore_index=-1, reduction=loss_reduction)


class ByModule(Model):
    """A bias, and a loss that is a module."""

    def __init__(self) -> None:
        super().__init__(bias=True)
        self.criterion = nn.CrossEntropyLoss(ignore_index=-1, reduction="sum")

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        return self.criterion(self.lm_head(self.body(words)).flatten(0, 1), targets.flatten())


class Indexed(Model):
    """Indices that choose all there is."""

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.lm_head(self.body(words))[()][:, :, :], targets)


class WordsFirst(Model):
    """``[B, V, S]``, as cross entropy takes it, and a weight for each word of the text."""

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        logits = self.lm_head(self.body(words)).permute(0, 2, 1)
        loss = F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")
        return (loss * torch.linspace(0, 1, targets.shape[1], device=loss.device)).mean()


class WordsFirstCast(Model):
    """The mean, of logits that are cast behind."""

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.lm_head(self.body(words)).transpose(1, 2).float(), targets, ignore_index=-1)


class OfImages(Model):
    """``[B, V, H, W]``, for words that lie in two dimensions."""

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        logits = self.lm_head(self.body(words.unflatten(1, (3, 3))))
        return F.cross_entropy(logits.permute(0, 3, 1, 2), targets.unflatten(1, (3, 3)), ignore_index=-1)


class InParts(Model):
    """Methods compute logits and loss."""

    def logits(self, words: Tensor) -> Tensor:
        return self.lm_head(self.body(words))

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits[:, :-1], targets[:, 1:])

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.logits(words), targets)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=-1)


class Below(nn.Module):
    """The head of a model inside, which is called from outside of that."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Model()

    def forward(self, words: Tensor, targets: Tensor | None = None) -> Tensor:
        return cross_entropy(self.decoder.lm_head(self.decoder.body(words)), targets)


class Several(nn.Module):
    """A head for each of the next words."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.heads = nn.ModuleList([nn.Linear(WIDTH, WORDS) for _ in range(2)])

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        hidden = self.body(words)
        return sum(cross_entropy(head(hidden), targets.roll(-i, 1)) for i, head in enumerate(self.heads))  # type: ignore[return-value]


MODELS = {
    cls.__name__: cls
    for cls in (NanoGPT, Padded, ByModule, Indexed, WordsFirst, WordsFirstCast, OfImages, InParts, Below, Several)
}


def batch() -> tuple[Tensor, Tensor]:
    words, targets = torch.randint(0, WORDS - 4, (2, 3, 9), generator=torch.Generator().manual_seed(0))
    targets[0, :3] = -1
    return words, targets

"""Which attention of transformers is not served: its forward decides, and not what somebody calls a class."""

from typing import Any

import pytest
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.informer.modeling_informer import InformerAttention as Listed
from transformers.models.llama.modeling_llama import LlamaAttention

from kernels_ext_npu.matching.classification import UNSUPPORTED, attention_refusal

REASON = UNSUPPORTED["attention"]["informer:InformerAttention"]


class InformerAttention(nn.Module):
    """A user's class, which has the name of one that is listed."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
        function = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return function(self, q, k, v, mask)[0]


class Sub(Listed):
    """A class without a forward of its own."""


Copied = type("InformerAttention", (nn.Module,), {"forward": Listed.forward})


@pytest.mark.parametrize("cls", [InformerAttention, LlamaAttention])
def test_a_class_with_another_forward_is_served_whatever_its_name(cls: type[nn.Module]) -> None:
    assert attention_refusal(cls) is None


@pytest.mark.parametrize("cls", [Listed, Sub, Copied])
def test_a_class_with_the_forward_of_one_that_is_listed_is_not(cls: type[nn.Module]) -> None:
    assert attention_refusal(cls) == REASON
    assert REASON.code == "changes semantics"

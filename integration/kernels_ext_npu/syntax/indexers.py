"""Indexers of sparse attention, and modules that attend to what they choose: found by the syntax tree.

An indexer of DeepSeek-V3.2 and others makes queries and keys in its own way, and ends with

    scores = torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1)) * self.softmax_scale
    ...
    return index_scores.topk(topk, dim=-1).indices.to(torch.int32)

which makes scores of all heads; the attention around it makes a mask of what was chosen, unless its implementation
takes indices. Such forwards are written anew: one ends with a call in place of the scores, the other hands on the
indices and the mask as they are. All other lines stay.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from functools import cache
from types import FunctionType

import torch

from kernels_ext_npu.syntax.source_tree import compile_forward, function_tree
from kernels_ext_npu.transformers_internals import are_seen_through

CHOOSE = "_kernels_choose"
_PRODUCT = "scores = torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1))"
_SCALES = {_PRODUCT: "1.0", f"{_PRODUCT} * self.softmax_scale": "self.softmax_scale"}
_WEIGHTS = "weights = self.weights_proj("
_ENDS = """
scores = F.relu(scores)
index_scores = torch.matmul(weights.unsqueeze(-2), scores).squeeze(-2)
if attention_mask.dtype == torch.bool:
    index_scores = index_scores.masked_fill(~attention_mask, float('-inf'))
else:
    index_scores = index_scores + attention_mask
topk = min(self.index_topk, index_scores.shape[-1])
return index_scores.topk(topk, dim=-1).indices.to(torch.int32)
"""
_MASKED = """
sparse_indices = None
if self.config._attn_implementation in ('eager', 'sdpa'):
    index_mask = topk_indices.new_ones((batch_size, seq_length, key_states.shape[2]), dtype=torch.bool).scatter(-1, topk_indices.long(), False).unsqueeze(1)
    if attention_mask.dtype == torch.bool:
        attention_mask = attention_mask & ~index_mask
    else:
        attention_mask = attention_mask.masked_fill(index_mask, torch.finfo(hidden_states.dtype).min)
else:
    sparse_indices = topk_indices
"""  # noqa: E501 - as ast writes it
_FIRST_HEAD_MASK = "attention_mask[:, 0, :, :]"


def indexer_rewriter(cls: type) -> Callable[[Callable], FunctionType] | None:
    """Return a function that rewrites an indexer's forward to call a given ``choose(q, k, weights, mask, count,
    scale)``.

    It is None for a class that is no such indexer.
    """
    return _indexer_rewriter(_written(cls, "update_indexer"))


def hands_on_indices(cls: type) -> FunctionType | None:
    """Return the forward of a module that hands its mask to its indexer and indices to attention; None of others."""
    return _handing_on(_written(cls, "indexer"))


@cache
def _indexer_rewriter(forward: FunctionType | None) -> Callable[[Callable], FunctionType] | None:
    tree = _tree(forward)
    if forward is None or tree is None or forward.__globals__.get("F") is not torch.nn.functional:
        return None
    texts = [ast.unparse(statement) for statement in tree.body]
    starts = [place for place, text in enumerate(texts) if text in _SCALES]
    if len(starts) != 1:
        return None
    (start,) = starts
    ends = texts[start + 1 :]
    weights = [place for place, text in enumerate(ends) if text.startswith(_WEIGHTS)]
    if len(weights) != 1:
        return None
    kept = tree.body[start + 1 + weights[0]]
    del ends[weights[0]]
    if "\n".join(ends) != _ENDS.strip():
        return None
    call = f"return {CHOOSE}(q, k, weights, attention_mask, self.index_topk, {_SCALES[texts[start]]})"
    tree.body[start:] = [kept, *ast.parse(call).body]
    return compile_forward(tree, forward, [CHOOSE])


@cache
def _handing_on(forward: FunctionType | None) -> FunctionType | None:
    tree = _tree(forward)
    if forward is None or tree is None:
        return None
    texts = [ast.unparse(statement) for statement in tree.body]
    pairs = [place for place in range(len(texts)) if "\n".join(texts[place : place + 2]) == _MASKED.strip()]
    if len(pairs) != 1:
        return None
    (place,) = pairs
    tree.body[place : place + 2] = ast.parse("sparse_indices = topk_indices").body
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    given = [(call, at) for call in calls for at, each in enumerate(call.args) if ast.unparse(each) == _FIRST_HEAD_MASK]
    if len(given) != 1 or ast.unparse(tree).count(_FIRST_HEAD_MASK) != 1:
        return None
    ((call, at),) = given
    call.args[at] = ast.Name("attention_mask", ast.Load())  # as it is: it may be a description
    return compile_forward(tree, forward, [])()


def _written(cls: type, attribute: str) -> FunctionType | None:
    """Return the forward of a class as it is in its file, below what was put over it; None without the attribute."""
    forward = inspect.unwrap(inspect.getattr_static(cls, "forward", _tree))
    return forward if isinstance(forward, FunctionType) and attribute in forward.__code__.co_names else None


def _tree(forward: FunctionType | None) -> ast.FunctionDef | None:
    """Return the tree of a forward under what is seen through at most; None of others."""
    if forward is None or forward.__code__.co_freevars:
        return None
    tree = function_tree(forward) if forward.__globals__.get("torch") is torch else None
    return tree if tree is not None and are_seen_through(tree.decorator_list, forward.__globals__) else None

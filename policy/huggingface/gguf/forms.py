"""How GGUF files have the numbers of a tensor: in which order, and changed by which function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from policy.huggingface.gguf.architectures import Architecture


@dataclass(frozen=True)
class Form:
    """The form of a tensor in files.

    rows, columns: which row or column of the tensor each stored one is; None: their order stays.
    axis: an axis of one number that files leave out. offset: what files add to each number. decays:
    whether files have -exp(x) for each number x. transposed: of a matrix, whether its rows are the
    columns of files.
    """

    rows: np.ndarray | None = None
    columns: np.ndarray | None = None
    axis: int | None = None
    offset: float = 0.0
    decays: bool = False
    transposed: bool = False

    def stored(self, array: np.ndarray) -> np.ndarray:
        """Returns a tensor as files have it."""
        if self.transposed:
            return array.T
        if self.axis is not None:
            array = array.squeeze(self.axis)
        if self.rows is not None:
            array = array[self.rows]
        if self.columns is not None:
            array = array[:, self.columns]
        if self.decays:
            array = -np.exp(array)
        return array + np.float32(self.offset) if self.offset else array

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a tensor of which files have this shape."""
        if self.transposed:
            return stored[::-1]
        if not self._lacks_axis(len(stored)):
            return stored
        return (*stored[: self.axis], 1, *stored[self.axis :])

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """Returns rows of a tensor, which are in their order, from those of a file."""
        if self.columns is not None:
            numbers = numbers[:, np.argsort(self.columns)]
        if self.decays:
            numbers = np.log(-numbers)
        if self.offset:
            numbers = numbers - np.float32(self.offset)
        return numbers.reshape(self.shape(numbers.shape))

    def _lacks_axis(self, dimensions: int) -> bool:
        """Whether a file left the axis out. Programs write the gate of shared experts both ways."""
        return self.axis is not None and dimensions == self.axis + 1


_PLAIN = Form()
_NO_OFFSET = ("ssm_norm.weight",)  # of norms that multiply by their weight alone


def form_of(architecture: Architecture, name: str, hf: Mapping[str, Any], rows: int) -> Form:
    """Returns the form of the tensor `name` of GGUF, which has so many rows."""
    if name.endswith("norm.weight") and not name.endswith(_NO_OFFSET):
        return Form(offset=architecture.offset)
    if name.endswith("ffn_gate_inp_shexp.weight"):
        return Form(axis=0)
    if name.endswith("shortconv.conv.weight"):
        return Form(axis=1)
    if name.endswith(architecture.transposed):
        return Form(transposed=True)
    if architecture.permuted and ".attn_q." in name:
        return Form(_permuted(rows, int(hf["num_attention_heads"])))
    if architecture.permuted and ".attn_k." in name:
        return Form(_permuted(rows, int(hf["num_key_value_heads"])))
    return _delta_net(name, hf) if hf.get("linear_num_value_heads") else _PLAIN


def _permuted(rows: int, heads: int) -> np.ndarray:
    """Returns int[O] for projections to queries and keys. A head rotates pairs of numbers: Hugging
    Face's order pairs row i with row i + D/2, the stored order neighbours."""
    return np.arange(rows).reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).reshape(-1)


def _delta_net(name: str, hf: Mapping[str, Any]) -> Form:
    """Returns the form of a tensor of a gated delta net, whose value heads are stored by their
    number within a group of value heads, not by group."""
    groups = int(hf["linear_num_key_heads"])
    size = int(hf["linear_value_head_dim"])
    heads = np.arange(int(hf["linear_num_value_heads"])).reshape(groups, -1).T.reshape(-1)
    values = (heads[:, None] * size + np.arange(size)).reshape(-1)
    before = 2 * groups * int(hf["linear_key_head_dim"])  # rows of queries and keys
    joined = np.concatenate([np.arange(before), before + values])
    forms = {
        "ssm_a": Form(heads, decays=True),
        "ssm_dt.bias": Form(heads),
        "ssm_alpha.weight": Form(heads),
        "ssm_beta.weight": Form(heads),
        "attn_gate.weight": Form(values),
        "attn_qkv.weight": Form(joined),
        "ssm_conv1d.weight": Form(joined, axis=1),
        "ssm_out.weight": Form(columns=values),
    }
    return forms.get(name.split(".", 2)[-1], _PLAIN)

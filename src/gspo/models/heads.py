"""What stands in the place of `lm_head`: log-probabilities of chosen tokens without a [T, V] or [N, V] tensor.

In: hidden states, from inside the model's own forward. Out: log-probability and entropy of trained tokens (the
learner), or logits of chosen positions (the engine), always in float32 or better: logits in bfloat16 have steps
of 0.06, and GSPO's clip band is 0.0003 wide.

Letters: T tokens of the packed row, N chosen positions, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gspo.errors import InputError
from gspo.models.attention import Layout
from gspo.models.fused import fuse
from gspo.models.linear import Collect, transposed_product
from gspo.models.native import Kernels

# Columns of the largest block of logits that ever exists. Its rows are so many that it stays in the cache, in float32; or
# twice as many where each block of the weight is re-ordered for its product.
_COLUMNS, _ROWS, _ROWS_REORDERED = 1024, 512, 1024


class PolicyHead(nn.Linear):
    """A language-model head with the Parameters, and the parameter names, of the layer it replaces.

    Unarmed it is that layer. Armed (see `trained_logprobs`, `next_logits`) it computes only what was asked for.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight = layer.weight
        self.bias = layer.bias
        self.formulas = Formulas()
        self.collect: Collect | None = None
        self._job: Callable[[PolicyHead, Tensor], Tensor] | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) if self._job is None else self._job(self, hidden)

    def factor(self) -> Tensor:
        """[V, D] the weight as it is multiplied with: a float32 copy on a CPU in bfloat16, else the weight itself."""
        return self.weight.detach().to(_products(self.weight).factor)

    @contextmanager
    def armed(self, job: Callable[[PolicyHead, Tensor], Tensor]) -> Iterator[None]:
        self._job = job
        try:
            yield
        finally:
            self._job = None


def install_head(model: Any) -> PolicyHead:
    """Put a `PolicyHead` in the place of the model's output layer; state dict, tying and saving are unchanged.

    Raises:
        InputError: the output layer is not a plain linear layer.
    """
    layer = model.get_output_embeddings()
    if isinstance(layer, PolicyHead):
        return layer
    if type(layer) is not nn.Linear:
        raise InputError(
            f"{type(model).__name__}: its output layer is {type(layer).__name__}, not a plain linear layer: use another model"
        )
    head = PolicyHead(layer)
    model.set_output_embeddings(head)
    return head


def trained_logprobs(
    model: Any,
    *,
    tokens_T: Tensor,
    position_T: Tensor,
    layout: Layout,
    source_N: Tensor,
    target_N: Tensor,
    temperature: float,
    values: Callable[[Tensor], Tensor] | None = None,
    kernels: Kernels | None = None,
) -> tuple[Tensor, ...]:
    """Log-probability and entropy [N], float32 (float64 in a float64 model), of `target_N` at temperature `temperature`.

    `source_N` indexes T: the position whose hidden state predicts the target. All results carry gradients.
    `values`: of hidden states [N, D], numbers [N], which are the third result: another head on the same forward.
    `kernels` multiply if the head's weight suits them.
    """
    softmax = partial(Softmax, temperature, kernels=kernels)
    job = partial(_score, source_N=source_N, target_N=target_N, softmax=softmax, values=values)
    return tuple(run_head(model, job, tokens_T=tokens_T, position_T=position_T, layout=layout))


def next_logits(
    model: Any,
    *,
    tokens_T: Tensor,
    position_T: Tensor,
    layout: Layout,
    source_N: Tensor,
    factor_VD: Tensor | None = None,
    kernels: Kernels | None = None,
) -> Tensor:
    """Logits [N, V] at the positions `source_N`, float32 (float64 in a float64 model), without gradients.

    `factor_VD`: the head's `factor()`, if the caller keeps one for several calls with the same weights. `kernels` are
    used if the head's weight suits them, and then no factor is needed.
    """
    with torch.no_grad():
        job = partial(predict, source_N=source_N, factor_VD=factor_VD, kernels=kernels)
        return run_head(model, job, tokens_T=tokens_T, position_T=position_T, layout=layout)


def run_head(
    model: Any, job: Callable[[Any, Tensor], Tensor], *, tokens_T: Tensor, position_T: Tensor, layout: Layout
) -> Tensor:
    """What `job` makes of the hidden states [1, T, D] of one packed row, in the place of the model's armed head."""
    head = model.get_output_embeddings()
    assert hasattr(head, "armed"), "install_head comes first"
    with head.armed(job):
        out = model(
            input_ids=tokens_T[None], position_ids=position_T[None], attention_mask=None, use_cache=False, layout=layout
        )
    logits: Tensor = out.logits
    return logits


def _score(
    head: PolicyHead,
    hidden: Tensor,
    *,
    source_N: Tensor,
    target_N: Tensor,
    softmax: Callable[..., Softmax],
    values: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    hidden_ND = hidden[0].index_select(0, source_N)
    collect = head.collect if head.weight.requires_grad and hidden_ND.requires_grad else None
    weight = head.weight if collect is None else head.weight.detach()
    results = _Logprob.apply(hidden_ND, weight, head.bias, target_N, softmax(formulas=head.formulas, collect=collect))  # type: ignore[no-untyped-call]
    return torch.stack(results if values is None else (*results, values(hidden_ND)))


def predict(
    head: PolicyHead, hidden: Tensor, *, source_N: Tensor, factor_VD: Tensor | None, kernels: Kernels | None
) -> Tensor:
    """`next_logits` of hidden states [1, T, D]."""
    products = _products(head.weight, kernels)
    weight = head.weight.to(products.factor) if factor_VD is None else factor_VD
    logits_NV = products.multiply(hidden[0].index_select(0, source_N).to(products.factor), weight)
    return logits_NV if head.bias is None else logits_NV.add_(head.bias)


# ------------------------------------------------------------------------------ products


@dataclass(frozen=True)
class _Products:
    """How matrices are multiplied, so that the result is float32 (float64) and as exact as its factors deserve."""

    factor: torch.dtype
    """What hidden states and weights are converted to first; exact."""
    multiply: Callable[[Tensor, Tensor], Tensor]
    """The first with the second, transposed."""
    gradient: torch.dtype
    """What the factors of a gradient are converted to: as precise as the gradient that comes of them."""
    reorders: bool = True
    """Whether the weight is re-ordered for each product."""


def _multiply_on_cpu(a: Tensor, b: Tensor) -> Tensor:
    """float32 matrices that hold bfloat16 numbers, multiplied by the processor's bfloat16 unit, which adds up in
    float32; unlike a bfloat16 product, which is faster, the result stays float32."""
    setting = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        return torch.mm(a, b.T)
    finally:
        setting.fp32_precision = before


def _multiply_on_cuda(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a.bfloat16(), b.bfloat16().T, out_dtype=torch.float32)


_BFLOAT16_PRODUCTS = {
    "cpu": _Products(torch.float32, _multiply_on_cpu, torch.bfloat16),
    "cuda": _Products(torch.bfloat16, _multiply_on_cuda, torch.bfloat16),
}


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b.T)


def _products(weight: Tensor, kernels: Kernels | None = None) -> _Products:
    if kernels is not None and kernels.multiplies(weight):
        return _Products(torch.bfloat16, partial(kernels.product, wide=True), torch.bfloat16, False)
    plain = _Products(_wide(weight.dtype), _multiply, _wide(weight.dtype))
    return _BFLOAT16_PRODUCTS.get(weight.device.type, plain) if weight.dtype == torch.bfloat16 else plain


def _columns(weight: Tensor, bias: Tensor | None, factor: torch.dtype) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Blocks of the vocabulary: place, weight [block, D] as a factor, and bias [block]."""
    for start in range(0, len(weight), _COLUMNS):
        columns = slice(start, min(start + _COLUMNS, len(weight)))
        yield columns, weight[columns].to(factor), None if bias is None else bias[columns].to(_wide(bias.dtype))


def _rows(count: int, products: _Products) -> Iterator[slice]:
    most = _ROWS_REORDERED if products.reorders else _ROWS
    for start in range(0, count, most):
        yield slice(start, min(start + most, count))


# ------------------------------------------------------------------------------ log-probability and entropy


def _absorb(z: Tensor, m_N: Tensor, s_N: Tensor, d_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A block more in the running maximum m, s = sum exp(z - m) and d = sum exp(z - m) (z - m)."""
    m = torch.maximum(m_N, z.amax(1))
    shift = m_N - m
    z = z - m[:, None]
    e = torch.exp(z)
    return m, shift.exp() * s_N + e.sum(1), shift.exp() * (d_N + shift * s_N) + (e * z).sum(1)


def _slope(logp: Tensor, by_logprob: Tensor, by_entropy: Tensor | None, entropy: Tensor) -> Tensor:
    """Gradient at scaled logits but for the target's own term: -p by_logprob - p (log p + entropy) by_entropy."""
    if by_entropy is None:
        return torch.exp(logp) * -by_logprob
    return torch.exp(logp) * (-by_logprob - (logp + entropy) * by_entropy)


def _block_gradient(
    z: Tensor,
    logsumexp_N: Tensor,
    by_logprob_N: Tensor,
    by_entropy_N: Tensor | None,
    entropy_N: Tensor,
    *,
    dtype: torch.dtype,
) -> Tensor:
    by_entropy = None if by_entropy_N is None else by_entropy_N[:, None]
    return _slope(z - logsumexp_N[:, None], by_logprob_N[:, None], by_entropy, entropy_N[:, None]).to(dtype)


def _accumulate(total: Tensor, part: Tensor) -> None:
    # In pieces whose wide copy stays in the cache.
    for t, p in zip(torch.split(total, 2**17), torch.split(part, 2**17), strict=True):
        t.add_(p)


def _add(total: Tensor, part: Tensor) -> None:
    total.add_(part)


@dataclass(frozen=True)
class Formulas:
    """What is done to each number of a block of logits, or of a gradient, as it is or compiled to one pass."""

    absorb: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] = _absorb
    gradient: Callable[..., Tensor] = _block_gradient
    accumulate: Callable[[Tensor, Tensor], None] = _accumulate
    """Add the second to the first, which is wider; both flat."""


@dataclass(frozen=True)
class Softmax:
    """How logits become probabilities: divided by the temperature, and by which formulas; and where a gradient goes."""

    temperature: float
    formulas: Formulas = Formulas()
    collect: Collect | None = None
    """As `PolicyHead.collect`."""
    kernels: Kernels | None = None


def compiled() -> Formulas:
    """Each formula as one pass over memory; made when it is first called."""
    return Formulas(fuse(_absorb), fuse(_block_gradient), fuse(_add))


class _Logprob(torch.autograd.Function):
    """log p(target) and the entropy of p = softmax(logits / temperature), with logits made block by block, twice.

    Forward keeps what `_absorb` adds up, so that log-sum-exp is m + log s and the entropy is log s - d / s. Backward
    makes the blocks again: d log p_t / dz_j = [j = t] - p_j,  and  d entropy / dz_j = -p_j (log p_j + entropy).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        softmax: Softmax,
    ) -> tuple[Tensor, Tensor]:
        products, wide = _products(weight_VD, softmax.kernels), _wide(weight_VD.dtype)
        product, h = products.multiply, hidden_ND.to(products.factor)
        # Not -inf: the first block would then meet 0 * inf.
        m_N = torch.full((len(h),), torch.finfo(wide).min / 4, dtype=wide, device=h.device)
        s_N, d_N, z_target_N = torch.zeros_like(m_N), torch.zeros_like(m_N), torch.zeros_like(m_N)
        for columns, weight, bias in _columns(weight_VD, bias_V, products.factor):
            for rows in _rows(len(h), products):
                z = _scaled(product(h[rows], weight), bias, softmax.temperature)
                at, place = _targets(target_N, rows, columns)
                z_target_N[rows.start + at] = z[at, place]
                m_N[rows], s_N[rows], d_N[rows] = softmax.formulas.absorb(z, m_N[rows], s_N[rows], d_N[rows])
        log_s_N = s_N.log()
        logsumexp_N, entropy_N = m_N + log_s_N, log_s_N - d_N / s_N
        logprob_N = z_target_N - logsumexp_N
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, target_N, logsumexp_N, entropy_N, logprob_N)
        ctx.softmax = softmax
        ctx.set_materialize_grads(False)
        return logprob_N, entropy_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprob_N: Tensor | None, grad_entropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, target_N, logsumexp_N, entropy_N, logprob_N = ctx.saved_tensors
        softmax: Softmax = ctx.softmax
        products, wide = _products(weight_VD, softmax.kernels), _wide(weight_VD.dtype)
        product, h = products.multiply, hidden_ND.to(products.factor)
        by_logprob_N = torch.zeros_like(entropy_N) if grad_logprob_N is None else grad_logprob_N / softmax.temperature
        by_entropy_N = None if grad_entropy_N is None else grad_entropy_N / softmax.temperature
        by_target_N = _slope(logprob_N, by_logprob_N, by_entropy_N, entropy_N) + by_logprob_N
        grad_h, h_factor = torch.zeros_like(h, dtype=wide), hidden_ND.to(products.gradient)
        grad_weight = torch.empty_like(weight_VD) if ctx.needs_input_grad[1] else None
        grad_bias = torch.empty_like(bias_V) if ctx.needs_input_grad[2] else None
        for columns, weight, bias in _columns(weight_VD, bias_V, products.factor):
            by_weight, by_bias = _Sum(), _Sum()
            for rows in _rows(len(h), products):
                z = _scaled(product(h[rows], weight), bias, softmax.temperature)
                by_entropy = None if by_entropy_N is None else by_entropy_N[rows]
                grad = softmax.formulas.gradient(
                    z, logsumexp_N[rows], by_logprob_N[rows], by_entropy, entropy_N[rows], dtype=products.gradient
                )
                at, place = _targets(target_N, rows, columns)
                grad[at, place] = by_target_N[rows.start + at].to(grad.dtype)
                grad_h[rows] += torch.mm(grad, weight_VD[columns].to(products.gradient))
                if softmax.collect is not None:
                    softmax.collect(grad, h_factor[rows], columns)
                elif grad_weight is not None:
                    by_weight.add(transposed_product(grad, h_factor[rows]))
                if grad_bias is not None:
                    by_bias.add(grad.sum(0, dtype=wide))
            if grad_weight is not None:
                grad_weight[columns] = by_weight.total
            if grad_bias is not None:
                grad_bias[columns] = by_bias.total
        return grad_h.to(hidden_ND.dtype), grad_weight, grad_bias, None, None


class _Sum:
    """Parts of one gradient, added up in float32 or better if there are several."""

    def __init__(self) -> None:
        self.total: Tensor | float = 0.0

    def add(self, part: Tensor) -> None:
        self.total = part if isinstance(self.total, float) else self.total.to(_wide(part.dtype)).add_(part)


def _scaled(z: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    if bias is not None:
        z.add_(bias)
    return z if temperature == 1 else z.div_(temperature)


def _targets(target_N: Tensor, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
    """Which of `rows` (counted from its start) have their target in this block of the vocabulary, and where."""
    place = target_N[rows] - columns.start
    at = ((place >= 0) & (place < columns.stop - columns.start)).nonzero()[:, 0]
    return at, place[at]

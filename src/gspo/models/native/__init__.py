"""Kernels of decoding and of training: C++ that this machine's compiler makes, once, for its own processor.

In: bfloat16 tensors on a CPU with AMX tiles. Out: what torch computes from them, rounded at the same places. `install`
asks for them; the engine's cache, linear layers and decoder call them, and in training `attention`, `formulas`, `heads`
and `masters`. Where there are none, torch does the work.

Letters: T tokens of a step, N outputs and K inputs of a layer, H heads, D head size.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_SOURCES = [Path(__file__).with_name(name) for name in ("kernels.cpp", "formulas.cpp", "numbers.h")]
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-mamx-tile", "-mamx-bf16", "-fPIC", "-shared", "-fopenmp")
_LANES, _PAIRED = 16, 32
_SCORES = 2**16
"""Of a row, at most."""
_SECONDS = 120
"""That the compiler may take; some three are usual."""


class UnavailableError(Exception):
    """This machine cannot make the kernels, or run them; says why."""


@dataclass(frozen=True)
class Places:
    """One bucket of the cache in a step: its rows, in the order of their prompts' slots."""

    first_G: np.ndarray
    """[slots + 1] int64: of each slot its first row, in that order."""
    place_R: np.ndarray
    """Where a row's own keys lie, ..."""
    row_R: np.ndarray
    """... which row of the step it is, ..."""
    written_R: np.ndarray
    """... and how many of its own keys were stored before."""
    tokens_G: np.ndarray
    """Tokens of each slot's prompt."""


class _Step(ctypes.Structure):
    """`Step` of kernels.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v")),
        *((f"{name}_{axis}", ctypes.c_long) for name in ("q", "k", "v") for axis in ("row", "head")),
        *((name, ctypes.c_void_p) for name in ("prompt_k", "prompt_v", "own_k", "own_v", "out")),
        *((name, ctypes.c_void_p) for name in ("first", "place", "row", "written", "tokens")),
        *((name, ctypes.c_long) for name in ("slots", "heads", "key_heads", "size", "prompt_room", "own_room")),
        ("scaling", ctypes.c_float),
    ]


class Kernels:
    """What kernels.cpp has, on tensors. Tensors are bfloat16 on a CPU, without gaps along their last axis."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_long
        self._pack, self._product = library.gspo_pack, library.gspo_product
        self._pack.argtypes = [pointer, number, number, number, pointer]
        self._product.argtypes = [pointer, pointer, pointer, number, ctypes.c_int, pointer]
        self._weigh = library.gspo_weigh
        self._weigh.argtypes = [pointer, number, pointer, number, pointer, ctypes.c_int, pointer]
        self._share = library.gspo_share
        self._share.argtypes = [pointer, pointer, pointer]
        self._attend, self._norm = library.gspo_attend, library.gspo_norm
        self._attend.argtypes = [pointer]
        self._norm.argtypes = [pointer, pointer, pointer, pointer, ctypes.c_float, pointer, pointer, pointer]
        self._norm_backward = library.gspo_norm_backward
        self._norm_backward.argtypes = [pointer] * 9
        self._part, self._part_backward = library.gspo_part, library.gspo_part_backward
        self._part.argtypes = [pointer, pointer, pointer, ctypes.c_float, pointer, pointer, pointer, pointer]
        self._part_backward.argtypes = [pointer] * 5 + [ctypes.c_float, pointer, pointer]
        self._absorb, self._slope = library.gspo_absorb, library.gspo_slope
        self._absorb.argtypes = [pointer] * 4 + [number, number]
        self._slope.argtypes = [pointer] * 6 + [number, number]
        self._rotate, self._gate = library.gspo_rotate, library.gspo_gate
        self._rotate.argtypes = [pointer, number, pointer, pointer, number, number, number]
        self._gate.argtypes = [pointer, pointer, number, pointer, number, number]
        self._regate = library.gspo_regate
        self._regate.argtypes = [pointer, pointer, pointer, pointer, pointer, number]
        self._sample = library.gspo_sample
        self._sample.argtypes = [pointer, pointer, pointer, pointer, number, number]

    @staticmethod
    def multiplies(weight: Tensor) -> bool:
        """Whether `product` takes this weight."""
        return (
            weight.device.type == "cpu"
            and weight.dtype == torch.bfloat16
            and weight.is_contiguous()
            and weight.shape[0] % _LANES == 0
            and weight.shape[1] % _PAIRED == 0
        )

    def product(self, x: Tensor, *weights: Tensor, wide: bool = False) -> Tensor:
        """x [T, K] times each of `weights` [N, K], transposed: [T, all N], side by side; in float32 if `wide`.

        Made for the few tokens of a step: each weight is read from memory once, as it lies.
        """
        tokens, inputs = x.shape
        packed = x.new_empty(-(-tokens // _LANES) * _LANES * inputs)
        self._pack(x.data_ptr(), x.stride(0), tokens, inputs, packed.data_ptr())
        outputs = [weight.shape[0] for weight in weights]  # not len(), which takes a microsecond
        width = sum(outputs)
        y = x.new_empty(tokens, width, dtype=torch.float32 if wide else None)
        at, size = y.data_ptr(), y.element_size()
        for weight, count in zip(weights, outputs, strict=True):
            shape = (ctypes.c_long * 3)(tokens, count, inputs)
            self._product(packed.data_ptr(), weight.data_ptr(), at, width, wide, shape)
            at += count * size
        return y

    @staticmethod
    def weighs(by_output: Tensor, inputs: Tensor, total: Tensor) -> bool:
        """Whether `weigh` takes these."""
        return (
            _is_native(by_output, inputs)
            and all(x.stride(1) == 1 for x in (by_output, inputs))
            and total.dtype == torch.float32
            and total.is_contiguous()
            and all(size % _PAIRED == 0 for size in total.shape)
        )

    def weigh(self, by_output: Tensor, inputs: Tensor, total: Tensor, *, fresh: bool) -> None:
        """Add the transpose of `by_output` [T, M] times `inputs` [T, N] to `total` [M, N], which holds nothing if `fresh`."""
        shape = (ctypes.c_long * 3)(len(inputs), *total.shape)
        at = (by_output.data_ptr(), by_output.stride(0), inputs.data_ptr(), inputs.stride(0))
        self._weigh(*at, total.data_ptr(), fresh, shape)

    @staticmethod
    def shares(score: Tensor) -> bool:
        """Whether `share` takes these."""
        whole = score.is_contiguous() and score.shape[-1] % _LANES == 0 and score.shape[-1] <= _SCORES
        return _is_native(score) and whole

    def share(self, score: Tensor, mask: Tensor) -> None:
        """Softmax over the keys of score [M, R, C, K] with mask [S, C, K], 0 or -inf, added, in place; M a multiple of S,
        and matrix i with mask i modulo S. Where all keys are masked, the result is 0."""
        shape = (ctypes.c_long * 5)(*score.shape, len(mask))
        self._share(score.data_ptr(), mask.data_ptr(), shape)

    def norm(self, x: Tensor, weight: Tensor, epsilon: float, more: Tensor | None = None) -> Tensor:
        """x / rms(x) * weight [T, K] of x + `more`, which is written into x."""
        y, shape = torch.empty_like(x), (ctypes.c_long * 2)(*x.shape)
        at, plus = x.data_ptr(), None if more is None else more.data_ptr()
        self._norm(at, plus, at, weight.data_ptr(), epsilon, y.data_ptr(), None, shape)
        return y

    def norm_of_sum(
        self, x: Tensor, more: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x + more [..., K], or x itself; its norm; and 1 / rms [..., 1] in float32."""
        y, total = torch.empty_like(x), x if more is None else torch.empty_like(x)
        scale = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        plus = None if more is None else more.data_ptr()
        at = (x.data_ptr(), plus, total.data_ptr(), weight.data_ptr())
        self._norm(*at, epsilon, y.data_ptr(), scale.data_ptr(), (ctypes.c_long * 2)(scale.numel(), x.shape[-1]))
        return total, y, scale

    def norm_backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, beside: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Gradients of x, which also went on `beside` the norm (unless None), and of the weight, of that at the norm of x."""
        by_x, by_weight = torch.empty_like(x), torch.empty_like(weight)
        threads = torch.get_num_threads()
        room = scale.new_empty(threads * len(weight))
        plus = None if beside is None else beside.data_ptr()
        at = (grad.data_ptr(), x.data_ptr(), weight.data_ptr(), scale.data_ptr(), plus, by_x.data_ptr())
        shape = (ctypes.c_long * 3)(scale.numel(), len(weight), threads)
        self._norm_backward(*at, by_weight.data_ptr(), room.data_ptr(), shape)
        return by_x, by_weight

    @staticmethod
    def suits(*tensors: Tensor) -> bool:
        """Whether the formulas take these: without gaps, in whole vectors, and not to be differentiated by autograd."""
        watched = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        whole = all(x.is_contiguous() and x.shape[-1] % _LANES == 0 for x in tensors)
        return whole and not watched and _is_native(*tensors)

    @staticmethod
    def turns(rows: Tensor, cos: Tensor, sin: Tensor) -> bool:
        """Whether `part` and `part_backward` take these."""
        return Kernels.suits(rows, cos, sin) and cos.shape[-1] % _PAIRED == 0

    def part(
        self, rows: Tensor, cos: Tensor, sin: Tensor, key_heads: int, scaling: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rows [T, (H + K + K) D] -> queries [T, H, D], turned by cos and sin [T, D] and scaled, keys, turned, and values."""
        tokens, size = cos.shape
        heads = rows.shape[1] // size - 2 * key_heads
        q, k, v = (rows.new_empty(tokens, count, size) for count in (heads, key_heads, key_heads))
        at = (rows.data_ptr(), cos.data_ptr(), sin.data_ptr())
        shape = (ctypes.c_long * 4)(tokens, heads, key_heads, size)
        self._part(*at, scaling, q.data_ptr(), k.data_ptr(), v.data_ptr(), shape)
        return q, k, v

    def part_backward(self, grads: tuple[Tensor, Tensor, Tensor], cos: Tensor, sin: Tensor, scaling: float) -> Tensor:
        """The gradient [T, (H + K + K) D] at the rows of `part`, of those at its queries, keys and values."""
        (tokens, heads, size), key_heads = grads[0].shape, grads[1].shape[1]
        rows = grads[0].new_empty(tokens, (heads + 2 * key_heads) * size)
        at = (x.data_ptr() for x in (*grads, cos, sin))
        self._part_backward(*at, scaling, rows.data_ptr(), (ctypes.c_long * 4)(tokens, heads, key_heads, size))
        return rows

    @staticmethod
    def absorbs(z: Tensor) -> bool:
        """Whether `absorb` and `slope` take this block of logits."""
        whole = z.is_contiguous() and z.shape[1] % _LANES == 0
        return z.device.type == "cpu" and z.dtype == torch.float32 and whole

    def absorb(self, z: Tensor, m_N: Tensor, s_N: Tensor, d_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A block z [N, C] more in each row's maximum, sum of e^(z - m), and of e^(z - m) (z - m)."""
        m_N, s_N, d_N = m_N.clone(), s_N.clone(), d_N.clone()
        self._absorb(z.data_ptr(), m_N.data_ptr(), s_N.data_ptr(), d_N.data_ptr(), *z.shape)
        return m_N, s_N, d_N

    def slope(self, z: Tensor, *rows: Tensor | None) -> Tensor:
        """bfloat16 [N, C]; `rows` are log-sum-exp, gradients at log-probability and (or None) entropy, and entropy; see `heads`."""
        y = torch.empty_like(z, dtype=torch.bfloat16)
        at = (None if x is None else x.data_ptr() for x in rows)
        self._slope(z.data_ptr(), *at, y.data_ptr(), *z.shape)
        return y

    def rotate(self, x: Tensor, heads: int, cos: Tensor, sin: Tensor) -> None:
        """Turn the first `heads` heads of each row of x [T, >= heads D] by cos and sin [T, D], in place."""
        self._rotate(x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), x.shape[0], heads, cos.shape[1])

    def gate(self, x: Tensor) -> Tensor:
        """silu(gate) up [T, K] of x [T, gate | up]."""
        gate, up = x.chunk(2, 1)
        return self.gated(gate, up)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) up [..., K]; of matrices, the rows may lie apart, by as much in both."""
        y, width = gate.new_empty(gate.shape), gate.shape[-1]
        stride = gate.stride(-2) if gate.dim() > 1 else width
        self._gate(gate.data_ptr(), up.data_ptr(), stride, y.data_ptr(), y.numel() // width, width)
        return y

    def regate(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of y = silu(gate) up and the gradient at y: y, in the memory of that gradient, and the gradients of gate and up."""
        by_gate, by_up = torch.empty_like(gate), torch.empty_like(up)
        at = (x.data_ptr() for x in (grad, gate, up, by_gate, by_up))
        self._regate(*at, grad.numel())
        return grad, by_gate, by_up

    @staticmethod
    def draws(logits_BV: Tensor) -> bool:
        """Whether `sample` takes these."""
        return logits_BV.dtype == torch.float32 and logits_BV.device.type == "cpu" and logits_BV.is_contiguous()

    def sample(self, logits_BV: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
        """A token of each row (int64) of logits in float32, and its log-probability (float64); see `engines.sampler`."""
        token_B, logprob_B = torch.empty_like(uniform_B, dtype=torch.int64), torch.empty_like(uniform_B)
        at = (x.data_ptr() for x in (logits_BV, uniform_B, token_B, logprob_B))
        self._sample(*at, *logits_BV.shape)
        return token_B, logprob_B

    @staticmethod
    def attends(q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether `attend` takes these, [T, H, D] and twice [T, key heads, D]."""
        size = q.shape[2]
        return (
            q.dtype == torch.bfloat16
            and q.device.type == "cpu"
            and size % _PAIRED == 0
            and v.shape[2] == size
            and all(x.stride(2) == 1 for x in (q, k, v))
        )

    def attend(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        prompt: tuple[Tensor, Tensor],
        own: tuple[Tensor, Tensor],
        places: Places,
        *,
        scaling: float,
        out: Tensor,
    ) -> None:
        """Store the new keys and values of a bucket's rows, and attend to them, to those before, and to the prompts.

        `qkv` as in `attends`; `prompt` and `own`: keys and values [places, key heads, tokens, D]. Writes the bucket's
        rows of `out` [T, H, D].
        """
        q, k, _ = qkv
        arrays = (places.first_G, places.place_R, places.row_R, places.written_R, places.tokens_G)
        step = _Step(
            *(x.data_ptr() for x in qkv),
            *(stride for x in qkv for stride in (x.stride(0), x.stride(1))),
            *(x.data_ptr() for x in (*prompt, *own, out)),
            *(array.ctypes.data for array in arrays),
            len(places.tokens_G),
            q.shape[1],
            k.shape[1],
            q.shape[2],
            prompt[0].shape[2],
            own[0].shape[2],
            scaling,
        )
        self._attend(ctypes.byref(step))


def _is_native(*tensors: Tensor) -> bool:
    return all(x.device.type == "cpu" and x.dtype == torch.bfloat16 for x in tensors)


# ------------------------------------------------------------------------------ making them


@cache
def kernels() -> Kernels:
    """Compiled in some three seconds, or from the user's cache. Raises UnavailableError."""
    has = torch.cpu.get_capabilities()
    lacking = [name for name in ("amx_bf16", "avx512_bf16") if not has.get(name)]
    if lacking:
        raise UnavailableError(f"this processor has no {lacking[0]}")
    try:
        library = ctypes.CDLL(str(_built()))
    except OSError as error:
        raise UnavailableError(str(error)) from error
    if library.gspo_prepare() != 0:
        raise UnavailableError("the system does not let this process use AMX tiles")
    return Kernels(library)


def _built() -> Path:
    compiler = next(
        (found for name in (os.environ.get("CXX"), "g++", "clang++") if name and (found := shutil.which(name))), None
    )
    if compiler is None:
        raise UnavailableError("no C++ compiler")
    command = [compiler, *_FLAGS, *(str(source) for source in _SOURCES if source.suffix == ".cpp"), *_openmp()]
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    key = hashlib.sha256(
        "\n".join([*(source.read_text() for source in _SOURCES), *command, version, _processor()]).encode()
    ).hexdigest()[:24]
    target = _folder() / f"kernels-{key}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / "kernels.so"
            try:
                done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, timeout=_SECONDS)
            except subprocess.TimeoutExpired as error:
                raise UnavailableError(f"{compiler} took over {_SECONDS} seconds") from error
            if done.returncode:
                raise UnavailableError(f"{compiler}: {(done.stderr.strip() or 'failed').splitlines()[0]}")
            made.replace(target)  # whole or not at all, whoever else makes it
    return target


def _folder() -> Path:
    """Where compiled kernels are kept: the user's cache, or, if nothing can be written there, the temporary folder."""
    for base in (os.environ.get("XDG_CACHE_HOME") or "~/.cache", tempfile.gettempdir()):
        folder = Path(base).expanduser() / "gspo"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError):
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise UnavailableError("no folder that compiled kernels could be kept in")


def _openmp() -> list[str]:
    """The OpenMP library that torch has loaded, to be linked before the compiler's own: one pool of threads, not two."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    loaded = {line.split(maxsplit=5)[5] for line in lines if "libgomp" in line}
    return ["-Wl,--as-needed", *sorted(loaded)] if len(loaded) == 1 else []


def _processor() -> str:
    """What `-march=native` means here: a home folder may be shared by unlike machines."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line for line in lines if line.startswith("flags")), "")

// Sixteen numbers at once: of bfloat16 in memory, of float32 in registers.

#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <new>

namespace {

using bf16 = uint16_t;
constexpr long LANES = 16;

inline __m512 widened(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline __m256i narrowed(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
inline __m512 rounded(__m512 x) { return widened(narrowed(x)); }
inline __m512 load(const bf16* x) { return widened(_mm256_loadu_si256((const __m256i*)x)); }
inline void store(bf16* y, __m512 x) { _mm256_storeu_si256((__m256i*)y, narrowed(x)); }

// e^x for x <= 0, to about 2e-7 of it: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2].
inline __m512 exponential(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-87.0f), x);  // in this order: what is not a number stays so
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

// From the side on which e^x does not overflow: e^min(x, 0) / (1 + e^-|x|).
inline __m512 sigmoid(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f), e = exponential(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(x)));
    const __mmask16 below = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    return _mm512_div_ps(_mm512_mask_mov_ps(one, below, e), _mm512_add_ps(one, e));
}

}  // namespace

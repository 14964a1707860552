// Elementwise formulas and sums along a row, each in one pass over bfloat16 tensors. `native/__init__.py` compiles and
// calls them.
//
// Arithmetic is in float32, rounded where torch's compiled formulas round, so that the engine's numbers are those of the
// training pass, which both call these.
//
// Letters: T tokens, K width (a multiple of 16), H query heads, D head size (a multiple of 32).

#include "numbers.h"

#include <omp.h>

namespace {

inline __m512 turned(__m512 a, __m512 b, __m512 c, __m512 s) {
    return _mm512_sub_ps(rounded(_mm512_mul_ps(a, c)), rounded(_mm512_mul_ps(b, s)));
}

// A head's rotary positions, scaled: (a, b) -> (a cos - b sin, b cos + a sin). y may be x.
inline void turn(const bf16* x, const bf16* c, const bf16* s, float scaling, bf16* y, long half) {
    const __m512 scale = _mm512_set1_ps(scaling), none = _mm512_setzero_ps();
    for (long d = 0; d < half; d += LANES) {
        const __m512 a = load(x + d), b = load(x + half + d);
        store(y + d, _mm512_mul_ps(scale, turned(a, b, load(c + d), load(s + d))));
        store(y + half + d, _mm512_mul_ps(scale, turned(b, a, load(c + half + d), _mm512_sub_ps(none, load(s + half + d)))));
    }
}

// The gradient of `turn`: (a, b) -> scaling (a cos + b sin, b cos - a sin).
inline void turn_back(const bf16* x, const bf16* c, const bf16* s, float scaling, bf16* y, long half) {
    const __m512 scale = _mm512_set1_ps(scaling);
    for (long d = 0; d < half; d += LANES) {
        const __m512 a = _mm512_mul_ps(scale, load(x + d)), b = _mm512_mul_ps(scale, load(x + half + d));
        store(y + d, _mm512_fmadd_ps(a, load(c + d), _mm512_mul_ps(b, load(s + half + d))));
        store(y + half + d, _mm512_fmsub_ps(b, load(c + half + d), _mm512_mul_ps(a, load(s + d))));
    }
}

// Softmax of a row of K scores (a multiple of 16) with the mask (0 or -inf) added, in place. What is masked becomes 0.
inline void share_out(bf16* score, const bf16* mask, long K) {
    __m512 largest = _mm512_set1_ps(-3.0e38f), sum = _mm512_setzero_ps();
    for (long k = 0; k < K; k += LANES) largest = _mm512_max_ps(largest, _mm512_add_ps(load(score + k), load(mask + k)));
    largest = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
    alignas(64) static thread_local float part[1 << 16];
    float* e = part;
    for (long k = 0; k < K; k += LANES) {
        const __m512 s = _mm512_add_ps(load(score + k), load(mask + k));
        const __mmask16 seen = _mm512_cmp_ps_mask(s, _mm512_set1_ps(-3.0e38f), _CMP_NLE_UQ);
        const __m512 y = _mm512_maskz_mov_ps(seen, exponential(_mm512_sub_ps(s, largest)));
        _mm512_store_ps(e + k, y);
        sum = _mm512_add_ps(sum, y);
    }
    const float total = _mm512_reduce_add_ps(sum);
    const __m512 scale = _mm512_set1_ps(total == 0.0f ? 0.0f : 1.0f / total);  // not if it is no number
    for (long k = 0; k < K; k += LANES) store(score + k, _mm512_mul_ps(_mm512_load_ps(e + k), scale));
}

}  // namespace

extern "C" {

// total = x + more, if there is more, which total may lie in;  y = total / rms(total) * weight;  scale [T] = 1 / rms, if wanted.
void gspo_norm(const bf16* x, const bf16* more, bf16* total, const bf16* weight, float epsilon, bf16* y, float* scale, const long* TK) {
    const long T = TK[0], K = TK[1];
#pragma omp parallel for schedule(static) if (T > 256)
    for (long t = 0; t < T; ++t) {
        const bf16* at = x + t * K;
        __m512 sum = _mm512_setzero_ps();
        for (long k = 0; k < K; k += LANES) {
            __m512 v = load(at + k);
            if (more) {
                v = rounded(_mm512_add_ps(v, load(more + t * K + k)));
                store(total + t * K + k, v);
            }
            sum = _mm512_fmadd_ps(v, v, sum);
        }
        if (more) at = total + t * K;
        const float one = 1.0f / std::sqrt(_mm512_reduce_add_ps(sum) / K + epsilon);
        if (scale) scale[t] = one;
        for (long k = 0; k < K; k += LANES)
            store(y + t * K + k, _mm512_mul_ps(_mm512_mul_ps(load(at + k), _mm512_set1_ps(one)), load(weight + k)));
    }
}

// With n = x scale and g = grad weight:  by_x = scale (g - n mean(g n)), plus what went `beside` the norm, if anything did;
// by_weight [K] = sum over tokens of grad n.  `room`: K floats for each of N threads.
void gspo_norm_backward(const bf16* grad, const bf16* x, const bf16* weight, const float* scale, const bf16* beside, bf16* by_x,
                        bf16* by_weight, float* room, const long* TKN) {
    const long T = TKN[0], K = TKN[1];
    int threads = 1;
#pragma omp parallel num_threads(TKN[2])
    {
        const int thread = omp_get_thread_num();
        float* sums = room + thread * K;
        std::memset(sums, 0, K * sizeof(float));
#pragma omp single
        threads = omp_get_num_threads();
#pragma omp for schedule(static)
        for (long t = 0; t < T; ++t) {
            const __m512 one = _mm512_set1_ps(scale[t]);
            __m512 sum = _mm512_setzero_ps();
            for (long k = 0; k < K; k += LANES) {
                const __m512 g = load(grad + t * K + k), n = _mm512_mul_ps(one, load(x + t * K + k));
                const __m512 gn = _mm512_mul_ps(g, n);
                _mm512_storeu_ps(sums + k, _mm512_add_ps(_mm512_loadu_ps(sums + k), gn));
                sum = _mm512_fmadd_ps(gn, load(weight + k), sum);
            }
            const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / K);
            for (long k = 0; k < K; k += LANES) {
                const __m512 g = _mm512_mul_ps(load(grad + t * K + k), load(weight + k));
                const __m512 n = _mm512_mul_ps(one, load(x + t * K + k));
                __m512 y = _mm512_mul_ps(one, _mm512_fnmadd_ps(n, mean, g));
                if (beside) y = _mm512_add_ps(y, load(beside + t * K + k));
                store(by_x + t * K + k, y);
            }
        }
    }
    for (long k = 0; k < K; k += LANES) {
        __m512 sum = _mm512_setzero_ps();
        for (int i = 0; i < threads; ++i) sum = _mm512_add_ps(sum, _mm512_loadu_ps(room + i * K + k));
        store(by_weight + k, sum);
    }
}

// Rotary positions of `heads` heads that lie side by side in x [T, stride], in place; cos and sin [T, D].
void gspo_rotate(bf16* x, long stride, const bf16* cosine, const bf16* sine, long T, long heads, long D) {
    for (long t = 0; t < T; ++t)
        for (long h = 0; h < heads; ++h) {
            bf16* at = x + t * stride + h * D;
            turn(at, cosine + t * D, sine + t * D, 1.0f, at, D / 2);
        }
}

// x [T, (H + K + K) D] -> q [T, H, D], turned and scaled, k [T, K, D], turned, and v [T, K, D]; cos and sin [T, D].
void gspo_part(const bf16* x, const bf16* cosine, const bf16* sine, float scaling, bf16* q, bf16* k, bf16* v, const long* THKD) {
    const long T = THKD[0], H = THKD[1], K = THKD[2], D = THKD[3];
#pragma omp parallel for schedule(static)
    for (long t = 0; t < T; ++t) {
        const bf16 *at = x + t * (H + 2 * K) * D, *c = cosine + t * D, *s = sine + t * D;
        for (long h = 0; h < H; ++h, at += D) turn(at, c, s, scaling, q + (t * H + h) * D, D / 2);
        for (long h = 0; h < K; ++h, at += D) turn(at, c, s, 1.0f, k + (t * K + h) * D, D / 2);
        std::memcpy(v + t * K * D, at, K * D * sizeof(bf16));
    }
}

// The gradient at x of those at q, k and v.
void gspo_part_backward(const bf16* q, const bf16* k, const bf16* v, const bf16* cosine, const bf16* sine, float scaling, bf16* x,
                        const long* THKD) {
    const long T = THKD[0], H = THKD[1], K = THKD[2], D = THKD[3];
#pragma omp parallel for schedule(static)
    for (long t = 0; t < T; ++t) {
        bf16* at = x + t * (H + 2 * K) * D;
        const bf16 *c = cosine + t * D, *s = sine + t * D;
        for (long h = 0; h < H; ++h, at += D) turn_back(q + (t * H + h) * D, c, s, scaling, at, D / 2);
        for (long h = 0; h < K; ++h, at += D) turn_back(k + (t * K + h) * D, c, s, 1.0f, at, D / 2);
        std::memcpy(at, v + t * K * D, K * D * sizeof(bf16));
    }
}

// y [T, K] = silu(gate) up; rows of gate and up are `stride` numbers apart.
void gspo_gate(const bf16* gate, const bf16* up, long stride, bf16* y, long T, long K) {
#pragma omp parallel for schedule(static) if (T > 256)
    for (long t = 0; t < T; ++t)
        for (long k = 0; k < K; k += LANES) {
            const __m512 g = load(gate + t * stride + k), u = load(up + t * stride + k);
            store(y + t * K + k, _mm512_mul_ps(_mm512_mul_ps(g, sigmoid(g)), u));
        }
}

// Of y = silu(gate) up and the gradient at y: y, which takes the gradient's place, and the gradients of gate and up.
void gspo_regate(bf16* grad, const bf16* gate, const bf16* up, bf16* by_gate, bf16* by_up, long count) {
    const __m512 one = _mm512_set1_ps(1.0f);
#pragma omp parallel for schedule(static)
    for (long i = 0; i < count; i += LANES) {
        const __m512 d = load(grad + i), g = load(gate + i), u = load(up + i), s = sigmoid(g), silu = _mm512_mul_ps(g, s);
        store(grad + i, _mm512_mul_ps(silu, u));
        store(by_up + i, _mm512_mul_ps(d, silu));
        const __m512 slope = _mm512_mul_ps(s, _mm512_fmadd_ps(g, _mm512_sub_ps(one, s), one));
        store(by_gate + i, _mm512_mul_ps(_mm512_mul_ps(d, u), slope));
    }
}

// Softmax over the last axis of score [matrices, repeats, C, K] + mask [masks, C, K], in place; matrix i goes with mask
// i modulo `masks`. K a multiple of 16, at most 65536.
void gspo_share(bf16* score, const bf16* mask, const long* shape) {
    const long matrices = shape[0], repeats = shape[1], C = shape[2], K = shape[3], masks = shape[4];
#pragma omp parallel for schedule(static) collapse(2)
    for (long i = 0; i < matrices; ++i)
        for (long row = 0; row < repeats * C; ++row)
            share_out(score + (i * repeats * C + row) * K, mask + (i % masks * C + row % C) * K, K);
}

// A block z [N, C] (float32) of logits more in each row's maximum m, s = sum e^(z - m) and d = sum e^(z - m) (z - m), in place.
void gspo_absorb(const float* z, float* m, float* s, float* d, long N, long C) {
#pragma omp parallel for schedule(static)
    for (long i = 0; i < N; ++i) {
        const float* at = z + i * C;
        __m512 largest = _mm512_set1_ps(m[i]), sum = _mm512_setzero_ps(), weighted = sum;
        for (long c = 0; c < C; c += LANES) largest = _mm512_max_ps(largest, _mm512_loadu_ps(at + c));
        const float most = _mm512_reduce_max_ps(largest);
        for (long c = 0; c < C; c += LANES) {
            const __m512 below = _mm512_sub_ps(_mm512_loadu_ps(at + c), _mm512_set1_ps(most)), e = exponential(below);
            sum = _mm512_add_ps(sum, e);
            weighted = _mm512_fmadd_ps(e, below, weighted);
        }
        const float shift = m[i] - most, shrunk = std::exp(shift);
        d[i] = shrunk * (d[i] + shift * s[i]) + _mm512_reduce_add_ps(weighted);
        s[i] = shrunk * s[i] + _mm512_reduce_add_ps(sum);
        m[i] = most;
    }
}

// Gradient at logits z [N, C] (float32), but for the target's own term: with log p = z - logsumexp,
// -p by_logprob - p (log p + entropy) by_entropy, the second term only if there is a by_entropy.
void gspo_slope(const float* z, const float* logsumexp, const float* by_logprob, const float* by_entropy, const float* entropy,
                bf16* y, long N, long C) {
#pragma omp parallel for schedule(static)
    for (long i = 0; i < N; ++i) {
        const __m512 lse = _mm512_set1_ps(logsumexp[i]), first = _mm512_set1_ps(-by_logprob[i]);
        const __m512 second = _mm512_set1_ps(by_entropy ? -by_entropy[i] : 0.0f), h = _mm512_set1_ps(entropy[i]);
        for (long c = 0; c < C; c += LANES) {
            const __m512 logp = _mm512_sub_ps(_mm512_loadu_ps(z + i * C + c), lse), p = exponential(logp);
            __m512 factor = first;
            if (by_entropy) factor = _mm512_fmadd_ps(second, _mm512_add_ps(logp, h), factor);
            store(y + i * C + c, _mm512_mul_ps(p, factor));
        }
    }
}
}

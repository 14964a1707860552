// Products of a decoding step, and gradients of weights, in bfloat16 on a processor with AMX tiles. `native/__init__.py`
// compiles and calls it.
//
// Sums are made in float32 and rounded once, as oneDNN does it. Weights and cached keys are read as they lie: with the
// weight (or the keys) as the left factor and the few tokens of a step as the right one, nothing has to be re-ordered but
// the tokens. A gradient adds up in float32 where it lies. A tile is 16 rows of 64 bytes; a right tile holds pairs of
// consecutive k, one 32-bit lane a column.
//
// Letters: T tokens, N outputs, K inputs (a multiple of 32), D head size (a multiple of 32).

#include "numbers.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <limits>

namespace {

constexpr long PAIRED = 32, TILE = LANES * PAIRED;  // TILE: numbers of bfloat16 in a tile

// 16 x 16 lanes of 32 bits, rows to columns.
inline void transpose(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

// Memory that a thread keeps from call to call.
class Room {
  public:
    template <class T> T* take(size_t count) {
        const size_t bytes = count * sizeof(T);
        if (bytes > size_) {
            ::operator delete(data_, std::align_val_t(64));
            data_ = ::operator new(bytes, std::align_val_t(64));
            size_ = bytes;
        }
        return (T*)data_;
    }
    ~Room() { ::operator delete(data_, std::align_val_t(64)); }

  private:
    void* data_ = nullptr;
    size_t size_ = 0;
};

// ------------------------------------------------------------------------------------------------ tiles

struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_a_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// All eight tiles at their full size while it lives; whoever had them before gets his own back.
class Tiles {
  public:
    Tiles() {
        static const Config full;
        _tile_storeconfig(&before_);
        _tile_loadconfig(&full);
    }
    ~Tiles() { _tile_loadconfig(&before_); }

  private:
    Config before_;
};

// Tokens as right tiles, [T / 16][K / 32] of them; absent tokens are zeros.
void pack_tokens(const bf16* x, long stride, long T, long K, bf16* packed) {
    for (long first = 0; first < T; first += LANES)
        for (long k = 0; k < K; k += PAIRED, packed += TILE) {
            __m512i r[16];
            for (long t = 0; t < LANES; ++t)
                r[t] = first + t < T ? _mm512_loadu_si512(x + (first + t) * stride + k) : _mm512_setzero_si512();
            transpose(r);
            for (long t = 0; t < LANES; ++t) _mm512_store_si512(packed + t * PAIRED, r[t]);
        }
}

// GCC does not know that tiles are loaded from memory: what was written has to be there before.
inline void settle() { asm volatile("" ::: "memory"); }

// A stored tile [outputs][tokens] to its place in y [T, stride].
template <class Out> void put(const float* tile, Out* y, long stride, long tokens) {
    __m512i r[16];
    for (int i = 0; i < 16; ++i) r[i] = _mm512_load_si512(tile + 16 * i);
    transpose(r);
    for (long t = 0; t < tokens; ++t) {
        const __m512 row = _mm512_castsi512_ps(r[t]);
        if constexpr (sizeof(Out) == 4)
            _mm512_storeu_ps(y + t * stride, row);
        else
            store(y + t * stride, row);
    }
}

struct Ahead {  // what comes next, fetched into the second-level cache while this is computed
    const char* line;
    long count;
    void some() {
        for (long i = 0; i < count; ++i, line += 64) _mm_prefetch(line, _MM_HINT_T1);
    }
};

// 16 `left` outputs of 16 `right` tokens.
template <int left, int right, class Out>
void block(const bf16* w, const bf16* packed, long K, Out* y, long stride, long tokens, Ahead& ahead) {
    settle();
    _tile_zero(0);
    if (right == 2) _tile_zero(1);
    if (left == 2) _tile_zero(2);
    if (left == 2 && right == 2) _tile_zero(3);
    const bf16* second = packed + LANES * K;
    for (long k = 0; k < K; k += PAIRED) {
        _tile_loadd(4, w + k, K * 2);
        _tile_loadd(6, packed + k * LANES, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (right == 2) {
            _tile_loadd(7, second + k * LANES, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (left == 2) {
            _tile_loadd(5, w + LANES * K + k, K * 2);
            _tile_dpbf16ps(2, 5, 6);
            if (right == 2) _tile_dpbf16ps(3, 5, 7);
        }
        ahead.some();
    }
    alignas(64) float tile[LANES * LANES];
    const long head = std::min(tokens, LANES);
    _tile_stored(0, tile, 64);
    put(tile, y, stride, head);
    if (left == 2) {
        _tile_stored(2, tile, 64);
        put(tile, y + LANES, stride, head);
    }
    if (right == 1) return;
    y += LANES * stride;
    _tile_stored(1, tile, 64);
    put(tile, y, stride, tokens - LANES);
    if (left == 1) return;
    _tile_stored(3, tile, 64);
    put(tile, y + LANES, stride, tokens - LANES);
}

template <int left, class Out>
void rows(const bf16* w, const bf16* packed, long T, long K, Out* y, long stride, bool more) {
    const long passes = (T + 2 * LANES - 1) / (2 * LANES);
    Ahead ahead{(const char*)(w + left * LANES * K), more ? std::max(1L, left * LANES / passes) : 0};
    for (long t = 0; t < T; t += 2 * LANES) {
        if (T - t > LANES)
            block<left, 2>(w, packed + t * K, K, y + t * stride, stride, std::min(T - t, 2 * LANES), ahead);
        else
            block<left, 1>(w, packed + t * K, K, y + t * stride, stride, T - t, ahead);
    }
}

template <class Out> void product(const bf16* packed, const bf16* w, Out* y, long stride, long T, long N, long K) {
    const long pairs = N / (2 * LANES);
#pragma omp parallel
    {
        Tiles tiles;
#pragma omp for schedule(static)
        for (long n = 0; n < pairs; ++n)
            rows<2>(w + 2 * LANES * n * K, packed, T, K, y + 2 * LANES * n, stride, n + 1 < pairs);
#pragma omp single
        if (N % (2 * LANES)) rows<1>(w + 2 * LANES * pairs * K, packed, T, K, y + 2 * LANES * pairs, stride, false);
    }
}

// ------------------------------------------------------------------------------------------------ attention

struct Step {  // one bucket of the cache, and the queries of its rows; all counts in tokens, strides in numbers
    const bf16 *q, *k, *v;
    long q_row, q_head, k_row, k_head, v_row, v_head;
    bf16 *prompt_k, *prompt_v;  // [slots, key heads, prompt_room, D]
    bf16 *own_k, *own_v;        // [places, key heads, own_room, D]
    bf16* out;                  // [rows, heads, D]
    const long *first;          // [slots + 1] of each slot, its first place in the order of `place`
    const long *place, *row;    // [rows] where a row's own keys lie, and where its queries do
    const long *written, *tokens;  // [rows] own keys stored before this step; [slots] of the prompt
    long slots, heads, key_heads, size, prompt_room, own_room;
    float scaling;
};

// Keys 16 by 16 against one tile of queries: `score` [keys][16]. `keys` must have whole blocks of 16.
inline void scores(const bf16* keys, long count, const bf16* query, long D, float* score) {
    settle();
    for (long c = 0; c < count; c += LANES) {
        _tile_zero(0);
        for (long d = 0; d < D; d += PAIRED) {
            _tile_loadd(4, keys + c * D + d, D * 2);
            _tile_loadd(6, query + d * LANES, 64);
            _tile_dpbf16ps(0, 4, 6);
        }
        _tile_stored(0, score + c * LANES, 64);
    }
}

// What is needed soon, into the second-level cache.
inline void expect(const bf16* x, long count) {
    for (long i = 0; i < count; i += PAIRED) _mm_prefetch((const char*)(x + i), _MM_HINT_T1);
}

// Two rows of 32 numbers, one beside the other: of columns 0 to 15, and of the others.
inline void pair(__m512i a, __m512i b, __m512i& low, __m512i& high) {
    alignas(64) static const uint16_t order[2][32] = {
        {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
        {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
    low = _mm512_permutex2var_epi16(a, _mm512_load_si512(order[0]), b);
    high = _mm512_permutex2var_epi16(a, _mm512_load_si512(order[1]), b);
}

// Values [keys, D], columns from `from` to `to`, as right tiles [keys / 32][columns / 16]: pairs of consecutive keys.
// Beyond `count` keys they are zeros.
inline void pair_values(const bf16* values, long count, long D, long from, long to, bf16* paired) {
    const __m512i zero = _mm512_setzero_si512();
    for (long c = 0; c < count; c += PAIRED, paired += (to - from) / LANES * TILE)
        for (long i = 0; i < LANES; ++i) {
            const long key = c + 2 * i;
            const bf16* at = values + key * D;
            for (long d = from; d < to; d += PAIRED) {
                const __m512i a = key < count ? _mm512_loadu_si512(at + d) : zero;
                const __m512i b = key + 1 < count ? _mm512_loadu_si512(at + D + d) : zero;
                bf16* tile = paired + (d - from) / LANES * TILE + i * PAIRED;
                __m512i low, high;
                pair(a, b, low, high);
                _mm512_store_si512(tile, low);
                _mm512_store_si512(tile + TILE, high);
            }
        }
}

// Adds weights [16, keys] (left tiles, one for 32 keys) times paired values to the tiles 0 to `tiles` - 1.
template <int tiles> inline void weigh(const bf16* weight, const bf16* paired, long keys, Ahead& keys_ahead, Ahead& values_ahead) {
    settle();
    for (long c = 0; c < keys; c += PAIRED, weight += TILE, paired += tiles * TILE) {
        keys_ahead.some();
        values_ahead.some();
        _tile_loadd(4, weight, 64);
        _tile_loadd(5, paired, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, paired + TILE, 64);
        _tile_dpbf16ps(1, 4, 6);
        if (tiles == 2) continue;
        _tile_loadd(5, paired + 2 * TILE, 64);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(6, paired + 3 * TILE, 64);
        _tile_dpbf16ps(3, 4, 6);
    }
}

// Softmax down the columns of `score` [keys][16], rounded to bfloat16 before and after, as left tiles `weight`.
// Infinitely small scores weigh nothing. Lanes without any score that is finite come out as zeros.
inline void soften(float* score, long keys, bf16* weight) {
    __m512 largest = _mm512_set1_ps(-3.0e38f), sum = _mm512_setzero_ps();
    for (long c = 0; c < keys; ++c) {
        const __m512 s = rounded(_mm512_load_ps(score + c * LANES));
        _mm512_store_ps(score + c * LANES, s);
        largest = _mm512_max_ps(largest, s);
    }
    for (long c = 0; c < keys; ++c) {
        const __m512 s = _mm512_load_ps(score + c * LANES);
        const __mmask16 seen = _mm512_cmp_ps_mask(s, _mm512_set1_ps(-3.0e38f), _CMP_NLE_UQ);
        const __m512 e = _mm512_maskz_mov_ps(seen, exponential(_mm512_sub_ps(s, largest)));
        _mm512_store_ps(score + c * LANES, e);
        sum = _mm512_add_ps(sum, e);
    }
    const __m512 part = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_max_ps(_mm512_set1_ps(1e-30f), sum));
    for (long c = 0; c < keys; c += PAIRED, weight += TILE) {
        __m512i r[16];
        for (long i = 0; i < LANES; ++i) {
            const float* at = score + (c + 2 * i) * LANES;
            const __m256i a = narrowed(_mm512_mul_ps(_mm512_load_ps(at), part));
            const __m256i b = narrowed(_mm512_mul_ps(_mm512_load_ps(at + LANES), part));
            r[i] = _mm512_or_si512(_mm512_cvtepu16_epi32(a), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
        }
        transpose(r);
        for (long i = 0; i < LANES; ++i) _mm512_store_si512(weight + i * PAIRED, r[i]);
    }
}

inline long whole(long count) { return (count + PAIRED - 1) / PAIRED * PAIRED; }

// The rows of one prompt, for one head of keys.
class Shared {
  public:
    Shared(const Step& step, long slot, long head) : s(step), slot(slot), head(head), D(step.size) {
        first = s.first[slot], count = s.first[slot + 1] - first;
        share = s.heads / s.key_heads;
        prompt = whole(s.tokens[slot]);
        expect_next();
        for (long i = first; i < first + count; ++i) longest = std::max(longest, whole(s.written[i] + 1));
    }

    void run() {
        for (long i = first; i < first + count; ++i) keep(i);
        static thread_local Room values, others, numbers, weights;
        paired = values.take<bf16>(prompt * D);
        own_paired = others.take<bf16>(longest * COLUMNS + longest * LANES + LANES * D);
        own_weight = own_paired + longest * COLUMNS;
        score = numbers.take<float>((prompt + longest + LANES) * LANES + LANES * D);
        weight = weights.take<bf16>((prompt + longest) * LANES + LANES * D);
        for (long d = 0; d < D; d += COLUMNS)
            pair_values(above(s.prompt_v), s.tokens[slot], D, d, std::min(d + COLUMNS, D), paired + prompt * d);
        for (long lane = 0; lane < count * share; lane += LANES) tile(lane);
    }

  private:
    const Step& s;
    long slot, head, D, first = 0, count = 0, share = 1, prompt = 0, longest = 0;
    static constexpr long COLUMNS = 4 * LANES;  // of values that are added up at once
    bf16 *paired = nullptr, *own_paired = nullptr, *own_weight = nullptr, *weight = nullptr;
    float* score = nullptr;

    Ahead next_keys{nullptr, 0}, next_values{nullptr, 0};

    // The keys and values of the prompt that is likely to come next: some at each step of `weigh`.
    void expect_next() {
        const bool same = head + 1 < s.key_heads;
        if (!same && slot + 1 == s.slots) return;
        const long at = same ? slot * s.key_heads + head + 1 : (slot + 1) * s.key_heads;
        const long lines = s.tokens[same ? slot : slot + 1] * D / PAIRED, tiles = (count * share + LANES - 1) / LANES;
        const long steps = prompt / PAIRED * tiles * ((D + COLUMNS - 1) / COLUMNS);
        next_keys = {(const char*)(s.prompt_k + at * s.prompt_room * D), (lines + steps - 1) / steps};
        next_values = {(const char*)(s.prompt_v + at * s.prompt_room * D), (lines + steps - 1) / steps};
    }

    bf16* above(bf16* kept) const { return kept + (slot * s.key_heads + head) * s.prompt_room * D; }
    bf16* own(bf16* kept, long i) const { return kept + (s.place[i] * s.key_heads + head) * s.own_room * D; }

    void keep(long i) const {
        std::memcpy(own(s.own_k, i) + s.written[i] * D, s.k + s.row[i] * s.k_row + head * s.k_head, D * 2);
        std::memcpy(own(s.own_v, i) + s.written[i] * D, s.v + s.row[i] * s.v_row + head * s.v_head, D * 2);
    }

    const bf16* query(long lane) const {
        return s.q + s.row[first + lane / share] * s.q_row + (head * share + lane % share) * s.q_head;
    }

    // Which of the lanes from `lane` on belong to row i.
    __mmask16 lanes_of(long i, long lane) const {
        const long from = std::max(0L, (i - first) * share - lane), to = std::min(LANES, (i - first + 1) * share - lane);
        return (__mmask16)((1 << to) - (1 << from));
    }

    void tile(long lane) {
        const long lanes = std::min(LANES, count * share - lane);
        bf16* packed = weight + (prompt + longest) * LANES;
        pack_queries(lane, lanes, packed);
        const long begin = first + lane / share, end = first + (lane + lanes - 1) / share + 1;
        expect(own(s.own_k, begin), (s.written[begin] + 1) * D);
        scores(above(s.prompt_k), prompt, packed, D, score);
        const __m512 unseen = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
        for (long c = s.tokens[slot]; c < prompt + longest; ++c) _mm512_store_ps(score + c * LANES, unseen);
        for (long i = begin; i < end; ++i) {
            if (i + 1 < end) expect(own(s.own_k, i + 1), (s.written[i + 1] + 1) * D);
            expect(own(s.own_v, i), (s.written[i] + 1) * D);
            own_scores(i, lanes_of(i, lane), packed);
        }
        soften(score, prompt + longest, weight);
        float* out = score + (prompt + longest + LANES) * LANES;
        for (long d = 0; d < D; d += COLUMNS)
            D - d > PAIRED ? mean<4>(lane, begin, end, d, out) : mean<2>(lane, begin, end, d, out);
        for (long j = 0; j < lanes; ++j) {
            bf16* y = s.out + s.row[first + (lane + j) / share] * s.heads * D + (head * share + (lane + j) % share) * D;
            for (long d = 0; d < D; d += LANES) store(y + d, _mm512_load_ps(out + j * D + d));
        }
    }

    // The weighted values of all keys, columns from d on, to `out` [16, D].
    template <int tiles> void mean(long lane, long begin, long end, long d, float* out) {
        _tile_zero(0);
        _tile_zero(1);
        if (tiles == 4) {
            _tile_zero(2);
            _tile_zero(3);
        }
        weigh<tiles>(weight, paired + prompt * d, prompt, next_keys, next_values);
        Ahead nothing{nullptr, 0};
        for (long i = begin; i < end; ++i) {
            const long seen = s.written[i] + 1;
            pair_values(own(s.own_v, i), seen, D, d, d + tiles * LANES, own_paired);
            weigh<tiles>(weight_of(lanes_of(i, lane), seen), own_paired, seen, nothing, nothing);
        }
        _tile_stored(0, out + d, D * 4);
        _tile_stored(1, out + d + LANES, D * 4);
        if (tiles == 2) return;
        _tile_stored(2, out + d + 2 * LANES, D * 4);
        _tile_stored(3, out + d + 3 * LANES, D * 4);
    }

    void pack_queries(long lane, long lanes, bf16* packed) const {
        const __m512 scaling = _mm512_set1_ps(s.scaling);
        for (long d = 0; d < D; d += PAIRED, packed += TILE) {
            __m512i r[16];
            for (long j = 0; j < LANES; ++j) {
                r[j] = _mm512_setzero_si512();
                if (j >= lanes) continue;
                const bf16* x = query(lane + j) + d;
                r[j] = (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(load(x + LANES), scaling), _mm512_mul_ps(load(x), scaling));
            }
            transpose(r);
            for (long j = 0; j < LANES; ++j) _mm512_store_si512(packed + j * PAIRED, r[j]);
        }
    }

    void own_scores(long i, __mmask16 lanes, const bf16* packed) {
        const long seen = s.written[i] + 1;
        float* part = score + (prompt + longest) * LANES;
        for (long c = 0; c < seen; c += LANES) {
            const bf16* keys = own(s.own_k, i) + c * D;
            if (c + LANES > s.own_room) {  // the room ends within a block
                bf16* spare = own_weight + longest * LANES;
                std::memcpy(spare, keys, (seen - c) * D * 2);
                keys = spare;
            }
            scores(keys, LANES, packed, D, part);
            for (long j = 0; j < std::min(LANES, seen - c); ++j)
                _mm512_mask_store_ps(score + (prompt + c + j) * LANES, lanes, _mm512_load_ps(part + j * LANES));
        }
    }

    // The weights of a row's own keys, without those of other rows' lanes.
    const bf16* weight_of(__mmask16 lanes, long seen) {
        bf16* alone = own_weight;
        for (long c = 0; c < seen; c += PAIRED)
            for (long j = 0; j < LANES; ++j) {
                const __m512i all = _mm512_load_si512(weight + (prompt + c) * LANES + j * PAIRED);
                _mm512_store_si512(alone + c * LANES + j * PAIRED, lanes >> j & 1 ? all : _mm512_setzero_si512());
            }
        return alone;
    }
};

// ------------------------------------------------------------------------------------------------ sampling

constexpr long BLOCK = 256;  // tokens whose weights are summed up before any is looked at alone

inline __mmask16 lanes(long count) { return count >= LANES ? 0xffff : (__mmask16)((1 << count) - 1); }

// Weights of up to 16 tokens; those that there are not weigh nothing.
inline __m512 weights(const float* z, long count, __m512 largest) {
    const __m512 x = _mm512_mask_loadu_ps(_mm512_set1_ps(-std::numeric_limits<float>::infinity()), lanes(count), z);
    const __m512 below = _mm512_sub_ps(x, largest);
    // Smaller ones than float32 has would be its smallest.
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(below, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ), exponential(below));
}

// The first place in `weight` at which the sum exceeds `goal`; the last that weighs anything if rounding lets none.
template <class Number> long first_above(const Number* weight, long count, double& goal) {
    long last = 0;
    double before = 0, sum = 0;
    for (long i = 0; i < count; ++i) {
        if (!(weight[i] > 0)) continue;
        before = sum, sum += weight[i], last = i;
        if (sum > goal) break;
    }
    goal -= before;
    return last;
}

long draw(const float* z, long V, double uniform, double* logprob) {
    __m512 high = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    for (long v = 0; v < V; v += LANES) high = _mm512_mask_max_ps(high, lanes(V - v), high, _mm512_maskz_loadu_ps(lanes(V - v), z + v));
    const float largest = _mm512_reduce_max_ps(high);
    const __m512 shift = _mm512_set1_ps(largest);
    static thread_local Room room;
    double* sums = room.take<double>(V / BLOCK + 1);
    double total = 0;
    for (long v = 0; v < V; v += BLOCK) {
        __m512 sum = _mm512_setzero_ps();
        for (long i = v; i < std::min(v + BLOCK, V); i += LANES) sum = _mm512_add_ps(sum, weights(z + i, V - i, shift));
        total += sums[v / BLOCK] = _mm512_reduce_add_ps(sum);
    }
    double goal = uniform * total;
    const long start = first_above(sums, (V + BLOCK - 1) / BLOCK, goal) * BLOCK, count = std::min(BLOCK, V - start);
    alignas(64) float each[BLOCK];
    for (long i = 0; i < count; i += LANES) _mm512_store_ps(each + i, weights(z + start + i, V - start - i, shift));
    const long token = start + first_above(each, count, goal);
    *logprob = (double)z[token] - largest - std::log(total);
    return token;
}

// ------------------------------------------------------------------------------------------------ weight gradients

// 32 tokens (those beyond `count` are zeros) by 32 columns of x as two right tiles: pairs of consecutive tokens.
inline void pair_tokens(const bf16* x, long stride, long count, __m512i low[16], __m512i high[16]) {
    const __m512i zero = _mm512_setzero_si512();
    for (long i = 0; i < LANES; ++i) {
        const bf16* at = x + 2 * i * stride;
        const __m512i a = 2 * i < count ? _mm512_loadu_si512(at) : zero;
        const __m512i b = 2 * i + 1 < count ? _mm512_loadu_si512(at + stride) : zero;
        pair(a, b, low[i], high[i]);
    }
}

struct Matrix {  // [tokens, columns]
    const bf16* x;
    long stride, tokens, columns;
};

// Columns 32 at a time, each 32 with all tokens: [columns / 32][tokens / 32][2] tiles. `left`: transposed, for the left factor.
template <bool left> void pack_columns(const Matrix& m, bf16* packed) {
    const long blocks = (m.tokens + PAIRED - 1) / PAIRED;
#pragma omp for schedule(static)
    for (long block = 0; block < blocks; ++block)
        for (long n = 0; n < m.columns; n += PAIRED) {
            __m512i low[16], high[16];
            pair_tokens(m.x + block * PAIRED * m.stride + n, m.stride, m.tokens - block * PAIRED, low, high);
            if (left) {
                transpose(low);
                transpose(high);
            }
            bf16* tile = packed + (n / PAIRED * blocks + block) * 2 * TILE;
            for (long i = 0; i < LANES; ++i) {
                _mm512_store_si512(tile + i * PAIRED, low[i]);
                _mm512_store_si512(tile + TILE + i * PAIRED, high[i]);
            }
        }
}

// 32 x 32 numbers of the gradient at `total`, over all tokens. The numbers 32 columns further are fetched meanwhile.
inline void gather(const bf16* left, const bf16* right, long blocks, float* total, long stride, bool fresh) {
    settle();
    if (fresh) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, total, stride * 4);
        _tile_loadd(1, total + LANES, stride * 4);
        _tile_loadd(2, total + LANES * stride, stride * 4);
        _tile_loadd(3, total + LANES * stride + LANES, stride * 4);
    }
    for (long block = 0; block < blocks; ++block, left += 2 * TILE, right += 2 * TILE) {
        _tile_loadd(4, left, 64);
        _tile_loadd(6, right, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, right + TILE, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, left + TILE, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        if (block < PAIRED) {
            _mm_prefetch((const char*)(total + block * stride + PAIRED), _MM_HINT_T1);
            _mm_prefetch((const char*)(total + block * stride + PAIRED + LANES), _MM_HINT_T1);
        }
    }
    _tile_stored(0, total, stride * 4);
    _tile_stored(1, total + LANES, stride * 4);
    _tile_stored(2, total + LANES * stride, stride * 4);
    _tile_stored(3, total + LANES * stride + LANES, stride * 4);
}

// total [M, N] = (+=, unless fresh) the transpose of y [T, M] times x [T, N].
void weight_gradient(const Matrix& y, const Matrix& x, float* total, bool fresh) {
    static thread_local Room lefts, rights;
    const long blocks = (y.tokens + PAIRED - 1) / PAIRED, M = y.columns / PAIRED, N = x.columns / PAIRED;
    const long panel = blocks * 2 * TILE, most = std::max(1L, (1L << 19) / panel), parts = (N + most - 1) / most;
    bf16 *left = lefts.take<bf16>(M * panel), *right = rights.take<bf16>(N * panel);
#pragma omp parallel
    {
        Tiles tiles;
        pack_columns<true>(y, left);
        pack_columns<false>(x, right);
        for (long part = 0; part < parts; ++part)  // of the right factor, as much as stays in the second-level cache
#pragma omp for schedule(static) nowait
            for (long m = 0; m < M; ++m)
                for (long n = N * part / parts; n < N * (part + 1) / parts; ++n)
                    gather(left + m * panel, right + n * panel, blocks, total + (m * x.columns + n) * PAIRED, x.columns, fresh);
    }
}

}  // namespace

// ------------------------------------------------------------------------------------------------ what is called

extern "C" {

// Asks the kernel for the tiles; 0 if it grants them.
int gspo_prepare() {
    const long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) ? 1 : 0;
}

// x [T, K] -> right tiles, (T rounded up to 16) * K numbers.
void gspo_pack(const bf16* x, long stride, long T, long K, bf16* packed) { pack_tokens(x, stride, T, K, packed); }

// y [T, N] = x w^T of packed x and w [N, K]; N a multiple of 16. `wide`: y in float32.
void gspo_product(const bf16* packed, const bf16* w, void* y, long stride, int wide, const long* TNK) {
    if (wide)
        product(packed, w, (float*)y, stride, TNK[0], TNK[1], TNK[2]);
    else
        product(packed, w, (bf16*)y, stride, TNK[0], TNK[1], TNK[2]);
}

// total [M, N] (float32) = the transpose of y [T, M] times x [T, N], or that much more unless `fresh`; M and N multiples of 32.
void gspo_weigh(const bf16* y, long y_stride, const bf16* x, long x_stride, float* total, int fresh, const long* TMN) {
    weight_gradient({y, y_stride, TMN[0], TMN[1]}, {x, x_stride, TMN[0], TMN[2]}, total, fresh);
}

void gspo_attend(const Step* step) {
#pragma omp parallel
    {
        Tiles tiles;
#pragma omp for schedule(dynamic) collapse(2)
        for (long slot = 0; slot < step->slots; ++slot)
            for (long head = 0; head < step->key_heads; ++head)
                if (step->first[slot + 1] > step->first[slot]) Shared(*step, slot, head).run();
    }
}

// One token of each row of z [rows, V] (float32) by the inverse CDF of its softmax, in token order: the first at which
// the cumulated weight exceeds uniform times the total. `logprob` is not finite if z is not.
void gspo_sample(const float* z, const double* uniform, int64_t* token, double* logprob, long rows, long V) {
#pragma omp parallel for schedule(static)
    for (long row = 0; row < rows; ++row) token[row] = draw(z + row * V, V, uniform[row], logprob + row);
}
}

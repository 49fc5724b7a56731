// Quantized panels: GGUF's block formats, 16 rows side by side, and their products.
//
// Four entries of a column stand together, as the bytes of a word, so that one instruction multiplies and sums them; the
// 16 words of a panel follow one another. Layouts, for each block of depth:
//   Q8_0  32 deep: half d[16]; int8 q[8][16][4]
//   Q4_0  32 deep: half d[16]; nibbles q[4][16][4]          value d * (q - 8)
//   Q4_1  32 deep: half d[16], m[16]; nibbles q[4][16][4]   value d * q + m
//   Q4_K 256 deep: half d[16], dmin[16]; for each of 8 groups: uint8 scale[16], min[16]; nibbles q[4][16][4]
//   Q6_K 256 deep: half d[16]; int8 scale[16][16]; for each of 16 groups: nibbles low[2][16][4]; two bits high[16][4]
// Nibbles: byte [j][c][i] holds entries 8j + i (low) and 8j + 4 + i (high) of column c. Two bits: bits 2j and 2j + 1 of
// byte [c][i] belong to entry 4j + i.
//
// They are multiplied in one of two ways. Widened to floats, a slab at a time, they multiply rows of floats. Or the rows
// are rounded to two bytes, 32 entries to a scale: within a group of entries that share their scales the sums are of
// integers and exact, and what groups give is added as floats in the order of k.
#pragma once
#include <algorithm>
#include <limits>

#include "panel.h"

struct Format {
    int depth;      // entries of k in a block
    int stored;     // bytes of a block in GGUF, of one row
    int packed;     // bytes of a block in a panel, of 16 rows
};
constexpr Format FORMATS[KINDS] = {
    {1, 4, 64}, {BF16_DEPTH, 2 * BF16_DEPTH, 32 * BF16_DEPTH}, {1, 2, 32},
    {32, 34, 32 + 512}, {32, 18, 32 + 256}, {32, 20, 64 + 256}, {256, 144, 64 + 8 * (32 + 256)}, {256, 210, 32 + 256 + 16 * (128 + 64)},
    {64, 128, 64 * 32},
};

static inline void set_nibble(uint8_t* q, int k, int column, int value) {
    q[(k / 8 * LANES + column) * 4 + k % 4] |= uint8_t(value << (k & 4));
}

// Put one row's block (as GGUF stores it) into column `column` of a panel's block, which was zeroed.
static void pack_block(int kind, const uint8_t* in, uint8_t* out, int column) {
    auto put16 = [&](uint8_t* at, const uint8_t* from) { memcpy(at + column * 2, from, 2); };
    switch (kind) {
        case Q8_0:
            put16(out, in);
            for (int k = 0; k < 32; k++) out[32 + (k / 4 * LANES + column) * 4 + k % 4] = in[2 + k];
            break;
        case Q4_0:
        case Q4_1: {
            int head = kind == Q4_0 ? 2 : 4;
            put16(out, in);
            if (kind == Q4_1) put16(out + 32, in + 2);
            uint8_t* q = out + head * 16;
            for (int k = 0; k < 32; k++) set_nibble(q, k, column, k < 16 ? in[head + k] & 15 : in[head + k - 16] >> 4);
            break;
        }
        case Q4_K: {
            put16(out, in);
            put16(out + 32, in + 2);
            const uint8_t *s = in + 4, *q = in + 16;
            for (int g = 0; g < 8; g++) {
                uint8_t* at = out + 64 + g * (32 + 256);
                at[column] = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | (s[g - 4] >> 6) << 4;
                at[16 + column] = g < 4 ? s[g + 4] & 63 : (s[g + 4] >> 4) | (s[g] >> 6) << 4;
                for (int k = 0; k < 32; k++) {
                    uint8_t byte = q[(g / 2) * 32 + k];
                    set_nibble(at + 32, k, column, g & 1 ? byte >> 4 : byte & 15);
                }
            }
            break;
        }
        default: {  // Q6_K
            const uint8_t *low = in, *high = in + 128, *scale = in + 192;
            put16(out, in + 208);
            for (int k = 0; k < 256; k++) {
                int half = k / 128, r = k % 128, l = r % 32, part = r / 32;  // four runs of 32 share their bytes
                uint8_t byte = low[half * 64 + (part & 1) * 32 + l];
                int nibble = part < 2 ? byte & 15 : byte >> 4;
                int two = (high[half * 32 + l] >> (part * 2)) & 3;
                uint8_t* at = out + 32 + 256 + k / 16 * (128 + 64);
                set_nibble(at, k % 16, column, nibble);
                at[128 + column * 4 + k % 4] |= uint8_t(two << (k % 16 / 4 * 2));
            }
            for (int g = 0; g < 16; g++) out[32 + g * 16 + column] = scale[g];
        }
    }
}

// Bytes to floats. GCC takes the portable form apart, byte by byte.
static inline vf floats(const uint8_t* at) {
#if defined(__AVX2__) && RK_WIDTH == 8
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)at)));
#else
    return __builtin_convertvector(__builtin_convertvector(load<vub>(at), vi), vf);
#endif
}
static inline vf floats(const int8_t* at) {
#if defined(__AVX2__) && RK_WIDTH == 8
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at)));
#else
    return __builtin_convertvector(__builtin_convertvector(load<vb>(at), vi), vf);
#endif
}
static inline void half_floats(const uint8_t* at, vf out[NV]) {
    for (int v = 0; v < NV; v++) out[v] = widen_f16((const uint16_t*)at + v * VW);
}

// Four entries of each column from nibbles at `in`, the q-th four.
static inline vu nibbles(const uint8_t* in, int q, int v) {
    return load<vu>(in + q / 2 * 64 + v * VW * 4) >> (q & 1 ? 4 : 0) & 0x0f0f0f0f;
}

// A format as the kernels read it: `depth` entries of k in a block, in groups of `group` that share scales. `scales` gives
// a group's factors s and offsets t; `four` the q-th four entries of register v's columns, as bytes of its words. A value
// is (byte - zero) * s + t.
struct Q8Format {
    static constexpr int kind = Q8_0, depth = FORMATS[kind].depth, group = 32, zero = 0;
    static constexpr bool is_signed = true, has_offset = false;
    static inline void scales(const uint8_t* in, int, vf s[NV], vf[NV]) { half_floats(in, s); }
    static inline vu four(const uint8_t* in, int, int q, int v) { return load<vu>(in + 32 + q * 64 + v * VW * 4); }
};
struct Q40Format {
    static constexpr int kind = Q4_0, depth = FORMATS[kind].depth, group = 32, zero = 8;
    static constexpr bool is_signed = false, has_offset = false;
    static inline void scales(const uint8_t* in, int, vf s[NV], vf[NV]) { half_floats(in, s); }
    static inline vu four(const uint8_t* in, int, int q, int v) { return nibbles(in + 32, q, v); }
};
struct Q41Format {
    static constexpr int kind = Q4_1, depth = FORMATS[kind].depth, group = 32, zero = 0;
    static constexpr bool is_signed = false, has_offset = true;
    static inline void scales(const uint8_t* in, int, vf s[NV], vf t[NV]) {
        half_floats(in, s);
        half_floats(in + 32, t);
    }
    static inline vu four(const uint8_t* in, int, int q, int v) { return nibbles(in + 64, q, v); }
};
struct Q4KFormat {
    static constexpr int kind = Q4_K, depth = FORMATS[kind].depth, group = 32, zero = 0;
    static constexpr bool is_signed = false, has_offset = true;
    static inline const uint8_t* at(const uint8_t* in, int g) { return in + 64 + g * (32 + 256); }
    static inline void scales(const uint8_t* in, int g, vf s[NV], vf t[NV]) {
        half_floats(in, s);
        half_floats(in + 32, t);
        for (int v = 0; v < NV; v++) {
            s[v] *= floats(at(in, g) + v * VW);
            t[v] *= -floats(at(in, g) + 16 + v * VW);
        }
    }
    static inline vu four(const uint8_t* in, int g, int q, int v) { return nibbles(at(in, g) + 32, q, v); }
};
struct Q6KFormat {
    static constexpr int kind = Q6_K, depth = FORMATS[kind].depth, group = 16, zero = 32;
    static constexpr bool is_signed = false, has_offset = false;
    static inline void scales(const uint8_t* in, int g, vf s[NV], vf[NV]) {
        half_floats(in, s);
        for (int v = 0; v < NV; v++) s[v] *= floats((const int8_t*)in + 32 + g * 16 + v * VW);
    }
    static inline vu four(const uint8_t* in, int g, int q, int v) {
        const uint8_t* at = in + 32 + 256 + g * (128 + 64);
        vu high = load<vu>(at + 128 + v * VW * 4);
        return nibbles(at, q, v) | ((q == 3 ? high >> 2 : high << (4 - 2 * q)) & 0x30303030);
    }
};

// Call fn with the format of a kind.
template <class F> static inline void with_format(int kind, F&& fn) {
    switch (kind) {
        case Q8_0: fn(Q8Format()); break;
        case Q4_0: fn(Q40Format()); break;
        case Q4_1: fn(Q41Format()); break;
        case Q4_K: fn(Q4KFormat()); break;
        default: fn(Q6KFormat());
    }
}

// Entry i of each four as a float.
template <class Q> static inline vf widen(vu four, int i, vf s, vf t) {
    vi value = Q::is_signed ? vi(four << (24 - 8 * i)) >> 24 : vi(four >> (8 * i) & 255) - Q::zero;
    return __builtin_convertvector(value, vf) * s + t;
}

// Widen the block at `in` to float rows of 16.
template <class Q> static void widen_block(const uint8_t* in, float* out) {
    for (int g = 0; g < Q::depth / Q::group; g++) {
        vf s[NV], t[NV] = {};
        Q::scales(in, g, s, t);
#pragma GCC unroll 8
        for (int q = 0; q < Q::group / 4; q++)
            for (int v = 0; v < NV; v++) {
                vu four = Q::four(in, g, q, v);
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) store(out + (g * Q::group + q * 4 + i) * LANES + v * VW, widen<Q>(four, i, s[v], t[v]));
            }
    }
    // GCC 12 takes this function for one without effects where the format is Q6_K, and leaves out its calls.
    asm volatile("" ::: "memory");
}

// As `tile` for one row, without widening first: the same products and sums, so the same bits.
template <class Q>
static __attribute__((noinline)) void float_row(const float* x, const uint8_t* block, long bytes, float* acc, long depth, bool fresh) {
    vf sum[NV];
    for (int v = 0; v < NV; v++) sum[v] = fresh ? vf{} : load<vf>(acc + v * VW);
    for (long k0 = 0; k0 < depth; k0 += Q::depth, block += bytes)
        for (int g = 0; g < Q::depth / Q::group; g++, x += Q::group) {
            vf s[NV], t[NV] = {};
            Q::scales(block, g, s, t);
#pragma GCC unroll 8
            for (int q = 0; q < Q::group / 4; q++)
                for (int v = 0; v < NV; v++) {
                    vu four = Q::four(block, g, q, v);
#pragma GCC unroll 4
                    for (int i = 0; i < 4; i++) sum[v] += x[q * 4 + i] * widen<Q>(four, i, s[v], t[v]);
                }
        }
    for (int v = 0; v < NV; v++) store(acc + v * VW, sum[v]);
}

// ---- integer products

constexpr int ROUNDED = 32;     // entries that share a scale
constexpr int MOST = 32767;     // the largest entry

// Entries of a row, about scale * q, of two bytes: one byte alone would change tokens. Of each four, the first and the
// third stand together, then the second and the fourth, as the bytes of weights fall apart into words. One that is not
// finite makes all of them NaN.
struct RoundedBlock {
    int16_t q[ROUNDED];
    int32_t sum[2];        // of each half of q
    float scale, total;    // total: scale times the sum of q
};

static inline void round_block(const float* x, RoundedBlock& out) {
    int32_t top = 0;
    for (int i = 0; i < ROUNDED; i++) top = std::max(top, bits<int32_t>(x[i]) & 0x7fffffff);  // ordered as the floats are
    float most = bits<float>(top);
    bool finite = top < 0x7f800000, zero = most < 0x1p-100f;  // so small that the reciprocal could overflow
    float factor = finite && !zero ? float(MOST) / most : 0.0f, scaled[ROUNDED];
    for (int i = 0; i < ROUNDED; i++) scaled[i] = x[i] * factor;
    asm("" : "+m"(scaled));  // no fused multiply-add with what follows: it would round otherwise
    const float magic = 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the rounded integer
    int32_t sum[2] = {}, rounded[ROUNDED];
    for (int h = 0; h < 2; h++)
        for (int i = h * ROUNDED / 2; i < (h + 1) * ROUNDED / 2; i++) {
            // What is not finite gives anything here, and NaN by its scale.
            rounded[i] = finite ? bits<int32_t>(scaled[i] + magic) - bits<int32_t>(magic) : 0;
            sum[h] += rounded[i];
        }
    for (int i = 0; i < ROUNDED; i += 4)
        for (int j = 0; j < 4; j++) out.q[i + j] = int16_t(rounded[i + (j & 1) * 2 + j / 2]);
    out.sum[0] = sum[0];
    out.sum[1] = sum[1];
    out.scale = !finite ? std::numeric_limits<float>::quiet_NaN() : zero ? 0.0f : most / float(MOST);
    out.total = out.scale * float(sum[0] + sum[1]);
}

// sum + the two products of 16 bits in each word.
static inline vi add_pairs(vi sum, vu w, vu x) {
#if defined(__AVX512VNNI__) && RK_WIDTH == 16
    return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif defined(__AVX512BW__) && RK_WIDTH == 16
    return sum + (vi)_mm512_madd_epi16((__m512i)w, (__m512i)x);
#elif defined(__AVX2__) && RK_WIDTH == 8
    return sum + (vi)_mm256_madd_epi16((__m256i)w, (__m256i)x);
#elif defined(__SSE2__) && RK_WIDTH == 4
    return sum + (vi)_mm_madd_epi16((__m128i)w, (__m128i)x);
#else
    return sum + (vi(w << 16) >> 16) * (vi(x << 16) >> 16) + (vi(w) >> 16) * (vi(x) >> 16);
#endif
}

// The bytes of words as words of 16 bits: the first and the third byte, the second and the fourth.
typedef int16_t vshort __attribute__((vector_size(VW * 4)));
typedef uint16_t vushort __attribute__((vector_size(VW * 4)));
template <bool SIGNED> static inline vu even_bytes(vu four) {
    return SIGNED ? vu(vshort(vushort(four) << 8) >> 8) : four & 0x00ff00ff;
}
template <bool SIGNED> static inline vu odd_bytes(vu four) {
    return SIGNED ? vu(vshort(four) >> 8) : vu(vushort(four) >> 8);
}

// acc[m][16] (+)= rows x[m], `ldx` blocks apart, times the panel whose blocks begin at `block`. FIRST puts s and t of each
// group into `scales`, for the tiles that follow, and asks for memory ahead. Inlined it runs several times slower: GCC 12
// then moves loads out of the caller's loops and back to memory.
template <class Q, int M, bool FIRST>
static __attribute__((noinline)) void integer_tile(const RoundedBlock* x, long ldx, const uint8_t* block, float* scales, float* acc,
                                                   long lda, long depth, bool fresh) {
    constexpr int bytes = FORMATS[Q::kind].packed;
    vf sum[M][NV];
    for (int m = 0; m < M; m++)
        for (int v = 0; v < NV; v++) sum[m][v] = fresh ? vf{} : load<vf>(acc + m * lda + v * VW);
    for (long k0 = 0; k0 < depth; k0 += Q::depth, block += bytes)
        for (int g = 0; g < Q::depth / Q::group; g++, scales += 2 * LANES) {
            const RoundedBlock* at = x + (k0 + g * Q::group) / ROUNDED;
            int half = Q::group == ROUNDED ? 0 : g & 1;
            if (FIRST) {
                constexpr int lines = (bytes * Q::group / Q::depth + 63) / 64;
                for (int i = 0; i < lines; i++) __builtin_prefetch(block + AHEAD_BYTES + (g * lines + i) * 64);
            }
            vi total[M][NV] = {};
#pragma GCC unroll 8
            for (int q = 0; q < Q::group / 4; q++) {
                vu even[NV], odd[NV];
                for (int v = 0; v < NV; v++) {
                    vu four = Q::four(block, g, q, v);
                    even[v] = even_bytes<Q::is_signed>(four);
                    odd[v] = odd_bytes<Q::is_signed>(four);
                }
                for (int m = 0; m < M; m++) {
                    const int16_t* row = at[m * ldx].q + half * Q::group + q * 4;
                    vu first = load<uint32_t>(row) - vu{}, second = load<uint32_t>(row + 2) - vu{};
                    for (int v = 0; v < NV; v++) {
                        total[m][v] = add_pairs(total[m][v], even[v], first);
                        settle(total[m][v]);
                        total[m][v] = add_pairs(total[m][v], odd[v], second);
                        settle(total[m][v]);
                    }
                }
            }
            vf s[NV], t[NV];
            if (FIRST) {
                Q::scales(block, g, s, t);
                for (int v = 0; v < NV; v++) {
                    store(scales + v * VW, s[v]);
                    if (Q::has_offset) store(scales + LANES + v * VW, t[v]);
                }
            } else {
                for (int v = 0; v < NV; v++) {
                    s[v] = load<vf>(scales + v * VW);
                    if (Q::has_offset) t[v] = load<vf>(scales + LANES + v * VW);
                }
            }
            for (int m = 0; m < M; m++) {
                const RoundedBlock& row = at[m * ldx];
                int32_t sum_x = Q::group == ROUNDED ? row.sum[0] + row.sum[1] : row.sum[half];
                for (int v = 0; v < NV; v++) {
                    vi dot = Q::zero ? total[m][v] - sum_x * Q::zero : total[m][v];
                    sum[m][v] += __builtin_convertvector(dot, vf) * row.scale * s[v];
                    if (Q::has_offset) sum[m][v] += row.total * t[v];
                }
            }
        }
    for (int m = 0; m < M; m++)
        for (int v = 0; v < NV; v++) store(acc + m * lda + v * VW, sum[m][v]);
}

// As `integer_tile`, any number of rows. `room` takes 2 * 16 floats for each group.
template <class Q>
static void integer_rows(const RoundedBlock* x, long ldx, long rows, const uint8_t* block, float* acc, long lda, long depth, bool fresh,
                         float* room) {
    constexpr int most = VW == 16 ? 8 : VW == 8 ? 4 : 1;  // rows whose accumulators fit the registers
    auto some = [&]<int M>(long m) {
        if (m == 0) integer_tile<Q, M, true>(x, ldx, block, room, acc, lda, depth, fresh);
        else integer_tile<Q, M, false>(x + m * ldx, ldx, block, room, acc + m * lda, lda, depth, fresh);
    };
    long m = 0;
    for (; m + most <= rows; m += most) some.template operator()<most>(m);
    for (; m < rows; m++) some.template operator()<1>(m);
}

// Quantized panels: GGUF's block formats, 16 rows side by side, widened to floats a slab at a time.
//
// Layouts (for each block of depth, all 16 columns):
//   Q8_0  32 deep: half d[16]; int8 q[32][16]
//   Q4_0  32 deep: half d[16]; nibbles q[32][8]          value d * (q - 8)
//   Q4_1  32 deep: half d[16], m[16]; nibbles q[32][8]   value d * q + m
//   Q4_K 256 deep: half d[16], dmin[16]; for each of 8 groups: uint8 scale[16], min[16]; nibbles q[32][8]
//   Q6_K 256 deep: half d[16]; for each of 16 groups: int8 scale[16]; nibbles low[16][8]; two bits high[16][4]
// Nibbles: byte i holds column i (low) and column i + 8 (high). Two bits: byte i holds columns i, i + 4, i + 8, i + 12.
#pragma once
#include "panel.h"

struct Format {
    int depth;      // entries of k in a block
    int stored;     // bytes of a block in GGUF, of one row
    int packed;     // bytes of a block in a panel, of 16 rows
};
static const Format FORMATS[KINDS] = {
    {1, 4, 64}, {BF16_DEPTH, 2 * BF16_DEPTH, 32 * BF16_DEPTH}, {1, 2, 32},
    {32, 34, 32 + 512}, {32, 18, 32 + 256}, {32, 20, 64 + 256}, {256, 144, 64 + 8 * (32 + 256)}, {256, 210, 32 + 16 * (16 + 128 + 64)},
};

static inline void set_nibble(uint8_t* row, int column, int value) {
    row[column & 7] |= uint8_t(value << (column < 8 ? 0 : 4));
}

// Put one row's block (as GGUF stores it) into column `column` of a panel's block, which was zeroed.
static void pack_block(int kind, const uint8_t* in, uint8_t* out, int column) {
    auto put16 = [&](uint8_t* at, const uint8_t* from) { memcpy(at + column * 2, from, 2); };
    switch (kind) {
        case Q8_0:
            put16(out, in);
            for (int k = 0; k < 32; k++) out[32 + k * 16 + column] = in[2 + k];
            break;
        case Q4_0:
        case Q4_1: {
            int head = kind == Q4_0 ? 2 : 4;
            put16(out, in);
            if (kind == Q4_1) put16(out + 32, in + 2);
            uint8_t* q = out + head * 16;
            for (int k = 0; k < 32; k++) set_nibble(q + k * 8, column, k < 16 ? in[head + k] & 15 : in[head + k - 16] >> 4);
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
                    set_nibble(at + 32 + k * 8, column, g & 1 ? byte >> 4 : byte & 15);
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
                uint8_t* at = out + 32 + (k / 16) * (16 + 128 + 64);
                set_nibble(at + 16 + (k % 16) * 8, column, nibble);
                at[16 + 128 + (k % 16) * 4 + (column & 3)] |= uint8_t(two << ((column >> 2) * 2));
            }
            for (int g = 0; g < 16; g++) out[32 + g * (16 + 128 + 64) + column] = scale[g];
        }
    }
}

typedef int32_t v8i __attribute__((vector_size(32)));
typedef float v8f __attribute__((vector_size(32)));
typedef uint8_t v8b __attribute__((vector_size(8)));
typedef int8_t v8s __attribute__((vector_size(8)));
typedef int8_t v4s __attribute__((vector_size(4)));
typedef uint8_t v4b __attribute__((vector_size(4)));

// Eight bytes to floats. GCC takes the portable form apart, byte by byte.
static inline v8f unsigned_floats(const uint8_t* at) {
#if defined(__AVX2__)
    return (v8f)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)at)));
#else
    return __builtin_convertvector(__builtin_convertvector(load<v8b>(at), v8i), v8f);
#endif
}
static inline v8f signed_floats(const uint8_t* at) {
#if defined(__AVX2__)
    return (v8f)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at)));
#else
    return __builtin_convertvector(__builtin_convertvector(load<v8s>(at), v8i), v8f);
#endif
}
static inline v8i bytes_to_ints(const uint8_t* at) {
#if defined(__AVX2__)
    return (v8i)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)at));
#else
    return __builtin_convertvector(load<v8b>(at), v8i);
#endif
}
static inline v8f int_floats(v8i v) {
#if defined(__AVX2__)
    return (v8f)_mm256_cvtepi32_ps((__m256i)v);
#else
    return __builtin_convertvector(v, v8f);
#endif
}

// Quantized values of 16 columns as floats, in two halves of eight.
static inline void nibbles(const uint8_t* row, v8f& a, v8f& b) {
    v8i bytes = bytes_to_ints(row);
    a = int_floats(bytes & 15);
    b = int_floats(bytes >> 4);
}
static inline void halves(const uint8_t* at, v8f out[2]) {
    float value[16];
    for (int i = 0; i < NV; i++) store(value + i * VW, widen_f16((const uint16_t*)at + i * VW));
    memcpy(out, value, 64);
}

// A format as the kernels read it: `depth` entries of k in a block, in groups of `group` that share scales. `scales`
// gives a group's factors s (and offsets t), `row` the 16 values of one k: what is stored, times s, plus t.
struct Q8Format {
    static constexpr int depth = 32, group = 32;
    static inline void scales(const uint8_t* in, int, v8f s[2], v8f[2]) { halves(in, s); }
    static inline void row(const uint8_t* in, int, int k, const v8f s[2], const v8f[2], v8f& a, v8f& b) {
        a = signed_floats(in + 32 + k * 16) * s[0];
        b = signed_floats(in + 32 + k * 16 + 8) * s[1];
    }
};
struct Q40Format {
    static constexpr int depth = 32, group = 32;
    static inline void scales(const uint8_t* in, int, v8f s[2], v8f t[2]) {
        halves(in, s);
        for (int h = 0; h < 2; h++) t[h] = s[h] * -8.0f;
    }
    static inline void row(const uint8_t* in, int, int k, const v8f s[2], const v8f t[2], v8f& a, v8f& b) {
        nibbles(in + 32 + k * 8, a, b);
        a = a * s[0] + t[0];
        b = b * s[1] + t[1];
    }
};
struct Q41Format {
    static constexpr int depth = 32, group = 32;
    static inline void scales(const uint8_t* in, int, v8f s[2], v8f t[2]) {
        halves(in, s);
        halves(in + 32, t);
    }
    static inline void row(const uint8_t* in, int, int k, const v8f s[2], const v8f t[2], v8f& a, v8f& b) {
        nibbles(in + 64 + k * 8, a, b);
        a = a * s[0] + t[0];
        b = b * s[1] + t[1];
    }
};
struct Q4KFormat {
    static constexpr int depth = 256, group = 32;
    static inline const uint8_t* at(const uint8_t* in, int g) { return in + 64 + g * (32 + 256); }
    static inline void scales(const uint8_t* in, int g, v8f s[2], v8f t[2]) {
        v8f d[2], least[2];
        halves(in, d);
        halves(in + 32, least);
        for (int h = 0; h < 2; h++) {
            s[h] = d[h] * unsigned_floats(at(in, g) + h * 8);
            t[h] = -(least[h] * unsigned_floats(at(in, g) + 16 + h * 8));
        }
    }
    static inline void row(const uint8_t* in, int g, int k, const v8f s[2], const v8f t[2], v8f& a, v8f& b) {
        nibbles(at(in, g) + 32 + k * 8, a, b);
        a = a * s[0] + t[0];
        b = b * s[1] + t[1];
    }
};
struct Q6KFormat {
    static constexpr int depth = 256, group = 16;
    static inline const uint8_t* at(const uint8_t* in, int g) { return in + 32 + g * (16 + 128 + 64); }
    static inline void scales(const uint8_t* in, int g, v8f s[2], v8f[2]) {
        halves(in, s);
        for (int h = 0; h < 2; h++) s[h] *= signed_floats(at(in, g) + h * 8);
    }
    static inline void row(const uint8_t* in, int g, int k, const v8f s[2], const v8f[2], v8f& a, v8f& b) {
        v8i low = bytes_to_ints(at(in, g) + 16 + k * 8);
        // Byte c & 3 of the word holds column c's two bits, from bit c / 4 * 2 on.
        v8i word = v8i{} + load<int32_t>(at(in, g) + 16 + 128 + k * 4);
        v8i two = word >> v8i{0, 8, 16, 24, 2, 10, 18, 26};
        a = int_floats(((low & 15) | (two & 3) << 4) - 32) * s[0];
        b = int_floats((low >> 4 | (two & 48)) - 32) * s[1];
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

// Widen the block at `in` to float rows of 16.
template <class Q> static void widen_block(const uint8_t* in, float* out) {
    for (int g = 0; g < Q::depth / Q::group; g++) {
        v8f s[2], t[2] = {};
        Q::scales(in, g, s, t);
        for (int k = 0; k < Q::group; k++) {
            v8f a, b;
            Q::row(in, g, k, s, t, a, b);
            float* to = out + (g * Q::group + k) * LANES;
            store(to, a);
            store(to + 8, b);
        }
    }
    // GCC 12 takes this function for one without effects where the format is Q6_K, and leaves out its calls.
    asm volatile("" ::: "memory");
}

// As `tile` for few rows, without widening first: the same products and sums, so the same bits.
template <class Q, int M>
static void quantized_tile(const float* x, long ldx, const uint8_t* block, long bytes, float* acc, long lda, long depth, bool fresh) {
    v8f sum[M][2];
    for (int m = 0; m < M; m++)
        for (int h = 0; h < 2; h++) sum[m][h] = fresh ? v8f{} : load<v8f>(acc + m * lda + h * 8);
    for (long k0 = 0; k0 < depth; k0 += Q::depth, block += bytes)
        for (int g = 0; g < Q::depth / Q::group; g++) {
            v8f s[2], t[2] = {};
            Q::scales(block, g, s, t);
            const float* at = x + k0 + g * Q::group;
            for (int k = 0; k < Q::group; k++) {
                v8f a, b;
                Q::row(block, g, k, s, t, a, b);
                for (int m = 0; m < M; m++) {
                    sum[m][0] += at[m * ldx + k] * a;
                    sum[m][1] += at[m * ldx + k] * b;
                }
            }
        }
    for (int m = 0; m < M; m++)
        for (int h = 0; h < 2; h++) store(acc + m * lda + h * 8, sum[m][h]);
}

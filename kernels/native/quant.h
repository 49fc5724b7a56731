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
    {1, 4, 64}, {1, 2, 32}, {1, 2, 32},
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

// Widen the block at `in` to float rows of 16.
static void widen_block(int kind, const uint8_t* in, float* out) {
    v8f d[2], m[2];
    halves(in, d);
    switch (kind) {
        case Q8_0:
            for (int k = 0; k < 32; k++) {
                v8f q[2];
                q[0] = signed_floats(in + 32 + k * 16);
                q[1] = signed_floats(in + 32 + k * 16 + 8);
                for (int h = 0; h < 2; h++) store(out + k * 16 + h * 8, q[h] * d[h]);
            }
            break;
        case Q4_0:
        case Q4_1: {
            const uint8_t* q = in + 32;
            if (kind == Q4_1) {
                halves(q, m);
                q += 32;
            } else {
                m[0] = d[0] * -8.0f;
                m[1] = d[1] * -8.0f;
            }
            for (int k = 0; k < 32; k++) {
                v8f a, b;
                nibbles(q + k * 8, a, b);
                store(out + k * 16, a * d[0] + m[0]);
                store(out + k * 16 + 8, b * d[1] + m[1]);
            }
            break;
        }
        case Q4_K: {
            v8f least[2];
            halves(in + 32, least);
            for (int g = 0; g < 8; g++) {
                const uint8_t* at = in + 64 + g * (32 + 256);
                v8f s[2], t[2];
                for (int h = 0; h < 2; h++) {
                    s[h] = d[h] * unsigned_floats(at + h * 8);
                    t[h] = least[h] * unsigned_floats(at + 16 + h * 8);
                }
                for (int k = 0; k < 32; k++) {
                    v8f a, b;
                    nibbles(at + 32 + k * 8, a, b);
                    float* to = out + (g * 32 + k) * 16;
                    store(to, a * s[0] - t[0]);
                    store(to + 8, b * s[1] - t[1]);
                }
            }
            break;
        }
        default:  // Q6_K
            for (int g = 0; g < 16; g++) {
                const uint8_t* at = in + 32 + g * (16 + 128 + 64);
                v8f s[2] = {d[0] * signed_floats(at), d[1] * signed_floats(at + 8)};
                for (int k = 0; k < 16; k++) {
                    v8i low = bytes_to_ints(at + 16 + k * 8);
                    // Byte c & 3 of the word holds column c's bits, at twice c / 4.
                    const uint8_t* high = at + 16 + 128 + k * 4;
                    v8i two = v8i{high[0], high[1], high[2], high[3], high[0] >> 2, high[1] >> 2, high[2] >> 2, high[3] >> 2};
                    float* to = out + (g * 16 + k) * 16;
                    store(to, int_floats(((low & 15) | (two & 3) << 4) - 32) * s[0]);
                    store(to + 8, int_floats((low >> 4 | (two & 48)) - 32) * s[1]);
                }
            }
    }
}

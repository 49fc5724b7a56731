// Numbers of eight bits, as the KV cache may store them: floats to codes, and registers of codes to floats.
#pragma once
#include <algorithm>
#include <cmath>

#include "simd.h"

// VW bytes as integers. GCC 12 converts half a register of them one by one.
static inline vu spread(const uint8_t* bytes) {
#if defined(__AVX512F__) && RK_WIDTH == 16
    return (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)bytes));
#elif defined(__AVX2__) && RK_WIDTH == 8
    return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)bytes));
#else
    return __builtin_convertvector(load<vub>(bytes), vu);
#endif
}

// Floats of a sign, 7 - M bits of exponent and M of mantissa. LARGEST is the code of what is stored of anything as large
// or larger, NANS the first of the codes that are no number.
template <int M, int BIAS, int LARGEST, int NANS> struct Float8 {
    static constexpr int SHIFT = 23 - M;
    static constexpr uint32_t REBIAS = uint32_t(127 - BIAS) << 23;
    static float largest() { return bits<float>((uint32_t(LARGEST) << SHIFT) + REBIAS); }
    static float tiny(int exponent) { return bits<float>(uint32_t(127 + exponent) << 23); }  // a power of two

    // To nearest, ties to even; NaN stays NaN.
    static uint8_t make(float x) {
        uint32_t u = bits<uint32_t>(x), sign = u >> 24 & 0x80;
        u &= 0x7fffffff;
        if (u > 0x7f800000u) return uint8_t(sign | 0x7f);
        if (u >= bits<uint32_t>(largest())) return uint8_t(sign | LARGEST);
        if (u < REBIAS + (1u << 23))  // subnormal: let the float unit round
            return uint8_t(sign | uint32_t(__builtin_nearbyintf(bits<float>(u) * tiny(BIAS - 1 + M))));
        u += (1u << (SHIFT - 1)) - 1 + (u >> SHIFT & 1);
        return uint8_t(sign | (u - REBIAS) >> SHIFT);
    }

    static vf widen(const uint8_t* codes) {
        vu code = spread(codes), plain = code & 0x7f;
        vu raised = (plain << SHIFT) + REBIAS;
        // A subnormal gets a leading one, which is taken off again.
        vf small = bits<vf>(raised + (1u << 23)) - splat(tiny(1 - BIAS));
        vf x = plain < (1u << M) ? small : bits<vf>(raised);
        vu nan = (vu)(plain >= uint32_t(NANS)) & 0x7fc00000u;
        return bits<vf>(bits<vu>(x) | nan | (code & 0x80) << 24);
    }
};
typedef Float8<3, 7, 0x7e, 0x7f> E4m3;
typedef Float8<2, 15, 0x7b, 0x7d> E5m2;

struct Int8 {
    static float largest() { return 127.0f; }
    static uint8_t make(float x) { return uint8_t(int8_t(__builtin_nearbyintf(std::min(127.0f, std::max(-127.0f, x))))); }
    static vf widen(const uint8_t* codes) { return __builtin_convertvector((vi)(spread(codes) << 24) >> 24, vf); }
};

// What the numbers of a head are divided by, so that the largest is the largest there is; NaN if one is.
template <class Code> float scale_of(const float* x, long n) {
    float most = 0;
    for (long i = 0; i < n; i++) {
        float size = std::fabs(x[i]);
        if (size != size) return size;
        most = std::max(most, size);
    }
    return most == 0 ? 1.0f : most / Code::largest();
}

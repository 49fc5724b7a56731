// Vectors of floats in the width that this object is compiled for, and the few functions on them.
//
// GCC's vector extension carries the arithmetic, so one source serves AVX-512, AVX2 and anything else; only the
// conversion of half floats and the products of pairs use instructions of their own. RK_WIDTH is the number of floats in a
// register. A build may set it and RK_BF16_DOT, to try on a smaller CPU what a larger one would do.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if !defined(RK_WIDTH)
#if defined(__AVX512F__)
#define RK_WIDTH 16
#elif defined(__AVX__)
#define RK_WIDTH 8
#else
#define RK_WIDTH 4
#endif
#endif
#if defined(__AVX512BF16__)
#define RK_BF16_DOT
#endif

constexpr int VW = RK_WIDTH;
constexpr int LANES = 16;          // columns of a panel, whatever the register width
constexpr int NV = LANES / VW;     // registers that hold a panel's row

typedef float vf __attribute__((vector_size(VW * 4)));
typedef int32_t vi __attribute__((vector_size(VW * 4)));
typedef uint32_t vu __attribute__((vector_size(VW * 4)));
typedef uint16_t vh __attribute__((vector_size(VW * 2)));
typedef int8_t vb __attribute__((vector_size(VW)));
typedef uint8_t vub __attribute__((vector_size(VW)));

template <class V> static inline V load(const void* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}
template <class V> static inline void store(void* p, V v) { memcpy(p, &v, sizeof v); }
template <class To, class From> static inline To bits(From v) {
    static_assert(sizeof(To) == sizeof(From));
    To out;
    memcpy(&out, &v, sizeof out);
    return out;
}
// Have a value in a register here. GCC adds integers in an order of its own, which may take more registers than there are.
template <class V> static inline void settle(V& v) {
#if defined(__AVX512F__) || (defined(__AVX2__) && RK_WIDTH == 8) || (defined(__SSE2__) && RK_WIDTH == 4)
    asm("" : "+v"(v));
#endif
}
// A product as it stands, which no addition will be fused with: GCC 12 may fuse one of some alike and not the others.
static inline vf apart(vf v) {
#if (defined(__AVX512F__) && RK_WIDTH == 16) || (defined(__AVX2__) && RK_WIDTH == 8) || (defined(__SSE2__) && RK_WIDTH == 4)
    asm("" : "+v"(v));
#else
    asm("" : "+m"(v));
#endif
    return v;
}
static inline vf splat(float x) { return x - vf{}; }

static inline float from_bf16(uint16_t h) { return bits<float>(uint32_t(h) << 16); }

// Round to nearest, ties to even; NaN stays NaN.
static inline uint16_t to_bf16(float x) {
    uint32_t u = bits<uint32_t>(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t(u >> 16) | 0x40;
    return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

static inline float from_f16(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#else
    uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
    if (exponent == 31) return bits<float>(sign | 0x7f800000u | fraction << 13);
    if (exponent == 0) {
        float tiny = float(fraction) * 0x1p-24f;
        return sign ? -tiny : tiny;
    }
    return bits<float>(sign | (exponent + 112) << 23 | fraction << 13);
#endif
}

static inline uint16_t to_f16(float x) {
#if defined(__F16C__)
    return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
    uint32_t u = bits<uint32_t>(x), sign = (u >> 16) & 0x8000;
    u &= 0x7fffffff;
    if (u > 0x7f800000u) return sign | 0x7e00;
    if (u >= 0x47800000u) return sign | 0x7c00;
    if (u < 0x38800000u) {  // subnormal: let the float unit round
        float scaled = bits<float>(u) * 0x1p24f;
        return sign | uint16_t(__builtin_nearbyintf(scaled));
    }
    u += 0xfff + ((u >> 13) & 1);
    return sign | uint16_t((u - 0x38000000u) >> 13);
#endif
}

// VW half floats to floats.
static inline vf widen_f16(const uint16_t* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__) && RK_WIDTH == 8
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    vf out;
    for (int i = 0; i < VW; i++) out[i] = from_f16(p[i]);
    return out;
#endif
}

// A panel's row is 16 columns. In bfloat16 its words pair column i (low half) with column i + 8 (high half) where
// registers hold 8 floats or fewer: a shift and a mask then widen it. With 16 floats the plain order widens in one step.
static inline int bf16_place(int column) {
    if (VW == 16) return column;
    return (column & 7) * 2 + (column >> 3);
}

static inline void widen_bf16(const uint16_t* row, vf out[NV]) {
#if RK_WIDTH == 16
    out[0] = bits<vf>(__builtin_convertvector(load<vh>(row), vu) << 16);
#else
    for (int i = 0; i < NV / 2; i++) {
        vu words = load<vu>(row + i * VW * 2);
        out[i] = bits<vf>(words << 16);
        out[i + NV / 2] = bits<vf>(words & 0xffff0000u);
    }
#endif
}

#if defined(RK_BF16_DOT)
// acc + (high halves' products) + (low halves' products), of pairs of bfloat16.
static inline vf dot_bf16(vf acc, vu x, vu w) {
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)x, (__m512bh)w);
#else
    acc += bits<vf>(x & 0xffff0000u) * bits<vf>(w & 0xffff0000u);
    return acc + bits<vf>(x << 16) * bits<vf>(w << 16);
#endif
}
#endif

// e^x for x <= 88; below -87 it is 0. Cephes' polynomial; the error is under 2 units in the last place.
static inline vf exp_v(vf x) {
    vf low = splat(-87.3f);
    vf y = x > low ? x : low;
    vf n = y * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the rounded integer
    vi power = (bits<vi>(n) - bits<vi>(splat(12582912.0f))) << 23;
    n -= 12582912.0f;
    vf r = y - n * 0.693359375f;
    r -= n * -2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    p = bits<vf>(bits<vi>(p) + power);
    return x > low ? p : vf{};
}

// The largest of the lanes.
static inline float max_v(vf v) {
    float most = v[0];
    for (int i = 1; i < VW; i++) most = v[i] > most ? v[i] : most;
    return most;
}

// Sum of the lanes, in a fixed order.
static inline float sum_v(vf v) {
    float s = 0;
    for (int i = 0; i < VW; i++) s += v[i];
    return s;
}

// Weights in whole numbers of 16 bits, and their products with rows in the same.
//
// A CPU that has no products of 16-bit floats multiplies twice as many of these as of float32 in one instruction. A column
// of weights has one scale, a row has one for each 64 entries. Each 64 entries of either, taken as a vector, are at
// most LONGEST long: by the inequality of Cauchy and Schwarz no sum of their products leaves 32 bits, so the sums of 64 are
// exact. What the 64s give is added as floats, in the order of k. Both are rounded some ten times finer than a
// bfloat16 is.
//
// A panel holds its 16 scales, and then two entries of k side by side for each column. Depth is filled up with zeros.
#pragma once
#include "quant.h"

constexpr int WORDS = 64;  // entries that are summed as integers
constexpr float LONGEST = 46000.0f, LARGEST = 32767.0f;  // of a vector of them; of one

constexpr long SOON_BYTES = 512;  // asked for ahead: these products leave the memory's own foresight time, which is better further on

struct WordBlock {
    int16_t q[WORDS];
    float scale;
};

// The step in which `n` numbers are rounded, 64 at most: 0 if all are almost zero, NaN if one is not finite.
static inline float word_step(const float* x, long n) {
    int32_t top = 0;
    for (long i = 0; i < n; i++) top = std::max(top, bits<int32_t>(x[i]) & 0x7fffffff);  // ordered as the floats are
    float most = bits<float>(top);
    if (top >= 0x7f800000) return std::numeric_limits<float>::quiet_NaN();
    if (most < 0x1p-100f) return 0.0f;  // the reciprocal could overflow
    float length = most * 8.0f;  // what 64 such entries have; enough where squares would leave a float's range
    if (most > 0x1p-50f && most < 0x1p50f) {
        vf sum = {};
        long i = 0;
        for (; i + VW <= n; i += VW) sum += load<vf>(x + i) * load<vf>(x + i);
        float squares = sum_v(sum);
        for (; i < n; i++) squares += x[i] * x[i];
        length = std::sqrt(squares);
    }
    return std::max(most / LARGEST, length / LONGEST);
}

// q[i] = x[i] / step, rounded to nearest; zeros if the step is 0 or NaN.
static inline void round_words(const float* x, long n, float step, int16_t* q) {
    const float factor = step > 0 ? 1.0f / step : 0.0f, magic = 12582912.0f;  // 1.5 * 2^23: a sum's low bits are the rounded integer
    if (factor == 0) {
        memset(q, 0, size_t(n) * 2);
        return;
    }
    for (long i = 0; i < n; i++) q[i] = int16_t(bits<int32_t>(x[i] * factor + magic) - bits<int32_t>(magic));
}

// A row of k entries as blocks.
static inline void round_row(const float* x, long k, WordBlock* out) {
    for (long i = 0; i < k; i += WORDS, out++) {
        long n = std::min<long>(WORDS, k - i);
        out->scale = word_step(x + i, n);
        round_words(x + i, n, out->scale, out->q);
        if (n < WORDS) memset(out->q + n, 0, size_t(WORDS - n) * 2);
    }
}

// Where a panel has entry k of a column, in words after its scales.
static inline long word_index(long k, int column) { return k / 2 * 2 * LANES + column * 2 + (k & 1); }

// Put a column of k entries into a panel, which was zeroed.
static inline void pack_words(const float* x, long k, int column, uint8_t* panel) {
    float step = 0;
    for (long i = 0; i < k && step == step; i += WORDS) {
        float here = word_step(x + i, std::min<long>(WORDS, k - i));
        step = here > step || here != here ? here : step;
    }
    store(panel + column * 4, step);
    int16_t *to = (int16_t*)(panel + LANES * 4), q[WORDS];
    for (long i = 0; i < k; i += WORDS) {
        long n = std::min<long>(WORDS, k - i);
        round_words(x + i, n, step, q);
        for (long j = 0; j < n; j++) to[word_index(i + j, column)] = q[j];
    }
}

// acc[m][p * 16 + n] (+)= rows x[m], `ldx` blocks apart, times `blocks` blocks of P panels, `stride` words of weights apart. COLD
// if these are in no cache yet.
template <int M, int P, bool COLD>
static __attribute__((noinline)) void word_tile(const WordBlock* x, long ldx, const uint32_t* w, long stride, float* acc, long lda,
                                                long blocks, bool fresh) {
    constexpr int TOGETHER = 8;  // pairs in the body of the loop
    for (long b = 0; b < blocks; b++, x++, fresh = false) {
        vi total[M][P * NV] = {};
        for (int q0 = 0; q0 < WORDS; q0 += 2 * TOGETHER)
#pragma GCC unroll 8
            for (int q = q0; q < q0 + 2 * TOGETHER; q += 2, w += LANES) {
                vu row[P * NV];
                for (int v = 0; v < P * NV; v++) row[v] = load<vu>(w + v / NV * stride + v % NV * VW);
                if (COLD)
                    for (int p = 0; p < P; p++) __builtin_prefetch((const char*)(w + p * stride) + SOON_BYTES);
                for (int m = 0; m < M; m++) {
                    vu two = load<uint32_t>(x[m * ldx].q + q) - vu{};
                    for (int v = 0; v < P * NV; v++) {
                        total[m][v] = add_pairs(total[m][v], row[v], two);
                        settle(total[m][v]);
                    }
                }
            }
        for (int m = 0; m < M; m++)
            for (int v = 0; v < P * NV; v++) {
                float* at = acc + m * lda + v * VW;
                vf sum = apart(__builtin_convertvector(total[m][v], vf) * x[m * ldx].scale);
                store(at, fresh ? sum : load<vf>(at) + sum);
            }
    }
}

// As `word_tile`, any number of rows and 1, 2 or 4 panels, in tiles of about the same size.
static void word_rows(const WordBlock* x, long ldx, long rows, const uint32_t* w, long stride, int panels, float* acc, long lda, long blocks,
                      bool fresh) {
    constexpr int most = VW == 16 ? 12 : VW == 8 ? 6 : 1;  // rows whose accumulators fit the registers
    long tiles = (rows + most - 1) / most, m = 0;
    auto some = [&]<int M, int P, bool COLD>() {
        for (int p = 0; p < panels; p += P)
            word_tile<M, P, COLD>(x + m * ldx, ldx, w + p * stride, stride, acc + m * lda + p * LANES, lda, blocks, fresh);
        m += M;
    };
    auto one = [&]<int M>() {
        if (m) some.template operator()<M, 1, false>();
        else some.template operator()<M, 1, true>();
    };
    for (long t = 0; t < tiles; t++)
        switch (rows / tiles + (t < rows % tiles)) {
            case 1:
                if (panels == 4 && m == 0 && VW > 4) some.template operator()<1, 4, true>();
                else if (panels == 2 && m == 0 && VW > 4) some.template operator()<1, 2, true>();
                else one.template operator()<1>();
                break;
            case 2:
                if (panels > 1 && m == 0 && VW > 4) some.template operator()<2, 2, true>();
                else one.template operator()<std::min(2, most)>();
                break;
            case 3: one.template operator()<std::min(3, most)>(); break;
            case 4: one.template operator()<std::min(4, most)>(); break;
            case 5: one.template operator()<std::min(5, most)>(); break;
            case 6: one.template operator()<std::min(6, most)>(); break;
            case 7: one.template operator()<std::min(7, most)>(); break;
            case 8: one.template operator()<std::min(8, most)>(); break;
            case 9: one.template operator()<std::min(9, most)>(); break;
            case 10: one.template operator()<std::min(10, most)>(); break;
            case 11: one.template operator()<std::min(11, most)>(); break;
            default: one.template operator()<most>();
        }
}

// Weights in panels, and the product of a few rows with a panel.
//
// A panel holds 16 columns of the product (16 rows of a stored weight matrix), entry k of all 16 side by side. Every
// accumulator adds its products in the order of k, whatever the tiling, so a row's result is the same bits for any
// number of rows in the call.
//
// Where the CPU multiplies pairs of bfloat16 (RK_BF16_DOT), panels of weights in bfloat16 hold two entries of k side by
// side for each column, and the rows that they are multiplied with are rounded to bfloat16 first.
#pragma once
#include "simd.h"

enum Kind { F32, BF16, F16, Q8_0, Q4_0, Q4_1, Q4_K, Q6_K, I16, KINDS };

#if defined(RK_BF16_DOT)
constexpr int BF16_DEPTH = 2;  // entries of k that stand together in a panel of weights
#else
constexpr int BF16_DEPTH = 1;
#endif

// Where a panel of weights in bfloat16 has entry k of a column.
static inline long bf16_index(long k, int column) {
    if (BF16_DEPTH == 1) return k * LANES + bf16_place(column);
    return k / 2 * 2 * LANES + column * 2 + (k & 1);
}

struct F32Row {
    typedef float type;
    static inline void widen(const float* row, vf out[NV]) {
        for (int i = 0; i < NV; i++) out[i] = load<vf>(row + i * VW);
    }
    static int place(int column) { return column; }
    static type make(float x) { return x; }
};
struct Bf16Row {
    typedef uint16_t type;
    static inline void widen(const uint16_t* row, vf out[NV]) { widen_bf16(row, out); }
    static int place(int column) { return bf16_place(column); }
    static type make(float x) { return to_bf16(x); }
};
struct F16Row {
    typedef uint16_t type;
    static inline void widen(const uint16_t* row, vf out[NV]) {
        for (int i = 0; i < NV; i++) out[i] = widen_f16(row + i * VW);
    }
    static int place(int column) { return column; }
    static type make(float x) { return to_f16(x); }
};

// Bytes that a pass over fresh weights asks for ahead of its reads: what memory delivers while it answers one.
constexpr long AHEAD_BYTES = 4096;

// acc[m][p * 16 + n] (+)= sum over k of x[m][k] * panel p[k][n]. M rows, P panels `stride` apart; COLD if these are in no
// cache yet: then what follows them is asked for in time.
template <class Row, int M, int P, bool COLD = false>
static inline __attribute__((always_inline)) void tile(const float* x, long ldx, const typename Row::type* w, long stride,
                                                       float* acc, long lda, long depth, bool fresh) {
    vf sum[M][P * NV];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < P * NV; n++) sum[m][n] = fresh ? vf{} : load<vf>(acc + m * lda + n * VW);
    for (long k = 0; k < depth; k++) {
        vf row[P * NV];
        for (int p = 0; p < P; p++) Row::widen(w + p * stride + k * LANES, row + p * NV);
        if (COLD)
            for (int p = 0; p < P; p++) __builtin_prefetch((const char*)(w + p * stride + k * LANES) + AHEAD_BYTES);
        for (int m = 0; m < M; m++) {
            float s = x[m * ldx + k];
            for (int n = 0; n < P * NV; n++) sum[m][n] += s * row[n];
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < P * NV; n++) store(acc + m * lda + n * VW, sum[m][n]);
}

// Rows that fit the registers at once with one panel.
constexpr int ROWS = VW == 16 ? 12 : VW == 8 ? 6 : 2;

// All rows against `panels` panels (1, 2 or 4), in tiles that keep the units busy. COLD if the panels are in no cache yet and
// others follow them in memory.
template <class Row, bool COLD>
static void rows_by_panels(const float* x, long ldx, long rows, const typename Row::type* w, long stride, int panels,
                           float* acc, long lda, long depth, bool fresh) {
    long m = 0;
#define RK_TILE(M, P, FETCH) \
    for (int p = 0; p + P <= panels; p += P) \
        tile<Row, M, P, FETCH>(x + m * ldx, ldx, w + p * stride, stride, acc + m * lda + p * LANES, lda, depth, fresh);
    if (rows >= ROWS) {
        RK_TILE(ROWS, 1, COLD)
        for (m = ROWS; m + ROWS <= rows; m += ROWS) { RK_TILE(ROWS, 1, false) }
    }
    switch (rows - m) {
        case 0: break;
        case 1:
            if (panels == 4) { RK_TILE(1, 4, COLD) } else if (panels == 2) { RK_TILE(1, 2, COLD) } else { RK_TILE(1, 1, COLD) }
            break;
        case 2:
            if (panels >= 2 && VW > 4) { RK_TILE(2, 2, COLD) } else { RK_TILE(2, 1, COLD) }
            break;
        case 3: { RK_TILE(3, 1, COLD) break; }
        case 4: { RK_TILE(4, 1, COLD) break; }
        case 5: {  // GCC 12 makes a slow loop of five
            RK_TILE(4, 1, COLD)
            m += 4;
            RK_TILE(1, 1, false)
            break;
        }
        case 6: { RK_TILE(6, 1, COLD) break; }
        case 7: { RK_TILE(7, 1, COLD) break; }
        case 8: { RK_TILE(8, 1, COLD) break; }
        case 9: { RK_TILE(9, 1, COLD) break; }
        case 10: { RK_TILE(10, 1, COLD) break; }
        default: { RK_TILE(11, 1, COLD) break; }
    }
#undef RK_TILE
}

#if defined(RK_BF16_DOT)
// As `tile`, of rows given as `pairs` pairs each.
template <int M, int P>
static inline __attribute__((always_inline)) void pair_tile(const uint32_t* x, long ldx, const uint32_t* w, long stride, float* acc,
                                                            long lda, long pairs, bool fresh) {
    vf sum[M][P * NV];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < P * NV; n++) sum[m][n] = fresh ? vf{} : load<vf>(acc + m * lda + n * VW);
    for (long k = 0; k < pairs; k++) {
        vu row[P * NV];
        for (int p = 0; p < P; p++)
            for (int v = 0; v < NV; v++) row[p * NV + v] = load<vu>(w + p * stride + k * LANES + v * VW);
        for (int m = 0; m < M; m++) {
            vu s = x[m * ldx + k] - vu{};
            for (int n = 0; n < P * NV; n++) sum[m][n] = dot_bf16(sum[m][n], s, row[n]);
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < P * NV; n++) store(acc + m * lda + n * VW, sum[m][n]);
}

// All rows against `panels` panels (1, 2 or 4).
static void pairs_by_panels(const uint32_t* x, long ldx, long rows, const uint32_t* w, long stride, int panels, float* acc, long lda,
                            long pairs, bool fresh) {
    auto some = [&]<int M, int P>(long m) {
        for (int p = 0; p + P <= panels; p += P)
            pair_tile<M, P>(x + m * ldx, ldx, w + p * stride, stride, acc + m * lda + p * LANES, lda, pairs, fresh);
    };
    long m = 0;
    if (panels > 1)
        for (; m + 12 <= rows; m += 12) some.template operator()<12, 2>(m);
    if (panels > 1)
        for (; m + 4 <= rows; m += 4) some.template operator()<4, 2>(m);
    for (; m + 4 <= rows; m += 4) some.template operator()<4, 1>(m);
    for (; m < rows; m++) {
        if (panels == 4) some.template operator()<1, 4>(m);
        else some.template operator()<1, 1>(m);
    }
}
#endif

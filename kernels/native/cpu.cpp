// rayllm's CPU kernels: a decoder's step in one call.
//
// A step is a list of instructions over float buffers, built once from a model (see program.py). Weights and the KV
// cache may be stored narrower; sums are float32 and in a fixed order, so that a token's result is the same bits
// whatever else is in the step, however it is cut into chunks, and for any number of threads.
// The C interface stands at the end. This file is compiled once for each instruction set.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>

#include "narrow.h"
#include "panel.h"
#include "pool.h"
#include "quant.h"
#include "words.h"

namespace {

constexpr long ROW_BLOCK = 96;     // rows whose accumulators stay in the first-level cache
constexpr long DEPTH_BLOCK = 512;  // depth of a panel that does, beside them
constexpr long WORD_DEPTH = 768;   // likewise, in words of 16 bits
constexpr int SPLIT = 256;         // cache tokens whose softmax is formed at once
constexpr int SCORES = SPLIT + LANES;  // room for them, and for what the last tile writes beyond
constexpr float NEVER = -std::numeric_limits<float>::infinity();

struct alignas(64) Scratch {
    float acc[ROW_BLOCK * 4 * LANES];
    float slab[DEPTH_BLOCK * LANES];
    std::vector<float> attention;
};

// ---- products

enum Epilogue { PLAIN, SILU_MUL, GELU_MUL, CLAMPED_MUL };

struct Weight {
    int kind;
    long n, k;           // columns of the product; depth
    const uint8_t* data; // panels
    bool integer;        // rows are rounded to two bytes (quantized kinds, and always I16)
    long blocks() const { return (k + FORMATS[kind].depth - 1) / FORMATS[kind].depth; }
    long row_bytes() const { return k * FORMATS[kind].stored / FORMATS[kind].depth; }  // before packing
    long head_bytes() const { return kind == I16 ? LANES * 4 : 0; }  // of a panel: its scales
    long panel_bytes() const { return head_bytes() + blocks() * FORMATS[kind].packed; }
    long panels() const { return (n + LANES - 1) / LANES; }
    const uint8_t* panel(long p) const { return data + p * panel_bytes(); }
};

inline vf clamp_low(vf x, float low) { return x > splat(low) ? x : splat(low); }
inline vf silu(vf x) { return x / (1.0f + exp_v(-clamp_low(x, -87.0f))); }
inline vf tanh_v(vf x) {
    vf y = x < splat(15.0f) ? x : splat(15.0f);
    vf e = exp_v(clamp_low(y, -15.0f) * 2.0f);
    return (e - 1.0f) / (e + 1.0f);
}
inline vf gelu(vf x) { return 0.5f * x * (1.0f + tanh_v(0.7978845608028654f * (x + 0.044715f * x * x * x))); }

// act(gate) * up, of a register of each: up stands a panel behind the gate, and so do their biases. For CLAMPED_MUL see
// `experts.py`.
inline vf gated(int epilogue, const float* at, const float* bias, float alpha = 0, float limit = 0) {
    vf gate = load<vf>(at), up = load<vf>(at + LANES);
    if (bias) {
        gate += load<vf>(bias);
        up += load<vf>(bias + LANES);
    }
    if (epilogue != CLAMPED_MUL) return (epilogue == SILU_MUL ? silu(gate) : gelu(gate)) * up;
    vf most = splat(limit);
    gate = gate < most ? gate : most;
    up = clamp_low(up < most ? up : most, -limit);
    return gate / (1.0f + exp_v(-clamp_low(gate * alpha, -87.0f))) * (up + 1.0f);
}

// Rows to multiply: as floats, and rounded (pairs of bfloat16, or blocks of integers) where that is what is multiplied.
struct Rows {
    const float* x;
    long ldx;
    const void* rounded = nullptr;
    long stride = 0;  // bytes of a rounded row
    long head = 0, head_stride = 0;  // where each head has columns of its own: floats and bytes from one to the next
    template <class T> const T* at() const { return (const T*)rounded; }
    template <class T> long ld() const { return stride / long(sizeof(T)); }
    Rows moved(long floats, long bytes) const {
        return {x + floats, ldx, rounded ? (const char*)rounded + bytes : nullptr, stride, head, head_stride};
    }
    Rows from(long row) const { return moved(row * ldx, row * stride); }
    Rows of_head(long h) const { return moved(h * head, h * head_stride); }
};

// Where rows are rounded.
typedef std::vector<uint64_t> Room;

// Rows are handed out several at a time, so that a piece is worth its overhead.
template <class F> void by_rows(Pool& pool, long rows, long cost, F&& fn) {
    long chunk = std::max<long>(1, 16384 / std::max<long>(1, cost));
    pool.run((rows + chunk - 1) / chunk, [&](long piece, int) {
        for (long r = piece * chunk; r < std::min(rows, (piece + 1) * chunk); r++) fn(r);
    });
}

// The rows as a product with `w` takes them, in `room` if they must be rounded. With a `head` step there are so many
// heads in a row, which are multiplied apart.
Rows prepare(Pool& pool, Room& room, const Weight& w, const float* x, long ldx, long rows, long heads = 1, long head = 0) {
    auto rounded = [&](auto block, long blocks, auto&& round) {  // round(row, blocks of it)
        typedef decltype(block) Block;
        long stride = blocks * long(sizeof(Block));
        size_t need = size_t(rows * heads * stride + 7) / 8;
        if (room.size() < need) room.resize(need);
        by_rows(pool, rows * heads, w.k, [&](long i) {
            round(x + i / heads * ldx + i % heads * head, (Block*)((char*)room.data() + i * stride));
        });
        return Rows{x, ldx, room.data(), heads * stride, head, head ? stride : 0};
    };
    if (w.kind == I16) return rounded(WordBlock(), w.blocks(), [&](const float* from, WordBlock* to) { round_row(from, w.k, to); });
    if (w.integer)
        return rounded(RoundedBlock(), w.k / ROUNDED, [&](const float* from, RoundedBlock* to) {
            for (long i = 0; i < w.k / ROUNDED; i++) round_block(from + i * ROUNDED, to[i]);
        });
    if (BF16_DEPTH == 1 || w.kind != BF16) return {x, ldx, nullptr, 0, head};
    return rounded(uint32_t(), w.blocks(), [&](const float* from, uint32_t* to) {
        for (long i = 0; i < w.k / 2; i++) to[i] = to_bf16(from[2 * i]) | uint32_t(to_bf16(from[2 * i + 1])) << 16;
        if (w.k & 1) to[w.k / 2] = to_bf16(from[w.k - 1]);
    });
}

// acc[rows][16] (+)= x times one quantized panel, from depth k0 on.
template <class Q>
void quantized(const Weight& w, long panel, const Rows& in, long rows, float* acc, long lda, long k0, long depth, Scratch& s) {
    long bytes = FORMATS[w.kind].packed;
    const uint8_t* block = w.panel(panel) + k0 / Q::depth * bytes;
    if (w.integer) {
        integer_rows<Q>(in.at<RoundedBlock>() + k0 / ROUNDED, in.ld<RoundedBlock>(), rows, block, acc, lda, depth, k0 == 0, s.slab);
        return;
    }
    if (rows == 1) {
        float_row<Q>(in.x + k0, block, bytes, acc, depth, k0 == 0);
        return;
    }
    for (long k = 0; k < depth; k += Q::depth, block += bytes) widen_block<Q>(block, s.slab + k * LANES);
    rows_by_panels<F32Row, false>(in.x + k0, in.ldx, rows, s.slab, 0, 1, acc, lda, depth, k0 == 0);
}

// acc[rows][panels * 16] = x times the panels, over the whole depth.
void multiply(const Weight& w, long first, int panels, const Rows& in, long rows, float* acc, Scratch& s) {
    long lda = panels * LANES, ldx = in.ldx;
    const float* x = in.x;
    auto stored = [&](auto row, long k0, long depth) {
        typedef decltype(row) Row;
        typedef typename Row::type T;
        rows_by_panels<Row, true>(x + k0, ldx, rows, (const T*)w.panel(first) + k0 * LANES, w.panel_bytes() / long(sizeof(T)),
                            panels, acc, lda, depth, k0 == 0);
    };
    long step = w.kind == I16 ? WORD_DEPTH : DEPTH_BLOCK;
    for (long k0 = 0; k0 < w.k; k0 += step) {
        long depth = std::min(step, w.k - k0);
        switch (w.kind) {
            case F32: stored(F32Row(), k0, depth); break;
#if defined(RK_BF16_DOT)
            case BF16:
                pairs_by_panels(in.at<uint32_t>() + k0 / 2, in.ld<uint32_t>(), rows, (const uint32_t*)w.panel(first) + k0 / 2 * LANES,
                                w.panel_bytes() / 4, panels, acc, lda, (depth + 1) / 2, k0 == 0);
                break;
#else
            case BF16: stored(Bf16Row(), k0, depth); break;
#endif
            case F16: stored(F16Row(), k0, depth); break;
            case I16:
                word_rows(in.at<WordBlock>() + k0 / WORDS, in.ld<WordBlock>(), rows,
                          (const uint32_t*)(w.panel(first) + w.head_bytes()) + k0 / 2 * LANES, w.panel_bytes() / 4, panels, acc, lda,
                          (depth + WORDS - 1) / WORDS, k0 == 0);
                break;
            default:
                with_format(w.kind, [&](auto format) {
                    for (int p = 0; p < panels; p++)
                        quantized<decltype(format)>(w, first + p, in, rows, acc + p * LANES, lda, k0, depth, s);
                });
        }
    }
    if (w.kind == I16)
        for (int p = 0; p < panels; p++)
            for (int v = 0; v < NV; v++) {
                vf scale = load<vf>(w.panel(first + p) + v * VW * 4);
                for (float* at = acc + p * LANES + v * VW; at < acc + rows * lda; at += lda) store(at, load<vf>(at) * scale);
            }
}

// Rows in a block: alike in all of them, and whole tiles.
long block_of(long rows) {
    long blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    return ((rows + blocks - 1) / blocks + ROWS - 1) / ROWS * ROWS;
}

// Call fn(row, rows, panel, panels, products, thread) for tiles that cover all rows and panels: products[rows][panels * 16].
// Rows come in blocks that stay in the second-level cache while all panels pass by; 1, 2 or 4 panels at a time, of which
// none cross a multiple of `span`: the columns of one head, where each has rows of its own.
template <class F>
void by_tiles(Pool& pool, Scratch* scratch, const Weight& w, const Rows& x, long rows, long span, F&& fn) {
    // Few rows: more panels at once, to share the loads of x, but enough pieces for threads to end together.
    long group = rows > 8 || w.panels() < 128 ? 2 : 4, per_span = (span + group - 1) / group;
    long groups = w.panels() / span * per_span, block = block_of(rows);
    pool.run((rows + block - 1) / block * groups, [&](long piece, int thread) {
        Scratch& s = scratch[thread];
        long row = piece / groups * block, count = std::min(block, rows - row);
        long begin = piece % groups / per_span * span, panel = begin + piece % groups % per_span * group;
        long last = std::min(panel + group, begin + span);
        for (int some; panel < last; panel += some) {
            some = last - panel >= 4 ? 4 : last - panel >= 2 ? 2 : 1;
            multiply(w, panel, some, x.from(row).of_head(panel / span), count, s.acc, s);
            fn(row, count, panel, some, s.acc, thread);
        }
    });
}

// row[column..] = n products, and bias.
inline void put_products(const float* from, const float* bias, long column, long n, float* row) {
    for (long i = 0; i < n; i++) row[column + i] = bias ? from[i] + bias[column + i] : from[i];
}

// y[rows][n] = x[rows][k] * w + bias; or, gate and up panels taking turns in w, y[rows][n / 2] = act(gate) * up.
void linear(Pool& pool, Scratch* scratch, const Weight& w, const float* bias, int epilogue, const Rows& x, long rows,
            float* y, long ldy) {
    by_tiles(pool, scratch, w, x, rows, w.panels(), [&](long first, long count, long panel, int panels, const float* products, int) {
        long column = panel * LANES;
        for (long r = 0; r < count; r++) {
            const float* from = products + r * panels * LANES;
            float* row = y + (first + r) * ldy;
            if (epilogue == PLAIN) {
                put_products(from, bias, column, std::min<long>(panels * LANES, w.n - column), row);
                continue;
            }
            for (int pair = 0; pair < panels; pair += 2) {
                long to = (panel + pair) / 2 * LANES, n = std::min<long>(LANES, w.n / 2 - to);
                alignas(64) float out[LANES];
                const float* biases = bias ? bias + column + pair * LANES : nullptr;
                for (int v = 0; v < NV; v++)
                    store(out + v * VW, gated(epilogue, from + pair * LANES + v * VW, biases ? biases + v * VW : nullptr));
                memcpy(row + to, out, size_t(n) * 4);
            }
        }
    });
}

// Of each head its own product: y[rows][h * step ..] = the h-th part of x times the h-th part of the panels, n columns.
void head_linear(Pool& pool, Scratch* scratch, const Weight& w, long heads, long n, const Rows& x, long rows, float* y, long ldy,
                 long step) {
    long span = w.panels() / heads;
    by_tiles(pool, scratch, w, x, rows, span, [&](long first, long count, long panel, int panels, const float* products, int) {
        long column = panel % span * LANES, columns = std::min<long>(panels * LANES, n - column);
        float* to = y + first * ldy + panel / span * step;
        for (long r = 0; r < count; r++) put_products(products + r * panels * LANES, nullptr, column, columns, to + r * ldy);
    });
}

// The column of the largest product of each row, the first of equals, without keeping the products.
void best_columns(Pool& pool, Scratch* scratch, const Weight& w, const Rows& x, long rows, int64_t* out) {
    struct Best { float value; long column; };
    std::vector<Best> best(size_t(rows * pool.size()), Best{NEVER, 0});
    by_tiles(pool, scratch, w, x, rows, w.panels(), [&](long first, long count, long panel, int panels, const float* products, int thread) {
        long column = panel * LANES, n = std::min<long>(panels * LANES, w.n - column);
        for (long r = 0; r < count; r++) {
            Best& mine = best[size_t(thread * rows + first + r)];
            const float* from = products + r * panels * LANES;
            // Compare whole panels first: a new best is rare.
            vf top = splat(NEVER);
            for (int v = 0; v < panels * NV; v++) {
                vf y = load<vf>(from + v * VW);
                top = y > top ? y : top;
            }
            float most = max_v(top);
            if (most < mine.value) continue;
            for (long i = 0; i < n; i++)
                if (from[i] > mine.value || (from[i] == mine.value && column + i < mine.column)) mine = {from[i], column + i};
        }
    });
    for (long r = 0; r < rows; r++) {
        Best all = best[size_t(r)];
        for (int t = 1; t < pool.size(); t++) {
            const Best& other = best[size_t(t * rows + r)];
            if (other.value > all.value || (other.value == all.value && other.column < all.column)) all = other;
        }
        out[r] = all.column;
    }
}

// ---- rows: norms, embedding, rotation

float sum_of_squares(const float* x, long n) {
    vf sum[4] = {};
    long i = 0;
    for (; i + 4 * VW <= n; i += 4 * VW)
        for (int j = 0; j < 4; j++) {
            vf v = load<vf>(x + i + j * VW);
            sum[j] += v * v;
        }
    float total = sum_v((sum[0] + sum[1]) + (sum[2] + sum[3]));
    for (; i < n; i++) total += x[i] * x[i];
    return total;
}

void norm_row(const float* x, const float* weight, float eps, long n, float* y) {
    float scale = 1.0f / std::sqrt(sum_of_squares(x, n) / float(n) + eps);
    for (long i = 0; i < n; i++) y[i] = x[i] * scale * weight[i];
}

void embed_row(const Weight& w, long token, float factor, float* y, Scratch& s) {
    const uint8_t* panel = w.panel(token / LANES);
    int column = int(token % LANES);
    const Format& f = FORMATS[w.kind];
    for (long k = 0; k < w.k; k++) {
        float value;
        switch (w.kind) {
            case F32: value = ((const float*)panel)[k * LANES + column]; break;
            case BF16: value = from_bf16(((const uint16_t*)panel)[bf16_index(k, column)]); break;
            case F16: value = from_f16(((const uint16_t*)panel)[k * LANES + column]); break;
            case I16: value = ((const int16_t*)(panel + w.head_bytes()))[word_index(k, column)] * load<float>(panel + column * 4); break;
            default:
                if (k % f.depth == 0)
                    with_format(w.kind, [&](auto q) { widen_block<decltype(q)>(panel + k / f.depth * f.packed, s.slab); });
                value = s.slab[k % f.depth * LANES + column];
        }
        y[k] = value * factor;
    }
}

// ---- the cache: for each block and key/value head, tiles of 16 tokens (or of a block, if that is smaller). A tile of
// keys is a panel of depth H whose columns are tokens; a tile of values is H / 16 panels whose columns are parts of the
// head and whose depth is tokens. Where each token of a head has a scale, these floats follow the tile. Where keys hold
// their values (latent attention), these are not stored again.

enum CacheKind { E4M3 = 16, E5M2, INT8_HEADS, E4M3_HEADS };  // beside F32, BF16 and F16

struct Cache {
    int kind;
    uint8_t *keys, *values;
    const float* scales;      // of the layer's keys and its values; E4M3 and E5M2 only
    long heads, head, block;  // key/value heads; head size; tokens in a block
    long value_in_key;        // entries of a key, the last ones, that are its value; 0: values are stored
    long tokens() const { return std::min<long>(block, LANES); }  // in a tile
    bool narrow() const { return kind >= E4M3; }           // of eight bits, with scales
    bool scaled_heads() const { return kind >= INT8_HEADS; }  // one for each token of a head
    long item() const { return narrow() ? 1 : kind == F32 ? 4 : 2; }
    long value_head() const { return value_in_key ? value_in_key : head; }
    long value_panels() const { return (value_head() + LANES - 1) / LANES; }
    long key_codes() const { return head * LANES * item(); }  // bytes of a tile before its scales
    long value_codes() const { return value_panels() * LANES * tokens() * item(); }
    long key_bytes() const { return key_codes() + (scaled_heads() ? LANES * 4 : 0); }
    long value_bytes() const { return value_in_key ? key_bytes() : value_codes() + (scaled_heads() ? tokens() * 4 : 0); }
    long tile(long slot, long g) const { return (slot / block * heads + g) * (block / tokens()) + slot % block / tokens(); }
    uint8_t* key_tile(long slot, long g) const { return keys + tile(slot, g) * key_bytes(); }
    uint8_t* value_tile(long slot, long g) const { return (value_in_key ? keys : values) + tile(slot, g) * value_bytes(); }
};

inline void put(const Cache& c, uint8_t* tile, long row, int column, float x) {
    if (c.kind == F32) ((float*)tile)[row * LANES + column] = x;
    else if (c.kind == BF16) ((uint16_t*)tile)[row * LANES + bf16_place(column)] = to_bf16(x);
    else ((uint16_t*)tile)[row * LANES + column] = to_f16(x);
}

// fn(codes) for those of a narrow kind.
template <class F> void with_codes(int kind, F&& fn) {
    switch (kind) {
        case E5M2: fn(E5m2()); break;
        case INT8_HEADS: fn(Int8()); break;
        default: fn(E4m3());
    }
}

// Store a head in eight bits, entry h at `place(h)` of the tile; its scale is that of the layer, or goes to `own`.
template <class F> void put_narrow(const Cache& c, const float* x, float scale, uint8_t* tile, uint8_t* own, F&& place) {
    with_codes(c.kind, [&](auto code) {
        typedef decltype(code) Code;
        if (c.scaled_heads()) store(own, scale = scale_of<Code>(x, c.head));
        for (long h = 0; h < c.head; h++) tile[place(h)] = Code::make(x[h] / scale);
    });
}

float layer_scale(const Cache& c, int which) { return c.scaled_heads() ? 1.0f : c.scales[which]; }

void write_key(const Cache& c, long slot, long g, const float* k) {
    uint8_t* tile = c.key_tile(slot, g);
    int lane = int(slot % c.block % c.tokens());
    if (c.narrow()) {
        put_narrow(c, k, layer_scale(c, 0), tile, tile + c.key_codes() + lane * 4, [&](long h) { return h * LANES + lane; });
        return;
    }
    for (long h = 0; h < c.head; h++) put(c, tile, h, lane, k[h]);
}

void write_value(const Cache& c, long slot, long g, const float* v) {
    uint8_t* tile = c.value_tile(slot, g);
    long lane = slot % c.block % c.tokens();
    if (c.narrow()) {
        put_narrow(c, v, layer_scale(c, 1), tile, tile + c.value_codes() + lane * 4,
                   [&](long h) { return (h / LANES * c.tokens() + lane) * LANES + h % LANES; });
        return;
    }
    for (long h = 0; h < c.head; h++) put(c, tile, h / LANES * c.tokens() + lane, int(h % LANES), v[h]);
}

// fn(widen), where widen(h, out) gives row h of a tile of keys as 16 floats.
template <class F> void with_keys(const Cache& c, const uint8_t* tile, F&& fn) {
    auto stored = [&](auto row) {
        typedef decltype(row) Row;
        fn([&](long h, float* out) {
            vf wide[NV];
            Row::widen((const typename Row::type*)tile + h * LANES, wide);
            for (int v = 0; v < NV; v++) store(out + v * VW, wide[v]);
        });
    };
    if (c.kind == F32) return stored(F32Row());
    if (c.kind == BF16) return stored(Bf16Row());
    if (c.kind == F16) return stored(F16Row());
    vf scale[NV];
    for (int v = 0; v < NV; v++)
        scale[v] = c.scaled_heads() ? load<vf>(tile + c.key_codes() + v * VW * 4) : splat(layer_scale(c, 0));
    with_codes(c.kind, [&](auto code) {
        typedef decltype(code) Code;
        fn([&](long h, float* out) {
            for (int v = 0; v < NV; v++) store(out + v * VW, Code::widen(tile + h * LANES + v * VW) * scale[v]);
        });
    });
}

// A tile of keys as floats.
void widen_keys(const Cache& c, const uint8_t* tile, float* to) {
    with_keys(c, tile, [&](auto&& widen) {
        for (long h = 0; h < c.head; h++) widen(h, to + h * LANES);
    });
}

// The values that a tile of keys holds, of its first tokens, as a tile of floats.
void turn_values(const Cache& c, const uint8_t* tile, long tokens, float* to) {
    long stride = c.tokens() * LANES;
    with_keys(c, tile, [&](auto&& widen) {
        alignas(64) float row[LANES];
        for (long h = 0; h < c.value_in_key; h++) {
            widen(c.head - c.value_in_key + h, row);
            float* at = to + h / LANES * stride + h % LANES;
            for (long t = 0; t < tokens; t++) at[t * LANES] = row[t];
        }
    });
}

// The first tokens of a tile of values as floats, the others left out.
void widen_values(const Cache& c, const uint8_t* tile, long tokens, float* to) {
    long panels = c.value_panels(), stride = c.tokens() * LANES;
    with_codes(c.kind, [&](auto code) {
        for (long t = 0; t < tokens; t++) {
            vf scale = splat(c.scaled_heads() ? load<float>(tile + c.value_codes() + t * 4) : layer_scale(c, 1));
            for (long p = 0; p < panels; p++)
                for (int v = 0; v < NV; v++) {
                    long at = p * stride + t * LANES + v * VW;
                    store(to + at, decltype(code)::widen(tile + at) * scale);
                }
        }
    });
}

void rotate(float* x, const float* cos_sin, long half) {
    for (long i = 0; i < half; i++) {
        float a = x[i], b = x[i + half], c = cos_sin[i], s = cos_sin[i + half];
        x[i] = a * c - b * s;
        x[i + half] = b * c + a * s;
    }
}

// ---- attention

struct Step {
    long tokens, requests;
    const int64_t* token_ids;
    const int32_t* query_start;  // (requests + 1)
    const int32_t* seq_lens;
    const int32_t* block_table;  // for each group of layers: (requests, table_width)
    long table_width;
    const int64_t* slots;        // for each group of layers: (tokens)
    const float* const* angles;  // for each rope: rows of `rotated` cosines and sines
    const int64_t* angle_rows;   // (tokens) which of them a token takes; null: one each
    const int32_t* sharers;      // (num_sharers) requests of one query that begin with the same blocks
    long num_sharers, shared;    // tokens in these
};

// ---- heads: `queries` of queries, then those of keys, then those of values, side by side in a row

struct Heads {
    Cache cache;
    long queries, rotated;
    const float* angles;            // (positions, rotated)
    const int64_t* angle_rows;      // (tokens), or null
    const int64_t* slots;           // (tokens)
    const float *q_norm, *k_norm;   // (head), or null
    float eps;
};

// What follows the product: a head is normed and rotated, or stored, or both.
void finish_head(const Heads& h, long token, long head, float* x) {
    const Cache& c = h.cache;
    if (head >= h.queries + c.heads) {
        write_value(c, h.slots[token], head - h.queries - c.heads, x);
        return;
    }
    bool query = head < h.queries;
    if (const float* weight = query ? h.q_norm : h.k_norm) norm_row(x, weight, h.eps, c.head, x);
    rotate(x, h.angles + (h.angle_rows ? h.angle_rows[token] : token) * h.rotated, h.rotated / 2);
    if (!query) write_key(c, h.slots[token], head - h.queries, x);
}

// As `linear`, of whole heads from `first` on, each finished by the thread that brings its last product. A head is a
// multiple of 16 columns wide.
void project(Pool& pool, Scratch* scratch, std::vector<int>& counts, const Weight& w, const float* bias, const Heads& heads, long first,
             const Rows& x, long rows, float* y, long ldy) {
    long size = heads.cache.head, span = size / LANES, here = w.n / size;
    counts.assign(size_t((rows / block_of(rows) + 1) * here), 0);  // panels done of each block of rows and head
    by_tiles(pool, scratch, w, x, rows, span, [&](long row, long count, long panel, int panels, const float* products, int) {
        for (long r = 0; r < count; r++)
            put_products(products + r * panels * LANES, bias, panel * LANES, panels * LANES, y + (row + r) * ldy);
        std::atomic_ref<int> done(counts[size_t(row / block_of(rows) * here + panel / span)]);
        if (done.fetch_add(panels, std::memory_order_acq_rel) + panels < span) return;
        for (long r = 0; r < count; r++) finish_head(heads, row + r, first + panel / span, y + (row + r) * ldy + panel / span * size);
    });
}

struct Attend {
    const Cache* cache;
    const Step* step;
    const int32_t* table;  // of this layer's blocks
    const float* q;  // (tokens, ldq): N heads
    long ldq;
    float* out;      // (tokens, ldo)
    long ldo, heads;
    float scale, cap;
    long window;
    const float* sinks;  // (N), or null
};

struct Piece {
    int request;
    int group;       // key/value head
    long first, count;  // queries, counted within the request
    long split;      // -1: all splits, one after another
    long part;       // where its partial result goes, if it does one split only; else where those of the shared splits are
    const int32_t* sharers = nullptr;  // of one split: the requests whose queries it takes, not those of `request`
    long shared = 0, stride = 0;       // of all splits: tokens whose splits are done; from one of these parts to the next
};

inline long lowest(const Attend& a, long position) { return a.window ? std::max<long>(0, position + 1 - a.window) : 0; }

// Where the tiles of a split begin that a query at `position` sees: those before may be any other request's by now.
inline long first_tile(const Attend& a, long position, long t0) {
    long tokens = a.cache->tokens();
    return std::max(t0, lowest(a, position) / tokens * tokens);
}

long slot_of(const Attend& a, int request, long token) {
    const Cache& c = *a.cache;
    return long(a.table[request * a.step->table_width + token / c.block]) * c.block + token % c.block;
}

// Ask for memory that will be read soon.
inline void fetch(const uint8_t* at, long size) {
    for (long i = 0; i < size; i += 64) __builtin_prefetch(at + i);
}

// Scores of one split: row r is query head r % R of query r / R. Softmax numerators replace them; sums and maxima out.
// `wide` is room for a tile as floats.
void score_split(const Attend& a, const Piece& p, long rows, long ratio, long t0, long t1, const float* qs, float* scores,
                 float* sums, float* tops, float* wide) {
    const Cache& c = *a.cache;
    long base = a.step->seq_lens[p.request] - (a.step->query_start[p.request + 1] - a.step->query_start[p.request]);
    long from = first_tile(a, base + p.first, t0);
    for (long t = from; t < t1; t += c.tokens()) {
        const uint8_t* tile = c.key_tile(slot_of(a, p.request, t), p.group);
        float* to = scores + (t - t0);
        if (t + c.tokens() < t1) fetch(c.key_tile(slot_of(a, p.request, t + c.tokens()), p.group), c.key_bytes());
        else if (!c.value_in_key) fetch(c.value_tile(slot_of(a, p.request, from), p.group), c.value_bytes());
        if (c.narrow()) {
            widen_keys(c, tile, wide);
            rows_by_panels<F32Row, false>(qs, c.head, rows, wide, 0, 1, to, SCORES, c.head, true);
        } else if (c.kind == F32) rows_by_panels<F32Row, false>(qs, c.head, rows, (const float*)tile, 0, 1, to, SCORES, c.head, true);
        else if (c.kind == BF16) rows_by_panels<Bf16Row, false>(qs, c.head, rows, (const uint16_t*)tile, 0, 1, to, SCORES, c.head, true);
        else rows_by_panels<F16Row, false>(qs, c.head, rows, (const uint16_t*)tile, 0, 1, to, SCORES, c.head, true);
    }
    long width = (t1 - t0 + LANES - 1) / LANES * LANES;
    for (long r = 0; r < rows; r++) {
        long position = base + p.first + r / ratio;
        long begin = std::max(t0, lowest(a, position)) - t0, end = std::min(t1, position + 1) - t0;
        float* row = scores + r * SCORES;
        if (end <= begin) {
            sums[r] = 0;
            tops[r] = NEVER;
            std::fill(row, row + width, 0.0f);
            continue;
        }
        if (a.cap > 0)
            for (long i = begin / VW * VW; i < end; i += VW) store(row + i, tanh_v(load<vf>(row + i) * (1.0f / a.cap)) * a.cap);
        std::fill(row, row + begin, NEVER);
        std::fill(row + end, row + width, NEVER);
        vf top = splat(NEVER);
        for (long i = 0; i < width; i += VW) {
            vf v = load<vf>(row + i);
            top = v > top ? v : top;
        }
        float most = max_v(top);
        // Sixteen lanes whatever the register width and the end of the row: the sum's order never changes.
        vf sum[NV] = {};
        for (long i = 0; i < width; i += LANES)
            for (int v = 0; v < NV; v++) {
                vf e = exp_v(load<vf>(row + i + v * VW) - most);
                store(row + i + v * VW, e);
                sum[v] += e;
            }
        float total = 0;
        for (int v = 0; v < NV; v++) total += sum_v(sum[v]);
        sums[r] = total;
        tops[r] = most;
    }
}

// acc[rows][H, filled up to whole panels] = numerators times the values of the split. `room` is for a tile as floats.
void weigh_split(const Attend& a, const Piece& p, long rows, long t0, long t1, const float* scores, float* acc, float* room) {
    const Cache& c = *a.cache;
    long step = c.tokens(), stride = step * LANES, wide = c.value_panels() * LANES;
    bool floats = c.narrow() || c.value_in_key;
    long item = floats ? 4 : c.item();
    long base = a.step->seq_lens[p.request] - (a.step->query_start[p.request + 1] - a.step->query_start[p.request]);
    long first = first_tile(a, base + p.first, t0);
    for (long t = first; t < t1; t += step) {
        const uint8_t* tile = c.value_tile(slot_of(a, p.request, t), p.group);
        const float* x = scores + (t - t0);
        if (t + step < t1) fetch(c.value_tile(slot_of(a, p.request, t + step), p.group), c.value_bytes());
        if (c.value_in_key) turn_values(c, tile, std::min(step, t1 - t), room);
        else if (c.narrow()) widen_values(c, tile, std::min(step, t1 - t), room);
        if (floats) tile = (const uint8_t*)room;
        for (long h = 0, panels; h < wide; h += panels * LANES) {
            panels = wide - h >= 4 * LANES ? 4 : wide - h >= 2 * LANES ? 2 : 1;
            const uint8_t* at = tile + h * step * item;
            auto add = [&](auto row) {
                typedef decltype(row) Row;
                // No deeper than the tokens: 0 times what else the tile holds could be NaN.
                rows_by_panels<Row, false>(x, SCORES, rows, (const typename Row::type*)at, stride, int(panels), acc + h, wide,
                                    std::min(step, t1 - t), t == first);
            };
            if (floats || c.kind == F32) add(F32Row());
            else if (c.kind == BF16) add(Bf16Row());
            else add(F16Row());
        }
    }
}

// Fold a split's result into what the splits before it gave.
void fold(long head, float& top, float& sum, float* acc, float part_top, float part_sum, const float* part) {
    if (part_sum == 0) return;
    if (sum == 0) {
        top = part_top;
        sum = part_sum;
        memcpy(acc, part, size_t(head) * 4);
        return;
    }
    float most = std::max(top, part_top);
    float old = std::exp(top - most), fresh = std::exp(part_top - most);
    for (long h = 0; h < head; h++) acc[h] = acc[h] * old + part[h] * fresh;
    sum = sum * old + part_sum * fresh;
    top = most;
}

// Divide by the sum. A sink joins it last, so that the order stays the same however the context was split.
void finish(long head, float top, float sum, const float* acc, const float* sink, float* out) {
    float scale = 1.0f;
    if (sink) {
        float most = std::max(top, *sink);
        scale = std::exp(top - most);
        sum = sum * scale + std::exp(*sink - most);
    }
    for (long h = 0; h < head; h++) out[h] = acc[h] * scale / sum;
}

void attend_piece(const Attend& a, const Piece& p, Scratch& s, float* parts) {
    const Cache& c = *a.cache;
    long ratio = a.heads / c.heads, rows = p.count * ratio;
    long start = a.step->query_start[p.request];
    long length = a.step->seq_lens[p.request], base = length - (a.step->query_start[p.request + 1] - start);
    long value = c.value_head(), wide = c.value_panels() * LANES;
    long room = c.narrow() || c.value_in_key ? std::max(c.head, wide) * LANES : 0;
    size_t need = size_t(rows) * size_t(SCORES + c.head + 2 * wide + 4) + size_t(room);
    if (s.attention.size() < need) s.attention.resize(need);
    float* qs = s.attention.data();
    float *scores = qs + rows * c.head, *part = scores + rows * SCORES, *acc = part + rows * wide;
    float *sums = acc + rows * wide, *tops = sums + rows, *all_sums = tops + rows, *all_tops = all_sums + rows, *tile = all_tops + rows;
    for (long r = 0; r < rows; r++) {
        long token = p.sharers ? a.step->query_start[p.sharers[r / ratio]] : start + p.first + r / ratio;
        const float* from = a.q + token * a.ldq + (p.group * ratio + r % ratio) * c.head;
        for (long h = 0; h < c.head; h++) qs[r * c.head + h] = from[h] * a.scale;
    }
    long last = base + p.first + p.count;  // tokens that the last query sees
    if (p.split >= 0) {
        long t0 = p.split * SPLIT, t1 = std::min<long>(t0 + SPLIT, last);
        score_split(a, p, rows, ratio, t0, t1, qs, scores, sums, tops, tile);
        weigh_split(a, p, rows, t0, t1, scores, part, tile);
        float* to = parts + p.part * (value + 2);
        for (long r = 0; r < rows; r++, to += value + 2) {
            to[0] = tops[r];
            to[1] = sums[r];
            memcpy(to + 2, part + r * wide, size_t(value) * 4);
        }
        return;
    }
    std::fill(all_sums, all_sums + rows, 0.0f);
    for (long i = 0; i < p.shared / SPLIT; i++)
        for (long r = 0; r < rows; r++) {
            const float* done = parts + (p.part + i * p.stride + r) * (value + 2);
            fold(value, all_tops[r], all_sums[r], acc + r * wide, done[0], done[1], done + 2);
        }
    for (long t0 = std::max(p.shared, lowest(a, base + p.first) / SPLIT * SPLIT); t0 < last; t0 += SPLIT) {
        long t1 = std::min<long>(t0 + SPLIT, last);
        score_split(a, p, rows, ratio, t0, t1, qs, scores, sums, tops, tile);
        weigh_split(a, p, rows, t0, t1, scores, part, tile);
        for (long r = 0; r < rows; r++)
            fold(value, all_tops[r], all_sums[r], acc + r * wide, tops[r], sums[r], part + r * wide);
    }
    for (long r = 0; r < rows; r++) {
        long head = p.group * ratio + r % ratio;
        float* to = a.out + (start + p.first + r / ratio) * a.ldo + head * value;
        finish(value, all_tops[r], all_sums[r], acc + r * wide, a.sinks ? a.sinks + head : nullptr, to);
    }
}

void attention(Pool& pool, Scratch* scratch, const Attend& a, std::vector<Piece>& pieces, std::vector<float>& parts) {
    const Cache& c = *a.cache;
    const Step& step = *a.step;
    long ratio = a.heads / c.heads, value = c.value_head();
    struct Join { int request, group; long first_part, splits; };
    std::vector<Join> joins;
    pieces.clear();
    long per_piece = std::max<long>(1, 48 / ratio);
    // What requests share is done for all of them together. Its splits are whole and join in their order, so that the
    // result is the same bits.
    long sharers = a.window ? 0 : step.num_sharers, shared = sharers ? step.shared / SPLIT * SPLIT : 0;
    long stride = sharers * ratio, part = c.heads * (shared / SPLIT) * stride;
    if (parts.size() < size_t(part * (value + 2))) parts.resize(size_t(part * (value + 2)));
    for (int g = 0; g < c.heads; g++)
        for (long s = 0; s < shared / SPLIT; s++)
            for (long i = 0; i < sharers; i += per_piece)
                pieces.push_back({step.sharers[i], g, 0, std::min(per_piece, sharers - i), s,
                                  (g * (shared / SPLIT) + s) * stride + i * ratio, step.sharers + i});
    if (shared) pool.run(long(pieces.size()), [&](long i, int thread) { attend_piece(a, pieces[size_t(i)], scratch[thread], parts.data()); });
    pieces.clear();
    bool few = step.requests * c.heads < 4 * pool.size();
    long next_sharer = 0;
    for (int b = 0; b < step.requests; b++) {
        long queries = step.query_start[b + 1] - step.query_start[b], length = step.seq_lens[b];
        if (shared && next_sharer < sharers && step.sharers[next_sharer] == b) {
            for (int g = 0; g < c.heads; g++)
                pieces.push_back({b, g, 0, 1, -1, g * (shared / SPLIT) * stride + next_sharer * ratio, nullptr, shared, stride});
            next_sharer++;
            continue;
        }
        for (int g = 0; g < c.heads; g++) {
            long first_split = lowest(a, length - 1) / SPLIT, splits = (length + SPLIT - 1) / SPLIT - first_split;
            if (queries == 1 && few && splits > 1 && pool.size() > 1) {
                joins.push_back({b, g, part, splits});
                for (long s = 0; s < splits; s++, part += ratio) pieces.push_back({b, g, 0, 1, first_split + s, part, nullptr});
                continue;
            }
            for (long i = 0; i < queries; i += per_piece) pieces.push_back({b, g, i, std::min(per_piece, queries - i), -1, 0});
        }
    }
    if (parts.size() < size_t(part * (value + 2))) parts.resize(size_t(part * (value + 2)));
    // The last queries of a chunk see most: begin with them, so that no thread is left with a long one at the end.
    long total = long(pieces.size());
    pool.run(total, [&](long i, int thread) { attend_piece(a, pieces[size_t(total - 1 - i)], scratch[thread], parts.data()); });
    for (const Join& j : joins)
        for (long r = 0; r < ratio; r++) {
            std::vector<float> acc((size_t)value);
            float top = NEVER, sum = 0;
            for (long s = 0; s < j.splits; s++) {
                const float* from = parts.data() + (j.first_part + s * ratio + r) * (value + 2);
                fold(value, top, sum, acc.data(), from[0], from[1], from + 2);
            }
            long head = j.group * ratio + r;
            float* to = a.out + step.query_start[j.request] * a.ldo + head * value;
            finish(value, top, sum, acc.data(), a.sinks ? a.sinks + head : nullptr, to);
        }
}

// ---- the program

enum Op { EMBED, NORM, ADD, ADD_NORM, LINEAR, HEAD_NORM, ROTATE_AND_STORE, ATTENTION, PROJECT, ROUTE, EXPERTS, GATE, HEAD_LINEAR };

}  // namespace

#include "experts.h"

// An instruction. What the fields mean depends on `op`; program.py says it, beside the code that writes them.
struct Instruction {
    int32_t op, kind, epilogue, rope;
    int32_t src, dst, other;  // buffers
    int32_t integer, cache_kind, group;
    int64_t n, k, heads, kv_heads, head, value_in_key, rotated, block, window, offset, step;
    const void *weight, *bias, *sinks, *keys, *values, *q_norm, *k_norm, *scales;
    float f0, f1;
};

struct Machine {
    Pool pool;
    std::unique_ptr<Scratch[]> scratch;
    std::vector<Piece> pieces;
    std::vector<float> parts;
    std::vector<int> counts;
    Chosen chosen;
    Room room;
    explicit Machine(int threads) : pool(threads), scratch(new Scratch[size_t(threads)]) {}
};

namespace {

void carry_out(Machine& m, const Instruction& in, const Step& step, float* const* buffers, const int64_t* widths) {
    long rows = step.tokens;
    float *src = buffers[in.src], *dst = buffers[in.dst], *other = buffers[in.other];
    long lds = widths[in.src], ldd = widths[in.dst], ldo = widths[in.other];
    const float* weight = (const float*)in.weight;
    Weight w{in.kind, in.n, in.k, (const uint8_t*)in.weight, in.integer != 0};
    Cache cache{in.cache_kind, (uint8_t*)in.keys, (uint8_t*)in.values, (const float*)in.scales, in.kv_heads, in.head, in.block,
                in.value_in_key};
    auto heads = [&] {
        return Heads{cache, in.heads, in.rotated, step.angles[in.rope], step.angle_rows, step.slots + in.group * rows,
                     (const float*)in.q_norm, (const float*)in.k_norm, in.f0};
    };
    switch (in.op) {
        case EMBED: {
            bool threads = rows > 1;
            auto one = [&](long r, int thread) { embed_row(w, step.token_ids[r], in.f0, dst + r * ldd, m.scratch[size_t(thread)]); };
            if (threads) m.pool.run(rows, one);
            else one(0, 0);
            break;
        }
        case NORM:
            by_rows(m.pool, rows, in.n, [&](long r) { norm_row(src + r * lds + in.offset, weight, in.f0, in.n, dst + r * ldd + in.offset); });
            break;
        case ADD:
            by_rows(m.pool, rows, in.n, [&](long r) {
                for (long i = 0; i < in.n; i++) other[r * ldo + i] += src[r * lds + i] * in.f1;
            });
            break;
        case ADD_NORM:
            by_rows(m.pool, rows, in.n, [&](long r) {
                float* sum = other + r * ldo;
                const float* x = src + r * lds;
                for (long i = 0; i < in.n; i++) sum[i] += x[i] * in.f1;
                norm_row(sum, weight, in.f0, in.n, dst + r * ldd);
            });
            break;
        case LINEAR:
            linear(m.pool, m.scratch.get(), w, (const float*)in.bias, in.epilogue, prepare(m.pool, m.room, w, src, lds, rows),
                   rows, dst + in.offset, ldd);
            break;
        case HEAD_LINEAR: {
            w.n = in.heads * ((in.n + LANES - 1) / LANES * LANES);
            Rows x = prepare(m.pool, m.room, w, src, lds, rows, in.step ? in.heads : 1, in.step);
            head_linear(m.pool, m.scratch.get(), w, in.heads, in.n, x, rows, dst + in.offset, ldd, in.head);
            break;
        }
        case HEAD_NORM:
            by_rows(m.pool, rows, in.heads * in.head, [&](long r) {
                for (long h = 0; h < in.heads; h++) {
                    float* x = src + r * lds + in.offset + h * in.head;
                    norm_row(x, weight, in.f0, in.head, x);
                }
            });
            break;
        case PROJECT:
            project(m.pool, m.scratch.get(), m.counts, w, (const float*)in.bias, heads(), in.offset / in.head,
                    prepare(m.pool, m.room, w, src, lds, rows), rows, dst + in.offset, ldd);
            break;
        case ROTATE_AND_STORE: {
            Heads h = heads();
            by_rows(m.pool, rows, lds * 2, [&](long r) {
                long all = in.heads + (in.value_in_key ? 1 : 2) * in.kv_heads;
                for (long i = 0; i < all; i++) finish_head(h, r, i, src + r * lds + i * in.head);
            });
            break;
        }
        case ATTENTION: {
            const int32_t* table = step.block_table + in.group * step.requests * step.table_width;
            Attend a{&cache, &step, table, src, lds, dst, ldd, in.heads, in.f0, in.f1, in.window, (const float*)in.sinks};
            attention(m.pool, m.scratch.get(), a, m.pieces, m.parts);
            break;
        }
        case ROUTE: {
            const Router& router = *(const Router*)in.weight;
            int64_t* ids = (int64_t*)in.keys;
            float* weights = (float*)in.values;
            by_rows(m.pool, rows, 8 * router.experts, [&](long r) {
                route_row(router, src + r * lds, ids + r * router.chosen, weights + r * router.chosen);
            });
            break;
        }
        case EXPERTS:
            experts(m.pool, m.scratch.get(), m.room, m.chosen, *(const ExpertSet*)in.weight, src, lds, rows, in.n, (const int64_t*)in.keys,
                    (const float*)in.values, dst, ldd, in.offset != 0);
            break;
        case GATE:
            by_rows(m.pool, rows, in.n, [&](long r) {
                float factor = 1.0f / (1.0f + std::exp(-src[r * lds]));
                for (long i = 0; i < in.n; i++) dst[r * ldd + i] *= factor;
            });
            break;
    }
}

// The first of the largest entries.
long argmax(const float* x, long n) {
    vf top = splat(NEVER);
    long i = 0;
    for (; i + VW <= n; i += VW) {
        vf v = load<vf>(x + i);
        top = v > top ? v : top;
    }
    float most = max_v(top);
    for (; i < n; i++) most = std::max(most, x[i]);
    for (i = 0; i < n; i++)
        if (x[i] == most) return i;
    return 0;  // only NaN
}

// A panel of `columns` rows stored as `from`; columns beyond them are zero.
void pack_panel(const Weight& w, int from, const uint8_t* rows, long row_bytes, int columns, uint8_t* out) {
    const Format& f = FORMATS[w.kind];
    memset(out, 0, size_t(w.panel_bytes()));
    auto plain = [&](auto item, auto place) {
        typedef decltype(item) T;
        for (long j = 0; j < w.k; j++)
            for (int c = 0; c < columns; c++) ((T*)out)[place(j, c)] = ((const T*)(rows + c * row_bytes))[j];
    };
    auto side_by_side = [](long j, int c) { return j * LANES + c; };
    if (w.kind == F32) plain(uint32_t(), side_by_side);
    else if (w.kind == BF16) plain(uint16_t(), bf16_index);
    else if (w.kind == F16) plain(uint16_t(), side_by_side);
    else if (w.kind == I16) {
        std::vector<float> column(size_t(w.k));
        for (int c = 0; c < columns; c++) {
            const uint16_t* row = (const uint16_t*)(rows + c * row_bytes);
            for (long j = 0; j < w.k; j++) column[size_t(j)] = from == BF16 ? from_bf16(row[j]) : from_f16(row[j]);
            pack_words(column.data(), w.k, c, out);
        }
    } else
        for (int c = 0; c < columns; c++)
            for (long b = 0; b < w.blocks(); b++) pack_block(w.kind, rows + c * row_bytes + b * f.stored, out + b * f.packed, c);
}

}  // namespace

extern "C" {

// Whether rows are rounded to bfloat16 before they are multiplied with weights of this kind.
int rk_rounds_rows(int kind) { return kind == BF16 && BF16_DEPTH > 1; }

int64_t rk_packed_bytes(int kind, int64_t n, int64_t k) {
    Weight w{kind, n, k, nullptr, false};
    return w.panels() * w.panel_bytes();
}

// Pack a matrix whose rows lie one after another, each as it is stored in `from`: in `kind`, or for I16 in BF16 or F16.
void rk_pack(void* machine, int kind, int from, const void* rows, int64_t n, int64_t k, void* out) {
    Weight w{kind, n, k, (const uint8_t*)out, false};
    long row_bytes = Weight{from, n, k, nullptr, false}.row_bytes();
    ((Machine*)machine)->pool.run(w.panels(), [&](long p, int) {
        const uint8_t* first = (const uint8_t*)rows + p * LANES * row_bytes;
        pack_panel(w, from, first, row_bytes, int(std::min<long>(LANES, n - p * LANES)), (uint8_t*)out + p * w.panel_bytes());
    });
}

void* rk_machine(int threads) { return new Machine(threads); }
void rk_free_machine(void* m) { delete (Machine*)m; }

void rk_linear(void* machine, int kind, int integer, const void* packed, const float* bias, int epilogue, int64_t n, int64_t k,
               const float* x, int64_t ldx, int64_t rows, float* y, int64_t ldy) {
    Machine& m = *(Machine*)machine;
    Weight w{kind, n, k, (const uint8_t*)packed, integer != 0};
    linear(m.pool, m.scratch.get(), w, bias, epilogue, prepare(m.pool, m.room, w, x, ldx, rows), rows, y, ldy);
}

void rk_experts(void* machine, const ExpertSet* set, const float* x, int64_t ldx, int64_t rows, int64_t choices, const int64_t* ids,
                const float* weights, float* y, int64_t ldy) {
    Machine& m = *(Machine*)machine;
    experts(m.pool, m.scratch.get(), m.room, m.chosen, *set, x, ldx, rows, choices, ids, weights, y, ldy, false);
}

void rk_argmax(void* machine, const float* x, int64_t ldx, int64_t rows, int64_t n, int64_t* out) {
    ((Machine*)machine)->pool.run(rows, [&](long r, int) { out[r] = argmax(x + r * ldx, n); });
}

void rk_best_columns(void* machine, int kind, int integer, const void* packed, int64_t n, int64_t k, const float* x, int64_t ldx, int64_t rows,
                     int64_t* out) {
    Machine& m = *(Machine*)machine;
    Weight w{kind, n, k, (const uint8_t*)packed, integer != 0};
    best_columns(m.pool, m.scratch.get(), w, prepare(m.pool, m.room, w, x, ldx, rows), rows, out);
}

void rk_run(void* machine, const Instruction* program, int64_t length, float* const* buffers, const int64_t* widths, const Step* step) {
    for (int64_t i = 0; i < length; i++) carry_out(*(Machine*)machine, program[i], *step, buffers, widths);
}

}  // extern "C"

#include "exchange.h"
#include "sample.h"

// Mixtures of experts: which experts a row goes to, and the products with those that were chosen.
//
// Rows are gathered by expert, so that each matrix is read once a step. A product's bits do not depend on the rows beside
// it, and the outputs of a row are added in the order of its choices: so its result is the same in any company.
#pragma once

namespace {

// As in library.py.
struct Router {
    int64_t experts, chosen, groups, chosen_groups;
    int32_t sigmoid, two_best, normalised, unused;
    const float* correction;  // (experts), or null
    float scale;
};

// The largest that is not `taken`, the first of equals.
long best_of(const float* x, const bool* taken, long n) {
    long best = -1;
    for (long i = 0; i < n; i++)
        if (!taken[i] && (best < 0 || x[i] > x[best])) best = i;
    return best;
}

struct RouterRoom {
    std::vector<float> scores, choice, groups;
    std::unique_ptr<bool[]> taken, taken_groups;
    explicit RouterRoom(const Router& r)
        : scores(size_t(r.experts)), choice(size_t(r.experts)), groups(size_t(r.groups)), taken(new bool[size_t(r.experts)]()),
          taken_groups(new bool[size_t(r.groups)]()) {}
};

// Mark as taken the experts of all groups but the best.
void choose_groups(const Router& r, RouterRoom& room) {
    long size = r.experts / r.groups;
    for (long g = 0; g < r.groups; g++) {
        const float* x = room.choice.data() + g * size;
        bool* taken = room.taken.get() + g * size;
        long first = best_of(x, taken, size);
        room.groups[size_t(g)] = x[first];
        if (!r.two_best) continue;
        taken[first] = true;
        room.groups[size_t(g)] += x[best_of(x, taken, size)];
        taken[first] = false;
    }
    for (long i = 0; i < r.chosen_groups; i++) room.taken_groups[size_t(best_of(room.groups.data(), room.taken_groups.get(), r.groups))] = true;
    for (long e = 0; e < r.experts; e++) room.taken[size_t(e)] = !room.taken_groups[size_t(e / size)];
}

void route_row(const Router& r, const float* logits, int64_t* ids, float* weights) {
    RouterRoom room(r);
    float* scores = room.scores.data();
    if (r.sigmoid) {
        for (long e = 0; e < r.experts; e++) scores[e] = 1.0f / (1.0f + std::exp(-logits[e]));
    } else {
        float most = logits[0], sum = 0;
        for (long e = 1; e < r.experts; e++) most = std::max(most, logits[e]);
        for (long e = 0; e < r.experts; e++) sum += scores[e] = std::exp(logits[e] - most);
        for (long e = 0; e < r.experts; e++) scores[e] /= sum;
    }
    for (long e = 0; e < r.experts; e++) room.choice[size_t(e)] = scores[e] + (r.correction ? r.correction[e] : 0.0f);
    if (r.chosen_groups < r.groups) choose_groups(r, room);
    float total = 0;
    for (long k = 0; k < r.chosen; k++) {
        ids[k] = best_of(room.choice.data(), room.taken.get(), r.experts);
        room.taken[size_t(ids[k])] = true;
        total += weights[k] = scores[ids[k]];
    }
    for (long k = 0; k < r.chosen; k++) weights[k] = (r.normalised ? weights[k] / (total + 1e-20f) : weights[k]) * r.scale;
}

// As in library.py.
struct ExpertSet {
    int64_t count, width, inner;      // experts held; columns in and out; inner width
    int32_t gate_up_kind, gate_up_integer, down_kind, down_integer, epilogue, input_scaled;
    const uint8_t *gate_up, *down;    // packed matrices, one expert after another; gate and up taking turns
    const float *gate_up_bias, *down_bias;  // (count, columns of the product), or null
    float alpha, limit;
    Weight up_of(long e) const {
        Weight w{gate_up_kind, (inner + LANES - 1) / LANES * 2 * LANES, width, gate_up, gate_up_integer != 0};
        w.data += e * w.panels() * w.panel_bytes();
        return w;
    }
    Weight down_of(long e) const {
        Weight w{down_kind, width, inner, down, down_integer != 0};
        w.data += e * w.panels() * w.panel_bytes();
        return w;
    }
};

// Room for one call: pairs of a row and an expert, sorted by expert.
struct Chosen {
    struct Piece { long expert, first, rows, panel, panels; };
    std::vector<long> begin;  // (count + 1) of each expert's pairs
    std::vector<long> place;  // (rows * choices) of a choice among the pairs, or -1
    std::vector<float> x, inner;
    std::vector<Piece> pieces;
};

void sort_by_expert(Chosen& c, const int64_t* ids, long choices, long count) {
    c.begin.assign(size_t(count) + 2, 0);
    for (long i = 0; i < choices; i++)
        if (ids[i] >= 0) c.begin[size_t(ids[i]) + 2]++;
    for (long e = 2; e < count + 2; e++) c.begin[size_t(e)] += c.begin[size_t(e) - 1];
    c.place.resize(size_t(choices));
    for (long i = 0; i < choices; i++) c.place[size_t(i)] = ids[i] < 0 ? -1 : c.begin[size_t(ids[i]) + 1]++;
}

// Call fn(expert, row, rows, panel, panels, products) for tiles that cover the pairs of every expert: as `by_tiles`.
template <class W, class F> void by_experts(Pool& pool, Scratch* scratch, Chosen& c, long count, W&& weight, const Rows& x, F&& fn) {
    c.pieces.clear();
    for (long e = 0; e < count; e++) {
        long first = c.begin[size_t(e)], end = c.begin[size_t(e) + 1], panels = weight(e).panels();
        if (first == end) continue;
        long block = block_of(end - first), group = end - first > 8 || panels < 128 ? 2 : 4;
        for (; first < end; first += block)
            for (long p = 0; p < panels; p += group)
                c.pieces.push_back({e, first, std::min(block, end - first), p, std::min(group, panels - p)});
    }
    pool.run(long(c.pieces.size()), [&](long i, int thread) {
        Chosen::Piece p = c.pieces[size_t(i)];
        Scratch& s = scratch[thread];
        for (long some; p.panels > 0; p.panels -= some, p.panel += some) {
            some = p.panels >= 4 ? 4 : p.panels >= 2 ? 2 : 1;
            multiply(weight(p.expert), p.panel, int(some), x.from(p.first), p.rows, s.acc, s);
            fn(p.expert, p.first, p.rows, p.panel, int(some), s.acc);
        }
    });
}

// out[rows][width] = the weighted sum of each row's experts, or it is added to what stands there.
void experts(Pool& pool, Scratch* scratch, Room& room, Chosen& c, const ExpertSet& set, const float* x, long ldx, long rows, long choices,
             const int64_t* ids, const float* weights, float* out, long ldo, bool add) {
    sort_by_expert(c, ids, rows * choices, set.count);
    long pairs = c.begin[size_t(set.count)], width = set.width, inner = (set.inner + LANES - 1) / LANES * LANES;
    if (c.x.size() < size_t(pairs * width)) c.x.resize(size_t(pairs * width));
    if (c.inner.size() < size_t(pairs * inner)) c.inner.resize(size_t(pairs * inner));
    by_rows(pool, rows, choices * width, [&](long r) {
        for (long k = 0; k < choices; k++) {
            long at = c.place[size_t(r * choices + k)];
            if (at < 0) continue;
            float factor = set.input_scaled ? weights[r * choices + k] : 1.0f;
            for (long i = 0; i < width; i++) c.x[size_t(at * width + i)] = x[r * ldx + i] * factor;
        }
    });
    by_experts(pool, scratch, c, set.count, [&](long e) { return set.up_of(e); }, prepare(pool, room, set.up_of(0), c.x.data(), width, pairs),
               [&](long e, long first, long count, long panel, int panels, const float* products) {
        const float* bias = set.gate_up_bias ? set.gate_up_bias + e * 2 * inner + panel * LANES : nullptr;
        for (long r = 0; r < count; r++)
            for (int pair = 0; pair < panels; pair += 2) {
                const float* from = products + (r * panels + pair) * LANES;
                float* to = c.inner.data() + (first + r) * inner + (panel + pair) / 2 * LANES;
                for (int v = 0; v < NV; v++)
                    store(to + v * VW, gated(set.epilogue, from + v * VW, bias ? bias + pair * LANES + v * VW : nullptr, set.alpha, set.limit));
            }
    });
    float* y = c.x.data();  // which nobody needs any more
    by_experts(pool, scratch, c, set.count, [&](long e) { return set.down_of(e); }, prepare(pool, room, set.down_of(0), c.inner.data(), inner, pairs),
               [&](long e, long first, long count, long panel, int panels, const float* products) {
        const float* bias = set.down_bias ? set.down_bias + e * width : nullptr;
        for (long r = 0; r < count; r++)
            put_products(products + r * panels * LANES, bias, panel * LANES, std::min<long>(panels * LANES, width - panel * LANES),
                         y + (first + r) * width);
    });
    by_rows(pool, rows, choices * width, [&](long r) {
        float* to = out + r * ldo;
        if (!add) std::fill(to, to + width, 0.0f);
        for (long k = 0; k < choices; k++) {
            long at = c.place[size_t(r * choices + k)];
            if (at < 0) continue;
            const float* from = y + at * width;
            float factor = set.input_scaled ? 1.0f : weights[r * choices + k];
            for (long i = 0; i < width; i++) to[i] += from[i] * factor;
        }
    });
}

}  // namespace

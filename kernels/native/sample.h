// From logits to tokens: penalties, filters, the draw, log-probabilities. Part of cpu.cpp, which includes it last.
//
// The contracts stand in sampling.py. A row is one thread's work from start to end, so its result cannot depend on its
// neighbours or on threads. Nothing is sorted as a whole: the largest entry of each CHUNK is found first, in one pass,
// and every later pass leaves out the chunks that hold nothing of interest. Filters only ever find an edge; the tokens
// that survive are those whose scaled logit reaches it.
#pragma once
#include <functional>

namespace {

constexpr long CHUNK = 64;

struct SampleScratch {
    std::vector<float> tops;       // the largest of each chunk
    std::vector<float> values;     // entries in question, for a selection
    std::vector<uint64_t> ranked;  // entries to sort, as keys
    struct Weighed { float value, weight; };
    std::vector<Weighed> weighed;
    std::vector<uint32_t> counts;  // for each token, how often it was seen; zero between rows
    std::vector<int32_t> seen;
};

// A row of logits, chunk by chunk. What a last chunk lacks reads as NEVER.
struct LogitRow {
    const float* x;
    long n;
    float rest[CHUNK];
    LogitRow(const float* x, long n) : x(x), n(n) {
        for (long i = 0; i < CHUNK; i++) {
            long at = n / CHUNK * CHUNK + i;
            rest[i] = at < n ? x[at] : NEVER;
        }
    }
    long chunks() const { return (n + CHUNK - 1) / CHUNK; }
    const float* chunk(long c) const { return c < n / CHUNK ? x + c * CHUNK : rest; }
};

// The largest of each chunk, and of all. NaN is passed over; NEVER where there is nothing else.
float chunk_tops(const LogitRow& row, std::vector<float>& tops) {
    tops.resize(size_t(row.chunks()));
    float all = NEVER;
    for (long c = 0; c < row.chunks(); c++) {
        const float* x = row.chunk(c);
        vf top = splat(NEVER);
        for (long i = 0; i < CHUNK; i += VW) {
            vf v = load<vf>(x + i);
            top = v > top ? v : top;
        }
        float most = max_v(top);
        tops[size_t(c)] = most;
        all = std::max(all, most);
    }
    return all;
}

// A value that at least k entries reach: the k-th largest of the chunks' largest. NEVER if there are fewer chunks.
float bound_of(long k, SampleScratch& s) {
    if (k > long(s.tops.size())) return NEVER;
    s.values.assign(s.tops.begin(), s.tops.end());
    std::nth_element(s.values.begin(), s.values.begin() + (k - 1), s.values.end(), std::greater<float>());
    return s.values[size_t(k - 1)];
}

// The k-th largest entry; NEVER if fewer are above that.
float kth_largest(const LogitRow& row, long k, SampleScratch& s) {
    float bound = bound_of(k, s);
    s.values.clear();
    for (long c = 0; c < row.chunks(); c++) {
        if (s.tops[size_t(c)] < bound) continue;
        const float* x = row.chunk(c);
        for (long i = 0; i < CHUNK; i++)
            if (x[i] >= bound && x[i] > NEVER) s.values.push_back(x[i]);
    }
    if (long(s.values.size()) < k) return NEVER;
    std::nth_element(s.values.begin(), s.values.begin() + (k - 1), s.values.end(), std::greater<float>());
    return s.values[size_t(k - 1)];
}

// ---- top-p

// The value at which the mass of `some`, taken from the largest value down, reaches `wanted`; the smallest if it never
// does. Histograms of mass narrow the range until what is left is worth sorting.
float reach_mass(std::vector<SampleScratch::Weighed>& some, double wanted) {
    typedef SampleScratch::Weighed Weighed;
    double above = 0;
    while (some.size() > 64) {
        auto [low, high] = std::minmax_element(some.begin(), some.end(), [](Weighed a, Weighed b) { return a.value < b.value; });
        float lo = low->value, hi = high->value;
        if (lo == hi) return lo;
        if (hi - lo < 1e-30f) break;  // the scale would not be finite
        float scale = 256.0f / (hi - lo);
        auto bucket = [&](const Weighed& e) { return std::min(255, int((hi - e.value) * scale)); };
        double mass[256] = {};
        for (const Weighed& e : some) mass[bucket(e)] += e.weight;
        int b = 0;
        while (b < 255 && above + mass[b] < wanted) above += mass[b++];
        std::erase_if(some, [&](const Weighed& e) { return bucket(e) != b; });
    }
    std::sort(some.begin(), some.end(), [](Weighed a, Weighed b) { return a.value > b.value; });
    for (const Weighed& e : some)
        if ((above += e.weight) >= wanted) return e.value;
    return some.back().value;
}

// The smallest scaled logit that top-p keeps of those that reach `edge`. `top` is the largest, finite.
float nucleus_edge(const LogitRow& row, float temperature, float edge, float top, double top_p, SampleScratch& s) {
    // The mass within some depths of the top is summed along with all of it, so that seldom much is left to look at.
    constexpr int DEPTHS = 4;
    constexpr float depth[DEPTHS] = {3, 6, 12, 100};  // at the last, weights have long been zero
    double within[DEPTHS] = {};
    auto weigh = [&](long c, auto&& use) {
        const float* x = row.chunk(c);
        for (long i = 0; i < CHUNK; i += VW) {
            vf scaled = load<vf>(x + i) / temperature;
            use(i, scaled, scaled >= splat(edge) ? exp_v(scaled - top) : vf{});
        }
    };
    for (long c = 0; c < row.chunks(); c++) {
        if (s.tops[size_t(c)] / temperature < edge) continue;
        vf sums[DEPTHS] = {};
        weigh(c, [&](long, vf scaled, vf weight) {
            for (int d = 0; d < DEPTHS; d++) sums[d] += scaled >= splat(top - depth[d]) ? weight : vf{};
        });
        for (int d = 0; d < DEPTHS; d++) within[d] += double(sum_v(sums[d]));
    }
    double wanted = top_p * within[DEPTHS - 1];
    int d = 0;
    while (d < DEPTHS - 1 && within[d] < wanted) d++;
    float floor = top - depth[d];
    s.weighed.clear();
    for (long c = 0; c < row.chunks(); c++) {
        float most = s.tops[size_t(c)] / temperature;
        if (most < edge || most < floor) continue;
        float scaled[CHUNK], weight[CHUNK];
        weigh(c, [&](long i, vf v, vf w) { store(scaled + i, v), store(weight + i, w); });
        for (long i = 0; i < CHUNK; i++)
            if (weight[i] > 0 && scaled[i] >= floor) s.weighed.push_back({scaled[i], weight[i]});
    }
    return reach_mass(s.weighed, wanted);
}

// ---- the draw

constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15;
constexpr float MOST_NOISE = 17.33f, LEAST_NOISE = -2.86f;  // of 24 bits, rounded outwards

// gumbel of sampling.py, given 2^24 less the 24 random bits.
inline float gumbel(uint32_t gap) {
    double uniform = (16777216.5 - gap) * 0x1p-24;
    return float(-std::log(-std::log(uniform)));
}

// The largest of scaled logit plus noise among the entries that reach `edge`, the first of equals.
//
// Few entries need their logarithms. Noise g of a uniform number u is at most -log(1 - u), since -log(u) >= 1 - u. So
// an entry can only beat the best score so far if 1 - u <= e^(scaled - best).
long draw(const LogitRow& row, float temperature, float edge, float top, uint64_t key, const std::vector<float>& tops) {
    float best = top + LEAST_NOISE;  // the top entry reaches it, whatever its noise
    long chosen = std::numeric_limits<long>::max();
    for (long c = 0; c < row.chunks(); c++) {
        float slack = 1e-3f + 1e-6f * std::abs(best);  // more than all roundings
        float most = tops[size_t(c)] / temperature;
        if (most < edge || most + MOST_NOISE < best - slack) continue;
        uint32_t gap[CHUNK];
        uint64_t first = key + uint64_t(c * CHUNK + 1) * GAMMA;
        for (long i = 0; i < CHUNK; i++) {
            uint64_t z = first + uint64_t(i) * GAMMA;
            z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
            z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
            z ^= z >> 31;
            gap[i] = 16777216 - uint32_t(z >> 40);
        }
        float scaled[CHUNK];
        int32_t able[CHUNK];
        vi any = {};
        for (long i = 0; i < CHUNK; i += VW) {
            vf v = load<vf>(row.chunk(c) + i) / temperature;
            vf lead = v - best + slack;
            vf most_gap = exp_v(lead < splat(1.0f) ? lead : splat(1.0f)) * 0x1p24f;
            vi can = (v >= splat(edge)) & (__builtin_convertvector(load<vi>(gap + i), vf) - 0.5f <= most_gap);
            store(scaled + i, v);
            store(able + i, can);
            any |= can;
        }
        int32_t some = 0;
        for (int i = 0; i < VW; i++) some |= any[i];
        if (!some) continue;
        for (long i = 0; i < CHUNK; i++) {
            if (!able[i]) continue;
            float score = scaled[i] + gumbel(gap[i]);
            if (score > best || (score == best && c * CHUNK + i < chosen)) best = score, chosen = c * CHUNK + i;
        }
    }
    return chosen;
}

long choose(const float* x, long n, float temperature, double min_p, long top_k, double top_p, uint64_t key, SampleScratch& s) {
    if (temperature == 0) {
        long likeliest = argmax(x, n);
        return x[likeliest] > NEVER ? likeliest : -1;
    }
    LogitRow row(x, n);
    float top = chunk_tops(row, s.tops) / temperature;
    if (top == NEVER) return -1;
    if (top == -NEVER) return std::find_if(x, x + n, [&](float v) { return v / temperature == top; }) - x;
    float edge = NEVER;
    if (min_p > 0) edge = top + float(std::log(min_p));
    // Dividing keeps the order, so that the k-th of the logits is the k-th of the scaled ones.
    if (top_k > 0 && top_k < n) edge = std::max(edge, kth_largest(row, top_k, s) / temperature);
    if (top_p < 1) edge = std::max(edge, nucleus_edge(row, temperature, edge, top, top_p, s));
    return draw(row, temperature, edge, top, key, s.tops);
}

// ---- forms

// Make NEVER of what has no bit in `set`, a bit for each entry.
void restrict_to(float* x, long n, const uint32_t* set) {
    long whole = n / 32;
    for (long w = 0; w < whole; w++) {
        if (set[w] == ~0u) continue;
        float* part = x + w * 32;
        for (int i = 0; i < 32; i++) part[i] = set[w] >> i & 1 ? part[i] : NEVER;
    }
    for (long i = whole * 32; i < n; i++)
        if (!(set[whole] >> (i - whole * 32) & 1)) x[i] = NEVER;
}

// ---- penalties

struct Penalty {
    const int32_t* tokens;  // of the prompt, then of the output
    long prompt, length;
    float repetition, frequency, presence;
};

void penalise(float* x, long n, const Penalty& p, SampleScratch& s) {
    constexpr uint32_t IN_PROMPT = 1u << 31;
    s.counts.resize(size_t(n));
    s.seen.clear();
    for (long i = p.prompt; i < p.length; i++)
        if (s.counts[size_t(p.tokens[i])]++ == 0) s.seen.push_back(p.tokens[i]);
    if (p.repetition != 1)
        for (long i = 0; i < p.prompt; i++) {
            uint32_t& count = s.counts[size_t(p.tokens[i])];
            if (count == 0) count = IN_PROMPT, s.seen.push_back(p.tokens[i]);
        }
    for (int32_t token : s.seen) {
        float y = x[token];
        if (p.repetition != 1) y = y > 0 ? y / p.repetition : y * p.repetition;
        uint32_t& count = s.counts[size_t(token)];
        // In double the product is exact and the sum rounds once, with or without a fused instruction.
        if (count < IN_PROMPT) y = float(double(y) - (double(p.frequency) * count + double(p.presence)));
        x[token] = y;
        count = 0;
    }
}

// ---- log-probabilities

inline float number(float x) { return x >= NEVER ? x : NEVER; }  // NaN counts as NEVER

// Descending keys are descending logits, and ascending ids among equals.
inline uint64_t rank_key(float x, long id) {
    int32_t b = bits<int32_t>(number(x) + 0.0f);  // + 0: a negative zero equals zero
    uint32_t ordered = uint32_t(b ^ int32_t(uint32_t(b >> 31) >> 1)) ^ 0x80000000u;
    return uint64_t(ordered) << 32 | uint32_t(~uint32_t(id));
}

void log_probabilities(const float* x, long n, long token, long count, float* logprob, int64_t* rank, int64_t* top_ids,
                       float* top_values, SampleScratch& s) {
    LogitRow row(x, n);
    float top = chunk_tops(row, s.tops);
    double mass = 0;
    for (long c = 0; c < row.chunks(); c++) {
        vf sum = {};
        for (long i = 0; i < CHUNK; i += VW) sum += exp_v(load<vf>(row.chunk(c) + i) - top);
        mass += double(sum_v(sum));
    }
    double log_sum = double(top) + std::log(mass);
    int32_t larger = 0;
    float mine = number(x[token]);
    for (long i = 0; i < n; i++) larger += x[i] > mine;
    *rank = larger + 1;
    *logprob = float(double(mine) - log_sum);
    if (count == 0) return;

    float bound = bound_of(count, s);
    s.ranked.clear();
    for (long c = 0; c < row.chunks(); c++) {
        if (s.tops[size_t(c)] < bound) continue;
        const float* part = row.chunk(c);
        long last = std::min(CHUNK, n - c * CHUNK);
        for (long i = 0; i < last; i++)
            if (bound == NEVER || part[i] >= bound) s.ranked.push_back(rank_key(part[i], c * CHUNK + i));
    }
    auto end = s.ranked.begin() + count;
    std::nth_element(s.ranked.begin(), end - 1, s.ranked.end(), std::greater<uint64_t>());
    std::sort(s.ranked.begin(), end, std::greater<uint64_t>());
    for (long i = 0; i < count; i++) {
        top_ids[i] = uint32_t(~uint32_t(s.ranked[size_t(i)]));
        top_values[i] = float(double(number(x[top_ids[i]])) - log_sum);
    }
}

// fn(row, scratch) for each of the rows.
template <class F> void by_sampled_rows(void* machine, long rows, F&& fn) {
    Pool& pool = ((Machine*)machine)->pool;
    std::vector<SampleScratch> scratch(size_t(pool.size()));
    pool.run(rows, [&](long r, int thread) { fn(r, scratch[size_t(thread)]); });
}

}  // namespace

extern "C" {

// `at`: which rows of the logits; none for all.
void rk_choose(void* machine, const float* logits, int64_t ld, int64_t rows, int64_t n, const int64_t* at, const float* temperature,
               const double* min_p, const int64_t* top_k, const double* top_p, const uint64_t* key, int64_t* out) {
    by_sampled_rows(machine, rows, [&](long r, SampleScratch& s) {
        out[r] = choose(logits + (at ? at[r] : r) * ld, n, temperature[r], min_p[r], top_k[r], top_p[r], key[r], s);
    });
}

void rk_restrict(void* machine, float* logits, int64_t ld, int64_t n, int64_t rows, const int64_t* at, const uint32_t* sets) {
    long words = (n + 31) / 32;
    ((Machine*)machine)->pool.run(rows, [&](long r, int) { restrict_to(logits + at[r] * ld, n, sets + r * words); });
}

// `at`: which rows of the logits; `held`: which rows of the tokens.
void rk_penalise(void* machine, float* logits, int64_t ld, int64_t n, int64_t rows, const int64_t* at, const int32_t* tokens,
                 int64_t tokens_ld, const int64_t* held, const int64_t* prompt, const int64_t* length, const float* repetition,
                 const float* frequency, const float* presence) {
    by_sampled_rows(machine, rows, [&](long r, SampleScratch& s) {
        Penalty p{tokens + held[r] * tokens_ld, prompt[r], length[r], repetition[r], frequency[r], presence[r]};
        penalise(logits + at[r] * ld, n, p, s);
    });
}

void rk_log_probabilities(void* machine, const float* logits, int64_t ld, int64_t n, int64_t rows, const int64_t* at,
                          const int64_t* token, int64_t count, float* logprob, int64_t* rank, int64_t* top_ids, float* top_values) {
    by_sampled_rows(machine, rows, [&](long r, SampleScratch& s) {
        log_probabilities(logits + at[r] * ld, n, token[r], count, logprob + r, rank + r, top_ids + r * count, top_values + r * count, s);
    });
}

}  // extern "C"

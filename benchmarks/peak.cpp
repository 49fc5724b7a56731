// The most float32 arithmetic that this machine does: multiply-adds on registers alone, on every thread.

#include <thread>
#include <vector>

namespace {

#ifdef __AVX512F__
constexpr int WIDTH = 16;
#else
constexpr int WIDTH = 8;
#endif
// Independent chains, enough to hide the latency of two units (5 cycles at most) in the 16 registers of AVX2.
constexpr int CHAINS = 12;
typedef float vec __attribute__((vector_size(WIDTH * sizeof(float))));

float chains(long steps, float start) {
    const vec factor = vec{} + 0.5f, term = vec{} + start;
    vec sums[CHAINS];
    // Each chain has values of its own, so that the compiler joins none.
    for (int c = 0; c < CHAINS; c++) sums[c] = term * float(c);
    for (long i = 0; i < steps; i++) {
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++) sums[c] = sums[c] * factor + term;
    }
    float total = 0;
    for (const vec& sum : sums) total += sum[0];
    return total;
}

}  // namespace

/// Run `steps` rounds of multiply-adds on each of `threads` threads; the number of operations done.
extern "C" double multiply_adds(int threads, long steps) {
    std::vector<std::thread> pool;
    std::vector<float> kept(threads);
    for (int t = 0; t < threads; t++) pool.emplace_back([&kept, t, steps] { kept[t] = chains(steps, t + 1.0f); });
    for (std::thread& thread : pool) thread.join();
    return 2.0 * WIDTH * CHAINS * threads * steps;
}

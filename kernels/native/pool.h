// Threads that share the work of one call.
//
// Work is handed out in small pieces, and the caller works too. It waits only for helpers that took a piece: one that
// the system has put aside, say for the HTTP process beside us, holds nobody up. Between calls a helper spins for some
// microseconds, since the next call of a step comes at once, and then sleeps.
#pragma once
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

static inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

class Pool {
  public:
    explicit Pool(int threads) {
        for (int i = 1; i < threads; i++) helpers_.emplace_back([this, i] { help(i); });
    }
    ~Pool() {
        stop_ = true;
        gate_ += GENERATION;
        gate_.notify_all();
        for (auto& t : helpers_) t.join();
    }
    int size() const { return int(helpers_.size()) + 1; }

    // Call fn(piece, thread) for every piece from 0 to count - 1, each once.
    template <class F> void run(long count, F&& fn) {
        if (count <= 0) return;
        if (helpers_.empty() || count == 1) {
            for (long i = 0; i < count; i++) fn(i, 0);
            return;
        }
        context_ = &fn;
        call_ = [](void* context, long piece, int thread) { (*static_cast<std::remove_reference_t<F>*>(context))(piece, thread); };
        count_ = count;
        next_.store(0, std::memory_order_relaxed);
        gate_.store(((gate_.load(std::memory_order_relaxed) & ~(GENERATION - 1)) + GENERATION) | OPEN, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst)) gate_.notify_all();
        work(0);
        gate_.fetch_and(~OPEN, std::memory_order_acq_rel);  // nobody joins any more
        while (gate_.load(std::memory_order_acquire) & (OPEN - 1)) relax();
    }

  private:
    // gate_: generation of the call, whether it may be joined, and how many helpers are in it.
    static constexpr uint64_t OPEN = 1 << 15, GENERATION = 1 << 16;

    void work(int thread) {
        for (;;) {
            long piece = next_.fetch_add(1, std::memory_order_relaxed);
            if (piece >= count_) return;
            call_(context_, piece, thread);
        }
    }

    void help(int thread) {
        uint64_t seen = 0;
        while (!stop_) {
            uint64_t gate = wait_for_call(seen);
            if (stop_) return;
            seen = gate / GENERATION;
            while (gate & OPEN && gate / GENERATION == seen) {
                if (gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) {
                    work(thread);
                    gate_.fetch_sub(1, std::memory_order_acq_rel);
                    break;
                }
            }
        }
    }

    uint64_t wait_for_call(uint64_t seen) {
        auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(SPIN_US);
        for (int i = 0;; i++) {
            uint64_t gate = gate_.load(std::memory_order_acquire);
            if (gate / GENERATION != seen || stop_) return gate;
            relax();
            if ((i & 63) == 63 && std::chrono::steady_clock::now() > until) break;
        }
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        uint64_t gate = gate_.load(std::memory_order_seq_cst);
        while (gate / GENERATION == seen && !stop_) {
            gate_.wait(gate, std::memory_order_acquire);
            gate = gate_.load(std::memory_order_acquire);
        }
        sleepers_.fetch_sub(1, std::memory_order_relaxed);
        return gate;
    }

    static constexpr int SPIN_US = 60;
    std::atomic<uint64_t> gate_{0};
    std::atomic<long> next_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stop_{false};
    void (*call_)(void*, long, int) = nullptr;
    void* context_ = nullptr;
    long count_ = 0;
    std::vector<std::thread> helpers_;
};

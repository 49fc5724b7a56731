// Ranks of one machine that add up, or collect, what each of them has, in memory that all of them map.
//
// The memory begins with a line for each rank that tells its last turn; then come two sets of slots, one for each rank,
// which turns use alternately. A rank that has come to turn t has read all of turn t - 1, so that the slots of t + 1,
// which are those of t - 1, are free once everybody has come to t. Who waits spins for some microseconds and then sleeps:
// others may need the core.
#pragma once
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstring>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "pool.h"

namespace exchange {

constexpr int SPIN_US = 60;

struct alignas(64) Line {
    std::atomic<uint32_t> turn, sleepers;  // turns are counted modulo 2^32

    void arrive(uint32_t at) {
        turn.store(at, std::memory_order_seq_cst);
        if (sleepers.load(std::memory_order_seq_cst)) syscall(SYS_futex, &turn, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }
    bool before(uint32_t at) const { return int32_t(turn.load(std::memory_order_acquire) - at) < 0; }
    void wait(uint32_t at) {
        auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(SPIN_US);
        for (int i = 0; before(at); i++) {
            relax();
            if ((i & 63) == 63 && std::chrono::steady_clock::now() > until) break;
        }
        if (!before(at)) return;
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        for (;;) {
            uint32_t seen = turn.load(std::memory_order_seq_cst);
            if (int32_t(seen - at) >= 0) break;
            syscall(SYS_futex, &turn, FUTEX_WAIT, seen, nullptr, nullptr, 0);
        }
        sleepers.fetch_sub(1, std::memory_order_seq_cst);
    }
};

struct Place {
    uint8_t* memory;
    int64_t ranks, most;
    Line& line(int64_t rank) const { return reinterpret_cast<Line*>(memory)[rank]; }
    uint8_t* slot(uint32_t turn, int64_t rank) const { return memory + ranks * int64_t(sizeof(Line)) + (int64_t(turn & 1) * ranks + rank) * most; }
};

// Show a part of at most `most` bytes, and wait until everybody has shown theirs.
inline void meet(const Place& p, int64_t rank, uint32_t turn, const void* own, int64_t bytes) {
    std::memcpy(p.slot(turn, rank), own, bytes);
    p.line(rank).arrive(turn);
    for (int64_t other = 0; other < p.ranks; other++) p.line(other).wait(turn);
}

}  // namespace exchange

extern "C" {

int64_t rk_exchange_bytes(int64_t ranks, int64_t most) { return ranks * int64_t(sizeof(exchange::Line)) + 2 * ranks * most; }

// Parts of all ranks, one after another; each of `bytes`. Returns the last turn.
uint32_t rk_exchange_gather(void* memory, int64_t ranks, int64_t most, int64_t rank, uint32_t turn, const void* own, int64_t bytes, void* out) {
    exchange::Place p{(uint8_t*)memory, ranks, most};
    for (int64_t begin = 0; begin < bytes; begin += most) {
        int64_t size = std::min(most, bytes - begin);
        exchange::meet(p, rank, ++turn, (const uint8_t*)own + begin, size);
        for (int64_t other = 0; other < ranks; other++)
            std::memcpy((uint8_t*)out + other * bytes + begin, p.slot(turn, other), size);
    }
    return turn;
}

// The sum of the ranks' floats, added from the first rank to the last. Returns the last turn.
uint32_t rk_exchange_sum(void* memory, int64_t ranks, int64_t most, int64_t rank, uint32_t turn, float* x, int64_t count) {
    exchange::Place p{(uint8_t*)memory, ranks, most};
    const int64_t each = most / int64_t(sizeof(float));
    for (int64_t begin = 0; begin < count; begin += each) {
        int64_t size = std::min(each, count - begin);
        exchange::meet(p, rank, ++turn, x + begin, size * int64_t(sizeof(float)));
        float* out = x + begin;
        std::memcpy(out, p.slot(turn, 0), size * sizeof(float));
        for (int64_t other = 1; other < ranks; other++) {
            const float* part = (const float*)p.slot(turn, other);
            for (int64_t i = 0; i < size; i++) out[i] += part[i];
        }
    }
    return turn;
}

}  // extern "C"

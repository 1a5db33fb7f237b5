// Which work a block does next. Two queues of units, host experts' and device experts'; tickets go up:
// all units A of all the queue's entries, then all units B.
#pragma once
#include "control.h"
#include "experts.h"
#include "route.cuh"

namespace exl3 {

struct Unit {
    bool down;
    int entry, block, part;  // block of 128 columns, part of k
};

// What the first thread of a block has to say of it, if anybody listens.
struct Trace {
    int row, records = 0;
    __device__ __forceinline__ explicit Trace(int row) : row(row) {}
    __device__ __forceinline__ void operator()(const ExpertsDecode& c, int what, int ticket = 0) {
        if (c.trace == nullptr || threadIdx.x != 0 || records == EXPERTS_TRACE) return;
        int64_t* to = c.trace + 3 * (static_cast<int64_t>(EXPERTS_TRACE) * row + records++);
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(to[0])::"memory");
        to[1] = clock64();
        to[2] = static_cast<int64_t>(what) << 32 | static_cast<uint32_t>(ticket);
    }
};

// A ticket as one number, so that a block's warps can hand it on with single atomics.
constexpr int kNoUnit = -1, kUnclaimed = -2, kBeingClaimed = -3, kHostTicket = 1 << 30;

__device__ inline Unit unit_of(const ExpertsDecode& c, const Routing& r, int ticket) {
    const bool host = (ticket & kHostTicket) != 0;
    int at = ticket & ~kHostTicket;
    const int first = host ? 0 : r.host_entries;
    const int entries = (host ? r.host_entries : r.entries) - first;
    const int units_a = c.intermediate / 128 * c.split_a;
    Unit unit;
    unit.down = at >= entries * units_a;
    if (unit.down) at -= entries * units_a;
    const int split = unit.down ? c.split_b : c.split_a;
    const int per_entry = unit.down ? c.hidden / 128 * c.split_b : units_a;
    unit.entry = first + at / per_entry;
    unit.block = at % per_entry / split;
    unit.part = at % per_entry % split;
    return unit;
}

// The next ticket of this block's queue, or of the other; kNoUnit when both are empty. One thread. A block's
// first ticket is its place in its queue, which takes no trip to memory: the count goes on behind these.
__device__ inline int take(const ExpertsDecode& c, const Routing& r, bool first) {
    const int block = blockIdx.x;
    int which = block < r.link_blocks ? 0 : 1;
#pragma unroll 1
    for (int attempt = 0; attempt < 2; ++attempt, which ^= 1) {
        const Queue& of = r.queue[which];
        if (of.units == 0 || (which == 0 && block >= c.host_blocks)) continue;
        const int at = first && attempt == 0 ? block - of.first : of.before + atomicAdd(c.control + which, 1);
        if (at < of.units) return which == 0 ? at | kHostTicket : at;
    }
    return kNoUnit;
}

// The block's next ticket, the same for all its warps: the first that asks takes it. *slot is
// kUnclaimed before, and is put back to that between two barriers. All lanes of a warp call.
__device__ inline int claim(const ExpertsDecode& c, const Routing& r, int* slot) {
    int ticket = 0;
    if ((threadIdx.x & 31) == 0) {
        ticket = atomicCAS(slot, kUnclaimed, kBeingClaimed);
        if (ticket == kUnclaimed) {
            ticket = take(c, r, false);
            atomicExch(slot, ticket);
        }
        while (ticket == kBeingClaimed) ticket = atomicAdd(slot, 0);
    }
    return __shfl_sync(0xFFFFFFFFu, ticket, 0);
}

}  // namespace exl3

// Which experts a step touches and which picks are each one's rows. Every block works it out for
// itself in shared memory: no host, no other block. Entries of experts in host memory come first.
#pragma once
#include <stdint.h>

#include "control.h"
#include "experts.h"

namespace exl3 {

constexpr int kThreads = 256;
constexpr uint16_t kNobody = 0xFFFF;  // order of a pick of another rank's expert
constexpr uint16_t kNotHere = 0xFFFE;  // of an expert with no address, or no such row

// Units of one home: in all, tickets that blocks have by their place, and the first of these blocks.
struct Queue {
    int32_t units, before, first;
};

struct Routing {
    int32_t expert_state[kMaxExperts];  // host << 16 | picks, then first position
    uint16_t rank[kMaxPicks];           // of a pick among its expert's, or kNobody, kNotHere
    uint16_t order[kMaxPicks];          // picks sorted by entry
    uint16_t entry_expert[kMaxPicks], entry_start[kMaxPicks], entry_rows[kMaxPicks];
    int32_t entries, host_entries;
    Queue queue[2];        // the host's and the device's
    int32_t link_blocks;  // blocks that look for host entries first
    int32_t not_here;
};

__device__ __forceinline__ int64_t id_at(const ExpertsDecode& c, int pick) {
    return c.ids_are_64 ? static_cast<const int64_t*>(c.ids)[pick]
                        : static_cast<const int32_t*>(c.ids)[pick];
}

enum Home { kNowhere, kOnDevice, kOnHost };

__device__ __forceinline__ Home home_of(const ExpertsDecode& c, int64_t id) {
    if (id < 0 || id >= c.experts) return kNowhere;
    const int64_t* row = c.table + 9 * id;
    bool here = true;
#pragma unroll
    for (int i = 0; i < 9; ++i) here &= row[i] != 0;  // all read at once: none waits for the one before
    const uint64_t at = static_cast<uint64_t>(row[0]);
    return !here ? kNowhere : at >= c.host_begin && at < c.host_end ? kOnHost : kOnDevice;
}

// One thread, when the entries are known.
__device__ inline void share_blocks(const ExpertsDecode& c, Routing& r, int entries, int host_entries) {
    // An entry costs the same to decode wherever it is, so host entries get their share of the blocks, as
    // long as that is not more than share the link best.
    const int blocks = gridDim.x, all = max(1, 100 * entries);
    const int units = c.intermediate / 128 * c.split_a + c.hidden / 128 * c.split_b;
    r.entries = entries, r.host_entries = host_entries;
    r.link_blocks = min((blocks * c.link_percent * host_entries + all - 1) / all, min(c.host_blocks, blocks));
    r.queue[0] = {host_entries * units, r.link_blocks, 0};
    r.queue[1] = {(entries - host_entries) * units, blocks - r.link_blocks, r.link_blocks};
}

// At most 32 picks: a lane each, no pass over all experts. The first warp.
__device__ inline void route_few(const ExpertsDecode& c, Routing& r) {
    const int lane = threadIdx.x, picks = c.tokens * c.top_k, rows = 8 * c.groups;
    const int64_t id = lane < picks ? id_at(c, lane) : -1;
    const Home home = home_of(c, id);
    const bool here = home != kNowhere;
    const int key = here ? (home == kOnHost ? 0 : kMaxExperts) + static_cast<int>(id) : 2 * kMaxExperts + lane;
    const uint32_t same = __match_any_sync(0xFFFFFFFFu, key);
    const int count = __popc(same), before = __popc(same & ((1u << lane) - 1u));
    const int chunks = here && before == 0 ? (count + rows - 1) / rows : 0;  // entries of this lane
    int entry = 0, start = 0;
    for (int i = 0; i < picks; ++i) {
        const int other = __shfl_sync(0xFFFFFFFFu, key, i), its_chunks = __shfl_sync(0xFFFFFFFFu, chunks, i);
        if (other < key) entry += its_chunks, ++start;
    }
    for (int i = 0; i < chunks; ++i) {
        r.entry_expert[entry + i] = static_cast<uint16_t>(id);
        r.entry_start[entry + i] = static_cast<uint16_t>(start + rows * i);
        r.entry_rows[entry + i] = static_cast<uint16_t>(min(rows, count - rows * i));
    }
    if (here) r.order[start + before] = static_cast<uint16_t>(lane);
    if (lane < picks) r.rank[lane] = here ? before : id == -1 ? kNobody : kNotHere;
    const int entries = __reduce_add_sync(0xFFFFFFFFu, chunks);
    const int host_entries = __reduce_add_sync(0xFFFFFFFFu, home == kOnHost ? chunks : 0);
    const int not_here = __popc(__ballot_sync(0xFFFFFFFFu, !here && id != -1));
    if (lane == 0) {
        share_blocks(c, r, entries, host_entries);
        r.not_here = not_here;
    }
}

// Called by all kThreads threads of a block; ends with a barrier.
__device__ inline void route(const ExpertsDecode& c, Routing& r) {
    const int picks = c.tokens * c.top_k, thread = threadIdx.x, lane = thread & 31;
    if (picks <= 32) {
        if (thread < 32) route_few(c, r);
        __syncthreads();
        return;
    }
    for (int e = thread; e < c.experts; e += kThreads) r.expert_state[e] = 0;
    // The slow reads first, by everybody: rank says for now whether the expert is here, entry_rows
    // whether on the host.
    for (int p = thread; p < picks; p += kThreads) {
        const int64_t id = id_at(c, p);
        const Home home = home_of(c, id);
        r.rank[p] = id == -1 ? kNobody : home == kNowhere ? kNotHere : 0;
        r.entry_rows[p] = home == kOnHost;
        r.order[p] = static_cast<uint16_t>(id);
    }
    __syncthreads();
    if (thread < 32) {
        for (int base = 0; base < picks; base += 32) {
            const int p = base + lane;
            const bool valid = p < picks && r.rank[p] == 0;
            const int e = valid ? r.order[p] : -1 - lane;
            const uint32_t same = __match_any_sync(0xFFFFFFFFu, e);
            const int before = __popc(same & ((1u << lane) - 1u));
            const int state = valid ? r.expert_state[e] : 0;
            if (valid) r.rank[p] = static_cast<uint16_t>((state & 0xFFFF) + before);
            __syncwarp();
            if (valid && before == 0) r.expert_state[e] = (state + __popc(same)) | r.entry_rows[p] << 16;
            __syncwarp();
        }
    }
    // The same warp goes on: it alone has read entry_rows, and writes it anew.
    if (thread < 32) {
        const int rows = 8 * c.groups;
        int entries = 0, host_entries = 0, start = 0;
        for (int host = 1; host >= 0; --host) {
            for (int base = 0; base < c.experts; base += 32) {
                const int e = base + lane;
                const int state = e < c.experts ? r.expert_state[e] : 0;
                const bool mine = state != 0 && (state >> 16) == host && (state & 0xFFFF) != 0;
                const uint32_t who = __ballot_sync(0xFFFFFFFFu, mine);
                if (who == 0) continue;
                const int count = mine ? state & 0xFFFF : 0;
                const int chunks = (count + rows - 1) / rows;
                int count_sum = count, chunk_sum = chunks;
                for (int d = 1; d < 32; d <<= 1) {
                    const int a = __shfl_up_sync(0xFFFFFFFFu, count_sum, d);
                    const int b = __shfl_up_sync(0xFFFFFFFFu, chunk_sum, d);
                    if (lane >= d) count_sum += a, chunk_sum += b;
                }
                const int first = start + count_sum - count;
                for (int i = 0; i < chunks; ++i) {
                    const int entry = entries + chunk_sum - chunks + i;
                    r.entry_expert[entry] = static_cast<uint16_t>(e);
                    r.entry_start[entry] = static_cast<uint16_t>(first + rows * i);
                    r.entry_rows[entry] = static_cast<uint16_t>(min(rows, count - rows * i));
                }
                // Done with: the first position, marked so that the second pass skips it.
                if (mine) r.expert_state[e] = (2 << 16) | first;
                entries += __shfl_sync(0xFFFFFFFFu, chunk_sum, 31);
                start += __shfl_sync(0xFFFFFFFFu, count_sum, 31);
            }
            if (host) host_entries = entries;
        }
        if (lane == 0) {
            share_blocks(c, r, entries, host_entries);
            r.not_here = 0;
        }
    }
    __syncthreads();
    for (int p = thread; p < picks; p += kThreads) {
        const uint16_t rank = r.rank[p];
        if (rank == kNotHere) atomicAdd(&r.not_here, 1);
    }
    // `order` held the expert of each pick: read them all before any is overwritten.
    uint16_t mine[kMaxPicks / kThreads];
#pragma unroll
    for (int i = 0; i < kMaxPicks / kThreads; ++i) {
        const int p = thread + kThreads * i;
        mine[i] = p < picks ? r.order[p] : 0;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kMaxPicks / kThreads; ++i) {
        const int p = thread + kThreads * i;
        if (p >= picks || r.rank[p] >= kNotHere) continue;
        r.order[(r.expert_state[mine[i]] & 0xFFFF) + r.rank[p]] = static_cast<uint16_t>(p);
    }
    __syncthreads();
}

}  // namespace exl3

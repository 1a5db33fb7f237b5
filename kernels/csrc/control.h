// Where the counters of a call are, shared by the kernels and by who allocates them.
#pragma once
#include <stdint.h>

#ifndef __CUDACC__
#define __host__
#define __device__
#endif

namespace exl3 {

constexpr int kMaxExperts = 1024;
constexpr int kMaxPicks = 1024;
constexpr int kMaxTokens = 64;

// Offsets into control, in int32. Entries are at most as many as picks. From kAct on [entry][intermediate/128]:
// 1 when these columns of down's inputs are done.
struct Control {
    enum { kTicketHost = 0, kTicketDevice = 1, kExited = 2, kRotated = 3, kAct = 32 };
    int a, b, done, end;
    __host__ __device__ Control(int picks, int hidden, int intermediate) {
        a = kAct + picks * (intermediate / 128);  // [entry][intermediate/128]: parts of a unit A
        b = a + picks * (intermediate / 128);     // [entry][hidden/128]: parts of a unit B
        done = b + picks * (hidden / 128);        // [hidden/128]: entries done
        end = done + hidden / 128;
    }
};

}  // namespace exl3

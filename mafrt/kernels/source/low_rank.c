/* Products with the thin matrices of adapters: forward, and all of the backward pass in one reading of the gradient.
 * Sums are float32, over 64 rows at a time, and depend neither on other segments nor on the number of threads. */
#include "low_rank.h"
#include <stdlib.h>

#define DOTS 4   /* rows, and ranks, whose products are summed at a time */
#define BLOCK 64 /* rows of the backward pass that stay in the cache; an even number */
#ifdef __AVX512F__
#define SUM_RANKS 8
#define SUM_VECTORS 2
#else
#define SUM_RANKS 4
#define SUM_VECTORS 1
#endif
#define STRIP (SUM_VECTORS * LANES) /* columns of a weight's gradient that are summed at a time */

INLINE long least(long a, long b) { return a < b ? a : b; }

/* The gradients of each layer's B [outputs][ranks] from those of B^T [ranks][outputs] of all layers of one adapter;
 * places: [layers], where they begin in `grads`. */
static void turn(long layers, const int64_t *ranks, const int64_t *columns, const float *from, const int64_t *places,
                 float *grads) {
    long width = columns[layers];
    for (long l = 0; l < layers; l++) {
        const float *row = from + ranks[l] * width;
        float *at = grads + places[l];
        long n = ranks[l + 1] - ranks[l];
        for (long c = columns[l]; c < columns[l + 1]; c++, at += n)
            for (long q = 0; q < n; q++) at[q] = row[q * width + c];
    }
}

#define PAIRED_f32 0
#define PAIRED_bf16 1
#define T float
#define OF(f) f##_f32
#include "low_rank_rows.h"
#undef T
#undef OF
#define T bf16
#define OF(f) f##_bf16
#include "low_rank_rows.h"

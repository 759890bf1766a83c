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

/* Four rows of 16 numbers become 16 rows of four, n apart. */
INLINE void turn_tile(const float *from, long width, float *to, long n) {
    v16 a = load_f32(from), b = load_f32(from + width), c = load_f32(from + 2 * width), d = load_f32(from + 3 * width);
    v16 ab = SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    v16 cd = SHUFFLE(c, d, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    v16 ab2 = SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    v16 cd2 = SHUFFLE(c, d, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    v16 rows[4] = {SHUFFLE(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
                   SHUFFLE(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31),
                   SHUFFLE(ab2, cd2, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
                   SHUFFLE(ab2, cd2, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)};
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) memcpy(to + i * n, (const float *)&rows[i % 4] + i / 4 * 4, 4 * sizeof(float));
}

/* The gradients of each layer's B [outputs][ranks] from those of B^T [ranks][outputs] of all layers of one adapter;
 * places: [layers], where they begin in `grads`. */
static void turn(long layers, const int64_t *ranks, const int64_t *columns, const float *from, const int64_t *places,
                 float *grads) {
    long width = columns[layers];
    for (long l = 0; l < layers; l++) {
        const float *rows = from + ranks[l] * width + columns[l];
        float *to = grads + places[l];
        long n = ranks[l + 1] - ranks[l], m = columns[l + 1] - columns[l], fours = n / 4 * 4, whole = m / LANES * LANES;
        for (long c = 0; c < whole; c += LANES)
            for (long q = 0; q < fours; q += 4) turn_tile(rows + q * width + c, width, to + c * n + q, n);
        for (long c = 0; c < m; c++)
            for (long q = c < whole ? fours : 0; q < n; q++) to[c * n + q] = rows[q * width + c];
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

/* What adapters add to the products of frozen weights: rows x A^T B^T of low rank, each row by its own adapter. */
#pragma once
#include "vectors.h"

#define PANEL 48 /* outputs of a panel */

/* Rows stops[s - 1] to stops[s] are segment s, all of one adapter, or of none with 0 ranks. The outputs are those of
 * one or several layers that share their input: layer l has the outputs columns[l] to columns[l + 1] and, of the
 * adapter of segment s, the ranks ranks[s][l] to ranks[s][l + 1]. */
typedef struct {
    long segments, layers;
    const int64_t *stops;         /* [segments] */
    const int64_t *ranks;         /* [segments][layers + 1] */
    const int64_t *columns;       /* [layers + 1] */
    const void *const *down;      /* [segments]: A [ranks][in] */
    const void *const *up;        /* [segments]: B^T [ranks][outputs] of each layer, scaled, one behind the other */
    const void *const *up_panels; /* the same in panels, see `low_rank_panels` */
    const int64_t *const *places; /* [segments][panels]: where each panel begins */
    void *numbers;                /* [rows][ld]: x A^T; in bfloat16 with a 0 behind an odd number of ranks */
    long ld;
} LowRank;

INLINE long ranks_of(const LowRank *low, long s) { return low->ranks[s * (low->layers + 1) + low->layers]; }

void low_rank_down_f32(const float *x, long ldx, long size, const LowRank *low, int threads);
void low_rank_down_bf16(const bf16 *x, long ldx, long size, const LowRank *low, int threads);

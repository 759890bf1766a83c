/* Products x W^T with a frozen weight, in float32 and bfloat16, to which each row may add a product of low rank.
 *
 * W lies in panels of 48 outputs: [panel][in][48] in float32, [panel][in / 2][48][2] in bfloat16, zeros behind the
 * last output. Eight rows by one panel are 24 registers of sums, so that each number of the weight is loaded once for
 * eight rows. While a panel is read for some rows, the next one comes into the cache, a third of it with each of the
 * first three tiles: with 32 rows that is 5% of the time. */
#include "low_rank.h"

#define ROWS 8
#define LINE 64 /* bytes of the cache */
#define BLOCK_ROWS 240 /* whose inputs stay in the second cache while all panels pass */

#ifdef __AVX512F__
INLINE void step_f32(int rows, int columns, const float *x, long ldx, const float *w, __m512 acc[ROWS][3]) {
    __m512 b[3];
#pragma GCC unroll 3
    for (int c = 0; c < columns; c++) b[c] = _mm512_loadu_ps(w + c * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        __m512 a = _mm512_set1_ps(x[r * ldx]);
#pragma GCC unroll 3
        for (int c = 0; c < columns; c++) acc[r][c] = _mm512_fmadd_ps(a, b[c], acc[r][c]);
    }
}
#define STEP_float 1
#endif

#ifdef HAS_BF16
INLINE void step_bf16(int rows, int columns, const bf16 *x, long ldx, const bf16 *w, __m512 acc[ROWS][3]) {
    __m512bh b[3];
#pragma GCC unroll 3
    for (int c = 0; c < columns; c++) b[c] = (__m512bh)_mm512_loadu_si512(w + c * 2 * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        int32_t pair;
        memcpy(&pair, x + r * ldx, 4);
        __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 3
        for (int c = 0; c < columns; c++) acc[r][c] = _mm512_dpbf16_ps(acc[r][c], a, b[c]);
    }
}
#define STEP_bf16 2
#endif

/* The sums of up to eight rows and one panel; with `more` they are added to those in `out`. `lines` of the cache are
 * fetched from `next` in every step: 0, 1 or 3. Rows, columns and lines are constants where this is called, so that all
 * loops over registers are unrolled. One loop for weight and low rank together was 7% slower with 32 rows. */
#define TILE(T, STEP)                                                                                                  \
    INLINE void tile_##T(int rows, int columns, const T *x, long ldx, long size, const T *w, int more, float *out,     \
                         const char *next, int lines) {                                                                \
        __m512 acc[ROWS][3];                                                                                           \
        _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)                                                         \
            _Pragma("GCC unroll 3") for (int c = 0; c < columns; c++)                                                  \
                acc[r][c] = more ? _mm512_loadu_ps(out + r * PANEL + c * LANES) : _mm512_setzero_ps();                 \
        for (long k = 0; k < size; k += STEP_##T) {                                                                    \
            for (int i = 0; i < lines; i++, next += LINE) _mm_prefetch(next, _MM_HINT_T1);                             \
            STEP(rows, columns, x + k, ldx, w + k * PANEL, acc);                                                       \
        }                                                                                                              \
        _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)                                                         \
            _Pragma("GCC unroll 3") for (int c = 0; c < columns; c++)                                                  \
                _mm512_storeu_ps(out + r * PANEL + c * LANES, acc[r][c]);                                              \
    }                                                                                                                  \
    static void tile_of_##T(int rows, int columns, const T *x, long ldx, long size, const T *w, int more, float *out,  \
                            const char *next, int lines) {                                                             \
        switch (rows * 4 + columns) {                                                                                  \
            CASES(T, 1) CASES(T, 2) CASES(T, 3) CASES(T, 4) CASES(T, 5) CASES(T, 6) CASES(T, 7) CASES(T, 8)            \
        }                                                                                                              \
    }
#define CASES(T, R) CASE(T, R, 1) CASE(T, R, 2) CASE(T, R, 3)
#define CASE(T, R, C)                                                                                                  \
    case R * 4 + C:                                                                                                    \
        if (lines == 3) tile_##T(R, C, x, ldx, size, w, more, out, next, 3);                                           \
        else if (lines == 1) tile_##T(R, C, x, ldx, size, w, more, out, next, 1);                                      \
        else tile_##T(R, C, x, ldx, size, w, more, out, next, 0);                                                      \
        break;

/* out = x W^T + bias + added, plus what the adapters add; bias, added and low may be NULL. Strides in numbers.
 *
 * Rows are taken by eight whatever adapters they have; of a panel an adapter has the ranks of those layers to which the
 * panel's outputs belong. */
#define GEMM(T, NAME, STEP, DOWN, LOAD, STORE)                                                                         \
    /* What the segments that begin in rows r to last add to panel p: sums (tile), or, without them, only fetched. */  \
    INLINE void adapted_##T(const LowRank *low, long s, long p, long r, long last, int columns, long from, long to,    \
                            float *tile) {                                                                             \
        for (long stop; r < last; s++, r = stop) {                                                                     \
            stop = low->stops[s] < last ? low->stops[s] : last;                                                        \
            const int64_t *ranks = low->ranks + s * (low->layers + 1);                                                 \
            long begin = ranks[from] / STEP * STEP, end = (ranks[to] + STEP - 1) / STEP * STEP;                        \
            if (begin < end && r < stop) {                                                                             \
                const T *up = (const T *)low->up_panels[s] + low->places[s][p];                                        \
                if (tile)                                                                                              \
                    tile_of_##T((int)(stop - r), columns, (const T *)low->numbers + r * low->ld + begin, low->ld,      \
                                end - begin, up, 1, tile, NULL, 0);                                                    \
                else                                                                                                   \
                    for (const T *at = up; at < up + (end - begin) * PANEL; at += LINE / sizeof(T))                    \
                        _mm_prefetch((const char *)at, _MM_HINT_T1);                                                   \
            }                                                                                                          \
            if (tile) tile += (stop - r) * PANEL;                                                                      \
        }                                                                                                              \
    }                                                                                                                  \
    void NAME(const T *x, long ldx, long rows, long size, const T *packed, long width, const T *bias, const T *added,  \
              long lda, const LowRank *low, T *out, long ldo, int threads) {                                           \
        long panels = (width + PANEL - 1) / PANEL;                                                                     \
        if (low && low->down) DOWN(x, ldx, size, low, threads);                                                        \
        for (long first = 0; first < rows; first += BLOCK_ROWS) {                                                      \
            long last = first + BLOCK_ROWS < rows ? first + BLOCK_ROWS : rows, begin = 0;                              \
            while (low && low->stops[begin] <= first) begin++;                                                         \
            _Pragma("omp parallel for num_threads(threads) if (threads > 1)") for (long p = 0; p < panels; p++) {      \
                const T *w = packed + p * PANEL * size;                                                                \
                long column = p * PANEL, left = width - column < PANEL ? width - column : PANEL, from = 0, to = 0;     \
                int columns = (int)((left + LANES - 1) / LANES), here = 0, turn = 0;                                   \
                while (low && low->columns[from + 1] <= column) from++;                                                \
                while (low && low->columns[to] < column + left) to++;                                                  \
                for (long r = first, s = begin; r < last; r += here, turn++) {                                         \
                    here = last - r < ROWS ? (int)(last - r) : ROWS;                                                   \
                    float tile[ROWS * PANEL] __attribute__((aligned(64)));                                             \
                    int lines = p + 1 == panels || turn > 2 ? 0 : last - first <= ROWS ? 3 : 1;                        \
                    const T *next = w + PANEL * size + turn * (PANEL * size / 3);                                      \
                    if (low) {                                                                                         \
                        while (low->stops[s] <= r) s++;                                                                \
                        adapted_##T(low, s, p, r, r + here, columns, from, to, NULL);                                  \
                    }                                                                                                  \
                    tile_of_##T(here, columns, x + r * ldx, ldx, size, w, 0, tile, (const char *)next, lines);         \
                    if (low) adapted_##T(low, s, p, r, r + here, columns, from, to, tile);                             \
                    for (int i = 0; i < here; i++)                                                                     \
                        for (long c = 0; c < left; c += LANES) {                                                       \
                            long n = left - c, at = column + c;                                                        \
                            v16 v = load_f32(tile + i * PANEL + c);                                                    \
                            if (bias) v += LOAD(bias + at, n);                                                         \
                            if (added) v += LOAD(added + (r + i) * lda + at, n);                                       \
                            STORE(out + (r + i) * ldo + at, v, n);                                                     \
                        }                                                                                              \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }

#ifdef __AVX512F__
TILE(float, step_f32)
GEMM(float, gemm_f32, 1, low_rank_down_f32, load_some_f32, store_some_f32)
#endif
/* With AMX oneDNN's products are several times as fast in bfloat16. */
#if defined(HAS_BF16) && !defined(__AMX_BF16__)
TILE(bf16, step_bf16)
GEMM(bf16, gemm_bf16, 2, low_rank_down_bf16, load_some_bf16, store_some_bf16)
#endif

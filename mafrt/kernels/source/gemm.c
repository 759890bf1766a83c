/* Products x W^T of few rows with a frozen weight, in float32 and bfloat16.
 *
 * W lies in panels of 48 outputs: [panel][in][48] in float32, [panel][in / 2][48][2] in bfloat16, zeros behind the
 * last output. Eight rows by one panel are 24 registers of sums, so that each number of the weight is loaded once for
 * eight rows. While a panel is read for some rows, the next one comes into the cache, a third of it with each of the
 * first three tiles: with 32 rows that is 5% of the time. */
#include "vectors.h"

#define PANEL 48
#define ROWS 8
#define LINE 64 /* bytes of the cache */
#define BLOCK_ROWS 240 /* whose inputs stay in the second cache while all panels pass */

#ifdef __AVX512F__
#include <immintrin.h>

INLINE void tile_f32(int rows, int columns, const float *x, long ldx, long size, const float *w,
                     float *out, const char *next, int lines) {
    __m512 acc[ROWS][3];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int c = 0; c < columns; c++) acc[r][c] = _mm512_setzero_ps();
    for (long k = 0; k < size; k++) {
        for (int i = 0; i < lines; i++, next += LINE) _mm_prefetch(next, _MM_HINT_T1);
        __m512 b[3];
#pragma GCC unroll 3
        for (int c = 0; c < columns; c++) b[c] = _mm512_loadu_ps(w + k * PANEL + c * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            __m512 a = _mm512_set1_ps(x[r * ldx + k]);
#pragma GCC unroll 3
            for (int c = 0; c < columns; c++) acc[r][c] = _mm512_fmadd_ps(a, b[c], acc[r][c]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int c = 0; c < columns; c++) _mm512_storeu_ps(out + r * PANEL + c * LANES, acc[r][c]);
}
#endif

#if defined(__AVX512F__) && defined(__AVX512BF16__)
INLINE void tile_bf16(int rows, int columns, const bf16 *x, long ldx, long size, const bf16 *w,
                      float *out, const char *next, int lines) {
    __m512 acc[ROWS][3];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int c = 0; c < columns; c++) acc[r][c] = _mm512_setzero_ps();
    for (long k = 0; k < size; k += 2) {
        for (int i = 0; i < lines; i++, next += LINE) _mm_prefetch(next, _MM_HINT_T1);
        __m512bh b[3];
#pragma GCC unroll 3
        for (int c = 0; c < columns; c++) b[c] = (__m512bh)_mm512_loadu_si512(w + k * PANEL + c * 2 * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            int32_t pair;
            memcpy(&pair, x + r * ldx + k, 4);
            __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 3
            for (int c = 0; c < columns; c++) acc[r][c] = _mm512_dpbf16_ps(acc[r][c], a, b[c]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int c = 0; c < columns; c++) _mm512_storeu_ps(out + r * PANEL + c * LANES, acc[r][c]);
}
#endif

/* A tile of every number of rows and columns, so that all loops over registers are unrolled. `lines` of the cache are
 * fetched from `next` in every step: 0, 1 or 3. */
#define TILES(T)                                                                                                       \
    static void tile_of_##T(int rows, int columns, const T *x, long ldx, long size, const T *w, float *out,            \
                            const char *next, int lines) {                                                             \
        switch (rows * 4 + columns) {                                                                                  \
            CASES(T, 1) CASES(T, 2) CASES(T, 3) CASES(T, 4) CASES(T, 5) CASES(T, 6) CASES(T, 7) CASES(T, 8)            \
        }                                                                                                              \
    }
#define CASES(T, R) CASE(T, R, 1) CASE(T, R, 2) CASE(T, R, 3)
#define CASE(T, R, C)                                                                                                  \
    case R * 4 + C:                                                                                                    \
        if (lines == 3) TILE(T)(R, C, x, ldx, size, w, out, next, 3);                                                  \
        else if (lines == 1) TILE(T)(R, C, x, ldx, size, w, out, next, 1);                                             \
        else TILE(T)(R, C, x, ldx, size, w, out, next, 0);                                                             \
        break;

/* out = x W^T + bias + added; bias and added may be NULL. Strides in numbers. */
#define GEMM(T, NAME, LOAD, STORE, LOAD_PART, STORE_PART)                                                              \
    void NAME(const T *x, long ldx, long rows, long size, const T *packed, long width, const T *bias, const T *added,  \
              long lda, T *out, long ldo, int threads) {                                                               \
        long panels = (width + PANEL - 1) / PANEL;                                                                     \
        for (long first = 0; first < rows; first += BLOCK_ROWS) {                                                      \
            long last = first + BLOCK_ROWS < rows ? first + BLOCK_ROWS : rows;                                         \
            _Pragma("omp parallel for num_threads(threads) if (threads > 1)") for (long p = 0; p < panels; p++) {      \
                long column = p * PANEL, left = width - column < PANEL ? width - column : PANEL;                       \
                int columns = (int)((left + LANES - 1) / LANES);                                                       \
                for (long r = first; r < last; r += ROWS) {                                                            \
                    int here = last - r < ROWS ? (int)(last - r) : ROWS;                                               \
                    float tile[ROWS * PANEL] __attribute__((aligned(64)));                                             \
                    long turn = (r - first) / ROWS;                                                                    \
                    int lines = p + 1 == panels || turn > 2 ? 0 : last - first <= ROWS ? 3 : 1;                        \
                    const T *w = packed + p * PANEL * size, *next = w + PANEL * size + turn * (PANEL * size / 3);      \
                    tile_of_##T(here, columns, x + r * ldx, ldx, size, w, tile, (const char *)next, lines);            \
                    for (int i = 0; i < here; i++)                                                                     \
                        for (long c = 0; c < left; c += LANES) {                                                       \
                            long n = left - c < LANES ? left - c : LANES, at = column + c;                             \
                            v16 v = load_f32(tile + i * PANEL + c);                                                    \
                            if (n == LANES) {                                                                          \
                                if (bias) v += LOAD(bias + at);                                                        \
                                if (added) v += LOAD(added + (r + i) * lda + at);                                      \
                                STORE(out + (r + i) * ldo + at, v);                                                    \
                            } else {                                                                                   \
                                if (bias) v += LOAD_PART(bias + at, n);                                                \
                                if (added) v += LOAD_PART(added + (r + i) * lda + at, n);                              \
                                STORE_PART(out + (r + i) * ldo + at, v, n);                                            \
                            }                                                                                          \
                        }                                                                                              \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }

#define TILE(T) TILE_##T
#define TILE_float tile_f32
#define TILE_bf16 tile_bf16

#ifdef __AVX512F__
TILES(float)
GEMM(float, gemm_f32, load_f32, store_f32, load_part_f32, store_part_f32)
#endif
/* With AMX oneDNN's products are several times as fast in bfloat16. */
#if defined(__AVX512F__) && defined(__AVX512BF16__) && !defined(__AMX_BF16__)
TILES(bf16)
GEMM(bf16, gemm_bf16, load_bf16, store_bf16, load_part_bf16, store_part_bf16)
#endif

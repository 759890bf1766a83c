/* Products of small matrices in float32: tiles whose sums stay in registers. */
#pragma once
#include "vectors.h"

#ifdef __AVX512F__
#define TILE_ROWS 6
#define TILE_COLUMNS 4 /* vectors */
#else
#define TILE_ROWS 3
#define TILE_COLUMNS 2
#endif
#define TILE_WIDTH (TILE_COLUMNS * LANES)

INLINE long least(long a, long b) { return a < b ? a : b; }
INLINE long in_lanes(long n) { return (n + LANES - 1) / LANES * LANES; }

/* Numbers of a tensor in bfloat16 (half) or float32; n is how many of the 16 exist. */
INLINE v16 load(const void *p, long at, long n, int half) {
    if (half) return n >= LANES ? load_bf16((const bf16 *)p + at) : load_part_bf16((const bf16 *)p + at, (int)n);
    return n >= LANES ? load_f32((const float *)p + at) : load_part_f32((const float *)p + at, (int)n);
}
INLINE void store(void *p, long at, v16 v, long n, int half) {
    if (half && n >= LANES) store_bf16((bf16 *)p + at, v);
    else if (half) store_part_bf16((bf16 *)p + at, v, (int)n);
    else if (n >= LANES) store_f32((float *)p + at, v);
    else store_part_f32((float *)p + at, v, (int)n);
}
/* As a tensor holds it. */
INLINE v16 rounded(v16 v, int half) {
    bf16 bits[LANES];
    if (!half) return v;
    store_bf16(bits, v);
    return load_bf16(bits);
}
INLINE const void *at(const void *p, long numbers, int half) { return (const char *)p + numbers * (half ? 2 : 4); }
INLINE v16 logistic(v16 x) { return same(1) / (same(1) + exponential(-x)); }
INLINE float number(const void *p, long at, int half) {
    return half ? from_bf16(((const bf16 *)p)[at]) : ((const float *)p)[at];
}

/* acc[i][j] += sum over s < size of a[i * row + s * step] b[s * ldb + 16 j], with constant rows and columns. */
INLINE void accumulate(int rows, int columns, long size, const float *a, long row, long step, const void *b, long ldb,
                       int half, v16 acc[TILE_ROWS][TILE_COLUMNS]) {
    for (long s = 0; s < size; s++) {
        v16 right[TILE_COLUMNS];
#pragma GCC unroll 4
        for (int j = 0; j < columns; j++) right[j] = load(b, s * ldb + j * LANES, LANES, half);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            v16 left = same(a[i * row + s * step]);
#pragma GCC unroll 4
            for (int j = 0; j < columns; j++) acc[i][j] += left * right[j];
        }
    }
}

/* One tile of c = a b, or of c += a b. */
INLINE void tile(int rows, int columns, long size, const float *a, long row, long step, const void *b, long ldb,
                 int half, float *c, long ldc, int add) {
    v16 acc[TILE_ROWS][TILE_COLUMNS];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < columns; j++) acc[i][j] = add ? load_f32(c + i * ldc + j * LANES) : same(0);
    accumulate(rows, columns, size, a, row, step, b, ldb, half, acc);
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < columns; j++) store_f32(c + i * ldc + j * LANES, acc[i][j]);
}

/* Calls FORM(rows, columns) with constants, so that all loops over registers are unrolled. */
#if TILE_ROWS == 6
#define EACH_TILE(ROWS, COLUMNS, FORM)                                                                                 \
    switch ((ROWS)*8 + (COLUMNS)) {                                                                                    \
        TILES_OF(1, FORM) TILES_OF(2, FORM) TILES_OF(3, FORM) TILES_OF(4, FORM) TILES_OF(5, FORM) TILES_OF(6, FORM)    \
    }
#define TILES_OF(R, FORM) TILE_OF(R, 1, FORM) TILE_OF(R, 2, FORM) TILE_OF(R, 3, FORM) TILE_OF(R, 4, FORM)
#else
#define EACH_TILE(ROWS, COLUMNS, FORM)                                                                                 \
    switch ((ROWS)*8 + (COLUMNS)) { TILES_OF(1, FORM) TILES_OF(2, FORM) TILES_OF(3, FORM) }
#define TILES_OF(R, FORM) TILE_OF(R, 1, FORM) TILE_OF(R, 2, FORM)
#endif
#define TILE_OF(R, C, FORM)                                                                                            \
    case R * 8 + C:                                                                                                    \
        FORM(R, C);                                                                                                    \
        break;

/* c[m][n] = a b or += a b; n is a multiple of 16. b lies in blocks of TILE_WIDTH columns, `block` numbers apart. */
static inline void multiply(long m, long n, long size, const float *a, long row, long step, const float *b, long ldb,
                            long block, float *c, long ldc, int add) {
    for (long at = 0; at < n; at += TILE_WIDTH) {
        long columns = least(n - at, TILE_WIDTH) / LANES;
        const float *right = b + at / TILE_WIDTH * block;
        for (long i = 0; i < m; i += TILE_ROWS) {
#define FORM(R, C) tile(R, C, size, a + i * row, row, step, right, ldb, 0, c + i * ldc + at, ldc, add)
            EACH_TILE(least(m - i, TILE_ROWS), columns, FORM)
#undef FORM
        }
    }
}

/* Vectors of 16 floats, and how numbers of a tensor become them. GCC and Clang lower them to what the processor has. */
#pragma once
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#ifdef __AVX512BF16__
#define HAS_BF16 1
#endif
#endif

typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef uint32_t u16 __attribute__((vector_size(64)));
typedef uint16_t h16 __attribute__((vector_size(32)));
typedef uint16_t bf16; /* the upper half of a float */

#define INLINE static inline __attribute__((always_inline))
#define RARE static __attribute__((noinline, unused)) /* a copy at each use would take long to compile */
#define LANES 16

/* Keeps a vector in its register. GCC would rather read it again with each use, and 64 bytes take a cycle to read. */
#ifdef __AVX512F__
#define HOLD(v) __asm__("" : "+v"(v))
#else
#define HOLD(v)
#endif

INLINE v16 same(float x) { return (v16){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

/* Lanes of a, and from 16 on of b. Clang, and GCC from 12 on, know the first form. */
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (i16){__VA_ARGS__})
#endif

INLINE float sum(v16 v) {
    v += SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15);
    v += SHUFFLE(v, v, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7);
    v += SHUFFLE(v, v, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3);
    return v[0] + v[1];
}

/* Four numbers each whose sums are those of four vectors, side by side. */
INLINE v16 quarters(v16 a, v16 b, v16 c, v16 d) {
    v16 ab = SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
             SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    v16 cd = SHUFFLE(c, d, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
             SHUFFLE(c, d, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    return SHUFFLE(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           SHUFFLE(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}

/* The sums of four vectors, in lanes 0, 4, 8 and 12. */
INLINE v16 sums_of_four(v16 a, v16 b, v16 c, v16 d) {
    v16 v = quarters(a, b, c, d);
    v += SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return v + SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
}

/* The sums of two vectors' `quarters`, as pairs of numbers: of a and b in turn. */
INLINE v16 pairs_of(v16 a, v16 b) {
    return SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
           SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}

/* The sums of 16 vectors, in their order; each is taken in the same order. */
INLINE v16 sums_of_sixteen(v16 v[4][4]) {
    v16 ab = pairs_of(quarters(v[0][0], v[0][1], v[0][2], v[0][3]), quarters(v[1][0], v[1][1], v[1][2], v[1][3]));
    v16 cd = pairs_of(quarters(v[2][0], v[2][1], v[2][2], v[2][3]), quarters(v[3][0], v[3][1], v[3][2], v[3][3]));
    v16 sums = SHUFFLE(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               SHUFFLE(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    return SHUFFLE(sums, sums, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
}

/* The second of two where they do not compare. */
INLINE v16 greater(v16 a, v16 b) {
    i16 first = a > b;
    return (v16)(((i16)a & first) | ((i16)b & ~first));
}

INLINE float largest(v16 v) {
    v = greater(v, SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15));
    v = greater(v, SHUFFLE(v, v, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7));
    v = greater(v, SHUFFLE(v, v, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3));
    return v[0] > v[1] ? v[0] : v[1];
}

INLINE float from_f32(float x) { return x; }
INLINE float from_bf16(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE v16 load_f32(const float *p) {
    v16 v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE void store_f32(float *p, v16 v) { memcpy(p, &v, sizeof v); }

INLINE v16 load_bf16(const bf16 *p) {
    h16 half;
    memcpy(&half, p, sizeof half);
#ifdef __AVX512F__ /* of the general form GCC 12 makes six instructions */
    return (v16)((u16)_mm512_cvtepu16_epi32((__m256i)half) << 16);
#else
    return (v16)(__builtin_convertvector(half, u16) << 16);
#endif
}
/* To the nearest, ties to even, as torch rounds; NaN stays NaN. The instruction takes numbers below 1e-38 for 0. */
INLINE void store_bf16(bf16 *p, v16 v) {
#ifdef HAS_BF16
    __m256bh half = _mm512_cvtneps_pbh((__m512)v);
    memcpy(p, &half, sizeof half);
#else
    u16 bits = (u16)v;
    u16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    u16 nan = (u16)((bits & 0x7fffffff) > 0x7f800000);
    h16 half = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), h16);
    memcpy(p, &half, sizeof half);
#endif
}

/* The first n < 16 numbers of a row's end; the other lanes are 0. */
RARE v16 load_part_f32(const float *p, int n) {
    float s[LANES] = {0};
    memcpy(s, p, n * sizeof *p);
    return load_f32(s);
}
RARE void store_part_f32(float *p, v16 v, int n) { memcpy(p, &v, n * sizeof *p); }
RARE v16 load_part_bf16(const bf16 *p, int n) {
    bf16 s[LANES] = {0};
    memcpy(s, p, n * sizeof *p);
    return load_bf16(s);
}
RARE void store_part_bf16(bf16 *p, v16 v, int n) {
    bf16 s[LANES];
    store_bf16(s, v);
    memcpy(p, s, n * sizeof *p);
}

INLINE float to_f32(float x) { return x; }
INLINE bf16 to_bf16(float x) {
    bf16 s[LANES];
    store_bf16(s, same(x));
    return s[0];
}

/* Up to 16 of the n numbers that are left of a row. */
INLINE v16 load_some_f32(const float *p, long n) { return n >= LANES ? load_f32(p) : load_part_f32(p, (int)n); }
INLINE v16 load_some_bf16(const bf16 *p, long n) { return n >= LANES ? load_bf16(p) : load_part_bf16(p, (int)n); }
INLINE void store_some_f32(float *p, v16 v, long n) {
    if (n >= LANES) store_f32(p, v);
    else store_part_f32(p, v, (int)n);
}
INLINE void store_some_bf16(bf16 *p, v16 v, long n) {
    if (n >= LANES) store_bf16(p, v);
    else store_part_bf16(p, v, (int)n);
}

/* e^x to about one unit in the last place (Cephes' polynomial); 0 below -87, infinity above 88.7, NaN of NaN. */
INLINE v16 exponential(v16 x) {
    const float log2_e = 1.44269504088896341f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f, lowest = -87.0f;
#ifdef __AVX512F__
    __mmask16 above = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(lowest), _CMP_NLT_UQ);
    v16 clamped = (v16)_mm512_min_ps(_mm512_set1_ps(89.0f), (__m512)x); /* of NaN the second: it stays */
    v16 whole = (v16)_mm512_roundscale_ps((__m512)(clamped * same(log2_e)), _MM_FROUND_TO_NEAREST_INT);
#else
    v16 low = same(lowest), high = same(88.7f);
    i16 below = x < low, above = x > high;
    v16 clamped = (v16)(((i16)x & ~below & ~above) | ((i16)low & below) | ((i16)high & above));
    v16 magic = same(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
    v16 shifted = clamped * same(log2_e) + magic;
    v16 whole = shifted - magic;
#endif
    v16 rest = clamped - whole * same(ln2_high) - whole * same(ln2_low);
    v16 p = same(1.9875691500e-4f);
    p = p * rest + same(1.3981999507e-3f);
    p = p * rest + same(8.3334519073e-3f);
    p = p * rest + same(4.1665795894e-2f);
    p = p * rest + same(1.6666665459e-1f);
    p = p * rest + same(5.0000001201e-1f);
    p = p * rest * rest + rest + same(1.0f);
#ifdef __AVX512F__
    return (v16)_mm512_maskz_scalef_ps(above, (__m512)p, (__m512)whole);
#else
    i16 power = ((i16)shifted - (i16)magic + 127) << 23;
    v16 result = p * (v16)power;
    return (v16)(((i16)result & ~below & ~above) | ((i16)same(__builtin_inff()) & above));
#endif
}

/* What a product of two rows takes in one step: 16 numbers, or 32 in bfloat16 where the processor multiplies pairs. */
typedef v16 wide_f32;
#define WIDE_f32 LANES
#define load_wide_f32 load_f32
INLINE v16 add_products_f32(v16 sums, v16 x, v16 y) { return sums + x * y; }
#ifdef HAS_BF16
typedef __m512bh wide_bf16;
#define WIDE_bf16 (2 * LANES)
INLINE __m512bh load_wide_bf16(const bf16 *p) { return (__m512bh)_mm512_loadu_si512(p); }
INLINE v16 add_products_bf16(v16 sums, __m512bh x, __m512bh y) { return (v16)_mm512_dpbf16_ps((__m512)sums, x, y); }
#else
typedef v16 wide_bf16;
#define WIDE_bf16 LANES
#define load_wide_bf16 load_bf16
#define add_products_bf16 add_products_f32
#endif

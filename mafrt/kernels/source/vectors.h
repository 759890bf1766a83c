/* Vectors of 16 floats, and how numbers of a tensor become them. GCC and Clang lower them to what the processor has. */
#pragma once
#include <stdint.h>
#include <string.h>

typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef uint32_t u16 __attribute__((vector_size(64)));
typedef uint16_t h16 __attribute__((vector_size(32)));
typedef uint16_t bf16; /* the upper half of a float */

#define INLINE static inline __attribute__((always_inline))
#define RARE static __attribute__((noinline, unused)) /* a copy at each use would take long to compile */
#define LANES 16

INLINE v16 same(float x) { return (v16){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

INLINE float sum(v16 v) {
    v += __builtin_shuffle(v, (i16){8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15});
    v += __builtin_shuffle(v, (i16){4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7});
    v += __builtin_shuffle(v, (i16){2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3});
    return v[0] + v[1];
}

/* The second of two where they do not compare. */
INLINE v16 greater(v16 a, v16 b) {
    i16 first = a > b;
    return (v16)(((i16)a & first) | ((i16)b & ~first));
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
    return (v16)(__builtin_convertvector(half, u16) << 16);
}
/* To the nearest, ties to even, as torch rounds; NaN stays NaN. */
INLINE void store_bf16(bf16 *p, v16 v) {
    u16 bits = (u16)v;
    u16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    u16 nan = (u16)((bits & 0x7fffffff) > 0x7f800000);
    h16 half = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), h16);
    memcpy(p, &half, sizeof half);
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
    v16 low = same(-87.0f), high = same(88.7f);
    i16 below = x < low, above = x > high;
    v16 clamped = (v16)(((i16)x & ~below & ~above) | ((i16)low & below) | ((i16)high & above));
    v16 magic = same(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
    v16 shifted = clamped * same(1.44269504088896341f) + magic;
    v16 whole = shifted - magic;
    v16 rest = clamped - whole * same(0.693359375f) + whole * same(2.12194440e-4f);
    v16 p = same(1.9875691500e-4f);
    p = p * rest + same(1.3981999507e-3f);
    p = p * rest + same(8.3334519073e-3f);
    p = p * rest + same(4.1665795894e-2f);
    p = p * rest + same(1.6666665459e-1f);
    p = p * rest + same(5.0000001201e-1f);
    p = p * rest * rest + rest + same(1.0f);
    i16 power = ((i16)shifted - (i16)magic + 127) << 23;
    v16 result = p * (v16)power;
    return (v16)(((i16)result & ~below & ~above) | ((i16)same(__builtin_inff()) & above));
}

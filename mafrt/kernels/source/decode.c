/* The parts of a decode step beside its products with frozen weights: norms, adapters, rotation and attention,
 * activation. Arithmetic is in float32 whatever the model's number format is, and each number is rounded once. */
#include "vectors.h"
#include <math.h>

#define MOST_GROUP 4 /* queries of a key head that are computed side by side */
#define KEYS 256     /* whose scores exist at a time */

/* What a product of two rows takes in one step: 16 numbers, or 32 in bfloat16 where the processor multiplies pairs. */
typedef v16 wide_f32;
#define WIDE_f32 LANES
#define load_wide_f32 load_f32
INLINE v16 add_products_f32(v16 sums, v16 x, v16 y) { return sums + x * y; }
#ifdef __AVX512BF16__
#include <immintrin.h>
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

#define T float
#define OF(f) f##_f32
#include "decode_rows.h"
#undef T
#undef OF
#define T bf16
#define OF(f) f##_bf16
#include "decode_rows.h"

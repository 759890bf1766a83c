/* The parts of a decode step beside its products with frozen weights: norms, adapters, rotation and attention,
 * activation. Arithmetic is in float32 whatever the model's number format is, and each number is rounded once. */
#include "vectors.h"
#include <math.h>

#define MOST_GROUP 8 /* queries of a key head that are computed side by side */
#define KEYS 256     /* whose scores exist at a time */

/* Queries of the next turn, out of those that are left: only these numbers have a loop of their own. */
INLINE int some_of(long left) { return left >= 8 ? 8 : left == 6 ? 6 : left > 4 ? 4 : (int)left; }

#define T float
#define OF(f) f##_f32
#include "decode_rows.h"
#undef T
#undef OF
#define T bf16
#define OF(f) f##_bf16
#include "decode_rows.h"

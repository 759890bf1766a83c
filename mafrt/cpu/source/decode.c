/* The parts of a decode step beside its products: norms, rotation and attention, activation. Arithmetic is in float32
 * whatever the model's number format is, and each number is rounded once. */
#include "vectors.h"
#include <math.h>

#define MOST_GROUP 4 /* queries of a key head that are computed side by side */
#define KEYS 256     /* whose scores exist at a time */
#define MOST_VECTORS 4
#define LINE 64      /* bytes of the cache */
#define AHEAD 4096   /* bytes of keys, and of values, that are asked for ahead */

#define T float
#define OF(f) f##_f32
#include "decode_rows.h"
#undef T
#undef OF
#define T bf16
#define OF(f) f##_bf16
#include "decode_rows.h"

/* Drawing one token a row from logits, in two passes over them: the largest, then the sums of their exponentials by
 * blocks. Exponentials and the sums of blocks are float32, running sums are double. */
#include <math.h>

#include "tiles.h"

#define BLOCK 128 /* tokens whose sum is kept */

/* The block that begins at token `at`; the last one of a row is copied, with -infinity beyond its end. */
typedef union {
    float f32[BLOCK];
    bf16 half[BLOCK];
} Copy;
INLINE const void *block_of(const void *row, long at, long words, Copy *copy, int half) {
    if (words - at >= BLOCK) return half ? (const void *)((const bf16 *)row + at) : (const float *)row + at;
    for (long i = 0; i < BLOCK; i++) {
        if (half) copy->half[i] = at + i < words ? ((const bf16 *)row)[at + i] : 0xff80;
        else copy->f32[i] = at + i < words ? ((const float *)row)[at + i] : -INFINITY;
    }
    return copy;
}

/* The largest logit of a row; numbers that do not compare are left out. */
INLINE float largest_of(const void *row, long words, int half) {
    Copy copy;
    v16 top[4] = {same(-INFINITY), same(-INFINITY), same(-INFINITY), same(-INFINITY)};
    for (long at = 0; at < words; at += BLOCK) {
        const void *block = block_of(row, at, words, &copy, half);
#pragma GCC unroll 8
        for (int i = 0; i < BLOCK / LANES; i++) top[i % 4] = greater(load(block, i * LANES, LANES, half), top[i % 4]);
    }
    return largest(greater(greater(top[0], top[1]), greater(top[2], top[3])));
}

/* exp((x - top) / temperature); NaN where x is NaN, and everywhere if that is infinite. */
INLINE v16 weights(const void *block, int i, float top, float temperature, int plain, int half) {
    v16 shifted = load(block, i * LANES, LANES, half) - same(top);
    return exponential(plain ? shifted : shifted / same(temperature));
}

/* The first token at which the running sum exceeds `uniform` times the total, and its log-probability. */
INLINE void draw_of(const void *row, long words, float temperature, float uniform, int64_t *id, float *logprob,
                    float *total, int plain, int half) {
    Copy copy;
    float top = largest_of(row, words, half), sums[(words + BLOCK - 1) / BLOCK];
    double all = 0;
    for (long at = 0; at < words; at += BLOCK) {
        const void *block = block_of(row, at, words, &copy, half);
        v16 parts[2] = {same(0), same(0)};
#pragma GCC unroll 8
        for (int i = 0; i < BLOCK / LANES; i++) parts[i % 2] += weights(block, i, top, temperature, plain, half);
        all += sums[at / BLOCK] = sum(parts[0] + parts[1]);
    }
    *id = 0, *logprob = 0, *total = (float)all;
    if (!(all > 0)) return; /* NaN */
    /* A uniform number has 24 bits, so its product with the total stays below the total in double. */
    double target = uniform * all, before = 0;
    long at = 0;
    for (; before + sums[at / BLOCK] <= target; at += BLOCK) before += sums[at / BLOCK];
    const void *block = block_of(row, at, words, &copy, half);
    float each[BLOCK];
    for (int i = 0; i < BLOCK / LANES; i++)
        store_f32(each + i * LANES, weights(block, i, top, temperature, plain, half));
    /* The block's sum may be rounded up: the token is then the last one that has a probability. */
    long token = 0;
    for (long i = 0; i < BLOCK && before <= target; i++)
        if (each[i] > 0) token = i, before += each[i];
    *id = at + token;
    *logprob = (float)(((double)number(block, token, half) - top) / (plain ? 1 : temperature) - log(all));
}

/* The first of the largest logits; the total is finite if all but -infinity are, and one is. */
INLINE void greedy_of(const void *row, long words, int64_t *id, float *logprob, float *total, int half) {
    Copy copy;
    float top = largest_of(row, words, half);
    long first = -1;
    i16 bad = (i16)same(0);
    for (long at = 0; at < words; at += BLOCK) {
        const void *block = block_of(row, at, words, &copy, half);
        i16 found = (i16)same(0);
        for (int i = 0; i < BLOCK / LANES; i++) {
            v16 v = load(block, i * LANES, LANES, half);
            bad |= v != v;
            found |= v == same(top);
        }
        int any = 0;
        for (int i = 0; i < LANES; i++) any |= found[i];
        for (long i = 0; any && first < 0; i++)
            if (number(block, i, half) == top) first = at + i;
    }
    *id = first < 0 ? 0 : first, *logprob = 0, *total = top;
    for (int i = 0; i < LANES; i++)
        if (bad[i]) *total = NAN;
}

/* logits: [rows, words], ldx numbers from row to row. temperatures: 0 is greedy. uniforms: in [0, 1). totals: not
 * finite if a row holds NaN, infinity, or nothing but -infinity. */
void sample(const void *logits, long ldx, long rows, long words, const float *temperatures, const float *uniforms,
            int64_t *ids, float *logprobs, float *totals, int half, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long r = 0; r < rows; r++) {
        const void *row = half ? (const void *)((const bf16 *)logits + r * ldx) : (const float *)logits + r * ldx;
        float t = temperatures[r], u = uniforms[r];
#define DRAW(PLAIN, HALF) draw_of(row, words, t, u, ids + r, logprobs + r, totals + r, PLAIN, HALF)
        if (t == 0 && half) greedy_of(row, words, ids + r, logprobs + r, totals + r, 1);
        else if (t == 0) greedy_of(row, words, ids + r, logprobs + r, totals + r, 0);
        else if (t == 1 && half) DRAW(1, 1);
        else if (t == 1) DRAW(1, 0);
        else if (half) DRAW(0, 1);
        else DRAW(0, 0);
    }
}
